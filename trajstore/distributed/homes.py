"""On which node each store's directory lies, so that a store is started where its trajectories are.

Ray gives its nodes new ids at each start, and takes any of them for an actor: neither says whose disk has which store.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from trajstore.distributed.actors import away, first_line, ray

logger = logging.getLogger(__name__)

_PREFIX = "rank_"


def lying(nodes: Sequence[str], path: str, seconds: float) -> dict[str, set[int]]:
    """Return the ranks whose directory each node has below a path, by the node's id.

    A node that does not answer for ``seconds`` is named in a warning, and has none.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    module = ray()
    task = module.remote(_ranks_below)
    asked = {
        node: task.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            path
        )
        for node in nodes
    }
    module.wait(list(asked.values()), num_returns=len(asked), timeout=seconds)
    found = {}
    for node, answer in asked.items():
        try:
            found[node] = set(module.get(answer, timeout=0))
        except away() as error:
            logger.warning("node %s does not say which stores it has below %s: %s", node, path, first_line(error))
            found[node] = set()
    return found


def _ranks_below(path: str) -> list[int]:
    return [int(number) for one in Path(path).glob(f"{_PREFIX}*") if (number := one.name[len(_PREFIX) :]).isdigit()]


def one_each(nodes: Sequence[str], found: Mapping[str, set[int]], taken: Collection[int]) -> dict[str, int]:
    """Return which store each node gets: one whose directory it has, else the lowest number that is left. Pure.

    Args:
        nodes: that get one each.
        found: ranks whose directory each has.
        taken: ranks of the stores that are there already.
    """
    given: dict[str, int] = {}
    for node in sorted(nodes, key=lambda one: len(found.get(one, ()))):  # who has the least choice comes first
        own = found.get(node, set()) - set(taken) - set(given.values())
        if own:
            given[node] = min(own)
    for node in nodes:
        if node not in given:
            used = {*taken, *given.values()}
            given[node] = next(rank for rank in range(len(used) + 1) if rank not in used)
    return given
