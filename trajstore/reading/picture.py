"""What a buffer shows at one moment, for a checkpoint: taken quickly, written while the buffer goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trajstore.columns.flat import FlatTrajectory
from trajstore.reading.cache import Held
from trajstore.reading.residency import Residency
from trajstore.reading.slots import UNAVAILABLE
from trajstore.reading.sources import Source
from trajstore.store.facts import NOTE_ROWS
from trajstore.store.home import STARTS
from trajstore.store.index import TrajectoryIndex


@dataclass(frozen=True, slots=True)
class Picture:
    """A consistent picture of the contents, for a checkpoint.

    Attributes:
        index: the entries that can be saved; ``shard`` is a row of an entry's source, or UNAVAILABLE.
        shards: per entry, (source, row) on disk, or None where ``flats`` has it.
        flats: by position in ``index``, trajectories that are in memory only.
        sources: the sources that ``shards`` refers to.
        values: (source, row) of the shards of values by row, which the index names by their place here.
    """

    index: TrajectoryIndex
    shards: list[tuple[int, int] | None]
    flats: dict[int, FlatTrajectory]
    sources: list[Source]
    values: list[tuple[int, int]]

    def only(self, entries: npt.NDArray[np.intp]) -> Picture:
        """Return a picture of some of the entries, in their order."""
        index = TrajectoryIndex()
        index.texts = self.index.texts.copy()
        index.append(self.index.take(self.index.first + entries))
        kept = entries.tolist()
        flats = {at: self.flats[entry] for at, entry in enumerate(kept) if entry in self.flats}
        return Picture(index, [self.shards[entry] for entry in kept], flats, self.sources, self.values)


def picture_of(
    index: TrajectoryIndex, residency: Residency, sources: Sequence[Source], held: Mapping[int, Held]
) -> Picture:
    """Return a picture of everything that can be saved; with ``Contents.lock`` held, and quickly.

    Args:
        index: what is shown.
        residency: knows the shard of each slot.
        sources: of the shards.
        held: the trajectories in memory, by id.
    """
    positions = np.arange(index.first, index.end)
    columns = index.take(positions)
    shards: list[tuple[int, int] | None] = []
    flats: dict[int, FlatTrajectory] = {}
    kept = np.ones(len(positions), np.bool_)
    slots = columns.pop("slot").tolist()
    for at, number in enumerate(columns["trajectory_id"].tolist()):
        slot = slots[at]
        there = held.get(number)
        if there is not None and there.home is not None:
            slot, *starts = there.home
            for name, start in zip(STARTS, starts, strict=True):
                columns[name][at] = start
        elif there is not None and there.flat is not None:
            flats[len(shards)] = there.flat
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
    return Picture(picture, shards, flats, list(sources), [residency.shard_of(slot) for slot in values])
