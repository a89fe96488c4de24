"""What a buffer shows at one moment, for a checkpoint: taken quickly, written while the buffer goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trajstore.columns.flat import Block
from trajstore.reading.residency import Residency
from trajstore.reading.slots import UNAVAILABLE
from trajstore.reading.sources import Source
from trajstore.store.facts import NOTE_ROWS
from trajstore.store.home import STARTS, Home
from trajstore.store.index import TrajectoryIndex


@dataclass(frozen=True, slots=True)
class Picture:
    """A consistent picture of the contents, for a checkpoint.

    Attributes:
        index: the entries that can be saved; ``shard`` is a row of an entry's source, or UNAVAILABLE.
        shards: per entry, (source, row) on disk, or None where ``memory`` has it.
        memory: by position in ``index``, the block of trajectories that are in memory only; the index says where in it.
        sources: the sources that ``shards`` refers to.
        values: (source, row) of the shards of values by row, which the index names by their place here.
    """

    index: TrajectoryIndex
    shards: list[tuple[int, int] | None]
    memory: dict[int, Block]
    sources: list[Source]
    values: list[tuple[int, int]]

    def only(self, entries: npt.NDArray[np.intp]) -> Picture:
        """Return a picture of some of the entries, in their order."""
        index = TrajectoryIndex()
        index.texts = self.index.texts.copy()
        index.append(self.index.take(self.index.first + entries))
        kept = entries.tolist()
        memory = {at: self.memory[entry] for at, entry in enumerate(kept) if entry in self.memory}
        return Picture(index, [self.shards[entry] for entry in kept], memory, self.sources, self.values)


def picture_of(
    index: TrajectoryIndex, residency: Residency, sources: Sequence[Source], homes: Mapping[int, Home]
) -> Picture:
    """Return a picture of everything that can be saved; with ``Contents.lock`` held, and quickly.

    Args:
        index: what is shown.
        residency: knows the shard of each slot.
        sources: of the shards.
        homes: where on disk those are, by id, that are in memory and on disk.
    """
    positions = np.arange(index.first, index.end)
    columns = index.take(positions)
    shards: list[tuple[int, int] | None] = []
    memory: dict[int, Block] = {}
    kept = np.ones(len(positions), np.bool_)
    slots = columns.pop("slot")
    in_memory = residency.are_memory(slots).tolist()
    for at, (number, slot) in enumerate(zip(columns["trajectory_id"].tolist(), slots.tolist(), strict=True)):
        home = homes.get(number) if in_memory[at] else None
        if home is not None:
            slot = home.table
            for name in STARTS:
                columns[name][at] = getattr(home, name)
        elif in_memory[at]:
            memory[len(shards)] = residency.block(slot)
            shards.append(None)
            continue
        elif slot == UNAVAILABLE:
            kept[at] = False
            continue
        shards.append(residency.shard_of(slot))
    picture = TrajectoryIndex()
    picture.texts = index.texts.copy()
    rows = np.array([UNAVAILABLE if shard is None else shard[1] for shard in shards], np.int32)
    values: dict[int, int] = {}
    for name in index.row_notes:
        tables = columns[NOTE_ROWS + name]
        numbers = [values.setdefault(slot, len(values)) if slot >= 0 else UNAVAILABLE for slot in tables.tolist()]
        columns[NOTE_ROWS + name] = np.array(numbers, np.int32)
    picture.append({name: array[kept] for name, array in columns.items()} | {"shard": rows})
    return Picture(picture, shards, memory, list(sources), [residency.shard_of(slot) for slot in values])
