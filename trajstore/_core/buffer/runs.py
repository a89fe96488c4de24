"""Saved points of the ranks of ``torch.distributed``: one step, over the stores of all ranks.

Each rank writes its own store, ``<run>/rank_<r>``. Only the stores' points are written: each records the number of
ranks that save it together, so readers find missing ones.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, TypeVar

import orjson

from trajstore._core.buffer.points import Listing, Points, Stores
from trajstore._core.buffer.replay_buffer import TrajectoryReplayBuffer
from trajstore._core.files.base import Directory, EncodedFile
from trajstore._core.files.opening import open_directory
from trajstore._core.store.rollback import SnapshotChanges
from trajstore._core.store.run_ids import ALONE
from trajstore.errors import ConfigurationError, CorruptStoreError, StoreError, StoreWriteError, listed

T = TypeVar("T")

_STORES_NAME = "run.json"
"""File in a run's folder: the UUIDs of the stores, by rank, that all ranks had open when they last looked for a point.

It distinguishes a store that a killed job left empty from an empty one that replaces a lost one.
"""


def run_points(buffer: TrajectoryReplayBuffer, group: Any = None) -> Points:
    """Return the saved points of all ranks of ``torch.distributed``, each of which has its own buffer.

    Every rank makes the same calls in the same order, except for :meth:`Points.state`. A call changes all ranks, and
    raises on all if one fails. :meth:`Points.newest` after opening says where to continue.

    Args:
        buffer: of this rank; its store is ``<run>/rank_<r>``, where r is the rank in the group.
        group: of ``torch.distributed``; None: all ranks.

    Raises:
        ConfigurationError: ``torch.distributed`` is not initialized, or the store is not that of this rank.
        StoreError: the buffer has no store.
    """
    import torch.distributed as dist

    if buffer._path is None:
        raise StoreError("a point of a run: this buffer has no store of its own; use auto_save=True")
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigurationError("a point of a run is saved by all its ranks: call torch.distributed's init first")
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    run, _, name = buffer._path.rstrip("/").rpartition("/")
    if name != f"rank_{rank}":
        raise ConfigurationError(
            f"auto_save_path {buffer._path}: rank {rank} of {ranks} writes to a folder rank_{rank} of the run"
        )
    return Points(RankStores(buffer, run or ".", rank, ranks, group))


class RankStores(Stores):
    """The stores of all ranks; see :func:`run_points`.

    Args:
        buffer: of this rank.
        run: path of the run.
        rank: of this process.
        ranks: their number.
        group: of ``torch.distributed``.
    """

    def __init__(self, buffer: TrajectoryReplayBuffer, run: str, rank: int, ranks: int, group: Any) -> None:
        self._buffer = buffer
        self._own = buffer._own_store
        self._rank = rank
        self._group = group
        self._begun: frozenset[int] = frozenset()
        self.name = run
        self.count = ranks

    def begun(self) -> Container[int]:
        return self._begun

    def snapshots(self) -> Listing:
        run = open_directory(self.name, **self._buffer._storage_options)

        def look() -> tuple[Any, ...]:
            store, next_id, _ = self._buffer._sink.commits()
            known = {} if self._rank else _known_stores(run)
            return self._own.snapshots()[ALONE], store, next_id, known

        found = self._together("snapshots", "", look)
        known, stores = found[0][3], {str(rank): store for rank, (_, store, *_) in enumerate(found)}
        old = {rank for rank, (_, store, next_id, _) in enumerate(found) if next_id or known.get(str(rank)) == store}
        self._begun = frozenset(old)
        if not self._rank and known != stores:
            run.publish([EncodedFile(_STORES_NAME, [orjson.dumps(stores)])])
        return {rank: snapshots for rank, (snapshots, *_) in enumerate(found)}

    def state(self, name: str | int) -> dict[str, Any]:
        return self._own.state(name)

    def save(self, step: int, state: Mapping[str, Any]) -> Listing:
        after = "; not every rank has saved it, earlier points are unchanged"
        found = self._together(f"save({step})", after, lambda: self._own.save(step, state, self.count)[ALONE])
        return dict(enumerate(found))

    def pin(self, name: str) -> Listing:
        found = self._together(f"pin({name!r})", "; others may be pinned", lambda: self._own.pin(name)[ALONE])
        return dict(enumerate(found))

    def remove(self, name: str | int) -> list[str | None]:
        found = self._together(f"remove({name!r})", "; others may have", lambda: self._own.remove(name))
        return [reason for reasons in found for reason in reasons]

    def go_to(self, name: str | int, aside: bool) -> dict[str, Any]:
        state: dict[str, Any] = {}
        after = "; the others went there, call again"
        self._together(f"go_to({name!r})", after, lambda: state.update(self._own.go_to(name, aside)))
        return state

    def changes(self, name: str | int, aside: bool) -> list[SnapshotChanges]:
        found = self._together(f"changes({name!r})", "", lambda: self._own.changes(name, aside))
        return [change for changes in found for change in changes]

    def _together(self, call: str, after: str, do: Callable[[], T]) -> list[T]:
        """Return the results of a function on all ranks.

        Raises:
            StoreWriteError: it failed on some ranks, or a rank does not answer; names it.
            TrajstoreError: it failed on all ranks; the error of this one.
        """
        import torch.distributed as dist

        result, error = None, None
        try:
            result = do()
        except Exception as failure:  # the other ranks wait for the result
            error = failure
        mine = None if error is None else f"rank_{self._rank}: {error}"
        answers: list[Any] = [None] * dist.get_world_size(self._group)
        try:
            dist.all_gather_object(answers, (result, mine), group=self._group)
        except RuntimeError as failure:
            own = "" if mine is None else f"; here: {mine}"
            raise StoreWriteError(f"points.{call}: a rank does not answer ({failure}){own}{after}") from failure
        failed = [text for _, text in answers if text is not None]
        if error is not None and len(failed) == len(answers):
            raise error
        if failed:
            raise StoreWriteError(f"points.{call}: {listed(failed)}{after}") from error
        return [answer for answer, _ in answers]


def _known_stores(run: Directory) -> dict[str, str]:
    """Return the UUIDs of the stores that the ranks opened when they last looked, by rank; empty if unknown."""
    try:
        stores = orjson.loads(run.read(_STORES_NAME))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise CorruptStoreError(f"{run.url}/{_STORES_NAME}: is damaged ({error}); remove it") from error
    if not isinstance(stores, dict):
        raise CorruptStoreError(f"{run.url}/{_STORES_NAME}: is not an object of UUIDs by rank; remove it")
    return stores
