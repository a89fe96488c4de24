"""Answers in batches, also as an Arrow stream that can be opened repeatedly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trajstore.query.engine import polars

if TYPE_CHECKING:
    from polars import DataFrame, LazyFrame

_ROWS = 8192
"""Rows per batch."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A lazily read answer: iterate for Polars tables, or pass it to another tool.

    Readers of Arrow's PyCapsule protocol (DuckDB, pandas, pyarrow, Polars) accept it directly. It covers the
    trajectories visible when it was created, and can be read any number of times. Trajectories evicted by then are left
    out, and a warning names them.
    """

    _plan: LazyFrame

    def __iter__(self) -> Iterator[DataFrame]:
        """Yield the rows in tables; an empty answer yields one empty table with its columns."""
        has_rows = False
        for table in self._batches():
            has_rows = True
            yield table
        if not has_rows:
            yield polars().DataFrame(schema=self._plan.collect_schema())

    def __arrow_c_schema__(self) -> object:
        """Return the columns as an Arrow capsule."""
        return self._plan.collect_schema().__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Return the rows, from the first, as an Arrow capsule."""
        return self._batches().__arrow_c_stream__(requested_schema)

    def _batches(self) -> Any:
        return self._plan.collect_batches(chunk_size=_ROWS, lazy=True, engine="streaming")
