"""Values that somebody gives trajectories late, and what of it is refused. Pure; no I/O."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trajstore.core.columns.facts import SCORE
from trajstore.core.columns.limits import RANGES, shown
from trajstore.core.store.log_records import natural
from trajstore.core.store.row_notes import RowShard, is_rows, rows_in_words
from trajstore.errors import ConfigurationError, CorruptStoreError

Value = float | str | None
"""What one trajectory is given under a name: a number or a text; None takes back what it has."""

MOST_NAMES = 64
MOST_TEXT = 4096
"""Characters of a value that is a text."""

OVER_FACTS = ("outcome", "success_rate")
"""Facts that a value of the same name takes the place of; those of ``reward.metadata`` are others."""

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")

_EXACT = 1 << 53  # whole numbers up to here are floats without rounding


@dataclass(frozen=True, slots=True)
class Said:
    """Values for several trajectories.

    Attributes:
        ids: of the trajectories, each once.
        values: by name, one for each of them.
        who: gives them.
        time: when, in µs since 1970.
        source: file of the inbox that they come from; an empty text for none.
        refused: why the writer did not take them in, of a file that it has set aside; else an empty text.
        rows: values by row, one for each of them too; None for none.
    """

    ids: tuple[int, ...]
    values: Mapping[str, Sequence[Value]]
    who: str
    time: int
    source: str = ""
    refused: str = ""
    rows: RowShard | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as a record or a file has it, but for values by row."""
        values = {name: list(some) for name, some in self.values.items()}
        told = {"time": self.time, "who": self.who, "ids": list(self.ids), "values": values}
        return told | {name: text for name, text in (("source", self.source), ("refused", self.refused)) if text}

    @classmethod
    def from_json(cls, value: Any) -> Said:
        """Return what :meth:`to_json` described.

        Raises:
            CorruptStoreError: it does not describe values.
        """
        try:
            who, values = value["who"], value["values"]
            source, refused = value.get("source", ""), value.get("refused", "")
            if not all(isinstance(one, str) for one in (who, source, refused)) or not isinstance(values, dict):
                raise TypeError("who, source, refused or values")
            ids = tuple(natural(number, RANGES["trajectory_id"][1]) for number in value["ids"])
            given = {name: tuple(some) for name, some in values.items()}
            said = cls(ids, given, who, natural(value["time"]), source, refused)
            said.check()
        except (KeyError, TypeError, ValueError, AttributeError, ConfigurationError) as error:
            raise CorruptStoreError(f"not values of trajectories: {error}") from error
        return said

    def without(self, ids: Container[int]) -> Said:
        """Return the values of the other trajectories."""
        stay = [at for at, number in enumerate(self.ids) if number not in ids]
        values = {name: [some[at] for at in stay] for name, some in self.values.items()}
        return replace(self, ids=tuple(self.ids[at] for at in stay), values=values)

    @property
    def kinds(self) -> dict[str, str | None]:
        """By name, see :attr:`Notes.kinds`; None where the values only take back what there is."""
        found = {
            name: next((_kind(name, value) for value in values if value is not None), None)
            for name, values in self.values.items()
        }
        return found if self.rows is None else {**found, **self.rows.kinds}

    def check(self) -> None:
        """Refuse what no trajectory can be given.

        Raises:
            ConfigurationError: names the value.
        """
        if len(set(self.ids)) != len(self.ids):
            raise ConfigurationError("annotate: an id is there twice")
        _check_unicode("who", self.who)
        for name, values in self.values.items():
            check_name(name)
            if len(values) != len(self.ids):
                raise ConfigurationError(
                    f"annotate: {name}: {len(values)} values for {len(self.ids)} trajectories, must be as many, or one"
                )
            kinds = {_kind(name, value) for value in values if value is not None}
            if "text" in kinds and (name in OVER_FACTS or name.startswith(SCORE)):
                raise ConfigurationError(f"annotate: {name}: has a text, but takes the place of a number")
            if len(kinds) > 1:
                raise ConfigurationError(f"annotate: {name}: has numbers and texts, must be one or the other")


def check_name(name: str) -> None:
    """Refuse what can be no name of values.

    Raises:
        ConfigurationError: it cannot.
    """
    if not NAME.fullmatch(name):
        raise ConfigurationError(
            f"annotate: {name!r}, must be a name of up to 64 of a-z, A-Z, 0-9 and _, and begin with no digit"
        )


def check_names(names: Iterable[str], facts: Collection[str]) -> None:
    """Refuse names of facts that stay as they are, and what differs from one only in the case of letters.

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
        meant = [fact for fact in facts if fact.lower() == name.lower() and fact != name]
        if meant:
            raise ConfigurationError(
                f"annotate: {name}: the fact {meant[0]} has this name but for the case of letters; write {meant[0]}, "
                "or take another name"
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


def check_given(said: Said, known: Mapping[str, str]) -> None:
    """Refuse values that a store is not to be given.

    Args:
        said: the values.
        known: kinds of its names.

    Raises:
        ConfigurationError: they contradict its values, or a new name differs from another in the case of letters alone.
    """
    check_kinds(said, known)
    names = known.keys() | said.kinds.keys()
    for name in said.kinds.keys() - known.keys():
        for other in names - {name}:
            if other.lower() == name.lower():
                raise ConfigurationError(
                    f"annotate: {name}: there are values {other}, which differ in the case of letters alone; write "
                    f"{other}, or take another name"
                )


def check_same_kinds(said: Said, known: Mapping[str, str], where: str) -> None:
    """Refuse values of another kind than those that a name has.

    Args:
        said: the values.
        known: kinds of names.
        where: of whom these are, in words.

    Raises:
        ConfigurationError: a name stands for values of another kind.
    """
    for name, kind in said.kinds.items():
        before = known.get(name, kind)
        if kind is not None and kind != before:
            what = rows_in_words(kind) if is_rows(kind) else f"a {kind}"
            raise ConfigurationError(
                f"annotate: {name}: {what}, but the values of this name are {kind_in_words(str(before))} {where}; "
                "take another name"
            )


def check_kinds(said: Said, known: Mapping[str, str]) -> None:
    """Refuse values that contradict those of a store, where its log has them, too.

    Raises:
        ConfigurationError: a name stands for values of the other kind, or there would be too many names.
    """
    check_same_kinds(said, known, "here")
    given = said.kinds
    for name, kind in given.items():
        if kind is None and name not in known:
            raise ConfigurationError(f"annotate: {name}: there is no value of this name to be taken back")
    if len(known.keys() | given.keys()) > MOST_NAMES:
        raise ConfigurationError(f"annotate: the store has {MOST_NAMES} names of values, the most that can be")


def kind_in_words(kind: str) -> str:
    """Return what values of a kind are called."""
    return rows_in_words(kind) if is_rows(kind) else f"{kind}s"
