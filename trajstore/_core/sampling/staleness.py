"""Limits trajectories to recent policy versions, with a minimum per task: a factor.

Needs the same lock as :class:`~trajstore._core.sampling.base.Sampler`.
"""

from __future__ import annotations

import bisect
import heapq
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trajstore._core.base.arguments import whole, whole_or_none
from trajstore._core.base.types import FloatArray, IntArray
from trajstore._core.columns.limits import UNKNOWN_VERSION
from trajstore._core.sampling.base import Additions
from trajstore._core.sampling.factors import Factor, warn_unknown
from trajstore._core.sampling.roster import Growing
from trajstore._core.sampling.states import check_state
from trajstore._core.store.run_ids import rank_of_id
from trajstore.errors import ConfigurationError

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Task:
    """A task's live entries: number of young ones, and the older ones as (version, entry), ascending."""

    floor: int
    young: int = 0
    stale: list[tuple[int, int]] = field(default_factory=list)
    held: int = 0
    """Number of the newest stale entries that the floor still admits."""


class Staleness(Factor):
    """Draws only recent policy versions, with a minimum number of trajectories per task.

    Args:
        max_age: maximum number of versions behind the newest of all.
        floor: each task's newest trajectories that are drawn whatever their age, so that rarely rolled out tasks do not
            vanish; for trajectories without a task only ``max_age`` counts. The metric ``starving_tasks`` counts tasks
            that depend on it.

    Trajectories without a known version are not drawn, nor are those that are too old when they are added, as after a
    restart that counts versions from 0 again; the first of each triggers a warning.
    """

    name = "staleness"

    def __init__(self, max_age: int, floor: int = 0) -> None:
        self.max_age = whole("staleness: max_age", max_age, 0)
        self.floor = floor = whole("staleness: floor", floor, 0)
        self.needs_tasks = floor > 0
        self._weight = Growing(np.float64)
        self._version = Growing(np.int64)
        self._task_of: list[str] = []
        self._tasks: dict[str, _Task] = {}
        self._ageing: list[tuple[int, int]] = []
        """Heap of (version, entry) of the young entries."""
        self._gone: set[int] = set()
        self._newest: int | None = None
        self._newest_of: dict[int, int] = {}
        """Newest version of each rank: the order of additions is that of time only within a store."""
        self._told = self._told_late = False

    @property
    def free(self) -> Mapping[str, Any]:
        return {"max_age": self.max_age, "floor": self.floor}

    def added(self, entries: IntArray, additions: Additions) -> IntArray:
        if self.needs_tasks and additions.tasks is None:
            raise ConfigurationError("staleness: a floor needs to know the task of every trajectory")
        count = len(additions)
        self._weight.append(0.0, count)
        self._version.append(additions.versions, count)
        self._told = self._told or warn_unknown(self.name, additions)
        versions = additions.versions.tolist()
        tasks = additions.tasks if additions.tasks is not None else [""] * count
        self._task_of += tasks
        changed: set[int] = set()
        for entry, number, version in zip(entries.tolist(), additions.ids.tolist(), versions, strict=True):
            if version == UNKNOWN_VERSION:
                continue
            rank = rank_of_id(number)
            before = self._newest_of.get(rank, version)
            self._newest_of[rank] = max(before, version)
            if not self._told_late and version < before - self.max_age:
                self._told_late = True
                logger.warning(
                    "staleness: a trajectory of version %d is added after one of %d, so with max_age %d it is not "
                    "drawn; if versions began again, let the trainer continue its count, as with its own step",
                    *(version, before, self.max_age),
                )
            self._newest = version if self._newest is None else max(self._newest, version)
            task = self._tasks.setdefault(self._task_of[entry], _Task(self.floor if self._task_of[entry] else 0))
            task.young += 1
            self._weight.values[entry] = 1.0
            heapq.heappush(self._ageing, (version, entry))
            self._hold(task, changed)
        self._expire(changed)
        return np.array(sorted(entry for entry in changed if entry < entries[0]), np.int64)

    def reached(self, version: int) -> IntArray:
        self._newest = version if self._newest is None else max(self._newest, version)
        changed: set[int] = set()
        self._expire(changed)
        return np.array(sorted(changed), np.int64)

    def _expire(self, changed: set[int]) -> None:
        while self._ageing and self._newest is not None and self._ageing[0][0] < self._newest - self.max_age:
            version, entry = heapq.heappop(self._ageing)
            if entry in self._gone:
                self._gone.discard(entry)
                continue
            task = self._tasks[self._task_of[entry]]
            self._release(task, changed)
            task.young -= 1
            bisect.insort(task.stale, (version, entry))
            self._weight.values[entry] = 0.0
            changed.add(entry)
            self._hold(task, changed)

    def _release(self, task: _Task, changed: set[int]) -> None:
        for _, entry in task.stale[len(task.stale) - task.held :]:
            self._weight.values[entry] = 0.0
            changed.add(entry)
        task.held = 0

    def _hold(self, task: _Task, changed: set[int]) -> None:
        wanted = min(max(0, task.floor - task.young), len(task.stale))
        if wanted < task.held:
            going = task.stale[len(task.stale) - task.held : len(task.stale) - wanted]
        else:
            going = task.stale[len(task.stale) - wanted : len(task.stale) - task.held]
        for _, entry in going:
            self._weight.values[entry] = 0.0 if wanted < task.held else 1.0
            changed.add(entry)
        task.held = wanted

    def evicted(self, entries: IntArray) -> IntArray:
        changed: set[int] = set()
        for entry in entries.tolist():
            version = int(self._version.values[entry])
            if version == UNKNOWN_VERSION:
                continue
            task = self._tasks[self._task_of[entry]]
            at = bisect.bisect_left(task.stale, (version, entry))
            if at < len(task.stale) and task.stale[at] == (version, entry):
                self._release(task, changed)
                del task.stale[at]
            else:
                self._gone.add(entry)
                task.young -= 1
            self._weight.values[entry] = 0.0
            self._hold(task, changed)
            if not task.young and not task.stale:
                del self._tasks[self._task_of[entry]]
        return np.array(sorted(changed), np.int64)

    def weights(self, entries: IntArray) -> FloatArray:
        weights: FloatArray = self._weight.values[entries]
        return weights

    def compacted(self, kept: IntArray) -> None:
        place = {entry: at for at, entry in enumerate(kept.tolist())}
        self._weight.keep(kept)
        self._version.keep(kept)
        self._task_of = [self._task_of[entry] for entry in kept.tolist()]
        self._ageing = [(version, place[entry]) for version, entry in self._ageing if entry in place]
        heapq.heapify(self._ageing)
        self._gone.clear()
        for task in self._tasks.values():
            task.stale = [(version, place[entry]) for version, entry in task.stale]

    def state(self, entries: IntArray) -> dict[str, Any]:
        return {"newest": self._newest}  # its trajectory may have been evicted

    def read(self, state: Mapping[str, Any], count: int) -> dict[str, Any]:
        check_state(state, ("newest",))
        return {"newest": whole_or_none("state: newest", state["newest"], UNKNOWN_VERSION)}

    def take_up(self, entries: IntArray, others: IntArray, state: Mapping[str, Any]) -> None:
        if state["newest"] is not None:
            self.reached(state["newest"])

    def figures(self, alive: IntArray) -> dict[str, float]:
        return {
            "eligible_trajectories": float(np.count_nonzero(self._weight.values[alive])),
            "starving_tasks": float(sum(1 for task in self._tasks.values() if task.held)),
        }
