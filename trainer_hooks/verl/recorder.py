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
"""Failures for which a warning that rollouts are lost is not repeated."""

_AT_ONCE = 64
"""Rollouts that get their text and are added together. Meanwhile their tokens are Python's numbers, eight times the
size of a tensor's."""

_WAITING_TOKENS = 1 << 25
"""Tokens of rollouts that may wait for their text, about a gigabyte with masks and log-probs."""


class RolloutRecorder:
    """Writes rollouts to a store in the background: one thread adds text and hands them on to the store's own threads.

    Until :meth:`close`, also the end of the interpreter waits for them. In a forked child nothing can be recorded.

    Args:
        path: directory or URL of the store; one that holds rollouts is continued.
        trajectory_format: of new shards.
        capacity: trajectories to keep, the oldest go first; None = all.
        on_error: whether a rollout that cannot be written is raised, or only counted and logged.
        scribe: adds the text.

    Raises:
        StoreLockedError: another process writes there.
        StoreWriteError, CorruptStoreError: it cannot be continued.
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
        """Rollouts that could not be written."""
        self._unread: deque[list[AgentTrajectory]] = deque()
        """Rollouts that the thread has not added to the store yet; it removes them as it goes."""
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
        """Whether nothing is left to be written here: closed, or the parent's."""
        return self._background.closed

    def record(self, trajectories: Sequence[AgentTrajectory]) -> dict[str, float]:
        """Take rollouts, to be written soon; return figures. Waits only if the memory for them is full.

        Their tensors must not be changed afterwards.

        Figures: ``recording/rollouts`` taken now, ``recording/waiting`` (of all taken, how many are not on disk yet),
        ``recording/lost`` so far, ``recording/seconds`` spent here.

        Raises:
            StoreError, InvalidTrajectoryError: of earlier rollouts, some could not be written (``on_error="raise"``);
                these ones are taken nevertheless.
            StoreClosedError: closed, or this is a forked child.
        """
        start = time.perf_counter()
        # Others go on with the same trajectories, without their text.
        made = [copy.copy(one) for one in trajectories]
        for one in made:
            one.messages = [*one.messages]
        if made:
            self._unread.append(made)
            tokens = sum(0 if one.input_ids is None else one.input_ids.numel() for one in made)
            self._background.submit(self._write, tokens)
        return {
            "recording/rollouts": float(len(trajectories)),
            "recording/waiting": float(self.waiting),
            "recording/lost": float(self.lost),
            "recording/seconds": time.perf_counter() - start,
        }

    @property
    def waiting(self) -> int:
        """Rollouts taken that are not on disk yet."""
        # Ids are given in order: those above the newest durable one are not on disk.
        unwritten = self.buffer.trajectory_counter - 1 - self.buffer.points.committed
        return self._without_text() + max(unwritten, 0)

    def recorded_after(self, newest: int) -> Iterator[AgentTrajectory]:
        """Yield the rollouts with ids above ``newest`` that were in the store when it was opened or came since."""
        self._background.wait()
        for number in self.buffer.trajectory_ids.tolist():
            if number > newest:
                trajectory = self.buffer.get(number)
                if isinstance(trajectory, AgentTrajectory):
                    yield trajectory

    def flush(self) -> None:
        """Return when everything taken so far survives a crash.

        Raises:
            StoreError, InvalidTrajectoryError: rollouts could not be written (``on_error="raise"``).
        """
        self._background.wait()
        with self._told(StoreWriteError):
            self.buffer.flush()

    def close(self) -> None:
        """Flush and close the store. An interrupt while it waits leaves out what has no text yet, and says so.

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
        """Count and log an error of the store; it is raised only with ``on_error="raise"``."""
        try:
            yield
        except kind as error:
            self._failed(error, 0)
            if self._on_error == "raise":
                raise

    def _write(self) -> None:
        """Give the oldest rollouts taken together their text and add them to the store, in order. The thread's part.

        Raises:
            StoreError, InvalidTrajectoryError: the first that some could not be added for (``on_error="raise"``).
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
        """Return how many rollouts the thread has not added to the store yet."""
        return sum(map(len, [*self._unread]))

    def _add(self, some: Sequence[AgentTrajectory]) -> list[StoreError | InvalidTrajectoryError]:
        """Add rollouts; return why some of them, or earlier ones, cannot be written."""
        before = self.buffer.trajectory_counter
        try:
            self.buffer.add_trajectories(some)
            return []
        except StoreClosedError as error:  # closing was interrupted, which told of them
            self.lost += len(some)
            return [error]
        except (StoreError, InvalidTrajectoryError) as error:
            # An add tells of writes that failed before it, once; the store goes on trying those by itself. And one
            # rollout that cannot be stored has the whole list refused.
            errors = [error]
        rest = some[self.buffer.trajectory_counter - before :]
        if not isinstance(errors[0], InvalidTrajectoryError):
            self._failed(errors[0], 0)
        for one in rest:
            try:
                self.buffer.add_trajectories([one])
            except (StoreError, InvalidTrajectoryError) as error:
                self._failed(error, 1)
                errors.append(error)
        return errors

    def _failed(self, error: StoreError | InvalidTrajectoryError, rollouts: int) -> None:
        self.lost += rollouts
        if self._failures % WARN_EVERY == 0 and self._on_error == "warn":
            logger.warning("rollouts are not recorded: %s", error)
        self._failures += 1
