"""Trajectories and their builder with the members that RLinf's workers call. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from trajstore import trajectory as plain
from trajstore._core.columns.fields import DICT_FIELDS, FIRST_ROW_EXTRA, TENSOR_FIELDS, axis_of, join_name
from trajstore.builder import EmbodiedRolloutResult
from trajstore.errors import ConfigurationError, InvalidTrajectoryError


class Trajectory(plain.Trajectory):
    """A :class:`trajstore.Trajectory` from which human interventions can be extracted."""

    def extract_intervene_traj(self, mode: Literal["any", "all"] = "any") -> list[Trajectory] | None:
        """Return the steps with human intervention for each environment that has any, ``[n, 1, ...]``.

        ``versions`` are dropped, as in RLinf. With one rollout epoch, dones and related fields keep their bootstrap
        row, so they have n + 1 rows. With several epochs they have n, because bootstrap rows could not be distinguished
        from steps if epochs contribute different numbers of steps. Extra rows of other fields are dropped.

        Args:
            mode: whether a step counts if any of its ``intervene_flags`` is set, or only if all are.

        Returns:
            None if no flag is set.

        Raises:
            ConfigurationError: the mode is unknown.
            InvalidTrajectoryError: a field has neither T nor T + E rows.
        """
        if mode not in ("any", "all"):
            raise ConfigurationError(f"extract_intervene_traj: mode {mode!r}, must be 'any' or 'all'")
        if self.intervene_flags is None:
            return None
        steps = steps_of(self)
        flags = without_extra("intervene_flags", self.intervene_flags, steps)
        chosen = flags.any(dim=-1) if mode == "any" else flags.all(dim=-1)
        parts = [self._steps_of_one(steps, chosen[:, at], at) for at in range(chosen.shape[1]) if chosen[:, at].any()]
        return parts or None

    def _steps_of_one(self, steps: int, chosen: torch.Tensor, environment: int) -> Trajectory:
        def of_field(name: str, value: torch.Tensor) -> torch.Tensor:
            rows = value[:, environment : environment + 1]
            if name in FIRST_ROW_EXTRA and value.shape[0] == steps + 1:
                return rows[torch.cat([torch.ones(1, dtype=torch.bool), chosen])]
            return without_extra(name, rows, steps)[chosen]

        part = Trajectory(self.max_episode_length, self.model_weights_id)
        for name in TENSOR_FIELDS:
            value = getattr(self, name)
            if value is not None and name != "versions":
                setattr(part, name, of_field(name, value))
        for name in DICT_FIELDS:
            setattr(part, name, each_tensor(getattr(self, name), (name,), of_field))
        return part


def steps_of(trajectory: plain.Trajectory) -> int:
    """Return T of a trajectory.

    Raises:
        InvalidTrajectoryError: it has neither of the fields that give T.
    """
    for value in (trajectory.prev_logprobs, trajectory.rewards):
        if value is not None:
            return int(value.shape[0])
    raise InvalidTrajectoryError("a trajectory needs prev_logprobs or rewards: one of them gives T and B")


def without_extra(name: str, value: torch.Tensor, steps: int) -> torch.Tensor:
    """Return a field's T rows, without the extra row of each epoch."""
    _, extra = axis_of(name, value.shape[0], steps)
    if not extra:
        return value
    epochs = value.reshape(extra, steps // extra + 1, *value.shape[1:])
    kept = epochs[:, 1:] if name in FIRST_ROW_EXTRA else epochs[:, :-1]
    return kept.reshape(steps, *value.shape[1:])


def each_tensor(
    values: Mapping[str, Any], path: tuple[str, ...], change: Callable[[str, torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    """Apply a function to every tensor of a nested dict that has rows and environments; keep the rest."""
    return {
        key: each_tensor(item, (*path, key), change)
        if isinstance(item, Mapping)
        else change(join_name((*path, key)), item)
        if isinstance(item, torch.Tensor) and item.dim() >= 2
        else item
        for key, item in values.items()
    }


def flatten_trajectory(trajectory: plain.Trajectory) -> dict[str, Any]:
    """Return a trajectory's tensors by field as ``[rows * B, ...]``, as RLinf's ``_flatten_trajectory`` does.

    Dones and related fields lose their bootstrap rows; other fields keep all rows: ``actions`` with T + E rows give
    (T + E) * B. Invalid steps, which RLinf does not know, keep their rows (t * B + b), as RLinf's code expects; the
    field ``valid`` marks them, and ``num_samples`` of the index does not count them.

    Raises:
        InvalidTrajectoryError: a field has neither T nor T + E rows.
    """
    steps = steps_of(trajectory)

    def flat(name: str, value: torch.Tensor) -> torch.Tensor:
        return (without_extra(name, value, steps) if name in FIRST_ROW_EXTRA else value).flatten(0, 1)

    values = {name: getattr(trajectory, name, None) for name in TENSOR_FIELDS}  # RLinf's class has no ``valid``
    result: dict[str, Any] = {
        name: flat(name, value) for name, value in values.items() if value is not None and value.dim() >= 2
    }
    for name in ("curr_obs", "next_obs", "forward_inputs"):
        nested = getattr(trajectory, name)
        if nested:
            result[name] = _tensors_only(each_tensor(nested, (name,), flat), nested)
    return result


def _tensors_only(values: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _tensors_only(item, before[key]) if isinstance(item, Mapping) else item
        for key, item in values.items()
        if isinstance(item, Mapping) or (isinstance(item, torch.Tensor) and before[key].dim() >= 2)
    }


def convert_trajectories_to_batch(trajectories: Sequence[plain.Trajectory]) -> dict[str, Any]:
    """Join trajectories of equal length along B: ``[T, sum of B, ...]`` by field.

    The fields are those of the first trajectory. A trajectory without a field contributes nothing to it, as in RLinf.
    """
    if not trajectories:
        return {}
    batch: dict[str, Any] = {}
    for name in ("curr_obs", "next_obs", "forward_inputs"):
        if getattr(trajectories[0], name):
            batch[name] = _joined([getattr(item, name) for item in trajectories])
    for name in TENSOR_FIELDS:
        if isinstance(getattr(trajectories[0], name), torch.Tensor):
            values = [getattr(item, name) for item in trajectories]
            batch[name] = torch.cat([value for value in values if value is not None], dim=1)
    return batch


def _joined(dicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for key in dict.fromkeys(key for item in dicts for key in item):
        values = [item[key] for item in dicts if key in item]
        if all(isinstance(value, Mapping) for value in values):
            joined[key] = _joined(values)
        elif all(isinstance(value, torch.Tensor) and value.dim() >= 2 for value in values):
            joined[key] = torch.cat(values, dim=1)
    return joined


class EmbodiedTrajectoryBuilder(EmbodiedRolloutResult):
    """:class:`trajstore.EmbodiedRolloutResult` under RLinf's newer name.

    Collected fields are accessible as lists with one entry per step (``builder.rewards``), and the resulting
    trajectories are those of this module.
    """

    def __getattr__(self, name: str) -> Any:
        for collected in ("_steps", "_dicts"):
            if name in self.__dict__.get(collected, ()):
                return self.__dict__[collected][name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def to_trajectory(self) -> Trajectory:
        """Return the collected trajectory, ``[T, B, ...]``."""
        return Trajectory(**vars(super().to_trajectory()))

    def to_splited_trajectories(self, split_size: int) -> list[plain.Trajectory]:
        """Return the trajectory in ``split_size`` parts along B; see the base class."""
        return [Trajectory(**vars(part)) for part in super().to_splited_trajectories(split_size)]

    def to_splited_trajectories_by_sizes(self, split_sizes: Sequence[int]) -> list[plain.Trajectory]:
        """Return the trajectory in parts with these numbers of environments; see the base class."""
        return [Trajectory(**vars(part)) for part in super().to_splited_trajectories_by_sizes(split_sizes)]
