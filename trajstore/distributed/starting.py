"""Starts stores as Ray actors: actor class, placement, and detection of running stores.

Ray's node ids change with each cluster start, so they do not identify the disk with a store. The nodes are asked for
their directories instead.
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

from trajstore._core.files.opening import open_directory
from trajstore._core.store.catalog import Catalog
from trajstore.distributed.actors import Stores, actor_name, away, first_line, ray
from trajstore.distributed.server import MOST_STORES, StoreServer
from trajstore.errors import ConfigurationError, StoreError, StoreUnreachableError, listed, trajectories

logger = logging.getLogger(__name__)

_PREFIX = "rank_"

_GROUPS = {"add": 64, "wait": 256, "read": 8, "save": 4}
"""Threads of a store's process per group of methods, so that slow calls do not block others."""

_METHODS = {
    "add": ("add", "disown"),
    "wait": ("flush", "wait_mirrored", "evict", "clear", "check_values", "annotate", "release", "session"),
    "read": (
        *("rows_at", "trajectories", "extents", "facts", "rows", "late_rows", "changes", "described", "stats"),
        *("tick", "mirror_state", "history", "snapshots", "state_at", "changes_to", "commits"),
    ),
    "save": (*("hold", "pin", "remove_snapshot", "save_point", "go_to", "compact"),),
}


def everywhere(path: str | Path) -> str:
    """Return a path that is independent of the working directory."""
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
    """Start the missing stores; return all stores.

    Args:
        known: running stores.
        path: folder of the stores, the same on every node.
        stores: number of stores, or ``"per_node"``.
        options: options of each store's buffer.
        actor_options: Ray options of the actors.
        scheduling_strategy: Ray's strategy for all stores; None = spread.
        shared: a store may restart on another node, because all nodes share the directory.

    Raises:
        ConfigurationError: an argument is out of range; or a store is running with another path or options.
        StoreUnreachableError: a store did not start (the message says why), or no node answers.
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
    actors = {
        rank: _start(known.name, rank, path, wanted, reserved, strategy, known.namespace)
        for rank, strategy in placed.items()
    }
    started = Stores(known.name, known.namespace, known.deadline)
    there = [number for number in started.ranks if _has_begun(started, number, reserved)]
    for number in there:
        started.enlist(number)
        about = started.describe(number)
        if (about.path, dict(about.options)) != (path, wanted):
            raise ConfigurationError(
                f"store rank_{number} of {known.name!r} exists already, with path {about.path!r} and options "
                f"{dict(about.options)}; connect to it, or stop() it first"
            )
    if ended := sorted(actors.keys() - set(there)):
        whys = listed(f"rank_{number}: {_why_ended(actors[number], known.deadline)}" for number in ended)
        others = "; connect() goes on with the others" if there else ""
        raise StoreUnreachableError(f"stores of {known.name!r} could not start: {whys}{others}")
    for number in [*there, *there]:  # twice, so that a new store's ids are above those of all others
        started.note(started.call(number, "tick", started.clock))
    _tell_unserved(started, path, there)
    return started


def _why_ended(actor: Any, seconds: float) -> str:
    """Return why a store's actor ended while it started."""
    try:
        ray().get(actor.describe.remote(), timeout=seconds)
    except away() as error:
        return first_line(error)
    return "it has ended, and runs again"


def _one_per_node(known: Stores, path: str, reserved: Mapping[str, Any], shared: bool) -> dict[int, Any]:
    """Return the strategy of each store to start, by rank: on the node that has its directory.

    Nodes that have a store, lack the resources or do not answer get none; the last two cause a warning.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    taken = {known.node_of(rank) for rank in known.ranks}
    free = [node for node in _able_nodes(reserved) if node not in taken]
    directories = _ask_nodes(free, _ranks_below, path, seconds=known.deadline)
    if not directories and not taken - {None}:
        raise StoreUnreachableError(f"{known.name!r}: no node can start a store; see the warnings, and actor_options")
    given = one_each(list(directories), directories, known.ranks)
    elsewhere = {*known.lost, *(rank for ranks in directories.values() for rank in ranks)}
    for node, rank in given.items():
        if "://" not in path and rank in elsewhere - directories[node]:
            logger.warning(
                "store rank_%d of %r starts empty on node %s, which has no %s/rank_%d",
                rank,
                known.name,
                node,
                path,
                rank,
            )
    return {rank: NodeAffinitySchedulingStrategy(node, soft=shared) for node, rank in given.items()}


def _able_nodes(reserved: Mapping[str, Any]) -> list[str]:
    """Return the ids of the nodes whose total resources suffice for a store; warn about the others."""
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
    """Run a function on each node; return the results within ``seconds``, and warn about other nodes."""
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
    results = {}
    for node, answer in asked.items():
        try:
            results[node] = module.get(answer, timeout=0)
        except away() as error:
            logger.warning(
                "node %s does not answer, so its stores are unknown, and it gets none: %s", node, first_line(error)
            )
    return results


def _ranks_below(path: str) -> set[int]:
    return {
        int(number) for folder in Path(path).glob(f"{_PREFIX}*") if (number := folder.name[len(_PREFIX) :]).isdigit()
    }


def one_each(nodes: Sequence[str], found: Mapping[str, set[int]], taken: Collection[int]) -> dict[str, int]:
    """Return the rank for each node: one whose directory it has, else the lowest free one. Pure.

    Args:
        nodes: nodes that get one store each.
        found: ranks of the directories on each node.
        taken: ranks of running stores.
    """
    given: dict[str, int] = {}
    for node in sorted(nodes, key=lambda one: len(found.get(one, ()))):  # nodes with the fewest choices first
        own = found.get(node, set()) - set(taken) - set(given.values())
        if own:
            given[node] = min(own)
    for node in nodes:
        if node not in given:
            used = {*taken, *given.values()}
            given[node] = next(rank for rank in range(len(used) + 1) if rank not in used)
    return given


def _tell_unserved(found: Stores, path: str, ranks: Sequence[int]) -> None:
    """Warn about every directory of the run that no store serves, as draws exclude it."""
    if "://" in path:  # shared by all nodes: each rank has only one directory
        return
    served = {rank: (about.host, about.store_id) for rank in ranks for about in [found.describe(rank)]}
    nodes = sorted(node["NodeID"] for node in ray().nodes() if node["Alive"])
    reported = set()
    for lying in _ask_nodes(nodes, unserved_below, path, served, seconds=found.deadline).values():
        for rank, host, store_id, holds in lying:
            if (rank, store_id) in reported:  # reported by another node that shares the disk
                continue
            reported.add((rank, store_id))
            where = f"{path}/{_PREFIX}{rank}"
            why = (
                f"rank_{rank} is served from another directory, on {served[rank][0]}"
                if rank in served
                else f"create(..., stores={rank + 1}) would serve it, if all nodes reach it"
            )
            logger.warning(
                "%s on %s is not served by any store of %r, so it is never drawn. It has %s; %s. To add these to the "
                "stores that are served, on that machine: old = TrajectoryReplayBuffer.open(%r); "
                "handle.add_trajectories(map(old.get, old.trajectory_ids.tolist())).committed(); then move it away",
                where,
                host,
                found.name,
                holds,
                why,
                where,
            )


def unserved_below(path: str, served: Mapping[int, tuple[str, str]]) -> list[tuple[int, str, str, str]]:
    """Return rank, host, UUID and a description of each unserved store below a path on this machine.

    Args:
        path: path of the run.
        served: host and UUID of each served store. A directory with the same UUID is the same store, here or on a
            shared disk; host names do not identify machines.
    """
    lying = []
    host = socket.gethostname()
    for rank in sorted(_ranks_below(path)):
        directory = open_directory(f"{path}/{_PREFIX}{rank}")
        try:
            if not Catalog.exists(directory):
                continue
            catalog = Catalog.open(directory)
        except StoreError as error:
            lying.append((rank, host, "", f"it cannot be read: {error}"))
            continue
        if rank not in served or served[rank][1] != catalog.store_id:
            lying.append((rank, host, catalog.store_id, trajectories(len(catalog.index))))
    return lying


def _has_begun(found: Stores, rank: int, reserved: Mapping[str, Any]) -> bool:
    """Return whether a store answers; False if its actor has ended for good.

    Raises:
        StoreUnreachableError: no answer within the deadline; the message lists resources that Ray may lack.
    """
    try:
        return found.node_of(rank) is not None
    except StoreUnreachableError as error:
        wanted = _amounts_of(reserved)
        free = ray().available_resources()
        short = sorted(name for name, amount in wanted.items() if amount > free.get(name, 0))
        why = f"Ray has too little {listed(short)}" if short else first_line(error)
        raise StoreUnreachableError(
            f"store rank_{rank} of {found.name!r} has not started for {found.deadline:.0f} s: {why}. A store reserves "
            f"{_amounts(wanted, wanted)} on one node, free on all nodes together: {_amounts(wanted, free)}. Its actor "
            f"keeps waiting, and create() finds it; to start it with other actor_options, first kill it: "
            f"ray.kill(ray.get_actor({actor_name(found.name, rank)!r}, namespace={found.namespace!r}))"
        ) from error


def _amounts_of(reserved: Mapping[str, Any]) -> dict[str, float]:
    """Return the resources that Ray reserves for an actor, by name."""
    wanted = {"CPU": reserved["num_cpus"], "GPU": reserved.get("num_gpus"), "memory": reserved.get("memory")}
    return {name: amount for name, amount in {**wanted, **reserved.get("resources", {})}.items() if amount}


def _amounts(names: Iterable[str], amounts: Mapping[str, Any]) -> str:
    return listed(f"{name} {amounts.get(name, 0):g}" for name in names) or "nothing"


@cache
def _actor_class() -> Any:
    module = ray()

    class StoreActor(StoreServer):
        """A server in its own process; concurrency groups keep long waits from blocking other calls."""

        def __init__(self, path: str, rank: int, options: Mapping[str, Any]) -> None:
            node = module.get_runtime_context().get_node_id()
            about = (socket.gethostname(), node, uuid.uuid4().hex)
            super().__init__(path, rank, options, about, module.util.get_node_ip_address())

    for group, names in _METHODS.items():
        for name in names:
            inherited = getattr(StoreServer, name)
            setattr(StoreActor, name, module.method(concurrency_group=group)(_copy(inherited)))
    return module.remote(concurrency_groups=_GROUPS)(StoreActor)


def _copy(method: Any) -> Any:
    """Copy a function, because Ray sets attributes on decorated functions."""
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
    """Return a store's actor, existing or new; Ray restarts it when it dies."""
    return (
        _actor_class()
        .options(
            name=actor_name(name, rank),
            namespace=namespace,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=0,  # callers retry, with their own deadline and messages
            scheduling_strategy=scheduling_strategy,
            **actor_options,
        )
        .remote(path, rank, dict(options))
    )
