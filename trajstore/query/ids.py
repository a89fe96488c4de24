"""Check ids in SQL expressions, ``trajectory_id = '2/1'``, and replace them by numbers. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trajstore._core.store.run_ids import ID_LIMIT, RUN_EXAMPLE, SINGLE_EXAMPLE, parsed_id, shown_id
from trajstore.errors import ConfigurationError
from trajstore.query.words import parts

if TYPE_CHECKING:
    from polars import DataFrame

ID = "trajectory_id"

_NAMES = {ID, f'"{ID}"', f"`{ID}`"}

_COMPARES = frozenset("=<>!")

_COMPUTES = frozenset("+-*/%|&^")


@dataclass(frozen=True, slots=True)
class _Compared:
    """A literal that is compared with the id.

    Attributes:
        first, end: range of its parts in the text.
        value: its text without blanks.
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
    cells = parts(text)
    for compared in _compared(cells):
        if (instead := compared.refusal(run)) is not None:
            reason = f"{where}: {text!r}: {compared.value} is no id of"
            if run is False:
                raise ConfigurationError(f"{reason} a single store, whose ids are numbers: {ID} = {SINGLE_EXAMPLE}")
            raise ConfigurationError(
                f"{reason} a run directory, whose ids are rank and id in quotes; write {instead}: {_suggested(cells)}"
            )


def _suggested(cells: list[str]) -> str:
    cells = list(cells)
    for compared in _compared(cells):
        cells[compared.first : compared.end] = [
            compared.refusal(True) or compared.value,
            *[""] * (compared.end - compared.first - 1),
        ]
    return "".join(cells)


def with_numbers(text: str) -> str:
    """Return a text in which quoted ids compared with ``trajectory_id`` are replaced by numbers."""
    cells = parts(text)
    for compared in _compared(cells):
        if (number := compared.id) is not None:
            cells[compared.first] = str(number)
    return "".join(cells)


def _compared(cells: list[str]) -> Iterator[_Compared]:
    """Yield the literals that are compared with ``trajectory_id``."""
    places = [at for at, cell in enumerate(cells) if not cell.isspace() and not cell.startswith(("--", "/*"))]
    words = [cells[at] if cells[at][0] in "'\"`$" else cells[at].lower() for at in places]

    def literal(first: int, step: int = 1) -> tuple[int, int] | None:
        """Return the range of words of the literal that starts at word ``first`` or, with ``step`` -1, ends there."""
        if not 0 <= first < len(words) or not (words[first][0] == "'" or words[first].isdigit()):
            return None
        last = first + 2 * step
        if words[first].isdigit() and 0 <= last < len(words) and words[first + step] == "/" and words[last].isdigit():
            return min(first, last), max(first, last) + 1
        return first, first + 1

    def found(first: int, end: int) -> _Compared:
        return _Compared(places[first], places[end - 1] + 1, "".join(words[first:end]))

    for at, word in enumerate(words):
        if word not in _NAMES:
            continue
        before = at - 1
        while before > 0 and words[before] == ".":
            before -= 2
        sign = before
        while before >= 0 and words[before] in _COMPARES:
            before -= 1
        after = at + 1
        if words[after : after + 1] and words[after] in _COMPUTES:
            continue
        if before < sign and (span := literal(before, -1)):
            yield found(*span)
        while after < len(words) and words[after] in _COMPARES:
            after += 1
        if after > at + 1:
            if span := literal(after):
                yield found(*span)
            continue
        after += after < len(words) and words[after] == "not"
        if words[after : after + 2] == ["in", "("]:
            separator, most, after = ",", len(words), after + 2
        elif words[after : after + 1] == ["between"]:
            separator, most, after = "and", 2, after + 1
        else:
            continue
        for _ in range(most):
            if not (span := literal(after)):
                break
            yield found(*span)
            after = span[1] + 1 if words[span[1] : span[1] + 1] == [separator] else len(words)


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
