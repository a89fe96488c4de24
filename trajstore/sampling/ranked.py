"""Draws by rank instead of by chance. Nothing is left to a generator.

Guarded as :class:`~trajstore.sampling.base.Sampler` says.
"""

from __future__ import annotations

import heapq
import operator
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from trajstore.arguments import INT64_MAX, finite, numbers, one_of, whole, whole_numbers, whole_or_none
from trajstore.columns.limits import UNKNOWN_VERSION
from trajstore.errors import ConfigurationError, EmptyBufferError
from trajstore.sampling.base import Additions, Drawn, Fits, FloatArray, IntArray, Sampler, Unit
from trajstore.sampling.states import OF_WHOM, check_names, check_sampler_state, described, mapping_in, tell_gone

_T = TypeVar("_T")
_Number = TypeVar("_Number", float, FloatArray)


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
        self._own: dict[int, float] = {}
        """What the rank of each trajectory is made of, besides its uses."""
        self._order: dict[int, int] = {}
        self._names: dict[int, int] = {}
        self._next = 0
        self._heap: list[tuple[float, float, int, int]] = []
        """(*rank, order, id); an entry whose rank is not that of its trajectory is out of date."""
        self._oldest = 0
        """Order of the oldest trajectory that is in the heap: those before it were not in the last draw's window."""

    @abstractmethod
    def _rank(self, own: _Number, uses: _Number) -> tuple[_Number, _Number]:
        """Return the rank of a trajectory after so many uses, or of several, ``[n]``."""

    def _own_at_first(self, version: int) -> float:
        """Return what the rank of a trajectory that is added is made of."""
        return 0.0

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
            self._own[number] = self._own_at_first(version)
            self._uses[number] = 0
            self._order[number] = self._next
            self._next += 1
        if len(additions) > len(self._heap):
            self._rebuild()
        else:
            for number in additions.ids.tolist():
                self._push(number)

    def _push(self, number: int) -> None:
        uses = self._uses[number]
        if self._max_uses is None or uses < self._max_uses:
            rank = self._rank(self._own[number], float(uses))
            heapq.heappush(self._heap, (*rank, self._order[number], number))

    def evicted(self, ids: Sequence[int] | IntArray) -> None:
        for number in np.asarray(ids).tolist():
            if self._uses.pop(number, None) is not None:
                del self._order[number], self._names[number], self._own[number]

    def used(self, ids: IntArray, uses: IntArray) -> None:
        for number, count in zip(ids.tolist(), uses.tolist(), strict=True):
            if number in self._uses:
                self._uses[number] = count
        self._rebuild()

    def _rebuild(self) -> None:
        """Make the heap anew, of the window alone."""
        order = np.fromiter(takewhile(partial(operator.le, self._oldest), reversed(self._order.values())), np.int64)
        # All of these dicts are in the order of addition.
        ids = np.fromiter(reversed(self._order), np.int64, len(order))
        own = np.fromiter(reversed(self._own.values()), np.float64, len(order))
        uses = np.fromiter(reversed(self._uses.values()), np.float64, len(order))
        if self._max_uses is not None:
            left = uses < self._max_uses
            order, ids, own, uses = order[left], ids[left], own[left], uses[left]
        first, second = self._rank(own, uses)
        rows = np.lexsort((order, second, first))  # what is sorted is a heap
        self._heap = list(zip(*(column[rows].tolist() for column in (first, second, order, ids)), strict=True))

    def _look_from(self, oldest: int) -> None:
        """Draw from a window that begins here; a heap of which most is outside, or out of date, is made anew.

        A window that moves on with what is added costs nothing more: what it leaves behind goes when it is met.
        """
        wider, self._oldest = oldest < self._oldest, oldest
        if wider or len(self._heap) > 64 + 4 * min(len(self._uses), self._next - oldest):
            self._rebuild()

    def draw(self, count: int, generator: torch.Generator, first: int | None = None, fits: Fits | None = None) -> Drawn:
        count = whole("count", count, 1)
        self._look_from(0 if first is None else self._order.get(first, 0))
        drawn: dict[int, None] = {}
        while self._heap and len(drawn) < count:
            *rank, order, number = heapq.heappop(self._heap)
            if self._order.get(number) != order or order < self._oldest:
                continue
            if self._rank(self._own[number], float(self._uses[number])) == tuple(rank):
                drawn[number] = None
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
        uses = _by_id(state, "uses", lambda what, value: whole(what, value, 0))
        then = dict.fromkeys(uses, 0)
        if state.get("names") is not None:
            then = _by_id(state, "names", lambda what, value: whole(what, value, -INT64_MAX - 1))
        ids = np.array(list(then), np.int64)
        names = np.array(list(then.values()), np.int64)
        here = np.array([self._names.get(number, 0) for number in ids.tolist()], np.int64)
        check_names("what a sampler says", ids, names, here)
        if not any(number in self._uses for number in then):
            tell_gone("a sampler", ids, len(self._uses))
        for number in self._uses:
            self._uses[number] = uses.get(number, 0)
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

    def _rank(self, own: _Number, uses: _Number) -> tuple[_Number, _Number]:
        return self._decay * uses - own, 0.0 * own

    def _own_at_first(self, version: int) -> float:
        return 0.0 if version == UNKNOWN_VERSION else float(version)

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

    @property
    def worst_value(self) -> float:
        """A value behind which no other stands: for trajectories that have none, where others do."""
        return self._sign * sys.float_info.max

    def _rank(self, own: _Number, uses: _Number) -> tuple[_Number, _Number]:
        return uses, self._sign * own

    def value(self, ids: IntArray, values: npt.ArrayLike) -> None:
        """Give trajectories their values, ``[n]``; ids that are not there are passed over.

        Raises:
            ConfigurationError: a value is not a finite number; nothing was changed.
        """
        ids, given = whole_numbers("ids", ids), numbers("values", values)
        if given.shape != ids.shape or not np.all(np.isfinite(given)):
            raise ConfigurationError(f"least_used: values: {len(ids)} trajectories need as many finite ones")
        known = {
            number: value for number, value in zip(ids.tolist(), given.tolist(), strict=True) if number in self._own
        }
        self._own |= known
        if 4 * len(known) > len(self._heap):  # else as many entries are out of date, and met one by one
            self._rebuild()
        else:
            for number in known:
                self._push(number)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        values = {number: value for number, value in self._own.items() if value}
        names = {number: self._names[number] for number in values}
        return {**state, "names": {**state["names"], **names}, "values": values}

    def _described(self) -> dict[str, Any]:
        best = "lowest" if self._sign > 0 else "highest"
        return described(self.name, {}, {"best": best, "max_uses": self._max_uses})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        values: dict[int, float] = {}
        if isinstance(state, Mapping) and "values" in state:
            most = sys.float_info.max
            values = _by_id(state, "values", lambda what, value: finite(what, value, -most, most))
        super().load_state_dict(state)
        self._own = {number: values.get(number, 0.0) for number in self._own}
        self._rebuild()


def _by_id(state: Mapping[str, Any], name: str, read: Callable[[str, Any], _T]) -> dict[int, _T]:
    """Return what a state says of trajectories by id.

    Raises:
        ConfigurationError: it is no dict, a key is no id, or ``read`` refuses a value.
    """
    found = mapping_in(state, name)
    return {
        whole(f"state: {name}: id", number, -INT64_MAX - 1): read(f"state: {name}", value)
        for number, value in found.items()
    }
