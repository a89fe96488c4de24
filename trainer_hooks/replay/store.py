"""Storage of the pool's records: the required interface, and two implementations.

Takes no lock: only the training loop that owns the pool calls it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import numpy as np
import torch

from trajstore.core.base.arguments import path_or_url, text, whole_or_none
from trajstore.core.base.closing import Closing
from trajstore.core.base.settings import unknown
from trajstore.core.columns.limits import shown
from trajstore.errors import ConfigurationError, InvalidTrajectoryError, TrajectoryUnavailableError
from trajstore.trajectory import AgentTrajectory

if TYPE_CHECKING:
    from trajstore.core.buffer.replay_buffer import TrajectoryReplayBuffer
    from trajstore.core.reading.contents import Contents
    from trajstore.query import Query

LEAST_CAPACITY = 256
"""Smallest capacity of a pool's store, so that it never evicts the newest snapshot."""


class PoolRecords(Protocol):
    """Agent trajectories under ascending ids, read-only."""

    def get(self, trajectory_id: int, /) -> AgentTrajectory:
        """Return a trajectory; the caller must not change it.

        Raises:
            TrajectoryUnavailableError: no such id, or no longer kept.
        """

    def ids(self) -> list[int]:
        """Return the ids of kept trajectories, ascending."""


@runtime_checkable
class PoolStore(PoolRecords, Protocol):
    """A store of agent trajectories under ascending ids.

    A crash preserves a prefix of the additions: never a later one without the earlier ones.
    """

    @property
    def durable(self) -> bool:
        """Whether the records survive the process."""

    @property
    def store_id(self) -> str:
        """Identifies the store; empty if the records are in this process only."""

    def add_trajectories(self, trajectories: list[AgentTrajectory], /) -> list[int]:
        """Store private copies and return their ids, ascending and above all earlier ones. All or none."""

    def outcomes_given(self) -> Mapping[int, float]:
        """Return outcomes that were corrected after addition, by id; :meth:`get` has them too."""

    def flush(self) -> None:
        """Block until every addition is as durable as the store can make it."""

    def evict(self, ids: Sequence[int], /) -> None:
        """Evict trajectories. Unknown ids are ignored."""


class MemoryStore:
    """Keeps records in this process only."""

    durable = False
    store_id = ""

    def __init__(self) -> None:
        self._kept: dict[int, AgentTrajectory] = {}
        self._next = 0

    def add_trajectories(self, trajectories: list[AgentTrajectory], /) -> list[int]:
        """As :meth:`PoolStore.add_trajectories`."""
        for trajectory in trajectories:
            columns = [value for value in vars(trajectory).values() if isinstance(value, torch.Tensor)]
            # Tensors in the memo are not copied again: deepcopy would copy the whole storage of a slice.
            self._kept[self._next] = copy.deepcopy(
                trajectory, {id(column): column.detach().clone() for column in columns}
            )
            self._next += 1
        return list(range(self._next - len(trajectories), self._next))

    def get(self, trajectory_id: int, /) -> AgentTrajectory:
        """As :meth:`PoolStore.get`."""
        try:
            return self._kept[trajectory_id]
        except KeyError:
            raise TrajectoryUnavailableError(f"trajectory {trajectory_id} is not in the pool's memory") from None

    def ids(self) -> list[int]:
        """As :meth:`PoolStore.ids`."""
        return list(self._kept)

    def outcomes_given(self) -> Mapping[int, float]:
        """As :meth:`PoolStore.outcomes_given`: always empty, since trajectories in memory cannot be annotated."""
        return {}

    def flush(self) -> None:
        """Do nothing."""

    def evict(self, ids: Sequence[int], /) -> None:
        """As :meth:`PoolStore.evict`."""
        for trajectory_id in ids:
            self._kept.pop(trajectory_id, None)


class BufferStore(Closing):
    """The pool's records in a trajectory buffer that writes to disk.

    The buffer belongs to the pool. Its retention may have a capacity of at least 256 trajectories; then the pool's
    oldest trajectories are evicted first. A smaller capacity would evict the pool's journal.

    Args:
        buffer: a buffer with ``auto_save=True``.

    Raises:
        ConfigurationError: the buffer is in memory only, or its capacity is too small.
    """

    durable = True

    def __init__(self, buffer: TrajectoryReplayBuffer) -> None:
        if not hasattr(buffer, "auto_save"):
            raise ConfigurationError(f"buffer: a {type(buffer).__name__}, must be a TrajectoryReplayBuffer")
        if not buffer.auto_save:
            raise ConfigurationError("auto_save: the buffer of an experience pool must write; use MemoryStore instead")
        _check_capacity(buffer.retention.max_trajectories)
        self._buffer = buffer
        self.store_id = str(buffer.store_id)

    @classmethod
    def open(cls, path: str | Path, *, format: str = "pt", capacity: int | None = None) -> Self:  # noqa: A002
        """Open the pool's store at a directory or URL, or create it.

        Args:
            path: ``auto_save_path`` of the buffer.
            format: ``trajectory_format`` of the buffer.
            capacity: number of trajectories to keep, including the pool's own few records; ``None`` = no limit.

        Raises:
            StoreLockedError: another process writes there.
            CorruptStoreError: the existing store cannot be continued.
            ConfigurationError: an argument is out of range.
        """
        from trajstore.core.buffer.replay_buffer import TrajectoryReplayBuffer
        from trajstore.core.buffer.retention import Retention

        _check_capacity(capacity)  # before a directory is created and locked
        retention = Retention(max_trajectories=capacity)
        return cls(
            TrajectoryReplayBuffer(
                auto_save=True,
                auto_save_path=path,
                trajectory_format=format,
                enable_cache=False,
                retention=retention,
            )
        )

    def close(self) -> None:
        """Flush and close the buffer.

        Raises:
            StoreWriteError: something did not reach the disk.
        """
        self._buffer.close()

    def add_trajectories(self, trajectories: list[AgentTrajectory], /) -> list[int]:
        """As :meth:`PoolStore.add_trajectories`."""
        return self._buffer.add_trajectories(trajectories)

    def get(self, trajectory_id: int, /) -> AgentTrajectory:
        """As :meth:`PoolStore.get`."""
        trajectory = self._buffer.get(trajectory_id)
        if not isinstance(trajectory, AgentTrajectory):
            raise InvalidTrajectoryError(
                f"trajectory {trajectory_id} is a step trajectory; give the experience pool a directory of its own"
            )
        return trajectory

    def ids(self) -> list[int]:
        """As :meth:`PoolStore.ids`."""
        return [int(trajectory_id) for trajectory_id in self._buffer.trajectory_ids]

    def outcomes_given(self) -> Mapping[int, float]:
        """As :meth:`PoolStore.outcomes_given`: see :func:`trajstore.annotate`."""
        from trajstore.core.reading.late import outcomes_given  # not needed by a pool in memory

        def look(contents: Contents) -> dict[int, float]:
            index = contents.index
            given = outcomes_given(index, np.arange(index.first, index.end))
            there = np.flatnonzero(~np.isnan(given))
            return dict(zip(index["trajectory_id"][there].tolist(), given[there].tolist(), strict=True))

        return self._buffer.live.locked(look)

    def query(self, relation: str) -> Query:
        """Return a query over all records, including the pool's own and trajectories that left the pool."""
        return self._buffer.query(relation)

    def flush(self) -> None:
        """As :meth:`PoolStore.flush`."""
        self._buffer.flush()

    def evict(self, ids: Sequence[int], /) -> None:
        """As :meth:`PoolStore.evict`."""
        kept = set(self.ids())
        known = [trajectory_id for trajectory_id in ids if trajectory_id in kept]
        if known:
            self._buffer.evict(known)


def _check_capacity(capacity: int | None) -> None:
    if capacity is not None and capacity < LEAST_CAPACITY:
        raise ConfigurationError(f"capacity: {capacity}, must be at least {LEAST_CAPACITY} for an experience pool")


def store_options(name: str, value: Any) -> Mapping[str, Any] | None:
    """Return options of :meth:`BufferStore.open`; None for a store in memory.

    Raises:
        ConfigurationError: an option is invalid; the message names the first such option.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{name}: {shown(value)}, must be a mapping with a path, or null for memory")
    for problem in unknown(value, ("path", "format", "capacity")):
        raise ConfigurationError(f"{name}.{problem}")
    path_or_url(f"{name}.path", value.get("path"))
    text(f"{name}.format", value.get("format", "pt"))
    capacity = whole_or_none(f"{name}.capacity", value.get("capacity"), LEAST_CAPACITY)
    return value if capacity is None else {**value, "capacity": capacity}
