"""Batches made ahead by a thread: a bounded queue, with errors passed to the consumer and a clean shutdown."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from trajstore._core.base import exits, locks
from trajstore._core.base.interrupts import start_thread
from trajstore._core.feeding.source import Parts, Source
from trajstore.errors import EmptyBufferError, EpochsEndedError, StoreClosedError, TrajectoryUnavailableError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_AGAIN = 0.01
"""Seconds between checks of buffers that are not ready."""

_BUFFER_CLOSED = "the buffer of this loader was closed, and its files may go; open it again, and make a loader of that"

_NOT_FILLED = "are the buffers filled as far as they must be?"

_SAYS_AFTER = 10.0
"""Seconds of waiting without a timeout before a log message."""

_HAND_OVER = 0.001
"""Seconds that the thread yields to its consumer after a batch was taken, if another is finished."""

_LONGEST = 1.0
"""Maximum seconds between the thread's checks for shutdown and for more rows to draw."""

_REDRAWS = 100
"""Maximum consecutive redraws due to evictions between draw and read; more are an error."""


@dataclass(slots=True)
class _Made(Generic[T]):
    drawn: Parts
    batch: T


class Prefetcher(Generic[T]):
    """Draws and reads batches in a thread while earlier ones are used.

    A batch that is drawn but not yet returned is *under way*. The state lists the rows of these, so that a resumed run
    returns the same batches. Only one thread may consume; any may read the state.

    Args:
        source: draws batches; used only by the thread while it runs.
        make: reads a drawn batch, given its sequence number, and returns it.
        depth: maximum batches under way.
        waits: whether to wait for more trajectories once a sampler is exhausted, instead of raising.
    """

    def __init__(self, source: Source, make: Callable[[Parts, int], T], depth: int, *, waits: bool = True) -> None:
        self._source = source
        self._make = make
        self._depth = depth
        self._waits = waits
        self._waits_for = _NOT_FILLED
        self._changed = locks.condition("Prefetcher._changed")
        self._resumed: deque[Parts] = deque()
        self._making: Parts | None = None
        self._made: deque[_Made[T]] = deque()
        self._handed_out = 0
        self._batches = 0
        """Number of batches returned since the beginning, also by the loaders that this one continues."""
        self._error: BaseException | None = None
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._revision: Any = None  # of the buffers when the batches under way were last found current
        self.redrawn = 0
        """Number of batches redrawn because a trajectory was evicted before they were returned."""

    def start(self) -> None:
        """Start making batches. Idempotent."""
        if self._thread is None and not self._stopping:
            self._thread = threading.Thread(target=self._run, name="trajstore-prefetch", daemon=True)
            exits.stop_at_exit(self)
            start_thread(self._thread)

    def next(self, timeout: float | None = None, record: Callable[[int, T], None] | None = None) -> tuple[Parts, T]:
        """Return the rows of the next batch and the batch itself; blocks.

        Args:
            timeout: seconds until TimeoutError; None = wait forever.
            record: called with the batch's number, from 1, and the batch. If it raises, the batch stays the next one.

        Raises:
            TimeoutError: no batch was finished within ``timeout`` seconds.
            StoreClosedError: the prefetcher or a buffer was closed; ready batches are discarded.
            Exception: the error that ended the thread; repeated by every further call.
        """
        made = self._wait_for_batch(timeout)
        if (revision := self._source.revision()) != self._revision:  # far cheaper than looking up each batch's rows
            if self._made_again():
                made = self._wait_for_batch(timeout)
            self._revision = revision
        if record is not None:
            record(self._batches + 1, made.batch)
        with self._changed:
            self._made.popleft()
            self._handed_out += 1
            self._batches += 1
            self._changed.notify_all()
        return made.drawn, made.batch

    def _made_again(self) -> bool:
        """Make the batches under way again, with other rows for those that are gone; return False if none are."""
        with self._changed:
            drawn = [made.drawn for made in self._made] + ([] if self._making is None else [self._making])
            current = [self._source.is_current(rows) for rows in drawn]
            if all(current):
                return False
            self._made.clear()
            self._making = None
            self._resume([rows if still else self._mended(rows) for rows, still in zip(drawn, current, strict=True)])
            self._changed.notify_all()
            return True

    def _resume(self, drawn: Sequence[Parts | None]) -> None:
        """Make batches before all others; needs the lock."""
        self._resumed.extendleft(rows for rows in reversed(drawn) if rows is not None)

    def _mended(self, drawn: Parts) -> Parts | None:
        """Return a batch with other rows for those that are gone; None if no rows are left."""
        self.redrawn += 1
        if self.redrawn == 1:
            logger.warning(
                "a trajectory left (by eviction, rollback, or to another share) between draw and use; its rows are "
                "redrawn; figures() counts this and "
                "later cases in batches_redrawn"
            )
        return self._source.mend(drawn)

    def _wait_for_batch(self, timeout: float | None) -> _Made[T]:
        with self._changed:
            has_result = self._wait(_SAYS_AFTER if timeout is None else timeout)
            if not has_result and timeout is None:
                logger.warning(
                    "no batch for %g s; %s next() waits without limit; with timeout=... it raises",
                    _SAYS_AFTER,
                    self._waits_for,
                )
                has_result = self._wait(None)
            if self._source.closed and not self._stopping and (self._made or self._error is None):
                raise StoreClosedError(_BUFFER_CLOSED)
            if self._made and not self._stopping:
                return self._made[0]
            if self._error is not None:
                raise self._error
            if self._stopping:
                raise StoreClosedError("the loader was closed")
            if not has_result:
                raise TimeoutError(f"no batch within {timeout} s; {self._waits_for}")
        raise AssertionError("unreachable")

    def _wait(self, timeout: float | None) -> bool:
        """Wait, with the condition held, for a batch, an error or shutdown; return False on timeout."""
        return self._changed.wait_for(lambda: bool(self._made) or self._error is not None or self._stopping, timeout)

    def stop_and_wait(self) -> None:
        """Stop the thread and wait for it. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def stop(self) -> None:
        """Stop the thread within about a second. Takes no lock, because finalizers call this."""
        self._stopping = True

    @property
    def ready(self) -> int:
        """Number of finished batches."""
        return len(self._made)

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the source's state and the rows of batches under way, oldest first."""
        with self._changed:
            under_way = [made.drawn for made in self._made]
            if self._making is not None:
                under_way.append(self._making)
            return {
                "source": self._source.state_dict(),
                "under_way": [self._source.state_of(drawn) for drawn in (*under_way, *self._resumed)],
                "handed_out": self._handed_out,
                "batches": self._batches,
                "redrawn": self.redrawn,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; before :meth:`start`."""
        self._source.load_state_dict(state["source"])
        self._resumed = deque(map(self._source.drawn_of, state["under_way"]))
        self._handed_out, self._batches = int(state["handed_out"]), int(state["batches"])
        self.redrawn = int(state["redrawn"])

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        in_a_row = 0
        try:
            while (drawn := self._next_drawn()) is not None:
                try:
                    batch = self._make(drawn, self._handed_out + len(self._made))
                except TrajectoryUnavailableError:
                    in_a_row += 1
                    if in_a_row > _REDRAWS:
                        raise
                    self._draw_again(drawn)
                    continue
                in_a_row = 0
                with self._changed:
                    if self._making is drawn:  # else it is to be made again
                        self._made.append(_Made(drawn, batch))
                        self._making = None
                    self._changed.notify_all()
        except Exception as error:  # the consumer must see any error that ends the thread
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _draw_again(self, drawn: Parts) -> None:
        with self._changed:
            if self._making is drawn:
                self._making = None
                self._resume([self._mended(drawn)])

    def _await_room(self) -> None:
        """Wait until there is room; then yield briefly to the consumer, which has just made it.

        Both need the interpreter: starting at once would delay the consumer's work on its batch, and there is time as
        long as another batch is finished.
        """
        with self._changed:
            if self._stopping or self._has_room():
                return
            while not self._changed.wait_for(lambda: self._stopping or self._has_room(), _LONGEST):
                pass
            in_time = bool(self._made) and not self._stopping
        if in_time:
            time.sleep(_HAND_OVER)

    def _next_drawn(self) -> Parts | None:
        """Wait until there is room and something to draw; None on shutdown."""
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
                if few := self._source.unfilled():
                    if not self._waits:
                        raise EmptyBufferError(f"{few}, and a DataLoader worker gets no more; fill the buffer before")
                    self._waits_for = f"{_NOT_FILLED} {few}."
                else:
                    try:
                        self._making = self._source.draw()
                        self._waits_for = _NOT_FILLED
                        return self._making
                    except EpochsEndedError:
                        raise
                    except EmptyBufferError as error:
                        if self._source.ready():  # else emptied since the check
                            if not self._waits:
                                raise
                            self._waits_for = f"{error}; more can be drawn once trajectories are added."
                            pause = min(2 * pause, _LONGEST)  # a sampler may search all trajectories in vain
                self._changed.wait(pause)

    def _has_room(self) -> bool:
        return len(self._made) < self._depth
