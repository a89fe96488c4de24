"""A snapshot of the buffer for a checkpoint: taken quickly, written while the buffer keeps changing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trajstore.core.columns.flat import Block
from trajstore.core.reading.address_table import UNAVAILABLE, AddressTable
from trajstore.core.reading.sources import Source, StoreSource
from trajstore.core.store.facts import is_note
from trajstore.core.store.index import TrajectoryIndex
from trajstore.core.store.notes import StoreNotes
from trajstore.core.store.row_location import STARTS, RowLocation


@dataclass(frozen=True, slots=True)
class ReadSnapshot:
    """A consistent snapshot of the contents, for a checkpoint.

    Attributes:
        index: the savable entries; ``shard`` is a row of an entry's source, or UNAVAILABLE.
        shards: per entry, (source, row) on disk, or None if it is in ``memory``.
        memory: blocks of trajectories that are in memory only, by position in ``index``, which has their place in it.
        sources: sources referred to by ``shards``.
        late: late values of the entries, by store.
    """

    index: TrajectoryIndex
    shards: list[tuple[int, int] | None]
    memory: dict[int, Block]
    sources: list[Source]
    late: list[StoreNotes]

    def only(self, entries: npt.NDArray[np.intp]) -> ReadSnapshot:
        """Return a snapshot of some of the entries, in their order."""
        index = TrajectoryIndex()
        index.texts = self.index.texts
        index.append(self.index.take(self.index.first + entries))
        kept = entries.tolist()
        memory = {at: self.memory[entry] for at, entry in enumerate(kept) if entry in self.memory}
        shards = [self.shards[entry] for entry in kept]
        return ReadSnapshot(index, shards, memory, self.sources, self.late)


def snapshot_of(
    index: TrajectoryIndex, addresses: AddressTable, sources: Sequence[Source], locations: Mapping[int, RowLocation]
) -> ReadSnapshot:
    """Return a snapshot of everything that can be saved; fast, with ``Contents.lock`` held.

    Args:
        index: the visible entries.
        addresses: address table with each slot's shard.
        sources: sources of the shards.
        locations: disk slots, by id, of trajectories that are also in memory.
    """
    positions = np.arange(index.first, index.end)
    columns = index.take(positions)
    shards: list[tuple[int, int] | None] = []
    memory: dict[int, Block] = {}
    kept = np.ones(len(positions), np.bool_)
    slots = columns.pop("slot")
    in_memory = addresses.are_memory(slots).tolist()
    for at, (number, slot) in enumerate(zip(columns["trajectory_id"].tolist(), slots.tolist(), strict=True)):
        location = locations.get(number) if in_memory[at] else None
        if location is not None:
            slot = location.table
            for name in STARTS:
                columns[name][at] = getattr(location, name)
        elif in_memory[at]:
            memory[len(shards)] = addresses.block(slot)
            shards.append(None)
            continue
        elif slot == UNAVAILABLE:
            kept[at] = False
            continue
        shards.append(addresses.shard_of(slot))
    snapshot = TrajectoryIndex()
    snapshot.texts = index.texts
    rows = np.array([UNAVAILABLE if shard is None else shard[1] for shard in shards], np.int32)
    columns = {name: array[kept] for name, array in columns.items() if not is_note(name)}
    snapshot.append(columns | {"shard": rows})
    homes = np.array([UNAVAILABLE if shard is None else shard[0] for shard in shards], np.int32)
    stores = {number: source for number, source in enumerate(sources) if isinstance(source, StoreSource)}
    late = [source.notes_for(number, snapshot["trajectory_id"][homes == number]) for number, source in stores.items()]
    return ReadSnapshot(snapshot, shards, memory, list(sources), late)
