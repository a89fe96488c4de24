"""What a hook works with, and histories that a thread reads, scores and chooses while the rollouts are made."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar, overload

from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.figures import ReplayFigures, ReplayWatch
from trainer_hooks.poolfiles import PoolFiles
from trajstore.experience import ExperienceManager, ExperienceMixCollateFn
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

Task = TypeVar("Task")
"""A task id, or an object with a ``task_id``."""

Drawn = Mapping[str, Sequence[AgentTrajectory]]
"""Histories by task."""


class ComingHistories(Sequence[AgentTrajectory]):
    """The histories of one task. Their number is known at once; looking at one of them waits.

    Args:
        drawn: where they come from.
        task: their task.
        count: how many there will be. A record that turns out to be damaged makes them fewer.
    """

    def __init__(self, drawn: Future[Drawn], task: str, count: int) -> None:
        self._drawn = drawn
        self._task = task
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> AgentTrajectory: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[AgentTrajectory]: ...

    def __getitem__(self, place: int | slice) -> AgentTrajectory | Sequence[AgentTrajectory]:
        return self._drawn.result().get(self._task, ())[place]


@dataclass(slots=True)
class ReplayParts(Generic[Task]):
    """What a hook that is switched on works with."""

    manager: ExperienceManager
    collate: ExperienceMixCollateFn[Task]
    figures: ReplayFigures
    files: PoolFiles
    watch: ReplayWatch
    executor: ThreadPoolExecutor | None = None
    """Its one thread draws histories; ``None``: they are drawn when they are asked for."""
    asked: Counter[str] = field(default_factory=Counter)
    """Rollouts that are to be made in this step, by task."""
    pending: Future[Drawn] | None = None
    """Histories that the thread draws; meanwhile nothing else may touch the pool."""
    drawing: int | None = None
    """The thread, while it draws."""

    @staticmethod
    def of(
        config: ExperienceReplayConfig,
        manager: ExperienceManager,
        get_task: Callable[[str], Task | None],
        task_text: Callable[[Task], str] | None,
    ) -> ReplayParts[Task]:
        """Return what a hook with this configuration works with."""
        collate = ExperienceMixCollateFn(
            manager,
            get_task,
            exp_ratio=config.ratio(),
            replay_start_ratio=config.replay_start_ratio,
            offpolicy_trajectories_per_task=config.offpolicy_trajectories_per_task,
            unsolved_first=config.unsolved_first,
            text_of=task_text,
        )
        files = PoolFiles(manager, config.pool_path, config.pool_save_freq)
        made = ReplayParts(manager, collate, ReplayFigures(manager), files, ReplayWatch(manager))
        if config.prepare_in_background:
            made.executor = ThreadPoolExecutor(1, thread_name_prefix="trajstore-histories")
        return made

    def coming(self, tasks: Sequence[Task]) -> Drawn:
        """Return the histories of tasks, drawn now or by the thread."""
        if self.executor is None:
            drawn = self.collate.get_histories(tasks)
            self.figures.note_drawn(drawn, self.collate.asked_share)
            return {task: tuple(held) for task, held in drawn.items()}
        counts = self.collate.count_histories(tasks)
        self.pending = pending = self.executor.submit(self._draw, tasks)
        return {task: ComingHistories(pending, task, count) for task, count in counts.items()}

    def _draw(self, tasks: Sequence[Task]) -> Drawn:
        """Return the histories of tasks: the thread's part."""
        self.drawing = threading.get_ident()
        try:
            with self.figures.times.measure("histories_in_background"):
                return self.collate.get_histories(tasks)
        finally:
            self.drawing = None

    def settle(self) -> None:
        """Wait for histories that are under way; raises what drawing them raised."""
        pending = self.pending
        if pending is None or self.drawing == threading.get_ident():
            return  # the trainer's function that scores may look at the hook
        try:
            with self.figures.times.measure("waited_for_histories"):
                drawn = pending.result()
        finally:
            if pending.done():  # not so if Ctrl-C came
                self.pending = None
        self.figures.note_drawn(drawn, self.collate.asked_share)

    def close(self) -> None:
        """End the thread; say what waits at the end of the run."""
        pending, self.pending = self.pending, None
        if self.executor is not None:
            self.executor.shutdown()
        if pending is not None:
            try:
                pending.result()
            except Exception as error:  # of the trainer's function or the store; nobody waits for the histories
                logger.warning("experience replay: histories that were under way at the end failed: %r", error)
        self.watch.closed()
