"""Read-only views of a pool's store, for operations and the viewer; its run may still be writing.

Registered under the entry point group ``trajstore.pools``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainer_hooks.replay.entry import PoolEntry, Refusal, entry_of
from trainer_hooks.replay.late_values import with_training
from trainer_hooks.replay.state import POOL_FACTS, PoolState, recover, with_pool_facts
from trainer_hooks.replay.store import RECORDED, PoolPoint, entries_of, newest_point
from trajstore._core.buffer.reader import Reader
from trajstore._core.files.base import Directory
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.run_ids import id_from
from trajstore._core.store.saved_points import PINS_FOLDER
from trajstore.errors import CorruptStoreError, InvalidTrajectoryError, TrajectoryUnavailableError
from trajstore.trajectory import AgentTrajectory

if TYPE_CHECKING:
    from trajstore.query import Query

Report = dict[str, Any]


def pool_report(catalog: Catalog) -> tuple[Report, npt.NDArray[np.bool_]] | None:
    """Return a report on a store's pool, and a mask of its trajectories over the index.

    Returns:
        ``trajectories``, ``tasks``, ``demonstrations``, ``difficulties`` (tasks by successes), ``skipped_tasks``,
        ``others``: trajectories that are not in the pool, and ``recorded``: whether these are a trainer's rollouts, so
        that the mask covers all. None if the store has no pool.

    Raises:
        CorruptStoreError: the pool's point cannot be decoded.
    """
    point = newest_point(catalog)
    if point is None:
        return None
    document, ids = point.document, catalog.index["trajectory_id"]
    state, there = PoolState.of_document(document), set(ids.tolist())
    tasks = {task: there.intersection(numbers) for task, numbers in entries_of(document).items()}
    live = [number for numbers in tasks.values() for number in numbers]
    recorded = bool(document.get(RECORDED))
    report = {
        "trajectories": len(live),
        "tasks": sum(map(bool, tasks.values())),
        "demonstrations": len(there.intersection(document["demonstrations"])),
        "difficulties": {str(key): count for key, count in sorted(state.buckets.sizes().items())},
        "skipped_tasks": len(state.skip),
        "others": len(ids) - len(live),
        "recorded": recorded,
    }
    return report, recorded | np.isin(ids, np.array(live, np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class SeenPool:
    """A pool's contents at one moment.

    Attributes:
        buffer: has its trajectories, perhaps among others.
        state: of the pool.
        among_others: whether the store has all rollouts of the trainer, which are shown too.
    """

    buffer: Reader
    state: PoolState
    among_others: bool = False

    def __len__(self) -> int:
        return len(self.buffer) if self.among_others else self.state.count()

    def overview(self) -> dict[str, Any]:
        """Return figures of the pool: tasks per difficulty now and by step, demonstrations, skipped tasks."""
        buckets = self.state.buckets.sizes()
        by_step = self.state.difficulties
        steps = sorted(by_step)
        known = sorted({*buckets, *(key for sizes in by_step.values() for key in sizes)})
        return {
            "histories": self.state.count(),
            "tasks": len(self.state.entries),
            "demonstrations": self.state.demonstrations(),
            "skipped": len(self.state.skip),
            "difficulties": [[key, buckets.get(key, 0)] for key in known],
            "steps": steps,
            "by_step": [[by_step[step].get(key, 0) for step in steps] for key in known],
        }

    def query(self) -> Query:
        """Return a query over the trajectories; see :meth:`ExperienceManager.query`."""
        whole = self.buffer.query()
        return replace(whole, facts=lambda: with_pool_facts(whole.facts(), self.state, every=self.among_others))

    def get(self, shown: str) -> AgentTrajectory:
        """Return a trajectory by its id.

        Raises:
            TrajectoryUnavailableError: the pool has no such id.
            CorruptStoreError: it is damaged.
        """
        number = id_from("trajectory_id", shown)
        chosen = (entry.trajectory_id for entry in self.state.all_entries())
        if not self.among_others and number not in chosen:
            raise TrajectoryUnavailableError(f"trajectory {shown}: not in the pool, or no longer")
        record = self.buffer.get(number)
        if not isinstance(record, AgentTrajectory):
            raise CorruptStoreError(f"trajectory {shown}: a step trajectory, which a pool cannot hold")
        return record


class Records:
    """The trajectories of a pool's store, each read once, and its newest saved point.

    Args:
        reader: shows the store.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._entries: dict[int, tuple[PoolEntry | Refusal, str]] = {}
        """Results of :meth:`entry`."""
        self._files: list[str] = []
        self._is_pool: bool | None = None
        """Whether a point among the files has a pool; None if unknown."""

    def look(self) -> SeenPool | None:
        """Return the pool as the reader shows it now; None if the reader shows several stores, or one without a pool.

        Raises:
            CorruptStoreError: its point cannot be decoded.
        """
        files = self._point_files()
        if files != self._files or self._is_pool is None:
            self._files, self._is_pool = files, None
            self._is_pool = bool(files) and self.newest_point() is not None
        if not self._is_pool:
            return None
        recovered, kept = recover(self), self.kept(self._entries)
        self._entries = {number: entry for number, entry in self._entries.items() if number in kept}
        return SeenPool(self._reader, recovered.state, among_others=recovered.among_others)

    def is_current(self) -> bool:
        """Return whether no point was saved or removed since :meth:`look`."""
        return self._files == self._point_files()

    def newest_point(self) -> PoolPoint | None:
        request = self._reader._live.request
        return newest_point(Catalog.open(self._directory()), None if request is None else request.pin)

    def _directory(self) -> Directory:
        (catalog,) = self._reader._live.catalogs_by_rank().values()
        return catalog.directory

    def _point_files(self) -> list[str]:
        """Return the files of all snapshots of a single store; the names of states change with every point."""
        alone = len(self._reader._live.catalogs_by_rank()) == 1
        return sorted(self._directory().listing(PINS_FOLDER)[0]) if alone else []

    def entry(self, trajectory_id: int, /) -> tuple[PoolEntry | Refusal, str]:
        if trajectory_id not in self._entries:
            stored = self._reader.get(trajectory_id)
            if not isinstance(stored, AgentTrajectory):
                raise InvalidTrajectoryError(f"trajectory {trajectory_id}: a step trajectory, which a pool cannot hold")
            record = with_training(stored)
            self._entries[trajectory_id] = entry_of(record, trajectory_id), record.tokenizer_fingerprint
        return self._entries[trajectory_id]

    def kept(self, ids: Collection[int], /) -> set[int]:
        return {*ids} & {*self._reader.trajectory_ids.tolist()}

    def newest_id(self) -> int:
        return max(self._reader.trajectory_ids.tolist(), default=-1)


class Support:
    """The functions of :class:`~trajstore.operations.pools.PoolSupport`."""

    facts = POOL_FACTS

    report = staticmethod(pool_report)
    records = Records


SUPPORT = Support()
