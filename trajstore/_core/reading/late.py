"""Late values on reading: corrections of rewards, and columns of batches. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.columns.schema import ColumnSpec
from trajstore._core.store.facts import NOTE, NOTE_TEXT
from trajstore._core.store.index import TrajectoryIndex
from trajstore.errors import SchemaMismatchError, listed

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
