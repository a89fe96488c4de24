"""Stores started as actors of Ray: which class, where Ray is to place them, and which of them are there already."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from trajstore.distributed.actors import Stores, actor_name, first_line, ray
from trajstore.distributed.homes import lying, one_each
from trajstore.distributed.server import MOST_STORES, StoreServer
from trajstore.errors import ConfigurationError, StoreUnreachableError, listed

logger = logging.getLogger(__name__)

_GROUPS = {"add": 4, "wait": 256, "read": 8, "save": 4}
"""Threads of a store's process, for each kind of call; what takes long does not keep others waiting."""

_METHODS = {
    "add": ("add",),
    "wait": ("committed", "flush", "wait_mirrored", "evict", "clear", "release"),
    "read": ("read", "trajectories", "extents", "news", "stats", "tick", "mirror_state", "saved_points"),
    "save": (
        *("hold", "prepare_checkpoint", "publish_checkpoint", "pin", "unpin", "save_point", "rollback"),
        "compact",
    ),
}


def everywhere(path: str | Path) -> str:
    """Return a path that means the same in every process, whatever directory it works in."""
    return str(path) if "://" in str(path) else os.path.abspath(path)


def strategies(stores: int | str, given: Any, shared: bool) -> Sequence[Any]:
    """Return how Ray is to place each store.

    Args:
        stores: how many, or ``"per_node"``.
        given: a strategy of Ray's for all of them; None = spread.
        shared: whether a store may be started again on another node, because all reach the directory.
    """
    if stores == "per_node":
        if given is not None:
            raise ConfigurationError("scheduling_strategy: has no effect with stores='per_node'")
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return [NodeAffinitySchedulingStrategy(node, soft=shared) for node in alive_nodes()]
    if not isinstance(stores, int) or isinstance(stores, bool) or not 1 <= stores <= MOST_STORES:
        raise ConfigurationError(f"stores: {stores!r}, must be 'per_node' or a number in [1, {MOST_STORES}]")
    return [given or "SPREAD"] * stores


def start_stores(
    known: Stores,
    path: str,
    placed: Sequence[Any],
    options: Mapping[str, Any],
    actor_options: Mapping[str, Any],
    *,
    per_node: bool,
) -> Stores:
    """Start the stores that are not there yet; return all of them.

    Args:
        known: those that are there.
        path: folder of the stores, the same on every node.
        placed: what :func:`strategies` returned.
        options: how each makes its buffer.
        actor_options: for Ray's actors.
        per_node: each strategy is of a node, which shall have one store.

    Raises:
        ConfigurationError: a store is there already, with another path or other options.
        StoreUnreachableError: a store does not start for the deadline; says what it waits for.
    """
    wanted = dict(options)
    reserved = {"num_cpus": 1, **actor_options}
    for rank, strategy in (_one_per_node(known, path, placed) if per_node else dict(enumerate(placed))).items():
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
    return found


def _one_per_node(known: Stores, path: str, placed: Sequence[Any]) -> dict[int, Any]:
    """Return the strategy of each store that is to be started, by rank: a node has the store whose directory it has."""
    taken = {known.node_of(rank) for rank in known.ranks}
    free = {strategy.node_id: strategy for strategy in placed if strategy.node_id not in taken}
    found = {} if "://" in path or not free else lying(list(free), path, known.deadline)
    given = one_each(list(free), found, known.ranks)
    for node, rank in given.items():
        if found and rank not in found[node] and (rank in known.lost or any(rank in ranks for ranks in found.values())):
            logger.warning(
                "store rank_%d of %r begins empty on node %s, which has no %s/rank_%d",
                rank,
                known.name,
                node,
                path,
                rank,
            )
    return {rank: free[node] for node, rank in given.items()}


def _has_begun(found: Stores, rank: int, reserved: Mapping[str, Any]) -> bool:
    """Return whether a store answers; False for one whose actor has ended for good.

    Raises:
        StoreUnreachableError: it has not answered for the deadline; says what of Ray's it may wait for.
    """
    try:
        return found.node_of(rank) is not None
    except StoreUnreachableError as error:
        wanted = {"CPU": reserved["num_cpus"], "GPU": reserved.get("num_gpus"), "memory": reserved.get("memory")}
        wanted = {name: amount for name, amount in {**wanted, **reserved.get("resources", {})}.items() if amount}
        free = ray().available_resources()
        short = sorted(name for name, amount in wanted.items() if amount > free.get(name, 0))
        why = f"Ray has no room for it, too little of {listed(short)}" if short else first_line(error)
        raise StoreUnreachableError(
            f"store rank_{rank} of {found.name!r} has not begun for {found.deadline:.0f} s: {why}. A store reserves "
            f"{_amounts(wanted, wanted)} on one node, free on all nodes together: {_amounts(wanted, free)}. Its actor "
            f"waits on, and create() finds it; to start it with other actor_options, first end it: "
            f"ray.kill(ray.get_actor({actor_name(found.name, rank)!r}, namespace={found.namespace!r}))"
        ) from error


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


def alive_nodes() -> list[str]:
    """Return the ids of the nodes that are there, in the order of their ids."""
    return sorted(node["NodeID"] for node in ray().nodes() if node["Alive"])
