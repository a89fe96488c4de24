"""A snapshot of the buffer for a checkpoint: taken quickly, written while the buffer keeps changing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore._core.columns.flat import Block
from trajstore._core.reading.address_table import UNAVAILABLE, AddressTable
from trajstore._core.reading.sources import Source, StoreSource
from trajstore._core.store.facts import is_note
from trajstore._core.store.index import TrajectoryIndex
from trajstore._core.store.notes import StoreNotes
from trajstore._core.store.row_location import STARTS, RowLocation


@dataclass(frozen=True, slots=True)
class ReadSnapshot:
    """A consistent snapshot of the contents, for a checkpoint.

    Attributes:
        index: the savable entries; ``shard`` is a row of an entry's source, or UNAVAILABLE.
        places: [N, 2], per entry (source, row) on disk, or UNAVAILABLE twice if it is in ``memory``.
        memory: blocks of trajectories that are in memory only, by position in ``index``, which has their place in it.
        sources: sources referred to by ``places``.
        late: late values of the entries, by store.
    """

    index: TrajectoryIndex
    places: npt.NDArray[np.int32]
    memory: dict[int, Block]
    sources: list[Source]
    late: list[StoreNotes]

    def only(self, entries: npt.NDArray[np.intp]) -> ReadSnapshot:
        """Return a snapshot of some of the entries, in their order."""
        index = TrajectoryIndex()
        index.texts = self.index.texts
        index.append(self.index.take(self.index.first + entries))
        memory = {at: self.memory[entry] for at, entry in enumerate(entries.tolist()) if entry in self.memory}
        return ReadSnapshot(index, self.places[entries], memory, self.sources, self.late)


def slots_on_disk(
    columns: dict[str, npt.NDArray[Any]], addresses: AddressTable, locations: Mapping[int, RowLocation]
) -> npt.NDArray[np.int32]:
    """Remove the slots from columns of entries, and return those on disk where there are any, with their first rows.

    Args:
        columns: copies of all columns of an index at some positions; the first rows are changed.
        addresses: address table with each slot's shard.
        locations: disk slots, by id, of trajectories that are also in memory.
    """
    slots: npt.NDArray[np.int32] = columns.pop("slot")
    for at in np.flatnonzero(addresses.are_memory(slots)).tolist():
        location = locations.get(int(columns["trajectory_id"][at]))
        if location is not None:
            slots[at] = location.table
            for name in STARTS:
                columns[name][at] = getattr(location, name)
    return slots


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
    columns = index.take(np.arange(index.first, index.end))
    slots = slots_on_disk(columns, addresses, locations)
    kept = slots != UNAVAILABLE
    slots = slots[kept]
    places = addresses.shards_of(slots)
    memory = {at: addresses.block(int(slots[at])) for at in np.flatnonzero(addresses.are_memory(slots)).tolist()}
    snapshot = TrajectoryIndex()
    snapshot.texts = index.texts
    columns = {name: array[kept] for name, array in columns.items() if not is_note(name)}
    snapshot.append(columns | {"shard": places[:, 1]})
    stores = {number: source for number, source in enumerate(sources) if isinstance(source, StoreSource)}
    late = [
        source.notes_for(number, snapshot["trajectory_id"][places[:, 0] == number]) for number, source in stores.items()
    ]
    return ReadSnapshot(snapshot, places, memory, list(sources), late)
