"""Which shards are mapped, the oldest first, and when there are too many. Pure; guarded by ``Contents.lock``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection


class MapLimit:
    """Counts maps of files by slot.

    Args:
        limit: most maps at a time. A batch that needs more has them all the same.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._maps: OrderedDict[int, int] = OrderedDict()
        self._total = 0

    def __len__(self) -> int:
        return len(self._maps)

    def __contains__(self, slot: int) -> bool:
        return slot in self._maps

    def add(self, slot: int, maps: int) -> None:
        """Count a shard that was mapped now; one that was counted before counts once."""
        self.remove(slot)
        self._maps[slot] = maps
        self._total += maps

    def remove(self, slot: int) -> None:
        """Count a shard no longer; one that is not mapped is passed over."""
        self._total -= self._maps.pop(slot, 0)

    @property
    def is_over(self) -> bool:
        """Whether there are more maps than the limit."""
        return self._total > self._limit

    def too_old(self, keep: Collection[int]) -> list[int]:
        """Return the slots that are to be unmapped to come to the limit: the oldest, but none of ``keep``."""
        slots, left = [], self._total
        for slot, maps in self._maps.items():
            if left <= self._limit:
                break
            if slot not in keep:
                slots.append(slot)
                left -= maps
        return slots
