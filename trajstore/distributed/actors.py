"""Stores as actors of Ray: found by name, called with a deadline. Here is decided what Ray's errors mean."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from trajstore.distributed.asking import Round
from trajstore.distributed.server import MOST_STORES, ServedStore
from trajstore.errors import (
    ConfigurationError,
    MissingDependencyError,
    StoreUnreachableError,
    StoreWriteError,
    TrajectoryUnavailableError,
    TrajstoreError,
    listed,
)

logger = logging.getLogger(__name__)

NAMESPACE = "trajstore"

_NOTES = b"trajstore"  # namespace of Ray's key-value store

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
        exceptions.TaskUnschedulableError,  # its node is lost, and Ray lists it still
        exceptions.WorkerCrashedError,
        exceptions.LocalRayletDiedError,
        exceptions.OutOfMemoryError,
        exceptions.GetTimeoutError,
        exceptions.ObjectLostError,
        exceptions.NodeDiedError,
        exceptions.RaySystemError,
    )


def actor_name(name: str, rank: int) -> str:
    """Return the name under which a store's actor is found."""
    return f"{name}/rank_{rank}"


class SilentStoresError(StoreUnreachableError, TrajectoryUnavailableError):
    """Of rows that were drawn, some lie in stores that do not answer, while others do: draw again.

    Args:
        failed: what is known of each such store, by rank.
    """

    def __init__(self, failed: Mapping[int, Exception]) -> None:
        super().__init__("; ".join(map(str, failed.values())))
        self.failed = failed


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
        self._enlisted = self._noted()
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
        """Note, for all who connect, that a store has begun.

        Ray forgets the name of an actor that has ended. What is noted where Ray keeps these names stays until
        :meth:`stop`, and as long as they do: no actor, node or producer that ends takes it along.
        """
        from ray.experimental.internal_kv import _internal_kv_put

        _internal_kv_put(self._note_key + str(rank).encode(), b"", namespace=_NOTES)
        self._enlisted.add(rank)

    def _noted(self) -> set[int]:
        from ray.experimental.internal_kv import _internal_kv_list

        return {int(key[len(self._note_key) :]) for key in _internal_kv_list(self._note_key, namespace=_NOTES)}

    @property
    def _note_key(self) -> bytes:
        """The beginning of the keys of this name's stores, which no other name's keys begin with."""
        return json.dumps([self.namespace, self.name]).encode() + b"/"

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

    def submit(self, rank: int, method: str, *arguments: Any, pieces: int = 1) -> Any:
        """Begin a call and return its reference; those of its pieces, if it is answered in several.

        Raises:
            StoreUnreachableError: there is no actor of that number now.
        """
        actor = self._find(rank)
        if actor is None:
            raise StoreUnreachableError(f"{self._named(rank)} is not there; create() starts it again")
        begun = getattr(actor, method)
        return (begun if pieces == 1 else begun.options(num_returns=pieces)).remote(*arguments)

    def call(self, rank: int, method: str, *arguments: Any, deadline: float | None = None) -> Any:
        """Make a call, again and again until it is answered.

        Raises:
            StoreUnreachableError: it was not for ``deadline`` seconds; says what the last attempt said.
        """
        found, failed = self.ask({rank: arguments}, method, self.deadline if deadline is None else deadline)
        for error in failed.values():
            raise error
        return found[rank]

    def ask(
        self,
        arguments: Mapping[int, Sequence[Any]],
        method: str,
        seconds: float,
        pieces: Mapping[int, int] | None = None,
    ) -> tuple[dict[int, Any], dict[int, Exception]]:
        """Make a call to several stores at once, each again and again until it is answered.

        Args:
            arguments: of each store's call.
            method: its name.
            seconds: for which each is asked.
            pieces: in how many each answers, if in more than one; the pieces are its answer.

        Returns:
            What stores have answered, by rank; and, of the others, what they raised, or a StoreUnreachableError.
        """
        asking = Round(self, ray(), away(), method, arguments, pieces or {}, seconds)
        asking.run()
        return asking.found, asking.failed

    def answered(self, rank: int) -> None:
        """Note that a store answers."""
        self._told.discard(rank)

    def silent(self, rank: int, error: Exception) -> None:
        """Note that a store did not answer, with one warning until it does; it is asked again."""
        if rank not in self._told:
            self._told.add(rank)
            logger.warning("%s does not answer (%s); asked again", self._named(rank), first_line(error))

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
        found, failed = self.ask(arguments, method, self.deadline)
        for rank in sorted(failed)[1:]:
            logger.error("%s: %s: %s", self._named(rank), method, first_line(_cause(failed[rank])))
        for rank in sorted(failed):
            error = failed[rank]
            cause = _cause(error)
            if type(cause) is StoreWriteError:
                raise StoreWriteError(f"{self._named(rank)}: {cause}") from error
            if cause is not error:
                raise cause from error
            raise error
        return found

    def describe(self, rank: int, deadline: float | None = None) -> ServedStore:
        """Return what a store says of itself; asked once per actor."""
        if rank not in self._about:
            self._about[rank] = self.call(rank, "describe", deadline=deadline)
        return self._about[rank]

    def described(self) -> dict[int, ServedStore]:
        """Return what the stores say of themselves that answer, by rank; others are waited for, then told in a warning.

        They are asked all at once, so this takes ``deadline`` seconds at most.
        """
        if self.lost:
            logger.warning("%s. Its trajectories are left out until then", self.loss())
        found, failed = self.ask(dict.fromkeys(self.ranks, ()), "describe", self.deadline)
        for error in failed.values():
            if not isinstance(error, StoreUnreachableError):
                raise error
            logger.warning("%s; its trajectories are left out until it answers", error)
        self._about.update(found)
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
        from ray.experimental.internal_kv import _internal_kv_del

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
        _internal_kv_del(self._note_key + str(rank).encode(), namespace=_NOTES)
        self._enlisted.discard(rank)

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
