"""Where the rows of every shard can be read now: addresses in maps of files or in memory.

A *slot* is a table of rows: a shard on disk, or a trajectory in memory. For each slot and column the
residency knows the address of the first row. Slots in memory are freed, and maps closed, only when no
sampling call that may still use them is running.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trajstore import locks
from trajstore.columns.schema import ColumnSpec, Extent, Kind, Schema
from trajstore.files.partial import PartialMap

UNAVAILABLE = -1
"""Slot of a trajectory that was kept in memory only and has left it: no slot at all."""

MEMORY = -1
"""Source number of slots in memory."""

ANY_AXIS = 0


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


class Reading:
    """A copy that is being made of resident rows."""

    __slots__ = ("__weakref__",)


class Residency:
    """Addresses of rows by slot and column. Callers hold the buffer's lock, except for begin and end of reading."""

    def __init__(self, map_limit: int) -> None:
        self.specs: list[ColumnSpec] = []
        self.addresses: npt.NDArray[np.int64] = np.zeros((0, 0), np.int64)
        self.axes: npt.NDArray[np.int8] = np.zeros((0, 0), np.int8)
        self.signature: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        """Per slot, the number of its set of columns; -1 while it is not resident."""
        self._sources: list[ShardOpener] = []
        self._source: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._row: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._entries: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        """Per slot of a shard, the entries whose home it is, be they read from there or from memory."""
        self._owners: dict[int, Rows] = {}
        self._schemas: dict[int, Schema] = {}
        self._columns: dict[Schema, tuple[npt.NDArray[np.int64], int]] = {}
        self._numbers: dict[ColumnSpec, int] = {}
        self._signatures: dict[tuple[Kind | int, ...], int] = {}
        self._sampled: list[tuple[Kind, tuple[int, ...]]] = []
        self._partial: dict[int, Sequence[PartialMap]] = {}
        self._mapped: OrderedDict[int, int] = OrderedDict()
        self._maps = 0
        self._map_limit = map_limit
        self._count = 0
        self._free: list[int] = []
        self._readers: weakref.WeakSet[Reading] = weakref.WeakSet()
        self._graves: list[tuple[int, Any]] = []
        self._lock = locks.lock("Residency._lock")

    # -- slots ------------------------------------------------------------------------------------

    def add_source(self, source: ShardOpener) -> int:
        """Take in a source of shards; return its number."""
        self._sources.append(source)
        return len(self._sources) - 1

    def add_shards(
        self, source: int, rows: npt.NDArray[np.intp], entries: npt.NDArray[np.intp]
    ) -> npt.NDArray[np.intp]:
        """Return a slot for each of these shards of a source, in which so many entries have their home."""
        slots = np.arange(self._count, self._count + len(rows))
        self._reserve(self._count + len(rows))
        self._count += len(rows)
        self._source[slots], self._row[slots], self.signature[slots] = source, rows, -1
        self._entries[slots] = entries
        return slots

    def add_shard(self, source: int, row: int, entries: int) -> int:
        """Return a slot for one more shard of a source, in which so many entries have their home."""
        slot = self._new_slot()
        self._source[slot], self._row[slot], self.signature[slot] = source, row, -1
        self._entries[slot] = entries
        return slot

    def leave(self, slots: npt.NDArray[np.intp]) -> None:
        """Note that an entry, for each time that a slot is named, has its home there no longer.

        A shard without entries is unmapped (a map would hold the disk space of a deleted file); its slot is free.
        """
        emptied, counts = np.unique(slots, return_counts=True)
        self._entries[emptied] -= counts
        for slot in emptied[self._entries[emptied] == 0].tolist():
            self._bury(slot, self._unmap(slot))

    def add_memory(self, rows: Rows) -> int:
        """Return a slot for a trajectory in memory."""
        slot = self._new_slot()
        self._source[slot], self.signature[slot] = MEMORY, -1
        self._owners[slot] = rows
        return slot

    def release(self, slot: int) -> None:
        """Let go of a slot in memory; its number is given out again."""
        owner = self._owners.pop(slot)
        self._schemas.pop(slot, None)
        self.signature[slot] = -1
        self._bury(slot, owner)

    def _bury(self, slot: int, owner: Any) -> None:
        """Free a slot (none if it is -1) and what held its rows, once no reading that began before is running."""
        with self._lock:
            if len(self._readers):
                self._graves.append((slot, owner))
                return
        if slot >= 0:
            self._free.append(slot)

    def schema(self, slot: int) -> Schema:
        """Return the schema of a resident slot."""
        return self._schemas[slot]

    def addresses_of(self, slot: int) -> list[int]:
        """Return the address of the first row of each column of a resident slot's schema."""
        numbers, _ = self._numbered(self._schemas[slot])
        return [int(address) for address in self.addresses[slot, numbers]]

    def shard_of(self, slot: int) -> tuple[int, int]:
        """Return source number and row of a slot on disk."""
        return int(self._source[slot]), int(self._row[slot])

    def _new_slot(self) -> int:
        if self._free:
            return self._free.pop()
        self._reserve(self._count + 1)
        self._count += 1
        return self._count - 1

    def _reserve(self, slots: int) -> None:
        have, width = self.addresses.shape
        wanted = len(self.specs)
        if slots <= have and wanted <= width:
            return
        rows = have if slots <= have else max(slots, 2 * have, 64)
        columns = width if wanted <= width else max(wanted, width + 8)
        # New arrays, never resized in place: a running copy keeps the ones it was given.
        addresses, axes = np.zeros((rows, columns), np.int64), np.zeros((rows, columns), np.int8)
        addresses[:have, :width], axes[:have, :width] = self.addresses, self.axes
        self.addresses, self.axes = addresses, axes
        for name in ("signature", "_source", "_row", "_entries"):
            grown = np.full(rows, -1, np.int32)
            grown[:have] = getattr(self, name)
            setattr(self, name, grown)

    # -- residency --------------------------------------------------------------------------------

    def ensure(self, slots: npt.NDArray[np.int64], on_extent: Callable[[int, Extent], None]) -> list[int]:
        """Make slots resident; return those that cannot be read in place.

        Args:
            slots: any slots, repeated or not.
            on_extent: told the slot and extent of a shard whose index does not tell it.

        Raises:
            CorruptStoreError: a file is missing or has changed its size.
        """
        absent = np.unique(slots[self.signature[slots] < 0]).tolist()
        undecoded = []
        for slot in absent:
            if self._source[slot] == MEMORY:  # made resident only now: most are written without being sampled
                self._make_resident(slot, self._owners[slot])
                continue
            shard = self._sources[self._source[slot]].map_shard(int(self._row[slot]))
            if shard is None:
                undecoded.append(slot)
                continue
            self._make_resident(slot, shard)
            if shard.partial:
                self._partial[slot] = shard.partial
            self._mapped[slot] = shard.maps
            self._maps += shard.maps
            if shard.extent is not None:
                on_extent(slot, shard.extent)
        if self._maps > self._map_limit:
            self._unmap_oldest(set(np.unique(slots).tolist()))
        return undecoded

    def partial_maps(self, slots: npt.NDArray[np.int64]) -> list[PartialMap]:
        """Return the files of resident slots whose rows must be fetched before they are read."""
        if not self._partial:
            return []
        return [one for slot in np.unique(slots).tolist() for one in self._partial.get(slot, ())]

    def _make_resident(self, slot: int, shard: Rows) -> None:
        numbers, signature = self._numbered(shard.schema)
        self._reserve(self._count)
        self.addresses[slot, numbers] = shard.addresses
        self.axes[slot, numbers] = [column.axis if column.axis <= 2 else ANY_AXIS for column in shard.schema.columns]
        self._owners[slot] = shard
        self._schemas[slot] = shard.schema
        self.signature[slot] = signature  # last: from here on the addresses are used

    def _numbered(self, schema: Schema) -> tuple[npt.NDArray[np.int64], int]:
        """Return the numbers of a schema's columns, and of the set of them that can be sampled."""
        known = self._columns.get(schema)
        if known is None:
            numbers = []
            for column in schema.columns:
                spec = ColumnSpec(column.name, column.dtype, column.row_shape)  # the axis is each slot's own
                number = self._numbers.get(spec)
                if number is None:  # listed first: an interrupt in between leaves one that nobody has the number of
                    self.specs.append(spec)
                    number = self._numbers[spec] = len(self.specs) - 1
                numbers.append(number)
            sampled = tuple(n for n, column in zip(numbers, schema.columns, strict=True) if column.axis <= 2)
            key = (schema.kind, *sorted(sampled))
            found = self._signatures.get(key)
            if found is None:
                self._sampled.append((schema.kind, sampled))
                found = self._signatures[key] = len(self._sampled) - 1
            known = self._columns[schema] = (np.array(numbers, np.int64), found)
        return known

    def signature_of(self, schema: Schema) -> int:
        """Return the signature of a schema's columns."""
        return self._numbered(schema)[1]

    def kind(self, signature: int) -> Kind:
        """Return of which kind the trajectories of this signature are."""
        return self._sampled[signature][0]

    def columns(self, signature: int) -> tuple[int, ...]:
        """Return the numbers of the columns that can be sampled from slots of this signature."""
        return self._sampled[signature][1]

    def _unmap_oldest(self, keep: set[int]) -> None:
        for slot in list(self._mapped):
            if self._maps <= self._map_limit:
                return
            if slot not in keep:
                self._bury(-1, self._unmap(slot))

    def _unmap(self, slot: int) -> Any:
        """Make a shard not resident; return what held its rows, which the caller buries."""
        if slot not in self._mapped:
            return None
        self._maps -= self._mapped.pop(slot)
        self._partial.pop(slot, None)
        self._schemas.pop(slot)
        self.signature[slot] = -1
        return self._owners.pop(slot)

    @property
    def mapped(self) -> int:
        """Number of shards that are mapped."""
        return len(self._mapped)

    # -- readers ----------------------------------------------------------------------------------

    def begin_reading(self) -> Reading:
        """Keep everything that is resident now where it is, until :meth:`end_reading`.

        What it returns may also just be dropped, as an interrupt does; the next reading to end makes up for it.
        """
        reading = Reading()
        with self._lock:
            self._readers.add(reading)
        return reading

    def stop(self) -> None:
        """Let no reading begin or end until :meth:`go_on`."""
        self._lock.acquire()

    def go_on(self, *, in_child: bool) -> None:
        """End what :meth:`stop` began; a forked child has none of the threads that were reading."""
        if in_child:
            self._readers.clear()
        self._lock.release()

    def end_reading(self, reading: Reading) -> None:
        """End what :meth:`begin_reading` began."""
        with self._lock:
            self._readers.discard(reading)
            if not len(self._readers) and self._graves:
                self._free.extend(slot for slot, _ in self._graves if slot >= 0)
                self._graves.clear()
