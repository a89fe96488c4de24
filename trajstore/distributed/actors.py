"""Stores as actors of Ray: found by name, called with a deadline. Here is decided what Ray's errors mean."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import ModuleType
from typing import Any

from trajstore.distributed.membership import enlist, enlisted, strike
from trajstore.distributed.server import MOST_STORES, ServedStore
from trajstore.errors import (
    ConfigurationError,
    MissingDependencyError,
    StoreUnreachableError,
    StoreWriteError,
    TrajstoreError,
    listed,
)

logger = logging.getLogger(__name__)

NAMESPACE = "trajstore"

_PAUSE = 0.1  # seconds before a store that did not answer is asked again; doubles
_LONGEST_PAUSE = 2.0
_AT_ONCE = 32  # stores that are called at once
_LOOK_AGAIN = 2.0  # seconds after which it is asked whether a silent actor has ended


def ray() -> ModuleType:
    """Return the module ``ray``.

    Raises:
        MissingDependencyError: it is not installed.
        ConfigurationError: this process has not joined a cluster.
    """
    try:
        import ray as module
    except ImportError as error:
        raise MissingDependencyError("ray", "ray") from error
    if not module.is_initialized():
        raise ConfigurationError("this process has not joined a Ray cluster: call ray.init(address=...) first")
    return module


def away() -> tuple[type[Exception], ...]:
    """Return Ray's errors that say nothing of the call itself: actor, node or answer are lost. It may be made again."""
    from ray import exceptions

    return (
        exceptions.RayActorError,
        exceptions.ActorUnschedulableError,  # its node is lost, and it has not ended yet
        exceptions.GetTimeoutError,
        exceptions.ObjectLostError,
        exceptions.NodeDiedError,
        exceptions.RaySystemError,
    )


def actor_name(name: str, rank: int) -> str:
    """Return the name under which a store's actor is found."""
    return f"{name}/rank_{rank}"


class Stores:
    """The stores of one name, as this process sees them.

    Args:
        name: of the buffer.
        namespace: of the actors.
        deadline: seconds for which a store that does not answer is asked again.
    """

    def __init__(self, name: str, namespace: str, deadline: float) -> None:
        self.name = name
        self.deadline = deadline
        self.namespace = namespace
        self.clock = 0
        """More than all ids that this process has heard of from the stores; what it adds gets higher ones."""
        self._actors: dict[int, Any] = {}
        self._enlisted: set[int] = set()
        self._told: set[int] = set()
        """Stores of which it was told that they do not answer, which is enough until they do."""
        self._about: dict[int, ServedStore] = {}
        self.look()

    def look(self) -> list[int]:
        """Look which stores there are; return the ranks of those that have an actor."""
        from ray.util import list_named_actors

        ray()
        prefix = actor_name(self.name, 0).removesuffix("0")
        named = set()
        for found in list_named_actors(all_namespaces=True):
            rank = found["name"].removeprefix(prefix)
            if found["namespace"] == self.namespace and found["name"] != rank and rank.isdigit():
                named.add(int(rank))
        for number in self._actors.keys() - named:  # its actor has ended for good, as one of a lost node does
            self.forget(number)
        for number in named:
            self._find(number)
        self._enlisted = enlisted(self.namespace, self.name)
        return self.ranks

    @property
    def ranks(self) -> list[int]:
        """Numbers of the stores that have an actor, as of the last look."""
        return sorted(self._actors)

    @property
    def all_ranks(self) -> list[int]:
        """Numbers of all stores that have begun and were not stopped, ``0 .. n - 1``; also of those lost since."""
        return list(range(max(self._enlisted | self._actors.keys(), default=-1) + 1))

    @property
    def lost(self) -> list[int]:
        """Numbers of the stores that have no actor any more: only ``create`` brings them back."""
        return sorted(set(self.all_ranks) - self._actors.keys())

    def look_whole(self) -> list[int]:
        """Look which stores there are; return the ranks of all.

        Raises:
            StoreUnreachableError: some are lost; names them.
        """
        self.look()
        if self.lost:
            raise StoreUnreachableError(self.loss())
        return self.ranks

    def loss(self) -> str:
        """Return the sentence that says which stores are lost."""
        names = listed(f"rank_{rank}" for rank in self.lost)
        some = len(self.lost) > 1
        return (
            f"store{'s' if some else ''} {names} of {self.name!r} {'are' if some else 'is'} not there, as after the "
            f"loss of a node; create() starts {'them' if some else 'it'} again"
        )

    def enlist(self, rank: int) -> None:
        """Note, for all who connect, that a store has begun."""
        enlist(self.namespace, self.name, rank)
        self._enlisted.add(rank)

    def _find(self, rank: int) -> Any:
        """Return a store's actor; None if there is none."""
        if rank not in self._actors and rank < MOST_STORES:
            with suppress(ValueError):  # there is none
                self._actors[rank] = ray().get_actor(actor_name(self.name, rank), namespace=self.namespace)
        return self._actors.get(rank)

    def forget(self, rank: int) -> None:
        """Look a store's actor up anew at the next call: somebody may have made another one."""
        self._actors.pop(rank, None)
        self._about.pop(rank, None)
        self._find(rank)

    def note(self, next_id: int) -> None:
        """Note that ids below this one have been given out."""
        self.clock = max(self.clock, next_id)

    def submit(self, rank: int, method: str, *arguments: Any) -> Any:
        """Begin a call and return its reference.

        Raises:
            StoreUnreachableError: there is no actor of that number now.
        """
        actor = self._find(rank)
        if actor is None:
            raise StoreUnreachableError(f"{self._named(rank)} is not there; create() starts it again")
        return getattr(actor, method).remote(*arguments)

    def call(self, rank: int, method: str, *arguments: Any, deadline: float | None = None) -> Any:
        """Make a call, again and again until it is answered.

        Raises:
            StoreUnreachableError: it was not for ``deadline`` seconds; says what the last attempt said.
        """
        limit = self.deadline if deadline is None else deadline
        until = time.monotonic() + limit
        pause = _PAUSE
        unanswered: tuple[type[Exception], ...] = (*away(), StoreUnreachableError)
        while True:
            try:
                answer = ray().get(self.submit(rank, method, *arguments), timeout=max(0.001, until - time.monotonic()))
                self._told.discard(rank)
                return answer
            except unanswered as error:
                if time.monotonic() + pause >= until:
                    raise self.unreachable(rank, limit, error) from error
                if rank not in self._told:
                    self._told.add(rank)
                    logger.warning("%s does not answer (%s); asked again", self._named(rank), first_line(error))
                self.forget(rank)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def call_all(self, arguments: Mapping[int, Sequence[Any]], method: str) -> dict[int, Any]:
        """Make a call to several stores at once; return their answers by rank.

        Args:
            arguments: of each store's call.
            method: its name.

        Raises:
            StoreUnreachableError: a store has not answered.
            StoreWriteError: a store has raised it; names the store.
            Exception: what a store raised else; of several the one of the lowest rank, the others are logged.
        """
        if not arguments:
            return {}
        with ThreadPoolExecutor(min(len(arguments), _AT_ONCE)) as pool:
            calls = {rank: pool.submit(self.call, rank, method, *given) for rank, given in arguments.items()}
        failed = {rank: error for rank, call in calls.items() if (error := call.exception()) is not None}
        for rank, error in list(failed.items())[1:]:
            logger.error("%s: %s: %s", self._named(rank), method, first_line(_cause(error)))
        for rank, error in failed.items():
            cause = _cause(error)
            if type(cause) is StoreWriteError:
                raise StoreWriteError(f"{self._named(rank)}: {cause}") from error
            if cause is not error:
                raise cause from error
            raise error
        return {rank: call.result() for rank, call in calls.items()}

    def describe(self, rank: int) -> ServedStore:
        """Return what a store says of itself; asked once per actor."""
        if rank not in self._about:
            self._about[rank] = self.call(rank, "describe")
        return self._about[rank]

    def described(self) -> dict[int, ServedStore]:
        """Return what the stores say of themselves that answer, by rank; others are waited for, then told in a warning.

        They are asked all at once, so this takes ``deadline`` seconds at most.
        """
        if self.lost:
            logger.warning("%s. Its trajectories are left out until then", self.loss())
        found = {}
        with ThreadPoolExecutor(min(max(1, len(self.ranks)), _AT_ONCE)) as pool:
            for rank, call in [(rank, pool.submit(self.describe, rank)) for rank in self.ranks]:
                try:
                    found[rank] = call.result()
                except StoreUnreachableError as error:
                    logger.warning("%s; its trajectories are left out until it answers", error)
        return found

    def node_of(self, rank: int) -> str | None:
        """Return the node on which a store is; None if its actor has ended for good, as one of a lost node does.

        Raises:
            StoreUnreachableError: it neither answered nor ended for ``deadline`` seconds.
        """
        until = time.monotonic() + self.deadline
        while rank in self._actors:
            try:
                about: ServedStore = self.call(rank, "describe", deadline=min(_LOOK_AGAIN, self.deadline))
            except StoreUnreachableError:
                if time.monotonic() >= until:
                    raise
                self.forget(rank)
            else:
                self._about[rank] = about
                return about.node
        return None

    def stop(self, rank: int) -> None:
        """Close a store and end its actor; nothing to do for one that does not answer but to end it."""
        if self._find(rank) is None:
            logger.warning("%s is not there: it was lost, and not closed", self._named(rank))
        else:
            try:
                self.call(rank, "close")
            except StoreUnreachableError as error:
                logger.warning("%s; its actor is ended all the same", error)
        if rank in self._actors:
            ray().kill(self._actors.pop(rank))
        self._about.pop(rank, None)
        strike(self.namespace, self.name, rank)
        self._enlisted.discard(rank)

    def here(self, rank: int) -> bool:
        """Return whether a store's directory can be read by this process without asking the store."""
        about = self.describe(rank)
        return about.host == socket.gethostname() and os.path.isdir(os.path.join(about.path, f"rank_{rank}"))

    def unreachable(self, rank: int, seconds: float, error: BaseException) -> StoreUnreachableError:
        """Return the error that says that a store has not answered."""
        return StoreUnreachableError(f"{self._named(rank)} has not answered for {seconds:.0f} s: {first_line(error)}")

    def _named(self, rank: int) -> str:
        return f"store rank_{rank} of {self.name!r}"


def _cause(error: BaseException) -> BaseException:
    """Return what a store raised, without what Ray tells around it."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, TrajstoreError) else error


def first_line(error: BaseException) -> str:
    """Return what an error says, in one line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
