"""The two kinds of trajectory and one step of a rollout. Plain containers; no I/O."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch


@dataclass
class Trajectory:
    """A block of T steps in B parallel environments; may hold many episodes. Every field is optional.

    Shapes (A = action chunk x action dim, C = chunk length, E = number of rollout epochs):

    ========================================== =============== =====================================
    field                                      shape           note
    ========================================== =============== =====================================
    ``actions``, ``intervene_flags``           [T or T+E, B, A] each epoch may end with an extra row
    ``rewards``                                [T, B, C]
    ``terminations, truncations, dones``       [T or T+E, B, C] each epoch begins with a bootstrap row
    ``prev_logprobs``                          [T, B, A]       under the policy that acted
    ``prev_values``                            [T or T+E, B, 1] each epoch ends with a bootstrap row
    ``versions``                               [T or T+E, B, 1] weight version that acted; an extra row is ignored
    ``valid``                                  [T, B]          bool; False: never drawn or counted
    ``curr_obs``, ``next_obs``                 dict of [T, B, ...]  nested to any depth
    ``forward_inputs``                         dict of [T or T+E, B, ...]  as for actions
    ========================================== =============== =====================================

    Facts, samplers and retention use the whole part of ``versions``.
    Without ``valid`` all steps are valid. Invalid ones (the reset step of an environment) are stored and returned by
    ``get``, but belong to no batch, sequence or count of transitions.
    ``prev_logprobs`` or, without it, ``rewards`` defines T and B. ``max_episode_length`` is in steps;
    ``model_weights_id`` names the weights that acted; if absent, it is derived from ``versions``. Leaves of
    the dicts without a row for each step, which are tensors of fewer than two dimensions and JSON values (None,
    text, lists; see ``AgentTrajectory.metadata``), are stored with the trajectory, returned, and never sampled.
    Checked when the trajectory is added to a buffer, not here.

    ``notes`` holds late values by row (:func:`trajstore.annotate`), ``[T, B, ...]`` by name, in trajectories returned
    by a buffer; added ones have none.
    """

    max_episode_length: int = 0
    model_weights_id: str = ""
    actions: torch.Tensor | None = None
    intervene_flags: torch.Tensor | None = None
    rewards: torch.Tensor | None = None
    terminations: torch.Tensor | None = None
    truncations: torch.Tensor | None = None
    dones: torch.Tensor | None = None
    prev_logprobs: torch.Tensor | None = None
    prev_values: torch.Tensor | None = None
    versions: torch.Tensor | None = None
    valid: torch.Tensor | None = None
    forward_inputs: dict[str, Any] = field(default_factory=dict)
    curr_obs: dict[str, Any] = field(default_factory=dict)
    next_obs: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(kw_only=True)
class ChunkStepResult:
    """Result of one chunk step of B environments, without observations. All tensors are ``[B, ...]``.

    The fields are those of :class:`Trajectory`, without the steps: a tensor ``[T, B, ...]`` there is ``[B, ...]`` here.
    Tensors and NumPy arrays are copied, to contiguous memory of the CPU, so that an environment may reuse its own; dict
    leaves may be nested.
    """

    actions: torch.Tensor | None = None
    prev_logprobs: torch.Tensor | None = None
    prev_values: torch.Tensor | None = None
    dones: torch.Tensor | None = None
    truncations: torch.Tensor | None = None
    terminations: torch.Tensor | None = None
    rewards: torch.Tensor | None = None
    forward_inputs: dict[str, Any] = field(default_factory=dict)
    versions: torch.Tensor | None = None
    valid: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            setattr(self, item.name, copied(getattr(self, item.name)))


@dataclass(kw_only=True)
class Reward:
    """Outcome of an agent trajectory.

    ``outcome`` and ``success_rate`` are in [0, 1] by convention (1.0 = success; 1 and ``True`` become 1.0); ``None`` =
    unknown. ``description`` explains it in words; ``metadata`` is any JSON.
    """

    outcome: float | None = None
    success_rate: float | None = None
    description: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _empty_for_none(self, {"description": str, "metadata": dict})
        for name in ("outcome", "success_rate"):
            value = getattr(self, name)
            if isinstance(value, int) and -(2**53) <= value <= 2**53:
                setattr(self, name, float(value))


@dataclass(kw_only=True)
class AgentTrajectory:
    """One rollout of a language-model agent: token columns of this rollout's own length, and JSON.

    L = tokens of prompt and response, R = tokens of the response (from ``response_start`` on).

    ``input_ids``, ``attention_mask``, ``loss_mask`` are ``[L]`` integer tensors, ``loss_mask`` being 1
    on tokens that the model wrote; ``old_log_probs`` (natural logarithm, under the policy that sampled, as
    the trainer computes them), ``rollout_log_probs`` (the same, as the engine that sampled reported them),
    ``entropys`` (nats) and ``response_mask`` are ``[R]``, R = L - ``response_start``. ``messages`` is a
    list of dicts with ``role``, ``content`` and optionally ``author`` (``"llm"`` for the model).
    ``policy_version`` is the training step whose weights sampled. ``entropy`` is the mean of
    ``entropys`` where ``response_mask`` is 1. ``None`` always means unknown, never zero; for texts, lists and dicts
    it is the same as leaving them out.
    ``tokenizer_fingerprint`` identifies tokenizer and chat template.

    ``task_id`` names the rollout's task: rollouts of one task are a group. ``rollout_id`` names the rollout
    within its task, ``data_id`` the row of a dataset, ``query`` the user's request. ``is_terminated`` is true if
    the rollout ended by itself. ``reward`` is a :class:`Reward`.

    ``metadata``, ``messages`` and ``Reward.metadata`` are any JSON. They are returned as JSON types: tuples as
    lists, numpy's scalars and arrays as numbers and lists. Values without a JSON equivalent (NaN, dates, bytes, keys
    that are not strings, integers beyond 64 bits) are refused when the trajectory is added.

    ``notes`` holds late values by row (:func:`trajstore.annotate`), ``[L]`` or ``[R]`` by name, in rollouts returned
    by a buffer; added ones have none.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    input_ids: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    loss_mask: torch.Tensor | None = None
    response_start: int | None = None
    old_log_probs: torch.Tensor | None = None
    entropys: torch.Tensor | None = None
    response_mask: torch.Tensor | None = None
    rollout_log_probs: torch.Tensor | None = None
    reward: Reward | None = None
    task_id: str = ""
    data_id: str = ""
    rollout_id: str = ""
    query: str = ""
    is_terminated: bool | None = None
    policy_version: int | None = None
    entropy: float | None = None
    tokenizer_fingerprint: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _empty_for_none(self, _EMPTY)


_EMPTY = {
    **dict.fromkeys(("task_id", "data_id", "rollout_id", "query", "tokenizer_fingerprint"), str),
    **{"messages": list, "metadata": dict, "notes": dict},
}

TOKEN_COLUMNS = ("input_ids", "attention_mask", "loss_mask")
"""Fields of an :class:`AgentTrajectory` with a value per token."""
RESPONSE_COLUMNS = ("old_log_probs", "entropys", "response_mask", "rollout_log_probs")
"""Fields with a value per token of the response."""

AnyTrajectory = Trajectory | AgentTrajectory


def get_model_weights_id(versions: torch.Tensor) -> str:
    """Return the id of the weights that acted: a UUID (version 5) of the bytes of ``versions``.

    The same versions give the same id as in RLinf, so that file names agree.
    """
    data = versions.detach().cpu().contiguous().reshape(-1).view(torch.uint8)  # numpy does not support every dtype
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, data.numpy().tobytes().hex()))


def _empty_for_none(owner: Any, empty: Mapping[str, Callable[[], Any]]) -> None:
    for name, make in empty.items():
        if getattr(owner, name) is None:
            setattr(owner, name, make())


def copied(value: Any) -> Any:
    """Return a copy of ``value``, nested in any dicts, lists and tuples; tensors go to contiguous memory of the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    return type(value)(map(copied, value)) if type(value) in (list, tuple) else value
