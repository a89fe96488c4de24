"""Estimates which ids unreadable log records had committed. Pure; no I/O.

Ids grow from record to record, so the ids between two readable records were assigned by the unreadable records
between them, or never (a rank that uses every fourth id, an interrupted addition). Ids evicted later are not lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore._core.store.additions import added_in
from trajstore._core.store.log_records import id_ranges, lie_in, parse_ranges, ranges_in_words
from trajstore.errors import CorruptStoreError, trajectories

_MOST = 1 << 20
"""Limit on the total width of id gaps; wider gaps prove nothing, since ids may be forged or start anywhere."""

_LEFT_OUT = "; what was committed there and no shard has is left out"

_NOTHING = (
    "; no trajectory is lost by it, for the shards have them; what was evicted there, if anything, is shown again, and "
    "late values given there are lost"
)

_ENOUGH = 8
"""Minimum number of known trajectories for a reliable id stride."""


def lost_in_words(lost: Sequence[Sequence[int]], uncounted: bool) -> str:
    """Return a description of the lost ids; empty if none are lost.

    Args:
        lost: inclusive ranges of ids, ascending.
        uncounted: whether more may be lost.
    """
    count = sum(high - low + 1 for low, high in lost)
    ids = ranges_in_words(lost)
    known = f"trajectory {ids}" if count == 1 else f"{trajectories(count)}, ids {ids}" if count else ""
    if not uncounted:
        return known
    return f"{known}, perhaps more" if known else "an unknown number of trajectories, perhaps none"


def _joined(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return ascending inclusive ranges, with adjacent ones merged."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return tuple(joined)


@dataclass
class Damage:
    """One damage to a store.

    Attributes:
        message: description, beginning with the file.
        lost: ids of the lost trajectories, as inclusive ranges; empty if unknown.
        uncounted: whether more may be lost.
    """

    message: str
    lost: tuple[tuple[int, int], ...] = ()
    uncounted: bool = False

    @property
    def count(self) -> int:
        """Number of the trajectories in ``lost``."""
        return sum(high - low + 1 for low, high in self.lost)

    def __str__(self) -> str:
        lost = lost_in_words(self.lost, self.uncounted)
        return f"{self.message}; lost: {lost}" if lost else self.message


@dataclass
class _Hole:
    """Unreadable records that assigned ids from ``low`` up to, excluding, ``high``; None = not known yet."""

    damage: Damage
    low: int
    high: int | None = None


class LostRecords:
    """Tracks the gaps of a log; call :meth:`settle` after the whole log was read."""

    def __init__(self) -> None:
        self._damage: list[Damage] = []
        self._holes: list[_Hole] = []
        self._evicted: list[npt.NDArray[np.int64]] = []
        self._next_id = 0

    @property
    def any(self) -> bool:
        """Whether some record is missing or invalid."""
        return bool(self._damage)

    @property
    def evicted(self) -> npt.NDArray[np.int64]:
        """Ids that readable records evict, as inclusive ranges ``[n, 2]``."""
        return np.concatenate([np.zeros((0, 2), np.int64), *self._evicted])

    def begins(self, next_id: int) -> None:
        """Set the next id of the snapshot that precedes the log."""
        self._next_id = max(self._next_id, next_id)

    def missing(self, damage: Damage) -> None:
        """Add a gap after the records read so far."""
        self._note(damage)
        self._holes.append(_Hole(damage, self._next_id))

    def read(self, record: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
        """Track the ids of a readable record, valid or not; return the ids that it adds."""
        try:
            if record.get("operation") == "evict":
                self._evicted.append(parse_ranges(record["ids"]))
            if record.get("operation") != "add":
                return ()
            ranges = np.concatenate([parse_ranges(shard["entries"]["ids"]) for shard in added_in(record)])
        except (CorruptStoreError, KeyError, TypeError, ValueError):
            return ()
        if not len(ranges):
            return ()
        self._close(int(ranges.min()))
        self._next_id = max(self._next_id, int(ranges.max()) + 1)
        return tuple((int(low), int(high)) for low, high in ranges[np.argsort(ranges[:, 0])])

    def _note(self, damage: Damage) -> None:
        if not any(known is damage for known in self._damage):
            self._damage.append(damage)

    def _close(self, high: int) -> None:
        for hole in self._holes:
            if hole.high is None:
                hole.high = max(high, hole.low)

    def refused(self, damage: Damage, ranges: Sequence[tuple[int, int]]) -> None:
        """Add a record that is readable but invalid, with the ids that it adds."""
        self._note(damage)
        self._holes += [_Hole(damage, low, high + 1) for low, high in ranges]

    def settle(self, present: npt.NDArray[np.int64], counter: int) -> None:
        """Set the lost ids of each damage.

        Args:
            present: ids of the existing trajectories.
            counter: the next id according to other files; 0 if unknown.
        """
        present = np.unique(present)
        counter = max(counter, int(present.max(initial=-1)) + 1)
        for hole in self._holes:
            if hole.high is None:  # the log's last records are missing
                hole.damage.uncounted |= counter <= hole.low
                hole.high = max(counter, hole.low)
        stride = int(np.gcd.reduce(np.diff(present))) if len(present) >= _ENOUGH else 1
        most = _MOST
        for hole in self._holes:
            high = hole.low if hole.high is None else hole.high
            if high - hole.low > most:
                hole.damage.uncounted = True
                continue
            most -= high - hole.low
            ids = np.arange(hole.low, high, dtype=np.int64)
            if stride > 1:
                ids = ids[(ids - present[0]) % stride == 0]
            ids = ids[~np.isin(ids, present) & ~lie_in(ids, self.evicted)]
            hole.damage.lost += tuple(map(tuple, id_ranges(ids).tolist()))
        for damage in self._damage:
            damage.lost = _joined(damage.lost)
            nothing = not damage.lost and not damage.uncounted
            damage.message += _NOTHING if nothing else _LEFT_OUT
