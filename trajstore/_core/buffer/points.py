"""Saved points and other snapshots, with the same calls for one store, the ranks of a run, a handle and a path."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from trajstore._core.base.arguments import check_kind, text, truth, whole, whole_or_none
from trajstore._core.store.rollback import SnapshotChanges
from trajstore._core.store.run_ids import ALONE
from trajstore._core.store.saved_points import STEP, SavedPoint, point_name
from trajstore.errors import ConfigurationError, StoreNotFoundError, counted, listed

logger = logging.getLogger(__name__)

KEPT = 3
"""Default number of saved points to keep."""

Listing = Mapping[int, Sequence[SavedPoint]]
"""The snapshots of each store by rank; :data:`ALONE` for a single store."""


class Stores(ABC):
    """The stores of :class:`Points`. Several stores make each change together, or raise an error that names some."""

    name: str
    """Path or name of the store or the run, for messages."""
    count: int | None
    """Number of stores that save a point together; None for any."""

    def held(self) -> AbstractContextManager[object]:
        """Return a context in which nothing is added or evicted in any of several stores."""
        return nullcontext()

    def begun(self) -> Container[int]:
        """Return the ranks whose stores are those of earlier additions, not empty ones in the place of lost ones."""
        return ()

    @abstractmethod
    def snapshots(self) -> Listing:
        """Return the snapshots of each store."""

    @abstractmethod
    def state(self, name: str | int) -> dict[str, Any]:
        """Return the state saved with a point; of several stores that of this rank, or the first."""

    @abstractmethod
    def save(self, step: int, state: Mapping[str, Any]) -> Listing:
        """Save a point in each store, replacing one of the same step; return those of the current line."""

    @abstractmethod
    def pin(self, name: str) -> Listing:
        """Keep the present state of each store under a name; return the snapshots then."""

    @abstractmethod
    def remove(self, name: str | int) -> list[str | None]:
        """Remove a snapshot from each store; return for each None, or a sentence if it has no such snapshot."""

    @abstractmethod
    def go_to(self, name: str | int, aside: bool) -> dict[str, Any]:
        """Go to a snapshot in each store, and continue the draws from there; return as :meth:`state`."""

    @abstractmethod
    def changes(self, name: str | int, aside: bool) -> list[SnapshotChanges]:
        """Return the changes that :meth:`go_to` would make."""


def united(snapshots: Listing) -> list[SavedPoint]:
    """Return the snapshots of several stores as those of a run: saved points by step, others by name."""
    if ALONE in snapshots:
        return list(snapshots[ALONE])
    by_name: dict[str, dict[int, SavedPoint]] = {}
    for rank, points in snapshots.items():
        for point in points:
            name = point_name(point.step) if point.on_line else point.name
            by_name.setdefault(name, {})[rank] = point
    together = []
    for name, have in by_name.items():
        # Points that each store saved by itself do not record the number of ranks: expect all existing stores.
        ranks = max(point.ranks or 0 for point in have.values()) or max(snapshots) + 1
        of_run = replace(
            next(iter(have.values())),
            name=name,
            generation=max(point.generation for point in have.values()),
            trajectories=sum(point.trajectories for point in have.values()),
            state_bytes=sum(point.state_bytes for point in have.values()),
            ranks=ranks,
            lacking=tuple(rank for rank in range(ranks) if rank not in have),
        )
        together.append(of_run)
    return sorted(together, key=lambda point: (point.step, point.name))


def incomplete_sentence(point: SavedPoint) -> str:
    """Describe a point that some ranks lack."""
    names = listed(f"rank_{rank}" for rank in point.lacking)
    return f"the saved point of step {point.step} is incomplete: of {point.ranks} ranks, it is not in {names}"


@dataclass(frozen=True, slots=True)
class Points:
    """Saved points, pins and heads that were left: of a store, or of all stores of a run at one moment.

    ``buffer.points`` has those of the buffer's store, ``handle.points`` those of all stores of Ray,
    :func:`trajstore.points.run_points` those of the ranks of ``torch.distributed``, and
    :func:`trajstore.points.points_at` those of a path. All have the same calls and results.

    A point of a run counts once every store has it. Older points are removed only after that, so a complete one exists
    at any time, whatever process is killed.
    """

    _stores: Stores

    @property
    def saved(self) -> list[SavedPoint]:
        """The saved points of the current line, lowest step first; of a run also incomplete ones, which stores lack.

        The current line is the history of the present state. Points saved after one to which the store went back are on
        other lines: :attr:`snapshots` has them.

        Raises:
            StoreError: the buffer has no store, or shows a load from elsewhere.
            StoreUnreachableError: a store of a handle does not answer.
        """
        return _line(self._stores.snapshots())

    @property
    def snapshots(self) -> list[SavedPoint]:
        """Everything that :meth:`go_to` accepts: saved points of all lines, pins, and heads that were left.

        Raises:
            StoreError, StoreUnreachableError: see :attr:`saved`.
        """
        return united(self._stores.snapshots())

    def newest(self) -> int | None:
        """Return the step of the newest point that every store has; None before the first.

        Raises:
            ConfigurationError: another number of stores saved the points of the run.
            StoreNotFoundError: no point is complete and a store was lost: there are several points, or a store that
                lacks one is another than before and never had additions.
            StoreError, StoreUnreachableError: see :attr:`saved`.
        """
        points = _line(self._stores.snapshots())
        for point in sorted(points, key=lambda one: -(one.step or 0) if one.is_complete else 1):
            self._check_count(point)  # names the newest complete one, which can be loaded
        for point in points:
            if not point.is_complete:
                logger.warning("%s: %s", self._stores.name, incomplete_sentence(point))
        complete = [point.step for point in points if point.is_complete]
        if points and not complete:
            self._check_not_lost(points)
        return max(complete, default=None)

    def state(self, name: str | int) -> dict[str, Any]:
        """Return the state saved with a point, without going to it.

        Args:
            name: of the point, or its step on the current line.

        Returns:
            The state, with the state dicts of objects that had one; empty if none was saved. Of a run that of this
            rank, or of its first store.

        Raises:
            StoreNotFoundError: there is no such point; names the existing ones.
            CorruptStoreError: the state is missing or damaged.
        """
        return self._stores.state(_name(name))

    def save(self, step: int, state: Mapping[str, Any] | None = None, *, keep: int | None = KEPT) -> SavedPoint:
        """Save a point at a step of the model, for :meth:`go_to`.

        Everything added before is flushed first. Call it before writing the model's own checkpoint, so that every
        checkpoint of the model has its point. Every rank of ``torch.distributed`` calls it, with the same step.

        Args:
            step: of the model; a point of the same step is replaced. A handle refuses to replace a complete one.
            state: further state of the run: plain values, tensors, and objects with a ``state_dict`` (a loader, a
                sampler), which is called at that moment. The generator of the buffer or handle is saved anyway.
            keep: number of complete points of the current line to keep, by highest step; older ones are removed, with
                trajectories that only they held. None = all.

        Raises:
            StoreError: the buffer has no store, or shows a load from elsewhere.
            ConfigurationError: there is a point of a later step; or ``state`` has an unsupported value; says where.
            StoreWriteError, StoreUnreachableError: a store has not saved it; names it. Earlier points are unchanged.
        """
        step, keep = whole("step", step, 0), whole_or_none("keep", keep, 1)
        check_kind("state", state, Mapping, "a dict")
        with self._stores.held():
            points = _line(self._stores.save(step, state or {}))
        complete = [point.step for point in points if point.is_complete]
        for old in points if keep is not None and len(complete) > keep else ():
            if old.step < complete[-(keep or 1)]:
                self._stores.remove(old.step)
        return points[-1]  # none is later

    def go_to(self, name: str | int, *, aside: bool = True) -> dict[str, Any]:
        """Show a snapshot: its trajectories, late values and saved points; draws continue from there.

        Trajectories evicted since come back; trajectories added since are hidden. The state before becomes a snapshot
        itself, ``aside-...``, unless one has it already: going to that undoes this. No id is given twice. Open sessions
        keep all their calls, with a warning that names them. Of a run, each store names the state that it leaves; stop
        producers first, because what they send again is added again. If a process is killed meanwhile, call it again.

        Args:
            name: of a snapshot that every store has; or step of a saved point of the current line.
            aside: False deletes the state before, with the saved points that no other state needs.

        Returns:
            See :meth:`state`.

        Raises:
            StoreNotFoundError: there is no such snapshot, or some stores lack it; names them and the existing ones.
            StoreError: the buffer has no store, or shows a load from elsewhere.
            ConfigurationError: another number of stores saved the point.
            CorruptStoreError: the snapshot is damaged; nothing was changed.
            StoreWriteError, StoreUnreachableError: a store could not change; make the buffer again, which shows one
                state or the other. Of a run others may have changed; call it again.
        """
        name, aside = _name(name), truth("aside", aside)
        with self._stores.held():
            if self._stores.count != 1:
                self._check(name)
            return self._stores.go_to(name, aside)

    def rollback(self, step: int, *, aside: bool = True) -> dict[str, Any]:
        """Go to the saved point of a step of the current line, see :meth:`go_to`."""
        return self.go_to(whole("step", step, 0), aside=aside)

    def changes(self, name: str | int, *, aside: bool = True) -> list[SnapshotChanges]:
        """Return the changes that :meth:`go_to` would make in each store; nothing is changed.

        Raises:
            StoreNotFoundError, StoreError, CorruptStoreError: see :meth:`go_to`.
        """
        name, aside = _name(name), truth("aside", aside)
        if self._stores.count != 1:
            self._check(name)
        return self._stores.changes(name, aside)

    def pin(self, name: str) -> SavedPoint:
        """Keep the present state under a name.

        ``load_checkpoint(path, pin=name)`` reads it and :meth:`go_to` goes back to it, whatever is added, evicted or
        annotated later.

        Raises:
            StoreError: the buffer has no store (``auto_save=False``).
            ConfigurationError: the name is not a valid file name, or is reserved for saved points.
            StoreWriteError, StoreUnreachableError: a store could not be pinned; others may be.
        """
        name = text("name", name)
        with self._stores.held():
            return next(point for point in united(self._stores.pin(name)) if point.name == name)

    def remove(self, name: str | int) -> None:
        """Remove a pin, a saved point (its step, or ``step-750``), or a head that was left (``aside-12``).

        Removing a head also removes the saved points on its line alone. Evicted trajectories that only it named are
        deleted. Of several stores, a warning names each that lacks it.

        Raises:
            StoreNotFoundError: no store has such a snapshot; names the existing ones.
            StoreError: the buffer has no store (``auto_save=False``).
            StoreWriteError, StoreUnreachableError: a store could not remove it; others may have. Call it again.
        """
        absent = self._stores.remove(_name(name))
        reasons = [reason for reason in absent if reason is not None]
        if len(reasons) == len(absent):
            raise StoreNotFoundError(f"points.remove: {reasons[0]}")
        for reason in reasons:
            logger.warning("points.remove: %s; it is removed from the others", reason)

    # -- points of several stores -----------------------------------------------------------------

    def _check(self, name: str | int) -> None:
        """Refuse a snapshot that some stores lack.

        Raises:
            StoreNotFoundError, ConfigurationError: see :meth:`go_to`.
        """
        points = united(self._stores.snapshots())
        wanted = point_name(name) if isinstance(name, int) else name
        found = next((point for point in points if point.name == wanted), None)
        if found is not None:
            self._check_count(found)
        if found is None or not found.is_complete:
            why = f"no snapshot is called {name!r}"
            if found is not None and found.on_line:
                why = incomplete_sentence(found)
            elif found is not None:
                why = f"{why} in {listed(f'rank_{rank}' for rank in found.lacking)}"
            elif STEP.fullmatch(wanted):
                why = f"no saved point of step {wanted.removeprefix('step-')}"
            complete = [point for point in points if point.is_complete]
            steps, names = [str(point.step) for point in complete if point.on_line], [point.name for point in complete]
            there = listed(steps if STEP.fullmatch(wanted) else names) or "none"
            raise StoreNotFoundError(f"{self._stores.name}: {why}; complete are: {there}")

    def _check_count(self, point: SavedPoint) -> None:
        stores = self._stores.count
        if stores in (None, point.ranks) or point.kind != "point" or point.ranks is None:
            return
        above = f"; rank_{point.ranks} and above are not part of it: delete them if they are empty"
        new = above if (stores or 0) > point.ranks else ""
        raise ConfigurationError(
            f"{self._stores.name}: {counted(point.ranks, 'rank')} saved {point.name} together, and there "
            f"{'is' if stores == 1 else 'are'} {stores} now; start a new run, and load a step of this one that all of "
            f"them have (`trajstore inspect` lists them) on every rank: load_checkpoint({self._stores.name!r}, "
            f"is_distributed=True, pin={point.name!r}, ...){new}"
        )

    def _check_not_lost(self, points: Sequence[SavedPoint]) -> None:
        """Refuse to start over if no point is complete because a store was lost, not because a job was killed."""
        lacking, begun = sorted({rank for point in points for rank in point.lacking}), self._stores.begun()
        empty = [f"rank_{rank}" for rank in lacking if rank not in begun]
        if len(points) > 1:
            names = listed(f"rank_{rank}" for rank in lacking)
            why = f"{names} lacks some. A job that was killed leaves one incomplete point"
        elif empty and points[0].trajectories:
            why = f"nothing was ever added to {listed(empty)}"
        else:
            return
        name = self._stores.name
        raise StoreNotFoundError(
            f"{name}: no saved point is complete, of {len(points)}: {why}, so a store was lost: restore it from a copy "
            f"or its mirror, or start a new run in another directory and load this one there (load_checkpoint({name!r},"
            f" strict=False, pin={points[-1].name!r})). If none was lost, remove the points (points.remove) and start "
            "again"
        )


def asked(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state in which each value with a ``state_dict`` method is replaced by its result."""
    return {
        name: value.state_dict() if callable(getattr(value, "state_dict", None)) else value
        for name, value in state.items()
    }


def _line(snapshots: Listing) -> list[SavedPoint]:
    return [point for point in united(snapshots) if point.on_line]


def _name(name: str | int) -> str | int:
    return text("name", name) if isinstance(name, str) else whole("name", name, 0)
