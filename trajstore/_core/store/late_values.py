"""Late values of trajectories and their validation. Pure; no I/O."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

import numpy as np

from trajstore._core.base.types import FloatArray, IntArray
from trajstore._core.columns.facts import OVER_FACTS, SCORE
from trajstore._core.columns.limits import RANGES, shown
from trajstore._core.store.facts import FACTS
from trajstore._core.store.log_records import natural
from trajstore._core.store.row_notes import RowShard, is_rows, rows_in_words
from trajstore.errors import ConfigurationError, CorruptStoreError, counted, trajectories

Value = float | str | None
"""A late value: a number or a text; None removes the current one."""

MOST_NAMES = 64
MOST_TEXT = 4096
"""Maximum characters of a text value."""

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")

_EXACT = 1 << 53  # largest range of integers that floats represent exactly


INBOX_FOLDER = "inbox"
"""Late values of other processes, which the store's writer records."""


@dataclass(frozen=True, slots=True)
class LateValues:
    """Values for several trajectories.

    Attributes:
        ids: of the trajectories, each once, ``[n]``.
        values: by name, one for each of them.
        who: their author.
        time: in µs since 1970.
        source: inbox file that they come from; empty for none.
        refused: the writer's reason for setting their file aside; else empty.
        rows: values by row, one for each trajectory; None for none.
    """

    ids: IntArray
    values: Mapping[str, Sequence[Value] | FloatArray]
    who: str
    time: int
    source: str = ""
    refused: str = ""
    rows: RowShard | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the values as JSON for a record or a file, without values by row."""
        body = {"time": self.time, "who": self.who, "ids": self.ids, "values": self.values}
        return body | {name: text for name, text in (("source", self.source), ("refused", self.refused)) if text}

    @classmethod
    def from_json(cls, value: Any) -> LateValues:
        """Return the values described by :meth:`to_json`.

        Raises:
            CorruptStoreError: it does not describe values.
        """
        try:
            who, values = value["who"], value["values"]
            source, refused = value.get("source", ""), value.get("refused", "")
            if not all(isinstance(text, str) for text in (who, source, refused)) or not isinstance(values, dict):
                raise TypeError("who, source, refused or values")
            ids = np.array([natural(number, RANGES["trajectory_id"][1]) for number in value["ids"]], np.int64)
            given = {name: tuple(items) for name, items in values.items()}
            update = cls(ids, given, who, natural(value["time"], RANGES["committed"][1]), source, refused)
            update.check()
        except (KeyError, TypeError, ValueError, AttributeError, ConfigurationError) as error:
            raise CorruptStoreError(f"not values of trajectories: {error}") from error
        return update

    def without(self, ids: Iterable[int]) -> LateValues:
        """Return the values of the other trajectories."""
        stay = np.flatnonzero(~np.isin(self.ids, [*ids]))
        values = {name: [items[at] for at in stay.tolist()] for name, items in self.values.items()}
        return replace(self, ids=self.ids[stay], values=values)

    @property
    def kinds(self) -> dict[str, str | None]:
        """Kinds by name, see :attr:`Notes.kinds`; None for names whose values are only removed."""
        kinds = {
            name: next((_kind(name, value) for value in values if value is not None), None)
            for name, values in self.values.items()
        }
        return kinds if self.rows is None else {**kinds, **self.rows.kinds}

    def check(self) -> None:
        """Refuse invalid values.

        Raises:
            ConfigurationError: names the value.
        """
        if (np.diff(np.sort(self.ids, kind="stable")) == 0).any():
            raise ConfigurationError("annotate: an id is there twice")
        _check_unicode("who", self.who)
        for name, values in self.values.items():
            check_name(name)
            if len(values) != len(self.ids):
                raise ConfigurationError(
                    f"annotate: {name}: {counted(len(values), 'value')} for {trajectories(len(self.ids))}, must be as "
                    "many, or one"
                )
            kinds = _kinds(name, values)
            if "text" in kinds and _replaces_number(name):
                raise ConfigurationError(f"annotate: {name}: has a text, but replaces a number")
            if len(kinds) > 1:
                raise ConfigurationError(f"annotate: {name}: has numbers and texts, must be one or the other")


def check_name(name: str) -> None:
    """Refuse an invalid name of values.

    Raises:
        ConfigurationError: it is invalid.
    """
    if not NAME.fullmatch(name):
        raise ConfigurationError(
            f"annotate: {name!r}, must be a name of up to 64 of a-z, A-Z, 0-9 and _, and begin with no digit"
        )


def check_given(update: LateValues, row_names: Collection[str]) -> None:
    """Refuse values that a caller cannot give to any store.

    Args:
        update: the values.
        row_names: names of values by row.

    Raises:
        ConfigurationError: a value or name is invalid, or a name stands for a fact that cannot be corrected, or differs
            from one only in case.
    """
    update.check()
    for name in row_names:
        check_name(name)
        if _replaces_number(name):
            raise ConfigurationError(f"annotate: {name}: has values by row, but replaces a number")
    for name in (*update.values, *row_names):
        if name in FACTS and not _replaces_number(name):
            raise ConfigurationError(
                f"annotate: {name} is a fact that stays as it is; {', '.join(OVER_FACTS)} and {SCORE}* can be "
                "corrected, anything else needs a name of its own"
            )
        meant = [fact for fact in FACTS if fact.lower() == name.lower() and fact != name]
        if meant:
            raise ConfigurationError(
                f"annotate: {name}: the fact {meant[0]} has this name but for the case of letters; write {meant[0]}, "
                "or take another name"
            )


def _replaces_number(name: str) -> bool:
    """Return whether values of this name replace a recorded reward."""
    return name in OVER_FACTS or name.startswith(SCORE)


def _kinds(name: str, values: Sequence[Value] | FloatArray) -> set[str]:
    """Return the kinds of values that are not None, see :func:`_kind`; many numbers are checked as an array."""
    if isinstance(values, np.ndarray):
        if not np.isfinite(values).all():
            return _kinds(name, values.tolist())  # refuses one
        return {"number"} if len(values) else set()
    types = {*map(type, values)}
    if types <= {float, int, bool, NoneType}:
        with suppress(OverflowError):  # of an integer
            numbers = np.array(values, np.float64)
            known = int(np.isfinite(numbers).sum())
            is_exact = int not in types or not (np.abs(numbers) >= _EXACT).any()
            if is_exact and known + values.count(None) == len(values):
                return {"number"} if known else set()
    return {_kind(name, value) for value in values if value is not None}


def _kind(name: str, value: Any) -> str:
    """Return ``"text"`` or ``"number"``.

    Raises:
        ConfigurationError: it is neither, or cannot be stored exactly.
    """
    if isinstance(value, str):
        if len(value) > MOST_TEXT:
            raise ConfigurationError(
                f"annotate: {name}: a text of {len(value):,} characters, the most is {MOST_TEXT:,}"
            )
        _check_unicode(name, value)
        return "text"
    if isinstance(value, int) and abs(value) > _EXACT:
        raise ConfigurationError(
            f"annotate: {name}: {shown(value)} is too high to be kept exactly (2**53); give it as a text, or as a float"
        )
    if isinstance(value, int | float) and math.isfinite(value):
        return "number"
    raise ConfigurationError(f"annotate: {name}: {shown(value)}, must be a finite number, a bool, a text or None")


def _check_unicode(name: str, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(f"annotate: {name}: a text that is no Unicode: {error}") from error


def check_late_values(update: LateValues, known: Mapping[str, str]) -> None:
    """Refuse values that contradict those of a store; also used for values in its log.

    Args:
        update: the values.
        known: kinds of the store's names.

    Raises:
        ConfigurationError: a name has values of another kind or differs from another only in case, or there are too
            many names.
    """
    given = update.kinds
    check_same_kinds(given, known, "here")
    names = known.keys() | given.keys()
    for name in given.keys() - known.keys():
        if given[name] is None:
            raise ConfigurationError(f"annotate: {name}: there is no value of this name to remove")
        for other in names - {name}:
            if other.lower() == name.lower():
                raise ConfigurationError(
                    f"annotate: {name}: there are values {other}, which differ in the case of letters alone; write "
                    f"{other}, or take another name"
                )
    if len(names) > MOST_NAMES:
        raise ConfigurationError(f"annotate: the store has {MOST_NAMES} names of values, the most that can be")


def check_same_kinds(given: Mapping[str, str | None], known: Mapping[str, str], where: str) -> None:
    """Refuse values of another kind than the existing ones of the same name.

    Args:
        given: kinds of the values, by name.
        known: kinds of names.
        where: place of the existing values, for the message.

    Raises:
        ConfigurationError: a name has values of another kind.
    """
    for name, kind in given.items():
        before = known.get(name, kind)
        if kind is not None and kind != before:
            new = rows_in_words(kind) if is_rows(kind) else f"a {kind}"
            raise ConfigurationError(
                f"annotate: {name}: {new}, but the values of this name are {kind_in_words(str(before))} {where}; "
                "take another name"
            )


def kind_in_words(kind: str) -> str:
    """Return the plural noun for values of a kind."""
    return rows_in_words(kind) if is_rows(kind) else f"{kind}s"
