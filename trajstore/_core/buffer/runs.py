"""Saved points of a run: one step, over the stores of all its ranks. A point counts when every rank has it.

Each rank writes its own store, ``<run>/rank_<r>``. The ranks agree through ``torch.distributed``. Only the stores'
points are written: each records the number of ranks that save it together, so readers find missing ones.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from trajstore._core.base.arguments import whole_or_none
from trajstore._core.buffer.replay_buffer import TrajectoryReplayBuffer
from trajstore._core.buffer.saved_points import KEPT
from trajstore._core.files.base import Directory, EncodedFile
from trajstore._core.files.opening import check_options, open_directory
from trajstore._core.reading.places import nothing_at, rank_of, ranks_of
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.pin_names import point_name
from trajstore._core.store.saved_points import SavedPoint
from trajstore.errors import (
    ConfigurationError,
    CorruptStoreError,
    StoreError,
    StoreNotFoundError,
    StoreWriteError,
    counted,
    listed,
)

logger = logging.getLogger(__name__)

_STORES_NAME = "run.json"
"""File in a run's folder: the UUIDs of the stores, by rank, that all ranks had open when they last rolled back.

It distinguishes a store that a killed job left empty from an empty one that replaces a lost one.
"""


@dataclass(frozen=True, slots=True)
class RunPoint:
    """A saved point of a run.

    Attributes:
        step: of the model.
        ranks: number of ranks that save it together; of stores, if no rank recorded it.
        lacking: numbers of the ranks without it; a run cannot go back to such a point.
        trajectories: their number, in all stores that have the point.
        saved_by: number of ranks that saved it together; None if unknown.
    """

    step: int
    ranks: int
    lacking: tuple[int, ...]
    trajectories: int
    saved_by: int | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every rank has it."""
        return not self.lacking


def unite_points(points: Mapping[int, Sequence[SavedPoint]]) -> list[RunPoint]:
    """Return the saved points of a run, lowest step first, complete or not.

    Args:
        points: of each rank's store, by number of the rank.
    """
    united = []
    for step in sorted({point.step for of_rank in points.values() for point in of_rank}):
        have = {rank: point for rank, of_rank in points.items() for point in of_rank if point.step == step}
        saved_by = max(point.ranks or 0 for point in have.values()) or None
        # Points that each store saved by itself do not record the number of ranks: expect all existing stores.
        ranks = saved_by or max(points) + 1
        lacking = tuple(rank for rank in range(ranks) if rank not in have)
        trajectories = sum(point.trajectories for point in have.values())
        united.append(RunPoint(step, ranks, lacking, trajectories, saved_by))
    return united


def run_points(path: str | Path, **storage_options: Any) -> list[RunPoint]:
    """Return the saved points of a run, lowest step first; includes incomplete ones, with their missing ranks.

    Args:
        path: of the run, the folder with the stores ``rank_*``.
        storage_options: passed on to the fsspec file system.

    Raises:
        StoreNotFoundError: there is no run.
        CorruptStoreError: a store of it is damaged.
    """
    check_options(path, storage_options)
    return _points_of(_catalogs(path, open_directory(path, **storage_options)))


def _catalogs(path: str | Path, run: Directory) -> dict[int, Catalog]:
    """Return the catalogs of a run's stores, by rank.

    Raises:
        StoreNotFoundError: there is no run.
        CorruptStoreError: a store of it is damaged.
    """
    directories = ranks_of(run).directories
    if not directories:
        raise nothing_at(path, run)
    return {rank_of(directory): Catalog.open(directory) for directory in directories}


def _points_of(catalogs: Mapping[int, Catalog]) -> list[RunPoint]:
    return unite_points(
        {rank: [SavedPoint.of(head) for head in catalog.points()] for rank, catalog in catalogs.items()}
    )


def save_rank_point(
    buffer: TrajectoryReplayBuffer, step: int, state: Mapping[str, Any] | None, ranks: int
) -> SavedPoint:
    """Save one rank's part of a run's point, which counts once all ``ranks`` have saved it; earlier ones stay.

    Raises:
        StoreError, ConfigurationError, StoreWriteError: see :meth:`PointsOfBuffer.save`.
    """
    return buffer.points._save(step, state, None, ranks)


def save_run_point(
    buffer: TrajectoryReplayBuffer,
    step: int,
    state: Mapping[str, Any] | None = None,
    *,
    keep: int | None = KEPT,
    group: Any = None,
) -> SavedPoint:
    """Save a point on every rank; return this rank's when all have it. Every rank calls it, with the same step.

    Call it before writing the model's own checkpoint, so that every checkpoint of the model has its point on every
    rank. Earlier points are removed only afterwards, so a complete one always exists.

    Args:
        buffer: of this rank; its store is ``<run>/rank_<r>``, where r is the rank in the group.
        step: of the model.
        state: further state of this rank, see :meth:`PointsOfBuffer.save`.
        keep: number of points to keep on each rank; None = all.
        group: of ``torch.distributed``; None: all ranks.

    Raises:
        ConfigurationError: the store is not that of this rank.
        StoreWriteError: a rank failed to save it, or did not answer; names it. The point is incomplete then, and the
            earlier ones still exist.
    """
    keep = whole_or_none("keep", keep, 1)
    rank, ranks = _rank_in(buffer, group)
    point, error = None, None
    try:
        point = save_rank_point(buffer, step, state, ranks)
    except Exception as failure:  # the other ranks wait for the result
        error = failure
    failed = _told_by_all(group, None if error is None else f"rank_{rank}: {error}", f"save_run_point({step})")
    if failed or point is None:
        raise StoreWriteError(
            f"save_run_point({step}): not every rank has saved it ({listed(failed)}); earlier points are unchanged"
        ) from error
    for old in () if keep is None else buffer.points.saved[:-keep]:
        buffer.points.remove(old.step)
    return point


def roll_back_run(
    buffer: TrajectoryReplayBuffer, step: int | None = None, *, aside: bool = True, group: Any = None
) -> tuple[int | None, dict[str, Any]]:
    """Go back to one point on every rank; every rank calls it, before anything is added.

    Incomplete later points are set aside together with newer data. If a rank is killed meanwhile, call it again: ranks
    that are back at the point stay there.

    Args:
        buffer: of this rank.
        step: of the point; None: the newest one that every rank has.
        aside: False deletes data written since the point.
        group: of ``torch.distributed``; None: all ranks.

    Returns:
        The step, None if the run has no complete point (nothing was changed); and this rank's state of it.

    Raises:
        ConfigurationError: the store is not that of this rank, or another number of ranks saved the run's points.
        StoreNotFoundError: there is no such point, or a rank lacks it; says which. Without ``step``: none is complete
            and a store was lost, because there are several points, or a rank that lacks one has another store than
            before, which never had additions.
        StoreWriteError: a rank failed to go back, or did not answer; names it.
    """
    import torch.distributed as dist

    rank, ranks = _rank_in(buffer, group)
    _told_by_all(group, None, "roll_back_run")  # every rank has opened its store, which rank 0 reads next
    decided: list[Any] = [None, None]
    if rank == 0:
        try:
            decided[0] = _choose(buffer, step, ranks)
        except Exception as error:  # raised on every rank
            decided[1] = error
    try:
        dist.broadcast_object_list(decided, group_src=0, group=group)
    except RuntimeError as error:
        raise StoreWriteError(f"roll_back_run: a rank does not answer ({error}); nothing was changed") from error
    chosen, failure = decided
    if failure is not None:
        raise failure
    if chosen is None:
        return None, {}
    state, wrong = {}, None
    try:
        state = buffer.points.rollback(chosen, aside=aside)
    except Exception as error:  # as above
        wrong = error
    failed = _told_by_all(group, None if wrong is None else f"rank_{rank}: {wrong}", f"roll_back_run({chosen})")
    if failed:
        raise StoreWriteError(f"roll_back_run({chosen}): {listed(failed)}; the others went back, call again") from wrong
    return chosen, state


def _choose(buffer: TrajectoryReplayBuffer, step: int | None, ranks: int) -> int | None:
    """Return the step to go back to.

    Raises:
        ConfigurationError: another number of ranks saved it together.
        StoreNotFoundError: a rank lacks the requested point, or a store was lost.
    """
    run = _run_of(buffer)
    directory = open_directory(run, **buffer._storage_options)
    catalogs = _catalogs(run, directory)
    points = _points_of(catalogs)
    _check_ranks(run, points, ranks)
    complete = [point.step for point in points if point.is_complete]
    for point in points:
        if not point.is_complete:
            logger.warning("%s: %s", run, incomplete_sentence(point))
    stores = {str(rank): catalog.store_id for rank, catalog in catalogs.items()}
    known = _known_stores(directory)
    if step is None and points and not complete:
        used = {rank for rank, catalog in catalogs.items() if catalog.next_id}
        _check_not_lost(run, points, used | {rank for rank in catalogs if known.get(str(rank)) == stores[str(rank)]})
    if step is not None and step not in complete:
        wanted = [point for point in points if point.step == step]
        why = incomplete_sentence(wanted[0]) if wanted else f"no saved point of step {step}"
        raise StoreNotFoundError(f"{run}: {why}; complete points: {listed(map(str, complete)) or 'none'}")
    if known != stores:
        directory.publish([EncodedFile(_STORES_NAME, [orjson.dumps(stores)])])
    return max(complete, default=None) if step is None else step


def _known_stores(run: Directory) -> dict[str, str]:
    """Return the UUIDs of the stores that the ranks opened at the last roll back, by rank; empty if unknown."""
    try:
        stores = orjson.loads(run.read(_STORES_NAME))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise CorruptStoreError(f"{run.url}/{_STORES_NAME}: is damaged ({error}); remove it") from error
    if not isinstance(stores, dict):
        raise CorruptStoreError(f"{run.url}/{_STORES_NAME}: is not an object of UUIDs by rank; remove it")
    return stores


def _check_not_lost(run: str, points: Sequence[RunPoint], there: Collection[int]) -> None:
    """Refuse to start over if no point is complete because a store was lost, not because a job was killed.

    Args:
        run: path of the run.
        points: its points.
        there: ranks whose stores have had additions or were open when the ranks last rolled back.
    """
    lacking = sorted({rank for point in points for rank in point.lacking})
    empty = [f"rank_{rank}" for rank in lacking if rank not in there]
    if len(points) > 1:
        names = listed(f"rank_{rank}" for rank in lacking)
        why = f"{names} lacks some. A job that was killed leaves one incomplete point"
    elif empty and points[0].trajectories:
        why = f"nothing was ever added to {listed(empty)}"
    else:
        return
    raise StoreNotFoundError(
        f"{run}: no saved point is complete, of {len(points)}: {why}, so a store was lost: restore it from a copy "
        f"or its mirror, or start a new run in another directory and load this one there (load_checkpoint({run!r}, "
        f"strict=False, pin={point_name(points[-1].step)!r})). If none was lost, remove the points "
        "(points.remove) and start again"
    )


def _check_ranks(run: str, points: Sequence[RunPoint], ranks: int) -> None:
    others = [point for point in points if point.saved_by not in (None, ranks)]
    if not others:
        return
    whole = [point for point in others if point.is_complete]
    newest = max(whole or others, key=lambda point: point.step)
    steps = listed(str(point.step) for point in whole) or "none"
    raise ConfigurationError(
        f"{run}: {counted(newest.saved_by or 0, 'rank')} saved its points together, this job has {ranks} (steps that "
        f"all of them have: {steps}); start a new run, and load this one on every rank: "
        f"load_checkpoint({run!r}, is_distributed=True, pin={point_name(newest.step)!r}, ...)"
    )


def incomplete_sentence(point: RunPoint) -> str:
    """Describe a point that some ranks lack."""
    names = listed(f"rank_{rank}" for rank in point.lacking)
    return f"the saved point of step {point.step} is incomplete: of {point.ranks} ranks, it is not in {names}"


def _run_of(buffer: TrajectoryReplayBuffer) -> str:
    return str(buffer._path).rstrip("/").rpartition("/")[0] or "."


def _rank_in(buffer: TrajectoryReplayBuffer, group: Any) -> tuple[int, int]:
    """Return this process's rank and the number of ranks.

    Raises:
        ConfigurationError: ``torch.distributed`` is not initialized, or the store is not that of the rank.
        StoreError: the buffer has no store.
    """
    import torch.distributed as dist

    if buffer._path is None:
        raise StoreError("a point of a run: this buffer has no store of its own; use auto_save=True")
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigurationError("a point of a run is saved by all its ranks: call torch.distributed's init first")
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if buffer._path.rstrip("/").rpartition("/")[2] != f"rank_{rank}":
        raise ConfigurationError(
            f"auto_save_path {buffer._path}: rank {rank} of {ranks} writes to a folder rank_{rank} of the run"
        )
    return rank, ranks


def _told_by_all(group: Any, mine: str | None, call: str) -> list[str]:
    """Gather the errors of all ranks.

    Raises:
        StoreWriteError: a rank does not answer.
    """
    import torch.distributed as dist

    errors: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(errors, mine, group=group)
    except RuntimeError as error:
        own = "" if mine is None else f"; here: {mine}"
        raise StoreWriteError(f"{call}: a rank does not answer ({error}); it may lack the point{own}") from error
    return [text for text in errors if text is not None]
