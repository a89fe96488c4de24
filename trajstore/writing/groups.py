"""What is written together: trajectories cut out of the queue into groups, a group into shards of one schema each.

Batches are guarded by ``WriteQueue._lock``, with which :func:`fill` is called. A group belongs to the one thread that
took it from the queue.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trajstore.columns.owned import OwnedTrajectory
from trajstore.errors import StoreWriteError
from trajstore.formats.base import ShardManifest
from trajstore.writing.commits import NewShard


def random_uuids(count: int) -> bytes:
    """Return random UUIDs (version 4), 16 bytes each."""
    raw = np.frombuffer(os.urandom(16 * count), np.uint8).reshape(count, 16).copy()
    raw[:, 6] = (raw[:, 6] & 0x0F) | 0x40
    raw[:, 8] = (raw[:, 8] & 0x3F) | 0x80
    return raw.tobytes()


class Batch:
    """What one call adds, from ``start`` on.

    Attributes:
        nbytes: bytes of all of it.
        owned: the trajectories; empty until they are queued.
        ids: their ids.
        uuids: 16 bytes for each.
        since: when it was queued, by ``time.monotonic``.
        start: how many have been taken out of it.
        taken: whether any has been taken.
    """

    __slots__ = ("__weakref__", "ids", "nbytes", "owned", "since", "start", "taken", "uuids")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.owned: Sequence[OwnedTrajectory] = ()
        self.ids: Sequence[int] = ()
        self.uuids = b""
        self.since = 0.0
        self.start = 0
        self.taken = False

    @property
    def bytes_left(self) -> int:
        """Bytes of what has not been taken out of it."""
        return sum([item.nbytes for item in self.owned[self.start :]]) if self.start else self.nbytes


@dataclass(slots=True, eq=False)
class Part:
    """Trajectories of one schema that become one shard.

    Attributes:
        shard: the shard's number.
        manifest: set when its files are durable.
        entries: what the log says of the trajectories, as JSON; set with the manifest.
    """

    shard: int
    owned: list[OwnedTrajectory] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    uuids: bytes = b""
    manifest: ShardManifest | None = None
    entries: bytes = b""

    @property
    def nbytes(self) -> int:
        """Bytes that its trajectories take in memory."""
        return sum([item.nbytes for item in self.owned])

    def split(self, other: int) -> list[Part]:
        """Return two halves; the second one is the shard ``other``."""
        at = len(self.ids) // 2
        return [
            Part(self.shard, self.owned[:at], self.ids[:at], self.uuids[: 16 * at]),
            Part(other, self.owned[at:], self.ids[at:], self.uuids[16 * at :]),
        ]

    def new_shard(self) -> NewShard:
        """Return what is to be recorded of this part once it is published."""
        if self.manifest is None:
            raise StoreWriteError(f"shard {self.shard} was not written")  # a bug if ever
        return NewShard(self.shard, self.manifest, self.owned, self.ids, self.uuids, self.entries)


@dataclass(slots=True, eq=False)
class Group:
    """Trajectories that are committed together, by one record of the log: all of them or none.

    Attributes:
        ticket: groups are committed in this order, without gaps.
        flushes: calls of ``flush`` when this attempt began.
        nbytes: bytes of all its trajectories.
        last: highest of its ids.
        failures: attempts that failed.
    """

    ticket: int
    flushes: int
    parts: list[Part] = field(default_factory=list)
    nbytes: int = 0
    last: int = -1
    failures: int = 0

    @property
    def ids(self) -> list[int]:
        """Ids of all trajectories that are to be written, ascending."""
        return sorted([number for part in self.parts for number in part.ids])


def fill(group: Group, waiting: deque[Batch], shard: int, limit: int) -> None:
    """Move trajectories from the queue into a group: as many as fit, and a shard for each schema among them.

    Within a shard they stay in the order of their ids. Nothing is moved if this fails.

    Args:
        group: has nothing yet.
        waiting: where they are taken from, the oldest first; not empty.
        shard: number of the first shard; the others have the following ones.
        limit: most bytes of all of them, but at least one trajectory is taken.
    """
    runs: dict[int, list[tuple[Batch, int, int]]] = {}  # by schema, of which there is one object each
    stops: list[tuple[Batch, int]] = []
    nbytes = 0
    for batch in waiting:
        stop = begin = batch.start
        schema = batch.owned[begin].schema
        for item in batch.owned[begin:] if begin else batch.owned:
            if nbytes + item.nbytes > limit and nbytes > 0:
                break
            if item.schema is not schema:
                runs.setdefault(id(schema), []).append((batch, begin, stop))
                schema, begin = item.schema, stop
            nbytes += item.nbytes
            stop += 1
        if stop > begin:
            runs.setdefault(id(schema), []).append((batch, begin, stop))
        stops.append((batch, stop))
        if stop < len(batch.owned):
            break
    group.parts = [
        Part(
            shard + number,
            [item for batch, begin, stop in pieces for item in batch.owned[begin:stop]],
            [identity for batch, begin, stop in pieces for identity in batch.ids[begin:stop]],
            b"".join([batch.uuids[16 * begin : 16 * stop] for batch, begin, stop in pieces]),
        )
        for number, pieces in enumerate(runs.values())
    ]
    group.nbytes, group.last = nbytes, max(part.ids[-1] for part in group.parts)
    for batch, stop in stops:
        if stop > batch.start:
            batch.taken, batch.start = True, stop
        if stop == len(batch.owned):
            waiting.popleft()
