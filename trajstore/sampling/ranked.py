"""Draws by rank instead of by chance. Nothing is left to a generator.

Guarded as :class:`~trajstore.sampling.base.Sampler` says.
"""

from __future__ import annotations

import heapq
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch

from trajstore.arguments import finite, numbers, one_of, whole, whole_numbers, whole_or_none
from trajstore.columns.limits import UNKNOWN_VERSION
from trajstore.errors import ConfigurationError, EmptyBufferError
from trajstore.sampling.base import Additions, Drawn, IntArray, Sampler, Unit
from trajstore.sampling.states import OF_WHOM, check_names, check_sampler_state, described, tell_gone

Rank = tuple[float, float]


class RankedSampler(Sampler):
    """Takes the trajectories of the lowest rank; among equals those added first. A draw costs O(log n) for each.

    Args:
        max_uses: batches in which a trajectory may be; None = any number.
    """

    unit: Unit = "trajectory"
    name: ClassVar[str]
    _needed: ClassVar[tuple[str, ...]] = ("uses",)
    """What a state must have."""

    def __init__(self, max_uses: int | None) -> None:
        self._max_uses = whole_or_none(f"{self.name}: max_uses", max_uses, 1)
        self._uses: dict[int, int] = {}
        self._order: dict[int, int] = {}
        self._names: dict[int, int] = {}
        self._next = 0
        self._heap: list[tuple[Rank, int, int]] = []
        """(rank, order, id); an entry whose rank is not that of its trajectory is out of date."""

    @abstractmethod
    def _rank(self, number: int, uses: int) -> Rank:
        """Return the rank of a trajectory after so many uses."""

    def _take(self, number: int, version: int) -> None:
        """Take in what the rank of a trajectory is made of."""

    def _forget(self, number: int) -> None:
        """Forget what :meth:`_take` took in."""

    @property
    def ids(self) -> IntArray:
        return np.array(list(self._uses), np.int64)

    def added(self, additions: Additions) -> None:
        names = np.zeros(len(additions), np.int64) if additions.names is None else additions.names
        rows = zip(additions.ids.tolist(), additions.versions.tolist(), names.tolist(), strict=True)
        for number, version, name in rows:
            if number in self._uses:
                raise ConfigurationError(f"trajectory {number} was added twice to a sampler")
            self._names[number] = name
            self._take(number, version)
            self._uses[number] = 0
            self._order[number] = self._next
            self._next += 1
            self._push(number)

    def _push(self, number: int) -> None:
        uses = self._uses[number]
        if self._max_uses is None or uses < self._max_uses:
            heapq.heappush(self._heap, (self._rank(number, uses), self._order[number], number))

    def evicted(self, ids: Sequence[int] | IntArray) -> None:
        for number in np.asarray(ids).tolist():
            if self._uses.pop(number, None) is not None:
                del self._order[number], self._names[number]
                self._forget(number)

    def used(self, ids: IntArray, uses: IntArray) -> None:
        for number, count in zip(ids.tolist(), uses.tolist(), strict=True):
            if number in self._uses:
                self._uses[number] = count
        self._rebuild()

    def _rebuild(self) -> None:
        self._heap.clear()
        for number in self._uses:
            self._push(number)

    def draw(self, count: int, generator: torch.Generator, first: int | None = None) -> Drawn:
        count = whole("count", count, 1)
        oldest = -1 if first is None else self._order.get(first, -1)
        drawn: dict[int, None] = {}
        outside: list[tuple[Rank, int, int]] = []
        while self._heap and len(drawn) < count:
            entry = heapq.heappop(self._heap)
            rank, order, number = entry
            if self._order.get(number) != order or number in drawn or self._rank(number, self._uses[number]) != rank:
                continue
            if order < oldest:
                outside.append(entry)
                continue
            drawn[number] = None
        for entry in outside:
            heapq.heappush(self._heap, entry)
        if not drawn:
            raise EmptyBufferError(
                "cannot sample from an empty buffer"
                if not self._uses
                else f"cannot sample: none of {len(self._uses)} trajectories is in the window"
                if self._max_uses is None
                else f"cannot sample: each of {len(self._uses)} trajectories was used {self._max_uses} times"
            )
        for number in drawn:
            self._uses[number] += 1
            self._push(number)
        return Drawn(np.array(list(drawn), np.int64), np.zeros(len(drawn), np.int64))

    def state_dict(self) -> dict[str, Any]:
        used = {number: uses for number, uses in self._uses.items() if uses}
        return {OF_WHOM: self._described(), "uses": used, "names": {number: self._names[number] for number in used}}

    def _described(self) -> dict[str, Any]:
        return described(self.name, {}, {"max_uses": self._max_uses})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_sampler_state(state, self._described(), self._needed)
        then: Mapping[int, int] = state.get("names", dict.fromkeys(state["uses"], 0))
        ids = np.array(list(then), np.int64)
        names, here = (
            np.array([known.get(number, 0) for number in ids.tolist()], np.int64) for known in (then, self._names)
        )
        check_names("what a sampler says", ids, names, here)
        if not any(number in self._uses for number in then):
            tell_gone("a sampler", ids, len(self._uses))
        for number in self._uses:
            self._uses[number] = int(state["uses"].get(number, 0))
        self._rebuild()

    def figures(self) -> dict[str, float]:
        limit = self._max_uses
        return {"used_up_trajectories": float(sum(1 for uses in self._uses.values() if limit and uses >= limit))}


class FreshestSampler(RankedSampler):
    """Takes the trajectories with the highest ``version - decay * uses``; among equals those added first.

    The rule is that of Trinity-RFT's priority queue.

    Args:
        decay: versions that one use costs.
        max_uses: batches in which a trajectory may be; None = any number.

    Trajectories without a known version rank as version 0.
    """

    name = "freshest"

    def __init__(self, decay: float = 2.0, max_uses: int | None = None) -> None:
        super().__init__(max_uses)
        self._decay = finite("freshest: decay", decay, 0)
        self._version: dict[int, int] = {}

    def _rank(self, number: int, uses: int) -> Rank:
        return self._decay * uses - self._version[number], 0.0

    def _take(self, number: int, version: int) -> None:
        self._version[number] = 0 if version == UNKNOWN_VERSION else version

    def _forget(self, number: int) -> None:
        del self._version[number]

    def _described(self) -> dict[str, Any]:
        return described(self.name, {}, {"decay": self._decay, "max_uses": self._max_uses})


class LeastUsedSampler(RankedSampler):
    """Takes the trajectories that were drawn least often, so that all take turns.

    Among those that were drawn equally often the one of the best value comes first: values are given with
    :meth:`value`; without, all have 0. Among equal values the one that was added first.

    Args:
        best: which value is best: the ``"lowest"`` or the ``"highest"``.
        max_uses: batches in which a trajectory may be; None = any number.
    """

    name = "least_used"
    _needed = ("uses", "values")

    def __init__(self, best: Literal["lowest", "highest"] = "lowest", max_uses: int | None = None) -> None:
        one_of("least_used: best", best, ("lowest", "highest"))
        super().__init__(max_uses)
        self._sign = 1.0 if best == "lowest" else -1.0
        self._values: dict[int, float] = {}

    @property
    def worst_value(self) -> float:
        """A value behind which no other stands: for trajectories that have none, where others do."""
        return self._sign * sys.float_info.max

    def _rank(self, number: int, uses: int) -> Rank:
        return float(uses), self._sign * self._values.get(number, 0.0)

    def _forget(self, number: int) -> None:
        self._values.pop(number, None)

    def value(self, ids: IntArray, values: npt.ArrayLike) -> None:
        """Give trajectories their values, ``[n]``; ids that are not there are passed over.

        Raises:
            ConfigurationError: a value is not a finite number; nothing was changed.
        """
        ids, given = whole_numbers("ids", ids), numbers("values", values)
        if given.shape != ids.shape or not np.all(np.isfinite(given)):
            raise ConfigurationError(f"least_used: values: {len(ids)} trajectories need as many finite ones")
        for number, value in zip(ids.tolist(), given.tolist(), strict=True):
            if number in self._uses:
                self._values[number] = value
                self._push(number)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        names = {number: self._names[number] for number in self._values}
        return {**state, "names": {**state["names"], **names}, "values": dict(self._values)}

    def _described(self) -> dict[str, Any]:
        best = "lowest" if self._sign > 0 else "highest"
        return described(self.name, {}, {"best": best, "max_uses": self._max_uses})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._values = {number: float(value) for number, value in state["values"].items() if number in self._uses}
        self._rebuild()
