"""Background queue of rollouts for the maker of experience. Training never waits for it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from trainer_hooks.guidance.context import ExperienceTemplate
from trainer_hooks.guidance.maker import ExperienceMaker, MakerError, Trouble
from trainer_hooks.guidance.summary import by_task, unguided
from trajstore._core.base import locks
from trajstore._core.base.arguments import seconds, whole
from trajstore._core.base.background import Background
from trajstore.errors import counted
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)


class UpdateQueue:
    """Sends rollouts to a maker in the background, in batches of whole tasks.

    Args:
        maker: makes experiences of them.
        capacity: steps whose rollouts may wait; further ones are dropped, counted and logged.
        batch_size: approximate rollouts in a call of the maker: a task's rollouts stay together.
        workers: concurrent calls. With 1, experiences arrive in the order of the rollouts.
        template: removed from messages whose insertions are not recorded.
    """

    def __init__(
        self,
        maker: ExperienceMaker,
        *,
        capacity: int = 4,
        batch_size: int = 8,
        workers: int = 1,
        template: ExperienceTemplate | None = None,
    ) -> None:
        self._maker = maker
        self._capacity = whole("capacity", capacity, 1)
        self._batch_size = whole("batch_size", batch_size, 1)
        self._template = template
        self._steps = 0
        self._trouble = Trouble("summarizing rollouts")
        self._figures = {"submitted": 0, "dropped": 0, "summarized": 0, "made": 0}
        self._lock = locks.lock("UpdateQueue._lock")
        self._dropping = False
        self._calls = Background("guidance-updates", workers=whole("workers", workers, 1))

    def submit(self, rollouts: Sequence[AgentTrajectory]) -> bool:
        """Queue rollouts for summarizing; return False if they were dropped because the queue is full.

        The trajectories must not be changed afterwards.
        """
        with self._lock:
            if self._calls.closed:
                return False
            if len(self._calls.waiting()) >= self._capacity:
                self._figures["dropped"] += len(rollouts)
                if not self._dropping:
                    logger.warning(
                        "guidance: summaries take longer than steps, so the rollouts of this step (%d) are not"
                        " summarized, nor are later ones while the queue is full (counted in "
                        "guidance/update/dropped); more experience_maker.summary_workers may keep up",
                        len(rollouts),
                    )
                self._dropping = True
                return False
            self._dropping = False
            self._figures["submitted"] += len(rollouts)
            self._steps += 1
            for batch in self._in_batches(rollouts):
                self._calls.submit(partial(self._summarize, batch), len(batch), self._steps)
            return True

    def wait(self, timeout: float) -> bool:
        """Return whether all queued rollouts were summarized, or failed, within ``timeout`` seconds."""
        return self._calls.wait(seconds("timeout", timeout))

    def close(self, timeout: float = 10.0) -> None:
        """Refuse new rollouts, wait up to ``timeout`` seconds for running summaries, and log unfinished ones."""
        already = self._calls.closed
        left, running = self._calls.close(seconds("timeout", timeout))
        with self._lock:
            self._figures["dropped"] += left
        if not already and (left or running):
            logger.warning(
                "guidance: closed after %.0f s; abandoned: %s not summarized, and %s under way",
                timeout,
                counted(left, "rollout"),
                counted(running, "summary"),
            )

    def metrics(self) -> dict[str, float]:
        """Return figures since the beginning: rollouts by fate, experiences made, failures by kind."""
        with self._lock:
            figures = {f"guidance/update/{name}": float(value) for name, value in self._figures.items()}
        for kind, count in self._trouble.counts().items():
            figures[f"guidance/update/failed/{kind}"] = float(count)
        return figures

    def _in_batches(self, rollouts: Sequence[AgentTrajectory]) -> list[list[AgentTrajectory]]:
        plain = []
        for rollout in rollouts:
            try:
                plain.append(unguided(rollout, self._template))
            except Exception as error:  # messages are user data; other rollouts are still summarized
                self._trouble.failed(MakerError("garbage", f"rollout {rollout.rollout_id!r}: {error!r}"))
        batches: list[list[AgentTrajectory]] = []
        for held in by_task(plain):
            if batches and len(batches[-1]) + len(held) <= self._batch_size:
                batches[-1] += held
            else:
                batches.append(held)
        return batches

    def _summarize(self, batch: Sequence[AgentTrajectory]) -> None:
        try:
            made = self._maker.summarize(batch)
        except MakerError as error:
            self._trouble.failed(error)
            return
        except Exception as error:  # makers are user code; keep the thread alive
            logger.exception("guidance: a summary failed")
            self._trouble.failed(MakerError("failed", repr(error)))
            return
        self._trouble.succeeded()
        with self._lock:
            self._figures["summarized"] += len(batch)
            self._figures["made"] += made
