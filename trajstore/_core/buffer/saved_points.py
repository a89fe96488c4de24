"""The stores of :class:`~trajstore._core.buffer.points.Points`: a buffer's own, and those at a path."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trajstore._core.base.arguments import path_or_url
from trajstore._core.base.interrupts import uninterrupted
from trajstore._core.buffer.checkpoint import CheckpointState
from trajstore._core.buffer.points import Listing, Points, Stores, asked
from trajstore._core.buffer.sink import Sink, StoreSink
from trajstore._core.buffer.view import View
from trajstore._core.files.base import Directory
from trajstore._core.files.opening import check_options, open_directory
from trajstore._core.reading.places import Place, is_of_rank, nothing_at, place_in, rank_of
from trajstore._core.sampling.draws import Draws, rng_json
from trajstore._core.sessions.sessions import warn_of_open
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.rollback import SnapshotChanges, plan_change
from trajstore._core.store.run_ids import ALONE
from trajstore._core.store.saved_points import snapshots_of
from trajstore._core.writing.inbox import Pending
from trajstore._core.writing.points import Gone, StorePoints
from trajstore._core.writing.unattended import held_points
from trajstore._core.writing.writer import StoreWriter
from trajstore.errors import ConfigurationError, StoreError, counted

logger = logging.getLogger(__name__)

T = TypeVar("T")

_KEEP_CALLS = "all calls are kept, also those after the snapshot (`discard` the sessions that begin anew), of"
"""Warning after going to a snapshot."""


class OwnStore(Stores):
    """The store of a buffer, with the buffer's generator.

    Args:
        sink: its store; a buffer in memory only saves no points.
        view: its contents.
        draws: its generator.
    """

    name, count = "this store", 1

    def __init__(self, sink: Sink, view: View, draws: Draws) -> None:
        self._sink, self._view, self._draws = sink, view, draws

    def _writer(self, call: str) -> StoreWriter:
        """Return the writer of a buffer.

        Raises:
            StoreError: it has no store.
        """
        if not isinstance(self._sink, StoreSink):
            raise StoreError(f"points.{call}: this buffer has no store of its own; use auto_save=True")
        return self._sink.writer

    def _own(self, call: str) -> StoreWriter:
        """Return the writer of a buffer that shows only its own store.

        Raises:
            StoreError: it has no store, or shows a load from elsewhere.
        """
        writer, request = self._writer(call), self._view.request
        if request is not None:
            raise StoreError(
                f"points.{call}: this buffer shows trajectories loaded from {request.directory.url}, but a saved "
                f"point has only those of its own store {writer.directory.url}; to have both in one "
                "store, save_checkpoint(NEW), and make the buffer with auto_save_path=NEW"
            )
        return writer

    def snapshots(self) -> Listing:
        return {ALONE: self._own("snapshots").points.snapshots()}

    def state(self, name: str | int) -> dict[str, Any]:
        return self._own("state").points.state(name)

    def save(self, step: int, state: Mapping[str, Any], ranks: int | None = None) -> Listing:
        """See :class:`Stores`; ``ranks``: number of ranks of a run that save together."""
        writer = self._own("save")
        self._sink.flush()
        self._sink.warn_of_open(f"the point of step {step} lacks")

        def capture() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
            # The parts before the generator that they draw from: parts bring their own state of it.
            parts = asked(state)
            generator = rng_json(self._draws.seed, self._draws.rng_state)
            return parts, generator if ranks is None else {**generator, "ranks": ranks}

        return {ALONE: uninterrupted(partial(writer.points.save, step, capture))}

    def pin(self, name: str) -> Listing:
        writer = self._writer("pin")
        self._sink.flush()
        self._sink.warn_of_open(f"the pin {name} lacks")
        return {
            ALONE: uninterrupted(partial(writer.points.pin, name, **rng_json(self._draws.seed, self._draws.rng_state)))
        }

    def remove(self, name: str | int) -> list[str | None]:
        writer = self._writer("remove")
        reason = uninterrupted(partial(writer.points.remove, name))
        writer.rewriter.note()
        return [reason]

    def go_to(self, name: str | int, aside: bool) -> dict[str, Any]:
        writer = self._own("go_to")

        def change() -> Gone:
            with self._sink.lock:  # nothing is added meanwhile
                writer.flush()
                gone = writer.points.go_to(name, aside=aside)
                if not gone.plan.is_empty:
                    left = _left(gone.plan.changes)
                    logger.warning("%s: went to %s: %s", writer.directory.url, gone.plan.to.name, left)
                return gone

        self._sink.flush()  # finished sessions are recorded as over: a later crash must not bring their rollouts back
        with self._view.steady:
            gone = uninterrupted(change)
        writer.rewriter.note()
        restored = CheckpointState.from_json(gone.details)
        self._draws.take_up(restored.seed, restored.rng_state)
        self._sink.warn_of_open(_KEEP_CALLS)
        return dict(gone.state)

    def changes(self, name: str | int, aside: bool) -> list[SnapshotChanges]:
        writer = self._own("changes")
        self._sink.flush()
        self._sink.take_in_values()
        with writer.log.standing_still() as catalog:
            return [plan_change(catalog, name, aside).changes]


class StoresAt(Stores):
    """The store at a path, or the stores of a run, which no process has open for writing while they change.

    Args:
        place: of the store, or of the run.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self.name = place.url
        self.count = 1 if place.kind == "store" else None

    def held(self) -> AbstractContextManager[object]:
        stores_of(self._place)  # refuses a run with an absent rank
        return nullcontext()

    def begun(self) -> Container[int]:
        return [rank for rank, directory in self._directories().items() if Catalog.open(directory).next_id]

    def _directories(self) -> dict[int, Directory]:
        if self._place.kind == "store":
            return {ALONE: self._place.directory}
        ranks = [part for part in self._place.parts if part.kind == "store" and is_of_rank(part.name)]
        return {rank_of(part.directory): part.directory for part in ranks}

    def snapshots(self) -> Listing:
        return {rank: snapshots_of(Catalog.open(directory)) for rank, directory in self._directories().items()}

    def state(self, name: str | int) -> dict[str, Any]:
        return Catalog.open(stores_of(self._place)[0].directory).read_state(name)

    def save(self, step: int, state: Mapping[str, Any]) -> Listing:
        parts, stores = asked(state), stores_of(self._place)
        details = {} if self.count else {"ranks": len(stores)}
        self._each(stores, lambda points: points.save(step, lambda: (parts, details)))
        return self.snapshots()

    def pin(self, name: str) -> Listing:
        self._each(stores_of(self._place), lambda points: points.pin(name))
        return self.snapshots()

    def remove(self, name: str | int) -> list[str | None]:
        return self._each(stores_of(self._place), lambda points: points.remove(name))

    def go_to(self, name: str | int, aside: bool) -> dict[str, Any]:
        stores = self._having(name)
        for store in stores:  # all, before any change
            plan_change(_with_pending(store)[0], name, aside)
        gone = self._each(stores, lambda points: points.go_to(name, aside=aside))
        for store in stores:
            warn_of_open(store.url, _KEEP_CALLS)
        return dict(gone[0].state)

    def changes(self, name: str | int, aside: bool) -> list[SnapshotChanges]:
        results = []
        for store in self._having(name):
            catalog, added = _with_pending(store)
            fences = 0 if store.directory.can_append else 1  # a writer of an object store begins with one
            results.append(plan_change(catalog, name, aside, added + fences).changes)
        return results

    @staticmethod
    def _each(stores: list[Place], call: Callable[[StorePoints], T]) -> list[T]:
        results = []
        for store in stores:
            with held_points(store.directory) as points:
                results.append(call(points))
        return results

    def _having(self, name: str | int) -> list[Place]:
        """Return the stores of a run without empty ones above the number of ranks that a point records."""
        stores = stores_of(self._place)
        ranks = Catalog.open(stores[0].directory).snapshot(name).ranks
        if not ranks:
            return stores
        above = [store for store in stores if is_of_rank(store.name) and rank_of(store.directory) >= ranks]
        empty = [store for store in above if not len(Catalog.open(store.directory).index)]
        for store in empty:
            logger.warning("%s: is skipped: it is empty, and %s saved the point", store.url, counted(ranks, "rank"))
        return [store for store in stores if store not in empty]


def points_at(path: str | Path, **storage_options: Any) -> Points:
    """Return the saved points of a store or run at a path, without opening it for writing.

    Changes wait for a store's lock and hold it for a moment, so no buffer may have the store open meanwhile.

    Args:
        path: directory or URL of a store, or of a run, the folder with the stores ``rank_*``.
        storage_options: passed on to the fsspec file system.

    Raises:
        StoreNotFoundError: no known format is there. Its calls raise ``CorruptStoreError`` for a damaged store,
            ``StoreLockedError`` for a change while a writer has it open, and ``ConfigurationError`` for a change of a
            run with an absent rank, or of a directory that is not trajstore's.
    """
    check_options(path, storage_options)
    directory = open_directory(path_or_url("path", path), **storage_options)
    place = place_in(directory)
    if place is None:
        raise nothing_at(path, directory)
    return Points(StoresAt(place))


def stores_of(place: Place) -> list[Place]:
    """Return the store at a place, or all stores of a complete run.

    Raises:
        ConfigurationError: the place is not a store of trajstore, or is a run with an absent or foreign rank.
    """
    if place.kind == "store":
        return [place]
    stores = [part for part in place.parts if part.kind == "store"]
    if place.kind != "run" or len(stores) < len(place.parts) or place.lacking:
        others = [f"{part.name} is no store of trajstore" for part in place.parts if part.kind != "store"]
        why = "; ".join((*place.lacking, *others)) if place.kind == "run" else f"it is of the kind {place.kind!r}"
        raise ConfigurationError(f"{place.url}: is neither a store of trajstore nor a run with all its ranks: {why}")
    return stores


def _with_pending(place: Place) -> tuple[Catalog, int]:
    """Return the catalog of a store with the late values in its inbox, and the number of their commits."""
    pending, catalog = Pending(place.directory), Catalog.open(place.directory)
    return catalog, sum(file.left is not None for file in pending.add_to(catalog))


def _left(changes: SnapshotChanges) -> str:
    """Describe the changes by going to a snapshot."""
    counted_changes = (
        (f"trajectories ({changes.leaving_bytes:,} bytes) no longer shown", changes.leaving),
        ("trajectories shown again", changes.returning),
        ("late values that do not count any more", changes.values),
        ("late values that count again", changes.values_back),
        ("saved points on another line", len(changes.later_steps)),
    )
    parts = [f"{effect}: {count:,}" for effect, count in counted_changes if count]
    if (left := changes.left) is not None:
        deletes = f", points.remove({left!r}) deletes what was left" if changes.aside else ""
        parts.append(f"points.go_to({left!r}) undoes this{deletes}")
    return "; ".join(parts)
