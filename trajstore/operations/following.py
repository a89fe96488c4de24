"""Follow new trajectories in the order of their commits, resumable by a cursor."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

from trajstore._core.base.types import IntArray
from trajstore._core.buffer.reader import Reader
from trajstore._core.store.run_ids import ALONE, ID_LIMIT, RANK_LIMIT, own_id, rank_of_id
from trajstore.errors import ConfigurationError, counted
from trajstore.operations.opening import open_readable
from trajstore.query.engine import pl, polars

if TYPE_CHECKING:
    from trajstore.distributed import DistributedReplayBuffer

_Rank = Annotated[int, msgspec.Meta(ge=ALONE, lt=RANK_LIMIT)]
_Id = Annotated[int, msgspec.Meta(ge=-1, lt=ID_LIMIT)]
_STORES = msgspec.json.Decoder(dict[_Rank, tuple[str, _Id, Annotated[int, msgspec.Meta(ge=0)]]])


@dataclass(frozen=True, slots=True)
class Cursor:
    """The last reported trajectory of each rank.

    Attributes:
        stores: (UUID of the store, highest reported id, number of its rollbacks so far) by rank.
    """

    stores: Mapping[int, tuple[str, int, int]]

    def __str__(self) -> str:
        text = msgspec.json.encode({str(rank): store for rank, store in sorted(self.stores.items())})
        return base64.urlsafe_b64encode(text).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Parse a cursor.

        Raises:
            ConfigurationError: the text is not a cursor.
        """
        try:
            return cls(_STORES.decode(base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)))
        except (ValueError, msgspec.MsgspecError) as error:
            raise ConfigurationError(f"cursor: {text!r} is not a cursor; pass one that list printed") from error


@dataclass(frozen=True, slots=True)
class News:
    """The trajectories committed since a cursor.

    Attributes:
        table: facts of the trajectories, in commit order.
        cursors: one per row, to resume after it.
        warnings: sentences on trajectories that cannot be reported, and on replaced stores.
    """

    table: pl.DataFrame
    cursors: list[Cursor]
    warnings: list[str]


class Follower:
    """Reports new commits to a store or a run.

    Args:
        store: path or URL, as for :meth:`Reader.open`, or a handle of the stores of Ray.
        since: cursor to resume from, of the path or the handle of the same stores; None starts at the first trajectory.

    Raises:
        StoreNotFoundError, CorruptStoreError: as for :meth:`Reader.open`.
        ConfigurationError: ``store`` is something else.
        MissingDependencyError: Polars is not installed.
    """

    def __init__(self, store: str | Path | DistributedReplayBuffer, since: Cursor | None = None) -> None:
        polars()
        self.damage: str | None = None
        """Sentence on damage that was left out; None if there is none."""
        self._source: Reader | DistributedReplayBuffer
        if isinstance(store, str | Path):
            self._source, self.damage = open_readable(store, pending=False)
        elif isinstance(store, Reader) or not hasattr(store, "_sink"):
            raise ConfigurationError(f"Follower: {type(store).__name__}, must be a path, a URL, or a handle of stores")
        else:
            self._source = store
        self._reported: set[str] = set()  # keys of metadata that a warning has named
        self.cursor = since or Cursor({})
        """Cursor after the last reported trajectory."""

    def close(self) -> None:
        """Release the reader's lease; a handle stays open."""
        if isinstance(self._source, Reader):
            self._source.close()

    def refresh(self) -> None:
        """Read new commits.

        Raises:
            StoreError: the directory cannot be read; the previous contents stay.
        """
        self._source.refresh()

    def news(self, where: str | None = None, keys: Iterable[str] = ()) -> News:
        """Return the trajectories committed after the cursor, and advance it.

        Args:
            where: SQL condition on facts; the cursor also passes trajectories that do not match.
            keys: values of metadata that become columns too: ``metadata.KEY``.

        Raises:
            ConfigurationError: the condition is invalid, or a value of a key is a list or an object; the cursor stays.
            StoreUnreachableError: a store of the handle does not answer.
        """
        source = self._source
        query = replace(source.query(), _reported=self._reported)
        table = query.table()
        ids = table["trajectory_id"].to_numpy()
        if isinstance(source, Reader):
            stores, stride, ranks, own = source._live.stores_by_rank(), 1, rank_of_id(ids), own_id(ids)
        else:
            stores, stride = source._sink.commits(), source._sink.stride
            ranks, own = ids % stride, ids
        matching = np.ones(len(own), np.bool_) if where is None else np.isin(ids, query.where(where).ids())
        warnings: list[str] = []
        shown = {rank: self._seen(rank, store, warnings) for rank, store in stores.items()}
        newest = np.array([shown[rank][1] for rank in ranks.tolist()], np.int64)
        next_ids = np.array([stores[rank][1] for rank in ranks.tolist()], np.int64)
        fresh = (own > newest) & (own < next_ids)
        for rank, (store_id, last, _) in shown.items():
            if self._is_known(rank, store_id):
                warnings += _gaps(own[fresh & (ranks == rank)], last, stride)
        cursors, shown = [], {**self.cursor.stores, **shown}
        for rank, number in zip(ranks[fresh].tolist(), own[fresh].tolist(), strict=True):
            store_id, last, visit = shown[rank]
            shown = {**shown, rank: (store_id, max(number, last), visit)}
            cursors.append(Cursor(shown))
        cursors = [cursor for cursor, keep in zip(cursors, matching[fresh].tolist(), strict=True) if keep]
        facts = table.filter(pl.Series(fresh & matching))
        if columns := list(keys):
            facts = facts.hstack(replace(query, facts=lambda: facts).select(*columns).table())
        self.cursor = Cursor(shown)
        return News(facts, cursors, warnings)

    def _is_known(self, rank: int, store_id: str) -> bool:
        return rank in self.cursor.stores and self.cursor.stores[rank][0] == store_id

    def _seen(self, rank: int, store: tuple[str, int, int], warnings: list[str]) -> tuple[str, int, int]:
        """Return what the cursor says of a present store; append warnings if it was replaced or rolled back."""
        store_id, next_id, visit = store
        place = "" if rank == ALONE else f" (rank {rank})"
        if not self._is_known(rank, store_id):
            if rank in self.cursor.stores:
                warnings.append(f"another store lies there than before{place}; all that it has is shown")
            return store_id, -1, visit
        newest, visit_then = self.cursor.stores[rank][1:]
        if newest >= next_id:
            warnings.append(
                f"an older copy of the store lies there{place}; what is committed to it from now on is shown"
            )
        elif visit != visit_then:
            warnings.append(
                f"rolled back since{place}; trajectories up to id {newest} that are live again are not shown: "
                "`trajstore list` without --since shows them"
            )
        return store_id, min(newest, next_id - 1), visit


def _gaps(reported: IntArray, newest: int, stride: int) -> list[str]:
    """Return a sentence on the ids after ``newest`` and below the highest reported one that have no trajectory."""
    if not len(reported):
        return []
    end = int(reported.max())
    first = newest if newest >= 0 else end % stride - stride
    absent = (end - first) // stride - len(reported)
    have = counted(absent, "id", "before the newest has", "before the newest have")
    return [f"{have} no trajectory: evicted or rolled back before it could be shown, or never assigned"] * bool(absent)
