"""Limits how many rows are drawn for each added row, for learners that train while rollouts are collected."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from trajstore._core.base import locks
from trajstore._core.base.arguments import finite, seconds_or_none, whole
from trajstore._core.base.closing import Closing
from trajstore._core.sampling.states import check_state, whole_in
from trajstore.errors import ConfigurationError, StoreClosedError

logger = logging.getLogger(__name__)

_WARNS_AFTER = 10.0
"""Seconds of waiting without a timeout before a warning."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Bounds of drawn rows for a number of added rows. Pure; at least one side may always continue.

    Attributes:
        samples_per_insert: rows drawn for each added row, above 0.
        tolerance: drawn rows by which either side may be ahead, above 0.
        start: added rows before the first draw; nothing is drawn for them.
    """

    samples_per_insert: float
    tolerance: float
    start: int = 0

    def __post_init__(self) -> None:
        for name in ("samples_per_insert", "tolerance"):
            object.__setattr__(self, name, finite(name, getattr(self, name), 0, above=True))
        object.__setattr__(self, "start", whole("start", self.start, 0))

    def balance(self, added: int, drawn: float) -> float:
        """Return how many rows the learner has still to draw; negative if it is ahead."""
        return self.samples_per_insert * max(0, added - self.start) - drawn

    def may_draw(self, added: int, drawn: float) -> bool:
        """Return whether more rows may be drawn."""
        return added >= self.start and self.balance(added, drawn) > -self.tolerance

    def may_add(self, added: int, drawn: float) -> bool:
        """Return whether more rows may be added."""
        return added < self.start or self.balance(added, drawn) < self.tolerance


class Admission:
    """Rows that a limiter reserved; a context manager whose end counts them as added, or releases them on an exception.

    Attributes:
        rows: number of rows to count; set it before the end if another number was added.
    """

    def __init__(self, limiter: RateLimiter, rows: int) -> None:
        self.rows = rows
        self._limiter, self._reserved = limiter, rows

    def __enter__(self) -> Self:
        if not self._reserved:
            raise ConfigurationError("limiter: an admission was used twice; call admit() for each addition")
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        reserved, self._reserved = self._reserved, 0
        rows = 0
        try:
            rows = 0 if kind else whole("rows", self.rows, 0)
        finally:
            self._limiter._settle(rows, reserved)


class RateLimiter(Closing):
    """Makes the faster of collecting and learning wait, so that a ratio of drawn to added rows holds.

    Adding threads call :meth:`admit` before a rollout starts; a loader gets ``limiter=``, and draws no batch before the
    limiter allows it. Thread-safe, in one process. In asyncio: ``await asyncio.to_thread(limiter.admit, rows)``.

    The unit of a row is that of the loader: a transition, or for a ``TokenLoader`` a trajectory.

    Args:
        samples_per_insert: rows drawn for each added row, above 0.
        tolerance: drawn rows by which either side may be ahead, above 0, beside one batch or addition.
        start: added rows before the first draw; nothing is drawn for them.

    Raises:
        ConfigurationError: an argument is out of range; names it.
    """

    def __init__(self, samples_per_insert: float, tolerance: float, *, start: int = 0) -> None:
        self._rate = Rate(samples_per_insert, tolerance, start)
        self._changed = locks.condition("RateLimiter._changed")
        self._added = self._drawn = self._reserved = 0
        self._credit = 0.0
        """Difference between the balance and that of the counters, after a state of another rate was loaded."""
        self._queue: deque[Admission] = deque()
        self._closed = False

    # -- adding -----------------------------------------------------------------------------------

    def admit(self, rows: int, timeout: float | None = None) -> Admission:
        """Wait until more rows may be added, then reserve them: ``with limiter.admit(rows): ...``.

        Calls are admitted in their order. The rows count as added at the end of the ``with`` statement.

        Args:
            rows: number of rows, at least 1; an estimate, if :attr:`Admission.rows` is set later.
            timeout: seconds until TimeoutError; None = wait forever, with a warning after 10 s.

        Raises:
            TimeoutError: the learner did not draw enough in time; gives the counters.
            StoreClosedError: the limiter was closed.
        """
        admission = Admission(self, whole("rows", rows, 1))
        with self._changed:
            self._queue.append(admission)
            try:
                self._wait(lambda: self._queue[0] is admission and self._may_add(), timeout, "add")
                self._reserved += admission.rows
            finally:
                self._queue.remove(admission)
                self._changed.notify_all()
        return admission

    def added(self, rows: int) -> None:
        """Count rows that were added without :meth:`admit`, for example by another process."""
        self._settle(whole("rows", rows, 0), 0)

    def _may_add(self) -> bool:
        return self._rate.may_add(self._added + self._reserved, self._drawn - self._credit)

    def _settle(self, rows: int, reserved: int) -> None:
        with self._changed:
            self._added += rows
            self._reserved -= reserved
            self._changed.notify_all()

    # -- drawing ----------------------------------------------------------------------------------

    def draw(self, rows: int, timeout: float | None = None) -> None:
        """Wait until more rows may be drawn, and count them; before ``buffer.sample``. A loader does this itself.

        Args:
            rows: number of rows, at least 1.
            timeout: seconds until TimeoutError; None = wait forever, with a warning after 10 s.

        Raises:
            TimeoutError: not enough rows were added in time; gives the counters.
            StoreClosedError: the limiter was closed.
        """
        rows = whole("rows", rows, 1)
        with self._changed:
            self._wait(self._may_draw, timeout, "draw")
            self._drawn += rows
            self._changed.notify_all()

    def reason_to_wait(self) -> str | None:
        """Return why a loader may not draw a batch now; None if it may, and then calls :meth:`drew`.

        Raises:
            StoreClosedError: the limiter was closed.
        """
        with self._changed:
            self._check_open()
            return None if self._may_draw() else self._reason("draw")

    def drew(self, rows: int) -> None:
        """Count the rows of a loader's batch."""
        with self._changed:
            self._drawn += rows
            self._changed.notify_all()

    def _may_draw(self) -> bool:
        return self._rate.may_draw(self._added, self._drawn - self._credit)

    # -- waiting ----------------------------------------------------------------------------------

    def _wait(self, allowed: Callable[[], bool], timeout: float | None, what: str) -> None:
        """Wait, with the condition held, until ``allowed`` returns true."""
        timeout = seconds_or_none("timeout", timeout)

        def is_over() -> bool:
            return self._closed or allowed()

        done = self._changed.wait_for(is_over, _WARNS_AFTER if timeout is None else timeout)
        if not done and timeout is None:
            logger.warning("waiting for %g s: %s; with timeout=... this raises", _WARNS_AFTER, self._reason(what))
            done = self._changed.wait_for(is_over)
        self._check_open()
        if not done:
            raise TimeoutError(f"{self._reason(what)}; waited {timeout:g} s")

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("limiter: it was closed, so nothing more is admitted; make a new one")

    def _reason(self, what: str) -> str:
        rate, other = self._rate, {"add": "the learner draws", "draw": "rows are added"}[what]
        return (
            f"limiter: no more rows can be {'drawn' if what == 'draw' else 'added'} until {other}: {self._added} added,"
            f" {self._reserved} being collected, {self._drawn} drawn, and samples_per_insert is"
            f" {rate.samples_per_insert:g}, tolerance {rate.tolerance:g}, start {rate.start}"
        )

    def close(self) -> None:
        """End all waiting: waiting and later calls raise StoreClosedError. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the counters; part of a loader's state."""
        with self._changed:
            return {"added": self._added, "drawn": self._drawn, "balance": self._balance()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`, with the same balance if the rate is another one.

        Raises:
            ConfigurationError: the state is invalid; nothing was changed.
        """
        added, drawn, balance = counters_in(state)
        with self._changed:
            self._added, self._drawn = added, drawn
            self._credit = balance - self._rate.balance(added, drawn)
            self._changed.notify_all()

    def _balance(self) -> float:
        return self._rate.balance(self._added, self._drawn - self._credit)

    def figures(self) -> dict[str, float]:
        """Return flat numbers for metrics: rows added and drawn, the balance, and number of waiting admissions."""
        with self._changed:
            return {
                "limiter_added": float(self._added),
                "limiter_drawn": float(self._drawn),
                "limiter_balance": self._balance(),
                "limiter_waiting": float(len(self._queue)),
            }

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise ConfigurationError(
            "limiter: a RateLimiter is for the threads of one process and cannot be sent to another; iterate the loader"
            " in the process that adds rows, without DataLoader workers"
        )


def counters_in(state: Any) -> tuple[int, int, float]:
    """Return the counters of a limiter's state: added, drawn, balance.

    Raises:
        ConfigurationError: one is absent, of another type, or out of range.
    """
    check_state(state, ("balance",))
    balance = finite("state: balance", state["balance"])
    return whole_in(state, "added"), whole_in(state, "drawn"), balance
