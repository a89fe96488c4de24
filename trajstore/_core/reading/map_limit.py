"""Tracks mapped shards, oldest first, and the excess over a limit. Pure; guarded by ``Contents.lock``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection


class MapLimit:
    """Counts file maps per slot.

    Args:
        limit: maximum number of maps; a single batch may exceed it.
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
        """Count a newly mapped shard; one already counted moves to the end."""
        self.remove(slot)
        self._maps[slot] = maps
        self._total += maps

    def remove(self, slot: int) -> None:
        """Stop counting a shard; unmapped ones are ignored."""
        self._total -= self._maps.pop(slot, 0)

    @property
    def is_over(self) -> bool:
        """Whether there are more maps than the limit."""
        return self._total > self._limit

    def too_old(self, keep: Collection[int]) -> list[int]:
        """Return the oldest slots to unmap to meet the limit, none of them in ``keep``."""
        slots, left = [], self._total
        for slot, maps in self._maps.items():
            if left <= self._limit:
                break
            if slot not in keep:
                slots.append(slot)
                left -= maps
        return slots
