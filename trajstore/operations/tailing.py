"""What was committed since: the facts of trajectories as they come, and a cursor with which it goes on later."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trajstore.core.buffer.reader import Reader
from trajstore.core.store.run_ids import ALONE, ID_LIMIT, RANK_LIMIT, own_id, rank_of_id
from trajstore.errors import ConfigurationError
from trajstore.query.engine import polars

if TYPE_CHECKING:
    from polars import DataFrame


@dataclass(frozen=True, slots=True)
class Cursor:
    """Up to which trajectory of each rank all were told.

    Attributes:
        stores: UUID of the store and highest id in it, by rank.
    """

    stores: Mapping[int, tuple[str, int]]

    def __str__(self) -> str:
        told = {str(rank): [store_id, newest] for rank, (store_id, newest) in sorted(self.stores.items())}
        return base64.urlsafe_b64encode(json.dumps(told, separators=(",", ":")).encode()).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Return the cursor that a text says.

        Raises:
            ConfigurationError: it is none.
        """
        try:
            told = json.loads(base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True))
            stores = {int(rank): (store_id, newest) for rank, (store_id, newest) in told.items()}
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
    """What came.

    Attributes:
        table: facts of the trajectories, in the order of their commits.
        cursors: after each of them.
        left: ids between those told before and the newest one that no trajectory has: evicted or rolled back before
            they could be told, or never given.
        replaced: ranks where another store lies than before; all that it has is told.
        older: ranks where an older copy of the store lies; what is committed to it from now on is told.
    """

    table: DataFrame
    cursors: list[Cursor]
    left: int
    replaced: tuple[int, ...]
    older: tuple[int, ...]


class Tail:
    """Tells what is committed to a store or a run.

    Args:
        path: path or URL, as :meth:`Reader.open` takes it.
        since: where to go on; None: all that is there is news.

    Raises:
        StoreNotFoundError, CorruptStoreError: as by :meth:`Reader.open`.
        MissingDependencyError: Polars is not installed.
    """

    def __init__(self, path: str | Path, since: Cursor | None = None) -> None:
        polars()
        self._reader = Reader.open(path)
        self.cursor = since or Cursor({})
        """Up to where all was told."""

    def close(self) -> None:
        """Give the reader's lease back."""
        self._reader.close()

    def refresh(self) -> None:
        """Look for what was committed since.

        Raises:
            StoreError: the directory cannot be read; what is shown stays.
        """
        self._reader.refresh()

    def news(self) -> News:
        """Return what was not told yet of what is shown, and note that it is told now."""
        pl = polars()
        found = self._reader.live.stores_by_rank()
        told = dict(self.cursor.stores)
        stores = {rank: store_id for rank, (store_id, _) in found.items()}
        replaced = tuple(rank for rank, one in stores.items() if rank in told and told[rank][0] != one)
        known = {rank: told[rank][1] if rank in told and rank not in replaced else -1 for rank in stores}
        older = tuple(rank for rank, (_, next_id) in found.items() if known[rank] >= next_id)
        known |= {rank: found[rank][1] - 1 for rank in older}
        table = self._reader.query().table()
        ids = table["trajectory_id"].to_numpy()
        ranks, own = rank_of_id(ids), own_id(ids)
        newest = np.full(len(ids), -1, np.int64)
        for rank, number in known.items():
            newest[ranks == rank] = number
        fresh = own > newest
        left = 0
        for rank in stores:
            mine = own[fresh & (ranks == rank)]
            if len(mine) and rank in told:
                left += int(mine.max()) - known[rank] - len(mine)
        cursors = []
        stands = {rank: (stores[rank], number) for rank, number in known.items()} | {
            rank: stand for rank, stand in told.items() if rank not in stores
        }
        for rank, number in zip(ranks[fresh].tolist(), own[fresh].tolist(), strict=True):
            stands = {**stands, rank: (stores[rank], max(number, stands[rank][1]))}
            cursors.append(Cursor(stands))
        self.cursor = Cursor(stands)
        return News(table.filter(pl.Series(fresh)), cursors, left, replaced, older)
