"""The store of an experience pool: what of its records the pool is, read from their documents alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trainer_hooks.replay.entry import PoolEntry, Refusal
from trainer_hooks.replay.journal import JOURNAL_KEY, recover
from trainer_hooks.replay.rules import PoolRules
from trajstore.core.columns.schema import DOCUMENT
from trajstore.core.reading.shard_access import ShardAccess
from trajstore.core.store.catalog import Catalog
from trajstore.errors import StoreError
from trajstore.trajectory import AgentTrajectory

Report = dict[str, Any]

_LOOKED_AT = 64
"""Records that are tried where the newest ones cannot be read."""


def pool_report(catalog: Catalog) -> tuple[Report, npt.NDArray[np.bool_]] | None:
    """Return what the pool of a store holds, and which of the index's entries are its trajectories.

    Returns:
        ``trajectories``, ``tasks``, ``demonstrations``, ``difficulties`` (tasks by successes), ``skipped_tasks``, and
        the records besides: ``journal_records``, and ``left_records`` of what left the pool and is not deleted yet; and
        a mask over the index. None where the store is no pool's.

    Raises:
        CorruptStoreError: the pool's journal cannot be understood.
    """
    access = ShardAccess(catalog)
    try:
        documents = _Documents(catalog, access)
        if not documents.are_of_a_pool():
            return None
        found = recover(documents, PoolRules(n_rollout=1), _entry)
    finally:
        access.close()
    live = [entry.trajectory_id for entry in found.state.all_entries()]
    report = {
        "trajectories": len(live),
        "tasks": len(found.state.entries),
        "demonstrations": found.state.demonstrations(),
        "difficulties": {str(key): count for key, count in sorted(found.state.buckets.sizes().items())},
        "skipped_tasks": len(found.state.skip),
        "journal_records": len(found.records),
        "left_records": len(set(found.garbage)),
    }
    return report, np.isin(catalog.index["trajectory_id"], np.array(live, np.int64))


def is_of_a_pool(catalog: Catalog) -> bool:
    """Return whether a store is a pool's: the newest record that can be read is. No tensor is read."""
    access = ShardAccess(catalog)
    try:
        return _Documents(catalog, access).are_of_a_pool()
    finally:
        access.close()


def _entry(record: AgentTrajectory, trajectory_id: int) -> PoolEntry | Refusal:
    """Return the entry of a record whose tokens were not read: nothing of it is compared."""
    return PoolEntry.of_record(record, trajectory_id, trajectory_id.to_bytes(8, "big"))


class _Documents:
    """The records of a store without their tensors."""

    def __init__(self, catalog: Catalog, access: ShardAccess) -> None:
        self._index = catalog.index
        self._access = access

    def are_of_a_pool(self) -> bool:
        """Return whether the newest record that can be read, of the newest few, is a pool's, as in a pool's store."""
        for position in range(self._index.end - 1, max(self._index.first, self._index.end - _LOOKED_AT) - 1, -1):
            try:
                if self._access.schema(self._index, position).kind != "agent":
                    return False
                return JOURNAL_KEY in self._read(position).metadata
            except (StoreError, OSError):
                continue
        return False

    def get(self, trajectory_id: int, /) -> AgentTrajectory:
        return self._read(self._index.position_of(trajectory_id))

    def ids(self) -> list[int]:
        return [int(number) for number in self._index["trajectory_id"]]

    def _read(self, position: int) -> AgentTrajectory:
        record = self._access.trajectory(self._index, position, (DOCUMENT,))
        if not isinstance(record, AgentTrajectory):
            raise StoreError(f"position {position}: a step trajectory, which is no record of a pool")
        return record
