"""Builds trajectories from the step results that a rollout worker collects."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import torch

from trajstore._core.columns.fields import DICT_FIELDS, TENSOR_FIELDS
from trajstore._core.columns.values import from_numpy
from trajstore.errors import InvalidTrajectoryError
from trajstore.trajectory import ChunkStepResult, Trajectory, copied, get_model_weights_id


class EmbodiedRolloutResult:
    """Collects the steps of B parallel environments and makes a :class:`Trajectory` ``[T, B, ...]`` of them.

    ``append_step_result`` adds one chunk step; ``append_transitions`` the observations around it. Fields that
    a step result leaves out are not collected for that step, so ``dones`` (and its kin) and ``prev_values`` may
    be given once more per rollout epoch than the rest, as bootstrap rows. Everything is copied, so environments
    may reuse the memory of their tensors and arrays.

    Args:
        max_episode_length: longest possible episode, in steps; copied to every trajectory.
    """

    def __init__(self, max_episode_length: int = 0) -> None:
        self.max_episode_length = max_episode_length
        self.clear()

    def __len__(self) -> int:
        """Number of steps collected."""
        return max(len(self._steps["actions"]), len(self._steps["rewards"]))

    def clear(self) -> None:
        """Drop all steps."""
        self._steps: dict[str, list[torch.Tensor]] = {name: [] for name in TENSOR_FIELDS}
        self._dicts: dict[str, list[dict[str, Any]]] = {name: [] for name in DICT_FIELDS}
        self._model_action_holds = True

    def append_step_result(self, result: ChunkStepResult) -> None:
        """Add the result of one chunk step. With actions, ``intervene_flags`` of that step start as all False."""
        for item in fields(result):
            value = getattr(result, item.name)
            if item.name == "forward_inputs":
                if value:
                    self._dicts["forward_inputs"].append(_tensors("forward_inputs", value))
            elif value is not None:
                self._steps[item.name].append(_tensors(item.name, value))
        if result.actions is not None:
            self._steps["intervene_flags"].append(torch.zeros_like(self._steps["actions"][-1], dtype=torch.bool))

    def append_transitions(self, curr_obs: Mapping[str, Any], next_obs: Mapping[str, Any]) -> None:
        """Add the observations before and after a step: (nested) dicts of ``[B, ...]`` tensors or arrays.

        Other leaves (task descriptions) are left out, with a warning that names them: they have no time axis.
        """
        self._dicts["curr_obs"].append(_observation("curr_obs", curr_obs))
        self._dicts["next_obs"].append(_observation("next_obs", next_obs))

    def mark_last_step_with_intervene_flags(self, intervene_flags: torch.Tensor) -> None:
        """Mark where a human acted in the last step; before the first step with actions, do nothing.

        Args:
            intervene_flags: ``[B]``, or ``[B, chunks]`` with a flag for each action of the chunk.

        Raises:
            InvalidTrajectoryError: the shape does not divide the actions.
        """
        if not self._steps["actions"]:
            return
        self._steps["intervene_flags"][-1] = self._expanded(intervene_flags)

    def mark_last_step_truncated(self, mask: torch.Tensor) -> None:
        """Mark the last step of some environments as truncated, unless it ended an episode; without steps, do nothing.

        Args:
            mask: ``[B]``.
        """
        if not self._steps["dones"]:
            return
        dones = self._steps["dones"][-1]
        new = mask.reshape(-1, *[1] * (dones.dim() - 1)) & ~dones
        for name in ("dones", "truncations"):
            if self._steps[name]:
                self._steps[name][-1] = self._steps[name][-1] | new

    def update_last_actions(self, intervene_actions: torch.Tensor, intervene_flags: torch.Tensor) -> None:
        """Replace the last step's actions with a human's where the flags are set, and mark them.

        ``forward_inputs["action"]`` of that step is replaced too; ``forward_inputs["model_action"]`` is dropped from
        the trajectory, since it was not executed. Before the first step with actions, this does nothing.

        Args:
            intervene_actions: ``[B, A]``.
            intervene_flags: ``[B]`` or ``[B, chunks]``.

        Raises:
            InvalidTrajectoryError: shapes do not fit.
        """
        if not self._steps["actions"]:
            return
        flags = self._expanded(intervene_flags)
        last = self._steps["actions"][-1]
        given = intervene_actions.detach().cpu()
        if given.shape != last.shape:
            raise InvalidTrajectoryError(f"intervene_actions: shape {list(given.shape)}, must be {list(last.shape)}")
        merged = torch.where(flags, given.to(last.dtype), last)
        self._steps["actions"][-1] = merged
        self._steps["intervene_flags"][-1] = flags
        if self._dicts["forward_inputs"]:
            inputs = self._dicts["forward_inputs"][-1]
            if "action" in inputs:
                inputs["action"] = merged
            self._model_action_holds = False

    def _expanded(self, flags: torch.Tensor) -> torch.Tensor:
        """Return flags ``[B]`` or ``[B, chunks]`` for every entry of the last actions, ``[B, A]``."""
        last = self._steps["actions"][-1]
        flags = flags.detach().to("cpu", torch.bool)
        if flags.dim() == 1:
            flags = flags[:, None]
        width = last[0].numel() if len(last) else 0
        if flags.dim() != 2 or flags.shape[0] != last.shape[0] or flags.shape[1] == 0 or width % flags.shape[1]:
            raise InvalidTrajectoryError(
                f"intervene_flags: shape {list(flags.shape)} does not divide actions of shape {list(last.shape)}"
            )
        return flags.repeat_interleave(width // flags.shape[1], dim=1).reshape(last.shape)

    def to_trajectory(self) -> Trajectory:
        """Return all steps as one trajectory; ``model_weights_id`` is derived from ``versions``.

        Raises:
            InvalidTrajectoryError: steps of one field differ in shape or dtype; names the field and the step.
        """
        trajectory = Trajectory(max_episode_length=self.max_episode_length)
        for name, steps in self._steps.items():
            if steps:
                setattr(trajectory, name, _stacked(name, steps))
        for name, dicts in self._dicts.items():
            if dicts:
                setattr(trajectory, name, _stacked_dicts(name, dicts))
        if not self._model_action_holds:
            trajectory.forward_inputs.pop("model_action", None)
        versions = trajectory.versions if trajectory.versions is not None else torch.zeros(1)
        trajectory.model_weights_id = get_model_weights_id(versions)
        return trajectory

    def to_splited_trajectories(self, split_size: int) -> list[Trajectory]:
        """Split the trajectory into ``split_size`` parts along B, the first ones larger if B does not divide.

        Raises:
            InvalidTrajectoryError: there are fewer environments than parts.
        """
        whole = self.to_trajectory()
        batch = _batch_of(whole)
        if not 1 <= split_size <= batch:
            raise InvalidTrajectoryError(f"split_size: {split_size}, must be in [1, B] with B = {batch}")
        each = -(-batch // split_size)
        sizes = [each] * (batch // each) + ([batch % each] if batch % each else [])
        if len(sizes) != split_size:
            low, more = divmod(batch, split_size)
            sizes = [low + 1] * more + [low] * (split_size - more)
        return _split(whole, sizes)

    def to_splited_trajectories_by_sizes(self, split_sizes: Sequence[int]) -> list[Trajectory]:
        """Split the trajectory into parts of these numbers of environments.

        Raises:
            InvalidTrajectoryError: the sizes do not add up to B, or one is not positive.
        """
        whole = self.to_trajectory()
        batch = _batch_of(whole)
        if sum(split_sizes) != batch or any(size < 1 for size in split_sizes):
            raise InvalidTrajectoryError(
                f"split_sizes: {list(split_sizes)}, must be positive and add up to B = {batch}"
            )
        return _split(whole, list(split_sizes))


def _batch_of(trajectory: Trajectory) -> int:
    for name in TENSOR_FIELDS:
        value = getattr(trajectory, name)
        if value is not None:
            return int(value.shape[1])
    raise InvalidTrajectoryError("no steps were collected")


def _split(whole: Trajectory, sizes: list[int]) -> list[Trajectory]:
    parts = [Trajectory(whole.max_episode_length, whole.model_weights_id) for _ in sizes]
    for name in TENSOR_FIELDS:
        value = getattr(whole, name)
        if value is not None:
            for part, piece in zip(parts, value.split(sizes, dim=1), strict=True):
                setattr(part, name, piece.contiguous())
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    for name in DICT_FIELDS:
        for part, start, size in zip(parts, starts, sizes, strict=True):
            setattr(part, name, _mapped(getattr(whole, name), partial(_columns, start=start, size=size)))
    return parts


def _columns(tensor: torch.Tensor, start: int, size: int) -> torch.Tensor:
    return tensor[:, start : start + size].contiguous()


def _mapped(value: Mapping[str, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    return {
        key: _mapped(item, change)
        if isinstance(item, Mapping)
        else change(item)
        if isinstance(item, torch.Tensor)
        else item
        for key, item in value.items()
    }


def _tensors(name: str, value: Any) -> Any:
    """Return a copy of ``value``, nested in any dicts, with tensors instead of arrays."""
    if isinstance(value, Mapping):
        return {key: _tensors(f"{name}.{key}", item) for key, item in value.items()}
    value = copied(value)
    return from_numpy(name, value) if isinstance(value, np.ndarray) else value


def _observation(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result[key] = _observation(f"{name}.{key}", value)
        elif isinstance(value, torch.Tensor | np.ndarray):
            result[key] = _tensors(f"{name}.{key}", value)
        else:
            warnings.warn(
                f"{name}.{key} is left out: observations are tensors or arrays, this is {type(value).__name__}",
                stacklevel=3,
            )
    return result


def _stacked(name: str, steps: Sequence[torch.Tensor]) -> torch.Tensor:
    first = steps[0]
    for number, step in enumerate(steps):
        if step.shape != first.shape or step.dtype != first.dtype:
            raise InvalidTrajectoryError(
                f"field {name}: step {number} is {step.dtype} {list(step.shape)}, "
                f"step 0 is {first.dtype} {list(first.shape)}"
            )
    return torch.stack(list(steps))


def _stacked_dicts(name: str, dicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    keys = dicts[0].keys()
    for number, item in enumerate(dicts):
        if item.keys() != keys:
            raise InvalidTrajectoryError(
                f"field {name}: step {number} has keys {sorted(item)}, step 0 has {sorted(keys)}"
            )
    stacked: dict[str, Any] = {}
    for key in keys:
        values = [item[key] for item in dicts]
        path = f"{name}.{key}"
        if isinstance(values[0], Mapping):
            stacked[key] = _stacked_dicts(path, values)
        elif isinstance(values[0], torch.Tensor):
            stacked[key] = _stacked(path, values)
        else:
            stacked[key] = values
    return stacked
