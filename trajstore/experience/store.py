"""Where the pool keeps its records: what it needs of a trajectory store, and two stores that give it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from trajstore.errors import InvalidTrajectoryError, TrajectoryUnavailableError
from trajstore.trajectory import AgentTrajectory, AnyTrajectory


class PoolStore(Protocol):
    """A store of agent trajectories under ascending ids.

    What a crash leaves is what was there after some number of additions: never a later one without the
    earlier ones.
    """

    @property
    def durable(self) -> bool:
        """Whether the records outlive the process."""

    def add_trajectories(self, trajectories: list[AgentTrajectory], /) -> list[int]:
        """Take private copies and return their ids, ascending and above all earlier ones. All or none."""

    def get(self, trajectory_id: int, /) -> AgentTrajectory:
        """Return a trajectory; the caller does not change it.

        Raises:
            TrajectoryUnavailableError: no such id, or no longer kept.
        """

    def ids(self) -> list[int]:
        """Return the ids that are kept, ascending."""

    def flush(self) -> None:
        """Return when every addition is as durable as the store can make it."""

    def evict(self, ids: Sequence[int], /) -> None:
        """Give up trajectories. Ids that are not kept are no error."""


class MemoryStore:
    """Keeps records in this process only."""

    durable = False

    def __init__(self) -> None:
        self._kept: dict[int, AgentTrajectory] = {}
        self._next = 0

    def add_trajectories(self, trajectories: list[AgentTrajectory], /) -> list[int]:
        for trajectory in trajectories:
            self._kept[self._next] = copy.deepcopy(trajectory)
            self._next += 1
        return list(range(self._next - len(trajectories), self._next))

    def get(self, trajectory_id: int, /) -> AgentTrajectory:
        try:
            return self._kept[trajectory_id]
        except KeyError:
            raise TrajectoryUnavailableError(f"trajectory {trajectory_id} is not in the pool's memory") from None

    def ids(self) -> list[int]:
        return list(self._kept)

    def flush(self) -> None:
        """Do nothing: memory has nothing to wait for."""

    def evict(self, ids: Sequence[int], /) -> None:
        for trajectory_id in ids:
            self._kept.pop(trajectory_id, None)


class ReplayBuffer(Protocol):
    """What :class:`BufferStore` uses of ``TrajectoryReplayBuffer``."""

    @property
    def trajectory_ids(self) -> Iterable[Any]:
        """The ids that are kept, ascending."""

    def add_trajectories(self, trajectories: list[AnyTrajectory], /) -> list[int]: ...

    def get(self, trajectory_id: int, /) -> AnyTrajectory: ...

    def flush(self) -> Any: ...

    def evict(self, ids: Sequence[int], /) -> Any: ...


class BufferStore:
    """The pool's records in a ``TrajectoryReplayBuffer`` that writes what it is given (``auto_save=True``).

    The buffer belongs to the pool: a capacity that evicts its oldest trajectories would evict the pool's
    journal, so give it none, or far more than ``tasks x max_trajectories_per_task``. Closing it is the
    caller's affair.
    """

    durable = True

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer

    def add_trajectories(self, trajectories: list[AgentTrajectory], /) -> list[int]:
        return [int(trajectory_id) for trajectory_id in self._buffer.add_trajectories(list(trajectories))]

    def get(self, trajectory_id: int, /) -> AgentTrajectory:
        trajectory = self._buffer.get(trajectory_id)
        if not isinstance(trajectory, AgentTrajectory):
            raise InvalidTrajectoryError(
                f"trajectory {trajectory_id} is a step trajectory; give the experience pool a directory of its own"
            )
        return trajectory

    def ids(self) -> list[int]:
        return [int(trajectory_id) for trajectory_id in self._buffer.trajectory_ids]

    def flush(self) -> None:
        self._buffer.flush()

    def evict(self, ids: Sequence[int], /) -> None:
        kept = set(self.ids())
        known = [trajectory_id for trajectory_id in ids if trajectory_id in kept]
        if known:
            self._buffer.evict(known)
