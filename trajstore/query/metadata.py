"""Values of rollouts' ``metadata`` as columns of a query: ``metadata.source``, ``metadata.tool.error``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from trajstore._core.store.run_ids import shown_id
from trajstore.errors import ConfigurationError, listed
from trajstore.query.engine import polars
from trajstore.query.words import parts

if TYPE_CHECKING:
    from polars import DataFrame, LazyFrame, Series

RELATION = "metadata"
"""The relation of metadata: one row per rollout, ``json``."""

Path = tuple[str, ...]


def keys_in(texts: Iterable[str]) -> dict[str, Path]:
    """Return the keys of metadata in SQL texts, by the name of their column: ``metadata.tool."exit code"``."""
    return {name: path for text in texts for _, _, name, path in _found(parts(text))}


def with_columns(text: str) -> str:
    """Return a text in which keys of metadata are quoted names of columns, as Polars needs them."""
    cells = parts(text)
    for first, end, name, _ in _found(cells):
        quoted = name.replace('"', '""')
        cells[first:end] = [f'"{quoted}"', *[""] * (end - first - 1)]
    return "".join(cells)


def _found(cells: Sequence[str]) -> list[tuple[int, int, str, Path]]:
    """Return (first cell, end, name of the column, path) of each key."""
    found = []
    for first, cell in enumerate(cells):
        end, path, name = first + 1, list[str](), RELATION
        while cell == RELATION and cells[end : end + 1] == ["."] and end + 1 < len(cells):
            key = cells[end + 1]
            if key[0] in '"`':
                key = key[1:-1].replace(key[0] * 2, key[0])
            elif not key.isidentifier():
                break
            path.append(key)
            name += f".{key}" if key.isidentifier() else f'."{key}"'
            end += 2
        if path:
            found.append((first, end, name, tuple(path)))
    return found


def with_metadata(
    facts: DataFrame, wanted: Mapping[str, Path], scan: Callable[[str, DataFrame], LazyFrame], chosen: DataFrame
) -> DataFrame:
    """Return facts with values of metadata as more columns; null where a rollout has none, and for blocks of steps.

    Args:
        facts: the facts.
        wanted: paths of keys, by the name of their column.
        scan: returns the rows of a relation for trajectories with these facts.
        chosen: facts of the trajectories whose metadata is read; the others get nulls.

    Raises:
        ConfigurationError: a value is a list or an object; names the rollout.
    """
    pl = polars()
    rows = scan(RELATION, chosen).select("trajectory_id", "json").collect()
    documents = [orjson.loads(text) for text in rows["json"]]
    values = {name: [_value_at(document, path) for document in documents] for name, path in wanted.items()}
    for name, column in values.items():
        for number, value in zip(rows["trajectory_id"], column, strict=True):
            if isinstance(value, list):
                raise ConfigurationError(f"{name}: a list in trajectory {shown_id(number)}; name a text or a number")
            if isinstance(value, dict):
                raise ConfigurationError(
                    f"{name}: an object in trajectory {shown_id(number)}; name one of its values, as "
                    f"{name}.KEY: it has {listed(value)}"
                )
    columns = {name: _column(column) for name, column in values.items()}
    return facts.join(
        pl.DataFrame({"trajectory_id": rows["trajectory_id"], **columns}),
        "trajectory_id",
        how="left",
        maintain_order="left",
    )


def _value_at(value: Any, path: Path) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _column(values: Sequence[Any]) -> Series:
    """Return a column of numbers, bools or texts; all are texts if some are."""
    pl = polars()
    types = {type(value) for value in values if value is not None}
    if str in types and len(types) > 1:
        values = [v if v is None or isinstance(v, str) else orjson.dumps(v).decode() for v in values]
    elif len(types) > 1 or any(type(value) is int and value >= 1 << 63 for value in values):
        values = [None if value is None else float(value) for value in values]
    column: Series = pl.Series(values, strict=True)
    return column
