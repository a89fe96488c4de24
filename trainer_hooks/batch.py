"""Builds the padded batch that a trainer takes, as plain tensors or a ``TensorDict``.

Prompts are padded on the left and responses on the right, so that every row is contiguous in its padded row: column
``P`` is the first response token of every row. With B rows and the longest prompt and response (or the requested
lengths) P and R::

    key                                                   shape       dtype     padding
    prompts                                               [B, P]      int64     pad token, left
    responses                                             [B, R]      int64     pad token, right
    input_ids                                             [B, P + R]  int64     pad token
    attention_mask, loss_mask, exp_mask                   [B, P + R]  int64     0
    position_ids                                          [B, P + R]  int64     0 left, last position right
    response_mask                                         [B, R]      int64     0
    recorded_old_log_probs                                [B, R]      float32   0
    recorded_mask                                         [B, R]      bool      False
    step_ids                                              [B, R]      int64     -1
    group_ids                                             [B]         int64
    task_ids, rollout_ids, uid, extras (not tensors)      [B]         object
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer_hooks.guidance import TrainMode
from trainer_hooks.masks import build_exp_mask, compute_response_mask
from trajstore._core.base.arguments import one_of, truth, whole, whole_or_none
from trajstore._core.columns.facts import session_of
from trajstore.errors import ConfigurationError, InvalidTrajectoryError, MissingDependencyError
from trajstore.trajectory import AgentTrajectory

GroupOffPolicy = Literal["shared", "separate"]

_RESPONSE_KEYS = ("responses", "response_mask", "recorded_old_log_probs", "recorded_mask", "step_ids")
_SEQUENCE_KEYS = ("input_ids", "attention_mask", "position_ids", "loss_mask", "exp_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """One row of a batch: a trajectory and its role in training.

    Attributes:
        trajectory: needs ``input_ids``, ``loss_mask`` and ``response_start``; ``attention_mask`` None means all ones.
        group_id: rows with the same number are one GRPO group; see :func:`assign_group_ids`.
        is_experience_replay: whether the trajectory is a history, replayed from the pool.
        add_exp: whether experience was put into the rollout's prompt.
        train_mode: whether training keeps or discards that part of the prompt.
        rollout: for a rollout with several rows: index of the rollout in the batch, index of the row in it, number of
            its rows. ``None``: this row is a rollout, or of the session in its metadata.
        extras: added to the batch's ``extras``, besides the flags above and the policy version.
    """

    trajectory: AgentTrajectory
    group_id: int
    is_experience_replay: bool = False
    add_exp: bool = False
    train_mode: TrainMode = "keep"
    rollout: tuple[int, int, int] | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_discarded(self) -> bool:
        """True for a fresh rollout that saw experience in its prompt and is trained on without it."""
        return self.add_exp and self.train_mode == "discard" and not self.is_experience_replay


@dataclass(frozen=True, slots=True)
class Batch:
    """A padded batch; keys, shapes and dtypes are those of the module's table.

    Attributes:
        tensors: by key.
        non_tensors: arrays of objects by key.
        prompt_lengths: [B] int64, prompt tokens of each row before padding.
        response_lengths: [B] int64, response tokens of each row before padding.
    """

    tensors: dict[str, Tensor]
    non_tensors: dict[str, npt.NDArray[np.object_]]
    prompt_lengths: Tensor
    response_lengths: Tensor

    @property
    def rollouts(self) -> Tensor:
        """[B] int64, the rollout of each row, from ``extras``: rows of one rollout share a number."""
        numbers: dict[object, int] = {}
        labels = [extras.get("rollout") for extras in self.non_tensors["extras"]]
        keys = [("row", row) if label is None else ("rollout", label[0]) for row, label in enumerate(labels)]
        return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys])


def assign_group_ids(
    task_positions: Sequence[int], is_experience_replay: Sequence[bool], group_offpolicy: GroupOffPolicy = "shared"
) -> list[int]:
    """Return the ``group_id`` of every row.

    Args:
        task_positions: for every row, the index of its task in the mixed batch.
        is_experience_replay: for every row, whether it is replayed.
        group_offpolicy: ``shared``: replayed rows are in their task's group; ``separate``: each is its own group.

    Raises:
        ConfigurationError: lengths differ, or ``group_offpolicy`` is unknown.
    """
    if len(task_positions) != len(is_experience_replay):
        raise ConfigurationError(
            f"is_experience_replay: {len(is_experience_replay)} entries for {len(task_positions)} of task_positions"
        )
    one_of("group_offpolicy", group_offpolicy, get_args(GroupOffPolicy))
    if group_offpolicy == "shared":
        return list(task_positions)
    free = max(task_positions, default=-1) + 1
    groups = []
    for position, replayed in zip(task_positions, is_experience_replay, strict=True):
        groups.append(free if replayed else position)
        free += replayed
    return groups


def build_batch(
    rows: Sequence[BatchRow], pad_token_id: int, *, prompt_length: int | None = None, response_length: int | None = None
) -> Batch:
    """Return the rows as one padded batch, in their order. Token ids and log-probs are copied unchanged.

    ``recorded_old_log_probs`` are the trajectory's ``old_log_probs``, also for fresh rows. ``recorded_mask`` is False
    where a row has none: past their end, where they are not finite, and on fresh rows whose experience is discarded,
    since these were sampled under another prompt than the one trained on. Surplus log-probs are cut off. ``step_ids``
    counts the model's turns from 0; a turn lasts until the next one begins, and positions before the first have -1.

    Args:
        rows: at least one.
        pad_token_id: written into ``prompts``, ``responses`` and ``input_ids`` where a row has no token.
        prompt_length: P; None: that of the longest prompt.
        response_length: R; None: that of the longest response.

    Raises:
        ConfigurationError: there are no rows, one is longer than requested, or a number is negative.
        InvalidTrajectoryError: a row lacks tokens, or its fields don't fit; names row and field.
    """
    whole("pad_token_id", pad_token_id, 0)
    whole_or_none("prompt_length", prompt_length, 0)
    whole_or_none("response_length", response_length, 0)
    if not rows:
        raise ConfigurationError("rows: empty, a batch needs at least one")
    spans = [_span(number, row.trajectory) for number, row in enumerate(rows)]
    prompts = _padded_length("prompt_length", prompt_length, [start for start, _ in spans])
    responses = _padded_length("response_length", response_length, [length - start for start, length in spans])
    shape = (len(rows), prompts + responses)

    input_ids = torch.full(shape, pad_token_id, dtype=torch.int64)
    attention_mask, loss_mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    recorded = torch.zeros(len(rows), responses, dtype=torch.float32)
    recorded_lengths = []
    # Row by row through numpy: for a few hundred values, slicing a tensor costs more than the copy.
    ids_out, attention_out, loss_out = input_ids.numpy(), attention_mask.numpy(), loss_mask.numpy()
    recorded_out = recorded.numpy()
    for number, (row, (start, length)) in enumerate(zip(rows, spans, strict=True)):
        trajectory = row.trajectory
        place = slice(prompts - start, prompts - start + length)
        ids_out[number, place] = _values(number, "input_ids", trajectory.input_ids, length)
        loss_out[number, place] = _values(number, "loss_mask", trajectory.loss_mask, length)
        if trajectory.attention_mask is None:
            attention_out[number, place] = 1
        else:
            attention_out[number, place] = _values(number, "attention_mask", trajectory.attention_mask, length)
        count = 0
        if trajectory.old_log_probs is not None and not row.is_discarded:
            log_probs = _values(number, "old_log_probs", trajectory.old_log_probs, None)
            count = min(len(log_probs), length - start)
            recorded_out[number, :count] = log_probs[:count]
        recorded_lengths.append(count)

    prompt_lengths = torch.tensor([start for start, _ in spans])
    response_lengths = torch.tensor([length - start for start, length in spans])
    position = torch.arange(responses)
    recorded_mask = (position < torch.tensor(recorded_lengths)[:, None]) & recorded.isfinite()
    if not recorded.isfinite().all():
        recorded = torch.where(recorded_mask, recorded, 0.0)
    response_mask = _copy(compute_response_mask(loss_mask, responses))
    replayed = torch.tensor([row.is_experience_replay for row in rows])
    discarded = torch.tensor([row.is_discarded for row in rows])
    tensors = {
        "prompts": _copy(input_ids[:, :prompts]),
        "responses": _copy(input_ids[:, prompts:]),
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": attention_mask.cumsum(dim=-1).sub_(1).clamp_(min=0),
        "loss_mask": loss_mask,
        "exp_mask": build_exp_mask(loss_mask, attention_mask, prompts, replayed, discarded),
        "response_mask": response_mask,
        "group_ids": torch.tensor([row.group_id for row in rows]),
        "recorded_old_log_probs": recorded,
        "recorded_mask": recorded_mask,
        "step_ids": _step_ids(response_mask, position < response_lengths[:, None]),
    }
    non_tensors = {
        "task_ids": _objects([row.trajectory.task_id for row in rows]),
        "rollout_ids": _objects([row.trajectory.rollout_id for row in rows]),
        "uid": _objects([str(row.group_id) for row in rows]),
        "extras": _objects([_extras(row) for row in rows]),
    }
    return Batch(tensors, non_tensors, prompt_lengths, response_lengths)


def to_tensordict(batch: Batch, *, jagged: bool = False) -> Any:
    """Return the batch as a ``TensorDict`` of batch size [B], with non-tensors as ``NonTensorStack``.

    Args:
        batch: from :func:`build_batch`; dense tensors are shared with it.
        jagged: no padding: every key with a token axis becomes a nested tensor of layout ``torch.jagged``, whose rows
            are the prompt's, the response's or all tokens of the row.

    Raises:
        MissingDependencyError: tensordict is not installed.
    """
    try:
        from tensordict import NonTensorStack, TensorDict
    except ImportError as error:
        raise MissingDependencyError("tensordict", "verl") from error
    tensors = _jagged(batch) if truth("jagged", jagged) else dict(batch.tensors)
    stacks = {name: NonTensorStack(*values) for name, values in batch.non_tensors.items()}
    return TensorDict({**tensors, **stacks}, batch_size=[len(batch.prompt_lengths)])


def _span(number: int, trajectory: AgentTrajectory) -> tuple[int, int]:
    """Return the numbers of prompt tokens and of all tokens of a row."""
    start = trajectory.response_start
    if trajectory.input_ids is None or trajectory.loss_mask is None or start is None:
        lacking = [name for name in ("input_ids", "loss_mask", "response_start") if getattr(trajectory, name) is None]
        raise InvalidTrajectoryError(
            f"row {number}, task {trajectory.task_id!r}: lacks {', '.join(lacking)}; tokenize its messages first"
        )
    length = trajectory.input_ids.numel()
    if not 0 <= start <= length:
        raise InvalidTrajectoryError(
            f"row {number}, task {trajectory.task_id!r}: response_start {start}, must be in [0, L] with L = {length}"
        )
    return start, length


def _padded_length(name: str, wanted: int | None, lengths: Sequence[int]) -> int:
    """Return the padded length: the requested one, or else the longest."""
    longest = max(lengths)
    if wanted is None:
        return longest
    if longest > wanted:
        raise ConfigurationError(
            f"{name}: {wanted}, but row {lengths.index(longest)} has {longest} tokens; leave it out or raise the length"
        )
    return wanted


def _values(number: int, name: str, tensor: Tensor | None, length: int | None) -> npt.NDArray[Any]:
    """Return a row's column as an array; ``length``, if given, is its required number of values."""
    if tensor is None or tensor.dim() != 1 or (length is not None and tensor.shape[0] != length):
        shape = None if tensor is None else list(tensor.shape)
        wanted = "one dimension" if length is None else f"shape [{length}] as input_ids"
        raise InvalidTrajectoryError(f"row {number}: {name} has shape {shape}, must have {wanted}")
    if tensor.dtype == torch.bfloat16:  # numpy has no bfloat16
        tensor = tensor.float()
    return tensor.numpy(force=True)


def _copy(part: Tensor) -> Tensor:
    """Return a contiguous copy; ``contiguous()`` alone would share an already contiguous part."""
    return part.clone(memory_format=torch.contiguous_format)


def _step_ids(response_mask: Tensor, is_token: Tensor) -> Tensor:
    """Return the model's turn that each response token belongs to, [B, R]; -1 before the first turn."""
    written = response_mask.bool()
    begins = written.clone()
    begins[:, 1:] &= ~written[:, :-1]
    return begins.cumsum(dim=-1).sub_(1).masked_fill_(~is_token, -1)


def _extras(row: BatchRow) -> dict[str, Any]:
    return {
        "is_experience_replay": row.is_experience_replay,
        "add_exp": row.add_exp,
        "task_train_expmode": row.train_mode,
        "policy_version": row.trajectory.policy_version,
        **({} if (rollout := row.rollout or _of_session(row)) is None else {"rollout": rollout}),
        **row.extras,
    }


def _of_session(row: BatchRow) -> tuple[Hashable, int, int] | None:
    """Return ``rollout`` of a session's row that was given alone, with a name instead of the rollout's number."""
    session = session_of(row.trajectory.metadata)
    return None if session is None or session[2] == 1 else ((row.group_id, session[0]), *session[1:])


def _objects(values: Sequence[object]) -> npt.NDArray[np.object_]:
    """Return a one-dimensional array of any objects."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def _jagged(batch: Batch) -> dict[str, Tensor]:
    """Return the tensors without padding, nested where they have a token axis."""
    width = batch.tensors["prompts"].shape[1]
    first = width - batch.prompt_lengths
    result = dict(batch.tensors)
    for names, start, lengths in (
        (("prompts",), first, batch.prompt_lengths),
        (_RESPONSE_KEYS, torch.zeros_like(first), batch.response_lengths),
        (_SEQUENCE_KEYS, first, batch.prompt_lengths + batch.response_lengths),
    ):
        # Operations combine nested tensors only if they share their offsets.
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        shortest, longest = int(lengths.min()), int(lengths.max())
        position = torch.arange(batch.tensors[names[0]].shape[1])
        keep = (position >= start[:, None]) & (position < (start + lengths)[:, None])
        for name in names:
            result[name] = torch.nested.nested_tensor_from_jagged(
                batch.tensors[name][keep], offsets, min_seqlen=shortest, max_seqlen=longest
            )
    return result
