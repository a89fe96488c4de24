"""Warns of rollouts that are certainly wrong, and of additions unlike earlier ones. No I/O.

Takes no lock: two threads that add at once may both give the same warning.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import torch

from trajstore._core.columns.conversion import flatten
from trajstore._core.columns.doubts import doubts
from trajstore._core.columns.fields import Axis
from trajstore._core.columns.flat import Copied, FlatTrajectories
from trajstore._core.columns.limits import shown
from trajstore._core.columns.schema import Schema
from trajstore._core.columns.steps import NothingToStoreError
from trajstore.errors import InvalidTrajectoryError, listed
from trajstore.trajectory import AnyTrajectory

logger = logging.getLogger(__name__)


def as_list(trajectories: Iterable[AnyTrajectory]) -> list[AnyTrajectory]:
    """Return the trajectories given to ``add_trajectories``.

    Raises:
        InvalidTrajectoryError: they are no list.
    """
    single = isinstance(trajectories, str | bytes | Mapping | torch.Tensor) or getattr(trajectories, "ndim", 1) != 1
    if single or not isinstance(trajectories, Iterable):
        raise InvalidTrajectoryError(
            f"add_trajectories takes a list of trajectories, not a {type(trajectories).__name__}: "
            "write add_trajectories([trajectory])"
        )
    return list(trajectories)


def flatten_all(trajectories: Iterable[AnyTrajectory]) -> list[FlatTrajectories]:
    """Return trajectories as columns, all checked; empty ones are skipped with a warning.

    Raises:
        InvalidTrajectoryError: one of them cannot be stored and read back; names its position and the field.
    """
    flats, empty = [], []
    for place, trajectory in enumerate(as_list(trajectories)):
        try:
            flats.append(flatten(trajectory))
        except NothingToStoreError:
            empty.append(place)
        except InvalidTrajectoryError as error:
            raise InvalidTrajectoryError(f"trajectory {place} of the list: {error}", place) from error
    if empty:
        logger.warning(
            "add_trajectories: positions %s of %d are empty (no fields, or T * B = 0) and were not stored",
            listed(str(place) for place in empty),
            len(empty) + len(flats),
        )
    return FlatTrajectories.runs(flats)


class ContentWatch:
    """Checks one process's additions; warns at the 1st, 10th, 100th, ... rollout with the same problem."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def look(self, copies: Iterable[Copied]) -> None:
        """Check trajectories that are about to be added."""
        for run, block in copies:
            if run.facts is None:
                continue
            unknown = [None] * len(run)
            starts, tasks, names = (run.facts.get(name, unknown) for name in ("response_start", "task", "rollout_id"))
            for at, problems in doubts(block, run.extents, starts).items():
                self._count(problems, names[at] or "", tasks[at] or "")

    def _count(self, problems: Sequence[str], name: str, task: str) -> None:
        for problem in problems:
            count = self._counts[problem] = self._counts.get(problem, 0) + 1
            if count == 10 ** (len(str(count)) - 1):
                logger.warning(
                    "%d added so far: rollouts with %s; the newest is rollout %s of task %s. They are stored unchanged",
                    count,
                    problem,
                    shown(name),
                    shown(task),
                )


class ColumnWatch:
    """Compares the columns of step trajectories with those before, and warns once of each difference.

    Warns once, too, when a store gets both blocks of steps and rollouts of agents.
    """

    def __init__(self) -> None:
        self._kind: str | None = None
        self._last: Schema | None = None
        self._told: set[str] = set()

    def begin(self, schema: Schema) -> None:
        """Set the columns of the newest existing trajectory."""
        self._kind = schema.kind
        if schema.kind == "step":
            self._last = schema

    def look(self, runs: Iterable[FlatTrajectories]) -> None:
        """Compare trajectories that are about to be added."""
        for run in runs:
            schema = run.schema
            if schema.kind != self._kind:
                self._compare_kinds(schema.kind)
            if schema is not self._last and schema.kind == "step":
                if self._last is not None:
                    self._compare(self._last, schema)
                self._last = schema

    def _compare_kinds(self, kind: str) -> None:
        before, self._kind = self._kind, kind
        if before is not None and "kind" not in self._told:
            self._told.add("kind")
            logger.warning(
                "this buffer has %s trajectories, and %s trajectories are added: sample() fails if it draws an "
                "agent trajectory, and sample_trajectories() draws both kinds; use a store for each kind",
                before,
                kind,
            )

    def _compare(self, before: Schema, after: Schema) -> None:
        old, new = _shapes(before), _shapes(after)
        differing = {
            f"{name} ({old.get(name, 'absent')} before, {new.get(name, 'absent')} now)"
            for name in old.keys() | new.keys()
            if old.get(name) != new.get(name)
        }
        fresh = sorted(differing - self._told)
        if fresh:
            self._told.update(fresh)
            logger.warning(
                "trajectories added now have other columns than earlier ones: %s; a sample() that "
                "draws rows of both raises an error: name the columns (columns=...)",
                ", ".join(fresh),
            )


def _shapes(schema: Schema) -> dict[str, str]:
    columns = [column for column in schema.columns if column.axis is not Axis.DOCUMENT]
    return {column.name: f"[{', '.join(map(str, ('T', 'B', *column.row_shape)))}]" for column in columns}
