"""Adds trajectories that a reader returned with late values: as they were recorded, and the values after them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from trajstore._core.base.clock import microseconds
from trajstore._core.columns.conversion import flatten, recorded_of
from trajstore._core.columns.facts import GIVEN
from trajstore._core.columns.steps import NothingToStoreError
from trajstore._core.store.late_values import LateValues, check_given
from trajstore._core.store.row_notes import Rows
from trajstore.errors import ConfigurationError, PartlyAddedError, StoreWriteError, counted
from trajstore.trajectory import AgentTrajectory, AnyTrajectory

logger = logging.getLogger(__name__)


class ValueTarget(Protocol):
    """Sets late values."""

    def check_values(self, ids: Sequence[int], update: LateValues) -> None:
        """Refuse values that cannot be set."""

    def annotate(self, update: LateValues, rows: Rows) -> None:
        """Set late values."""


@dataclass(frozen=True, slots=True)
class _Late:
    """Late values of one trajectory, of a class: numbers and texts, and values by row."""

    kind: type[AnyTrajectory]
    values: dict[str, Any]
    rows: dict[str, torch.Tensor]


def has_late_values(trajectory: Any) -> bool:
    """Return whether a reader returned a trajectory with late values."""
    metadata = getattr(trajectory, "metadata", None)
    of_rollout = isinstance(trajectory, AgentTrajectory) and isinstance(metadata, dict) and GIVEN in metadata
    return bool(_rows_of(trajectory)) or of_rollout


def _rows_of(trajectory: Any) -> dict[str, torch.Tensor]:
    """Return the values by row; none if a name or value is invalid, which ``flatten`` refuses."""
    notes = getattr(trajectory, "notes", None)
    if not isinstance(notes, dict) or not all(isinstance(name, str) for name in notes):
        return {}
    return dict(notes) if all(isinstance(rows, torch.Tensor) for rows in notes.values()) else {}


def add_with_values(
    trajectories: Iterable[AnyTrajectory], add: Callable[[list[AnyTrajectory]], list[int]], target: ValueTarget
) -> list[int]:
    """Add trajectories and set their late values, with a warning that author and history are lost; return the ids.

    Args:
        trajectories: some have late values.
        add: adds trajectories, and returns the ids of those that are not empty.
        target: sets the values.

    Raises:
        ConfigurationError: a value cannot be stored, or its name stands for another kind of values in the store;
            nothing was added.
        PartlyAddedError: the trajectories were added, and their late values could not be written.
    """
    recorded, late = [], []
    for trajectory in trajectories:
        values: dict[str, Any] = {}
        rows = _rows_of(trajectory)
        if isinstance(trajectory, AgentTrajectory):
            trajectory, values = recorded_of(trajectory)
        recorded.append(replace(trajectory, notes={}) if rows else trajectory)
        late.append(_Late(type(trajectory), values, rows))
    value_names = sorted({name for each in late for name in each.values})
    names_of_rows = {name for each in late for name in each.rows}
    update = LateValues(
        np.arange(len(late)), {name: [each.values.get(name) for each in late] for name in value_names}, "", 0
    )
    check_given(update, names_of_rows)
    if both := sorted(names_of_rows.intersection(value_names)):
        raise ConfigurationError(f"annotate: {both[0]}: has values by row and others, must be one or the other")
    target.check_values([], update)
    ids = add(recorded)
    if len(ids) < len(recorded):
        late = [each for each, trajectory in zip(late, recorded, strict=True) if not _is_empty(trajectory)]
    groups: dict[Any, list[tuple[int, _Late]]] = {}
    for number, each in zip(ids, late, strict=True):
        if each.values or each.rows:
            names = tuple(sorted(each.values)), tuple(sorted(each.rows))
            groups.setdefault((each.kind, *names), []).append((number, each))
    for (_, names, row_names), members in groups.items():
        given = {name: [each.values[name] for _, each in members] for name in names}
        rows_given = {name: [each.rows[name] for _, each in members] for name in row_names}
        update = LateValues(np.array([number for number, _ in members]), given, "", microseconds())
        try:
            target.annotate(update, rows_given)
        except StoreWriteError as error:
            raise PartlyAddedError(
                f"{error}; the trajectories were added, without all their late values", ids
            ) from error
    if groups:
        logger.warning(
            "late values of %s were set again without author and history, which only copy and convert keep",
            counted(sum(map(len, groups.values())), "trajectory"),
        )
    return ids


def _is_empty(trajectory: AnyTrajectory) -> bool:
    try:
        flatten(trajectory)
    except NothingToStoreError:
        return True
    return False
