"""Report facts of new trajectories in commit order, resumable by a cursor."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trajstore.core.store.run_ids import ALONE, ID_LIMIT, RANK_LIMIT, own_id, rank_of_id
from trajstore.errors import ConfigurationError
from trajstore.operations.opening import open_readable
from trajstore.query.engine import polars

if TYPE_CHECKING:
    from polars import DataFrame


@dataclass(frozen=True, slots=True)
class Cursor:
    """The last reported trajectory of each rank.

    Attributes:
        stores: (UUID of the store, highest reported id) by rank.
    """

    stores: Mapping[int, tuple[str, int]]

    def __str__(self) -> str:
        stores = {str(rank): [store_id, newest] for rank, (store_id, newest) in sorted(self.stores.items())}
        return base64.urlsafe_b64encode(json.dumps(stores, separators=(",", ":")).encode()).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Parse a cursor.

        Raises:
            ConfigurationError: the text is not a cursor.
        """
        try:
            stores_by_rank = json.loads(base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True))
            stores = {int(rank): (store_id, newest) for rank, (store_id, newest) in stores_by_rank.items()}
            for rank, (store_id, newest) in stores.items():
                if not (ALONE <= rank < RANK_LIMIT and isinstance(store_id, str)):
                    raise ValueError("rank or store")
                if type(newest) is not int or not -1 <= newest < ID_LIMIT:
                    raise ValueError("id")
        except (binascii.Error, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigurationError(f"cursor: {text!r} is no cursor; give one that tail has written") from error
        return cls(stores)


@dataclass(frozen=True, slots=True)
class News:
    """The trajectories committed since a cursor.

    Attributes:
        table: facts of the trajectories, in commit order.
        cursors: one per row, to resume after it.
        warnings: sentences on trajectories that cannot be reported, and on replaced stores.
    """

    table: DataFrame
    cursors: list[Cursor]
    warnings: list[str]


class Tail:
    """Reports new commits to a store or a run.

    Args:
        path: path or URL, as for :meth:`Reader.open`.
        since: cursor to resume from; None starts at the first trajectory.

    Raises:
        StoreNotFoundError, CorruptStoreError: as for :meth:`Reader.open`.
        MissingDependencyError: Polars is not installed.
    """

    def __init__(self, path: str | Path, since: Cursor | None = None) -> None:
        polars()
        self._reader, self.damage = open_readable(path, pending=False)
        """Sentence on damage that was left out; None if there is none."""
        self.cursor = since or Cursor({})
        """Cursor after the last reported trajectory."""

    def close(self) -> None:
        """Release the reader's lease."""
        self._reader.close()

    def refresh(self) -> None:
        """Read new commits.

        Raises:
            StoreError: the directory cannot be read; the previous contents stay.
        """
        self._reader.refresh()

    def news(self, where: str | None = None) -> News:
        """Return the trajectories committed after the cursor, and advance it.

        Args:
            where: SQL condition on facts; the cursor also passes trajectories that do not match.

        Raises:
            ConfigurationError: the condition is invalid; the cursor stays.
        """
        pl = polars()
        query = self._reader.query()
        table = query.table()
        ids = table["trajectory_id"].to_numpy()
        matching = np.ones(len(ids), np.bool_) if where is None else np.isin(ids, query.where(where).ids())
        stores, before = self._reader.live.stores_by_rank(), self.cursor.stores
        warnings, seen = [], {rank: (store_id, -1) for rank, (store_id, _) in stores.items()}
        for rank, (store_id, next_id) in stores.items():
            place = "" if rank == ALONE else f" (rank {rank})"
            if rank in before and before[rank][0] != store_id:
                warnings.append(f"another store lies there than before{place}; all that it has is shown")
            elif rank in before and before[rank][1] < next_id:
                seen[rank] = before[rank]
            elif rank in before:
                seen[rank] = store_id, next_id - 1
                warnings.append(
                    f"an older copy of the store lies there{place}; what is committed to it from now on is shown"
                )
        ranks, own = rank_of_id(ids), own_id(ids)
        fresh = own > np.array([seen[rank][1] for rank in ranks.tolist()], np.int64)
        for rank in seen.keys() & before.keys():
            mine = own[fresh & (ranks == rank)]
            left = int(mine.max()) - seen[rank][1] - len(mine) if len(mine) else 0
            if left and before[rank][0] == seen[rank][0]:
                have = "ids before the newest have" if left > 1 else "id before the newest has"
                warnings.append(
                    f"{left} {have} no trajectory: evicted or rolled back before it could be shown, or never assigned"
                )
        cursors, shown = [], {**before, **seen}
        for rank, number in zip(ranks[fresh].tolist(), own[fresh].tolist(), strict=True):
            shown = {**shown, rank: (seen[rank][0], max(number, shown[rank][1]))}
            cursors.append(Cursor(shown))
        self.cursor = Cursor(shown)
        kept = matching[fresh].tolist()
        cursors = [cursor for cursor, keep in zip(cursors, kept, strict=True) if keep]
        return News(table.filter(pl.Series(fresh & matching)), cursors, warnings)
