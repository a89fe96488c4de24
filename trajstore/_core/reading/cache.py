"""Cache policy: chooses the trajectories that stay in memory. Pure; does not hold the memory itself.

Guarded by ``Contents.lock``.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator

from trajstore.errors import ConfigurationError


class TrajectoryCache:
    """FIFO cache of trajectories, bounded by count and bytes.

    Args:
        max_trajectories: maximum number; None for no bound.
        max_bytes: maximum bytes of their columns; None for no bound.
    """

    def __init__(self, max_trajectories: int | None, max_bytes: int | None = None) -> None:
        for name, bound in (("cache_size", max_trajectories), ("cache_bytes", max_bytes)):
            if bound is not None and bound < 0:
                raise ConfigurationError(f"{name}: {bound}, must not be negative")
        self._max_trajectories = math.inf if max_trajectories is None else max_trajectories
        self._max_bytes = math.inf if max_bytes is None else max_bytes
        self._sizes: OrderedDict[int, int] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, trajectory_id: int) -> bool:
        return trajectory_id in self._sizes

    def __iter__(self) -> Iterator[int]:
        return iter(self._sizes)

    def put(self, trajectory_id: int, nbytes: int) -> None:
        """Add a trajectory; one already cached keeps its position. Call :meth:`overflow` afterwards."""
        if trajectory_id not in self._sizes:
            self._sizes[trajectory_id] = nbytes
            self.nbytes += nbytes

    def overflow(self) -> list[int]:
        """Drop the oldest until the bounds hold again; return the dropped ids."""
        dropped = []
        while self._sizes and (len(self._sizes) > self._max_trajectories or self.nbytes > self._max_bytes):
            trajectory_id, nbytes = self._sizes.popitem(last=False)
            self.nbytes -= nbytes
            dropped.append(trajectory_id)
        return dropped

    def discard(self, trajectory_id: int) -> None:
        """Drop a trajectory if it is cached."""
        self.nbytes -= self._sizes.pop(trajectory_id, 0)
