"""Late values of the trajectories of a handle, set by the stores that have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from trajstore._core.store.late_values import LateValues
from trajstore._core.store.notes import Note
from trajstore._core.store.row_notes import Rows
from trajstore._core.store.run_ids import own_id
from trajstore.distributed.server import MOST_STORES
from trajstore.errors import TrajectoryUnavailableError

if TYPE_CHECKING:
    from trajstore.distributed.handle import DistributedReplayBuffer


@dataclass(frozen=True, slots=True)
class ValuesOfHandle:
    """Sets and returns late values; for :func:`trajstore.annotate` and :func:`trajstore.notes_of`.

    Args:
        _handle: the handle.
    """

    _handle: DistributedReplayBuffer

    def annotate(self, update: LateValues, rows: Rows) -> None:
        """Set late values, after all stores have agreed to them; those by row store by store.

        Raises:
            ConfigurationError: a value contradicts the kind that its name has in a store; nothing was set. Or rows do
                not fit their trajectories, or another kind of rows; stores of lower ranks have set theirs.
            TrajectoryUnavailableError: an id is in no store; nothing was set.
            StoreUnreachableError, StoreWriteError: a store failed; others may have set theirs.
        """
        ids = tuple(map(own_id, update.ids))
        self._ranks(ids)
        every, places = self._handle._with_copies(ids)
        ranks = self._ranks(every)
        self.check_values(every, update)
        parts = {rank: _part(update, every, places, rows, rank) for rank in ranks}
        self._handle._stores.call_all(parts, "annotate")
        self._handle.refresh()

    def check_values(self, ids: Sequence[int], update: LateValues) -> None:
        """Refuse late values that a store cannot set; only the stores of the ids must answer.

        Raises:
            ConfigurationError, TrajectoryUnavailableError, StoreUnreachableError: see :meth:`annotate`.
        """
        ranks = self._ranks(ids)
        asked = {rank: ([number for number in ids if number % MOST_STORES == rank], update) for rank in ranks}
        self._handle._stores.call_all(asked, "check_values")
        others: dict[int, tuple[list[int], LateValues]] = {
            rank: ([], update) for rank in self._handle._all_ranks() if rank not in ranks
        }
        self._handle._ask_present(others, "check_values")

    def history(self, trajectory_id: int) -> list[Note]:
        """Return the late values of a trajectory, the earliest first.

        Raises:
            TrajectoryUnavailableError: the id is in no store.
            StoreUnreachableError: its store does not answer.
        """
        number = own_id(trajectory_id)
        (rank,) = self._ranks([number])
        notes: list[Note] = self._handle._stores.call(rank, "history", number)
        return notes

    def commits(self) -> dict[int, tuple[str, int, int]]:
        """Return the UUID, an id above all committed ones, and the number of rollbacks of each store, by rank.

        Raises:
            StoreUnreachableError: a store does not answer.
        """
        stores = self._handle._stores
        return stores.call_all(dict.fromkeys(stores.look_whole(), ()), "commits")

    @property
    def stride(self) -> int:
        """Difference of consecutive ids of a store; ids modulo it are ranks."""
        return MOST_STORES

    def _ranks(self, ids: Sequence[int]) -> set[int]:
        """Return the ranks of the stores that gave these ids.

        Raises:
            TrajectoryUnavailableError: there is no such store.
        """
        for number in ids:
            if number % MOST_STORES not in self._handle.stores:
                raise TrajectoryUnavailableError(f"no trajectory of {self._handle.name!r} has the id {number}")
        return {number % MOST_STORES for number in ids}


def _part(
    update: LateValues, ids: Sequence[int], places: Sequence[int], rows: Rows, rank: int
) -> tuple[LateValues, dict[str, list[torch.Tensor]]]:
    """Return the values for the trajectories of one store; ``places`` has the place of each id's values."""
    mine = [(number, place) for number, place in zip(ids, places, strict=True) if number % MOST_STORES == rank]
    at = [place for _, place in mine]
    values = {name: [given[place] for place in at] for name, given in update.values.items()}
    part = replace(update, ids=tuple(number for number, _ in mine), values=values)
    return part, {name: [tensors[place] for place in at] for name, tensors in rows.items()}
