"""The index: one entry per trajectory, stored as a struct of arrays. Pure; no I/O.

Entries are in the order of addition, oldest first. Dropping the oldest moves a boundary; sampling needs one search in
the running total of samples, which also stores the column ``num_samples``.

An entry has a *position*, which is unchanged when older ones are dropped. Methods state when they use positions;
``index[name]`` alone counts from the oldest kept entry.

The index's owner guards it: ``Contents.lock`` for a buffer's contents, ``CommitLog._lock`` for a writer's catalog.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trajstore._core.base.machine_code import kernels
from trajstore._core.base.types import IntArray
from trajstore._core.columns.facts import SCORE
from trajstore._core.columns.limits import UNKNOWN_VERSION
from trajstore._core.columns.schema import Extent
from trajstore._core.store.facts import (
    MOST_SCORES,
    NOTE,
    NOTE_ROWS,
    NOTE_START,
    NOTE_TEXT,
    is_fact,
    is_note,
    is_optional,
    is_text,
    unknown,
)
from trajstore._core.store.json_arrays import StringTable
from trajstore._core.store.log_records import lie_in
from trajstore._core.store.row_location import STARTS, RowLocation
from trajstore._core.store.run_ids import ID_LIMIT, shown_id, spelling_hint
from trajstore._core.store.waiting import MOST_ADDED, LazyColumn, Waiting
from trajstore.errors import CorruptStoreError, TrajectoryUnavailableError

logger = logging.getLogger(__name__)


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
    "committed": np.int64,
    "weights": np.int32,
    "uuid": np.dtype("V16"),
    "shard": np.int32,
    "start_samples": np.int64,
    "start_extra": np.int64,
    "start_document": np.int64,
}
"""Columns of every index, as stored in a directory; facts (:mod:`trajstore._core.store.facts`) are additional.

``num_samples`` counts valid steps (1 for a rollout), ``nbytes`` the bytes of the columns; ``committed`` is in µs since
1970 (``UNKNOWN_TIME`` if unknown), ``shard`` is a row of the shard table, and ``start_*`` are first rows within it.
"""

Table = Literal["shard", "slot"]
"""The table that holds the rows of entries: a shard of a directory, or a slot of a buffer."""

Positions = int | slice | npt.NDArray[np.integer[Any]]

_FEW_TEXTS = 4096
"""Number of unused texts that an index keeps in any case."""


_BLOCK = 1 << 16
"""Number of entries whose columns fit into a processor's cache."""

SAMPLES = "num_samples"
"""Column without an array: the differences of the running total."""

_HOMES = (*STARTS, "extra", "document")
"""Location columns, which are changed in place."""


class _Lent:
    """State of indexes that share arrays: whether an index of slots shares the location arrays."""

    __slots__ = ("locations",)

    def __init__(self) -> None:
        self.locations = False


@dataclass(frozen=True, slots=True)
class TrajectoryEntry:
    """One index entry. ``versions`` is (lowest, highest) or None if unknown."""

    trajectory_id: int
    num_samples: int
    extent: Extent
    nbytes: int
    max_episode_length: int
    model_weights_id: str
    versions: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Remainder:
    """What is left of an index without some entries, see :meth:`TrajectoryIndex.remainder`.

    Attributes:
        index: the remaining entries, with room for more.
        kept: their positions in the original.
        end: of the original when they were copied.
    """

    index: TrajectoryIndex
    kept: npt.NDArray[np.intp]
    end: int


class TrajectoryIndex:
    """Growable arrays of entries; positions run from ``first`` (oldest kept) to ``end`` (exclusive).

    Args:
        table: kind of table that holds the rows, and name of the column with its number.
    """

    def __init__(self, table: Table = "shard") -> None:
        self.table = table
        self._arrays = self._empty()
        self._waiting: dict[str, Waiting] = {}
        """Columns not unpacked yet; :meth:`_array` unpacks one."""
        self.before: IntArray = np.zeros(1, np.int64)
        """Running total of samples before each position, from any start; one element more than the columns."""
        self.texts = StringTable()
        """String table of ``weights`` and of the facts that are texts."""
        self._texts_kept = 0
        self._told_left_out = False
        self.first = 0
        self.end = 0
        self.revision = 0
        """Increases whenever remaining entries change their positions."""
        self.noted = 0
        """Increases whenever facts of remaining entries change."""
        self._order: npt.NDArray[np.intp] | None = None
        self.may_be_partial = False
        """False if every trajectory has T·B samples: no field ``valid``, and no rollouts."""
        self._ascending = True
        self._lent = _Lent()
        self._lender_ids: IntArray | None = None
        """Array of ids of the index that lends its arrays, see :meth:`borrow`."""
        self._offset = 0
        """Position in the lender of the entry at position 0."""

    def __len__(self) -> int:
        return self.end - self.first

    def _empty(self) -> dict[str, npt.NDArray[Any]]:
        stored = {self.table if name == "shard" else name: dtype for name, dtype in COLUMNS.items() if name != SAMPLES}
        return {name: np.zeros(0, dtype) for name, dtype in stored.items()}

    @property
    def _capacity(self) -> int:
        return len(self.before) - 1

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """Return one column of all kept entries, oldest first (a view)."""
        column: npt.NDArray[Any] = self.at(name, slice(self.first, self.end))
        return column

    def at(self, name: str, positions: Positions) -> Any:
        """Return one column at one or several positions (a copy; a view for a slice)."""
        if name != SAMPLES:
            return self._array(name)[positions]
        if isinstance(positions, slice):
            return np.diff(self.before[positions.start : positions.stop + 1])
        return self.before[positions + 1] - self.before[positions]

    def by_position(self, *names: str) -> list[npt.NDArray[Any]]:
        """Return whole arrays, indexed by position, for compiled code. Valid until entries are added."""
        return [self._array(name) for name in names]

    def wait_for(self, columns: Mapping[str, LazyColumn]) -> None:
        """Add columns of all entries that are unpacked on first use."""
        self._waiting = {name: Waiting(packed, 0, self.end) for name, packed in columns.items()}

    def _array(self, name: str) -> npt.NDArray[Any]:
        """Return a column indexed by position, unpacking it if needed.

        Raises:
            CorruptStoreError: unpacking failed; names the file.
        """
        waiting = self._waiting.get(name)
        if waiting is not None:
            self._arrays[name] = _with_room(waiting.column(), self._capacity)
            self._waiting.pop(name, None)
        return self._arrays[name]

    def _unpack(self) -> None:
        """Unpack all columns."""
        for name in list(self._waiting):
            self._array(name)

    @property
    def total_samples(self) -> int:
        """Samples of all kept entries."""
        return int(self.before[self.end] - self.before[self.first])

    def find_rows(self, samples: IntArray, first: int, end: int) -> tuple[IntArray, IntArray]:
        """Return position and row of samples, counted from the first sample of the window ``[first, end)``."""
        positions, rows = np.empty(len(samples), np.int64), np.empty(len(samples), np.int64)
        kernels.find_rows(samples, first, end, self.before, positions, rows)
        return positions, rows

    def place_rows(self, positions: IntArray, rows: IntArray) -> IntArray:
        """Return where rows of trajectories are in their tables, on each axis that can be sampled: ``[3, n]``."""
        places = np.empty((3, len(positions)), np.int64)
        columns = self.by_position("start_samples", "start_extra", "steps", "batch", "extra")
        kernels.place_rows(positions, np.ascontiguousarray(rows, np.int64), *columns, places)
        return places

    def append(self, columns: Mapping[str, npt.ArrayLike]) -> range:
        """Add entries, given by column, and return their positions.

        Positions of earlier entries may decrease: growing the arrays removes dropped entries, so that an index is never
        much larger than its largest content.
        """
        count = len(np.atleast_1d(np.asarray(columns["trajectory_id"])))
        self.reserve(count)
        new = slice(self.end, self.end + count)
        self._have_facts(columns)
        for name, array in self._arrays.items():
            array[new] = columns[name] if name in columns or not is_optional(name) else unknown(name, count)
        waiting = {name: column.followed_by(_rows(name, columns, count)) for name, column in self._waiting.items()}
        samples = np.broadcast_to(np.asarray(columns[SAMPLES], np.int64), count)
        self.before[new.start + 1 : new.stop + 1] = self.before[new.start] + np.cumsum(samples)
        self.may_be_partial = self.may_be_partial or _are_partial(columns)
        ids = self._arrays["trajectory_id"]
        later = ids[max(new.start - 1, self.first) : new.stop]
        self._ascending = self._ascending and bool(np.all(later[1:] > later[:-1]))
        self._waiting, self.end = waiting, self.end + count
        self._order = None
        return range(new.start, new.stop)

    def reserve(self, count: int, spare: int | None = None) -> None:
        """Reserve memory for ``count`` more entries; if it is short, for ``spare``, by default as many as there are."""
        if self._waiting and any(len(waiting.added) >= MOST_ADDED for waiting in self._waiting.values()):
            self._unpack()
        if self.end + count <= self._capacity:
            return
        if self.first:  # dropped entries are removed
            self._unpack()
        self._allocate(max(len(self) + max(count, len(self) if spare is None else spare), 64))

    def _allocate(self, capacity: int) -> None:
        """Move the kept entries to own arrays."""
        before = np.zeros(capacity + 1, np.int64)
        before[: len(self) + 1] = self.before[self.first : self.end + 1] - self.before[self.first]
        self._move_to({}, before)

    def _move_to(self, arrays: dict[str, npt.NDArray[Any]], before: IntArray) -> None:
        """Move the kept entries, the oldest one to position 0, to these arrays and new ones of the same capacity."""
        kept, capacity = slice(self.first, self.end), len(before) - 1
        new = {name: _with_room(array[kept], capacity) for name, array in self._arrays.items() if name not in arrays}
        self._arrays, self.before, self._lender_ids, self._lent = new | arrays, before, None, _Lent()
        self.revision += self.first > 0
        self.first, self.end = 0, len(self)

    def borrow(self, lender: TrajectoryIndex, ids: IntArray) -> None:
        """Reserve memory for entries of these ids by sharing the arrays of an index with the same previous entries.

        Locations, which differ between the two, are not shared. The caller guards both indexes. Later appends to the
        lender, and evictions from it, do not change the shared rows.
        """
        offset, lender_ids = self._offset_in(lender, ids), lender._arrays["trajectory_id"]
        if offset is None:
            if self._lender_ids is not None:
                self._allocate(len(self) + len(ids))
        elif self._lender_ids is not lender_ids or self.texts is not lender.texts:
            offset += self.first
            shared = {name: array[offset:] for name, array in lender._arrays.items() if _may_be_lent(name)}
            self._move_to(shared, lender.before[offset:])
            lacking = {name: array for name, array in self._arrays.items() if is_text(name) and name not in shared}
            self._arrays |= lender.translated(lacking, self.texts)
            self._lender_ids, self._offset = lender_ids, offset
            self.texts, self._texts_kept = lender.texts, lender._texts_kept
        self.reserve(len(ids))

    def _offset_in(self, lender: TrajectoryIndex, ids: IntArray) -> int | None:
        """Return the lender's position of position 0; None if its entries, followed by ``ids``, differ."""
        theirs, count = lender._arrays["trajectory_id"], len(self)
        if self._lender_ids is theirs:
            offset, known = self._offset, True
        else:
            mine = self["trajectory_id"]
            offset, known = lender.first - self.first, np.array_equal(theirs[lender.first :][:count], mine)
        new = theirs[offset + self.end : min(offset + self.end + len(ids), lender.end)]
        return offset if known and not self._waiting and np.array_equal(new, ids) else None

    def find(self, trajectory_id: int) -> int | None:
        """Return the position of an id, None if it is not in the index."""
        position = int(self.find_many([trajectory_id])[0])
        return None if position < 0 else position

    def find_many(self, trajectory_ids: Sequence[int] | IntArray) -> npt.NDArray[np.int64]:
        """Return the position of each id, -1 where it is not in the index."""
        ids, wanted = self["trajectory_id"], np.asarray(trajectory_ids, np.int64)
        if not len(ids):
            return np.full(len(wanted), -1, np.int64)
        if self._ascending and len(wanted):  # consecutive entries, as of a commit or of all
            first = int(np.searchsorted(ids, wanted[0]))
            if np.array_equal(ids[first : first + len(wanted)], wanted):
                return np.arange(self.first + first, self.first + first + len(wanted))
        if self._order is None and not self._ascending:
            self._order = np.argsort(ids, kind="stable")
        at = np.minimum(np.searchsorted(ids, wanted, sorter=self._order), len(ids) - 1)
        at = at if self._order is None else self._order[at]
        return np.where(ids[at] == wanted, self.first + at, -1)

    def position_of(self, trajectory_id: int) -> int:
        """Return the position of an id.

        Raises:
            TrajectoryUnavailableError: it is not in the index.
        """
        position = int(self.find_many([trajectory_id])[0])
        if position < 0:
            ids = self["trajectory_id"]
            other = len(ids) and (int(ids[0]) >= ID_LIMIT) != (trajectory_id >= ID_LIMIT)
            hint = f"; {spelling_hint(trajectory_id)}" if other else ""
            raise TrajectoryUnavailableError(f"no trajectory has the id {shown_id(trajectory_id)}{hint}")
        return position

    def in_slots(self, slots: npt.NDArray[np.int32]) -> TrajectoryIndex:
        """Return an index of the same entries that refers to slots. Later changes are not shared.

        Args:
            slots: by row of the shard table; the last element is for entries without one.
        """
        other = self.slice(0, len(self))
        other._lent.locations = True  # copying them would take a quarter of a read-only index
        other.table = "slot"
        rows = other._arrays.pop("shard")
        alike = np.array_equal(slots[:-1], np.arange(len(slots) - 1)) and bool((rows >= 0).all())
        other._arrays["slot"] = rows if alike else slots[rows]
        for name in self.row_notes:
            other._arrays[NOTE_ROWS + name] = slots[other._arrays[NOTE_ROWS + name]]
        return other

    def renumber(self, ids: IntArray) -> None:
        """Assign other, ascending ids to all kept entries; indexes that share the arrays keep theirs."""
        renumbered_ids = self._array("trajectory_id").copy()
        renumbered_ids[self.first : self.end] = ids
        self._arrays["trajectory_id"] = renumbered_ids
        self._ascending, self._order, self._lender_ids = True, None, None

    def location(self, position: int) -> RowLocation:
        """Return the row location of the trajectory at a position."""
        return RowLocation(*(int(self.at(name, position)) for name in (self.table, *STARTS)))

    def point(self, positions: npt.NDArray[np.int64], locations: Sequence[RowLocation] | IntArray) -> None:
        """Change the locations of trajectories; ``locations`` has a row for each position.

        The change is atomic: an entry with the table of one location and the first rows of another would be read out of
        bounds after an interrupt.
        """
        self._own_locations()
        columns = self.by_position(self.table, *STARTS)
        kernels.set_locations(*columns, positions, np.array(locations, np.int64).reshape(-1, len(columns)))

    def _own_locations(self) -> None:
        """Copy location arrays shared with an index of another table, before changing them."""
        if self._lent.locations:
            self._arrays |= {name: self._arrays[name].copy() for name in (self.table, *_HOMES)}
            self._lent = _Lent()

    def fill(self, positions: Positions, **values: IntArray | int) -> None:
        """Set columns of trajectories that were unknown when they were added: of RLinf's index, or commit times."""
        for name, value in values.items():
            self._array(name)[positions] = value

    def fill_extent(self, positions: Positions, extent: Extent) -> None:
        """Set the extra rows and the document of a trajectory, which RLinf's index lacks."""
        self._own_locations()
        self.fill(positions, extra=extent.extra, document=extent.document)

    def fact(self, name: str) -> npt.NDArray[Any]:
        """Return a fact of all kept entries, oldest first; late values replace original ones."""
        column = self[name] if name in self._arrays or name in self._waiting else unknown(name, len(self))
        if NOTE + name not in self._arrays:
            return column
        given = self[NOTE + name]
        return np.where(np.isnan(given), column, given)

    @property
    def facts(self) -> list[str]:
        """Names of the facts known for at least one entry."""
        return [name for name in (*self._arrays, *self._waiting) if is_fact(name)]

    @property
    def notes(self) -> list[str]:
        """Names of the columns of late values, one value per trajectory."""
        return [name for name in self._arrays if name.startswith((NOTE, NOTE_TEXT))]

    @property
    def row_notes(self) -> list[str]:
        """Names of late values by row; :data:`~trajstore._core.store.facts.NOTE_ROWS` has their table."""
        return [name.removeprefix(NOTE_ROWS) for name in self._arrays if name.startswith(NOTE_ROWS)]

    def given(self, position: int) -> dict[str, float | str]:
        """Return the latest late values of the trajectory at a position, by name."""
        values: dict[str, float | str] = {}
        for name, array in self._arrays.items():
            if name.startswith(NOTE_TEXT):
                if array[position] >= 0:
                    values[name.removeprefix(NOTE_TEXT)] = self.texts[int(array[position])]
            elif name.startswith(NOTE) and not np.isnan(array[position]):
                values[name.removeprefix(NOTE)] = float(array[position])
        return values

    def note(self, positions: IntArray, columns: Mapping[str, npt.NDArray[Any]], texts: StringTable) -> None:
        """Set late values; the last one wins for a repeated position. Score names beyond the limit are ignored.

        Args:
            positions: of the trajectories, from :meth:`find_many`; -1 is ignored.
            columns: a value for each.
            texts: string table of the text columns.
        """
        known = positions >= 0
        if not known.any():
            return
        chosen = self.translated({name: column[known] for name, column in columns.items()}, texts)
        self.noted += 1
        before = self._arrays.copy()
        self._have_facts(chosen)
        for name in chosen.keys() & self._arrays.keys():
            if name in before:
                self._arrays[name] = before[name].copy()  # slices that share it must not change
            self._arrays[name][positions[known]] = chosen[name]

    def take_notes(self, noted: TrajectoryIndex) -> bool:
        """Take the late values of a :meth:`shared` index that got them by one :meth:`note`.

        Entries may have been added meanwhile; with any other change this returns False and changes nothing.
        """
        state = noted.first, noted.revision, noted.noted - 1, noted._capacity
        if (self.first, self.revision, self.noted, self._capacity) != state or self.texts is not noted.texts:
            return False
        later = slice(noted.end, self.end)
        for name, array in noted._arrays.items():
            before = self._arrays.get(name)
            if is_note(name) and array is not before:
                array[later] = unknown(name, self.end - noted.end) if before is None else before[later]
                self._arrays[name] = array
        self.noted = noted.noted
        return True

    def forget_notes(self) -> None:
        """Remove all late values."""
        self.noted += 1
        self._arrays = {name: array for name, array in self._arrays.items() if not is_note(name)}

    def _have_facts(self, columns: Mapping[str, npt.ArrayLike]) -> None:
        """Create missing fact columns; the number of score names is limited."""
        for name in [name for name in columns if name not in self._arrays]:
            if name in self._waiting or not is_optional(name):
                continue
            if not name.startswith(SCORE) or sum(fact.startswith(SCORE) for fact in self.facts) < MOST_SCORES:
                self._arrays[name] = _with_room(unknown(name, self.end), self._capacity)
            elif not self._told_left_out:
                self._told_left_out = True
                logger.warning(
                    "%r is no fact here: %d scores of reward.metadata are, the most that can be; further ones stay in "
                    "the rollouts alone",
                    name,
                    MOST_SCORES,
                )

    def translated(self, columns: Mapping[str, npt.NDArray[Any]], texts: StringTable) -> dict[str, npt.NDArray[Any]]:
        """Return another index's columns with its text numbers translated to this string table."""
        return renumbered(columns, texts, self.texts)

    def _shed_texts(self) -> None:
        """Remove unused texts if they are more than half of all; with borrowed arrays, the lender does so."""
        if self._lender_ids is not None or len(self.texts) <= 2 * self._texts_kept + _FEW_TEXTS:
            return
        self._unpack()
        kept, old = slice(self.first, self.end), self.texts
        self.texts = StringTable()
        for name in [name for name in self._arrays if name == "weights" or is_text(name)]:
            array = self._arrays[name].copy()
            array[kept] = self.texts.extend(old, array[kept])
            self._arrays[name] = array
        self._texts_kept = len(self.texts)

    def positions_in(self, ranges: IntArray) -> npt.NDArray[np.intp]:
        """Return the positions of all kept entries whose ids lie in inclusive ranges ``[n, 2]``, oldest first."""
        ids, (lows, highs) = self["trajectory_id"], ranges.T
        if not self._ascending or np.any(lows[1:] <= highs[:-1]):
            return self.first + np.flatnonzero(lie_in(ids, ranges))
        starts, stops = np.searchsorted(ids, lows), np.searchsorted(ids, highs, "right")
        counts = stops - starts
        positions: npt.NDArray[np.intp]
        if counts.max(initial=0) <= 1:  # ``repeat`` takes longer, and lets no other thread run
            positions = self.first + starts[counts == 1]
        else:
            ends = np.cumsum(counts)
            positions = np.arange(counts.sum()) + np.repeat(self.first + stops - ends, counts)
        return positions

    def drop_oldest(self, count: int) -> None:
        """Drop the ``count`` oldest entries."""
        self.first += min(count, len(self))
        self._order = None
        self._shed_texts()

    def drop(self, positions: npt.NDArray[np.intp], remainder: Remainder | None = None) -> None:
        """Drop any entries; the positions of later ones change.

        Args:
            positions: of the entries.
            remainder: the others, if they were copied before, and no entry was dropped or got a late value since.
        """
        if self._are_oldest(positions):
            self.drop_oldest(len(positions))
        elif remainder is None:
            self.adopt(self.take(self._others(positions)))
            self._shed_texts()
        else:
            others = remainder.index
            for name in (self.table, *_HOMES, "committed"):  # changed in place, perhaps since
                others._arrays[name][: len(others)] = self._array(name)[remainder.kept]
            others.append(self.take(slice(remainder.end, self.end)))
            vars(self).update(vars(others) | {"revision": self.revision + 1})
            self._shed_texts()

    def _are_oldest(self, positions: npt.NDArray[np.intp]) -> bool:
        return len(positions) > 0 and np.array_equal(positions, np.arange(self.first, self.first + len(positions)))

    def _others(self, positions: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Return the positions of all kept entries but some."""
        keep = np.ones(self.end, np.bool_)
        keep[: self.first] = False
        keep[positions] = False
        return np.flatnonzero(keep)

    def shared(self) -> TrajectoryIndex:
        """Return an index of the same entries at the same positions; arrays are shared until either side adds."""
        other = copy(self)
        other._arrays, other._waiting = dict(self._arrays), dict(self._waiting)
        return other

    def remainder(self, positions: npt.NDArray[np.intp], spare: int | None = None) -> Remainder | None:
        """Copy all entries but some, for :meth:`drop`; None if these are the oldest, whose drop copies nothing.

        Call it on a :meth:`shared` index, without the lock of the original. ``spare`` as for :meth:`reserve`.
        """
        if self._are_oldest(positions):
            return None
        kept, others = self._others(positions), self.shared()
        others.adopt(self.take(kept))
        others.reserve(1, spare)
        return Remainder(others, kept, self.end)

    def without(self, positions: npt.NDArray[np.intp]) -> TrajectoryIndex:
        """Return an index of the other entries; later changes are not shared."""
        other = self.slice(0, len(self))
        other.drop(positions - self.first)
        return other

    def take(self, positions: slice | npt.NDArray[np.integer[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Return all columns at some positions (copies; views for a slice)."""
        self._unpack()
        return self.unpacked(positions)

    def unpacked(self, positions: slice | npt.NDArray[np.integer[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Return the already unpacked columns at some positions."""
        return {name: self.at(name, positions) for name in (SAMPLES, *self._arrays)}

    def slice(self, start: int, stop: int) -> TrajectoryIndex:
        """Return an index of the entries ``start <= i < stop`` (counted from the oldest kept).

        Arrays are shared until either side adds entries; texts are shared until unused ones are removed.
        """
        part = copy(self)
        low, high = self.first + start, self.first + stop
        part._arrays = {name: array[low:high] for name, array in self._arrays.items()}
        part._waiting = {name: waiting.part(low, high) for name, waiting in self._waiting.items()}
        part.before = self.before[low : high + 1]
        part.first, part.end, part._order, part._lender_ids = 0, high - low, None, None
        return part

    def entry(self, position: int) -> TrajectoryEntry:
        """Return the entry at a position."""
        names = ("trajectory_id", "num_samples", "nbytes", "max_episode_length", "version_low", "version_high")
        number, samples, nbytes, longest, low, high = (int(self.at(name, position)) for name in names)
        return TrajectoryEntry(
            trajectory_id=number,
            num_samples=samples,
            extent=self.extent(position),
            nbytes=nbytes,
            max_episode_length=longest,
            model_weights_id=self.texts[int(self.at("weights", position))],
            versions=None if low == UNKNOWN_VERSION else (low, high),
        )

    def extent(self, position: int) -> Extent:
        """Return the number of rows on each axis of the trajectory at a position."""
        return Extent(*(int(self.at(name, position)) for name in Extent._fields))

    def extents(self, positions: Positions | None = None) -> IntArray:
        """Return the number of rows on each axis of the trajectories at some positions, or of all, ``[n, 4]``."""
        positions = slice(self.first, self.end) if positions is None else positions
        return np.stack([self.at(name, positions).astype(np.int64) for name in Extent._fields], axis=1)

    def uuid(self, position: int) -> str:
        """Return the UUID of the trajectory at a position."""
        return str(uuid.UUID(bytes=self.at("uuid", position).tobytes()))

    def rearrange(self, order: npt.NDArray[np.intp] | None = None) -> None:
        """Move the kept entries to arrays of their own size, in this order or unchanged."""
        waiting = {name: column.part(self.first, self.end) for name, column in self._waiting.items()}
        for name, column in waiting.items():
            if order is not None or column.is_part:
                self._array(name)
        columns = self.unpacked(slice(self.first, self.end) if order is None else self.first + order)
        waiting = {name: column for name, column in waiting.items() if name not in columns}
        self.adopt({name: column.copy() if _is_part(column) else column for name, column in columns.items()})
        self._waiting = waiting

    def adopt(self, columns: Mapping[str, npt.NDArray[Any]], count: int | None = None) -> None:
        """Replace all entries by these, without copying the arrays; the texts stay.

        Args:
            columns: of the entries.
            count: number of the entries, where the arrays have room for more; None: they are full.

        Raises:
            CorruptStoreError: the number of samples is too large.
        """
        kept = {name: array[:count] for name, array in columns.items()}
        if kept[SAMPLES].sum(dtype=np.float64) >= 1 << 62:
            raise CorruptStoreError("the samples of all trajectories are too many to be counted")
        self.revision += 1
        self._arrays, self._waiting, self._lender_ids = dict(columns), {}, None
        ids = kept["trajectory_id"]
        self.first, self.end = 0, len(ids)
        self.may_be_partial = _are_partial(kept)
        self.before = np.zeros(len(self._arrays.pop(SAMPLES)) + 1, np.int64)
        np.cumsum(kept[SAMPLES], out=self.before[1 : self.end + 1])
        self._ascending = bool(np.all(ids[1:] > ids[:-1]))
        self._order = None


def renumbered(
    columns: Mapping[str, npt.NDArray[Any]], source: StringTable, target: StringTable
) -> dict[str, npt.NDArray[Any]]:
    """Return columns with text numbers of ``source`` translated to ``target``, which receives the texts."""
    if source is target:
        return dict(columns)
    return {
        name: target.extend(source, column) if name == "weights" or is_text(name) else column
        for name, column in columns.items()
    }


def _is_part(array: npt.NDArray[Any]) -> bool:
    """Return whether an array keeps a larger one in memory."""
    return array.base is not None and getattr(array.base, "nbytes", array.nbytes + 1) > array.nbytes


def _are_partial(columns: Mapping[str, npt.ArrayLike]) -> bool:
    """Return whether an entry has fewer samples than T·B; none has more."""
    samples, steps, batch = (np.atleast_1d(columns[name]) for name in (SAMPLES, "steps", "batch"))
    return any(
        int(samples[block].sum()) != int(np.vdot(steps[block].astype(np.int64), batch[block].astype(np.int64)))
        for block in (slice(first, first + _BLOCK) for first in range(0, len(samples), _BLOCK))
    )


def _may_be_lent(name: str) -> bool:
    """Return whether a column is equal in the index of a view and in that of its store."""
    return name not in ("shard", "slot", *STARTS) and not name.startswith((NOTE_ROWS, NOTE_START))


def _with_room(rows: npt.NDArray[Any], capacity: int) -> npt.NDArray[Any]:
    """Return a column grown to ``capacity`` rows; the same array if it has that many."""
    if len(rows) == capacity:
        return rows
    grown = np.zeros(capacity, rows.dtype)  # takes memory for the entries that there are; appending sets the others
    grown[: len(rows)] = rows
    return grown


def _rows(name: str, columns: Mapping[str, npt.ArrayLike], count: int) -> npt.NDArray[Any]:
    """Return a column of new entries; a fact that is missing is filled with its unknown value."""
    rows = unknown(name, count) if is_optional(name) else np.zeros(count, COLUMNS[name])
    if name in columns:
        rows[:] = columns[name]
    return rows
