"""Draws by rank instead of by chance: the newest first, and each use makes a trajectory older."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trajstore.columns.limits import UNKNOWN_VERSION
from trajstore.errors import ConfigurationError, EmptyBufferError
from trajstore.sampling.base import Additions, Drawn, IntArray, Sampler, Unit


class FreshestSampler(Sampler):
    """Takes the trajectories with the highest ``version - decay * uses``; among equals those added first.

    The rule is that of Trinity-RFT's priority queue. Nothing is left to chance.

    Args:
        decay: versions that one use costs.
        max_uses: batches in which a trajectory may be; None = any number.

    Trajectories without a known version rank as version 0.
    """

    unit: Unit = "trajectory"

    def __init__(self, decay: float = 2.0, max_uses: int | None = None) -> None:
        if not 0 <= decay < np.inf or (max_uses is not None and max_uses < 1):
            raise ConfigurationError(f"decay {decay} must be finite, at least 0; max_uses {max_uses} at least 1")
        self._decay = decay
        self._max_uses = max_uses
        self._version: dict[int, int] = {}
        self._uses: dict[int, int] = {}
        self._order: dict[int, int] = {}
        self._next = 0
        self._heap: list[tuple[float, int, int, int]] = []
        """(-priority, order, uses, id); an entry whose uses are not those of its trajectory is out of date."""

    @property
    def ids(self) -> IntArray:
        return np.array(list(self._version), np.int64)

    def added(self, additions: Additions) -> None:
        for number, version in zip(additions.ids.tolist(), additions.versions.tolist(), strict=True):
            if number in self._version:
                raise ConfigurationError(f"trajectory {number} was added twice to a sampler")
            self._version[number] = 0 if version == UNKNOWN_VERSION else version
            self._uses[number] = 0
            self._order[number] = self._next
            self._next += 1
            self._push(number)

    def _push(self, number: int) -> None:
        uses = self._uses[number]
        if self._max_uses is None or uses < self._max_uses:
            priority = self._version[number] - self._decay * uses
            heapq.heappush(self._heap, (-priority, self._order[number], uses, number))

    def evicted(self, ids: Sequence[int] | IntArray) -> None:
        for number in np.asarray(ids).tolist():
            if self._version.pop(number, None) is not None:
                del self._uses[number], self._order[number]

    def draw(self, count: int, generator: torch.Generator, first: int | None = None) -> Drawn:
        oldest = -1 if first is None else self._order.get(first, -1)
        drawn: list[int] = []
        outside: list[tuple[float, int, int, int]] = []
        while self._heap and len(drawn) < count:
            entry = heapq.heappop(self._heap)
            _, order, uses, number = entry
            if self._uses.get(number) != uses or self._order[number] != order:
                continue
            if order < oldest:
                outside.append(entry)
                continue
            drawn.append(number)
        for entry in outside:
            heapq.heappush(self._heap, entry)
        if not drawn:
            raise EmptyBufferError(
                "cannot sample from an empty buffer"
                if not self._version
                else f"cannot sample: each of {len(self._version)} trajectories was used {self._max_uses} times"
            )
        for number in drawn:
            self._uses[number] += 1
            self._push(number)
        return Drawn(np.array(drawn, np.int64), np.zeros(len(drawn), np.int64))

    def state_dict(self) -> dict[str, Any]:
        return {"uses": {number: uses for number, uses in self._uses.items() if uses}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for number, uses in state["uses"].items():
            if number in self._uses:
                self._uses[number] = int(uses)
        self._heap.clear()
        for number in self._version:
            self._push(number)

    def figures(self) -> dict[str, float]:
        limit = self._max_uses
        return {"used_up_trajectories": float(sum(1 for uses in self._uses.values() if limit and uses >= limit))}
