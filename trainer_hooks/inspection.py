"""Figures of a pool's store, for ``inspect``; its run may still be writing.

Registered under the entry point group ``trajstore.pools``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trainer_hooks.replay.state import PoolState
from trainer_hooks.replay.store import RECORDED, entries_of, newest_point
from trajstore._core.store.catalog import Catalog

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


class Support:
    """The functions of :class:`~trajstore.operations.pools.PoolSupport`."""

    report = staticmethod(pool_report)


SUPPORT = Support()
