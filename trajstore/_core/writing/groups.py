"""Groups of trajectories that are written together, divided into shards of one schema each.

Batches are guarded by ``WriteQueue._lock``, which :func:`fill` expects to be held. A group belongs to the thread that
took it from the queue.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from trajstore._core.columns.flat import Block
from trajstore._core.formats.base import ShardManifest
from trajstore._core.store.additions import NewEntries


def random_uuids(count: int) -> bytes:
    """Return random UUIDs (version 4), 16 bytes each."""
    raw = np.frombuffer(os.urandom(16 * count), np.uint8).reshape(count, 16).copy()
    raw[:, 6] = (raw[:, 6] & 0x0F) | 0x40
    raw[:, 8] = (raw[:, 8] & 0x3F) | 0x80
    return raw.tobytes()


@dataclass(slots=True, eq=False)
class Run:
    """Consecutive trajectories of one block. Immutable.

    Attributes:
        block: the block; it may hold further trajectories.
        first: position of the first trajectory in it.
        entries: index entries of the trajectories.
        nbytes: their bytes in memory.
    """

    block: Block
    first: int
    entries: NewEntries
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = int(self.entries.columns["nbytes"].sum())

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def last(self) -> int:
        """Highest id."""
        return int(self.entries.columns["trajectory_id"][-1])

    def part(self, start: int, stop: int) -> Run:
        """Return the trajectories ``start <= i < stop``."""
        return Run(self.block, self.first + start, self.entries[start:stop])


def runs_of(blocks: Sequence[Block], entries: NewEntries) -> list[Run]:
    """Return the trajectories of consecutive blocks."""
    if len(blocks) == 1:
        return [Run(blocks[0], 0, entries)]
    ends = accumulate(map(len, blocks))
    return [Run(block, 0, entries[end - len(block) : end]) for block, end in zip(blocks, ends, strict=True)]


class Batch:
    """The additions of one call.

    Attributes:
        nbytes: total bytes.
        runs: the trajectories not taken yet; empty until it is queued.
        since: time of queueing, by ``time.monotonic``.
        taken: whether any trajectory has been taken.
    """

    __slots__ = ("__weakref__", "nbytes", "runs", "since", "taken")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.runs: Sequence[Run] = ()
        self.since = 0.0
        self.taken = False

    @property
    def ids(self) -> list[int]:
        """Ids of the remaining trajectories."""
        return [number for run in self.runs for number in run.entries.ids]

    @property
    def first(self) -> int:
        """Lowest remaining id."""
        return int(self.runs[0].entries.columns["trajectory_id"][0])


@dataclass(slots=True, eq=False)
class ShardDraft:
    """Trajectories of one schema that become one shard.

    Attributes:
        number: the shard's number.
        runs: the trajectories.
        manifest: set when the files are durable.
        record: the part of the log record on the trajectories, as JSON; set with the manifest.
    """

    number: int
    runs: list[Run]
    manifest: ShardManifest = field(init=False)
    record: bytes = b""
    _entries: NewEntries | None = None

    @property
    def entries(self) -> NewEntries:
        """Index entries of its trajectories."""
        if self._entries is None:
            self._entries = NewEntries.joined([run.entries for run in self.runs])
        return self._entries

    @property
    def ids(self) -> list[int]:
        """Ids of its trajectories, ascending."""
        return self.entries.ids

    @property
    def nbytes(self) -> int:
        """Bytes of its trajectories in memory."""
        return sum([run.nbytes for run in self.runs])

    def split(self, other: int) -> list[ShardDraft]:
        """Return two halves; the second one is the shard ``other``."""
        first, second, left = [], [], len(self.entries) // 2
        for run in self.runs:
            at = min(left, len(run))
            left -= at
            if at:
                first.append(run.part(0, at))
            if at < len(run):
                second.append(run.part(at, len(run)))
        return [ShardDraft(self.number, first), ShardDraft(other, second)]


@dataclass(slots=True, eq=False)
class Group:
    """Trajectories that are committed atomically, by one log record.

    Attributes:
        ticket: groups are committed in this order, without gaps.
        flushes: calls of ``flush`` when this attempt began.
        nbytes: bytes of all its trajectories.
        last: highest of its ids.
        failures: number of failed attempts.
        is_published: True once the files of all shards are durable.
    """

    ticket: int
    flushes: int
    parts: list[ShardDraft] = field(default_factory=list)
    nbytes: int = 0
    last: int = -1
    failures: int = 0
    is_published: bool = False

    @property
    def ids(self) -> list[int]:
        """Ids of all its trajectories, ascending."""
        return sorted([number for part in self.parts for number in part.ids])


def fill(group: Group, waiting: deque[Batch], shard: int, limit: int) -> None:
    """Move as many queued trajectories into a group as fit, with one shard per schema.

    Within a shard they stay in the order of their ids. Nothing is moved if this fails.

    Args:
        group: empty.
        waiting: the queued batches, oldest first; not empty.
        shard: number of the first shard; the others have the following ones.
        limit: most bytes of all of them; at least one trajectory is taken regardless.
    """
    taken: dict[int, list[Run]] = {}  # by schema; schemas are unique objects
    left: list[tuple[Batch, deque[Run]]] = []
    nbytes = 0
    for batch in waiting:
        runs = deque(batch.runs)
        while runs and (count := _fitting(runs[0], limit - nbytes, least=not nbytes)):
            run = runs.popleft()
            if count < len(run):
                runs.appendleft(run.part(count, len(run)))
                run = run.part(0, count)
            taken.setdefault(id(run.block.schema), []).append(run)
            nbytes += run.nbytes
        left.append((batch, runs))
        if runs:
            break
    group.parts = [ShardDraft(shard + number, runs) for number, runs in enumerate(taken.values())]
    group.nbytes, group.last = nbytes, max([part.runs[-1].last for part in group.parts])
    for batch, remaining in left:
        if not remaining:
            waiting.popleft()
        elif remaining[0] is batch.runs[0]:
            break
        batch.taken, batch.runs = True, remaining


def _fitting(run: Run, room: int, *, least: int) -> int:
    """Return the number of leading trajectories with at most ``room`` bytes; at least ``least``."""
    if run.nbytes <= room:
        return len(run)
    return max(least, bisect_right([*accumulate(run.entries.nbytes)], room))
