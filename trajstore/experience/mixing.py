"""Which tasks make up the next batch: some that bring history, the rest fresh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

from trajstore.errors import ConfigurationError
from trajstore.experience.pool import ExperienceManager, task_id_of
from trajstore.trajectory import AgentTrajectory

Task = TypeVar("Task")
"""A task id, or an object with a ``task_id``."""


@dataclass(frozen=True)
class RatioSchedule:
    """A ratio over training progress: straight lines between points, constant before the first and after the last.

    Raises:
        ConfigurationError: no points, progress that does not rise, or a number outside [0, 1].
    """

    points: tuple[tuple[float, float], ...]
    """``(training progress, ratio)``, both in [0, 1]; progress rises."""

    def __post_init__(self) -> None:
        steps = [progress for progress, _ in self.points]
        rising = all(before < after for before, after in pairwise(steps))
        if not steps or not rising or not all(0 <= number <= 1 for point in self.points for number in point):
            raise ConfigurationError(
                f"exp_ratio: {list(self.points)!r}, must be [progress, ratio] pairs in [0, 1] with rising progress"
            )

    def __call__(self, training_progress: float) -> float:
        """Return the ratio at this progress."""
        before = self.points[0]
        for after in self.points:
            if training_progress < after[0]:
                if after is before:
                    return after[1]
                share = (training_progress - before[0]) / (after[0] - before[0])
                return before[1] + share * (after[1] - before[1])
            before = after
        return before[1]


class ExperienceMixCollateFn(Generic[Task]):
    """Splits every batch into experience tasks, which bring histories, and on-policy tasks.

    Args:
        exp_manager: the pool; its rules say how many rollouts a task has.
        get_task: returns the task of an id, ``None`` if the training data have no such task (any more).
        exp_ratio: share of experience tasks at the most, in [0, 1]; or a function of training progress.
        replay_start_ratio: training progress in [0, 1] before which nothing is replayed.
        offpolicy_trajectories_per_task: histories per experience task at the most, below ``n_rollout``.

    Raises:
        ConfigurationError: an argument is out of range.
    """

    def __init__(
        self,
        exp_manager: ExperienceManager,
        get_task: Callable[[str], Task | None],
        *,
        exp_ratio: float | Callable[[float], float] = 0.5,
        replay_start_ratio: float = 0.35,
        offpolicy_trajectories_per_task: int = 1,
    ) -> None:
        n_rollout = exp_manager.rules.n_rollout
        if not 0 <= replay_start_ratio <= 1:
            raise ConfigurationError(f"replay_start_ratio: {replay_start_ratio}, must be in [0, 1]")
        if not 1 <= offpolicy_trajectories_per_task < n_rollout:
            raise ConfigurationError(
                f"offpolicy_trajectories_per_task: {offpolicy_trajectories_per_task}, must be at least 1 and below"
                f" n_rollout = {n_rollout}, so that every task makes a fresh rollout"
            )
        if not callable(exp_ratio):
            _check_ratio(exp_ratio)
        self.metrics: dict[str, float] = {}
        """What the newest call did: experience tasks, share of them, and whether there was nothing to replay."""
        self._manager = exp_manager
        self._get_task = get_task
        self._exp_ratio = exp_ratio
        self._start = replay_start_ratio
        self._histories = offpolicy_trajectories_per_task
        self._n_rollout = n_rollout

    def __call__(
        self, training_tasks: Sequence[Task], training_progress: float, enable_replay: bool = True
    ) -> tuple[list[Task], list[Task]]:
        """Return ``(experience_tasks, on_policy_tasks)``, together as many as ``training_tasks``.

        Before ``replay_start_ratio``, or switched off, these are none and all. Otherwise
        ``int(batch_size * exp_ratio)`` experience tasks at the most, drawn from the pool; the rest are training
        tasks in their order, none of them an experience task, tasks that are skipped as solved only where too
        few others are left. No task comes twice unless ``training_tasks`` has it twice and too few others.

        Raises:
            ConfigurationError: the schedule's ratio is outside [0, 1].
        """
        if not enable_replay or training_progress < self._start:
            self._note(0, len(training_tasks), replaying=False)
            return [], list(training_tasks)
        ratio = self._exp_ratio(training_progress) if callable(self._exp_ratio) else self._exp_ratio
        _check_ratio(ratio)
        experience = self._draw(int(len(training_tasks) * ratio))

        used = {task_id_of(task) for task in experience}
        skipped = self._manager.skip_uid_set
        fresh: list[Task] = []
        solved: list[Task] = []
        repeated: list[Task] = []
        for task in training_tasks:
            name = task_id_of(task)
            if name in used:
                repeated.append(task)
                continue
            used.add(name)
            (solved if name in skipped else fresh).append(task)
        wanted = len(training_tasks) - len(experience)
        self._note(len(experience), len(training_tasks), replaying=True)
        return experience, [*fresh, *solved, *repeated][:wanted]

    def get_histories(self, experience_tasks: Sequence[Task]) -> dict[str, list[AgentTrajectory]]:
        """Return each experience task's histories, best first; tasks for which none were found are absent."""
        histories: dict[str, list[AgentTrajectory]] = {}
        for trajectory in self._manager.get_offpolicy_batch(experience_tasks, self._histories):
            histories.setdefault(trajectory.task_id, []).append(trajectory)
        return histories

    def fresh_rollouts(
        self,
        experience_tasks: Sequence[Task],
        on_policy_tasks: Sequence[Task],
        histories: dict[str, list[AgentTrajectory]],
    ) -> list[int]:
        """Return how many rollouts each task makes, experience tasks first: ``n_rollout`` less its histories."""
        found = [len(histories.get(task_id_of(task), ())) for task in experience_tasks]
        return [self._n_rollout - k for k in found] + [self._n_rollout] * len(on_policy_tasks)

    def _draw(self, target: int) -> list[Task]:
        tasks: list[Task] = []
        drawn: set[str] = set()
        while len(tasks) < target:
            ids = self._manager.sample_tasks_from_replaypool(target - len(tasks), exclude=drawn)
            if not ids:
                break
            drawn.update(ids)
            tasks.extend(task for task in map(self._get_task, ids) if task is not None)
        return tasks

    def _note(self, experience: int, batch: int, *, replaying: bool) -> None:
        self.metrics = {
            "experience_replay/experience_tasks": float(experience),
            "experience_replay/experience_task_ratio": experience / batch if batch else 0.0,
            "experience_replay/nothing_to_replay": float(replaying and not experience),
        }


def _check_ratio(ratio: float) -> None:
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
        raise ConfigurationError(f"exp_ratio: {ratio!r}, must be a number in [0, 1]")
