"""Where the rows of every shard can be read now: in maps of files, or in memory.

A *slot* is a table of rows: a shard on disk, or a block of trajectories in memory. It is *resident* while the address
of the first row of each of its columns is known. Copies run on such addresses without ``Contents.lock``: whoever
copies holds :class:`~trajstore.core.reading.plan.HeldRows`. A map is closed, and memory freed, only when all rows
that were held before have been released.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trajstore.core.columns.flat import Block
from trajstore.core.columns.schema import ColumnSpec, Extent, Schema
from trajstore.core.files.partial import PartialMap, PartialMaps
from trajstore.core.formats.base import ShardManifest, ShardReader
from trajstore.core.reading.column_interner import ColumnInterner, axes_of
from trajstore.core.reading.map_limit import MapLimit
from trajstore.core.reading.running_copies import RunningCopies
from trajstore.core.reading.slots import SlotTable

_FEWEST, _SPARE_COLUMNS = 64, 8


class Rows(Protocol):
    """Rows that can be read in place for as long as this object lives."""

    @property
    def schema(self) -> Schema:
        """Their columns."""

    @property
    def addresses(self) -> Sequence[int] | npt.NDArray[np.int64]:
        """Per column of the schema, the address of the first row."""


@dataclass(frozen=True, slots=True)
class MappedShard:
    """A shard, or a decoded trajectory, whose columns can be read in place.

    ``addresses[i]`` is the address of the first row of ``schema.columns[i]``; ``keep`` holds the memory.
    """

    schema: Schema
    addresses: Sequence[int]
    keep: Any
    maps: int = 1
    """How many maps of files this holds."""

    extent: Extent | None = None
    """Extent of a shard of one trajectory whose index does not tell extra rows and document."""

    partial: Sequence[PartialMap] = ()
    """Files of which only what is asked for is there."""


class ShardOpener(Protocol):
    """Opens shards of one source by row."""

    def map_shard(self, row: int) -> MappedShard | None:
        """Return the shard, mapped; None where its columns cannot be read in place."""

    def manifest(self, row: int) -> ShardManifest:
        """Return what files a shard has, and which columns."""

    def reader(self, row: int) -> ShardReader:
        """Return a reader of a shard."""


class AddressTable:
    """Makes slots resident, and lets go of them. Guarded by ``Contents.lock``; ``copies`` has a lock of its own.

    Args:
        map_limit: most maps of files at a time.

    Attributes:
        columns: numbers and signatures of the columns.
        first: address of the first row of a column, ``[slots, columns]``.
        axes: axis of the column in that slot, ``[slots, columns]``.
        signature: per slot, the signature of its columns; -1 while it is not resident.
        partial: files of resident slots whose rows must be fetched before they are read.
        copies: those that are running; what is let go of waits for them.
    """

    def __init__(self, map_limit: int) -> None:
        self.columns = ColumnInterner()
        self.first: npt.NDArray[np.int64] = np.zeros((0, 0), np.int64)
        self.axes: npt.NDArray[np.int8] = np.zeros((0, 0), np.int8)
        self.signature: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._slots = SlotTable()
        self.copies = RunningCopies(self._slots.free)
        self._sources: list[ShardOpener] = []
        self._rows: dict[int, Rows] = {}
        """What holds the rows of each resident slot, and of each in memory."""
        self.partial: dict[int, Sequence[PartialMap]] = {}
        self._homes: dict[int, PartialMaps] = {}
        self._maps = MapLimit(map_limit)

    # -- slots ------------------------------------------------------------------------------------

    def add_source(self, source: ShardOpener) -> int:
        """Take in a source of shards; return its number."""
        self._sources.append(source)
        return len(self._sources) - 1

    def add_shards(
        self, source: int, rows: npt.NDArray[np.intp], entries: npt.NDArray[np.intp]
    ) -> npt.NDArray[np.intp]:
        """Return a slot for each of these shards of a source, see :meth:`SlotTable.add_shards`."""
        slots = self._slots.add_shards(source, rows, entries)
        self._reserve()
        return slots

    def add_shard(self, source: int, row: int, entries: int) -> int:
        """Return a slot for one more shard of a source, in which so many entries have their home."""
        slot = self._slots.add_shard(source, row, entries)
        self._reserve()
        return slot

    def leave(self, slots: npt.NDArray[np.intp]) -> None:
        """Note that an entry, for each time that a slot is named, has its home there no longer, or is not in memory.

        A shard without entries is unmapped (a map would hold the disk space of a deleted file), memory is let go of;
        the slot is free.
        """
        for slot in self._slots.leave(slots):
            self.copies.let_go(self._unmap(slot), slot)

    def add_memory(self, rows: Rows, entries: int) -> int:
        """Return a slot for rows in memory, which are those of so many entries."""
        slot = self._slots.add_memory(entries)
        self._reserve()
        self._rows[slot] = rows
        return slot

    def withdraw(self, rows: Sequence[Rows]) -> None:
        """Let go of what was just taken into memory, whose entries nobody has seen."""
        for slot in [slot for slot, there in self._rows.items() if any(there is one for one in rows)]:
            self.copies.let_go(self._unmap(slot), slot)

    def are_memory(self, slots: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.bool_]:
        """Return which slots are in memory; of what is unavailable it is none."""
        return self._slots.are_memory(slots)

    def block(self, slot: int) -> Block:
        """Return the block of trajectories that are nowhere but in this slot."""
        rows = self._rows[slot]
        if not isinstance(rows, Block):
            raise AssertionError(f"slot {slot} has rows that come from a shard")
        return rows

    def shard_of(self, slot: int) -> tuple[int, int]:
        """Return source number and row of a slot on disk."""
        return self._slots.shard_of(slot)

    def _reserve(self) -> None:
        """Have room for all slots and columns."""
        slots, columns = len(self._slots), len(self.columns.specs)
        have, width = self.first.shape
        if slots <= have and columns <= width:
            return
        rows = have if slots <= have else max(slots, 2 * have, _FEWEST)
        wide = width if columns <= width else max(columns, width + _SPARE_COLUMNS)
        # New arrays, never resized in place: a running copy keeps the ones it was given.
        first, axes = np.zeros((rows, wide), np.int64), np.zeros((rows, wide), np.int8)
        signature = np.full(rows, -1, np.int32)
        first[:have, :width], axes[:have, :width], signature[:have] = self.first, self.axes, self.signature
        self.first, self.axes, self.signature = first, axes, signature

    # -- what is resident -------------------------------------------------------------------------

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
        return int(self.columns.of(schema)[0][schema.columns.index(column)])

    def partial_maps(self, slots: npt.NDArray[np.int64]) -> list[PartialMap]:
        """Return the files of resident slots whose rows must be fetched before they are read."""
        return [one for slot in np.unique(slots).tolist() for one in self.partial.get(slot, ())]

    @property
    def mapped(self) -> int:
        """Number of shards that are mapped."""
        return len(self._maps)

    @property
    def fetched(self) -> tuple[int, int, int]:
        """Bytes of rows that were fetched from object stores (``range_reads``), in how many requests and batches."""
        homes = self._homes.values()
        return sum(one.fetched for one in homes), sum(one.requests for one in homes), sum(one.batches for one in homes)

    def ensure(self, slots: npt.NDArray[np.int64], on_extent: Callable[[int, Extent], None]) -> list[int]:
        """Make slots resident; return those that cannot be read in place.

        Args:
            slots: any slots, repeated or not.
            on_extent: told the slot and extent of a shard whose index does not tell it.

        Raises:
            CorruptStoreError: a file is missing or has changed its size.
        """
        absent = np.unique(slots[self.signature[slots] < 0])
        undecoded = []
        for slot, in_memory in zip(absent.tolist(), self._slots.are_memory(absent).tolist(), strict=True):
            if in_memory:  # made resident only now: most are written without being sampled
                self._make_resident(slot, self._rows[slot])
                continue
            source, row = self._slots.shard_of(slot)
            shard = self._sources[source].map_shard(row)
            if shard is None:
                undecoded.append(slot)
                continue
            self._maps.add(slot, shard.maps)
            if shard.partial:
                self.partial[slot] = shard.partial
                self._homes.update((id(one.home), one.home) for one in shard.partial)
            if shard.extent is not None:
                on_extent(slot, shard.extent)
            self._make_resident(slot, shard)  # last: after an interrupt before it the shard is mapped once more
        if self._maps.is_over:
            for slot in self._maps.too_old(set(np.unique(slots).tolist())):
                self.copies.let_go(self._unmap(slot), None)
        return undecoded

    def ensure_decoded(self, slots: npt.NDArray[np.int64]) -> None:
        """Make slots of values by row resident; what cannot be read in place is decoded, and leaves as maps do.

        Raises:
            CorruptStoreError: a file is missing or damaged.
        """
        for slot in self.ensure(slots, lambda *_: None):
            source, row = self.shard_of(slot)
            manifest, reader = self._sources[source].manifest(row), self._sources[source].reader(row)
            tensors = [reader.rows(number, 0, rows) for number, rows in enumerate(manifest.rows)]
            shard = MappedShard(manifest.schema, [tensor.data_ptr() for tensor in tensors], tensors)
            self._maps.add(slot, shard.maps)
            self._make_resident(slot, shard)

    def _make_resident(self, slot: int, rows: Rows) -> None:
        numbers, signature = self.columns.of(rows.schema)
        self._reserve()
        self._rows[slot] = rows
        self.first[slot, numbers] = rows.addresses
        self.axes[slot, numbers] = axes_of(rows.schema)
        self.signature[slot] = signature  # last: from here on the addresses are used

    def _unmap(self, slot: int) -> Any:
        """Make a shard not resident; return what held its rows, which the caller lets go of, or None."""
        self.signature[slot] = -1  # first: what is resident is read without another look at what is dropped here
        self.partial.pop(slot, None)
        self._maps.remove(slot)
        return self._rows.pop(slot, None)
