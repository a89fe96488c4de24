"""Saved points of a store, and rollback to them. Only for the holder of the writer's lock.

What a crash leaves at each point is written in docs/design/saved-points.md.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from trajstore.core.base import locks
from trajstore.core.files.base import EncodedFile
from trajstore.core.store.log_records import id_ranges
from trajstore.core.store.pin_names import aside_name, check_pin_name, point_name, removal_order
from trajstore.core.store.rollback import RollbackPlan, plan_rollback, set_aside, with_live
from trajstore.core.store.saved_points import (
    PinHead,
    SavedPoint,
    pin_file,
    pin_name,
    renamed_pin,
    state_file,
)
from trajstore.core.store.states import encode_state
from trajstore.core.writing.commit_log import CommitLog
from trajstore.errors import (
    ConfigurationError,
    CorruptStoreError,
    StoreNotFoundError,
    StoreWriteError,
    listed,
    written,
)

logger = logging.getLogger(__name__)

Capture = Callable[[], tuple[Mapping[str, Any], Mapping[str, Any]]]
"""Returns the state of a point, and what its pin says besides."""


class Points:
    """Saves points of a store, releases old ones, and goes back to them. Safe to call from several threads.

    Args:
        log: of the store. What an interrupted rollback left is brought to its end here.

    Raises:
        StoreWriteError: it could not be.
    """

    def __init__(self, log: CommitLog) -> None:
        self._log = log
        self._directory = log.directory
        self._one = locks.lock("Points._one")
        """Held by one change at a time: what a point has written and not yet named must not pass for left over."""
        with log.changing():
            if not log.directory.can_append:
                self._claim()
            self._end_interrupted()

    # -- pins of the user's -----------------------------------------------------------------------

    def pin(self, name: str, **state: Any) -> int:
        """Keep what is committed now readable under a name, and return its generation.

        Raises:
            ConfigurationError: the name cannot be a file's, or is that of a saved point, or of what a rollback set
                aside.
            StoreWriteError: it could not be written.
            StoreClosedError: the writer was closed, or belongs to the parent process.
        """
        check_pin_name(name)
        catalog = self._log.catalog
        with self._one, self._changing():
            self._publish("was pinned", pin_file(name, catalog.index["trajectory_id"], catalog.generation, **state))
            catalog.load_pins()
            return catalog.generation

    def unpin(self, name: str) -> None:
        """Let go of a pin, a saved point, or what a rollback set aside with its points.

        Evicted trajectories that only it named are deleted. Warns if there is no such pin.

        Raises:
            StoreClosedError: the writer was closed, or belongs to the parent process.
        """
        with self._one, self._changing():
            self._rename_void()  # first: without what a rollback set aside, nothing says which points are void
            heads = self._log.catalog.pins.heads.values()
            going = [head for head in heads if name in (head.name, head.aside)]
            if not going:
                there = listed(self._log.catalog.pins.names) or "none"
                logger.warning("%s: unpin: no pin %r here (there are: %s)", self._directory.url, name, there)
            self._release(going)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the log's lock for a change. Corruption here may mean that another writer took the store over.

        Raises:
            WriterFencedError: another writer did.
        """
        with self._log.changing():
            try:
                yield
            except (StoreNotFoundError, CorruptStoreError):
                self._directory.confirm()
                raise

    def _publish(self, what: str, *files: EncodedFile) -> None:
        with written(f": nothing {what}"):
            self._directory.publish(files)
            self._directory.confirm()  # a new name may be written by who has lost the store; nobody is told that it is

    def saved(self) -> list[SavedPoint]:
        """Return the points that are there, lowest step first."""
        with self._log.standing_still() as catalog:
            return [SavedPoint.of(head) for head in catalog.points()]

    # -- saving -----------------------------------------------------------------------------------

    def save(self, step: int, capture: Capture, keep: int | None) -> SavedPoint:
        """Save a point of what is committed now, and release the oldest ones.

        Args:
            step: of the model.
            capture: called while nothing can be committed or evicted; returns the state, and what the pin's file shall
                say besides (the buffer's generator).
            keep: most points that stay, those of the highest steps; None = all.

        Raises:
            ConfigurationError: a point of a later step is there; or the state has something that cannot be saved.
            StoreWriteError: it could not be written; an earlier point of this step is still there.
            StoreClosedError: the writer was closed, or belongs to the parent process.
        """
        with self._one:
            return self._save(step, capture, keep)

    def _save(self, step: int, capture: Capture, keep: int | None) -> SavedPoint:
        catalog, name = self._log.catalog, point_name(step)
        with self._changing():
            self._rename_void()  # first: a void point of this step must not be written over
            self._check_order(step)
            state, said = capture()
            ids, generation = catalog.index["trajectory_id"].copy(), catalog.generation
            catalog.pins.expect(name, ids, generation)
        try:
            told: dict[str, Any] = {"step": step, **said}
            if state:
                file, told["state"] = state_file(name, uuid.uuid4().hex, [encode_state(state)])
                self._publish("was saved", file)
            with self._changing():
                self._publish("was saved", pin_file(name, ids, generation, **told))
        finally:
            with self._log.standing_still():
                catalog.pins.arrived(name)
                catalog.load_pins()
        with self._changing():
            saved = SavedPoint.of(catalog.point(step))
            self._release(() if keep is None else catalog.points()[:-keep])
        return saved

    def _check_order(self, step: int) -> None:
        catalog = self._log.catalog
        newest = max([head.step or 0 for head in catalog.points()], default=step)
        if newest > step:
            raise ConfigurationError(
                f"points.save({step}): {self._directory.url} has a saved point of step {newest}, which is later; go "
                f"back with rollback first, or let go of it with points.unpin({point_name(newest)!r})"
            )
        head = catalog.pins.heads.get(point_name(step))
        if head is not None and head.step is None:
            raise ConfigurationError(
                f"points.save({step}): a pin made with pin() is called {head.name!r}; let go of it with points.unpin"
            )

    def _release(self, heads: Sequence[PinHead]) -> None:
        """Let go of pins, and delete state files that none names; within :meth:`_changing`."""
        if heads:
            logger.info("%s: lets go of %s", self._directory.url, ", ".join(head.name for head in heads))
            for names in removal_order(head.name for head in heads):
                self._log.release_pins(names)
        if unnamed := self._log.catalog.pins.unnamed_states():
            self._directory.remove(unnamed)

    # -- going back -------------------------------------------------------------------------------

    def roll_back(
        self, step: int, *, aside: bool
    ) -> tuple[RollbackPlan, str | None, Mapping[str, Any], Mapping[str, Any]]:
        """Make the trajectories of a saved point the live ones.

        Args:
            step: of the point.
            aside: keep what leaves readable; False deletes it.

        Returns:
            What changed; the name under which what left stays, None if nothing left or it was deleted; the state that
            was saved with the point; what the pin's file says besides.

        Raises:
            StoreNotFoundError: there is no such point; names those that there are.
            CorruptStoreError: a file of the point is damaged; nothing was changed.
            StoreWriteError: it could not be written; open the store again.
            StoreClosedError: the writer was closed, or belongs to the parent process.
        """
        catalog = self._log.catalog
        with self._one, self._changing():
            plan = plan_rollback(catalog, step)
            state, said = catalog.pins.state_of(plan.point), catalog.pins.state(plan.point.name)
            if plan.is_empty:
                return plan, None, state, said
            generation = catalog.generation + 1
            name = aside_name(generation)
            leaves = bool(len(plan.leaving) or plan.void)
            if leaves:
                told = {"back_to": step} if aside else {"back_to": step, "deleted": True}
                self._publish("was rolled back", pin_file(name, plan.leaving, generation, **told))
                catalog.load_pins()
            try:
                notes = catalog.notes.rolled_back(plan.point.generation, generation)
                self._log.replace(*with_live(catalog, plan.point.ids), notes)
            except StoreWriteError:
                if leaves and catalog.generation >= generation:  # another commit's: no rollback must seem to be of it
                    self._release([catalog.pins.heads[name]])
                raise
            self._release(catalog.deleted_asides())
            self._try(self._rename_void)
        return plan, name if leaves and aside else None, state, said

    def take_back(self, name: str) -> int:
        """Make live again what a rollback set aside; return how many trajectories.

        Raises:
            StoreNotFoundError: no rollback set anything aside under this name.
            StoreWriteError: it could not be written; open the store again.
            StoreClosedError: the writer was closed, or belongs to the parent process.
        """
        catalog = self._log.catalog
        with self._one, self._changing():
            head = set_aside(catalog, name)
            before = len(catalog.index)
            live = id_ranges(catalog.index["trajectory_id"])
            notes = catalog.notes.taken_back(head.generation)
            self._log.replace(*with_live(catalog, np.concatenate([live, head.ids])), notes)
            self._return_points(head)
            self._release([head])
            return len(catalog.index) - before

    def _return_points(self, aside: PinHead) -> None:
        catalog = self._log.catalog
        newest = max([head.step or 0 for head in catalog.points()], default=-1)
        theirs = [head for head in catalog.pins.heads.values() if head.aside == aside.name]
        if newest > (aside.back_to or 0):
            names = ", ".join(head.name for head in theirs)
            if theirs:
                logger.warning(
                    "%s: step %d was saved after the rollback to step %d: the points %s stay aside",
                    self._directory.url,
                    newest,
                    aside.back_to,
                    names,
                )
            return
        self._rename({head.name: point_name(head.step or 0) for head in theirs})

    def _claim(self) -> None:
        """Write the pins of an object store again: what an earlier writer knows of them must not be true any more."""
        catalog = self._log.catalog
        names = catalog.pins.names
        if names:
            said = {"fence": catalog.fences[-1]}
            self._publish("claimed", *(renamed_pin({**catalog.pins.state(name), **said}, name) for name in names))

    # -- what a crash leaves ----------------------------------------------------------------------

    def _end_interrupted(self) -> None:
        """Bring to its end what an interrupted writer began; within ``CommitLog.changing``."""
        catalog = self._log.catalog
        asides = catalog.asides()
        self._release(catalog.unfinished_asides())
        self._release(catalog.deleted_asides())
        self._try(self._rename_void)
        for head in filter(self._is_live, asides):
            if self._try(partial(self._return_points, head)):
                self._release([head])
        self._log.garbage.collect(catalog)  # shards of a pin that went, where the crash came before theirs did

    def _is_live(self, head: PinHead) -> bool:
        """Return whether what a rollback set aside was taken back, all of it."""
        return head.count > 0 and len(self._log.catalog.index.positions_in(head.ids)) == head.count

    def _try(self, rename: Callable[[], None]) -> bool:
        """Rename points, and return whether that could be written; if not, the next writer does it."""
        try:
            rename()
        except StoreWriteError as error:
            logger.warning("%s", error)
            return False
        return True

    def _rename_void(self) -> None:
        """Give points that a rollback made void the name of what it set aside; within :meth:`_changing`."""
        catalog = self._log.catalog
        void = catalog.void_points()
        heads = catalog.pins.heads
        self._rename({name: aside_name(generation, heads[name].step) for name, generation in void.items()})

    def _rename(self, names: Mapping[str, str]) -> None:
        if not names:
            return
        pins = self._log.catalog.pins
        with written(": saved points of later steps could not be renamed; they are void all the same"):
            self._directory.publish([renamed_pin(pins.state(old), new) for old, new in names.items()])
            self._directory.remove([pin_name(old) for old in names], durable=True)
        self._log.catalog.load_pins()
