"""Weights of trajectories by age and use; staleness has its own file. Factors multiply.

Needs the same lock as :class:`~trajstore._core.sampling.base.Sampler`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch

from trajstore._core.base.arguments import INT64_MAX, finite, one_of, whole, whole_or_none
from trajstore._core.base.types import FloatArray, IntArray
from trajstore._core.columns.limits import UNKNOWN_VERSION
from trajstore._core.sampling.base import Additions
from trajstore._core.sampling.roster import Growing
from trajstore._core.sampling.states import array_in, check_state, whole_in
from trajstore._core.store.run_ids import shown_id

logger = logging.getLogger(__name__)

_NONE = np.zeros(0, np.int64)

_REBASE_AFTER = 500.0
"""Half-lives between rescalings of weights: 2 ** 500 is well within float64."""

_MOST_BATCHES = 1 << 53


class Factor(ABC):
    """A weight of at least 0 per trajectory. An entry is a trajectory's number in the sampler's roster."""

    name: str
    needs_tasks = False

    @property
    def fixed(self) -> Mapping[str, Any]:
        """Arguments that must match for a state to apply."""
        return {}

    @property
    def free(self) -> Mapping[str, Any]:
        """Arguments that a resumed run may change."""
        return {}

    @abstractmethod
    def added(self, entries: IntArray, additions: Additions) -> IntArray:
        """Add entries; return older entries whose weight changed."""

    def evicted(self, entries: IntArray) -> IntArray:
        """Remove entries; return others whose weight changed."""
        return _NONE

    def drawn(self, entries: IntArray) -> IntArray:
        """Record a batch by its distinct entries; return all whose weight changed."""
        return _NONE

    def used(self, entries: IntArray, uses: IntArray) -> IntArray:
        """Replace the use counts of entries; return all whose weight changed."""
        return _NONE

    def reached(self, version: int) -> IntArray:
        """Count ages from a policy version if it is the newest; return entries whose weight changed."""
        return _NONE

    @abstractmethod
    def weights(self, entries: IntArray) -> FloatArray:
        """Return the current weights of entries."""

    @abstractmethod
    def compacted(self, kept: IntArray) -> None:
        """Keep only these entries; the first becomes entry 0."""

    def state(self, entries: IntArray) -> dict[str, Any]:
        """Return state that cannot be recomputed from the trajectories; tensors have a row per entry in ``entries``."""
        return {}

    def read(self, state: Mapping[str, Any], count: int) -> dict[str, Any]:
        """Validate a :meth:`state` and return it; arrays have ``count`` rows. Changes nothing.

        Raises:
            ConfigurationError: a value is absent or invalid; names it.
        """
        return {}

    def take_up(self, entries: IntArray, others: IntArray, state: Mapping[str, Any]) -> None:  # noqa: B027  # most have no state
        """Restore the :meth:`read` rows of these entries; other entries are newer than the state."""

    def awakened(self) -> IntArray:
        """If nothing else can be drawn, end the shortest pauses; return those entries."""
        return _NONE

    def figures(self, alive: IntArray) -> dict[str, float]:
        """Return numbers for metrics; ``alive`` are the live entries."""
        return {}


class Recency(Factor):
    """Favours newer trajectories: the weight halves with every half-life.

    Args:
        half_life: age at which a trajectory is half as likely as the newest.
        by: unit of age: trajectories added since, or policy versions. The latter never draws trajectories without a
            known version, and warns of the first.

    A trajectory a thousand half-lives older than the newest weighs 0, and is not drawn even if no other is left. This
    may already happen at 500 half-lives.
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
            self._told = self._told or warn_unknown(self.name, additions)
        return np.arange(entries[0]) if self._rebased(entries) else _NONE

    def _rebased(self, entries: IntArray) -> bool:
        """Count ages from the newest of these entries if the base is too old for it; return whether it changed."""
        known = self._stamp.values[entries]
        known = known[known != UNKNOWN_VERSION]
        if not len(known) or (self._base is not None and known.max() - self._base <= _REBASE_AFTER * self.half_life):
            return False
        self._base = float(known.max())
        return True

    def weights(self, entries: IntArray) -> FloatArray:
        stamp = self._stamp.values[entries]
        age = (stamp.astype(np.float64) - (self._base or 0.0)) / self.half_life
        known = (stamp != UNKNOWN_VERSION) & (age > -_REBASE_AFTER)
        weights: FloatArray = np.where(known, np.exp2(np.clip(age, -_REBASE_AFTER, _REBASE_AFTER)), 0.0)
        return weights

    def compacted(self, kept: IntArray) -> None:
        self._stamp.keep(kept)

    def state(self, entries: IntArray) -> dict[str, Any]:
        return {"stamp": torch.from_numpy(self._stamp.values[entries]), "next": self._next, "base": self._base}

    def read(self, state: Mapping[str, Any], count: int) -> dict[str, Any]:
        check_state(state, ("stamp", "next", "base"))
        following = whole_in(state, "next")
        most = following - 1 if self.by == "trajectories" else INT64_MAX
        stamps = array_in(state, "stamp", np.int64, count, most=most)
        base = None if state["base"] is None else finite("state: base", state["base"], -float(1 << 63), float(1 << 63))
        return {"stamp": stamps, "next": following, "base": base}

    def take_up(self, entries: IntArray, others: IntArray, state: Mapping[str, Any]) -> None:
        self._base = state["base"]
        if self.by == "trajectories":
            stamps, self._next = state["stamp"], state["next"]
            self._stamp.values[entries] = stamps
            later = others > (entries[-1] if len(entries) else -1)
            came = int(np.count_nonzero(later))
            self._stamp.values[others[later]] = np.arange(self._next, self._next + came)
            self._next += came
            # Entries evicted and added again, as after a rollback, are as old as later ones.
            self._stamp.values[others[~later]] = stamps[np.searchsorted(entries, others[~later])]
        self._rebased(others)


class UseLimit(Factor):
    """Limits the uses of each trajectory, with a pause between them.

    Args:
        max_uses: maximum number of batches with the trajectory; None = no limit.
        cooldown: number of batches before a trajectory can be drawn again. If all remaining trajectories are paused,
            the shortest pauses end at once, so draws never deadlock.
    """

    name = "uses"

    def __init__(self, max_uses: int | None = None, cooldown: int = 0) -> None:
        self.max_uses = whole_or_none("uses: max_uses", max_uses, 1)
        self.cooldown = whole("uses: cooldown", cooldown, 0, _MOST_BATCHES)
        self._uses = Growing(np.int64)
        self._ready = Growing(np.int64)
        """Number of the first batch that may draw the entry again."""
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

    def awakened(self) -> IntArray:
        while self._resting:
            self._batch, entries = self._resting.popleft()
            if len(entries):
                return entries
        return _NONE

    def used(self, entries: IntArray, uses: IntArray) -> IntArray:
        self._uses.values[entries] = uses
        return entries

    def uses(self, entries: IntArray) -> IntArray:
        """Return the number of batches that entries have been in."""
        return self._uses.values[entries]

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

    def read(self, state: Mapping[str, Any], count: int) -> dict[str, Any]:
        return {
            "batch": whole_in(state, "batch", most=_MOST_BATCHES),
            "uses": array_in(state, "uses", np.int64, count, least=0, most=_MOST_BATCHES),
            "ready": array_in(state, "ready", np.int64, count, least=0),
        }

    def take_up(self, entries: IntArray, others: IntArray, state: Mapping[str, Any]) -> None:
        self._batch = state["batch"]
        self._uses.values[entries] = state["uses"]
        self._ready.values[entries] = np.minimum(state["ready"], self._batch + self.cooldown)
        self._resting.clear()
        ready = self._ready.values
        for until in np.unique(ready[ready > self._batch]).tolist():
            self._resting.append((until, np.flatnonzero(ready == until).astype(np.int64)))

    def figures(self, alive: IntArray) -> dict[str, float]:
        used_up = 0 if self.max_uses is None else np.count_nonzero(self._uses.values[alive] >= self.max_uses)
        return {"used_up_trajectories": float(used_up)}


def warn_unknown(name: str, additions: Additions) -> bool:
    """Warn of the first trajectory without a policy version; return whether there is one."""
    unknown = additions.ids[additions.versions == UNKNOWN_VERSION]
    if len(unknown):
        logger.warning(
            "%s: trajectory %s has no policy version, so it is not drawn; record versions, or count by trajectories",
            name,
            shown_id(int(unknown[0])),
        )
    return bool(len(unknown))
