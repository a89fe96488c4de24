"""Choice of the store for each request: local stores first, else round robin. Pure; no I/O.

Guarded by ``Outbox._lock``.
"""

from __future__ import annotations

from collections.abc import Sequence


class Routes:
    """Chooses stores.

    Args:
        near: ranks of the stores on this node; others are used only when none of these answers.
        all_ranks: ranks of all stores, at least one.
        patience: seconds to wait for a silent store before trying another one.
        first: start of the rotation, different for each producer.
    """

    def __init__(self, near: Sequence[int], all_ranks: Sequence[int], patience: float, first: int = 0) -> None:
        self.patience = patience
        self._order = list(near or all_ranks)
        self._all = list(all_ranks)
        self._at = first % len(self._order)
        self._silent: set[int] = set()

    def next(self) -> int:
        """Return the store for the next request."""
        for _ in self._order:
            rank = self._order[self._at]
            self._at = (self._at + 1) % len(self._order)
            if rank not in self._silent:
                return rank
        other = self.instead_of(self._order[self._at])
        return self._order[self._at] if other is None else other

    def instead_of(self, rank: int) -> int | None:
        """Mark a store as silent; return another one that is not, or None."""
        self._silent.add(rank)
        after = [other for other in self._all if other > rank] + [other for other in self._all if other < rank]
        return next((other for other in after if other not in self._silent), None)

    def answered(self, rank: int) -> None:
        """Mark a store as responsive."""
        self._silent.discard(rank)

    def hopeful(self) -> None:
        """Mark all stores as responsive, to try them again."""
        self._silent.clear()

    @property
    def silent(self) -> list[int]:
        """Ranks of the silent stores, which get no request until they answer another call."""
        return sorted(self._silent)
