"""The durable record of every rollout that a trainer samples."""

from __future__ import annotations

import copy
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from trainer_hooks.verl.config import OnError
from trainer_hooks.verl.reading import Scribe
from trajstore import Retention, TrajectoryReplayBuffer
from trajstore.core.base import exits
from trajstore.core.base.background import Background
from trajstore.errors import InvalidTrajectoryError, StoreClosedError, StoreError, StoreWriteError
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

WARN_EVERY = 100
"""Number of failures between two warnings about lost rollouts."""

_AT_ONCE = 64
"""Rollouts decoded and added together. Limited because their tokens become Python ints, eight times as large."""

_WAITING_TOKENS = 1 << 25
"""Maximum number of tokens waiting for decoding, about 1 GB with masks and log-probs."""


class RolloutRecorder:
    """Writes rollouts to a store in the background: one thread adds text and passes them to the store's threads.

    Interpreter exit waits for pending rollouts. A forked child cannot record.

    Args:
        path: directory or URL of the store; an existing store is continued.
        trajectory_format: format of new shards.
        capacity: number of trajectories to keep, deleting the oldest; None = all.
        on_error: raise errors of failed writes, or only count and log them.
        scribe: adds the text.

    Raises:
        StoreLockedError: another process writes to the store.
        StoreWriteError, CorruptStoreError: the store cannot be continued.
    """

    def __init__(
        self, path: str, trajectory_format: str, capacity: int | None, on_error: OnError, scribe: Scribe
    ) -> None:
        self.buffer = TrajectoryReplayBuffer(
            auto_save=True,
            auto_save_path=path,
            trajectory_format=trajectory_format,
            enable_cache=False,
            retention=Retention(max_trajectories=capacity),
        )
        self.lost = 0
        """Number of rollouts that could not be written."""
        self._unread: deque[list[AgentTrajectory]] = deque()
        """Rollouts that the thread has not added to the store yet; the thread removes them."""
        self._on_error = on_error
        self._scribe = scribe
        self._failures = 0
        try:
            self._background = Background(f"recording to {path}", _WAITING_TOKENS)
        except BaseException:
            self.buffer.close()
            raise
        exits.remember(self)

    @property
    def closed(self) -> bool:
        """True once closed, and always in a forked child."""
        return self._background.closed

    def record(self, trajectories: Sequence[AgentTrajectory]) -> dict[str, float]:
        """Queue rollouts for writing; return metrics. Waits only if the queue is full.

        The tensors must not be changed afterwards.

        Metrics: ``recording/rollouts`` queued now, ``recording/waiting`` for the disk in total, ``recording/lost`` so
        far, ``recording/seconds`` spent in this call.

        Raises:
            StoreError, InvalidTrajectoryError: earlier rollouts could not be written (``on_error="raise"``); the new
                ones are queued nevertheless.
            StoreClosedError: closed, or in a forked child.
        """
        start = time.perf_counter()
        # Copies, as callers use the same trajectories without text.
        made = [copy.copy(rollout) for rollout in trajectories]
        for rollout in made:
            rollout.messages = [*rollout.messages]
        if made:
            self._unread.append(made)
            tokens = sum(0 if rollout.input_ids is None else rollout.input_ids.numel() for rollout in made)
            self._background.submit(self._write, tokens)
        return {
            "recording/rollouts": float(len(trajectories)),
            "recording/waiting": float(self.waiting),
            "recording/lost": float(self.lost),
            "recording/seconds": time.perf_counter() - start,
        }

    @property
    def waiting(self) -> int:
        """Number of queued rollouts that are not on disk yet."""
        # Ids are ascending: those above the newest committed id are not on disk.
        unwritten = self.buffer.trajectory_counter - 1 - self.buffer.points.committed
        return self._without_text() + max(unwritten, 0)

    def recorded_after(self, newest: int) -> Iterator[AgentTrajectory]:
        """Yield the stored rollouts with ids above ``newest``."""
        self._background.wait()
        for number in self.buffer.trajectory_ids.tolist():
            if number > newest:
                trajectory = self.buffer.get(number)
                if isinstance(trajectory, AgentTrajectory):
                    yield trajectory

    def flush(self) -> None:
        """Wait until everything queued so far survives a crash.

        Raises:
            StoreError, InvalidTrajectoryError: rollouts could not be written (``on_error="raise"``).
        """
        self._background.wait()
        with self._told(StoreWriteError):
            self.buffer.flush()

    def close(self) -> None:
        """Flush and close the store. An interrupt drops rollouts that have no text yet, with an error log.

        Raises:
            StoreError, InvalidTrajectoryError: rollouts could not be written (``on_error="raise"``).
        """
        try:
            self._background.close()
        except KeyboardInterrupt:
            if left := self._without_text():
                logger.error("interrupted: %d rollouts had no text yet, and are not recorded", left)
            raise
        finally:
            try:
                with self._told(StoreError):
                    self.buffer.close()
            finally:
                exits.forget(self)

    @contextmanager
    def _told(self, kind: type[StoreError]) -> Iterator[None]:
        """Count and log an error of the store; re-raise it only with ``on_error="raise"``."""
        try:
            yield
        except kind as error:
            self._failed(error, 0)
            if self._on_error == "raise":
                raise

    def _write(self) -> None:
        """Decode the oldest queued list of rollouts and add it to the store, in order. Runs in the thread.

        Raises:
            StoreError, InvalidTrajectoryError: the first error of adding (``on_error="raise"``).
        """
        errors: list[StoreError | InvalidTrajectoryError] = []
        made = self._unread[0]
        try:
            while made:
                some = made[:_AT_ONCE]
                self._scribe.write(some)
                errors += self._add(some)
                del made[:_AT_ONCE]
        finally:
            self._unread.popleft()
        if errors and self._on_error == "raise":
            raise errors[0]

    def _without_text(self) -> int:
        """Return the number of rollouts that the thread has not added to the store yet."""
        return sum(map(len, [*self._unread]))

    def _add(self, some: Sequence[AgentTrajectory]) -> list[StoreError | InvalidTrajectoryError]:
        """Add rollouts; return the errors of these or of earlier ones."""
        before = self.buffer.trajectory_counter
        try:
            self.buffer.add_trajectories(some)
            return []
        except StoreClosedError as error:  # an interrupted close has logged these rollouts
            self.lost += len(some)
            return [error]
        except (StoreError, InvalidTrajectoryError) as error:
            # The error may be of an earlier write, reported once and retried by the store. Or one invalid rollout
            # made the store refuse the whole list.
            errors = [error]
        rest = some[self.buffer.trajectory_counter - before :]
        if not isinstance(errors[0], InvalidTrajectoryError):
            self._failed(errors[0], 0)
        for rollout in rest:
            try:
                self.buffer.add_trajectories([rollout])
            except (StoreError, InvalidTrajectoryError) as error:
                self._failed(error, 1)
                errors.append(error)
        return errors

    def _failed(self, error: StoreError | InvalidTrajectoryError, rollouts: int) -> None:
        self.lost += rollouts
        if self._failures % WARN_EVERY == 0 and self._on_error == "warn":
            logger.warning("rollouts are not recorded: %s", error)
        self._failures += 1
