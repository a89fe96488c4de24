"""Stores as Ray actors: lookup by name, calls with a deadline, interpretation of Ray's errors."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

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

PAUSE = 0.1  # seconds before the first retry; doubles
LONGEST_PAUSE = 2.0


@dataclass(slots=True, eq=False)
class _Call:
    """The call to one store."""

    rank: int
    arguments: Sequence[Any]
    due: float = 0.0
    """Time of the next attempt."""
    pause: float = PAUSE
    sent: Any = None
    """Reference of the answer; None until the call is sent."""


class Round:
    """Calls several stores in parallel, and retries until each has answered or the time is up.

    Args:
        stores: the actors.
        method: name of the method.
        arguments: arguments of the call, by rank.
        seconds: time limit of the retries.
    """

    def __init__(self, stores: Stores, method: str, arguments: Mapping[int, Sequence[Any]], seconds: float) -> None:
        self._stores = stores
        self._ray = ray()
        self._away: tuple[type[Exception], ...] = (StoreUnreachableError, *away())
        self._method = method
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        self._calls = [_Call(rank, given) for rank, given in arguments.items()]
        """Calls neither answered nor given up."""
        self.found: dict[int, Any] = {}
        """Answers by rank."""
        self.failed: dict[int, Exception] = {}
        """Exceptions of the stores, or StoreUnreachableError, by rank."""

    def run(self) -> None:
        """Run until every store has answered, raised or timed out."""
        while self._calls:
            self._each(self._send, [call for call in self._calls if call.sent is None and call.due <= time.monotonic()])
            sent = [call for call in self._calls if call.sent is not None]
            if sent and len(sent) == len(self._calls) and self._take_all(sent):
                return
            due = [call.due for call in self._calls if call.sent is None]
            pause = max(0.001, min([self._until, *due]) - time.monotonic())
            if sent:
                references = [call.sent for call in sent]
                self._ray.wait(references, num_returns=1, timeout=pause)
                arrived = set(self._ray.wait(references, num_returns=len(references), timeout=0)[0])
                self._each(self._take, [call for call in sent if call.sent in arrived])
                if time.monotonic() >= self._until:
                    self._each(self._give_up, [call for call in self._calls if call.sent is not None])
            elif self._calls:
                time.sleep(pause)

    def _each(self, do: Callable[[_Call], None], calls: Sequence[_Call]) -> None:
        for call in calls:
            try:
                do(call)
            except self._away as error:
                self._again(call, error)
            except Exception as error:  # raised by the store
                self._end(call, failed=_own(error))

    def _send(self, call: _Call) -> None:
        call.sent = self._stores.submit(call.rank, self._method, *call.arguments)

    def _take(self, call: _Call) -> None:
        self._answered(call, self._ray.get(call.sent, timeout=max(0.001, self._until - time.monotonic())))

    def _take_all(self, calls: Sequence[_Call]) -> bool:
        """Take all answers with one faster ``ray.get``; False on an error or a timeout."""
        references = [call.sent for call in calls]
        try:
            answers = self._ray.get(references, timeout=max(0.001, self._until - time.monotonic()))
        except Exception:  # taking each answer separately shows which store failed
            return False
        for call, answer in zip(calls, answers, strict=True):
            self._answered(call, answer)
        return True

    def _give_up(self, call: _Call) -> None:
        self._stores.forget(call.rank)
        self._end(call, failed=self._stores.unreachable(call.rank, self._seconds, TimeoutError("no answer")))

    def _again(self, call: _Call, error: Exception) -> None:
        """Schedule a retry after a pause, if time is left."""
        self._stores.forget(call.rank)
        call.sent, call.due = None, time.monotonic() + call.pause
        call.pause = min(2 * call.pause, LONGEST_PAUSE)
        if call.due >= self._until:
            self._end(call, failed=self._stores.unreachable(call.rank, self._seconds, error))
        else:
            self._stores.silent(call.rank, error)

    def _answered(self, call: _Call, answer: Any) -> None:
        self._stores.answered(call.rank)
        self.found[call.rank] = answer
        self._calls.remove(call)

    def _end(self, call: _Call, failed: Exception) -> None:
        self.failed[call.rank] = failed
        self._calls.remove(call)


def _own(error: Exception) -> Exception:
    """Return a store's own exception, without Ray's wrapper."""
    cause = getattr(error, "cause", None)
    if not isinstance(cause, TrajstoreError):
        return error
    cause.__cause__ = error
    return cause


logger = logging.getLogger(__name__)

NAMESPACE = "trajstore"

_NOTES = b"trajstore"  # namespace of Ray's key-value store

_LOOK_AGAIN = 2.0  # seconds between checks whether a silent actor has ended


def ray() -> ModuleType:
    """Return the module ``ray``.

    Raises:
        MissingDependencyError: Ray is not installed.
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
    """Return the Ray errors after which a call may be retried: the actor, node or answer was lost."""
    from ray import exceptions

    return (
        exceptions.RayActorError,
        exceptions.ActorUnschedulableError,  # the node is lost, but the actor has not ended yet
        exceptions.TaskUnschedulableError,  # the node is lost, but Ray still lists it
        exceptions.WorkerCrashedError,
        exceptions.LocalRayletDiedError,
        exceptions.OutOfMemoryError,
        exceptions.GetTimeoutError,
        exceptions.ObjectLostError,
        exceptions.NodeDiedError,
        exceptions.RaySystemError,
    )


def actor_name(name: str, rank: int) -> str:
    """Return the name of a store's actor."""
    return f"{name}/rank_{rank}"


class SilentStoresError(StoreUnreachableError, TrajectoryUnavailableError):
    """Some drawn rows are in stores that do not answer; draw again.

    Args:
        failed: the error of each such store, by rank.
    """

    def __init__(self, failed: Mapping[int, Exception]) -> None:
        super().__init__("; ".join(map(str, failed.values())))
        self.failed = failed


class Stores:
    """The stores of one buffer, as this process knows them.

    Args:
        name: name of the buffer.
        namespace: Ray namespace of the actors.
        deadline: seconds for which calls to an unresponsive store are retried.
    """

    def __init__(self, name: str, namespace: str, deadline: float) -> None:
        self.name = name
        self.deadline = deadline
        self.namespace = namespace
        self.clock = 0
        """Above all ids that the stores have reported; new trajectories get ids of at least this value."""
        self._actors: dict[int, Any] = {}
        self._enlisted: set[int] = set()
        self._told: set[int] = set()
        """Stores already reported as unresponsive; each is reported once until it answers."""
        self._about: dict[int, ServedStore] = {}
        self.look()

    def look(self) -> list[int]:
        """Update the list of stores; return the ranks that have an actor."""
        from ray.util import list_named_actors

        ray()
        prefix = actor_name(self.name, 0).removesuffix("0")
        named = set()
        for actor in list_named_actors(all_namespaces=True):
            rank = actor["name"].removeprefix(prefix)
            if actor["namespace"] == self.namespace and actor["name"] != rank and rank.isdigit():
                named.add(int(rank))
        for number in self._actors.keys() - named:  # the actor has ended for good, for example with its node
            self.forget(number)
        for number in named:
            self._find(number)
        self._enlisted = self._noted()
        return self.ranks

    @property
    def ranks(self) -> list[int]:
        """Ranks of the stores that had an actor at the last :meth:`look`."""
        return sorted(self._actors)

    @property
    def all_ranks(self) -> list[int]:
        """Ranks of all stores that were started and not stopped, ``0 .. n - 1``, including lost ones."""
        return list(range(max(self._enlisted | self._actors.keys(), default=-1) + 1))

    @property
    def lost(self) -> list[int]:
        """Ranks of the stores whose actor is gone; only ``create`` restarts them."""
        return sorted(set(self.all_ranks) - self._actors.keys())

    def look_whole(self) -> list[int]:
        """Update the list of stores; return all ranks.

        Raises:
            StoreUnreachableError: stores are lost; the message names them.
        """
        self.look()
        if self.lost:
            raise StoreUnreachableError(self.loss())
        return self.ranks

    def loss(self) -> str:
        """Return a message that names the lost stores."""
        names = listed(f"rank_{rank}" for rank in self.lost)
        store, are, them = ("store", "is", "it") if len(self.lost) == 1 else ("stores", "are", "them")
        return f"{store} {names} of {self.name!r} {are} lost, perhaps with a node; create() restarts {them}"

    def enlist(self, rank: int) -> None:
        """Record in the cluster that a store was started.

        Ray forgets the name of an ended actor. This record is in Ray's key-value store, so it outlives actors, nodes
        and producers, until :meth:`stop`.
        """
        from ray.experimental.internal_kv import _internal_kv_put

        _internal_kv_put(self._note_key + str(rank).encode(), b"", namespace=_NOTES)
        self._enlisted.add(rank)

    def _noted(self) -> set[int]:
        from ray.experimental.internal_kv import _internal_kv_list

        return {int(key[len(self._note_key) :]) for key in _internal_kv_list(self._note_key, namespace=_NOTES)}

    @property
    def _note_key(self) -> bytes:
        """Key prefix of this buffer's stores; no other buffer's keys begin with it."""
        return json.dumps([self.namespace, self.name]).encode() + b"/"

    def _find(self, rank: int) -> Any:
        """Return a store's actor, or None."""
        if rank not in self._actors and rank < MOST_STORES:
            with suppress(ValueError):  # there is none
                self._actors[rank] = ray().get_actor(actor_name(self.name, rank), namespace=self.namespace)
        return self._actors.get(rank)

    def forget(self, rank: int) -> None:
        """Drop the cached actor of a store and look it up again, as it may have been replaced."""
        self._actors.pop(rank, None)
        self._about.pop(rank, None)
        self._find(rank)

    def note(self, next_id: int) -> None:
        """Record that ids below ``next_id`` are taken."""
        self.clock = max(self.clock, next_id)

    def submit(self, rank: int, method: str, *arguments: Any) -> Any:
        """Start a call; return its reference.

        Raises:
            StoreUnreachableError: the store has no actor at present.
        """
        actor = self._find(rank)
        if actor is None:
            raise StoreUnreachableError(f"{self._named(rank)} is lost; create() restarts it")
        return getattr(actor, method).remote(*arguments)

    def call(self, rank: int, method: str, *arguments: Any, deadline: float | None = None) -> Any:
        """Call a store and return its answer; retries until ``deadline``.

        Raises:
            StoreUnreachableError: no answer within ``deadline`` seconds; includes the last attempt's error.
        """
        answers, failed = self.ask({rank: arguments}, method, self.deadline if deadline is None else deadline)
        for error in failed.values():
            raise error
        return answers[rank]

    def ask(
        self, arguments: Mapping[int, Sequence[Any]], method: str, seconds: float
    ) -> tuple[dict[int, Any], dict[int, Exception]]:
        """Call several stores in parallel, with retries.

        Args:
            arguments: arguments of the call, by rank.
            method: name of the method.
            seconds: time limit of the retries.

        Returns:
            Answers by rank, and errors by rank: exceptions of the stores, or StoreUnreachableError.
        """
        asking = Round(self, method, arguments, seconds)
        asking.run()
        return asking.found, asking.failed

    def answered(self, rank: int) -> None:
        """Record that a store answered."""
        self._told.discard(rank)

    def silent(self, rank: int, error: Exception) -> None:
        """Warn that a store did not answer and is retried; once until it answers."""
        if rank not in self._told:
            self._told.add(rank)
            logger.warning("%s does not answer (%s); asking again", self._named(rank), first_line(error))

    def call_all(
        self, arguments: Mapping[int, Sequence[Any]], method: str, seconds: float | None = None
    ) -> dict[int, Any]:
        """Call several stores in parallel; return their answers by rank.

        Args:
            arguments: arguments of the call, by rank.
            method: name of the method.
            seconds: time limit of the retries; None = ``deadline``.

        Raises:
            StoreUnreachableError: a store has not answered.
            StoreWriteError: raised by a store; the message names the store.
            Exception: any other exception of a store. Of several errors, the lowest rank's is raised, others logged.
        """
        answers, failed = self.ask(arguments, method, self.deadline if seconds is None else seconds)
        for rank in sorted(failed)[1:]:
            logger.error("%s: %s: %s", self._named(rank), method, first_line(failed[rank]))
        for rank in sorted(failed):
            error = failed[rank]
            if type(error) is StoreWriteError:
                raise StoreWriteError(f"{self._named(rank)}: {error}") from error
            raise error
        return answers

    def describe(self, rank: int, deadline: float | None = None) -> ServedStore:
        """Return a store's description; cached per actor."""
        if rank not in self._about:
            self._about[rank] = self.call(rank, "describe", deadline=deadline)
        return self._about[rank]

    def described(self) -> dict[int, ServedStore]:
        """Return the descriptions of all responsive stores, by rank; warn about the others.

        The stores are asked in parallel, so this takes at most ``deadline`` seconds.
        """
        if self.lost:
            logger.warning("%s. Its trajectories are left out until then", self.loss())
        descriptions, failed = self.ask(dict.fromkeys(self.ranks, ()), "describe", self.deadline)
        for error in failed.values():
            if not isinstance(error, StoreUnreachableError):
                raise error
            logger.warning("%s; its trajectories are left out until it answers", error)
        self._about.update(descriptions)
        return descriptions

    def node_of(self, rank: int) -> str | None:
        """Return the node of a store; None if its actor has ended for good, for example with its node.

        Raises:
            StoreUnreachableError: the store neither answered nor ended for ``deadline`` seconds.
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
        """Close a store and end its actor; an unresponsive actor is killed without closing."""
        from ray.experimental.internal_kv import _internal_kv_del

        if self._find(rank) is None:
            logger.warning("%s is lost: it was not closed", self._named(rank))
        else:
            try:
                self.call(rank, "close")
            except StoreUnreachableError as error:
                logger.warning("%s; its actor is killed nevertheless", error)
        if rank in self._actors:
            ray().kill(self._actors.pop(rank))
        self._about.pop(rank, None)
        _internal_kv_del(self._note_key + str(rank).encode(), namespace=_NOTES)
        self._enlisted.discard(rank)

    def unreachable(self, rank: int, seconds: float, error: BaseException) -> StoreUnreachableError:
        """Return the error for a store that has not answered."""
        return StoreUnreachableError(f"{self._named(rank)} has not answered for {seconds:.0f} s: {first_line(error)}")

    def _named(self, rank: int) -> str:
        return f"store rank_{rank} of {self.name!r}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the last one of an actor's that failed to start, which says why."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1 if getattr(error, "actor_init_failed", False) else 0]
