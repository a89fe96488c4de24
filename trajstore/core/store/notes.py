"""Late values: scores, corrections and tags added to committed trajectories. Pure; no I/O.

A store keeps every value with its author and time. The index has the latest value of each name as a column, see
:mod:`trajstore.core.store.facts`.

Guarded like the catalog it belongs to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.core.columns.schema import ColumnSpec
from trajstore.core.store.facts import NOTE, NOTE_ROWS, NOTE_START, NOTE_TEXT, is_text
from trajstore.core.store.given import (
    MOST_NAMES,
    NAME,
    Said,
    Value,
    check_given,
    check_kinds,
    kind_in_words,
)
from trajstore.core.store.index import TrajectoryIndex
from trajstore.core.store.packing import StringTable, declared_rows, pack, unpack
from trajstore.core.store.row_notes import (
    column_of_kind,
    is_kind_of_rows,
    is_rows,
    kind_of_rows,
    rows_in_words,
)
from trajstore.core.store.shard_table import ShardTable
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
        value: None where an earlier one was taken back; for values by row a text that describes them.
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
    """Late values were added: columns of the index, one row for each id."""

    ids: npt.NDArray[np.int64]
    columns: Mapping[str, npt.NDArray[Any]]
    texts: StringTable


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
        """Kind by name: ``"text"``, ``"number"`` or rows, see :func:`~trajstore.core.store.row_notes.kind_of_rows`."""
        return self._kinds

    @classmethod
    def of(cls, index: TrajectoryIndex, shards: ShardTable, time: int) -> Notes:
        """Return the latest values in an index as the first values of a new store.

        Args:
            index: has them.
            shards: that hold values by row.
            time: of them, in µs since 1970.

        Raises:
            ConfigurationError: a name has values of two kinds, which merging two stores can cause.
        """
        notes = cls()
        for column in index.notes:
            values, name = index[column], column.removeprefix(NOTE_TEXT).removeprefix(NOTE)
            known = values >= 0 if is_text(column) else ~np.isnan(values)
            given = [index.texts[number] for number in values[known]] if is_text(column) else values[known].tolist()
            if len(given):
                notes._have_kind(name, "text" if is_text(column) else "number")
                notes.add(Said(tuple(index["trajectory_id"][known].tolist()), {name: given}, "", time), 0)
        for name in index.row_notes:
            tables = index[NOTE_ROWS + name]
            known = tables >= 0
            if known.any():
                for table in np.unique(tables[known]).tolist():
                    columns = {column.name: column for column in shards.schema(table).columns}
                    notes._have_kind(name, kind_of_rows(columns[name]))
                said = Said(tuple(index["trajectory_id"][known].tolist()), {}, "", time)
                notes._append(said, name, 0, shards=tables[known], starts=index[NOTE_START + name][known])
        return notes

    def _have_kind(self, name: str, kind: str) -> None:
        known = self._kinds.setdefault(name, kind)
        if known != kind:
            raise ConfigurationError(
                f"values {name} are {kind_in_words(known)} in one store and {kind_in_words(kind)} in another, and one "
                "store cannot have both: take them back in one (annotate with None, --set NAME=null), and give them "
                "another name"
            )

    def check(self, said: Said) -> None:
        """Refuse values that contradict existing ones, see :func:`check_given`."""
        check_given(said, self._kinds)

    def foreseen(self, waiting: Iterable[Said]) -> tuple[dict[str, str], dict[str, str]]:
        """Return the kinds of names after the pending values are added, and by file, why some will be refused.

        Args:
            waiting: the pending values, in the order of their addition.
        """
        kinds, refused = dict(self._kinds), {}
        for said in waiting:
            if said.source in self.sources:
                continue
            try:
                check_given(said, kinds)
            except ConfigurationError as error:
                refused[said.source] = str(error)
            else:
                kinds |= {name: kind for name, kind in said.kinds.items() if kind is not None}
        return kinds, refused

    def add(self, said: Said, generation: int, shard: int = _NO_SHARD) -> Noted:
        """Add values; return them as columns of the index.

        Args:
            said: the values.
            generation: of the commit.
            shard: row, in the shard table, of the shard with values by row.

        Raises:
            ConfigurationError: they contradict existing values; nothing was added.
        """
        check_kinds(said, self._kinds)
        columns: dict[str, npt.NDArray[Any]] = {}
        self._kinds |= {name: kind for name, kind in said.kinds.items() if kind is not None}
        for name, values in said.values.items():
            numbers = np.array([np.nan if isinstance(value, str | None) else value for value in values], np.float64)
            texts = np.array(
                [self._words.add(item) if isinstance(item, str) else _NO_TEXT for item in values], np.int32
            )
            columns |= self._append(said, name, generation, numbers=numbers, texts=texts)
        if said.rows is not None:
            for name, starts in said.rows.starts().items():
                columns |= self._append(said, name, generation, shards=shard, starts=starts)
        if said.source:
            self.sources.add(said.source)
        if len(self._parts) > 2 * MOST_NAMES:
            self._parts = [self._all()]
        return Noted(np.array(said.ids, np.int64), columns, self._words)

    def _append(self, said: Said, name: str, generation: int, **values: npt.ArrayLike) -> dict[str, npt.NDArray[Any]]:
        """Append a value of each trajectory under a name; return it as columns of the index."""
        row = {
            "ids": said.ids,
            "names": list(self._kinds).index(name),
            "numbers": _HAS_ROWS if "shards" in values else np.nan,
            "texts": _NO_TEXT,
            "who": self._words.add(said.who),
            "times": said.time,
            "generations": generation,
            "shards": _NO_SHARD,
            "starts": 0,
            **values,
        }
        part = {column: np.empty(len(said.ids), dtype) for column, dtype in _COLUMNS.items()}
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
            index.note(all_columns["ids"][of_name], columns, self._words)

    def rows_needed(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which values need their rows: the latest ones.

        Args:
            ids: of the existing trajectories.
        """
        needed = np.zeros(len(self), np.bool_)
        if not self.has_rows:
            return needed
        columns = self._all()
        given = np.flatnonzero(np.isin(columns["ids"], ids) & np.isin(columns["names"], self._row_names()))
        keys = np.stack([columns["ids"][given], columns["names"][given]])[:, ::-1]
        _, last = np.unique(keys, axis=1, return_index=True)
        needed[given[len(given) - 1 - last]] = True
        return needed & (columns["shards"] >= 0)

    @property
    def has_rows(self) -> bool:
        """Whether a name has values by row."""
        return bool(self._row_names())

    def ids(self) -> npt.NDArray[np.int64]:
        """Return the trajectory of each value."""
        return self._all()["ids"]

    def _row_names(self) -> list[int]:
        return [number for number, kind in enumerate(self._kinds.values()) if is_rows(kind)]

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
        columns, names = self._all(), list(self._kinds.items())
        for number in self._row_names():
            inside = (columns["names"] == number) & (columns["shards"] >= 0)
            homes = (columns[name][inside] for name in ("ids", "shards", "starts"))
            yield column_of_kind(*names[number]), *homes

    def kept(self, ids: npt.NDArray[np.int64]) -> Notes:
        """Return a copy with the values of these trajectories only."""
        columns, other = self._all(), Notes()
        inside = np.isin(columns["ids"], ids)
        other._words, other._kinds, other.sources = self._words.copy(), dict(self._kinds), set(self.sources)
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
            "columns": {name: pack(column[kept]) for name, column in columns.items()},
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
            columns = {name: unpack(packed[name], dtype) for name, dtype in _COLUMNS.items()}
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
