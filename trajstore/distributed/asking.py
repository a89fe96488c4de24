"""One call to several stores, each made again until it is answered or the time is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from trajstore.errors import StoreUnreachableError

_PAUSE = 0.1  # seconds before a store that did not answer is asked again; doubles
_LONGEST_PAUSE = 2.0


class Actors(Protocol):
    """What a round needs of the stores."""

    def submit(self, rank: int, method: str, *arguments: Any, pieces: int = 1) -> Any:
        """Begin a call and return its reference; those of its pieces, if it is answered in several."""

    def answered(self, rank: int) -> None:
        """Note that a store answers."""

    def silent(self, rank: int, error: Exception) -> None:
        """Note that a store did not answer; it is asked again."""

    def forget(self, rank: int) -> None:
        """Look the store's actor up anew at the next call."""

    def unreachable(self, rank: int, seconds: float, error: BaseException) -> StoreUnreachableError:
        """Return the error that says that a store has not answered."""


@dataclass(slots=True, eq=False)
class _Call:
    """The call to one store."""

    rank: int
    arguments: Sequence[Any]
    pieces: int
    due: float = 0.0
    """When it is sent next."""
    pause: float = _PAUSE
    sent: list[Any] = field(default_factory=list)
    """References of its answer; empty until it is sent."""

    def value(self, answers: Sequence[Any]) -> Any:
        """Return the answer of its pieces."""
        return answers[0] if self.pieces == 1 else list(answers)


class Round:
    """Asks several stores, and waits for the answers.

    Args:
        stores: the actors.
        ray: the module.
        away: errors that say that actor, node or answer are lost: the call may be made again.
        method: the name of the call.
        arguments: of each store's call.
        pieces: in how many each answers, if in more than one.
        seconds: for which each is asked.
    """

    def __init__(
        self,
        stores: Actors,
        ray: Any,
        away: tuple[type[Exception], ...],
        method: str,
        arguments: Mapping[int, Sequence[Any]],
        pieces: Mapping[int, int],
        seconds: float,
    ) -> None:
        self._stores = stores
        self._ray = ray
        self._away: tuple[type[Exception], ...] = (StoreUnreachableError, *away)
        self._method = method
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        self._calls = [_Call(rank, given, pieces.get(rank, 1)) for rank, given in arguments.items()]
        """Those that are neither answered nor given up."""
        self.found: dict[int, Any] = {}
        """Answers by rank."""
        self.failed: dict[int, Exception] = {}
        """What stores raised, or a StoreUnreachableError, by rank."""

    def run(self) -> None:
        """Ask until every store has answered, has raised, or was silent for too long."""
        while self._calls:
            self._each(self._send, [one for one in self._calls if not one.sent and one.due <= time.monotonic()])
            sent = [one for one in self._calls if one.sent]
            if sent and len(sent) == len(self._calls) and self._take_all(sent):
                return
            pause = max(0.001, min([self._until, *(one.due for one in self._calls if not one.sent)]) - time.monotonic())
            if sent:
                references = [one.sent[0] for one in sent]
                self._ray.wait(references, num_returns=1, timeout=pause)
                arrived = set(self._ray.wait(references, num_returns=len(references), timeout=0)[0])
                self._each(self._take, [one for one in sent if one.sent[0] in arrived])
                if time.monotonic() >= self._until:
                    self._each(self._give_up, [one for one in self._calls if one.sent])
            elif self._calls:
                time.sleep(pause)

    def _each(self, do: Callable[[_Call], None], calls: Sequence[_Call]) -> None:
        for one in calls:
            try:
                do(one)
            except self._away as error:
                self._again(one, error)
            except Exception as error:  # what the store raised
                self._end(one, failed=error)

    def _send(self, call: _Call) -> None:
        sent = self._stores.submit(call.rank, self._method, *call.arguments, pieces=call.pieces)
        call.sent = [sent] if call.pieces == 1 else sent

    def _take(self, call: _Call) -> None:
        answers = self._ray.get(call.sent, timeout=max(0.001, self._until - time.monotonic()))
        self._answered(call, answers)

    def _take_all(self, calls: Sequence[_Call]) -> bool:
        """Take all answers with one call, which is quicker; False where one is an error, or does not come in time."""
        references = [one for call in calls for one in call.sent]
        try:
            answers = iter(self._ray.get(references, timeout=max(0.001, self._until - time.monotonic())))
        except Exception:  # whose it is, shows where each is taken by itself
            return False
        for call in calls:
            self._answered(call, list(islice(answers, len(call.sent))))
        return True

    def _give_up(self, call: _Call) -> None:
        self._stores.forget(call.rank)
        self._end(call, failed=self._stores.unreachable(call.rank, self._seconds, TimeoutError("no answer")))

    def _again(self, call: _Call, error: Exception) -> None:
        """Ask again after a pause, if time is left."""
        self._stores.forget(call.rank)
        call.sent, call.due = [], time.monotonic() + call.pause
        call.pause = min(2 * call.pause, _LONGEST_PAUSE)
        if call.due >= self._until:
            self._end(call, failed=self._stores.unreachable(call.rank, self._seconds, error))
        else:
            self._stores.silent(call.rank, error)

    def _answered(self, call: _Call, answers: Sequence[Any]) -> None:
        self._stores.answered(call.rank)
        self.found[call.rank] = call.value(answers)
        self._calls.remove(call)

    def _end(self, call: _Call, failed: Exception) -> None:
        self.failed[call.rank] = failed
        self._calls.remove(call)
