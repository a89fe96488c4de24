"""Rows and trajectories of many stores: from the directory where this machine has it, else by asking the store."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore import locks
from trajstore.buffer.replay_buffer import TrajectoryReplayBuffer
from trajstore.columns.fields import join_name, nest, walk
from trajstore.distributed.actors import Stores
from trajstore.distributed.listing import Listing, Placing
from trajstore.distributed.server import MOST_STORES
from trajstore.errors import SchemaMismatchError, StoreError, StoreUnreachableError, TrajectoryUnavailableError
from trajstore.sampling.base import Drawn, IntArray
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
    reader: TrajectoryReplayBuffer | None = None
    placing: Placing | None = None
    until: float = -math.inf
    again: float = _SOON


class Reads:
    """Reads what was drawn.

    Args:
        stores: whom to ask.
    """

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._readers: dict[int, TrajectoryReplayBuffer | None] = {}
        self._lock = locks.lock("Reads._lock")
        self._last = _Last()

    def placed(
        self,
        listing: Listing,
        places: IntArray,
        columns: Sequence[str] | None,
        out: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, Any]:
        """Return samples of a listing, told by their places, as a nested dict.

        Where all of the listing is one store's, and its directory is here, this costs what a reader's own draw costs.

        Raises:
            TrajectoryUnavailableError, SchemaMismatchError, StoreUnreachableError: see :meth:`rows`.
        """
        reader, placing = self._placing(listing)
        if reader is not None and placing is not None:
            numbers = placing.numbers(places)
            with suppress(TrajectoryUnavailableError):  # the store knows more
                if numbers is not None:
                    found = reader.read_numbered(placing.numbering, numbers, columns=columns, out=out)
                    if found is not None:
                        return found
                    self._last = _Last()  # trajectories have left what the reader shows: the next call counts again
        return nest(self.rows(listing.drawn(places), columns, out))

    def _placing(self, listing: Listing) -> tuple[TrajectoryReplayBuffer | None, Placing | None]:
        """Return the reader of the one store that all of a listing is of, and where its samples are there."""
        last = self._last
        if last.listing is listing and time.monotonic() < last.until:
            return last.reader, last.placing
        ranks = listing.ids % MOST_STORES
        reader = self._reader(int(ranks[0])) if len(ranks) and bool((ranks == ranks[0]).all()) else None
        if reader is None:
            self._last = _Last(listing, None, None, math.inf)
            return None, None
        placing = Placing(listing, reader.numbering(listing.ids))
        if not placing.whole:
            with self._lock:
                reader.refresh()
            placing = Placing(listing, reader.numbering(listing.ids))
        again = last.again if last.listing is listing else _SOON
        until = math.inf if placing.whole else time.monotonic() + again
        self._last = _Last(listing, reader, placing, until, 2 * again)
        return reader, placing

    def rows(
        self, drawn: Drawn, columns: Sequence[str] | None, out: Mapping[str, torch.Tensor] | None = None
    ) -> Columns:
        """Return rows by dotted column name, ``[n, ...]``, in the order in which they were drawn.

        Raises:
            TrajectoryUnavailableError: a trajectory has been evicted since.
            SchemaMismatchError: stores differ in their columns.
            StoreUnreachableError: a store does not answer.
        """
        ranks = drawn.ids % MOST_STORES
        present = np.unique(ranks).tolist()
        if len(present) == 1:
            return self._of_one(present[0], drawn, columns, out)
        whole: Columns = {}
        for rank in present:
            places = np.flatnonzero(ranks == rank)
            part = self._of_one(rank, Drawn(drawn.ids[places], drawn.samples[places]), columns, None)
            if not whole:
                whole = {name: _room(name, tensor, len(drawn), out) for name, tensor in part.items()}
            elif part.keys() != whole.keys():
                raise SchemaMismatchError(
                    f"stores differ in {', '.join(sorted(part.keys() ^ whole.keys()))}; name the columns to read"
                )
            for name, tensor in part.items():
                if (tensor.dtype, tensor.shape[1:]) != (whole[name].dtype, whole[name].shape[1:]):
                    raise SchemaMismatchError(
                        f"stores differ in the dtype or shape of {name}; name the columns to read"
                    )
                _put(whole[name], places, tensor)
        return whole

    def _of_one(
        self, rank: int, drawn: Drawn, columns: Sequence[str] | None, out: Mapping[str, torch.Tensor] | None
    ) -> Columns:
        reader = self._reader(rank)
        if reader is not None:
            try:
                return _flat(self._from_directory(rank, reader, drawn, columns, out))
            except TrajectoryUnavailableError:
                pass  # not committed yet, or evicted: the store knows
        found = self._stores.call(rank, "read", drawn, columns)
        part = {name: value if isinstance(value, torch.Tensor) else _tensor(value) for name, value in found.items()}
        if out is None:
            return part
        whole = {name: _room(name, tensor, len(drawn), out) for name, tensor in part.items()}
        for name, tensor in part.items():
            whole[name].copy_(tensor)
        return whole

    def _from_directory(
        self,
        rank: int,
        reader: TrajectoryReplayBuffer,
        drawn: Drawn,
        columns: Sequence[str] | None,
        out: Mapping[str, torch.Tensor] | None,
    ) -> dict[str, Any]:
        try:
            return reader.read(drawn, columns=columns, out=out)
        except TrajectoryUnavailableError:
            with self._lock:
                reader.refresh()
            return reader.read(drawn, columns=columns, out=out)

    def trajectories(self, ids: Sequence[int]) -> list[AnyTrajectory]:
        """Return whole trajectories, in the order of their ids as given.

        Raises:
            TrajectoryUnavailableError: one is not there.
            StoreUnreachableError: a store does not answer.
        """
        found: dict[int, AnyTrajectory] = {}
        for rank in sorted({number % MOST_STORES for number in ids}):
            mine = [number for number in ids if number % MOST_STORES == rank]
            found.update(zip(mine, self._stores.call(rank, "trajectories", mine), strict=True))
        return [found[number] for number in ids]

    def extents(self, ids: IntArray) -> tuple[IntArray, IntArray]:
        """Return T and B of trajectories, each ``[n]``.

        Raises:
            TrajectoryUnavailableError: one is not there.
            StoreUnreachableError: a store does not answer.
        """
        steps, batch = np.zeros(len(ids), np.int64), np.zeros(len(ids), np.int64)
        ranks = ids % MOST_STORES
        for rank in np.unique(ranks).tolist():
            mine = np.flatnonzero(ranks == rank)
            steps[mine], batch[mine] = self._stores.call(rank, "extents", ids[mine])
        return steps, batch

    def _reader(self, rank: int) -> TrajectoryReplayBuffer | None:
        """Return a reader of a store's directory; None if this machine has not got it."""
        with self._lock:
            if rank not in self._readers:
                self._readers[rank] = self._open(rank)
            return self._readers[rank]

    def _open(self, rank: int) -> TrajectoryReplayBuffer | None:
        try:
            if not self._stores.here(rank):
                return None
            reader = TrajectoryReplayBuffer(seed=None, sample_window_size=0)
            reader.load_checkpoint(os.path.join(self._stores.describe(rank).path, f"rank_{rank}"))
        except (StoreError, StoreUnreachableError) as error:
            logger.warning("store rank_%d is read through its actor: %s", rank, error)
            return None
        return reader

    def close(self) -> None:
        """Let go of the directories."""
        with self._lock:
            for reader in self._readers.values():
                if reader is not None:
                    reader.close()
            self._readers.clear()
            self._last = _Last()


def _flat(values: Mapping[str, Any]) -> Columns:
    return {join_name(path): value for path, value in walk(values)}


def _tensor(value: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return an array out of Ray's object store as a tensor of its own, which may be written to."""
    return torch.from_numpy(value.copy())


def _put(target: torch.Tensor, places: npt.NDArray[np.intp], rows: torch.Tensor) -> None:
    """Copy rows to places of a column, in this thread: on a busy machine torch's threads wait for each other longer."""
    if not target.is_contiguous():
        target.index_copy_(0, torch.from_numpy(places), rows)
    elif rows.numel():
        _rows_of(target)[places] = _rows_of(rows)


def _rows_of(tensor: torch.Tensor) -> npt.NDArray[np.void]:
    """Return the rows of a contiguous tensor, ``[n]``, not copied; each has as many bytes as numpy is told."""
    raw = tensor.reshape(len(tensor), -1).view(torch.uint8).numpy()
    return raw.view(f"V{raw.shape[1]}")[:, 0]


def _room(name: str, like: torch.Tensor, count: int, out: Mapping[str, torch.Tensor] | None) -> torch.Tensor:
    """Return where ``count`` rows of a column go."""
    if out is None or name not in out:
        return torch.empty((count, *like.shape[1:]), dtype=like.dtype)
    return out[name][:count]
