"""What makes some trajectories likelier than others: age, staleness, use. Factors multiply.

Guarded as :class:`~trajstore.sampling.base.Sampler` says.
"""

from __future__ import annotations

import bisect
import heapq
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from trajstore.arguments import finite, one_of, whole, whole_or_none
from trajstore.columns.limits import UNKNOWN_VERSION
from trajstore.errors import ConfigurationError
from trajstore.sampling.base import Additions, FloatArray, IntArray
from trajstore.sampling.roster import Growing

logger = logging.getLogger(__name__)

_NONE = np.zeros(0, np.int64)

_REBASE_AFTER = 500.0
"""Half-lives after which weights are scaled anew: 2 ** 500 is far from what a float64 cannot hold."""


class Factor(ABC):
    """A weight of each trajectory, at least 0. Entries are those of the sampler's roster."""

    name: str
    needs_tasks = False

    @property
    def fixed(self) -> Mapping[str, Any]:
        """Arguments without which a state means something else."""
        return {}

    @property
    def free(self) -> Mapping[str, Any]:
        """Arguments that a resumed run may change."""
        return {}

    @abstractmethod
    def added(self, entries: IntArray, additions: Additions) -> IntArray:
        """Take entries in; return older entries whose weight has changed by that."""

    def evicted(self, entries: IntArray) -> IntArray:
        """Let entries go; return others whose weight has changed by that."""
        return _NONE

    def drawn(self, entries: IntArray) -> IntArray:
        """Note a batch, by its different entries; return all whose weight has changed by that."""
        return _NONE

    def used(self, entries: IntArray, uses: IntArray) -> IntArray:
        """Count entries as drawn so often already; return all whose weight has changed by that."""
        return _NONE

    def reached(self, version: int) -> IntArray:
        """Count ages from a policy version, if it is the newest; return entries whose weight has changed by that."""
        return _NONE

    @abstractmethod
    def weights(self, entries: IntArray) -> FloatArray:
        """Return the present weight of entries."""

    @abstractmethod
    def compacted(self, kept: IntArray) -> None:
        """Keep these entries only; the first of them is now entry 0."""

    def state(self, entries: IntArray) -> dict[str, Any]:
        """Return what cannot be worked out from the trajectories themselves; tensors are row by row of ``entries``."""
        return {}

    def take_up(self, entries: IntArray, others: IntArray, state: Mapping[str, Any]) -> None:  # noqa: B027  # most have no state
        """Take up what :meth:`state` said of these entries; of the others it knew nothing: they came later."""

    def figures(self, alive: IntArray) -> dict[str, float]:
        """Return numbers for metrics; ``alive`` are the entries that are there."""
        return {}


class Recency(Factor):
    """Newer trajectories are likelier: the weight halves with every half-life.

    Args:
        half_life: age at which a trajectory is half as likely as the newest.
        by: what age is counted in: trajectories added since, or policy versions. Trajectories without a known version
            are not drawn by versions; the first is warned of.

    A trajectory a thousand half-lives older than the newest weighs 0, and is not drawn even if no other is left.
    """

    name = "recency"

    def __init__(self, half_life: float, by: Literal["trajectories", "versions"] = "trajectories") -> None:
        self.half_life = finite("recency: half_life", half_life, 0, above=True)
        one_of("recency: by", by, ("trajectories", "versions"))
        self.by = by
        self._stamp = Growing(np.int64)
        self._next = 0
        self._base: float | None = None
        self._told = False

    @property
    def fixed(self) -> Mapping[str, Any]:
        return {"by": self.by}

    @property
    def free(self) -> Mapping[str, Any]:
        return {"half_life": self.half_life}

    def added(self, entries: IntArray, additions: Additions) -> IntArray:
        count = len(additions)
        if self.by == "trajectories":
            self._stamp.append(np.arange(self._next, self._next + count), count)
            self._next += count
        else:
            self._stamp.append(additions.versions, count)
            self._told = self._told or _warn_unknown(self.name, additions)
        known = self._stamp.values[entries]
        known = known[known != UNKNOWN_VERSION]
        if not len(known):
            return _NONE
        newest = float(known.max())
        if self._base is None:
            self._base = newest
            return np.arange(entries[0])
        if newest - self._base <= _REBASE_AFTER * self.half_life:
            return _NONE
        self._base = newest
        return np.arange(entries[0])

    def weights(self, entries: IntArray) -> FloatArray:
        stamp = self._stamp.values[entries]
        age = (stamp.astype(np.float64) - (self._base or 0.0)) / self.half_life
        weights: FloatArray = np.where(stamp == UNKNOWN_VERSION, 0.0, np.exp2(np.clip(age, -1074, 1000)))
        return weights

    def compacted(self, kept: IntArray) -> None:
        self._stamp.keep(kept)

    def state(self, entries: IntArray) -> dict[str, Any]:
        return {"stamp": torch.from_numpy(self._stamp.values[entries]), "next": self._next, "base": self._base}

    def take_up(self, entries: IntArray, others: IntArray, state: Mapping[str, Any]) -> None:
        self._base = state["base"]
        if self.by == "versions":
            return
        stamps, self._next = np.asarray(state["stamp"], np.int64), int(state["next"])
        self._stamp.values[entries] = stamps
        later = others > (entries[-1] if len(entries) else -1)
        came = int(np.count_nonzero(later))
        self._stamp.values[others[later]] = np.arange(self._next, self._next + came)
        self._next += came
        # What was evicted then and is back, as after a rollback, is as old as what came after it.
        self._stamp.values[others[~later]] = stamps[np.searchsorted(entries, others[~later])]


@dataclass(slots=True)
class _Task:
    """Live entries of a task: how many are young enough, and which are older, as (version, entry), ascending."""

    young: int = 0
    stale: list[tuple[int, int]] = field(default_factory=list)
    held: int = 0
    """How many of the newest stale ones are drawn all the same, because of the floor."""


class Staleness(Factor):
    """Only trajectories of recent policy versions are drawn, but of every task a few.

    Args:
        max_age: how many versions a trajectory may lie behind the newest version of all.
        floor: of each task the newest this many are drawn whatever their age, so that tasks that are rolled out seldom
            do not vanish. How many tasks live by it is the figure ``starving_tasks``.

    Trajectories without a known version are not drawn; the first is warned of.
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
        """A heap of (version, entry) of those that are young enough."""
        self._gone: set[int] = set()
        self._newest: int | None = None
        self._told = False

    @property
    def free(self) -> Mapping[str, Any]:
        return {"max_age": self.max_age, "floor": self.floor}

    def added(self, entries: IntArray, additions: Additions) -> IntArray:
        if self.needs_tasks and additions.tasks is None:
            raise ConfigurationError("staleness: a floor needs to know the task of every trajectory")
        count = len(additions)
        self._weight.append(0.0, count)
        self._version.append(additions.versions, count)
        self._told = self._told or _warn_unknown(self.name, additions)
        versions = additions.versions.tolist()
        tasks = additions.tasks if additions.tasks is not None else [""] * count
        self._task_of += tasks
        changed: set[int] = set()
        for entry, version in zip(entries.tolist(), versions, strict=True):
            if version == UNKNOWN_VERSION:
                continue
            self._newest = version if self._newest is None else max(self._newest, version)
            task = self._tasks.setdefault(self._task_of[entry], _Task())
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
        wanted = min(max(0, self.floor - task.young), len(task.stale))
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

    def take_up(self, entries: IntArray, others: IntArray, state: Mapping[str, Any]) -> None:
        if state["newest"] is not None:
            self.reached(int(state["newest"]))

    def figures(self, alive: IntArray) -> dict[str, float]:
        return {
            "eligible_trajectories": float(np.count_nonzero(self._weight.values[alive])),
            "starving_tasks": float(sum(1 for task in self._tasks.values() if task.held)),
        }


class UseLimit(Factor):
    """A trajectory is drawn in so many batches at most, with a pause between two of them.

    Args:
        max_uses: batches in which a trajectory may be; None = any number.
        cooldown: batches that must pass before it can be drawn again.
    """

    name = "uses"

    def __init__(self, max_uses: int | None = None, cooldown: int = 0) -> None:
        self.max_uses = whole_or_none("uses: max_uses", max_uses, 1)
        self.cooldown = whole("uses: cooldown", cooldown, 0)
        self._uses = Growing(np.int64)
        self._ready = Growing(np.int64)
        """Number of the batch from which on an entry may be drawn again."""
        self._batch = 0
        self._resting: deque[tuple[int, IntArray]] = deque()

    @property
    def free(self) -> Mapping[str, Any]:
        return {"max_uses": self.max_uses, "cooldown": self.cooldown}

    def added(self, entries: IntArray, additions: Additions) -> IntArray:
        self._uses.append(0, len(additions))
        self._ready.append(0, len(additions))
        return _NONE

    def drawn(self, entries: IntArray) -> IntArray:
        self._batch += 1
        self._uses.values[entries] += 1
        if self.cooldown:
            self._ready.values[entries] = self._batch + self.cooldown
            self._resting.append((self._batch + self.cooldown, entries))
        changed = [entries]
        while self._resting and self._resting[0][0] <= self._batch:
            changed.append(self._resting.popleft()[1])
        return np.concatenate(changed)

    def used(self, entries: IntArray, uses: IntArray) -> IntArray:
        self._uses.values[entries] = uses
        return entries

    def weights(self, entries: IntArray) -> FloatArray:
        good = self._ready.values[entries] <= self._batch
        if self.max_uses is not None:
            good &= self._uses.values[entries] < self.max_uses
        return good.astype(np.float64)

    def compacted(self, kept: IntArray) -> None:
        place = np.full(len(self._uses), -1, np.int64)
        place[kept] = np.arange(len(kept))
        self._uses.keep(kept)
        self._ready.keep(kept)
        resting = [(until, place[entries]) for until, entries in self._resting]
        self._resting = deque((until, entries[entries >= 0]) for until, entries in resting)

    def state(self, entries: IntArray) -> dict[str, Any]:
        return {
            "batch": self._batch,
            "uses": torch.from_numpy(self._uses.values[entries]),
            "ready": torch.from_numpy(self._ready.values[entries]),
        }

    def take_up(self, entries: IntArray, others: IntArray, state: Mapping[str, Any]) -> None:
        self._batch = int(state["batch"])
        self._uses.values[entries] = state["uses"]
        self._ready.values[entries] = state["ready"]
        self._resting.clear()
        ready = self._ready.values
        for until in np.unique(ready[ready > self._batch]).tolist():
            self._resting.append((until, np.flatnonzero(ready == until).astype(np.int64)))

    def figures(self, alive: IntArray) -> dict[str, float]:
        used_up = 0 if self.max_uses is None else np.count_nonzero(self._uses.values[alive] >= self.max_uses)
        return {"used_up_trajectories": float(used_up)}


def _warn_unknown(name: str, additions: Additions) -> bool:
    unknown = additions.ids[additions.versions == UNKNOWN_VERSION]
    if len(unknown):
        logger.warning(
            "%s: trajectory %d says no policy version, so it is not drawn; record versions, or count by trajectories",
            name,
            int(unknown[0]),
        )
    return bool(len(unknown))
