"""Snapshots of a store: saved points, pins and heads that were left. Only for the holder of the writer's lock.

docs/design/saved-points.md describes the state after a crash at each step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from trajstore._core.base import locks
from trajstore._core.files.base import EncodedFile, crc32_of
from trajstore._core.store.log_records import id_ranges
from trajstore._core.store.rollback import Plan, plan_change
from trajstore._core.store.saved_points import (
    STATE,
    SavedPoint,
    SideFile,
    Snapshot,
    check_pin_name,
    pin_file,
    point_name,
    side_file,
    snapshots_of,
    values_file,
)
from trajstore._core.store.states import encode_state
from trajstore._core.writing.commit_log import CommitLog
from trajstore._core.writing.inbox import Inbox
from trajstore.errors import ConfigurationError, StoreNotFoundError, StoreWriteError, written

logger = logging.getLogger(__name__)

Capture = Callable[[], tuple[Mapping[str, Any], Mapping[str, Any]]]
"""Returns the state of a snapshot, and further values for its file."""


@dataclass(frozen=True, slots=True)
class Gone:
    """Result of going to a snapshot.

    Attributes:
        plan: what it changed.
        state: saved with the snapshot.
        details: further values in the snapshot's file.
    """

    plan: Plan
    state: Mapping[str, Any]
    details: Mapping[str, Any]


class StorePoints:
    """Takes, removes and goes to snapshots. Thread-safe.

    Args:
        log: of the store. Leftovers of an interrupted writer are removed here.
        inbox: of the store. Acknowledged values are recorded before a snapshot is taken or left.

    Raises:
        StoreWriteError: removing leftovers failed.
    """

    def __init__(self, log: CommitLog, inbox: Inbox) -> None:
        self._log = log
        self._inbox = inbox
        self._directory = log.directory
        self._one = locks.lock("StorePoints._one")
        """Allows one change at a time: files that no snapshot names yet must not be deleted as leftovers."""
        self._may_have_leftovers = False
        with log.changing():
            if not log.directory.can_append:
                self._claim()
            self._release(log.catalog.unfinished_asides())
            log.garbage.collect(log.catalog)  # shards of a snapshot that was removed just before a crash

    @contextmanager
    def _one_change(self) -> Iterator[None]:
        """Exclude other changes, and record the late values acknowledged by now."""
        self._log.check_not_asking()
        with self._one:
            with self._log.changing():
                pass  # refuses a closed writer before anything is read
            with written(": late values could not be taken in; nothing was changed"):
                self._inbox.take_in()
            yield

    def _publish(self, what: str, *files: EncodedFile) -> None:
        with written(f": nothing {what}"):
            self._directory.publish(files)
        self._confirm(what)

    def _confirm(self, what: str) -> None:
        """Ask the store for the lock: a writer that lost it must not report success, or damage by its heir."""
        with written(f": nothing {what}"):
            self._directory.confirm()

    def snapshots(self) -> list[SavedPoint]:
        """Return all snapshots, see :func:`snapshots_of`."""
        with self._log.standing_still() as catalog:
            return snapshots_of(catalog)

    def state(self, name: str | int) -> dict[str, Any]:
        """Return the state saved with a point.

        Raises:
            StoreNotFoundError: there is no such point; names the existing ones.
            CorruptStoreError: its file is missing or damaged.
        """
        with self._log.changing():
            catalog = self._log.catalog
            return catalog.pins.state_of(catalog.snapshot(name))

    # -- taking -----------------------------------------------------------------------------------

    def pin(self, name: str, **details: Any) -> list[SavedPoint]:
        """Take a snapshot of the committed state, and return all snapshots.

        Raises:
            ConfigurationError: the name is not a valid file name, or belongs to a saved point or a head that was left.
            StoreWriteError: writing failed.
            StoreClosedError: the writer was closed, or belongs to the parent process.
        """
        check_pin_name(name)
        with self._one_change():
            self._write(name, lambda: ({}, details))
            return self.snapshots()

    def save(self, step: int, capture: Capture) -> list[SavedPoint]:
        """Save a point of the committed state, replacing one of the same step, and return those of the line.

        Args:
            step: of the model.
            capture: called while nothing can be committed or evicted; returns the state, and further values for the
                point's file (the buffer's generator).

        Raises:
            ConfigurationError: there is a point of a later step, or the state has a value that cannot be saved.
            StoreWriteError: writing failed; an earlier point of this step still exists.
            StoreClosedError: the writer was closed, or belongs to the parent process.
        """
        with self._one_change():
            catalog = self._log.catalog
            with self._log.changing():
                newest = points[-1] if (points := catalog.points()) else None
                if newest is not None and (newest.step or 0) > step:
                    raise ConfigurationError(
                        f"points.save({step}): {self._directory.url} has a saved point of step {newest.step}, which is "
                        "later; go to an earlier one first (points.go_to), or remove it with "
                        f"points.remove({point_name(newest.step or 0)!r})"
                    )
                name = point_name(step, catalog.visit)
            self._write(name, capture, step)
            if newest is not None and newest.step == step and newest.name != name:
                with self._log.changing():
                    self._release(self._on_no_line([newest]))
            with self._log.standing_still():
                return list(map(SavedPoint.of, catalog.points()))

    def _write(self, name: str, capture: Capture, step: int | None = None) -> None:
        """Take a snapshot, of a saved point with its step, replacing one of this name; within :meth:`_one_change`."""
        catalog = self._log.catalog
        with self._log.changing():
            if self._may_have_leftovers:
                self._release(())
            replaces = self._may_have_leftovers = name in catalog.pins.heads
            with self._log.asking():
                state, details = capture()
            details = details if step is None else {"step": step, **details}
            head, values = self._taken(name, details)
            catalog.pins.expect(head)
        try:
            head, files = _encoded(head, values, state, details)
            if files[:-1]:
                self._publish("was saved", *files[:-1])
            with self._log.changing():
                self._publish("was saved", files[-1])
                self._add(head)
        except BaseException:
            with self._log.standing_still():
                catalog.pins.arrived(name)
                catalog.load_pins()
                self._may_have_leftovers = True
            raise
        if replaces:
            with self._log.changing():
                catalog.drop_unnamed()
                self._release(())

    def _add(self, head: Snapshot) -> None:
        """Add a snapshot whose files are durable; within :meth:`CommitLog.changing`.

        Raises:
            StoreWriteError: another process has removed it from an object store.
        """
        catalog = self._log.catalog
        catalog.pins.arrived(head.name, head)
        if self._directory.can_append:
            return
        catalog.load_pins()
        if head.name not in catalog.pins.heads:
            self._confirm("was saved")  # a writer that has taken over may have removed it
            raise StoreWriteError(
                f"{self._directory.url}: the snapshot {head.name!r} was removed while it was saved, not by this writer"
            )

    def _taken(self, name: str, details: Mapping[str, Any]) -> tuple[Snapshot, dict[str, Any] | None]:
        """Return the current head as a snapshot without files, and its late values as JSON for theirs.

        Within :meth:`CommitLog.changing`.
        """
        catalog = self._log.catalog
        ids, step = catalog.index["trajectory_id"], details.get("step")
        values, rows = catalog.shards_of_values(catalog.notes, ids)
        before = [head.name for head in catalog.points() if step is None or (head.step or 0) < step]
        head = Snapshot(
            name,
            id_ranges(ids),
            catalog.generation,
            catalog.visit,
            tuple(before),
            shards=tuple(map(catalog.shards.number, rows)),
            step=step,
            ranks=details.get("ranks"),
            left_for=details.get("left_for"),
        )
        return head, values

    # -- removing ---------------------------------------------------------------------------------

    def remove(self, name: str | int) -> str | None:
        """Remove a snapshot; for a head that was left also the saved points that only its line has.

        Evicted trajectories and files that only it named are deleted.

        Returns:
            None, or a sentence if there is no such snapshot, with the existing ones.

        Raises:
            StoreClosedError: the writer was closed, or belongs to the parent process.
        """
        self._log.check_not_asking()
        with self._one, self._log.changing():
            catalog = self._log.catalog
            try:
                head = catalog.snapshot(name)
            except StoreNotFoundError as error:
                return str(error)
            if head.kind == "aside":
                points = [catalog.pins.heads[point] for point in catalog.present_line(head)]
                self._release(self._on_no_line(points, but=head))  # first: after a crash the head still names them
            self._release([head])
        return None

    def _on_no_line(self, points: Sequence[Snapshot], but: Snapshot | None = None) -> list[Snapshot]:
        """Return the points that are neither on the current line nor on that of a head that was left.

        Args:
            points: some saved points.
            but: a head whose line is ignored.
        """
        catalog = self._log.catalog
        lines = {head.name for head in catalog.points()}
        lines.update(*(aside.line for aside in catalog.asides() if aside is not but))
        return [point for point in points if point.name not in lines]

    def _release(self, heads: Sequence[Snapshot]) -> None:
        """Remove snapshots, and files that no snapshot names; within :meth:`CommitLog.changing`."""
        if heads:
            logger.info("%s: removes %s", self._directory.url, ", ".join(head.name for head in heads))
            self._log.release_pins([head.name for head in heads])
        if unnamed := self._log.catalog.pins.unnamed_files():
            self._directory.remove(unnamed)
        self._may_have_leftovers = False

    # -- going to a snapshot ----------------------------------------------------------------------

    def go_to(self, name: str | int, *, aside: bool = True) -> Gone:
        """Restore a snapshot: its ids, late values and the saved points that led to it.

        Args:
            name: of the snapshot, or step of a saved point of the current line.
            aside: name the current head, unless it has a name; False deletes it, with the saved points that
                are on no other line.

        Raises:
            StoreNotFoundError: there is no such snapshot; names the existing ones.
            CorruptStoreError: a file of the snapshot is damaged; nothing was changed.
            StoreWriteError: writing failed; open the store again.
            StoreClosedError: the writer was closed, or belongs to the parent process.
        """
        catalog = self._log.catalog
        with self._one_change(), self._log.changing():
            unfinished = catalog.unfinished_asides()
            if unfinished or self._may_have_leftovers:
                self._release(unfinished)
            plan = plan_change(catalog, name, aside)
            state, details = catalog.pins.state_of(plan.to), catalog.pins.details(plan.to.name)
            if not plan.is_empty:
                if plan.changes.aside is not None:
                    left_for = {"left_for": plan.to.name}
                    head, files = _encoded(*self._taken(plan.changes.aside, left_for), {}, left_for)
                    self._may_have_leftovers = True
                    self._publish("was changed", *files)
                    self._add(head)
                    self._may_have_leftovers = False
                self._log.go_to(plan)
            if not aside:  # also leftovers of an earlier crash
                self._release(self._on_no_line([head for head in catalog.snapshots() if head.kind == "point"]))
        return Gone(plan, state, details)

    def _claim(self) -> None:
        """Rewrite the snapshots of an object store, so that an earlier writer's file versions are outdated."""
        catalog = self._log.catalog
        if heads := catalog.pins.heads:
            fence = {"fence": catalog.fences[-1]}
            self._publish("claimed", *(pin_file(name, {**catalog.pins.details(name), **fence}) for name in heads))


def _encoded(
    head: Snapshot, values: Mapping[str, Any] | None, state: Mapping[str, Any], details: Mapping[str, Any]
) -> tuple[Snapshot, list[EncodedFile]]:
    """Return a snapshot with its files; the last one names the others.

    Args:
        head: the snapshot.
        values: its late values, as JSON; None for none.
        state: of a saved point.
        details: further values for its file.
    """
    files = []
    place = {"generation": head.generation, "visit": head.visit, "line": head.line}
    content = {**details, **place, "ids": head.ids.tolist(), "shards": head.shards}
    if values is not None:
        file, content["values"] = values_file(head.name, values)
        files.append(file)
        head = replace(head, values=SideFile(*content["values"].values()))
    if state:
        file, content["state"] = side_file(head.name, STATE, [encode_state(state)])
        files.append(file)
        head = replace(head, state=SideFile(*content["state"].values()))
    files.append(pin_file(head.name, content))
    return replace(head, crc32=crc32_of(files[-1].pieces)), files
