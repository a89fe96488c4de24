"""The durable record of every rollout that a trainer samples."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

from trainer_hooks.verl.config import OnError
from trajstore import Retention, TrajectoryReplayBuffer
from trajstore.errors import StoreError, StoreWriteError
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

WARN_EVERY = 100
"""Failures for which a warning that rollouts are lost is not repeated."""


class RolloutRecorder:
    """Writes rollouts to a store in the background.

    Args:
        path: directory or URL of the store; one that holds rollouts is continued.
        trajectory_format: of new shards.
        capacity: trajectories to keep, the oldest go first; None = all.
        on_error: whether a failing write is raised, or only counted and logged.

    Raises:
        StoreLockedError: another process writes there.
        StoreWriteError, CorruptStoreError: it cannot be continued.
    """

    def __init__(self, path: str, trajectory_format: str, capacity: int | None, on_error: OnError) -> None:
        self.buffer = TrajectoryReplayBuffer(
            auto_save=True,
            auto_save_path=path,
            trajectory_format=trajectory_format,
            enable_cache=False,
            retention=Retention(max_trajectories=capacity),
        )
        self.lost = 0
        """Rollouts that could not be written (``on_error="warn"``)."""
        self._on_error = on_error
        self._failures = 0

    def record(self, trajectories: Sequence[AgentTrajectory]) -> dict[str, float]:
        """Take copies of rollouts, to be written soon; return figures. Waits only if the memory for them is full.

        Figures: ``recording/rollouts`` taken now, ``recording/waiting`` (of all taken, how many are not on disk yet),
        ``recording/lost`` so far, ``recording/seconds`` spent here.

        Raises:
            StoreError: an earlier write failed, and so did another attempt (``on_error="raise"``).
        """
        start = time.perf_counter()
        before = self.buffer.trajectory_counter
        try:
            self.buffer.add_trajectories(trajectories)
        except StoreError as error:
            self._failed(error, 0)
            # An add tells of writes that failed before it, once; the store goes on trying those by itself.
            self._add_rest(trajectories[self.buffer.trajectory_counter - before :])
        # Ids are given in order, so the newest one and the newest durable one tell how many wait.
        waiting = self.buffer.trajectory_counter - 1 - self.buffer.committed
        return {
            "recording/rollouts": float(len(trajectories)),
            "recording/waiting": float(max(waiting, 0)),
            "recording/lost": float(self.lost),
            "recording/seconds": time.perf_counter() - start,
        }

    def _add_rest(self, trajectories: Sequence[AgentTrajectory]) -> None:
        before = self.buffer.trajectory_counter
        try:
            self.buffer.add_trajectories(trajectories)
        except StoreError as error:
            self._failed(error, len(trajectories) - (self.buffer.trajectory_counter - before))

    def recorded_after(self, newest: int) -> Iterator[AgentTrajectory]:
        """Yield the rollouts with ids above ``newest`` that were in the store when it was opened or came since."""
        for number in self.buffer.trajectory_ids.tolist():
            if number > newest:
                trajectory = self.buffer.get(number)
                if isinstance(trajectory, AgentTrajectory):
                    yield trajectory

    def flush(self) -> None:
        """Return when everything taken so far survives a crash.

        Raises:
            StoreWriteError: a write failed (``on_error="raise"``).
        """
        try:
            self.buffer.flush()
        except StoreWriteError as error:
            self._failed(error, 0)

    def close(self) -> None:
        """Flush and close the store.

        Raises:
            StoreWriteError: a write failed (``on_error="raise"``).
        """
        try:
            self.buffer.close()
        except StoreError as error:
            self._failed(error, 0)

    def _failed(self, error: StoreError, rollouts: int) -> None:
        if self._on_error == "raise":
            raise error
        self.lost += rollouts
        if self._failures % WARN_EVERY == 0:
            logger.warning("rollouts are not recorded: %s", error)
        self._failures += 1
