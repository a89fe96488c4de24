"""The parts of a replay hook, with histories drawn in a background thread."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar, overload

from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.figures import ReplayFigures, ReplayWatch
from trainer_hooks.plan import PlannedTask
from trainer_hooks.replay import ExperienceManager, ExperienceMixCollateFn
from trainer_hooks.replay.contract import task_id_of
from trajstore.errors import counted, trajectories
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

Task = TypeVar("Task")
"""A task id, or an object with a ``task_id``."""

Drawn = Mapping[str, Sequence[AgentTrajectory]]
"""Histories by task."""


class ComingHistories(Sequence[AgentTrajectory]):
    """The histories of one task. Their number is known at once; reading one waits for the draw.

    Args:
        drawn: future of the histories.
        task: their task.
        count: expected number; damaged records reduce it.
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


class ReplayParts(Generic[Task]):
    """The parts of an enabled hook.

    Args:
        config: of the hook.
        manager: the pool.
        get_task: returns the task of an id; ``None`` if the training data have no such task.
        task_text: returns a task's text.
    """

    def __init__(
        self,
        config: ExperienceReplayConfig,
        manager: ExperienceManager,
        get_task: Callable[[str], Task | None],
        task_text: Callable[[Task], str] | None,
    ) -> None:
        self.manager = manager
        self.collate = ExperienceMixCollateFn(
            manager,
            get_task,
            exp_ratio=config.ratio(),
            replay_start_ratio=config.replay_start_ratio,
            offpolicy_trajectories_per_task=config.offpolicy_trajectories_per_task,
            unsolved_first=config.unsolved_first,
            text_of=task_text,
        )
        self.figures = ReplayFigures(manager)
        self.watch = ReplayWatch(manager)
        self.has_begun = False
        """True once the pool with which the run begins is known: the store's, or a checkpoint's."""
        self.asked: Counter[str] = Counter()
        """Rollouts requested in this step, by task."""
        self.pending: Future[Drawn] | None = None
        """Histories being drawn by the thread; until then nothing else may use the pool."""
        self.drawing: int | None = None
        """Id of the thread while it draws."""
        self.executor: ThreadPoolExecutor | None = None
        """Its one thread draws histories; ``None``: they are drawn synchronously."""
        if config.prepare_in_background:
            self.executor = ThreadPoolExecutor(1, thread_name_prefix="trajstore-histories")

    def begin(self) -> None:
        """Begin with the pool as stored, unless a state was restored; called before each step.

        Raises:
            ConfigurationError: the data have none of its tasks.
        """
        if self.has_begun:
            return
        self.has_begun = True
        if len(self.manager):
            logger.info("experience pool: used as stored, with %s", self._size())
        self.collate.check_tasks()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the pool of a checkpoint.

        Raises:
            ConfigurationError: the data have none of its tasks.
        """
        before = len(self.manager)
        self.manager.load_state_dict(state)
        self.has_begun = True
        logger.info(
            "experience pool: back at step %d of the checkpoint with %s; the store held %d, and what entered since the"
            " checkpoint is not used. Without the checkpoint's state these %d would have been used as they are",
            self.manager.global_steps,
            self._size(),
            before,
            before,
        )
        self.collate.check_tasks()

    def _size(self) -> str:
        return f"{trajectories(len(self.manager))} of {counted(len(self.manager.get_task_ids()), 'task')}"

    def ask(self, counts: Iterable[tuple[Task, int]]) -> None:
        """Set the number of rollouts requested in this step; a task may appear twice."""
        self.asked = Counter()
        for task, count in counts:
            self.asked[task_id_of(task)] += count

    def joined(self, plan: Sequence[PlannedTask[Task]], joining: Sequence[PlannedTask[Task]]) -> None:
        """Record the histories that join a batch, and why others do not.

        Args:
            plan: with the histories that were drawn.
            joining: the same tasks with the rollouts made and the histories that join.
        """
        self.ask((planned.task, planned.fresh_rollouts) for planned in joining)
        histories = [history for planned in joining for history in planned.histories]
        read = sum(len(list(planned.histories)) for planned in plan)
        drawn = sum(len(planned.histories) for planned in plan)
        self.figures.note_joined(histories, {"other_prompt": read - len(histories), "unreadable": drawn - read})

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
        """Draw the histories of tasks, in the thread."""
        self.drawing = threading.get_ident()
        try:
            with self.figures.times.measure("histories_in_background"):
                return self.collate.get_histories(tasks)
        finally:
            self.drawing = None

    def settle(self) -> None:
        """Wait for histories being drawn; re-raises the thread's exception."""
        pending = self.pending
        if pending is None or self.drawing == threading.get_ident():
            return  # the trainer's scoring function may use the hook
        try:
            with self.figures.times.measure("waited_for_histories"):
                drawn = pending.result()
        finally:
            if pending.done():  # False after Ctrl-C
                self.pending = None
        self.figures.note_drawn(drawn, self.collate.asked_share)

    def close(self) -> None:
        """End the thread, and log the tasks that still wait."""
        pending, self.pending = self.pending, None
        if self.executor is not None:
            self.executor.shutdown()
        if pending is not None:
            try:
                pending.result()
            except Exception as error:  # of the trainer's function or the store; the histories are unused
                logger.warning("experience replay: histories that were under way at the end failed: %r", error)
        self.watch.closed()
