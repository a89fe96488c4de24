"""Values that come late: scores, corrections and tags of trajectories that are committed. Pure; no I/O.

A store keeps every value that was given, with who gave it and when. The index has the latest one of each name as a
column, see :mod:`trajstore.store.facts`.

Guarded as the catalog is that it is a part of.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from trajstore.columns.facts import SCORE
from trajstore.columns.limits import RANGES, shown
from trajstore.errors import ConfigurationError, CorruptStoreError
from trajstore.store.facts import NOTE, NOTE_TEXT, is_text
from trajstore.store.index import TrajectoryIndex
from trajstore.store.log_records import natural
from trajstore.store.packing import StringTable, declared_rows, pack, unpack

Value = float | str | None
"""What one trajectory is given under a name: a number or a text; None takes back what it has."""

MOST_NAMES = 64
MOST_TEXT = 4096
"""Characters of a value that is a text."""

OVER_FACTS = ("outcome", "success_rate")
"""Facts that a value of the same name takes the place of; those of ``reward.metadata`` are others."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")

_NO_TEXT = -1

_EXACT = 1 << 53  # whole numbers up to here are floats without rounding

_COLUMNS: Mapping[str, npt.DTypeLike] = {
    "ids": np.int64,
    "names": np.int32,
    "numbers": np.float64,
    "texts": np.int32,
    "who": np.int32,
    "times": np.int64,
    "generations": np.int64,
    "void": np.int64,
}


@dataclass(frozen=True, slots=True)
class Note:
    """A value that a trajectory was given.

    Attributes:
        trajectory_id: of the trajectory.
        name: of the value.
        value: None where an earlier one was taken back.
        who: gave it; an empty text if nothing was said.
        time: when, in µs since 1970, by the clock of who gave it.
        generation: of the commit that brought it.
        in_force: whether it counts: a rollback to an earlier point takes it back.
    """

    trajectory_id: int
    name: str
    value: Value
    who: str
    time: int
    generation: int
    in_force: bool


@dataclass(frozen=True, slots=True)
class Said:
    """Values for several trajectories.

    Attributes:
        ids: of the trajectories, each once.
        values: by name, one for each of them.
        who: gives them.
        time: when, in µs since 1970.
        source: file of the inbox that they come from; an empty text for none.
    """

    ids: tuple[int, ...]
    values: Mapping[str, Sequence[Value]]
    who: str
    time: int
    source: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as a record or a file has it."""
        values = {name: list(some) for name, some in self.values.items()}
        told = {"time": self.time, "who": self.who, "ids": list(self.ids), "values": values}
        return {**told, "source": self.source} if self.source else told

    @classmethod
    def from_json(cls, value: Any) -> Said:
        """Return what :meth:`to_json` described.

        Raises:
            CorruptStoreError: it does not describe values.
        """
        try:
            who, source, values = value["who"], value.get("source", ""), value["values"]
            if not isinstance(who, str) or not isinstance(source, str) or not isinstance(values, dict):
                raise TypeError("who, source or values")
            ids = tuple(natural(number, RANGES["trajectory_id"][1]) for number in value["ids"])
            said = cls(ids, {name: tuple(some) for name, some in values.items()}, who, natural(value["time"]), source)
            said.check()
        except (KeyError, TypeError, ValueError, AttributeError, ConfigurationError) as error:
            raise CorruptStoreError(f"not values of trajectories: {error}") from error
        return said

    def without(self, ids: Container[int]) -> Said:
        """Return the values of the other trajectories."""
        stay = [at for at, number in enumerate(self.ids) if number not in ids]
        values = {name: [some[at] for at in stay] for name, some in self.values.items()}
        return replace(self, ids=tuple(self.ids[at] for at in stay), values=values)

    def check(self) -> None:
        """Refuse what no trajectory can be given.

        Raises:
            ConfigurationError: names the value.
        """
        if len(set(self.ids)) != len(self.ids):
            raise ConfigurationError("annotate: an id is there twice")
        for name, values in self.values.items():
            if not _NAME.fullmatch(name):
                raise ConfigurationError(
                    f"annotate: {name!r}, must be a name of up to 64 letters, digits and underscores that begins with "
                    "no digit"
                )
            if len(values) != len(self.ids):
                raise ConfigurationError(
                    f"annotate: {name}: {len(values)} values for {len(self.ids)} trajectories, must be as many, or one"
                )
            kinds = {_kind(name, value) for value in values if value is not None}
            if "text" in kinds and (name in OVER_FACTS or name.startswith(SCORE)):
                raise ConfigurationError(f"annotate: {name}: has a text, but takes the place of a number")
            if len(kinds) > 1:
                raise ConfigurationError(f"annotate: {name}: has numbers and texts, must be one or the other")


def check_names(names: Iterable[str], facts: Container[str]) -> None:
    """Refuse names of facts that stay as they are.

    Args:
        names: of values.
        facts: names that a question has without them.

    Raises:
        ConfigurationError: says which can be corrected.
    """
    for name in names:
        if name in facts and name not in OVER_FACTS and not name.startswith(SCORE):
            raise ConfigurationError(
                f"annotate: {name} is a fact that stays as it is; {', '.join(OVER_FACTS)} and {SCORE}* can be "
                "corrected, anything else needs a name of its own"
            )


def _kind(name: str, value: Any) -> str:
    """Return ``"text"`` or ``"number"``.

    Raises:
        ConfigurationError: it is neither, or cannot be kept.
    """
    if isinstance(value, str):
        if len(value) > MOST_TEXT:
            raise ConfigurationError(
                f"annotate: {name}: a text of {len(value):,} characters, the most is {MOST_TEXT:,}"
            )
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ConfigurationError(f"annotate: {name}: a text that is no Unicode: {error}") from error
        return "text"
    if isinstance(value, int) and abs(value) > _EXACT:
        raise ConfigurationError(
            f"annotate: {name}: {shown(value)} is too high to be kept exactly (2**53); give it as a text, or as a float"
        )
    if isinstance(value, int | float) and math.isfinite(value):
        return "number"
    raise ConfigurationError(f"annotate: {name}: {shown(value)}, must be a finite number, a bool, a text or None")


@dataclass(frozen=True, slots=True)
class Noted:
    """A commit gave trajectories values: columns of the index, one row for each id."""

    ids: npt.NDArray[np.int64]
    columns: Mapping[str, npt.NDArray[Any]]
    texts: StringTable


class Notes:
    """Every value that the trajectories of a store were given, in the order of the commits."""

    def __init__(self) -> None:
        self._words = StringTable()
        """Texts, and who gave values."""
        self._parts: list[dict[str, npt.NDArray[Any]]] = []
        self._kinds: dict[str, str] = {}
        """Whether values are numbers or texts, by name; ``names`` counts in this order."""
        self.sources: set[str] = set()
        """Files of the inbox whose values are here."""

    def __len__(self) -> int:
        return sum(len(part["ids"]) for part in self._parts)

    @property
    def kinds(self) -> Mapping[str, str]:
        """``"text"`` or ``"number"`` for each name."""
        return self._kinds

    @classmethod
    def of(cls, index: TrajectoryIndex, time: int) -> Notes:
        """Return the latest values that an index has, as those of a store that begins with it; ``time`` in µs."""
        notes = cls()
        for column in index.notes:
            values, name = index[column], column.removeprefix(NOTE_TEXT).removeprefix(NOTE)
            known = values >= 0 if is_text(column) else ~np.isnan(values)
            given = [index.texts[number] for number in values[known]] if is_text(column) else values[known].tolist()
            if len(given):
                notes.add(Said(tuple(index["trajectory_id"][known].tolist()), {name: given}, "", time), 0)
        return notes

    def check(self, said: Said) -> None:
        """Refuse values that contradict those that are here.

        Raises:
            ConfigurationError: a name stands for values of the other kind, or there would be too many names.
        """
        for name, values in said.values.items():
            kind = next((_kind(name, value) for value in values if value is not None), None)
            known = self._kinds.get(name)
            if kind is not None and known is not None and kind != known:
                raise ConfigurationError(f"annotate: {name}: a {kind}, but the values of this name are {known}s here")
            if kind is None and known is None:
                raise ConfigurationError(f"annotate: {name}: there is no value of this name to be taken back")
        if len(self._kinds.keys() | said.values.keys()) > MOST_NAMES:
            raise ConfigurationError(f"annotate: the store has {MOST_NAMES} names of values, the most that can be")

    def add(self, said: Said, generation: int) -> Noted:
        """Take in values; return what they are as columns of the index.

        Raises:
            ConfigurationError: see :meth:`check`; nothing was taken in.
        """
        self.check(said)
        ids = np.array(said.ids, np.int64)
        columns: dict[str, npt.NDArray[Any]] = {}
        for name, values in said.values.items():
            kind = next((_kind(name, value) for value in values if value is not None), None)
            self._kinds.setdefault(name, cast(str, kind))
            numbers = np.array([np.nan if isinstance(value, str | None) else value for value in values], np.float64)
            texts = np.array([self._words.add(one) if isinstance(one, str) else _NO_TEXT for one in values], np.int32)
            self._parts.append(
                {
                    "ids": ids,
                    "names": np.full(len(ids), list(self._kinds).index(name), np.int32),
                    "numbers": numbers,
                    "texts": texts,
                    "who": np.full(len(ids), self._words.add(said.who), np.int32),
                    "times": np.full(len(ids), said.time, np.int64),
                    "generations": np.full(len(ids), generation, np.int64),
                    "void": np.zeros(len(ids), np.int64),
                }
            )
            column, of_kind = (NOTE_TEXT, texts) if self._kinds[name] == "text" else (NOTE, numbers)
            columns[f"{column}{name}"] = of_kind
        if said.source:
            self.sources.add(said.source)
        if len(self._parts) > 2 * MOST_NAMES:
            self._parts = [self._all()]
        return Noted(ids, columns, self._words)

    def _all(self) -> dict[str, npt.NDArray[Any]]:
        return {
            name: np.concatenate([part[name] for part in self._parts] or [np.zeros(0, dtype)])
            for name, dtype in _COLUMNS.items()
        }

    def lay_over(self, index: TrajectoryIndex) -> None:
        """Let an index have the latest values, and no others."""
        index.forget_notes()
        everything = self._all()
        counts = everything["void"] == 0
        for number, (name, kind) in enumerate(self._kinds.items()):
            of_name = np.flatnonzero(counts & (everything["names"] == number))
            prefix, column = (NOTE_TEXT, "texts") if kind == "text" else (NOTE, "numbers")
            index.note(everything["ids"][of_name], {f"{prefix}{name}": everything[column][of_name]}, self._words)

    def rolled_back(self, since: int, by: int) -> Notes:
        """Return these, of which those of commits after a generation do not count any more.

        Args:
            since: the generation of the point to which the store goes back.
            by: generation of the rollback.
        """
        columns = self._all()
        later = (columns["generations"] > since) & (columns["void"] == 0)
        return self._with(columns | {"void": np.where(later, by, columns["void"])})

    def taken_back(self, by: int) -> Notes:
        """Return these, of which those count again that a rollback of this generation took out."""
        columns = self._all()
        return self._with(columns | {"void": np.where(columns["void"] == by, 0, columns["void"])})

    def count_since(self, generation: int) -> int:
        """Return how many values came after a generation and count."""
        columns = self._all()
        return int(np.count_nonzero((columns["generations"] > generation) & (columns["void"] == 0)))

    def _with(self, columns: dict[str, npt.NDArray[Any]]) -> Notes:
        other = Notes()
        other._words, other._kinds, other.sources = self._words, dict(self._kinds), set(self.sources)
        other._parts = [columns]
        return other

    def history(self, trajectory_id: int) -> list[Note]:
        """Return what a trajectory was given, the earliest first."""
        found, names = [], list(self._kinds)
        for part in self._parts:
            for at in np.flatnonzero(part["ids"] == trajectory_id).tolist():
                text, number = int(part["texts"][at]), float(part["numbers"][at])
                value: Value = self._words[text] if text != _NO_TEXT else None if math.isnan(number) else number
                name, who = names[int(part["names"][at])], self._words[int(part["who"][at])]
                time, generation = int(part["times"][at]), int(part["generations"][at])
                found.append(Note(trajectory_id, name, value, who, time, generation, not part["void"][at]))
        return found

    # -- on disk ----------------------------------------------------------------------------------

    def to_json(self, ids: npt.NDArray[np.int64]) -> dict[str, Any]:
        """Return the values of trajectories as JSON values.

        Args:
            ids: of those that are there; the others' values are forgotten.
        """
        columns = self._all()
        kept = np.isin(columns["ids"], ids)
        return {
            "columns": {name: pack(column[kept]) for name, column in columns.items()},
            "words": self._words.to_json(),
            "names": list(self._kinds.items()),
            "sources": sorted(self.sources),
        }

    @classmethod
    def from_json(cls, value: Any) -> Notes:
        """Return what :meth:`to_json` described.

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
            if not all(_NAME.fullmatch(name) and kind in ("text", "number") for name, kind in kinds.items()):
                raise ValueError("names")
            if len(kinds) > MOST_NAMES or not all(isinstance(source, str) for source in sources):
                raise ValueError("names or sources")
            words = len(notes._words)
            for name, least, end in (("names", 0, len(kinds)), ("who", 0, words), ("texts", _NO_TEXT, words)):
                if len(columns[name]) and not (columns[name].min() >= least and columns[name].max() < end):
                    raise ValueError(f"{name}: numbers that stand for nothing")
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise CorruptStoreError(f"not values of trajectories: {error}") from error
        notes._kinds, notes.sources, notes._parts = kinds, set(sources), [columns]
        return notes
