"""Check ids in SQL expressions, ``trajectory_id = '2/1'``, and replace them by numbers. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trajstore._core.store.run_ids import ID_LIMIT, RUN_EXAMPLE, SINGLE_EXAMPLE, parsed_id, shown_id
from trajstore.errors import ConfigurationError
from trajstore.query.words import QUOTED

if TYPE_CHECKING:
    from polars import DataFrame

ID = "trajectory_id"

_GAP = r"(?:\s|--[^\n]*\n|/\*(?:[^*]|\*(?!/))*\*/)*"
_NAME = r"""(?:["`]trajectory_id["`]|(?<!\w)trajectory_id(?!\w))"""
_LITERAL = r"""(?:'(?:[^']|'')*'|(?<![\w.])\d+(?:\s*/\s*\d+)?(?![\w.]))"""
_LITERALS = re.compile(rf"{_GAP}(?P<value>{_LITERAL})", re.DOTALL)
_COMPARISON = re.compile(
    rf"""(?P<before>{_LITERAL})(?={_GAP}[=<>!]+{_GAP}(?:\w+{_GAP}\.{_GAP})*{_NAME})
    |{_NAME}{_GAP}(?:
        [=<>!]+(?P<after>{_GAP}{_LITERAL})
        |(?:not{_GAP})?in{_GAP}\((?P<list>{_GAP}{_LITERAL}(?:{_GAP},{_GAP}{_LITERAL})*)
        |(?:not{_GAP})?between(?P<range>{_GAP}{_LITERAL}(?:{_GAP}and{_GAP}{_LITERAL})?))
    |{QUOTED}""",
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)
"""A literal compared with the id, several of them, or text to skip."""


@dataclass(frozen=True, slots=True)
class _Compared:
    """A literal that is compared with the id.

    Attributes:
        first, end: its range in the text.
        value: its text, an id without blanks.
    """

    first: int
    end: int
    value: str

    @property
    def id(self) -> int | None:
        """The number of a quoted run id; None for other literals."""
        return parsed_id(self.value[1:-1]) if "/" in self.value and self.value[0] == "'" else None

    def refusal(self, run: bool | None) -> str | None:
        """Return the correct spelling of the id; None if it is correct already.

        Args:
            run: whether ids are those of a run; None if there are no trajectories.
        """
        plain = self.value.strip("'").replace(" ", "")
        if self.id is not None:
            return SINGLE_EXAMPLE if run is False else None
        if self.value.isdigit():
            return shown if run and (shown := _of_rank_0(plain)) != plain else None
        if run is False:
            return SINGLE_EXAMPLE
        number = parsed_id(plain)
        return f"'{RUN_EXAMPLE}'" if number is None else f"'{shown_id(number)}'" if "/" in plain else _of_rank_0(plain)


def _of_rank_0(number: str) -> str:
    return f"'0/{number}'" if int(number) < ID_LIMIT else number


def checked_ids(where: str, text: str, run: bool | None) -> None:
    """Refuse an expression or statement that compares ``trajectory_id`` with an invalid id.

    Args:
        where: the part of the query, for the message.
        text: the expression or statement.
        run: whether ids are those of a run; None if there are no trajectories.

    Raises:
        ConfigurationError: an id is invalid; suggests the correct spelling.
    """
    for compared in _compared(text):
        if (instead := compared.refusal(run)) is not None:
            reason = f"{where}: {text!r}: {compared.value} is no id of"
            if run is False:
                raise ConfigurationError(f"{reason} a single store, whose ids are numbers: {ID} = {SINGLE_EXAMPLE}")
            better = _replaced(text, _suggested)
            raise ConfigurationError(
                f"{reason} a run directory, whose ids are rank and id in quotes; write {instead}: {better}"
            )


def _suggested(compared: _Compared) -> str:
    return compared.refusal(True) or compared.value


def with_numbers(text: str) -> str:
    """Return a text in which quoted ids compared with ``trajectory_id`` are replaced by numbers."""
    return _replaced(text, lambda compared: compared.value if compared.id is None else str(compared.id))


def _replaced(text: str, by: Callable[[_Compared], str]) -> str:
    pieces, end = list[str](), 0
    for compared in _compared(text):
        pieces += text[end : compared.first], by(compared)
        end = compared.end
    return "".join([*pieces, text[end:]])


def _compared(text: str) -> Iterator[_Compared]:
    """Yield the literals that are compared with ``trajectory_id``, in order."""
    for found in _COMPARISON.finditer(text):
        if found.lastgroup in (None, "tag"):  # text to skip
            continue
        for literal in _LITERALS.finditer(text, *found.span(found.lastgroup)):
            yield _Compared(*literal.span("value"), re.sub(r"(?<=\d)\s*/\s*", "/", literal["value"]))


def spelled(table: DataFrame, names: set[str]) -> DataFrame:
    """Return a table for output, in which run ids are texts.

    Args:
        table: facts or an answer.
        names: names of the id columns.
    """
    for name in names:
        column = table[name]
        if column.dtype.is_integer() and bool((column >= ID_LIMIT).any()):
            known = column.drop_nulls().unique()
            texts = [shown_id(number) for number in known.to_list()]
            table = table.with_columns(column.replace_strict(known.to_list(), texts, default=None))
    return table
