"""Stores started as actors of Ray: which class, on which node, and which of them are there already.

Ray gives its nodes new ids at each start, and takes any of them for an actor: neither says whose disk has which store.
So the nodes are asked which directories they have.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from trajstore.core.files.opening import open_directory
from trajstore.core.store.catalog import Catalog
from trajstore.distributed.actors import Stores, actor_name, away, first_line, ray
from trajstore.distributed.server import MOST_STORES, StoreServer
from trajstore.errors import ConfigurationError, StoreError, StoreUnreachableError, listed

logger = logging.getLogger(__name__)

_PREFIX = "rank_"

_GROUPS = {"add": 4, "wait": 256, "read": 8, "save": 4}
"""Threads of a store's process, for each kind of call; what takes long does not keep others waiting."""

_METHODS = {
    "add": ("add",),
    "wait": ("committed", "flush", "wait_mirrored", "evict", "clear", "release"),
    "read": (
        *("read", "trajectories", "extents", "facts", "rows", "late_rows", "news", "stats", "tick", "mirror_state"),
        "saved_points",
    ),
    "save": (
        *("hold", "prepare_checkpoint", "publish_checkpoint", "pin", "remove_snapshot", "save_point", "go_to"),
        "compact",
    ),
}


def everywhere(path: str | Path) -> str:
    """Return a path that means the same in every process, whatever directory it works in."""
    return str(path) if "://" in str(path) else os.path.abspath(path)


def start_stores(
    known: Stores,
    path: str,
    stores: int | str,
    options: Mapping[str, Any],
    actor_options: Mapping[str, Any],
    scheduling_strategy: Any,
    shared: bool,
) -> Stores:
    """Start the stores that are not there yet; return all of them.

    Args:
        known: those that are there.
        path: folder of the stores, the same on every node.
        stores: how many, or ``"per_node"``.
        options: how each makes its buffer.
        actor_options: for Ray's actors.
        scheduling_strategy: Ray's, for all of them; None = spread.
        shared: whether a store may be started again on another node, because all reach the directory.

    Raises:
        ConfigurationError: an argument is out of range; or a store is there already, with another path or options.
        StoreUnreachableError: a store does not start for the deadline, says what it waits for; or no node answers.
    """
    wanted = dict(options)
    reserved = {"num_cpus": 1, **actor_options}
    if stores == "per_node":
        if scheduling_strategy is not None:
            raise ConfigurationError("scheduling_strategy: has no effect with stores='per_node'")
        placed = _one_per_node(known, path, reserved, shared)
    elif not isinstance(stores, int) or isinstance(stores, bool) or not 1 <= stores <= MOST_STORES:
        raise ConfigurationError(f"stores: {stores!r}, must be 'per_node' or a number in [1, {MOST_STORES}]")
    else:
        placed = dict.fromkeys(range(stores), scheduling_strategy or "SPREAD")
    for rank, strategy in placed.items():
        _start(known.name, rank, path, wanted, reserved, strategy, known.namespace)
    found = Stores(known.name, known.namespace, known.deadline)
    there = [number for number in found.ranks if _has_begun(found, number, reserved)]
    for number in there:
        found.enlist(number)
        about = found.describe(number)
        if (about.path, dict(about.options)) != (path, wanted):
            raise ConfigurationError(
                f"store rank_{number} of {known.name!r} is there already, with path {about.path!r} and options "
                f"{dict(about.options)}; connect to it, or stop() it first"
            )
    for number in [*there, *there]:  # what a store that has joined is given now is newer than what the others have
        found.note(found.call(number, "tick", found.clock))
    _tell_unserved(found, path, there)
    return found


def _one_per_node(known: Stores, path: str, reserved: Mapping[str, Any], shared: bool) -> dict[int, Any]:
    """Return the strategy of each store that is to be started, by rank: a node has the store whose directory it has.

    Nodes that have a store, that are too small for one or do not answer get none; the last two are told.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    taken = {known.node_of(rank) for rank in known.ranks}
    free = [node for node in _able_nodes(reserved) if node not in taken]
    found = _ask_nodes(free, _ranks_below, path, seconds=known.deadline)
    if not found and not taken - {None}:
        raise StoreUnreachableError(f"{known.name!r}: no node can begin a store; see the warnings, and actor_options")
    given = one_each(list(found), found, known.ranks)
    elsewhere = {*known.lost, *(rank for ranks in found.values() for rank in ranks)}
    for node, rank in given.items():
        if "://" not in path and rank in elsewhere - found[node]:
            logger.warning(
                "store rank_%d of %r begins empty on node %s, which has no %s/rank_%d",
                rank,
                known.name,
                node,
                path,
                rank,
            )
    return {rank: NodeAffinitySchedulingStrategy(node, soft=shared) for node, rank in given.items()}


def _able_nodes(reserved: Mapping[str, Any]) -> list[str]:
    """Return the ids of the nodes that have, busy or not, what a store reserves; others are told."""
    wanted, able = _amounts_of(reserved), []
    for node in sorted(ray().nodes(), key=lambda one: str(one["NodeID"])):
        has = node["Resources"]
        if node["Alive"] and any(amount > has.get(name, 0) for name, amount in wanted.items()):
            logger.warning(
                "node %s (%s) gets no store: it has %s, and a store reserves %s; see actor_options",
                node["NodeID"],
                node["NodeManagerHostname"],
                _amounts(wanted, has),
                _amounts(wanted, wanted),
            )
        elif node["Alive"]:
            able.append(node["NodeID"])
    return able


def _ask_nodes(nodes: Sequence[str], task: Callable[..., Any], *arguments: Any, seconds: float) -> dict[str, Any]:
    """Return what a function returns on each node that answers within ``seconds``; others are told."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not nodes:
        return {}
    module = ray()
    remote = module.remote(task)
    asked = {}
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        asked[node] = remote.options(num_cpus=0, scheduling_strategy=there).remote(*arguments)
    module.wait(list(asked.values()), num_returns=len(asked), timeout=seconds)
    found = {}
    for node, answer in asked.items():
        try:
            found[node] = module.get(answer, timeout=0)
        except away() as error:
            logger.warning(
                "node %s does not answer, so nobody knows which stores it has, and it gets none: %s",
                node,
                first_line(error),
            )
    return found


def _ranks_below(path: str) -> set[int]:
    return {int(number) for one in Path(path).glob(f"{_PREFIX}*") if (number := one.name[len(_PREFIX) :]).isdigit()}


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


def _tell_unserved(found: Stores, path: str, ranks: Sequence[int]) -> None:
    """Name every directory of the run that no store serves: what lies there is in no draw."""
    if "://" in path:  # one place for all nodes, of which each number has one directory
        return
    served = {rank: (about.host, about.store_id) for rank in ranks for about in [found.describe(rank)]}
    nodes = sorted(node["NodeID"] for node in ray().nodes() if node["Alive"])
    told = set()
    for lying in _ask_nodes(nodes, unserved_below, path, served, seconds=found.deadline).values():
        for rank, host, store_id, holds in lying:
            if (rank, store_id) in told:  # nodes that share a disk
                continue
            told.add((rank, store_id))
            where = f"{path}/{_PREFIX}{rank}"
            why = (
                f"rank_{rank} is served from another directory, on {served[rank][0]}"
                if rank in served
                else f"create(..., stores={rank + 1}) would serve it, where all nodes reach it"
            )
            logger.warning(
                "%s on %s is served by no store of %r: no draw shows it. It has %s; %s. To add these to the stores "
                "that are served, on that machine: old = TrajectoryReplayBuffer.open(%r); "
                "handle.add_trajectories(map(old.get, old.trajectory_ids.tolist())).committed(); then move it away",
                where,
                host,
                found.name,
                holds,
                why,
                where,
            )


def unserved_below(path: str, served: Mapping[int, tuple[str, str]]) -> list[tuple[int, str, str, str]]:
    """Return rank, host, UUID and content, in words, of the stores below a path of this machine that nobody serves.

    Args:
        path: of the run.
        served: host and UUID of each store that is served. A directory elsewhere that has the UUID is the same one, on
            a disk that machines share.
    """
    lying = []
    host = socket.gethostname()
    for rank in sorted(_ranks_below(path)):
        if rank in served and served[rank][0] == host:
            continue
        directory = open_directory(f"{path}/{_PREFIX}{rank}")
        try:
            if not Catalog.exists(directory):
                continue
            catalog = Catalog.open(directory)
        except StoreError as error:
            lying.append((rank, host, "", f"it cannot be read: {error}"))
            continue
        if rank not in served or served[rank][1] != catalog.store_id:
            lying.append((rank, host, catalog.store_id, f"{len(catalog.index)} trajectories"))
    return lying


def _has_begun(found: Stores, rank: int, reserved: Mapping[str, Any]) -> bool:
    """Return whether a store answers; False for one whose actor has ended for good.

    Raises:
        StoreUnreachableError: it has not answered for the deadline; says what of Ray's it may wait for.
    """
    try:
        return found.node_of(rank) is not None
    except StoreUnreachableError as error:
        wanted = _amounts_of(reserved)
        free = ray().available_resources()
        short = sorted(name for name, amount in wanted.items() if amount > free.get(name, 0))
        why = f"Ray has no room for it, too little of {listed(short)}" if short else first_line(error)
        raise StoreUnreachableError(
            f"store rank_{rank} of {found.name!r} has not begun for {found.deadline:.0f} s: {why}. A store reserves "
            f"{_amounts(wanted, wanted)} on one node, free on all nodes together: {_amounts(wanted, free)}. Its actor "
            f"waits on, and create() finds it; to start it with other actor_options, first end it: "
            f"ray.kill(ray.get_actor({actor_name(found.name, rank)!r}, namespace={found.namespace!r}))"
        ) from error


def _amounts_of(reserved: Mapping[str, Any]) -> dict[str, float]:
    """Return what Ray reserves for an actor, by the name of the resource."""
    wanted = {"CPU": reserved["num_cpus"], "GPU": reserved.get("num_gpus"), "memory": reserved.get("memory")}
    return {name: amount for name, amount in {**wanted, **reserved.get("resources", {})}.items() if amount}


def _amounts(names: Iterable[str], amounts: Mapping[str, Any]) -> str:
    return listed(f"{name} {amounts.get(name, 0):g}" for name in names) or "nothing"


@cache
def _actor_class() -> Any:
    module = ray()

    class StoreActor(StoreServer):
        """A server in a process of its own; long waits do not keep others from adding and reading."""

        def __init__(self, path: str, rank: int, options: Mapping[str, Any]) -> None:
            node = module.get_runtime_context().get_node_id()
            super().__init__(path, rank, options, (socket.gethostname(), node, uuid.uuid4().hex))

    for group, names in _METHODS.items():
        for name in names:
            inherited = getattr(StoreServer, name)
            setattr(StoreActor, name, module.method(concurrency_group=group)(_copy(inherited)))
    return module.remote(concurrency_groups=_GROUPS)(StoreActor)


def _copy(method: Any) -> Any:
    """Return a function of its own, as Ray writes on what it decorates."""
    from types import FunctionType

    return FunctionType(method.__code__, method.__globals__, method.__name__, method.__defaults__, method.__closure__)


def _start(
    name: str,
    rank: int,
    path: str,
    options: Mapping[str, Any],
    actor_options: Mapping[str, Any],
    scheduling_strategy: Any,
    namespace: str,
) -> Any:
    """Return a store's actor: the one that has the name already, or a new one, which Ray starts again when it dies."""
    return (
        _actor_class()
        .options(
            name=actor_name(name, rank),
            namespace=namespace,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=0,  # callers try again themselves: they know when to stop, and what to say
            scheduling_strategy=scheduling_strategy,
            **actor_options,
        )
        .remote(path, rank, dict(options))
    )
