"""The trajectories that a store has received, so that a resent request is stored once. Pure; no I/O.

Guarded by ``StoreServer._adding``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

REMEMBERED = 1_000_000


class Known:
    """Ids of the newest trajectories of a store, by UUID.

    Args:
        limit: number of trajectories remembered. A request resent after more than ``limit`` others would be stored
            twice; resends happen within minutes.
    """

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._ids: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ids)

    def note(self, uuids: bytes, ids: Sequence[int]) -> None:
        """Remember trajectories.

        Args:
            uuids: 16 bytes for each.
            ids: their ids.
        """
        for place, number in enumerate(ids):
            self._ids[uuids[16 * place : 16 * place + 16]] = number
        while len(self._ids) > self._limit:
            self._ids.popitem(last=False)

    def ids(self, uuids: bytes) -> list[int | None]:
        """Return the id of each trajectory; None if unknown."""
        return [self._ids.get(uuids[at : at + 16]) for at in range(0, len(uuids), 16)]
