"""Contents of trajectories as rows: messages, calls and tokens of rollouts, steps of blocks; read lazily.

Polars scans a relation by reading trajectories in portions. Conditions on facts alone select trajectories before any
is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trajstore._core.base import exits, locks
from trajstore._core.base.types import IntArray
from trajstore._core.columns.portions import portions
from trajstore.query import rows
from trajstore.query.documents import CALLS, MESSAGES, METADATA_ROWS
from trajstore.query.engine import pl
from trajstore.query.readable import TOGETHER, Faults, Locked, log_faults, readable
from trajstore.query.texts import METADATA

TRAJECTORIES = "trajectories"
"""The relation of facts, one row per trajectory."""

_BYTES = 16 << 20
"""Maximum size of the trajectories read together, unless a single one is larger."""

Read = Callable[[Locked, IntArray, Sequence[str], Mapping[str, bool]], tuple[IntArray, dict[str, "pl.Series"]]]
"""Returns the number of rows of each trajectory, ``[n]``, and the requested columns of all rows."""

Late = Callable[[str], Mapping[str, bool]]
"""Returns the names of a relation's values by row, and whether a row may have several numbers."""


@dataclass(frozen=True, slots=True)
class _Kind:
    of: str
    columns: Mapping[str, tuple[str, str]]
    read: Read


_KINDS = {
    "messages": _Kind("agent", MESSAGES.described, MESSAGES.read),
    "calls": _Kind("agent", CALLS.described, CALLS.read),
    "tokens": _Kind("agent", rows.TOKENS, rows.read_tokens),
    "steps": _Kind("step", rows.STEPS, rows.read_steps),
    METADATA: _Kind("agent", METADATA_ROWS.described, METADATA_ROWS.read),
}

RELATIONS: Mapping[str, Mapping[str, str]] = {
    name: {column: what for column, (_, what) in _KINDS[name].columns.items()}
    for name in ("messages", "calls", "tokens", "steps")
}
"""Relations read from trajectories, with their columns. Each fact of a row's trajectory is a column too."""


class _Readings:
    """Portions that Polars threads read, even after an answer has reached its limit.

    A thread still in Python when the interpreter ends would abort the process with SIGABRT.
    """

    def __init__(self) -> None:
        self._at = locks.condition("_Readings._at")
        self._under_way = 0
        self._over = False
        exits.before_the_end(self._end)

    def of(self, frames: Iterator[pl.DataFrame]) -> Iterator[pl.DataFrame]:
        """Yield the frames; stop once the interpreter ends."""
        while True:
            with self._at:
                if self._over:
                    return
                self._under_way += 1
            try:
                frame = next(frames, None)
            finally:
                with self._at:
                    self._under_way -= 1
                    self._at.notify_all()
            if frame is None:
                return
            yield frame

    def _end(self) -> None:
        with self._at:
            self._over = True
            self._at.wait_for(lambda: not self._under_way)
        time.sleep(_HANDING_ON)


_HANDING_ON = 0.05
"""Seconds for Polars threads to take over read data, for which they need the interpreter."""

_READINGS = _Readings()


def shown_columns(relation: str) -> list[str]:
    """Return the default columns of an answer."""
    return ["trajectory_id", "task", *_KINDS[relation].columns]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for rows of trajectories.

    Attributes:
        relation: one of :data:`RELATIONS`.
        facts: ids of the trajectories, and the facts named in the other attributes.
        wanted: columns of the tables.
        conditions: conditions on each row.
        late: columns that are values by row, and whether each is a list of numbers.
    """

    relation: str
    facts: pl.DataFrame
    wanted: Sequence[str]
    conditions: Sequence[pl.Expr]
    late: Mapping[str, bool]


Found = tuple[list["pl.DataFrame"], Faults]
"""Tables of rows in the order of the facts, and the unreadable trajectories."""


def scan(read: Callable[[Asked], Found], late: Late, relation: str, facts: pl.DataFrame) -> pl.LazyFrame:
    """Return the rows of some trajectories as a lazy scan.

    Trajectories that are unreadable or evicted by then are left out, and a warning names them.

    Args:
        read: reads the rows.
        late: returns the names of their values by row, which are additional columns.
        relation: one of :data:`RELATIONS`.
        facts: facts of the trajectories, in the order of their rows; those of another kind have no rows.
    """
    from polars.io.plugins import register_io_source

    kind = _KINDS[relation]
    facts = facts.filter(pl.col("kind") == kind.of)
    given = {name: several for name, several in late(relation).items() if name not in kind.columns}
    own = {name: getattr(pl, dtype) for name, (dtype, _) in kind.columns.items()}
    own |= {name: pl.List(pl.Float64) if several else pl.Float64 for name, several in given.items()}
    others = {name: dtype for name, dtype in facts.schema.items() if name not in own}
    schema = {name: (own | others)[name] for name in ("trajectory_id", "task", *own, *others)}

    def source(
        wanted: list[str] | None, condition: pl.Expr | None, most: int | None, _: int | None
    ) -> Iterator[pl.DataFrame]:
        return _READINGS.of(frames(wanted, condition, most))

    def frames(wanted: list[str] | None, condition: pl.Expr | None, most: int | None) -> Iterator[pl.DataFrame]:
        wanted = list(schema) if wanted is None else wanted
        chosen, rest = facts, []
        for part in and_parts(condition):
            if own.keys() & part.meta.root_names():
                rest.append(part)
            else:
                chosen = chosen.filter(part)
        beside = [name for name in _needed(wanted, rest) if name not in own and name != "trajectory_id"]
        faults: Faults = []
        try:
            for portion in _portions(chosen):
                tables, failed = read(Asked(relation, portion.select("trajectory_id", *beside), wanted, rest, given))
                faults += failed
                for table in tables:
                    frame = table if most is None else table.head(most)
                    most = None if most is None else most - len(frame)
                    yield frame
                    if most == 0:
                        return
        finally:
            log_faults(faults, relation)

    return register_io_source(source, schema=schema, validate_schema=True, is_pure=True)


def read_rows(locked: Locked, asked: Asked) -> Found:
    """Read rows of a buffer's trajectories.

    Args:
        locked: gives access to the contents of the buffer.
        asked: the requested rows.
    """
    facts, wanted, conditions = asked.facts, asked.wanted, asked.conditions
    kind, needed, faults = _KINDS[asked.relation], _needed(wanted, conditions), Faults()
    own = [name for name in needed if name not in facts.columns]
    beside = facts.select(name for name in needed if name in facts.columns)
    ids, tables = facts["trajectory_id"].to_numpy(), []
    for readable_ids, (counts, columns) in readable(ids, lambda ids: kind.read(locked, ids, own, asked.late), faults):
        which = np.repeat(np.flatnonzero(np.isin(ids, readable_ids)), counts)
        frame = pl.DataFrame({**columns, **{c.name: c.gather(which) for c in beside}}, height=len(which))
        tables.append(frame.filter(*conditions).select(wanted) if conditions else frame.select(wanted))
    return tables, faults


def late_columns(locked: Locked, relation: str) -> dict[str, bool]:
    """Return the values by row that are columns of a buffer's relation, see :data:`Late`."""
    kind = _KINDS[relation]
    return {} if relation not in ("tokens", "steps") else locked(lambda contents: rows.given_late(contents, kind.of))


def _needed(wanted: Sequence[str], conditions: Sequence[pl.Expr]) -> list[str]:
    """Return the distinct columns named by an answer and its conditions."""
    return list(dict.fromkeys([*wanted, *(name for part in conditions for name in part.meta.root_names())]))


def _portions(facts: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Yield the facts of trajectories to read together."""
    sizes = facts["bytes"].to_list()
    for portion, _ in portions(range(len(sizes)), _BYTES, lambda at: sizes[at], most=TOGETHER):
        yield facts.slice(portion[0], len(portion))


def and_parts(condition: pl.Expr | None) -> list[pl.Expr]:
    """Split a condition at its top-level ANDs."""
    if condition is None:
        return []
    below = condition.meta.pop()
    if len(below) == 2 and (below[1] & below[0]).meta.eq(condition):
        return [*and_parts(below[1]), *and_parts(below[0])]
    return [condition]
