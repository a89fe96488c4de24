"""Late values on reading: corrections of rewards, and columns of batches. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.columns.facts import GIVEN, RECORDED, SCORE
from trajstore._core.columns.schema import ColumnSpec
from trajstore._core.store.facts import NOTE, NOTE_TEXT
from trajstore._core.store.index import TrajectoryIndex
from trajstore._core.store.late_values import OVER_FACTS
from trajstore.errors import ConfigurationError, SchemaMismatchError, listed
from trajstore.trajectory import AgentTrajectory, Reward

COLUMNS = "notes."
"""Prefix of batch columns that hold late values."""


@dataclass(frozen=True, slots=True)
class LateValues:
    """A batch column with the late value of each row's trajectory.

    Attributes:
        spec: spec of the column.
        values: float64 ``[n]``, NaN for none.
    """

    spec: ColumnSpec
    values: npt.NDArray[np.float64]

    def fill(self, target: torch.Tensor) -> None:
        """Write the values into a tensor ``[n]``."""
        target.copy_(torch.from_numpy(self.values))


def without_notes(names: Sequence[str] | None) -> tuple[Sequence[str] | None, list[str]]:
    """Split column names into stored columns and late values."""
    if names is None:
        return None, []
    late = [name for name in names if name.startswith(COLUMNS)]
    return [name for name in names if not name.startswith(COLUMNS)] if late else names, late


def late_columns(index: TrajectoryIndex, positions: npt.NDArray[np.int64], names: Sequence[str]) -> list[LateValues]:
    """Return columns of late values, one row per position; NaN where none was given.

    Args:
        index: index of the trajectories.
        positions: position of each row's trajectory, ``[n]``.
        names: with the prefix :data:`COLUMNS`.

    Raises:
        SchemaMismatchError: no trajectory has a value of this name, or the values are texts.
    """
    columns = []
    for name in names:
        own = name.removeprefix(COLUMNS)
        if NOTE + own not in index.notes:
            available = [
                *(column.removeprefix(NOTE) for column in index.notes if column.startswith(NOTE)),
                *index.row_notes,
            ]
            why = "its values are texts" if NOTE_TEXT + own in index.notes else "no trajectory was given such a value"
            raise SchemaMismatchError(f"column {name}: {why}; there are {listed(available, 30) or 'none'}")
        columns.append(LateValues(ColumnSpec(name, "float64", ()), index.at(NOTE + own, positions).astype(np.float64)))
    return columns


def outcomes_given(index: TrajectoryIndex, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the late outcomes of the trajectories at these positions; NaN for none."""
    column = NOTE + "outcome"
    if column not in index.notes:
        return np.full(len(positions), np.nan)
    given: npt.NDArray[np.float64] = index.at(column, positions).astype(np.float64)
    return given


def with_notes(rollout: AgentTrajectory, given: Mapping[str, float | str]) -> AgentTrajectory:
    """Apply late values to a rollout's reward, and list all of them in its metadata.

    Args:
        rollout: the rollout as recorded.
        given: latest values by name; ``outcome``, ``success_rate`` and ``reward_NAME`` replace those of the reward.
    """
    if not given:
        return rollout
    reward = rollout.reward or Reward()
    recorded: dict[str, Any] = {}
    over: dict[str, Any] = {}
    scores = dict(reward.metadata)
    for name, value in given.items():
        if name in OVER_FACTS:
            recorded[name], over[name] = getattr(reward, name), value
        elif name.startswith(SCORE):
            recorded[name] = scores.get(name.removeprefix(SCORE))
            scores[name.removeprefix(SCORE)] = value
    late_metadata = {GIVEN: dict(given)} | ({RECORDED: recorded} if recorded else {})
    corrected = replace(reward, **over, metadata=scores) if recorded else rollout.reward
    return replace(rollout, reward=corrected, metadata={**rollout.metadata, **late_metadata})


def recorded_of(rollout: AgentTrajectory) -> tuple[AgentTrajectory, dict[str, float | str]]:
    """Return a rollout as recorded, and its late values; inverse of :func:`with_notes`.

    Raises:
        ConfigurationError: its metadata has something else under the names of late values.
    """
    metadata = dict(rollout.metadata or {})
    given, recorded = metadata.pop(GIVEN, {}), metadata.pop(RECORDED, {})
    if not given:
        return rollout, {}
    if not all(isinstance(part, dict) and all(isinstance(name, str) for name in part) for part in (given, recorded)):
        raise ConfigurationError(f"metadata: {GIVEN} and {RECORDED} must be dicts of late values by name")
    reward = rollout.reward
    if reward is not None and recorded:
        over = {name: value for name, value in recorded.items() if name in OVER_FACTS}
        scores = dict(reward.metadata)
        for name, value in recorded.items():
            if name.startswith(SCORE):
                scores[name.removeprefix(SCORE)] = value
        scores = {name: value for name, value in scores.items() if value is not None or SCORE + name not in recorded}
        reward = replace(reward, **over, metadata=scores)
        reward = None if reward == Reward() else reward
    return replace(rollout, reward=reward, metadata=metadata), dict(given)
