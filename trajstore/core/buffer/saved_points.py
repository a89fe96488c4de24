"""Saved points of a buffer: store, generator and whatever else a loop needs to go on, at one step of its model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trajstore.core.base.arguments import check_kind, path_or_url, text, truth, whole, whole_or_none
from trajstore.core.base.interrupts import uninterrupted
from trajstore.core.buffer.checkpoint import CheckpointState
from trajstore.core.buffer.sink import Sink, StoreSink
from trajstore.core.buffer.view import View
from trajstore.core.files.opening import check_options, open_directory
from trajstore.core.sampling.draws import Draws
from trajstore.core.store.catalog import Catalog
from trajstore.core.store.rollback import RollbackPlan
from trajstore.core.store.saved_points import SavedPoint
from trajstore.core.store.states import asked
from trajstore.core.writing.writer import StoreWriter
from trajstore.errors import StoreError

logger = logging.getLogger(__name__)

T = TypeVar("T")

KEPT = 3
"""Saved points that stay unless saving is told otherwise."""


@dataclass(frozen=True, slots=True)
class PointsOfBuffer:
    """``buffer.points``: moments of a buffer's store: what is committed, and what is kept as saved points and pins.

    Args:
        _sink: its store; in memory only it saves no points.
        _view: what it shows.
        _draws: its generator.
    """

    _sink: Sink
    _view: View
    _draws: Draws

    def _own(self, call: str) -> StoreWriter:
        """Return the writer of a buffer that shows its own store alone.

        Raises:
            StoreError: it has no store, or shows what was loaded from elsewhere.
        """
        if not isinstance(self._sink, StoreSink):
            raise StoreError(f"points.{call}: this buffer has no store of its own; use auto_save=True")
        request = self._view.request
        if request is not None:
            raise StoreError(
                f"points.{call}: this buffer shows what was loaded from {request.directory.url}, and a saved point "
                f"names trajectories of its own store {self._sink.writer.directory.url} alone; to have both in one "
                "store, save_checkpoint(NEW), and make the buffer with auto_save_path=NEW"
            )
        return self._sink.writer

    @property
    def committed(self) -> int:
        """Watermark: every trajectory of this buffer's store up to this id survives a crash; -1 before the first."""
        return self._sink.committed

    @property
    def saved(self) -> list[SavedPoint]:
        """The saved points of the store, lowest step first; :func:`trajstore.saved_points` asks any store.

        Raises:
            StoreError: the buffer has no store, or shows what was loaded from elsewhere.
        """
        return self._own("saved").points.saved()

    def save(self, step: int, state: Mapping[str, Any] | None = None, *, keep: int | None = KEPT) -> SavedPoint:
        """Mark what the store holds now with the model's step, so that :meth:`rollback` can go back to it.

        Everything added before is flushed first. Call it before the model's own checkpoint is written: then every
        checkpoint of the model has its point.

        Args:
            step: of the model; a point of the same step is replaced.
            state: what else the resumed run needs: plain values, tensors, and objects with a ``state_dict`` (a loader,
                a sampler), which are asked for it at that very moment. The buffer's own generator is saved anyway.
            keep: points that stay, those of the highest steps; older ones are released, with the trajectories that
                only they held. None = all.

        Raises:
            StoreError: the buffer has no store, or shows what was loaded from elsewhere.
            ConfigurationError: there is a point of a later step; or ``state`` has what cannot be saved; says where.
            StoreWriteError: it could not be written; an earlier point of this step is still there.
        """
        return self._save(step, state, keep)

    def _save(
        self, step: int, state: Mapping[str, Any] | None, keep: int | None, ranks: int | None = None
    ) -> SavedPoint:
        """See :meth:`save`; ``ranks``: how many ranks of a run save it together."""
        step, keep = whole("step", step, 0), whole_or_none("keep", keep, 1)
        check_kind("state", state, Mapping, "a dict")
        writer = self._own("save")
        writer.flush()

        def capture() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
            # First the parts, then the generator that they draw from: parts bring their own state of it.
            parts = asked(state or {})
            said = CheckpointState.rng_json(self._draws.seed, self._draws.rng_state)
            return parts, said if ranks is None else {**said, "ranks": ranks}

        return uninterrupted(partial(writer.points.save, step, capture, keep))

    def rollback(self, step: int, *, aside: bool = True) -> dict[str, Any]:
        """Go back to the saved point of a step: the store shows what it showed then, and draws go on from there.

        Trajectories that were evicted since come back. Those that were added since are set aside: they are no longer
        shown, their ids are not given again, and :meth:`take_back` or ``load_checkpoint(path, pin="aside-...")`` have
        them. Saved points of later steps are set aside with them.

        Args:
            step: of the point.
            aside: False deletes what was written since the point.

        Returns:
            The state that was saved with the point, what had a ``state_dict`` as what that returned; empty if none was.

        Raises:
            StoreNotFoundError: there is no point of this step; names those that there are.
            StoreError: the buffer has no store, or shows what was loaded from elsewhere.
            CorruptStoreError: the point is damaged; nothing was changed.
            StoreWriteError: it could not be written; make the buffer again, which shows the one or the other.
        """
        step, aside = whole("step", step, 0), truth("aside", aside)
        writer = self._own("rollback")

        def change() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
            plan, name, state, said = writer.points.roll_back(step, aside=aside)
            if not plan.is_empty:
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
        self._draws.take_up(restored.seed, restored.rng_state)
        return dict(state)

    def take_back(self, name: str) -> int:
        """Show again what a rollback set aside, beside what is there now; return how many trajectories.

        Args:
            name: ``"aside-..."``, as the rollback's warning and ``trajstore inspect`` say it.

        Raises:
            StoreNotFoundError: nothing was set aside under this name.
            StoreError: the buffer has no store, or shows what was loaded from elsewhere.
            StoreWriteError: it could not be written; make the buffer again, which shows the one or the other.
        """
        name, writer = text("name", name), self._own("take_back")

        return self._while_nothing_is_added(writer, partial(writer.points.take_back, name))

    def pin(self, name: str) -> int:
        """Keep the present state readable under a name of its own; return the store's generation.

        ``load_checkpoint(path, pin=name)`` reads it, however much is added and evicted later.

        Raises:
            StoreError: the buffer has no store (``auto_save=False``).
            ConfigurationError: the name cannot be that of a file, or is one that saved points have.
        """
        name = text("name", name)
        self._sink.flush()
        return self._sink.pin(name, CheckpointState.rng_json(self._draws.seed, self._draws.rng_state))

    def unpin(self, name: str) -> None:
        """Let go of a pin, of a saved point (``step-750``), or of what a rollback set aside (``aside-12``).

        Evicted trajectories that only it named are deleted. Where there is no such name a warning says so.
        """
        self._sink.unpin(text("name", name))

    def _while_nothing_is_added(self, writer: StoreWriter, change: Callable[[], T]) -> T:
        with self._view.steady:

            def run() -> T:
                with self._sink.lock:
                    writer.flush()
                    return change()

            result = uninterrupted(run)
        writer.rewriter.note()
        return result


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
        else f"set aside as {aside} (points.unpin({aside!r}) deletes them, "
        f"points.take_back({aside!r}) shows them again)"
    )
    told = []
    if len(plan.leaving):
        told.append(f"{len(plan.leaving)} trajectories ({plan.nbytes} bytes) added since were {fate}")
    elif plan.void:
        told.append(f"saved points of later steps were {fate}")
    if plan.notes:
        told.append(f"{plan.notes} values given since do not count any more")
    return "; ".join(told) or "nothing was added since"
