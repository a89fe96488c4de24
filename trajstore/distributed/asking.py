"""One call to several stores in parallel, retried until answered or timed out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from trajstore.errors import StoreUnreachableError, TrajstoreError

_PAUSE = 0.1  # seconds before the first retry; doubles
_LONGEST_PAUSE = 2.0


class Actors(Protocol):
    """The interface of the stores that a round uses."""

    def submit(self, rank: int, method: str, *arguments: Any, pieces: int = 1) -> Any:
        """Start a call; return its reference, or a list of references if ``pieces`` is above 1."""

    def answered(self, rank: int) -> None:
        """Record that a store answered."""

    def silent(self, rank: int, error: Exception) -> None:
        """Record that a store did not answer and is retried."""

    def forget(self, rank: int) -> None:
        """Drop the cached actor of a store."""

    def unreachable(self, rank: int, seconds: float, error: BaseException) -> StoreUnreachableError:
        """Return the error for a store that has not answered."""


@dataclass(slots=True, eq=False)
class _Call:
    """The call to one store."""

    rank: int
    arguments: Sequence[Any]
    pieces: int
    due: float = 0.0
    """Time of the next attempt."""
    pause: float = _PAUSE
    sent: list[Any] = field(default_factory=list)
    """References of the answer; empty until the call is sent."""

    def value(self, answers: Sequence[Any]) -> Any:
        """Return the answer: one value, or the list of its pieces."""
        return answers[0] if self.pieces == 1 else list(answers)


class Round:
    """Calls several stores and waits for the answers.

    Args:
        stores: the actors.
        ray: the module.
        away: errors after which the call may be retried, as the actor, node or answer was lost.
        method: name of the method.
        arguments: arguments of the call, by rank.
        pieces: number of pieces of each answer, by rank; 1 where absent.
        seconds: time limit of the retries.
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
        """Calls neither answered nor given up."""
        self.found: dict[int, Any] = {}
        """Answers by rank."""
        self.failed: dict[int, Exception] = {}
        """Exceptions of the stores, or StoreUnreachableError, by rank."""

    def run(self) -> None:
        """Run until every store has answered, raised or timed out."""
        while self._calls:
            self._each(self._send, [call for call in self._calls if not call.sent and call.due <= time.monotonic()])
            sent = [call for call in self._calls if call.sent]
            if sent and len(sent) == len(self._calls) and self._take_all(sent):
                return
            pause = max(
                0.001, min([self._until, *(call.due for call in self._calls if not call.sent)]) - time.monotonic()
            )
            if sent:
                references = [call.sent[0] for call in sent]
                self._ray.wait(references, num_returns=1, timeout=pause)
                arrived = set(self._ray.wait(references, num_returns=len(references), timeout=0)[0])
                self._each(self._take, [call for call in sent if call.sent[0] in arrived])
                if time.monotonic() >= self._until:
                    self._each(self._give_up, [call for call in self._calls if call.sent])
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
        sent = self._stores.submit(call.rank, self._method, *call.arguments, pieces=call.pieces)
        call.sent = [sent] if call.pieces == 1 else sent

    def _take(self, call: _Call) -> None:
        answers = self._ray.get(call.sent, timeout=max(0.001, self._until - time.monotonic()))
        self._answered(call, answers)

    def _take_all(self, calls: Sequence[_Call]) -> bool:
        """Take all answers with one faster ``ray.get``; False on an error or a timeout."""
        references = [reference for call in calls for reference in call.sent]
        try:
            answers = iter(self._ray.get(references, timeout=max(0.001, self._until - time.monotonic())))
        except Exception:  # taking each answer separately shows which store failed
            return False
        for call in calls:
            self._answered(call, list(islice(answers, len(call.sent))))
        return True

    def _give_up(self, call: _Call) -> None:
        self._stores.forget(call.rank)
        self._end(call, failed=self._stores.unreachable(call.rank, self._seconds, TimeoutError("no answer")))

    def _again(self, call: _Call, error: Exception) -> None:
        """Schedule a retry after a pause, if time is left."""
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


def _own(error: Exception) -> Exception:
    """Return a store's own exception, without Ray's wrapper."""
    cause = getattr(error, "cause", None)
    if not isinstance(cause, TrajstoreError):
        return error
    cause.__cause__ = error
    return cause
