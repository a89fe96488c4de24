"""The parts of a replay hook."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

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
        drawn = sum(len(planned.histories) for planned in plan)
        self.figures.note_joined(histories, drawn - len(histories))

    def draw(self, tasks: Sequence[Task]) -> dict[str, list[AgentTrajectory]]:
        """Return the histories of tasks."""
        drawn = self.collate.get_histories(tasks)
        self.figures.note_drawn(drawn, self.collate.asked_share)
        return drawn

    def close(self) -> None:
        """Log the tasks that still wait."""
        self.watch.closed()
