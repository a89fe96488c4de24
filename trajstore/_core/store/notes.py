"""Late values: scores, corrections and tags added to committed trajectories. Pure; no I/O.

A store keeps every value with its author and time. The index has the latest value of each name as a column, see
:mod:`trajstore._core.store.facts`.

Guarded like the catalog it belongs to.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore._core.columns.schema import ColumnSpec
from trajstore._core.store.facts import NOTE, NOTE_ROWS, NOTE_START, NOTE_TEXT
from trajstore._core.store.index import TrajectoryIndex
from trajstore._core.store.json_arrays import StringTable, array_from_json, array_to_json, declared_rows
from trajstore._core.store.late_values import MOST_NAMES, NAME, LateValues, Value, check_late_values, kind_in_words
from trajstore._core.store.row_notes import column_of_kind, is_kind_of_rows, is_rows, rows_in_words
from trajstore.errors import ConfigurationError, CorruptStoreError

_NO_TEXT = -1
_NO_SHARD = -1

_COLUMNS: Mapping[str, npt.DTypeLike] = {
    "ids": np.int64,
    "names": np.int32,
    "numbers": np.float64,
    "texts": np.int32,
    "who": np.int32,
    "times": np.int64,
    "generations": np.int64,
    "shards": np.int32,
    "starts": np.int64,
}

_HAS_ROWS = 1.0
"""In ``numbers``: marks values by row, whether or not their rows are still stored."""


@dataclass(frozen=True, slots=True)
class Note:
    """A late value of a trajectory.

    Attributes:
        trajectory_id: of the trajectory; ``"2/1"`` in a run if requested that way.
        name: of the value.
        value: None where an earlier one was removed; for values by row a text that describes them.
        who: its author; empty if unknown.
        time: in µs since 1970, by the author's clock.
        generation: of its commit.
        in_force: whether it is current, not replaced by a later value or None.
    """

    trajectory_id: int | str
    name: str
    value: Value
    who: str
    time: int
    generation: int
    in_force: bool


@dataclass(frozen=True, slots=True)
class Noted:
    """Late values were added: columns of the index, one row for each id.

    ``has_rows`` says whether some are values by row, whose shards are among the columns.
    """

    ids: npt.NDArray[np.int64]
    columns: Mapping[str, npt.NDArray[Any]]
    texts: StringTable
    has_rows: bool


@dataclass(frozen=True, slots=True)
class StoreNotes:
    """The late values of one store, for :meth:`Notes.combined`.

    Attributes:
        name: of the store; breaks ties of time.
        source: number of the store.
        notes: its values.
        own: ids in the store, of the trajectories whose values are wanted.
        ids: ids that these get.
        shards: number of its shards when the ids were taken; values in later shards are not acknowledged yet.
        lost: rows of the shard table that are damaged; their values become None.
    """

    name: str
    source: int
    notes: Notes
    own: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    shards: int
    lost: npt.NDArray[np.bool_]

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Return the values of the wanted trajectories, with their new ids."""
        columns = self.notes._all()
        wanted = np.isin(columns["ids"], self.own) & (columns["shards"] < self.shards)
        columns = {name: column[wanted] for name, column in columns.items()}
        columns["ids"] = _renumbered(columns["ids"], self.own, self.ids)
        gone = np.isin(columns["shards"], np.flatnonzero(self.lost))
        columns["shards"][gone], columns["numbers"][gone] = _NO_SHARD, np.nan
        return columns


class Notes:
    """All late values of a store's trajectories, in the order of the commits."""

    def __init__(self) -> None:
        self._words = StringTable()
        """Texts and authors."""
        self._parts: list[dict[str, npt.NDArray[Any]]] = []
        self._kinds: dict[str, str] = {}
        """Kind of the values (numbers, texts or rows) by name; ``names`` indexes this order."""
        self.sources: set[str] = set()
        """Inbox files whose values are included."""

    def __len__(self) -> int:
        return sum(len(part["ids"]) for part in self._parts)

    @property
    def kinds(self) -> Mapping[str, str]:
        """Kind by name: ``"text"``, ``"number"`` or rows, see :func:`~trajstore._core.store.row_notes.kind_of_rows`."""
        return self._kinds

    @classmethod
    def combined(cls, parts: Iterable[StoreNotes]) -> tuple[Notes, list[tuple[int, int]]]:
        """Return the late values of several stores as those of one, ordered by time, each once.

        A store's own order is kept, whatever its clocks. The order of ``parts`` has no effect. Names whose values are
        all removed are left out: they may get another kind.

        Returns:
            The values, and the (source, row) of the shards with values by row; ``shards`` are positions in this list.

        Raises:
            ConfigurationError: a name has values in force of two kinds.
        """
        result = cls()
        taken = [(part, part.columns()) for part in parts]
        for part, columns in taken:
            for name in part.notes._in_force(columns):
                result._have_kind(name, part.notes._kinds[name])
        taken.sort(key=lambda item: item[0].name)
        joined: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in (*_COLUMNS, "source", "order")}
        for number, (part, columns) in enumerate(taken):
            columns |= {
                "source": np.full(len(columns["ids"]), number),
                "order": np.maximum.accumulate(columns["times"]),
            }
            for name, column in result._translated(part.notes, columns).items():
                joined[name].append(column)
        values = {name: np.concatenate(arrays or [np.zeros(0, np.int64)]) for name, arrays in joined.items()}
        order = np.argsort(values.pop("order"), kind="stable")
        values = {name: column[order] for name, column in values.items()}
        if len(taken) > 1:
            fresh = result._firsts(values)
            values = {name: column[fresh] for name, column in values.items()}
        commits = np.stack([values["source"], values["generations"]])
        values["generations"] = np.cumsum((np.diff(commits, prepend=-1) != 0).any(axis=0))
        stored = values["shards"] >= 0
        pairs = np.stack([values["source"], values["shards"]])[:, stored]
        shards, positions = np.unique(pairs, axis=1, return_inverse=True)
        values["shards"][stored] = positions.reshape(-1)
        result._parts = [{name: values[name].astype(dtype) for name, dtype in _COLUMNS.items()}]
        return result, [(taken[at][0].source, row) for at, row in shards.T.tolist()]

    def _in_force(self, columns: Mapping[str, npt.NDArray[Any]]) -> list[str]:
        """Return the names with a value that is neither replaced nor removed."""
        last = _lasts(columns["ids"], columns["names"])
        given = ~np.isnan(columns["numbers"][last]) | (columns["texts"][last] >= 0)
        names = list(self._kinds)
        return [names[number] for number in np.unique(columns["names"][last][given]).tolist()]

    def _translated(self, other: Notes, columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Return columns of other notes with the numbers of names and texts here, without names of other kinds."""
        names = list(self._kinds)
        numbers = [names.index(name) if self._kinds.get(name) == kind else -1 for name, kind in other._kinds.items()]
        columns = {**columns, "names": np.array(numbers, np.int64)[columns["names"]]}
        kept = columns["names"] >= 0
        columns = {name: column[kept] for name, column in columns.items()}
        return {**columns, **{name: self._words.extend(other._words, columns[name]) for name in ("texts", "who")}}

    def _firsts(self, values: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.bool_]:
        """Return a mask without the values that an earlier one of another source repeats."""
        first: dict[str, int] = {}
        words = np.array([first.setdefault(word, at) for at, word in enumerate(self._words.texts())], np.int64)
        texts = np.where(values["texts"] >= 0, words[values["texts"]] if len(words) else 0, _NO_TEXT)
        keys = [values["ids"], values["names"], values["times"], texts, values["numbers"].view(np.int64)]
        keys.append(words[values["who"]] if len(words) else values["who"])
        _, begin, inverse = np.unique(np.stack(keys), axis=1, return_index=True, return_inverse=True)
        fresh: npt.NDArray[np.bool_] = values["source"][begin[inverse.reshape(-1)]] == values["source"]
        return fresh

    def _have_kind(self, name: str, kind: str) -> None:
        known = self._kinds.setdefault(name, kind)
        if known != kind:
            raise ConfigurationError(
                f"values {name} are {kind_in_words(known)} in one store and {kind_in_words(kind)} in another, and "
                "one store cannot have both: remove them in one (annotate with None, --set NAME=null), and use "
                "another name"
            )
        if len(self._kinds) > MOST_NAMES:
            raise ConfigurationError(f"the stores have more than {MOST_NAMES} names of values, the most that can be")

    def check(self, update: LateValues) -> None:
        """Refuse values that contradict existing ones, see :func:`check_late_values`."""
        check_late_values(update, self._kinds)

    def add(self, update: LateValues, generation: int, shard: int = _NO_SHARD) -> Noted:
        """Add values; return them as columns of the index.

        Args:
            update: the values.
            generation: of the commit.
            shard: row, in the shard table, of the shard with values by row.

        Raises:
            ConfigurationError: they contradict existing values; nothing was added.
        """
        self.check(update)
        columns: dict[str, npt.NDArray[Any]] = {}
        ids = update.ids
        self._kinds |= {name: kind for name, kind in update.kinds.items() if kind is not None}
        for name, values in update.values.items():
            if self._kinds[name] == "text":
                texts = [_NO_TEXT if value is None else self._words.add(str(value)) for value in values]
                columns |= self._append(update, name, generation, ids=ids, texts=texts)
            else:  # None becomes NaN
                columns |= self._append(update, name, generation, ids=ids, numbers=np.array(values, np.float64))
        if update.rows is not None:
            for name, starts in update.rows.starts().items():
                columns |= self._append(update, name, generation, ids=ids, shards=shard, starts=starts)
        if update.source:
            self.sources.add(update.source)
        if len(self._parts) > 2 * MOST_NAMES:
            self._parts = [self._all()]
        return Noted(ids, columns, self._words, update.rows is not None)

    def _append(
        self, update: LateValues, name: str, generation: int, **values: npt.ArrayLike
    ) -> dict[str, npt.NDArray[Any]]:
        """Append a value of each trajectory under a name; return it as columns of the index."""
        row = {
            "names": list(self._kinds).index(name),
            "numbers": _HAS_ROWS if "shards" in values else np.nan,
            "texts": _NO_TEXT,
            "who": self._words.add(update.who),
            "times": update.time,
            "generations": generation,
            "shards": _NO_SHARD,
            "starts": 0,
            **values,
        }
        part = {column: np.empty(len(update.ids), dtype) for column, dtype in _COLUMNS.items()}
        for column, array in part.items():
            array[:] = row[column]
        self._parts.append(part)
        return {column: part[journal] for column, journal in self._columns_of(name).items()}

    def _columns_of(self, name: str) -> dict[str, str]:
        """Return the index columns of a name, mapped to the columns of these notes."""
        kind = self._kinds[name]
        if is_rows(kind):
            return {NOTE_ROWS + name: "shards", NOTE_START + name: "starts"}
        return {NOTE_TEXT + name: "texts"} if kind == "text" else {NOTE + name: "numbers"}

    def _all(self) -> dict[str, npt.NDArray[Any]]:
        return {
            name: np.concatenate([part[name] for part in self._parts] or [np.zeros(0, dtype)])
            for name, dtype in _COLUMNS.items()
        }

    def lay_over(self, index: TrajectoryIndex) -> None:
        """Replace an index's late values by the latest ones."""
        index.forget_notes()
        all_columns = self._all()
        for number, name in enumerate(self._kinds):
            of_name = np.flatnonzero(all_columns["names"] == number)
            columns = {column: all_columns[of][of_name] for column, of in self._columns_of(name).items()}
            index.note(index.find_many(all_columns["ids"][of_name]), columns, self._words)

    def rows_needed(self, ids: npt.NDArray[np.int64], shards: Collection[int] | None = None) -> npt.NDArray[np.bool_]:
        """Return which values need their rows: the latest ones.

        Args:
            ids: of the existing trajectories.
            shards: rows of the shards that are intact; None if all are.
        """
        needed = np.zeros(len(self), np.bool_)
        if not self.has_rows:
            return needed
        columns = self._all()
        by_row = [number for number, kind in enumerate(self._kinds.values()) if is_rows(kind)]
        given = np.flatnonzero(np.isin(columns["ids"], ids) & np.isin(columns["names"], by_row))
        needed[given[_lasts(columns["ids"][given], columns["names"][given])]] = True
        intact = columns["shards"] >= 0 if shards is None else np.isin(columns["shards"], list(shards))
        return needed & intact

    @property
    def has_rows(self) -> bool:
        """Whether a name has values by row."""
        return any(map(is_rows, self._kinds.values()))

    def names_by_row(self) -> list[str]:
        """Return the names with a value by row that is stored."""
        columns, names = self._all(), list(self._kinds)
        return [names[number] for number in np.unique(columns["names"][columns["shards"] >= 0]).tolist()]

    def ids(self) -> npt.NDArray[np.int64]:
        """Return the trajectory of each value."""
        return self._all()["ids"]

    def shards(self, needed: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
        """Return the shards (rows of the shard table) of the values selected by :meth:`rows_needed`."""
        rows: npt.NDArray[np.int32] = np.unique(self._all()["shards"][needed] if needed.any() else [])
        return rows.astype(np.int32)

    def ids_in(self, shard: int) -> npt.NDArray[np.int64]:
        """Return the trajectories with current or former values by row in a shard, a row of the shard table."""
        columns = self._all()
        ids: npt.NDArray[np.int64] = np.unique(columns["ids"][columns["shards"] == shard])
        return ids

    def row_homes(self) -> Iterator[tuple[ColumnSpec, npt.NDArray[np.int64], npt.NDArray[np.int32], Any]]:
        """Yield, per name with values by row, its column, and trajectory, shard and first row of each value."""
        columns = self._all()
        for number, (name, kind) in enumerate(self._kinds.items()):
            if is_rows(kind):
                inside = (columns["names"] == number) & (columns["shards"] >= 0)
                yield column_of_kind(name, kind), *(columns[of][inside] for of in ("ids", "shards", "starts"))

    def frozen(self) -> Notes:
        """Return the present values, which later additions do not change; another thread may add meanwhile."""
        other = Notes()
        other._parts, other._kinds, other._words = self._parts[:], dict(self._kinds), self._words
        return other

    def kept(self, ids: npt.NDArray[np.int64], new_ids: npt.NDArray[np.int64] | None = None) -> Notes:
        """Return a copy with the values of these trajectories only, with ``new_ids`` if given."""
        columns, other = self._all(), Notes()
        inside = np.isin(columns["ids"], ids)
        if new_ids is not None:
            columns["ids"] = _renumbered(columns["ids"], ids, new_ids)
        other._words, other._kinds, other.sources = self._words, dict(self._kinds), set(self.sources)
        other._parts = [{name: column[inside] for name, column in columns.items()}]
        return other

    def count_not_in(self, other: Notes) -> int:
        """Return the number of values missing from ``other``."""
        names = list(dict.fromkeys([*self._kinds, *other._kinds]))
        mine, theirs = (notes._keys(names) for notes in (self, other))
        return int(np.count_nonzero(~np.isin(mine, theirs)))

    def _keys(self, names: Sequence[str]) -> npt.NDArray[Any]:
        """Return a unique key of each value in the store's history."""
        columns, numbers = self._all(), np.array([names.index(name) for name in self._kinds], np.int64)
        parts = (columns["generations"], columns["ids"], numbers[columns["names"]])
        return np.rec.fromarrays(parts)

    def equals(self, other: Notes) -> bool:
        """Return whether two journals have the same values, with the same authors and times."""
        if self._kinds != other._kinds or len(self) != len(other):
            return False
        none = np.zeros(0, np.bool_)
        both = [
            StoreNotes(name, 0, notes, notes.ids(), notes.ids(), np.iinfo(np.int32).max, none)
            for name, notes in (("one", self), ("other", other))
        ]
        return len(self) == len(Notes.combined(both)[0])

    @property
    def newest_generation(self) -> int:
        """Highest generation of a value; 0 if there are none."""
        return int(self._all()["generations"].max(initial=0))

    def in_table(self, rows: npt.NDArray[np.int32]) -> Notes:
        """Return these notes with shards renumbered to rows of a shard table.

        Args:
            rows: for each shard number used by values, the row of the table.
        """
        columns = self._all()
        stored = columns["shards"] >= 0
        columns["shards"][stored] = rows[columns["shards"][stored]]
        self._parts = [columns]
        return self

    def history(self, trajectory_id: int) -> list[Note]:
        """Return all late values of a trajectory, earliest first."""
        notes, names = [], list(self._kinds)
        for part in self._parts:
            for at in np.flatnonzero(part["ids"] == trajectory_id).tolist():
                text, number = int(part["texts"][at]), float(part["numbers"][at])
                value: Value = self._words[text] if text != _NO_TEXT else None if math.isnan(number) else number
                kind = self._kinds[names[int(part["names"][at])]]
                value = rows_in_words(kind) if is_rows(kind) and value is not None else value
                name, who = names[int(part["names"][at])], self._words[int(part["who"][at])]
                time, generation = int(part["times"][at]), int(part["generations"][at])
                notes.append(Note(trajectory_id, name, value, who, time, generation, False))
        for at in {note.name: at for at, note in enumerate(notes)}.values():
            notes[at] = replace(notes[at], in_force=notes[at].value is not None)
        return notes

    # -- on disk ----------------------------------------------------------------------------------

    def to_json(
        self, ids: npt.NDArray[np.int64], needed: npt.NDArray[np.bool_], rows: npt.NDArray[np.int32]
    ) -> dict[str, Any]:
        """Return the values of trajectories as JSON values.

        Args:
            ids: of the existing trajectories; values of others are omitted.
            needed: which values keep their rows, see :meth:`rows_needed`.
            rows: by row of the shard table, the new row of the shard.
        """
        columns = self._all()
        shards = np.full(len(needed), _NO_SHARD, np.int32)
        shards[needed] = rows[columns["shards"][needed]]
        columns["shards"], columns["starts"] = shards, np.where(needed, columns["starts"], 0)
        kept = np.isin(columns["ids"], ids)
        return {
            "columns": {name: array_to_json(column[kept]) for name, column in columns.items()},
            "words": self._words.to_json(),
            "names": list(self._kinds.items()),
            "sources": sorted(self.sources),
        }

    @classmethod
    def from_json(cls, value: Any, shards: int) -> Notes:
        """Return the notes described by :meth:`to_json`.

        Args:
            value: the JSON values.
            shards: number of shards in the table that values by row refer to.

        Raises:
            CorruptStoreError: it does not describe values.
        """
        notes = cls()
        try:
            packed, kinds, sources = value["columns"], dict(value["names"]), value["sources"]
            rows = {declared_rows(packed[name]) for name in _COLUMNS}
            if len(rows) != 1:
                raise ValueError("columns have different lengths")
            columns = {name: array_from_json(packed[name], dtype) for name, dtype in _COLUMNS.items()}
            notes._words = StringTable.from_json(value["words"])
            for name, kind in kinds.items():
                if not NAME.fullmatch(name) or not (kind in ("text", "number") or is_kind_of_rows(kind)):
                    raise ValueError("names")
            if len(kinds) > MOST_NAMES or not all(isinstance(source, str) for source in sources):
                raise ValueError("names or sources")
            words = len(notes._words)
            for name, least, end in (
                *(("names", 0, len(kinds)), ("who", 0, words), ("texts", _NO_TEXT, words)),
                *(("shards", _NO_SHARD, shards), ("starts", 0, math.inf)),
            ):
                if len(columns[name]) and not (columns[name].min() >= least and columns[name].max() < end):
                    raise ValueError(f"{name}: numbers that stand for nothing")
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise CorruptStoreError(f"not values of trajectories: {error}") from error
        notes._kinds, notes.sources, notes._parts = kinds, set(sources), [columns]
        return notes


def _lasts(ids: npt.NDArray[np.int64], names: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """Return the positions of the latest value of each name and trajectory."""
    _, last = np.unique(np.stack([ids, names])[:, ::-1], axis=1, return_index=True)
    return len(ids) - 1 - last


def _renumbered(
    ids: npt.NDArray[np.int64], old: npt.NDArray[np.int64], new: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return ids with each of ``old`` replaced by its counterpart in ``new``; others are arbitrary."""
    if not len(old):
        return ids
    order = np.argsort(old)
    at = np.minimum(np.searchsorted(old, ids, sorter=order), len(old) - 1)
    return new[order[at]]
