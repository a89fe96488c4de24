"""To which store a parcel goes: the one on this node if there is one, else one after another. Pure; no I/O.

Guarded by ``Outbox._lock``.
"""

from __future__ import annotations

from collections.abc import Sequence


class Routes:
    """Chooses stores.

    Args:
        near: ranks of the stores on this node; all others are taken only when none of these answers.
        all_ranks: ranks of all stores, at least one.
        patience: seconds for which a silent store is waited for before another one is tried.
        first: where to begin, so that producers do not all begin with the same store.
    """

    def __init__(self, near: Sequence[int], all_ranks: Sequence[int], patience: float, first: int = 0) -> None:
        self.patience = patience
        self._order = list(near or all_ranks)
        self._all = list(all_ranks)
        self._at = first % len(self._order)
        self._silent: set[int] = set()

    def next(self) -> int:
        """Return the store for the next parcel."""
        for _ in self._order:
            rank = self._order[self._at]
            self._at = (self._at + 1) % len(self._order)
            if rank not in self._silent:
                return rank
        return self.instead_of(self._order[self._at]) or self._order[self._at]

    def instead_of(self, rank: int) -> int | None:
        """Note that a store is silent, and return another one; None if there is none, or all are silent."""
        self._silent.add(rank)
        after = [other for other in self._all if other > rank] + [other for other in self._all if other < rank]
        return next((other for other in after if other not in self._silent), None)

    def answered(self, rank: int) -> None:
        """Note that a store answers."""
        self._silent.discard(rank)

    def hopeful(self) -> None:
        """Try the silent ones again."""
        self._silent.clear()

    @property
    def silent(self) -> list[int]:
        """Ranks of the stores that get no parcel until they have answered something else."""
        return sorted(self._silent)
