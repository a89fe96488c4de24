"""Addresses of every shard's rows: in mapped files, or in memory.

A *slot* is a table of rows: a shard on disk, or a block of trajectories in memory. It is *resident* while the address
of the first row of each of its columns is known. Copies use these addresses without ``Contents.lock``, and keep them
valid with :class:`~trajstore._core.reading.plan.HeldRows`. A map is closed, and memory freed, only after all rows that
were held before have been released.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.base import locks
from trajstore._core.base.machine_code import kernels
from trajstore._core.base.machine_code import packing_kernels as packing
from trajstore._core.base.types import IntArray
from trajstore._core.columns.fields import Axis
from trajstore._core.columns.flat import Block
from trajstore._core.columns.schema import ColumnSpec, Extent, Schema
from trajstore._core.files.partial import PartialMap, PartialMaps, fetched
from trajstore._core.formats.base import ShardManifest, ShardReader
from trajstore._core.reading.column_interner import ColumnInterner
from trajstore._core.store.row_location import START_OF, RowLocation

UNAVAILABLE = -1
"""Marks a trajectory that was only in memory and has been evicted; not a slot."""

_MEMORY = -1
_FEWEST, _SPARE_COLUMNS = 64, 8


class Rows(Protocol):
    """Rows that can be read in place for as long as this object lives."""

    @property
    def schema(self) -> Schema:
        """The columns of the rows."""

    @property
    def addresses(self) -> Sequence[int] | npt.NDArray[np.int64]:
        """Address of the first row, per column of the schema."""

    def rows(self, column: int, start: int, stop: int) -> torch.Tensor:
        """Return rows ``[start, stop)`` of a column, ``[stop - start, *row_shape]``."""


@dataclass(frozen=True, slots=True)
class MappedShard:
    """A shard, or a decoded trajectory, whose columns can be read in place.

    ``addresses[i]`` is the address of the first row of ``schema.columns[i]``, or on ``Axis.NEXT`` of an array with the
    address of each row; ``keep`` holds the memory.
    """

    schema: Schema
    addresses: Sequence[int]
    keep: Any
    maps: int = 1
    """Number of file maps that this holds."""

    extent: Extent | None = None
    """Extent of a single-trajectory shard whose index lacks the extra rows and the document."""

    partial: Sequence[PartialMap] = ()
    """Files that are fetched only in parts, on demand."""

    packed: bool = False
    """Whether the columns are packed; ``addresses`` are then those of their descriptions."""

    def rows(self, column: int, start: int, stop: int) -> torch.Tensor:
        """Return a copy of rows ``[start, stop)``, ``[stop - start, *row_shape]``; within :meth:`fetched`."""
        spec, width = self.schema.columns[column], self.schema.row_nbytes[column]
        target = torch.empty((stop - start, *spec.row_shape), dtype=spec.torch_dtype)
        if self.packed:
            places = np.array([[target.data_ptr()], [self.addresses[column]], [start], [stop - start]], np.int64)
            packing.unpack_rows(*places, width)
        elif spec.axis is Axis.NEXT:
            addresses, sizes = self._pieces(column, start, stop)
            kernels.copy_blocks(target.data_ptr() + np.arange(stop - start) * width, addresses, sizes)
        else:
            ctypes.memmove(target.data_ptr(), self.addresses[column] + start * width, (stop - start) * width)
        return target

    def _pieces(self, column: int, start: int, stop: int) -> tuple[IntArray, IntArray]:
        """Return address and size in bytes of the pieces that rows of a column are in."""
        address, width = self.addresses[column], self.schema.row_nbytes[column]
        if self.packed:
            addresses, sizes = np.ascontiguousarray(packing.pieces_of(address, start, stop).T)
            return addresses, sizes
        if self.schema.columns[column].axis is Axis.NEXT:
            rows = (ctypes.c_int64 * (stop - start)).from_address(address + 8 * start)
            return np.ctypeslib.as_array(rows), np.full(stop - start, width)
        return np.array([address + start * width]), np.array([(stop - start) * width])

    def fetched(self, ranges: Sequence[tuple[int, int, int]]) -> AbstractContextManager[None]:
        """Return a context in which these rows, column, start and stop of each range, can be read."""

        def pieces() -> tuple[IntArray, IntArray]:
            addresses, sizes = zip(*(self._pieces(*place) for place in ranges), strict=True)
            return np.concatenate(addresses), np.concatenate(sizes)

        return fetched(self.partial, pieces)


def rows_at(reader: ShardReader | Rows, ranges: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
    """Return rows of columns, ``[stop - start, *row_shape]`` each; those of a block in memory are not copied.

    Args:
        reader: reader of a shard, a mapped shard, or a block in memory.
        ranges: column, first row and end of each.

    Raises:
        OSError, CorruptStoreError: the shard is damaged, or cannot be fetched; names file and column.
        UnsafeContentError: reading would execute code.
    """
    with reader.fetched(ranges) if isinstance(reader, MappedShard) and reader.partial else nullcontext():
        return [reader.rows(*place) for place in ranges]


def ranges_of(schema: Schema, extent: Extent, location: RowLocation) -> list[tuple[int, int, int]]:
    """Return the rows of a trajectory in its table for :func:`rows_at`: those of each column."""
    ranges = []
    for number, column in enumerate(schema.columns):
        start = getattr(location, START_OF[column.axis])
        ranges.append((number, start, start + extent.rows(column.axis)))
    return ranges


class ShardOpener(Protocol):
    """Opens shards of one source by row."""

    def map_shard(self, row: int) -> MappedShard | None:
        """Return the mapped shard, or None if its columns cannot be read in place."""

    def manifest(self, row: int) -> ShardManifest:
        """Return the files and columns of a shard."""

    def reader(self, row: int) -> ShardReader:
        """Return a reader of a shard."""


class RunningCopies:
    """Keeps maps, memory and slot numbers alive while a copy may use them.

    Copies run without ``Contents.lock``, on addresses obtained with it held. Releases wait until no copy runs; copies
    are short, so their individual use is not tracked.

    The lock guards running copies and waiting releases. It is held for a few instructions; nothing is destroyed under
    it.

    Args:
        free: called with slot numbers that can be reused.
    """

    def __init__(self, free: Callable[[list[int]], None]) -> None:
        self._free = free
        self._running: weakref.WeakSet[Any] = weakref.WeakSet()
        self._waiting: list[tuple[int | None, Any]] = []
        self._lock = locks.lock("RunningCopies._lock")

    def begin(self, copy: Any) -> None:
        """Keep everything resident in place until :meth:`end`; with ``Contents.lock`` held.

        Args:
            copy: identifies the copy. It may be dropped without :meth:`end`, for example on an interrupt; the next copy
                to end then releases what waits.
        """
        with self._lock:
            self._running.add(copy)

    def end(self, copy: Any) -> None:
        """End the copy begun with :meth:`begin`."""
        over: list[tuple[int | None, Any]] = []
        with self._lock:
            self._running.discard(copy)
            if not len(self._running) and self._waiting:
                over, self._waiting = self._waiting, over
                self._free([slot for slot, _ in over if slot is not None])

    def let_go(self, owner: Any, slot: int | None) -> None:
        """Release the owner of rows, and free its slot (None keeps it), once all copies begun before have ended."""
        with self._lock:
            if len(self._running):
                self._waiting.append((slot, owner))
                return
        if slot is not None:
            self._free([slot])

    @property
    def idle(self) -> bool:
        """True if no copy is running and no release is waiting."""
        with self._lock:
            return not len(self._running) and not self._waiting

    def stop(self) -> None:
        """Block copies from beginning or ending until :meth:`go_on`."""
        self._lock.acquire()

    def go_on(self, *, in_child: bool) -> None:
        """Undo :meth:`stop`; a forked child has no copying threads."""
        if in_child:
            self._running.clear()
        self._lock.release()


class AddressTable:
    """Allocates slots, reusing freed ones first; maps and unmaps them.

    Guarded by ``Contents.lock``, except ``copies``, which has its own lock.

    Args:
        map_limit: maximum number of mapped files; a single batch may exceed it.

    Attributes:
        columns: numbers and signatures of the columns.
        first: address of each column's first row, ``[slots, columns]``.
        axes: axis of each column in each slot, ``[slots, columns]``.
        signature: signature of each slot's columns; -1 while it is not resident.
        once: numbers of the columns that are on ``Axis.NEXT`` in some slot.
        packed: whether the columns of each resident slot are packed, ``[slots]``.
        partial: files of resident slots whose rows must be fetched before reading.
        copies: the running copies; released memory waits for them.
    """

    def __init__(self, map_limit: int) -> None:
        self._source: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._row: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._refcounts: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._count = 0
        self._free: list[int] = []
        """Unreferenced numbers. Ending copies extend it without ``Contents.lock``; extend and pop are atomic."""
        self.columns = ColumnInterner()
        self.first: npt.NDArray[np.int64] = np.zeros((0, 0), np.int64)
        self.axes: npt.NDArray[np.int8] = np.zeros((0, 0), np.int8)
        self.signature: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self.packed: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self.once: frozenset[int] = frozenset()
        self.copies = RunningCopies(self._free.extend)  # no method of this table: the cycle would keep folders open
        self._sources: list[ShardOpener] = []
        self._rows: dict[int, Rows] = {}
        """Owners of the rows of resident slots, and of all slots in memory."""
        self.partial: dict[int, Sequence[PartialMap]] = {}
        self._homes: dict[int, PartialMaps] = {}
        self._map_limit = map_limit
        self._maps: dict[int, int] = {}
        """Number of file maps of each mapped shard, by slot, oldest first."""

    # -- slots ------------------------------------------------------------------------------------

    def add_source(self, source: ShardOpener) -> int:
        """Add a source of shards and return its number."""
        self._sources.append(source)
        return len(self._sources) - 1

    def __len__(self) -> int:
        return self._count

    def add_shards(
        self, source: int, rows: npt.NDArray[np.intp], entries: npt.NDArray[np.intp]
    ) -> npt.NDArray[np.intp]:
        """Return one slot per shard of a source.

        Args:
            source: number of the source.
            rows: rows of the shards in the source's table.
            entries: reference count of each shard: entries stored in it, even if read from memory.
        """
        slots = np.arange(self._count, self._count + len(rows))
        free = sorted(self._free.pop() for _ in range(min(len(self._free), len(rows))))
        slots = np.concatenate([np.array(free, np.intp), slots[: len(rows) - len(free)]])
        self._reserve(self._count + len(rows) - len(free))
        self._count += len(rows) - len(free)
        self._source[slots], self._row[slots], self._refcounts[slots] = source, rows, entries
        return slots

    def add_shard(self, source: int, row: int, entries: int) -> int:
        """Return a slot for one more shard, see :meth:`add_shards`."""
        if self._free:
            slot = self._free.pop()
        else:
            self._reserve(self._count + 1)
            slot, self._count = self._count, self._count + 1
        self._source[slot], self._row[slot], self._refcounts[slot] = source, row, entries
        return slot

    def are_memory(self, slots: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.bool_]:
        """Return a mask of the slots in memory; False for :data:`UNAVAILABLE`."""
        mask: npt.NDArray[np.bool_] = (slots >= 0) & (self._source[slots] == _MEMORY)
        return mask

    def shard_of(self, slot: int) -> tuple[int, int]:
        """Return source number and row of a slot on disk."""
        return int(self._source[slot]), int(self._row[slot])

    def shards_of(self, slots: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int32]:
        """Return [N, 2] source numbers and rows of slots; UNAVAILABLE twice for those in memory."""
        places = np.stack([self._source[slots], self._row[slots]], axis=1)
        places[places[:, 0] == _MEMORY] = UNAVAILABLE
        return places

    def leave(self, slots: npt.NDArray[np.intp]) -> None:
        """Decrement the reference counts of these slots, once per occurrence.

        Unreferenced slots are freed: shards are unmapped (a map would hold the disk space of a deleted file), memory is
        released.
        """
        counts = np.bincount(slots)
        left = np.flatnonzero(counts)
        self._refcounts[left] -= counts[left]
        for slot in left[self._refcounts[left] == 0].tolist():
            self.copies.let_go(self._unmap(slot), slot)

    def add_memory(self, rows: Rows, entries: int) -> int:
        """Return a slot for rows in memory, with ``entries`` references."""
        slot = self.add_shard(_MEMORY, UNAVAILABLE, entries)
        self._rows[slot] = rows
        return slot

    def withdraw(self, rows: Sequence[Rows]) -> None:
        """Release rows just added to memory, before any reader has seen their entries."""
        for slot in [slot for slot, owner in self._rows.items() if any(owner is row for row in rows)]:
            self.copies.let_go(self._unmap(slot), slot)

    def block(self, slot: int) -> Block:
        """Return the block of trajectories that exist only in this slot."""
        rows = self._rows[slot]
        if not isinstance(rows, Block):
            raise AssertionError(f"slot {slot} has rows that come from a shard")
        return rows

    def _reserve(self, count: int) -> None:
        """Grow the arrays to hold this many slots, and all columns."""
        for name in ("_source", "_row", "_refcounts") if count > len(self._source) else ():
            grown, array = np.zeros(max(count, 2 * len(self.signature), _FEWEST), np.int32), getattr(self, name)
            grown[: len(array)] = array
            setattr(self, name, grown)
        slots, columns = len(self._source), len(self.columns.specs)
        have, width = self.first.shape
        if slots <= have and columns <= width:
            return
        wide = width if columns <= width else max(columns, width + _SPARE_COLUMNS)
        # New arrays, never resized in place: running copies keep the old ones.
        first, axes = np.zeros((slots, wide), np.int64), np.zeros((slots, wide), np.int8)
        signature = np.full(slots, -1, np.int32)
        packed = np.zeros(slots, np.bool_)
        first[:have, :width], axes[:have, :width], signature[:have] = self.first, self.axes, self.signature
        packed[:have] = self.packed
        self.first, self.axes, self.signature, self.packed = first, axes, signature, packed

    # -- resident rows ------------------------------------------------------------------------------

    def schema(self, slot: int) -> Schema:
        """Return the schema of a slot, without reading its rows."""
        rows = self._rows.get(slot)
        if rows is not None:
            return rows.schema
        source, row = self.shard_of(slot)
        return self._sources[source].manifest(row).schema

    def number_of(self, slot: int, column: ColumnSpec) -> int:
        """Return the number of a column of a resident slot's schema."""
        schema = self.schema(slot)
        return int(self.columns.of(schema).numbers[schema.columns.index(column)])

    def partial_maps(self, slots: npt.NDArray[np.int64]) -> list[PartialMap]:
        """Return the files of these resident slots whose rows must be fetched before reading."""
        return [partial_map for slot in np.unique(slots).tolist() for partial_map in self.partial.get(slot, ())]

    @property
    def mapped(self) -> int:
        """Number of mapped shards."""
        return len(self._maps)

    @property
    def fetched(self) -> tuple[int, int, int]:
        """Bytes, requests and batches of row fetches from object stores (``range_reads``)."""
        homes = self._homes.values()
        return (
            sum(home.fetched for home in homes),
            sum(home.requests for home in homes),
            sum(home.batches for home in homes),
        )

    def ensure(self, slots: npt.NDArray[np.int64], on_extent: Callable[[int, Extent], None]) -> list[int]:
        """Make slots resident; return those that cannot be read in place.

        Args:
            slots: any slots; duplicates are allowed.
            on_extent: called with the slot and extent of each shard whose index lacks the extent.

        Raises:
            CorruptStoreError: a file is missing or has changed its size.
        """
        absent = np.unique(slots[self.signature[slots] < 0])
        undecoded = []
        for slot in absent.tolist():
            rows = self._open(slot)
            if rows is None:
                undecoded.append(slot)
                continue
            if isinstance(rows, MappedShard) and rows.extent is not None:
                on_extent(slot, rows.extent)
            self._make_resident(slot, rows)
        if len(absent) and (over := sum(self._maps.values()) - self._map_limit) > 0:
            self._unmap_oldest(over, frozenset(slots.tolist()))
        return undecoded

    def rows(self, slot: int) -> Rows | None:
        """Return the rows of a slot, mapped if necessary but not made resident; None if they cannot be read in place.

        Raises:
            CorruptStoreError: a file is missing or has changed its size.
        """
        rows = self._rows.get(slot)
        if rows is None:
            rows = self._open(slot)
            if (over := sum(self._maps.values()) - self._map_limit) > 0:
                self._unmap_oldest(over, frozenset((slot,)))
        return rows

    def _open(self, slot: int) -> Rows | None:
        rows = self._rows.get(slot)  # those in memory are not resident yet: most are written without being sampled
        if rows is None:
            source, row = self.shard_of(slot)
            shard = self._sources[source].map_shard(row)
            if shard is None:
                return None
            self._maps[slot] = shard.maps
            if shard.partial:
                self.partial[slot] = shard.partial
                self._homes.update((id(partial_map.home), partial_map.home) for partial_map in shard.partial)
            rows = self._rows[slot] = shard  # last: if interrupted before, the shard is mapped again
        return rows

    def _unmap_oldest(self, maps: int, keep: frozenset[int]) -> None:
        """Unmap the oldest shards, with at least this number of file maps, except slots to ``keep``."""
        for slot, count in list(self._maps.items()):
            if maps > 0 and slot not in keep:
                maps -= count
                self.copies.let_go(self._unmap(slot), None)

    def ensure_decoded(self, slots: npt.NDArray[np.int64]) -> None:
        """Make slots of per-row values resident; unmappable shards are decoded, and evicted like maps.

        Raises:
            CorruptStoreError: a file is missing or damaged.
        """
        for slot in self.ensure(slots, lambda *_: None):
            source, row = self.shard_of(slot)
            manifest, reader = self._sources[source].manifest(row), self._sources[source].reader(row)
            tensors = [reader.rows(number, 0, rows) for number, rows in enumerate(manifest.rows)]
            shard = MappedShard(manifest.schema, [tensor.data_ptr() for tensor in tensors], tensors)
            self._maps[slot] = shard.maps
            self._make_resident(slot, shard)

    def _make_resident(self, slot: int, rows: Rows) -> None:
        numbers, signature, axes = self.columns.of(rows.schema)
        self._reserve(0)
        self._rows[slot] = rows
        self.first[slot, numbers] = rows.addresses
        self.axes[slot, numbers] = axes
        self.packed[slot] = isinstance(rows, MappedShard) and rows.packed
        if rows.schema.stored_once:
            self.once |= frozenset(numbers[list(rows.schema.stored_once)].tolist())
        self.signature[slot] = signature  # last: readers use the addresses from here on

    def _unmap(self, slot: int) -> Any:
        """Make a shard non-resident; return the owner of its rows for the caller to release, or None."""
        self.signature[slot] = -1  # first: readers check nothing else
        self.partial.pop(slot, None)
        self._maps.pop(slot, None)
        return self._rows.pop(slot, None)
