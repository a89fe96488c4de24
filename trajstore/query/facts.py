"""A table of the index's facts, one row per visible trajectory."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore._core.base.types import IntArray
from trajstore._core.columns.facts import DOCUMENT_FACTS, SCORE
from trajstore._core.columns.limits import UNKNOWN_TIME, UNKNOWN_VERSION
from trajstore._core.reading.address_table import UNAVAILABLE
from trajstore._core.reading.contents import Contents
from trajstore._core.store.facts import AGENT, NOTE, NOTE_TEXT, TEXTS, is_text
from trajstore._core.store.index import TrajectoryIndex
from trajstore._core.store.json_arrays import StringTable
from trajstore._core.store.run_ids import rank_of_id
from trajstore.query.engine import pl, polars
from trajstore.query.readable import Locked

_Entries = tuple["weakref.ref[TrajectoryIndex]", tuple[int, ...], IntArray]
"""Identifies the entries of an index; an entry itself changes only on a commit."""


def _entries_of(index: TrajectoryIndex) -> _Entries:
    return weakref.ref(index), (index.revision, index.noted, index.first, index.end), index["committed"].copy()


def _same(before: _Entries, index: TrajectoryIndex) -> bool:
    _, revision, committed = _entries_of(index)
    return before[0]() is index and before[1] == revision and np.array_equal(before[2], committed)


class Facts:
    """The facts of a buffer's visible trajectories.

    Args:
        locked: gives access to the contents.
    """

    def __init__(self, locked: Locked) -> None:
        self._locked = locked
        self._answer: tuple[_Entries, pl.DataFrame] | None = None
        """The last table and the entries it covers."""
        self._texts: tuple[weakref.ref[StringTable], pl.Series] | None = None
        """The index's string table as a series."""
        self._known: dict[str, pl.DataType] = {}
        """Columns shown so far: a name stays one, so that no condition fails after a rollback to before its values."""

    def table(self) -> pl.DataFrame:
        """Return all facts, oldest trajectory first.

        Raises:
            MissingDependencyError: Polars is not installed.
        """
        polars()
        before = self._answer
        if before is not None and self._locked(lambda contents: _same(before[0], contents.index)):
            return before[1]
        self._answer = self._locked(self._of_index)
        return self._answer[1]

    def _of_index(self, contents: Contents) -> tuple[_Entries, pl.DataFrame]:
        """Return the entries and their facts; call with the lock of the contents held."""
        index = contents.index
        ids, texts = index["trajectory_id"].copy(), self._texts_of(index.texts)
        agents = index.fact(AGENT) != 0
        readable = (index["slot"] != UNAVAILABLE) & (np.arange(index.first, index.end) >= contents.start)
        columns = {
            "trajectory_id": pl.Series(ids),
            "rank": pl.Series(np.maximum(rank_of_id(ids), 0)),
            "kind": pl.Series(["step", "agent"]).gather(agents.astype(np.uint32)),
            "samples": pl.Series(index["num_samples"].copy()),
            "steps": _known(np.where(agents & (index["steps"] == 0), -1, index["steps"]), -1),
            "batch": _known(np.where(agents, -1, index["batch"]), -1),
            "response": _known(np.where(agents, index["extra"], 0), 0),
            "bytes": pl.Series(index["nbytes"].copy()),
            "version_low": _known(index["version_low"], UNKNOWN_VERSION),
            "version_high": _known(index["version_high"], UNKNOWN_VERSION),
            "committed": _known(index["committed"], UNKNOWN_TIME).cast(pl.Datetime("us", "UTC")),
            "model_weights_id": texts.gather(index["weights"]).replace("", None),
            "max_episode_length": _known(index["max_episode_length"], 0),
        }
        for name in (*DOCUMENT_FACTS, *sorted(name for name in index.facts if name.startswith(SCORE))):
            column = index.fact(name)
            if name in TEXTS:
                columns[name] = texts.gather(np.where(column < 0, len(texts) - 1, column))
            elif column.dtype.kind == "f":
                columns[name] = pl.Series(column.copy()).fill_nan(None)
            else:
                columns[name] = _known(column, -1)
        late: dict[str, list[pl.Series]] = defaultdict(list)
        for name in index.notes:
            plain = name.removeprefix(NOTE_TEXT).removeprefix(NOTE)
            given = index[name]
            if is_text(name):
                late[plain].append(texts.gather(np.where(given < 0, len(texts) - 1, given)))
            elif plain not in columns:
                late[plain].append(pl.Series(given.copy()).fill_nan(None))
        for plain, candidates in late.items():
            if len(candidates) > 1:  # numbers in one rank and texts in another become texts, as in a handle
                candidates = [column_part.cast(pl.String) for column_part in candidates]
            columns[plain] = candidates[0].fill_null(candidates[-1])
        columns["terminated"] = columns["terminated"].cast(pl.Boolean)
        for name, dtype in self._known.items():
            if name not in columns:
                columns[name] = pl.repeat(None, len(ids), dtype=dtype, eager=True)
        self._known = {name: column.dtype for name, column in columns.items()}
        columns["readable"] = pl.Series(readable)
        return _entries_of(index), pl.DataFrame(columns)

    def _texts_of(self, table: StringTable) -> pl.Series:
        """Return the texts of a table followed by a null; cached texts are reused."""
        before = self._texts
        known = before[1] if before is not None and before[0]() is table else pl.Series([], dtype=pl.String)
        if before is None or len(known) < len(table) or before[0]() is not table:
            known = pl.concat([known, pl.Series(table.texts(len(known)), dtype=pl.String)])
            self._texts = weakref.ref(table), known
        return pl.concat([known, pl.Series([None], dtype=pl.String)])


def _known(column: npt.NDArray[Any], unknown: int) -> pl.Series:
    """Return a column with the number ``unknown`` replaced by null."""
    values = pl.Series("known", column.copy())
    return values.set(values == unknown, None)
