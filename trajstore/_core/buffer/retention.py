"""Limits of a store, and which trajectories exceed them. Pure: eviction is elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trajstore._core.base.settings import Count, Seconds, Settings, Whole
from trajstore._core.columns.limits import UNKNOWN_VERSION
from trajstore._core.store.index import TrajectoryIndex

_INT64 = np.iinfo(np.int64)


def _ahead(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return by how much values exceed others; 0 where they do not. Unsigned, because it may exceed int64."""
    return np.where(one > other, one - other, 0).view(np.uint64)


@dataclass(frozen=True)
class Retention(Settings):
    """Limits of a store; None is no limit. The oldest trajectories go first; the newest always stays.

    Attributes:
        max_trajectories: number of trajectories.
        max_bytes: bytes of all columns.
        max_policy_age: largest distance in policy versions of a trajectory's newest step from the newest of
            all; trajectories with unknown versions stay. Where versions begin again, earlier trajectories stay until
            the new versions pass theirs, and a warning names both.
        abandoned_after: seconds without a call, after which an open session whose process ended is dropped, with a
            warning.
        compress_after: shards without any of this many newest trajectories are compressed with zstd (extra ``zarr``)
            in the background. They remain drawable, slower: choose at least the sampling window.

    Raises:
        ConfigurationError: a limit is not a whole number, or too low.
    """

    max_trajectories: Count | None = None
    max_bytes: Count | None = None
    max_policy_age: Whole | None = None
    abandoned_after: Seconds | None = None
    compress_after: Count | None = None

    def to_evict(self, index: TrajectoryIndex, protected: npt.NDArray[np.bool_] | None = None) -> npt.NDArray[np.intp]:
        """Return the positions of the trajectories to evict, oldest first.

        Args:
            index: of all trajectories.
            protected: for each of them, whether it stays; those do not count towards the limits.
        """
        count = len(index)
        if count == 0 or self._holds(index):
            return np.zeros(0, np.intp)
        going = np.zeros(count, np.bool_)
        if self.max_policy_age is not None:
            versions = index["version_high"]
            known = np.flatnonzero(versions != UNKNOWN_VERSION)
            newest = int(_INT64.min)
            for first, end in reversed(self._counts(versions[known])):
                counted = known[first:end]
                newest = max(newest, int(versions[counted].max()))
                going[counted] = versions[counted] < newest - self.max_policy_age
        free = np.ones(count, np.int64) if protected is None else np.where(protected, 0, 1)
        for limit, amounts in ((self.max_trajectories, free), (self.max_bytes, index["nbytes"] * free)):
            if limit is not None:
                kept = np.where(going, 0, amounts)
                newer = np.cumsum(kept[::-1])[::-1]  # amount of this trajectory and all newer ones
                going |= newer > limit
        going &= free != 0
        going[-1] = False
        return index.first + np.flatnonzero(going)

    def begins_again(self, index: TrajectoryIndex) -> tuple[int, int] | None:
        """Return the newest version and the one before it with which versions began again; None if they did not."""
        if self.max_policy_age is None:
            return None
        versions = index["version_high"]
        versions = versions[versions != UNKNOWN_VERSION]
        first = self._counts(versions)[-1][0] if len(versions) else 0
        return (int(versions[:first].max()), int(versions[first])) if first else None

    def _counts(self, versions: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
        """Return the ranges ``[first, end)`` in which versions are of one count.

        A count begins at a trajectory that was too old when it was added, if versions go on from there: a trainer that
        restarted counts from 0. After a single late rollout they jump back, so it begins none.
        """
        ranges, first, age = [], 0, self.max_policy_age or 0
        while first < len(versions):
            part = versions[first:]
            late = _ahead(np.maximum.accumulate(part), part) > age
            places, end = np.flatnonzero(late), len(part)
            while len(places):
                begin = int(places[0])
                after = part[begin:]
                jumps = _ahead(after[1:], np.maximum.accumulate(after)[:-1]) > age
                back = np.flatnonzero(jumps & ~late[begin + 1 :])
                if not len(back):
                    end = begin
                    break
                places = places[places > begin + back[0]]
            ranges.append((first, first + end))
            first += end
        return ranges

    def _holds(self, index: TrajectoryIndex) -> bool:
        """Return whether the totals alone show that the limits hold."""
        if self.max_policy_age is not None or self.max_bytes is not None:
            return False
        return self.max_trajectories is None or len(index) <= self.max_trajectories
