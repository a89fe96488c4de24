"""Saved points of a buffer: store, generator and whatever else a loop needs to go on, at one step of its model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trajstore.arguments import check_kind, path_or_url, truth, whole, whole_or_none
from trajstore.buffer.backing import Backing, StoreBacking
from trajstore.buffer.checkpoint import CheckpointState
from trajstore.buffer.view import View
from trajstore.errors import StoreError
from trajstore.files.opening import check_options, open_directory
from trajstore.interrupts import uninterrupted
from trajstore.sampling.draws import Draws
from trajstore.store.catalog import Catalog
from trajstore.store.rollback import RollbackPlan
from trajstore.store.saved_points import SavedPoint
from trajstore.store.states import asked
from trajstore.writing.writer import StoreWriter

logger = logging.getLogger(__name__)

T = TypeVar("T")

KEPT = 3
"""Saved points that stay unless ``save_point`` is told otherwise."""


@dataclass(frozen=True, slots=True)
class PointsOfBuffer:
    """What a buffer does with saved points.

    Attributes:
        backing: its store; in memory only it saves no points.
        view: what it shows.
        draws: its generator.
    """

    backing: Backing
    view: View
    draws: Draws

    def _own(self, call: str) -> StoreWriter:
        """Return the writer of a buffer that shows its own store alone.

        Raises:
            StoreError: it has no store, or shows what was loaded from elsewhere.
        """
        if not isinstance(self.backing, StoreBacking):
            raise StoreError(f"{call}: this buffer has no store of its own; use auto_save=True")
        request = self.view.request
        if request is not None:
            raise StoreError(
                f"{call}: this buffer shows what was loaded from {request.directory.url}, and a saved point names "
                f"trajectories of its own store {self.backing.writer.directory.url} alone; to have both in one store, "
                "save_checkpoint(NEW), and make the buffer with auto_save_path=NEW"
            )
        return self.backing.writer

    def save(
        self, step: int, state: Mapping[str, Any] | None, keep: int | None, ranks: int | None = None
    ) -> SavedPoint:
        """See :meth:`TrajectoryReplayBuffer.save_point`; ``ranks``: how many ranks of a run save it together."""
        step, keep = whole("step", step, 0), whole_or_none("keep", keep, 1)
        check_kind("state", state, Mapping, "a dict")
        writer = self._own("save_point")
        writer.flush()

        def capture() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
            # First the parts, then the generator that they draw from: parts bring their own state of it.
            parts = asked(state or {})
            said = CheckpointState.rng_json(self.draws.seed, self.draws.rng_state)
            return parts, said if ranks is None else {**said, "ranks": ranks}

        return uninterrupted(partial(writer.points.save, step, capture, keep))

    def roll_back(self, step: int, aside: bool) -> dict[str, Any]:
        """See :meth:`TrajectoryReplayBuffer.rollback`."""
        step, aside = whole("step", step, 0), truth("aside", aside)
        writer = self._own("rollback")

        def change() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
            plan, name, state, said = writer.points.roll_back(step, aside=aside)
            if not plan.is_empty:
                self.view.show_own_again()
                logger.warning(
                    "%s: rolled back to step %d: %s, %d evicted are back",
                    writer.directory.url,
                    step,
                    _left(plan, name),
                    len(plan.returning),
                )
            return state, said

        state, said = self._while_nothing_is_added(writer, change)
        restored = CheckpointState.from_json(said)
        self.draws.take_up(restored.seed, restored.rng_state)
        return dict(state)

    def take_back(self, name: str) -> int:
        """See :meth:`TrajectoryReplayBuffer.take_back`."""
        writer = self._own("take_back")

        def change() -> int:
            count = writer.points.take_back(name)
            self.view.show_own_again()
            return count

        return self._while_nothing_is_added(writer, change)

    def _while_nothing_is_added(self, writer: StoreWriter, change: Callable[[], T]) -> T:
        with self.view.steady:

            def run() -> T:
                with self.backing.intake.lock:
                    writer.flush()
                    return change()

            result = uninterrupted(run)
        writer.rewriter.note()
        return result

    def saved(self) -> list[SavedPoint]:
        """See :attr:`TrajectoryReplayBuffer.saved_points`."""
        return self._own("saved_points").points.saved()


def saved_points(path: str | Path, **storage_options: Any) -> list[SavedPoint]:
    """Return the saved points of a store, lowest step first, without opening it for writing.

    Args:
        path: directory or URL.
        storage_options: passed on to the fsspec file system.

    Raises:
        StoreNotFoundError: there is no store.
        CorruptStoreError: it is damaged.
    """
    check_options(path, storage_options)
    catalog = Catalog.open(open_directory(path_or_url("path", path), **storage_options))
    return [SavedPoint.of(head) for head in catalog.points()]


def saved_state(path: str | Path, step: int, **storage_options: Any) -> dict[str, Any]:
    """Return the state that was saved with a point: for readers of a store, of which another process is the writer.

    Args:
        path: directory or URL of the store.
        step: of the point.
        storage_options: passed on to the fsspec file system.

    Raises:
        StoreNotFoundError: there is no store, or no such point; names those that there are.
        CorruptStoreError: the state is missing or damaged.
    """
    check_options(path, storage_options)
    directory = open_directory(path_or_url("path", path), **storage_options)
    return Catalog.open(directory).read_state(whole("step", step, 0))


def _left(plan: RollbackPlan, aside: str | None) -> str:
    """Return what a rollback took away, and where it is now, in words."""
    fate = (
        "deleted"
        if aside is None
        else f"set aside as {aside} (unpin({aside!r}) deletes them, take_back({aside!r}) shows them again)"
    )
    if len(plan.leaving):
        return f"{len(plan.leaving)} trajectories ({plan.nbytes} bytes) added since were {fate}"
    return f"saved points of later steps were {fate}" if plan.void else "nothing was added since"
