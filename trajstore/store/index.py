"""The index: one entry per trajectory, kept as a struct of arrays. Pure; no I/O.

Entries are in the order in which trajectories were added, the oldest first. Dropping the oldest moves
a boundary; everything else that sampling asks for is one search in the running total of samples.

An entry has a *position*, which stays when older ones are dropped. Whatever takes or returns positions says so;
``index[name]`` alone counts from the oldest that is kept.

Whoever holds an index guards it: ``Contents.lock`` what a buffer shows, ``CommitLog._lock`` a writer's catalog.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from trajstore.columns.fields import Axis
from trajstore.columns.limits import UNKNOWN_VERSION
from trajstore.columns.schema import Extent
from trajstore.errors import CorruptStoreError, TrajectoryUnavailableError
from trajstore.machine_code import kernels
from trajstore.store.entry_checks import EntryGate, check_lengths, range_faults
from trajstore.store.packing import StringTable, declared_rows, pack, unpack

IntArray = npt.NDArray[np.int64]

COLUMNS: Mapping[str, npt.DTypeLike] = {
    "trajectory_id": np.int64,
    "num_samples": np.int64,
    "steps": np.int32,
    "batch": np.int32,
    "extra": np.int32,
    "document": np.int32,
    "nbytes": np.int64,
    "max_episode_length": np.int64,
    "version_low": np.int64,
    "version_high": np.int64,
    "weights": np.int32,
    "uuid": np.dtype("V16"),
    "shard": np.int32,
    "start_samples": np.int64,
    "start_extra": np.int64,
    "start_document": np.int64,
}
"""Arrays of the index, as a directory has them.

``nbytes`` are those of the columns, ``shard`` is a row of the shard table, ``start_*`` are first rows within it.
"""

Table = Literal["shard", "slot"]
"""What the entries of an index name as the table of their rows: a shard of a directory, or a slot of a buffer."""

Positions = int | slice | npt.NDArray[np.integer[Any]]

STARTS = ("start_samples", "start_extra", "start_document")
"""The arrays of first rows."""

START_OF: Mapping[Axis, str] = {
    Axis.SAMPLES: "start_samples",
    Axis.FIRST_EXTRA: "start_extra",
    Axis.LAST_EXTRA: "start_extra",
    Axis.RESPONSE: "start_extra",
    Axis.DOCUMENT: "start_document",
}
"""Which of them says where the rows of a column on an axis begin."""


class Home(NamedTuple):
    """Where the rows of a trajectory are: the table (shard or slot) and, on each kind of axis, the first row in it."""

    table: int
    start_samples: int = 0
    start_extra: int = 0
    start_document: int = 0

    def first(self, axis: Axis) -> int:
        """Return the first row of a column on this axis."""
        return int(getattr(self, START_OF[axis]))


@dataclass(frozen=True, slots=True)
class TrajectoryEntry:
    """One trajectory as the index knows it. ``versions`` is (lowest, highest) or None if unknown."""

    trajectory_id: int
    uuid: str
    num_samples: int
    extent: Extent
    nbytes: int
    max_episode_length: int
    model_weights_id: str
    versions: tuple[int, int] | None


class TrajectoryIndex:
    """Growable arrays of entries; positions run from ``first`` (oldest kept) to ``end`` (exclusive).

    Args:
        table: what the entries name as the table of their rows, and how the column is called that names it.
    """

    def __init__(self, table: Table = "shard") -> None:
        self.table = table
        self._arrays = self._empty()
        self.ends: IntArray = np.zeros(0, np.int64)
        """Running total of samples; ``ends[i]`` counts positions 0..i, dropped ones included."""
        self.weights = StringTable()
        self.first = 0
        self.end = 0
        self.revision = 0
        """Grows whenever entries that stay change their positions."""
        self._order: npt.NDArray[np.intp] | None = None
        self._ascending = True

    def __len__(self) -> int:
        return self.end - self.first

    def _empty(self) -> dict[str, npt.NDArray[Any]]:
        return {self.table if name == "shard" else name: np.zeros(0, dtype) for name, dtype in COLUMNS.items()}

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """Return one column of all kept entries, oldest first (a view)."""
        return self._arrays[name][self.first : self.end]

    def at(self, name: str, positions: Positions) -> Any:
        """Return what one column has at a position, or at several (a copy, of a slice a view)."""
        return self._arrays[name][positions]

    def by_position(self, *names: str) -> list[npt.NDArray[Any]]:
        """Return whole columns, in which positions count, for machine code. Valid until entries are added."""
        return [self._arrays[name] for name in names]

    @property
    def total_samples(self) -> int:
        """Samples of all kept entries."""
        return self.samples_before(self.end) - self.samples_before(self.first)

    def samples_before(self, position: int) -> int:
        """Return the running total of samples before a position."""
        return int(self.ends[position - 1]) if position else 0

    def append(self, columns: Mapping[str, npt.ArrayLike]) -> range:
        """Add entries, given by column, and return their positions.

        Those of earlier entries may become lower: when the arrays must grow, entries that were dropped before the
        first one leave them, so that an index is never much larger than what it has had at one time.
        """
        count = len(np.atleast_1d(np.asarray(columns["trajectory_id"])))
        self.reserve(count)
        new = slice(self.end, self.end + count)
        for name, array in self._arrays.items():
            array[new] = columns[name]
        before = self.samples_before(self.end)
        self.ends[new] = before + np.cumsum(self._arrays["num_samples"][new])
        ids = self._arrays["trajectory_id"]
        later = ids[max(new.start - 1, self.first) : new.stop]
        self._ascending = self._ascending and bool(np.all(later[1:] > later[:-1]))
        self.end += count
        self._order = None
        return range(new.start, new.stop)

    def reserve(self, count: int) -> None:
        """Have memory for ``count`` more entries."""
        capacity = self.end + count
        if capacity <= len(self.ends):
            return
        kept = slice(self.first, self.end)
        capacity = max(capacity - self.first, 2 * len(self), 64)
        before = self.samples_before(self.first)
        for name, array in self._arrays.items():
            grown = np.zeros(capacity, array.dtype)
            grown[: len(self)] = array[kept]
            self._arrays[name] = grown
        ends = np.zeros(capacity, np.int64)
        ends[: len(self)] = self.ends[kept] - before
        self.ends = ends
        self.revision += self.first > 0
        self.first, self.end = 0, len(self)

    def find(self, trajectory_id: int) -> int | None:
        """Return the position of an id, None if it is not in the index."""
        ids = self["trajectory_id"]
        if self._ascending:
            at = int(np.searchsorted(ids, trajectory_id))
        else:
            if self._order is None:
                self._order = np.argsort(ids, kind="stable")
            at = int(np.searchsorted(ids, trajectory_id, sorter=self._order))
            at = int(self._order[at]) if at < len(ids) else at
        return self.first + at if at < len(ids) and ids[at] == trajectory_id else None

    def find_many(self, trajectory_ids: Sequence[int] | IntArray) -> npt.NDArray[np.int64]:
        """Return the position of each id, -1 where it is not in the index."""
        if not self._ascending:
            each = [self.find(number) for number in trajectory_ids]
            return np.array([-1 if position is None else position for position in each], np.int64)
        ids, wanted = self["trajectory_id"], np.array(trajectory_ids, np.int64)
        at = np.searchsorted(ids, wanted)
        found = np.zeros(len(wanted), np.bool_)
        inside = at < len(ids)
        found[inside] = ids[at[inside]] == wanted[inside]
        return np.where(found, self.first + at, -1)

    def position_of(self, trajectory_id: int) -> int:
        """Return the position of an id.

        Raises:
            TrajectoryUnavailableError: it is not in the index.
        """
        position = self.find(trajectory_id)
        if position is None:
            raise TrajectoryUnavailableError(f"no trajectory has the id {trajectory_id}")
        return position

    def in_slots(self, slots: npt.NDArray[np.int32]) -> TrajectoryIndex:
        """Return an index of the same entries that names slots. What is changed later in either is not shared.

        Args:
            slots: by row of the shard table.
        """
        other = self.slice(0, len(self))
        for name in (*STARTS, "extra", "document"):
            other._arrays[name] = other._arrays[name].copy()
        other.table = "slot"
        other._arrays["slot"] = slots[other._arrays.pop("shard")]
        other.weights = self.weights.copy()
        return other

    def renumber(self, ids: IntArray) -> None:
        """Give all kept entries other ids, which ascend."""
        self.adopt({name: self[name] for name in self._arrays} | {"trajectory_id": ids})

    def home(self, position: int) -> Home:
        """Return where the rows of the trajectory at a position are."""
        return Home(*(int(array[position]) for array in self.by_position(self.table, *STARTS)))

    def point(self, positions: npt.NDArray[np.int64], homes: Sequence[Home] | IntArray) -> None:
        """Let trajectories be read from elsewhere: ``homes`` has a row for each position.

        At one stroke: an entry that an interrupt left with the table of one home and the first rows of another would be
        read out of bounds.
        """
        columns = self.by_position(self.table, *STARTS)
        kernels().set_homes(*columns, positions, np.array(homes, np.int64).reshape(-1, len(columns)))

    def note_extent(self, positions: Positions, extent: Extent) -> None:
        """Note the extra rows and the document of a trajectory, which RLinf's index does not tell."""
        self._arrays["extra"][positions] = extent.extra
        self._arrays["document"][positions] = extent.document

    def note_nbytes(self, positions: Positions, nbytes: IntArray | int) -> None:
        """Note the bytes of the columns of trajectories, which RLinf's index does not tell either."""
        self._arrays["nbytes"][positions] = nbytes

    def note_versions(self, position: int, versions: tuple[int, int]) -> None:
        """Note lowest and highest policy version of a trajectory, which RLinf's index does not tell either."""
        self._arrays["version_low"][position], self._arrays["version_high"][position] = versions

    def positions_in(self, ranges: IntArray) -> npt.NDArray[np.intp]:
        """Return the positions of all kept entries whose ids lie in inclusive ranges ``[n, 2]``, oldest first."""
        return self.first + np.flatnonzero(lie_in(self["trajectory_id"], ranges))

    def drop_oldest(self, count: int) -> None:
        """Forget the ``count`` oldest entries."""
        self.first += min(count, len(self))
        self._order = None

    def drop(self, positions: npt.NDArray[np.intp]) -> None:
        """Forget entries anywhere; the positions of later ones change."""
        if len(positions) and np.array_equal(positions, np.arange(self.first, self.first + len(positions))):
            self.drop_oldest(len(positions))
            return
        keep = np.ones(self.end, np.bool_)
        keep[: self.first] = False
        keep[positions] = False
        self.replace(self.take(np.flatnonzero(keep)))

    def take(self, positions: slice | npt.NDArray[np.integer[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Return all columns at some positions (copies, of a slice views)."""
        return {name: array[positions] for name, array in self._arrays.items()}

    def replace(self, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Forget all entries and hold these; the weights table stays."""
        self.revision += 1
        self.first = self.end = 0
        self._ascending = True
        self._arrays = self._empty()
        self.ends = np.zeros(0, np.int64)
        self.append(columns)

    def slice(self, start: int, stop: int) -> TrajectoryIndex:
        """Return an index of the entries ``start <= i < stop`` (counted from the oldest kept).

        Arrays are shared until either side adds entries; the weights table is shared for good.
        """
        part = TrajectoryIndex(self.table)
        low, high = self.first + start, self.first + stop
        part._arrays = {name: array[low:high] for name, array in self._arrays.items()}
        part.ends = self.ends[low:high] - self.samples_before(low)
        part.weights = self.weights
        part.end = high - low
        part._ascending = self._ascending
        return part

    def entry(self, position: int) -> TrajectoryEntry:
        """Return the entry at a position."""
        at = {name: array[position] for name, array in self._arrays.items()}
        low = int(at["version_low"])
        return TrajectoryEntry(
            trajectory_id=int(at["trajectory_id"]),
            uuid=str(uuid.UUID(bytes=at["uuid"].tobytes())),
            num_samples=int(at["num_samples"]),
            extent=Extent(int(at["steps"]), int(at["batch"]), int(at["extra"]), int(at["document"])),
            nbytes=int(at["nbytes"]),
            max_episode_length=int(at["max_episode_length"]),
            model_weights_id=self.weights[int(at["weights"])],
            versions=None if low == UNKNOWN_VERSION else (low, int(at["version_high"])),
        )

    def to_json(self, **replaced: npt.NDArray[Any]) -> dict[str, Any]:
        """Return all kept entries as JSON values, with some columns replaced."""
        return {
            "columns": {name: pack(replaced.get(name, self[name])) for name in COLUMNS},
            "weights": self.weights.to_json(),
        }

    @staticmethod
    def from_json(value: Any, shards: int, gate: EntryGate | None = None) -> TrajectoryIndex:
        """Return the index that :meth:`to_json` described.

        Args:
            value: the JSON values.
            shards: number of shards in the table that the entries refer to.
            gate: what becomes of entries that cannot be served; None refuses them.

        Raises:
            CorruptStoreError: it does not describe an index, or columns disagree.
        """
        index = TrajectoryIndex()
        try:
            packed = value["columns"]
            _check_declared(packed)
            columns = {name: unpack(packed[name], dtype) for name, dtype in COLUMNS.items()}
            index.weights = StringTable.from_json(value["weights"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CorruptStoreError(f"not an index: {error}") from error
        check_lengths(columns)
        index.adopt((gate or EntryGate()).admit(columns, range_faults(columns, shards, len(index.weights))))
        return index

    def adopt(self, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Hold these entries instead of the present ones, in these very arrays.

        Raises:
            CorruptStoreError: they have more samples than can be counted.
        """
        if columns["num_samples"].sum(dtype=np.float64) >= 1 << 62:
            raise CorruptStoreError("the samples of all trajectories are too many to be counted")
        self._arrays = dict(columns)
        self.first, self.end = 0, len(columns["trajectory_id"])
        self.ends = np.cumsum(columns["num_samples"])
        ids = columns["trajectory_id"]
        self._ascending = bool(np.all(ids[1:] > ids[:-1]))
        self._order = None


_LEAST_NBYTES = 2  # of an entry within a file: its UUID, of which earlier versions chose many with the same beginning


def _check_declared(packed: Mapping[str, Any]) -> None:
    """Refuse columns that claim more entries than their bytes can hold, before memory is taken for them.

    Raises:
        CorruptStoreError: they do.
        KeyError, TypeError, ValueError: they are no packed arrays.
    """
    count = declared_rows(packed["trajectory_id"])
    for name in COLUMNS:
        if declared_rows(packed[name]) != count:
            raise CorruptStoreError(f"index column {name} has {declared_rows(packed[name])} entries, not {count}")
    if count * _LEAST_NBYTES > len(packed["uuid"]["data"]) + 1024:
        raise CorruptStoreError(f"the index claims {count} entries, more than its bytes can hold")


def lie_in(ids: IntArray, ranges: IntArray) -> npt.NDArray[np.bool_]:
    """Return, per id, whether it lies in one of the inclusive ranges ``[n, 2]``, which may overlap."""
    if not len(ranges):
        return np.zeros(len(ids), np.bool_)
    order = np.argsort(ranges[:, 0], kind="stable")
    lows, reach = ranges[order, 0], np.maximum.accumulate(ranges[order, 1])
    at = np.searchsorted(lows, ids, side="right") - 1
    inside: npt.NDArray[np.bool_] = (at >= 0) & (reach[at] >= ids)
    return inside
