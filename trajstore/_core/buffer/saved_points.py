"""Saved points of a buffer: its store, generator and other resume state, at a step of the model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trajstore._core.base.arguments import check_kind, path_or_url, text, truth, whole, whole_or_none
from trajstore._core.base.interrupts import uninterrupted
from trajstore._core.buffer.checkpoint import CheckpointState
from trajstore._core.buffer.sink import Sink, StoreSink
from trajstore._core.buffer.view import View
from trajstore._core.files.opening import check_options, open_directory
from trajstore._core.sampling.draws import Draws
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.saved_points import SavedPoint
from trajstore._core.store.states import asked
from trajstore._core.writing.points import Gone
from trajstore._core.writing.writer import StoreWriter
from trajstore.errors import StoreError

logger = logging.getLogger(__name__)

T = TypeVar("T")

KEEP_CALLS = "all calls are kept, also those after the snapshot (`discard` the sessions that begin anew), of"
"""Warning after going to a snapshot."""

KEPT = 3
"""Default number of saved points to keep."""


@dataclass(frozen=True, slots=True)
class PointsOfBuffer:
    """``buffer.points``: the watermark, saved points and pins of a buffer's store.

    Args:
        _sink: its store; a buffer in memory only saves no points.
        _view: its contents.
        _draws: its generator.
    """

    _sink: Sink
    _view: View
    _draws: Draws

    def _own(self, call: str) -> StoreWriter:
        """Return the writer of a buffer that shows only its own store.

        Raises:
            StoreError: it has no store, or shows a load from elsewhere.
        """
        if not isinstance(self._sink, StoreSink):
            raise StoreError(f"points.{call}: this buffer has no store of its own; use auto_save=True")
        request = self._view.request
        if request is not None:
            raise StoreError(
                f"points.{call}: this buffer shows trajectories loaded from {request.directory.url}, but a saved "
                f"point has only those of its own store {self._sink.writer.directory.url}; to have both in one "
                "store, save_checkpoint(NEW), and make the buffer with auto_save_path=NEW"
            )
        return self._sink.writer

    @property
    def committed(self) -> int:
        """Watermark: every trajectory of this buffer's store up to this id survives a crash; -1 before the first."""
        return self._sink.committed

    @property
    def saved(self) -> list[SavedPoint]:
        """The saved points of the current line, lowest step first; ``saved_points(path)`` lists those of any store.

        The current line is the history of the present state. Points saved after one to which the store went back are on
        other lines: :attr:`snapshots` has them.

        Raises:
            StoreError: the buffer has no store, or shows a load from elsewhere.
        """
        return self._own("saved").points.saved()

    @property
    def snapshots(self) -> list[SavedPoint]:
        """Everything that :meth:`go_to` accepts: saved points of all lines, pins, and heads that were left.

        Raises:
            StoreError: the buffer has no store, or shows a load from elsewhere.
        """
        return self._own("snapshots").points.snapshots()

    def save(self, step: int, state: Mapping[str, Any] | None = None, *, keep: int | None = KEPT) -> SavedPoint:
        """Save a point of the store at a step of the model, for :meth:`go_to`.

        Everything added before is flushed first. Call it before writing the model's own checkpoint, so that every
        checkpoint of the model has its point.

        Args:
            step: of the model; a point of the same step is replaced.
            state: further state of the run: plain values, tensors, and objects with a ``state_dict`` (a loader, a
                sampler), which is called at that moment. The buffer's own generator is saved anyway.
            keep: number of points of the current line to keep, by highest step; older ones are removed, with
                trajectories that only they held. None = all.

        Raises:
            StoreError: the buffer has no store, or shows a load from elsewhere.
            ConfigurationError: there is a point of a later step; or ``state`` has an unsupported value; says where.
            StoreWriteError: it could not be written; an earlier point of this step is unchanged.
        """
        return self._save(step, state, keep)

    def _save(
        self, step: int, state: Mapping[str, Any] | None, keep: int | None, ranks: int | None = None
    ) -> SavedPoint:
        """See :meth:`save`; ``ranks``: number of ranks of a run that save together."""
        step, keep = whole("step", step, 0), whole_or_none("keep", keep, 1)
        check_kind("state", state, Mapping, "a dict")
        writer = self._own("save")
        self._sink.flush()
        self._sink.warn_of_open(f"the point of step {step} lacks")

        def capture() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
            # The parts before the generator that they draw from: parts bring their own state of it.
            parts = asked(state or {})
            generator = CheckpointState.rng_json(self._draws.seed, self._draws.rng_state)
            return parts, generator if ranks is None else {**generator, "ranks": ranks}

        return uninterrupted(partial(writer.points.save, step, capture, keep))

    def go_to(self, name: str | int, *, aside: bool = True) -> dict[str, Any]:
        """Show a snapshot: its trajectories, late values and saved points; draws continue from there.

        Trajectories evicted since come back; trajectories added since are hidden. The state before becomes a snapshot
        itself, ``aside-...``, unless one has it already: going to that undoes this. No id is given twice. Open sessions
        keep all their calls, with a warning that names them.

        Args:
            name: of a snapshot; or step of a saved point of the current line.
            aside: False deletes the state before, with the saved points that no other state needs.

        Returns:
            The state that was saved with a point, with the state dicts of objects that had one; else empty.

        Raises:
            StoreNotFoundError: there is no such snapshot; names the existing ones.
            StoreError: the buffer has no store, or shows a load from elsewhere.
            CorruptStoreError: the snapshot is damaged; nothing was changed.
            StoreWriteError: it could not be written; make the buffer again, which shows one state or the other.
        """
        name = text("name", name) if isinstance(name, str) else whole("name", name, 0)
        aside, writer = truth("aside", aside), self._own("go_to")

        def change() -> Gone:
            gone = writer.points.go_to(name, aside=aside)
            if not gone.change.is_empty:
                logger.warning("%s: went to %s: %s", writer.directory.url, gone.change.to.name, _left(gone))
            return gone

        self._sink.flush()  # finished sessions are recorded as over: a later crash must not bring their rollouts back
        gone = self._while_nothing_is_added(writer, change)
        restored = CheckpointState.from_json(gone.details)
        self._draws.take_up(restored.seed, restored.rng_state)
        self._sink.warn_of_open(KEEP_CALLS)
        return dict(gone.state)

    def rollback(self, step: int, *, aside: bool = True) -> dict[str, Any]:
        """Go to the saved point of a step of the current line, see :meth:`go_to`."""
        return self.go_to(whole("step", step, 0), aside=aside)

    def pin(self, name: str) -> int:
        """Keep the present state under a name; return the store's generation.

        ``load_checkpoint(path, pin=name)`` reads it and :meth:`go_to` goes back to it, whatever is added, evicted or
        annotated later.

        Raises:
            StoreError: the buffer has no store (``auto_save=False``).
            ConfigurationError: the name is not a valid file name, or is reserved for saved points.
        """
        name = text("name", name)
        self._sink.flush()
        self._sink.warn_of_open(f"the pin {name} lacks")
        return self._sink.pin(name, CheckpointState.rng_json(self._draws.seed, self._draws.rng_state))

    def remove(self, name: str | int) -> None:
        """Remove a pin, a saved point (its step, or ``step-750``), or a head that was left (``aside-12``).

        Removing a head also removes the saved points on its line alone. Evicted trajectories that only it named are
        deleted. Warns if there is no such snapshot.
        """
        self._sink.remove_snapshot(text("name", name) if isinstance(name, str) else whole("name", name, 0))

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
    """Return the saved points of a store's current line, lowest step first, without opening it for writing.

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
    """Return the state saved with a point, for readers of a store that another process writes.

    Args:
        path: directory or URL of the store.
        step: of the point.
        storage_options: passed on to the fsspec file system.

    Raises:
        StoreNotFoundError: there is no store, or no such point; names the existing ones.
        CorruptStoreError: the state is missing or damaged.
    """
    check_options(path, storage_options)
    directory = open_directory(path_or_url("path", path), **storage_options)
    return Catalog.open(directory).read_state(whole("step", step, 0))


def _left(gone: Gone) -> str:
    """Describe the changes by going to a snapshot."""
    change = gone.change
    counted = (
        (f"trajectories ({change.nbytes:,} bytes) no longer shown", len(change.leaving)),
        ("trajectories shown again", len(change.returning)),
        ("late values that do not count any more", change.values),
        ("late values that count again", change.values_back),
        ("saved points on another line", len(change.points)),
    )
    parts = [f"{effect}: {count:,}" for effect, count in counted if count]
    if gone.aside is not None:
        parts.append(f"points.go_to({gone.aside!r}) undoes this, points.remove({gone.aside!r}) deletes what was left")
    return "; ".join(parts)
