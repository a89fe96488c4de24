"""How trajectories get into a view: copied, numbered, shown, and queued for the store if the buffer has one."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter

import torch

from trajstore import locks
from trajstore.buffer.content_watch import ContentWatch
from trajstore.buffer.view import View
from trajstore.columns.conversion import flatten
from trajstore.columns.flat import Block, FlatTrajectory
from trajstore.columns.memory import Arena
from trajstore.columns.owned import copied
from trajstore.columns.portions import portions
from trajstore.columns.steps import NothingToStoreError
from trajstore.errors import InvalidTrajectoryError, PartlyAddedError, listed
from trajstore.interrupts import uninterrupted
from trajstore.store.new_entries import NewEntries
from trajstore.trajectory import AnyTrajectory
from trajstore.writing.groups import Batch, random_uuids
from trajstore.writing.options import WriterOptions
from trajstore.writing.queue import WriteQueue

logger = logging.getLogger(__name__)


def flatten_all(trajectories: Iterable[AnyTrajectory], watch: ContentWatch) -> list[FlatTrajectory]:
    """Return trajectories as columns, all checked; those with nothing in them are passed over with a warning.

    Args:
        trajectories: what is to be added.
        watch: looks at them, once all have been checked.

    Raises:
        InvalidTrajectoryError: one of them cannot be stored and read back; names the field.
    """
    if not isinstance(trajectories, Iterable) or isinstance(trajectories, str | bytes | Mapping | torch.Tensor):
        raise InvalidTrajectoryError(
            f"add_trajectories takes a list of trajectories, not a {type(trajectories).__name__}: "
            "write add_trajectories([trajectory])"
        )
    flats = []
    empty = []
    stored = []
    for place, trajectory in enumerate(trajectories):
        try:
            flats.append(flatten(trajectory))
            stored.append(trajectory)
        except NothingToStoreError:
            empty.append(place)
    watch.look(stored, flats)
    if empty:
        logger.warning(
            "add_trajectories: at the places %s of %d there is nothing to store (no fields, or T * B = 0); "
            "the others have ids",
            listed(str(place) for place in empty),
            len(empty) + len(flats),
        )
    return flats


class Intake(ABC):
    """Adds trajectories to a view. Safe to call from several threads.

    Attributes:
        lock: held while additions are shown; contents are not to be replaced then.
        counter: one more than the newest id.
    """

    def __init__(self, view: View) -> None:
        self.lock = locks.rlock("Intake.lock")
        self.counter = 0
        self._view = view

    @abstractmethod
    def add(self, flats: Sequence[FlatTrajectory], uuids: bytes | None = None) -> list[int]:
        """Add trajectories, one or more, and return their ids. Their tensors are copied before this returns.

        Args:
            flats: what to add.
            uuids: 16 bytes for each; None = random ones.
        """

    @abstractmethod
    def go_on(self, counter: int, first: int, stride: int) -> None:
        """Number what comes after a load; the caller holds the lock.

        Args:
            counter: one more than the newest loaded id.
            first: lowest id that may be given; lower ones are skipped, none is given twice.
            stride: from one id to the next.
        """


class MemoryIntake(Intake):
    """Keeps trajectories in memory, as many as the view's cache holds and its retention allows."""

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self._arena = Arena(0)
        self._next_id = 0
        self._stride = 1

    def add(self, flats: Sequence[FlatTrajectory], uuids: bytes | None = None) -> list[int]:
        blocks, entries = copied(flats, self._arena), NewEntries.of(flats)
        with self.lock:
            ids = [self._next_id + i * self._stride for i in range(len(flats))]
            self._next_id = ids[-1] + self._stride  # first: an interrupted call leaves a gap, never an id given twice
            self.counter = ids[-1] + 1
            self._view.contents.add(blocks, entries, ids, uuids or random_uuids(len(flats)), pending=False)
            self._view.forget(self._view.expire(ids[-1]))
        return ids

    def go_on(self, counter: int, first: int, stride: int) -> None:
        self.counter = counter
        self._next_id, self._stride = max(first, self._next_id), stride


class StoreIntake(Intake):
    """Keeps trajectories in memory until the writer has them on disk.

    Args:
        view: where they are shown.
        queue: where they wait to be written.
        options: the writer's.
        counter: one more than the newest id of the store.
    """

    def __init__(self, view: View, queue: WriteQueue, options: WriterOptions, counter: int) -> None:
        super().__init__(view)
        self.counter = counter
        self._queue = queue
        self._shard_bytes = options.shard_bytes
        self._arena = Arena(min(2 * options.shard_bytes, options.max_pending_bytes // 4))

    def add(self, flats: Sequence[FlatTrajectory], uuids: bytes | None = None) -> list[int]:
        """Add trajectories; waits for room in the queue, or raises, as its options say.

        A list that needs more memory than a shard is added in pieces. Whatever is raised, a piece has been added
        whole or not at all.

        Raises:
            StoreWriteError: an earlier write failed.
            PartlyAddedError: it failed after pieces were added; has their ids.
            PendingFullError: there is no room and ``on_full`` is ``"raise"``.
            StoreClosedError: the writer was closed, or belongs to the parent process.
        """
        ids: list[int] = []
        pieces = list(portions(flats, self._shard_bytes, attrgetter("nbytes")))
        total: int | None = sum([nbytes for _, nbytes in pieces])
        for piece, nbytes in pieces:
            given = None if uuids is None else uuids[16 * len(ids) : 16 * (len(ids) + len(piece))]
            try:
                ids += self._submit(piece, Batch(nbytes), total, given)
            except Exception as error:  # whatever it is, the caller must learn which ids there are
                if not ids:
                    raise
                raise PartlyAddedError(
                    f"{error or repr(error)}; the first {len(ids)} of {len(flats)} trajectories were added before, "
                    "this error's ids are theirs; add the others again",
                    ids,
                ) from error
            total = None
        return ids

    def _submit(
        self, flats: Sequence[FlatTrajectory], batch: Batch, total: int | None, given: bytes | None
    ) -> list[int]:
        queue = self._queue
        ids: list[int] = []
        blocks: list[Block] = []
        queue.check_process()  # in a forked child nothing can be taken back either: the lock may never come free
        try:
            queue.reserve(batch, total)
            blocks, entries = copied(flats, self._arena), NewEntries.of(flats)
            with self.lock:
                ids, uuids = queue.take_ids(len(flats))
                uuids = given or uuids
                self._view.contents.add(blocks, entries, ids, uuids, pending=True)
                queue.submit(batch, blocks, entries, ids, uuids)
                self.counter = ids[-1] + 1
        except BaseException:
            uninterrupted(partial(self._take_back, batch, blocks, ids))
            raise
        return ids

    def _take_back(self, batch: Batch, blocks: Sequence[Block], ids: Sequence[int]) -> None:
        """Undo what was begun; a batch that is queued already stays."""
        if self._queue.withdraw(batch):
            self._view.contents.retract(blocks, ids)

    def go_on(self, counter: int, first: int, stride: int) -> None:
        self.counter = counter
        self._view.own_first = self._queue.reserve_ids(first, stride)
