"""Reads from many stores: from a store's directory if it is on this machine, else from its actor."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.base import locks
from trajstore._core.base.types import IntArray
from trajstore._core.buffer.positions import Positions
from trajstore._core.buffer.reader import Reader
from trajstore._core.columns.fields import nest, unnest
from trajstore._core.sampling.base import Drawn
from trajstore.distributed.actors import SilentStoresError, Stores
from trajstore.distributed.compact_table import CompactTable
from trajstore.distributed.read_request import Part, united
from trajstore.distributed.row_client import RowClient
from trajstore.distributed.server import MOST_STORES, ServedStore
from trajstore.errors import StoreError, StoreUnreachableError, TrajectoryUnavailableError, listed
from trajstore.trajectory import AnyTrajectory

logger = logging.getLogger(__name__)

Columns = dict[str, torch.Tensor]

T = TypeVar("T")

_SOON = 0.05  # seconds until the first check for newly committed trajectories; doubles


class Placing:
    """Positions of a table's samples in the reader of its only store.

    Args:
        table: trajectories of one store.
        known: positions of the table's trajectories in the store's reader.
    """

    def __init__(self, table: CompactTable, known: Positions) -> None:
        self.known = known
        self._table = table
        self.whole = bool((known.positions >= 0).all())
        """True if the reader shows all trajectories of the table."""

    def rows(self, places: IntArray) -> tuple[IntArray, IntArray] | None:
        """Return position and row of each sample; None if the reader lacks one of their trajectories."""
        at, rows = self._table.rows(places)
        positions = self.known.positions[at]
        return None if not self.whole and positions.min() < 0 else (positions, rows)


@dataclass(frozen=True, slots=True)
class _Last:
    """Cached placing of the table that was read last.

    Attributes:
        table: the table.
        reader: reader of its only store; None if it has several, or the directory is elsewhere.
        placing: positions of its samples in the reader.
        until: expiry time (monotonic clock).
        again: seconds until the next expiry.
    """

    table: CompactTable | None = None
    reader: Reader | None = None
    placing: Placing | None = None
    until: float = -math.inf
    again: float = _SOON


@dataclass(frozen=True, slots=True)
class _Kept:
    """Rows that were read while others of their batch were evicted; a read of the mended batch uses them.

    Otherwise, where much is evicted, some row of every large batch would be evicted before it is read.

    Attributes:
        drawn: the rows.
        columns: names of the columns that were requested.
        values: the rows by dotted column name.
    """

    drawn: Drawn
    columns: tuple[str, ...] | None
    values: Columns

    def find(self, drawn: Drawn) -> IntArray:
        """Return the place of each row among the kept ones; -1 if it is not kept."""
        rows = zip(self.drawn.ids.tolist(), self.drawn.samples.tolist(), strict=True)
        known = {row: place for place, row in enumerate(rows)}
        wanted = zip(drawn.ids.tolist(), drawn.samples.tolist(), strict=True)
        return np.array([known.get(row, -1) for row in wanted], np.int64)

    def part(self, places: IntArray) -> Part:
        """Return some of the rows."""
        return Part.of({name: tensor[places] for name, tensor in self.values.items()})


class _Mine(threading.local):
    """State of one thread."""

    kept: _Kept | None = None


class Reads:
    """Reads drawn rows. Stores whose directory is on another machine are requested in parallel, with a time limit.

    Args:
        stores: the actors.
    """

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._readers: dict[int, Reader | None] = {}
        self._lock = locks.lock("Reads._lock")
        self._last = _Last()
        self._mine = _Mine()
        self._due = False
        self._rows = RowClient(stores)

    def placed(
        self,
        table: CompactTable,
        places: IntArray,
        columns: Sequence[str] | None,
        out: Mapping[str, torch.Tensor] | None,
        seconds: float,
    ) -> dict[str, Any]:
        """Return samples of a table, given by their numbers, as a nested dict.

        If the table is of one store with a local directory, this is as fast as a draw of a reader.

        Raises:
            TrajectoryUnavailableError, SchemaMismatchError, SilentStoresError: see :meth:`rows`.
        """
        self._follow()
        reader, placing = self._placing(table, seconds)
        if reader is not None and placing is not None:
            positions = placing.rows(places)
            with suppress(TrajectoryUnavailableError):  # the store may have newer trajectories
                if positions is not None:
                    values = reader._sampling.read_at(placing.known, *positions, columns=columns, out=out)
                    if values is not None:
                        return values
                    self._last = _Last()  # trajectories were evicted: locate again at the next call
        return nest(self.rows(table.drawn(places), columns, out, seconds))

    def _placing(self, table: CompactTable, seconds: float) -> tuple[Reader | None, Placing | None]:
        """Return the reader of a table's only store and the placing of its samples; None without such a reader."""
        last = self._last
        if last.table is table and time.monotonic() < last.until:
            return last.reader, last.placing
        ranks = list(table.counts)
        reader = self._reader(ranks[0], seconds) if len(ranks) == 1 else None
        if reader is None:
            self._last = _Last(table, None, None, math.inf)
            return None, None
        placing = Placing(table, reader._sampling.locate(table.ids))
        if not placing.whole:
            with self._lock:
                reader.refresh()
            placing = Placing(table, reader._sampling.locate(table.ids))
        again = last.again if last.table is table else _SOON
        until = math.inf if placing.whole else time.monotonic() + again
        self._last = _Last(table, reader, placing, until, 2 * again)
        return reader, placing

    def rows(
        self, drawn: Drawn, columns: Sequence[str] | None, out: Mapping[str, torch.Tensor] | None, seconds: float
    ) -> Columns:
        """Return rows by dotted column name, ``[n, ...]``, in the order in which they were drawn.

        Raises:
            TrajectoryUnavailableError: a trajectory has been evicted since. The other rows are kept for this thread's
                next read, see :meth:`keeps`.
            SchemaMismatchError: stores differ in their columns.
            SilentStoresError: stores do not answer.
        """
        self._follow()
        named = None if columns is None else tuple(columns)
        kept, self._mine.kept = self._mine.kept, None
        parts: list[Part] = []
        places: list[IntArray] = []
        ranks = drawn.ids % MOST_STORES
        if kept is not None and kept.columns == named:
            at = kept.find(drawn)
            ranks = np.where(at < 0, ranks, -1)
            if (at >= 0).any():
                parts, places = [kept.part(at[at >= 0])], [np.flatnonzero(at >= 0)]
        of_ranks = {rank: np.flatnonzero(ranks == rank) for rank in np.unique(ranks).tolist() if rank >= 0}
        lacking: dict[int, Drawn] = {}
        for rank, at in of_ranks.items():
            single = len(at) == len(drawn)
            mine = drawn if single else drawn.at(at)
            columns_here = self._of_directory(rank, mine, columns, out if single else None, seconds)
            if columns_here is None:
                lacking[rank] = mine
            elif single:
                return columns_here
            else:
                parts.append(Part.of(columns_here))
                places.append(at)
        for rank, block in self._answers(*self._rows.ask(lacking, columns, seconds)).items():
            part = Part.unpacked(block)
            if part.count:
                parts.append(part)
                places.append(of_ranks[rank] if part.places is None else of_ranks[rank][part.places])
        if (count := sum(map(len, places))) < len(drawn):
            there = np.concatenate(places) if places else np.zeros(0, np.int64)
            if count:
                ends = np.cumsum([len(part) for part in places])
                self._mine.kept = _Kept(
                    drawn.at(there), named, united(parts, np.split(np.arange(count), ends[:-1]), None)
                )
            raise _evicted(np.delete(drawn.ids, there))
        return united(parts, places, out) if parts else {}

    def keeps(self, drawn: Drawn) -> npt.NDArray[np.bool_]:
        """Return for each row whether it was read already, in a batch of which another row was evicted."""
        kept = self._mine.kept
        return np.zeros(len(drawn), np.bool_) if kept is None else kept.find(drawn) >= 0

    def _answers(self, answers: dict[int, T], failed: Mapping[int, Exception]) -> dict[int, T]:
        """Return the answers of stores, if all have answered.

        Raises:
            SilentStoresError: stores do not answer.
            StoreError: raised by a store; among others SchemaMismatchError.
        """
        for error in failed.values():
            if not isinstance(error, StoreUnreachableError):
                raise error
        if failed:
            raise SilentStoresError(failed)
        return answers

    def _of_directory(
        self,
        rank: int,
        drawn: Drawn,
        columns: Sequence[str] | None,
        out: Mapping[str, torch.Tensor] | None,
        seconds: float,
    ) -> Columns | None:
        """Return rows from a store's directory; None if it is not on this machine or lacks a drawn row."""
        reader = self._reader(rank, seconds)
        if reader is None:
            return None
        for attempt in range(2):
            with suppress(TrajectoryUnavailableError):
                return unnest(reader.read(drawn, columns=columns, out=out))
            if not attempt:
                with self._lock:
                    reader.refresh()
        return None  # not committed yet, or evicted: the store decides

    def trajectories(self, ids: Sequence[int], read: dict[int, AnyTrajectory], seconds: float) -> None:
        """Read whole trajectories.

        Args:
            ids: of the trajectories.
            read: those that were read already, by id; the others are added.
            seconds: time limit.

        Raises:
            TrajectoryUnavailableError: a trajectory has been evicted; the others were read.
            SilentStoresError: stores do not answer; nothing was read.
        """
        mine: dict[int, list[int]] = {}
        for number in ids:
            if number not in read:
                mine.setdefault(number % MOST_STORES, []).append(number)
        asked = {rank: (part,) for rank, part in mine.items()}
        answers = self._answers(*self._stores.ask(asked, "trajectories", seconds))
        for rank, part in mine.items():
            answered = zip(part, answers[rank], strict=True)
            read.update((number, trajectory) for number, trajectory in answered if trajectory is not None)
        if gone := set(ids).difference(read):
            raise _evicted(gone)

    def extents(self, ids: IntArray) -> tuple[IntArray, IntArray]:
        """Return T and B of trajectories, each ``[n]``.

        Raises:
            TrajectoryUnavailableError: a trajectory is absent.
            StoreUnreachableError: a store does not answer.
        """
        steps, batch = np.zeros(len(ids), np.int64), np.zeros(len(ids), np.int64)
        ranks = ids % MOST_STORES
        places = {rank: np.flatnonzero(ranks == rank) for rank in np.unique(ranks).tolist()}
        answers = self._stores.call_all({rank: (ids[mine],) for rank, mine in places.items()}, "extents")
        for rank, mine in places.items():
            steps[mine], batch[mine] = answers[rank]
        return steps, batch

    def _reader(self, rank: int, seconds: float) -> Reader | None:
        """Return a reader of a store's directory; None if it is not on this machine."""
        if rank not in self._readers:
            try:
                about = self._stores.describe(rank, seconds)
            except StoreUnreachableError as error:
                raise SilentStoresError({rank: error}) from error
            with self._lock:
                if rank not in self._readers:
                    self._readers[rank] = _open(about)
        return self._readers[rank]

    def renew(self) -> None:
        """Let the next read show the present late values."""
        self._due = True

    def _follow(self) -> None:
        if not self._due:
            return
        with self._lock:
            self._due = False
            for reader in self._readers.values():
                if reader is not None:
                    reader.refresh()

    def close(self) -> None:
        """Close readers and connections."""
        self._rows.close()
        with self._lock:
            for reader in self._readers.values():
                if reader is not None:
                    reader.close()
            self._readers.clear()
            self._last = _Last()


def _open(about: ServedStore) -> Reader | None:
    """Return a reader of a store's directory, or None if this process cannot read it."""
    path = os.path.join(about.path, f"rank_{about.rank}")
    if about.host != socket.gethostname() or not os.path.isdir(path):
        return None
    try:
        reader = Reader.open(path)
    except StoreError as error:
        logger.warning("store rank_%d is read through its actor: %s", about.rank, error)
        return None
    if reader._store_ids == [about.store_id]:
        return reader
    reader.close()  # of another machine with the same host name
    return None


def _evicted(ids: Iterable[int]) -> TrajectoryUnavailableError:
    """Return the error for drawn trajectories that are no longer there."""
    return TrajectoryUnavailableError(
        f"trajectories {listed(map(str, sorted(set(ids))))} were evicted since they were drawn; draw again"
    )
