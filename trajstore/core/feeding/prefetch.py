"""Batches made ahead of their use by a thread: a bounded queue, errors that reach the consumer, an orderly end."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from trajstore.core.base import locks
from trajstore.core.base.interrupts import start_thread
from trajstore.core.feeding.source import Source
from trajstore.errors import EmptyBufferError, EpochsEndedError, StoreClosedError, TrajectoryUnavailableError

logger = logging.getLogger(__name__)

D = TypeVar("D")
T = TypeVar("T")

_LOOK_AGAIN = 0.01
"""Seconds between two looks at buffers that are not ready."""

_BUFFER_CLOSED = "the buffer of this loader was closed, and its files may go; open it again, and make a loader of that"

_NOT_FILLED = "are the buffers filled as far as they must be?"

_SAYS_AFTER = 10.0
"""Seconds of waiting without a timeout, after which it is said that a batch is waited for."""

_HAND_OVER = 0.001
"""Seconds that the thread leaves to its consumer after a batch was taken, if another one is finished."""

_LONGEST = 1.0
"""Seconds after which the thread looks at the latest whether it is still wanted, and whether there is more to draw."""

_REDRAWS = 100
"""Batches drawn anew in a row, because trajectories were evicted between draw and read, before that is an error."""


@dataclass(slots=True)
class _Made(Generic[D, T]):
    drawn: D
    batch: T
    nbytes: int


class Prefetcher(Generic[D, T]):
    """A thread that draws and reads batches while earlier ones are used.

    A batch that is drawn but not yet handed out is *under way*; the state names these by their rows, so that a resumed
    run hands out the same batches. Safe to use from one consuming thread; the state can be asked for from any.

    Args:
        source: draws; called by the thread alone while it runs.
        make: reads a drawn batch, given its number in the sequence, and returns it with its number of bytes.
        depth: most batches under way.
        max_bytes: most bytes of finished ones; None = no bound. One batch is always allowed.
        waits: where a sampler has nothing left to draw, wait for more trajectories; else that is an error.
    """

    def __init__(
        self,
        source: Source[D],
        make: Callable[[D, int], tuple[T, int]],
        depth: int,
        max_bytes: int | None,
        *,
        waits: bool = True,
    ) -> None:
        self._source = source
        self._make = make
        self._depth = depth
        self._max_bytes = max_bytes
        self._waits = waits
        self._waits_for = _NOT_FILLED
        self._changed = locks.condition("Prefetcher._changed")
        self._resumed: deque[D] = deque()
        self._making: D | None = None
        self._made: deque[_Made[D, T]] = deque()
        self._nbytes = 0
        self._handed_out = 0
        self._error: BaseException | None = None
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.redrawn = 0
        """Batches that were drawn anew, because a trajectory of theirs was evicted before it was read."""

    def start(self) -> None:
        """Begin to make batches. Starting again does nothing."""
        if self._thread is None and not self._stopping:
            self._thread = threading.Thread(target=self._run, name="trajstore-prefetch", daemon=True)
            start_thread(self._thread)

    def next(self, timeout: float | None = None) -> tuple[D, T]:
        """Return the rows of the next batch and the batch, waiting for it.

        Raises:
            TimeoutError: none was finished within ``timeout`` seconds.
            StoreClosedError: the prefetcher, or a buffer, was closed; batches that were ready are not given any more.
            Exception: whatever ended the thread; the same one at every further call.
        """
        with self._changed:
            there = self._wait(_SAYS_AFTER if timeout is None else timeout)
            if not there and timeout is None:
                logger.warning(
                    "no batch for %g s; %s next() waits for as long as it takes; with timeout=... it raises",
                    _SAYS_AFTER,
                    self._waits_for,
                )
                there = self._wait(None)
            if self._source.closed and not self._stopping and (self._made or self._error is None):
                raise StoreClosedError(_BUFFER_CLOSED)
            if self._made and not self._stopping:
                made = self._made.popleft()
                self._nbytes -= made.nbytes
                self._handed_out += 1
                self._changed.notify_all()
                return made.drawn, made.batch
            if self._error is not None:
                raise self._error
            if self._stopping:
                raise StoreClosedError("the loader was closed")
            if not there:
                raise TimeoutError(f"no batch within {timeout} s; {self._waits_for}")
        raise AssertionError("unreachable")

    def _wait(self, timeout: float | None) -> bool:
        """Wait, with the condition held, until there is something to tell; return whether there is."""
        return self._changed.wait_for(lambda: bool(self._made) or self._error is not None or self._stopping, timeout)

    def close(self) -> None:
        """End the thread and wait for it. Closing again does nothing."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def stop(self) -> None:
        """Let the thread end within a second or so. Takes no lock: a loader that nobody holds calls this."""
        self._stopping = True

    @property
    def ready(self) -> int:
        """Number of finished batches."""
        return len(self._made)

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the source's state and the rows of the batches under way, oldest first."""
        with self._changed:
            under_way = [made.drawn for made in self._made]
            if self._making is not None:
                under_way.append(self._making)
            return {
                "source": self._source.state_dict(),
                "under_way": [self._source.state_of(drawn) for drawn in (*under_way, *self._resumed)],
                "handed_out": self._handed_out,
                "redrawn": self.redrawn,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state; before :meth:`start`."""
        self._source.load_state_dict(state["source"])
        self._resumed = deque(map(self._source.drawn_of, state["under_way"]))
        self._handed_out = int(state["handed_out"])
        self.redrawn = int(state["redrawn"])

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        in_a_row = 0
        try:
            number = self._handed_out
            while (drawn := self._next_drawn()) is not None:
                try:
                    batch, nbytes = self._make(drawn, number)
                except TrajectoryUnavailableError:
                    in_a_row += 1
                    if in_a_row > _REDRAWS:
                        raise
                    self._draw_again(drawn)
                    continue
                in_a_row = 0
                number += 1
                with self._changed:
                    self._made.append(_Made(drawn, batch, nbytes))
                    self._making = None
                    self._nbytes += nbytes
                    self._changed.notify_all()
        except Exception as error:  # whatever ends the thread must reach who waits for batches
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _draw_again(self, drawn: D) -> None:
        with self._changed:
            self._making = None
            mended = self._source.mend(drawn)
            if mended is not None:
                self._resumed.appendleft(mended)
            self.redrawn += 1
        if self.redrawn == 1:
            logger.warning(
                "a trajectory was evicted between draw and read; its rows are drawn anew, here and in later batches: "
                "figures() counts these in batches_redrawn"
            )

    def _await_room(self) -> None:
        """Wait until there is room; then let the consumer, who has just made it, go on with its batch undisturbed.

        Both need the interpreter: a thread that begins at once would make its consumer wait for what it has taken, and
        there is time as long as another batch is finished.
        """
        with self._changed:
            if self._stopping or self._has_room():
                return
            while not self._changed.wait_for(lambda: self._stopping or self._has_room(), _LONGEST):
                pass
            in_time = bool(self._made) and not self._stopping
        if in_time:
            time.sleep(_HAND_OVER)

    def _next_drawn(self) -> D | None:
        """Wait until there is room and something to draw; None at the end."""
        pause = _LOOK_AGAIN
        while True:
            self._await_room()
            with self._changed:
                if self._stopping:
                    return None
                if self._source.closed:
                    raise StoreClosedError(_BUFFER_CLOSED)
                if self._resumed:
                    self._making = self._resumed.popleft()
                    return self._making
                if self._source.ready():
                    try:
                        self._making = self._source.draw()
                        self._waits_for = _NOT_FILLED
                        return self._making
                    except EpochsEndedError:
                        raise
                    except EmptyBufferError as error:
                        if self._source.ready():  # else emptied between look and draw
                            if not self._waits:
                                raise
                            self._waits_for = f"{error}; more can be drawn once trajectories are added."
                            pause = min(2 * pause, _LONGEST)  # a sampler may look at all trajectories in vain
                self._changed.wait(pause)

    def _has_room(self) -> bool:
        if not self._made:
            return True
        return len(self._made) < self._depth and (self._max_bytes is None or self._nbytes < self._max_bytes)
