"""The index: one entry per trajectory, kept as a struct of arrays. Pure; no I/O.

Entries are in the order in which trajectories were added, the oldest first. Dropping the oldest moves
a boundary; everything else that sampling asks for is one search in the running total of samples.

Whoever holds an index guards it: ``Contents.lock`` what a buffer shows, ``CommitLog._lock`` a writer's catalog.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.columns.fields import Axis
from trajstore.columns.flat import FlatTrajectory
from trajstore.columns.limits import UNKNOWN_VERSION
from trajstore.columns.schema import Extent, Kind
from trajstore.errors import CorruptStoreError, TrajectoryUnavailableError
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
"""Arrays of the index.

``nbytes`` are those of the columns, ``shard`` is a row of the shard table, ``start_*`` are first rows within it.
"""

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
    shard: int


class TrajectoryIndex:
    """Growable arrays of entries; positions run from ``first`` (oldest kept) to ``end`` (exclusive)."""

    def __init__(self) -> None:
        self.arrays: dict[str, npt.NDArray[Any]] = {name: np.zeros(0, dtype) for name, dtype in COLUMNS.items()}
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

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """Return one column of all kept entries, oldest first (a view)."""
        return self.arrays[name][self.first : self.end]

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
        for name, array in self.arrays.items():
            array[new] = columns[name]
        before = self.samples_before(self.end)
        self.ends[new] = before + np.cumsum(self.arrays["num_samples"][new])
        ids = self.arrays["trajectory_id"]
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
        for name, array in self.arrays.items():
            grown = np.zeros(capacity, array.dtype)
            grown[: len(self)] = array[kept]
            self.arrays[name] = grown
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

    def unshare(self, *names: str) -> None:
        """Stop sharing some columns with the index from which this one was sliced."""
        for name in names:
            self.arrays[name] = self.arrays[name].copy()

    def note_extent(self, shard: int, extent: Extent) -> None:
        """Note the extra rows and the document of the trajectory in a shard, which RLinf's index does not tell."""
        here = self.arrays["shard"][: self.end] == shard
        self.arrays["extra"][: self.end][here] = extent.extra
        self.arrays["document"][: self.end][here] = extent.document

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

    def take(self, positions: npt.NDArray[np.intp]) -> dict[str, npt.NDArray[Any]]:
        """Return copies of the columns at some positions."""
        return {name: array[positions] for name, array in self.arrays.items()}

    def replace(self, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Forget all entries and hold these; the weights table stays."""
        self.revision += 1
        self.first = self.end = 0
        self._ascending = True
        self.arrays = {name: np.zeros(0, dtype) for name, dtype in COLUMNS.items()}
        self.ends = np.zeros(0, np.int64)
        self.append(columns)

    def slice(self, start: int, stop: int) -> TrajectoryIndex:
        """Return an index of the entries ``start <= i < stop`` (counted from the oldest kept).

        Arrays are shared until either side adds entries; the weights table is shared for good.
        """
        part = TrajectoryIndex()
        low, high = self.first + start, self.first + stop
        part.arrays = {name: array[low:high] for name, array in self.arrays.items()}
        part.ends = self.ends[low:high] - self.samples_before(low)
        part.weights = self.weights
        part.end = high - low
        part._ascending = self._ascending
        return part

    def entry(self, position: int) -> TrajectoryEntry:
        """Return the entry at a position."""
        at = {name: array[position] for name, array in self.arrays.items()}
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
            shard=int(at["shard"]),
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
        self.arrays = dict(columns)
        self.first, self.end = 0, len(columns["trajectory_id"])
        self.ends = np.cumsum(columns["num_samples"])
        ids = columns["trajectory_id"]
        self._ascending = bool(np.all(ids[1:] > ids[:-1]))
        self._order = None


_LEAST_NBYTES = 8  # of an entry within a file: its UUID has 122 random bits, which nothing makes shorter


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


_NUMBERS = (
    *("num_samples", "steps", "batch", "extra", "document", "nbytes"),
    *("max_episode_length", "version_low", "version_high"),
)


def starts_of(extents: Sequence[Extent], kind: Kind) -> dict[str, IntArray]:
    """Return the first rows, within their shard, of all its trajectories in order."""
    more = Axis.FIRST_EXTRA if kind == "step" else Axis.RESPONSE
    rows = np.array([(e.rows(Axis.SAMPLES), e.rows(more), e.document) for e in extents], np.int64)
    starts = np.cumsum(rows, axis=0) - rows
    return {name: starts[:, at] for at, name in enumerate(STARTS)}


def columns_of(
    flats: Sequence[FlatTrajectory], ids: Sequence[int], uuids: bytes, weights: StringTable, shard: int
) -> dict[str, npt.NDArray[Any]]:
    """Return the index columns of new trajectories, those of :func:`starts_of` aside.

    Args:
        flats: the trajectories.
        ids: their trajectory ids.
        uuids: 16 bytes for each.
        weights: table that takes their ``model_weights_id``.
        shard: row of the shard table in which they lie, one after the other.
    """
    numbers = np.array(
        [
            (
                *(flat.num_samples, flat.extent.steps, flat.extent.batch, flat.extent.extra),
                *(flat.extent.document, flat.nbytes, flat.max_episode_length),
                *(flat.versions or (UNKNOWN_VERSION, UNKNOWN_VERSION)),
            )
            for flat in flats
        ],
        np.int64,
    )
    return {
        "trajectory_id": np.array(ids, np.int64),
        **{name: numbers[:, at].astype(COLUMNS[name]) for at, name in enumerate(_NUMBERS)},
        "weights": np.array([weights.add(flat.model_weights_id) for flat in flats], np.int32),
        "uuid": np.frombuffer(uuids, "V16"),
        "shard": np.full(len(flats), shard, np.int32),
    }
