"""Replay in a trainer that passes verl's ``DataProto`` between calls (``fit`` of verl's older trainers, and forks).

Such a trainer reorders its rows and sends copies of them to workers. So these functions read every row's values from
the ``DataProto`` itself, never from the original batch. Two keys are added::

    batch["current_old_log_probs"]      [B, R]  old_log_probs under the current policy
    meta_info["replay_loss_options"]            the configuration's loss options

Only :func:`to_dataproto` imports verl.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainer_hooks.batch import Batch
from trainer_hooks.hook import ReplayHook
from trainer_hooks.losses import LossOptions
from trainer_hooks.masks import compute_response_mask
from trajstore.errors import ConfigurationError, MissingDependencyError
from trajstore.trajectory import AgentTrajectory

if TYPE_CHECKING:
    from verl import DataProto

CURRENT_OLD_LOG_PROBS = "current_old_log_probs"
LOSS_OPTIONS = "replay_loss_options"

_HOOK_KEYS = ("attention_mask", "responses", "response_mask", "exp_mask", "recorded_old_log_probs", "recorded_mask")
_HOOK_NON_TENSOR_KEYS = ("task_ids", "rollout_ids", "extras")


class LossArguments(LossOptions):
    """Keyword arguments for ``het_compute_token_on_off_policy_loss``; tensors are [M, R]."""

    old_log_prob: Tensor
    advantages: Tensor
    response_mask: Tensor
    exp_mask: Tensor


def to_dataproto(batch: Batch) -> DataProto:
    """Return the batch as verl's ``DataProto``, with ``Batch.rollouts`` as ``rollouts``; tensors are shared.

    If rollouts have several rows (``linear_think``), verl's own ``compute_advantage`` counts rows. Call
    ``advantages.compute_grpo_outcome_advantage`` with ``rollouts=data.batch["rollouts"]`` instead.

    Raises:
        MissingDependencyError: verl is not installed.
    """
    try:
        from verl import DataProto
    except ImportError as error:
        raise MissingDependencyError("verl", "verl") from error
    data: DataProto = DataProto.from_dict(
        tensors={**batch.tensors, "rollouts": batch.rollouts}, non_tensors=dict(batch.non_tensors)
    )
    return data


def batch_of(data: DataProto) -> Batch:
    """Return the current rows of the ``DataProto`` as the :class:`Batch` that a ``ReplayHook`` takes.

    Tensors are shared. A row's lengths reach from its first to its last token with attention.

    Raises:
        ConfigurationError: a key that the hook reads is absent.
    """
    if not hasattr(data, "batch") or not hasattr(data, "non_tensor_batch"):
        raise ConfigurationError(f"data: a {type(data).__name__}, must be a DataProto; to_dataproto returns one")
    _require("data.batch", data.batch.keys(), _HOOK_KEYS)
    _require("data.non_tensor_batch", data.non_tensor_batch, _HOOK_NON_TENSOR_KEYS)
    tensors = {name: tensor for name, tensor in data.batch.items() if name != "rollouts"}  # redundant with extras
    attended = tensors["attention_mask"].bool()
    responses = tensors["responses"].shape[1]
    prompt, response = attended[:, : attended.shape[1] - responses], compute_response_mask(attended, responses)
    return Batch(
        tensors,
        dict(data.non_tensor_batch),
        prompt_lengths=(prompt.cumsum(dim=-1) > 0).sum(dim=-1),
        response_lengths=(response.flip(-1).cumsum(dim=-1) > 0).sum(dim=-1),
    )


def replace_old_log_probs(data: DataProto, hook: ReplayHook[Any]) -> None:
    """Replace ``old_log_probs`` by recorded ones as the hook decides; call it once, after computing them.

    The old values are kept as ``current_old_log_probs``, for :func:`step_done`. The loss options go into ``meta_info``,
    which reaches the workers.

    Args:
        data: with ``old_log_probs`` [B, R] under the current policy; changed.
        hook: its configuration decides (``enable``, ``exp_is_correct``); it collects figures.

    Raises:
        ConfigurationError: a key is absent, or the log-probs have been replaced before.
    """
    _require("data.batch", data.batch.keys(), ("old_log_probs",))
    if CURRENT_OLD_LOG_PROBS in data.batch.keys():  # noqa: SIM118  # a TensorDict has no "in"
        raise ConfigurationError(f"data.batch: has {CURRENT_OLD_LOG_PROBS}; replace old_log_probs only once per step")
    current = data.batch["old_log_probs"]
    data.batch["old_log_probs"] = hook.log_probs_computed(batch_of(data), current)
    data.batch[CURRENT_OLD_LOG_PROBS] = current
    data.meta_info[LOSS_OPTIONS] = hook.loss_options


def loss_arguments(tensors: Mapping[str, Tensor], meta_info: Mapping[str, Any]) -> LossArguments:
    """Return the loss arguments from a (micro-)batch: all but ``log_prob`` and the clip range. Needs no hook.

    Args:
        tensors: ``batch`` of a ``DataProto``, or another mapping, with ``old_log_probs``, ``advantages``,
            ``response_mask`` [M, R] and ``exp_mask`` [M, P + R].
        meta_info: of the ``DataProto``, with the loss options from :func:`replace_old_log_probs`.

    Raises:
        ConfigurationError: a key is absent.
    """
    _require("tensors", tensors.keys(), ("old_log_probs", "advantages", "response_mask", "exp_mask"))
    _require("meta_info", meta_info, (LOSS_OPTIONS,))
    options: LossOptions = meta_info[LOSS_OPTIONS]
    response_mask = tensors["response_mask"]
    return {
        **options,
        "old_log_prob": tensors["old_log_probs"],
        "advantages": tensors["advantages"],
        "response_mask": response_mask,
        "exp_mask": compute_response_mask(tensors["exp_mask"], response_mask.shape[1]),
    }


def step_done(
    data: DataProto, fresh: Sequence[AgentTrajectory], hook: ReplayHook[Any], asked: Mapping[str, int] | None = None
) -> dict[str, float]:
    """Admit the step's rollouts to the pool, and return the step's metrics; see ``ReplayHook.step_done``.

    Args:
        data: every row once, in any order, with ``current_old_log_probs`` and ``entropys`` [B, R].
        fresh: the rollouts made; not changed.
        hook: the hook that planned them.
        asked: as for ``ReplayHook.rollouts_done``.

    Raises:
        ConfigurationError: a key is absent.
        InvalidTrajectoryError: a rollout is not in the data, or is there twice (padding that was not removed).
        StoreWriteError: the pool's store could not write.
    """
    _require("data.batch", data.batch.keys(), (CURRENT_OLD_LOG_PROBS, "entropys"))
    return hook.step_done(batch_of(data), fresh, data.batch[CURRENT_OLD_LOG_PROBS], data.batch["entropys"], asked)


_REMEDIES = {
    CURRENT_OLD_LOG_PROBS: "call replace_old_log_probs first",
    LOSS_OPTIONS: "call replace_old_log_probs before the data go to the workers, and hand meta_info on",
    "old_log_probs": "join what the pass for log-probs returned first",
    "entropys": "let the pass for log-probs compute them, and don't pop them",
    "advantages": "compute them first",
}


def _require(where: str, present: Iterable[str], names: Sequence[str]) -> None:
    """Raise ConfigurationError unless all names are present."""
    held = set(present)
    if lacking := [name for name in names if name not in held]:
        remedy = _REMEDIES.get(lacking[0], "to_dataproto puts it there: don't pop it, and select it too")
        raise ConfigurationError(f"{where}: lacks {', '.join(lacking)}; {remedy}")
