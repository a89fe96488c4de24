"""Answers in batches, and as a stream of Arrow that other tools open as often as they like."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trajstore.query.engine import polars

if TYPE_CHECKING:
    from polars import DataFrame, LazyFrame

_ROWS = 8192
"""Of a batch."""


@dataclass(frozen=True, slots=True)
class Stream:
    """An answer whose rows are made while they are taken: iterate for Polars tables, or hand it to another tool.

    Whoever speaks Arrow's PyCapsule protocol (DuckDB, pandas, pyarrow, Polars) reads it as it is. It is of the
    trajectories that were shown when it was made, and can be read any number of times; one that has been evicted by
    then is left out, and a warning names it.
    """

    _plan: LazyFrame

    def __iter__(self) -> Iterator[DataFrame]:
        """Yield the rows in tables; of an answer without rows one empty table, which has its columns."""
        some = False
        for table in self._batches():
            some = True
            yield table
        if not some:
            yield polars().DataFrame(schema=self._plan.collect_schema())

    def __arrow_c_schema__(self) -> object:
        """Return the columns as a capsule of Arrow."""
        return self._plan.collect_schema().__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Return the rows as a capsule of Arrow, from the first one on."""
        return self._batches().__arrow_c_stream__(requested_schema)

    def _batches(self) -> Any:
        return self._plan.collect_batches(chunk_size=_ROWS, lazy=True, engine="streaming")
