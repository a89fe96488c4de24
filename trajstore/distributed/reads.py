"""Rows and trajectories of many stores: from the directory where this machine has it, else by asking the store."""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trajstore.core.base import locks
from trajstore.core.buffer.reader import Reader
from trajstore.core.columns.fields import nest, unnest
from trajstore.core.sampling.base import Drawn, IntArray
from trajstore.distributed.actors import SilentStoresError, Stores
from trajstore.distributed.listing import Listing, Placing
from trajstore.distributed.packed import Part, pieces_of, request, united
from trajstore.distributed.server import MOST_STORES, ServedStore
from trajstore.errors import StoreError, StoreUnreachableError, TrajectoryUnavailableError
from trajstore.trajectory import AnyTrajectory

logger = logging.getLogger(__name__)

Columns = dict[str, torch.Tensor]


_SOON = 0.05  # seconds after which it is looked whether what was not committed is now; doubles


@dataclass(frozen=True, slots=True)
class _Last:
    """The listing that was read last, and how.

    Attributes:
        listing: what could be drawn.
        reader: of the one store that all of it is of.
        placing: where its samples are there.
        until: when to look again (of the monotonic clock).
        again: seconds until then the next time.
    """

    listing: Listing | None = None
    reader: Reader | None = None
    placing: Placing | None = None
    until: float = -math.inf
    again: float = _SOON


class Reads:
    """Reads what was drawn. Stores whose directory is not here are asked all at once, for so many seconds.

    Args:
        stores: whom to ask.
    """

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._readers: dict[int, Reader | None] = {}
        self._lock = locks.lock("Reads._lock")
        self._last = _Last()
        self._row_nbytes: dict[tuple[str, ...] | None, float] = {}
        """Of the rows that were asked for last, by the names of their columns."""

    def placed(
        self,
        listing: Listing,
        places: IntArray,
        columns: Sequence[str] | None,
        out: Mapping[str, torch.Tensor] | None,
        seconds: float,
    ) -> dict[str, Any]:
        """Return samples of a listing, told by their places, as a nested dict.

        Where all of the listing is one store's, and its directory is here, this costs what a reader's own draw costs.

        Raises:
            TrajectoryUnavailableError, SchemaMismatchError, SilentStoresError: see :meth:`rows`.
        """
        reader, placing = self._placing(listing, seconds)
        if reader is not None and placing is not None:
            found = placing.rows(places)
            with suppress(TrajectoryUnavailableError):  # the store knows more
                if found is not None:
                    values = reader.sampling.read_at(placing.known, *found, columns=columns, out=out)
                    if values is not None:
                        return values
                    self._last = _Last()  # trajectories have left what the reader shows: the next call counts again
        return nest(self.rows(listing.drawn(places), columns, out, seconds))

    def _placing(self, listing: Listing, seconds: float) -> tuple[Reader | None, Placing | None]:
        """Return the reader of the one store that all of a listing is of, and where its samples are there."""
        last = self._last
        if last.listing is listing and time.monotonic() < last.until:
            return last.reader, last.placing
        ranks = listing.ids % MOST_STORES
        reader = self._reader(int(ranks[0]), seconds) if len(ranks) and bool((ranks == ranks[0]).all()) else None
        if reader is None:
            self._last = _Last(listing, None, None, math.inf)
            return None, None
        placing = Placing(listing, reader.sampling.locate(listing.ids))
        if not placing.whole:
            with self._lock:
                reader.refresh()
            placing = Placing(listing, reader.sampling.locate(listing.ids))
        again = last.again if last.listing is listing else _SOON
        until = math.inf if placing.whole else time.monotonic() + again
        self._last = _Last(listing, reader, placing, until, 2 * again)
        return reader, placing

    def rows(
        self, drawn: Drawn, columns: Sequence[str] | None, out: Mapping[str, torch.Tensor] | None, seconds: float
    ) -> Columns:
        """Return rows by dotted column name, ``[n, ...]``, in the order in which they were drawn.

        Raises:
            TrajectoryUnavailableError: a trajectory has been evicted since.
            SchemaMismatchError: stores differ in their columns.
            SilentStoresError: stores do not answer.
        """
        ranks = drawn.ids % MOST_STORES
        places = {rank: np.flatnonzero(ranks == rank) for rank in np.unique(ranks).tolist()}
        single = len(places) == 1
        parts: dict[int, Part] = {}
        lacking: dict[int, Drawn] = {}
        for rank, at in places.items():
            mine = drawn if single else Drawn(drawn.ids[at], drawn.samples[at])
            found = self._of_directory(rank, mine, columns, out if single else None, seconds)
            if found is None:
                lacking[rank] = mine
            elif single:
                return found
            else:
                parts[rank] = Part.of(found)
        if lacking:
            parts.update(self._of_stores(lacking, columns, seconds))
        return united([parts[rank] for rank in places], list(places.values()), out) if parts else {}

    def _of_stores(self, drawn: Mapping[int, Drawn], columns: Sequence[str] | None, seconds: float) -> dict[int, Part]:
        """Return rows that stores were asked for; in as many pieces as the last rows of these columns would take."""
        named = None if columns is None else tuple(columns)
        of_row = self._row_nbytes.get(named, 0.0)
        pieces = {rank: pieces_of(round(of_row * len(mine))) for rank, mine in drawn.items()}
        arguments = {rank: (request(mine, columns, pieces[rank]),) for rank, mine in drawn.items()}
        answers = self._asked(arguments, "read", seconds, pieces)
        parts = {rank: Part.unpacked(answer) for rank, answer in answers.items()}
        self._row_nbytes[named] = max(part.nbytes / len(drawn[rank]) for rank, part in parts.items())
        return parts

    def _asked(
        self,
        arguments: Mapping[int, Sequence[Any]],
        method: str,
        seconds: float,
        pieces: Mapping[int, int] | None = None,
    ) -> dict[int, Any]:
        """Return what stores answer, all asked at once.

        Raises:
            SilentStoresError: some do not answer.
            TrajectoryUnavailableError, SchemaMismatchError: as a store raised it.
        """
        found, failed = self._stores.ask(arguments, method, seconds, pieces)
        for error in failed.values():
            if not isinstance(error, StoreUnreachableError):
                raise error
        if failed:
            raise SilentStoresError(failed)
        return found

    def _of_directory(
        self,
        rank: int,
        drawn: Drawn,
        columns: Sequence[str] | None,
        out: Mapping[str, torch.Tensor] | None,
        seconds: float,
    ) -> Columns | None:
        """Return rows out of a store's directory; None if this machine lacks it, or something that was drawn."""
        reader = self._reader(rank, seconds)
        if reader is None:
            return None
        for attempt in range(2):
            with suppress(TrajectoryUnavailableError):
                return unnest(reader.read(drawn, columns=columns, out=out))
            if not attempt:
                with self._lock:
                    reader.refresh()
        return None  # not committed yet, or evicted: the store knows

    def trajectories(self, ids: Sequence[int], seconds: float) -> list[AnyTrajectory]:
        """Return whole trajectories, in the order of their ids as given.

        Raises:
            TrajectoryUnavailableError: one is not there.
            SilentStoresError: stores do not answer.
        """
        mine: dict[int, list[int]] = {}
        for number in ids:
            mine.setdefault(number % MOST_STORES, []).append(number)
        told = self._asked({rank: (part,) for rank, part in mine.items()}, "trajectories", seconds)
        found: dict[int, AnyTrajectory] = {}
        for rank, part in mine.items():
            found.update(zip(part, told[rank], strict=True))
        return [found[number] for number in ids]

    def extents(self, ids: IntArray) -> tuple[IntArray, IntArray]:
        """Return T and B of trajectories, each ``[n]``.

        Raises:
            TrajectoryUnavailableError: one is not there.
            StoreUnreachableError: a store does not answer.
        """
        steps, batch = np.zeros(len(ids), np.int64), np.zeros(len(ids), np.int64)
        ranks = ids % MOST_STORES
        places = {rank: np.flatnonzero(ranks == rank) for rank in np.unique(ranks).tolist()}
        told = self._stores.call_all({rank: (ids[mine],) for rank, mine in places.items()}, "extents")
        for rank, mine in places.items():
            steps[mine], batch[mine] = told[rank]
        return steps, batch

    def _reader(self, rank: int, seconds: float) -> Reader | None:
        """Return a reader of a store's directory; None if this machine has not got it."""
        if rank not in self._readers:
            try:
                about = self._stores.describe(rank, seconds)
            except StoreUnreachableError as error:
                raise SilentStoresError({rank: error}) from error
            with self._lock:
                if rank not in self._readers:
                    self._readers[rank] = _open(about)
        return self._readers[rank]

    def close(self) -> None:
        """Let go of the directories."""
        with self._lock:
            for reader in self._readers.values():
                if reader is not None:
                    reader.close()
            self._readers.clear()
            self._last = _Last()


def _open(about: ServedStore) -> Reader | None:
    """Return a reader of the directory that a store has, if it can be read by this process without asking the store."""
    path = os.path.join(about.path, f"rank_{about.rank}")
    if about.host != socket.gethostname() or not os.path.isdir(path):
        return None
    try:
        return Reader.open(path)
    except StoreError as error:
        logger.warning("store rank_%d is read through its actor: %s", about.rank, error)
        return None
