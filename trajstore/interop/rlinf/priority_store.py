"""A bounded priority store of trajectories, as in RLinf's asynchronous PPO worker. In memory only."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from typing import Any

import torch

from trajstore._core.base.arguments import whole
from trajstore.trajectory import Trajectory

Priority = tuple[float, float]
"""Lowest and mean policy version, compared in this order."""


class PriorityStore:
    """Keeps the ``maxsize`` trajectories of highest priority; of equal ones, the oldest is dropped first.

    They are kept as given, not copied.

    Args:
        maxsize: maximum number of trajectories.

    Raises:
        ConfigurationError: ``maxsize`` is not positive.
    """

    def __init__(self, maxsize: int) -> None:
        self.maxsize = whole("maxsize", maxsize, 1)
        self._entries: list[tuple[Priority, int, Trajectory]] = []
        self._added = 0
        self._used: set[int] = set()
        self._discarded_unused = 0

    def __len__(self) -> int:
        """Number of trajectories."""
        return len(self._entries)

    def add(self, priority: Priority, data: Trajectory) -> bool:
        """Add a trajectory; return whether it was stored. A full store refuses those below its lowest priority."""
        if len(self._entries) == self.maxsize and priority < self._entries[0][0]:
            self._discarded_unused += 1
            return False
        insort(self._entries, (priority, self._added, data), key=lambda entry: entry[:2])
        self._added += 1
        if len(self._entries) > self.maxsize:
            self._forget(self._entries.pop(0)[1])
        return True

    def topn(self, n: int) -> list[Trajectory]:
        """Return the ``n`` trajectories of highest priority, highest first, and mark them as used."""
        chosen = self._entries[-n:] if n > 0 else []
        self._used.update(number for _, number, _ in chosen)
        return [data for _, _, data in reversed(chosen)]

    def remove_below(self, threshold: float) -> None:
        """Drop the trajectories whose lowest policy version is below a threshold."""
        for (lowest, _), number, _ in self._entries:
            if lowest < threshold:
                self._forget(number)
        self._entries = [entry for entry in self._entries if entry[0][0] >= threshold]

    def get_metric(self) -> dict[Any, Any]:
        """Return ``{"ratio": share of all steps}`` per policy version, and ``"discarded_unused"``."""
        counts: Counter[int] = Counter()
        for _, _, data in self._entries:
            if data.versions is not None:
                found, times = torch.unique(data.versions.reshape(-1).round().to(torch.int64), return_counts=True)
                counts.update(dict(zip(found.tolist(), times.tolist(), strict=True)))
        total = counts.total()
        metric: dict[Any, Any] = {version: {"ratio": count / total} for version, count in counts.items()}
        return metric | {"discarded_unused": self._discarded_unused}

    def _forget(self, number: int) -> None:
        if number in self._used:
            self._used.discard(number)
        else:
            self._discarded_unused += 1
