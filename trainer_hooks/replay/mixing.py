"""Composition of batches: tasks with history and fresh tasks.

Takes no lock: only the training loop that owns the pool calls it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np

from trainer_hooks.replay.buckets import TaskSampling
from trainer_hooks.replay.contract import task_id_of, task_ids_of
from trainer_hooks.replay.pool import ExperienceManager
from trainer_hooks.retrieval import RetrievalIndex
from trajstore._core.base.arguments import is_number, share, truth, whole
from trajstore._core.base.settings import refuse
from trajstore._core.columns.limits import shown
from trajstore.errors import ConfigurationError, counted, listed
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

Task = TypeVar("Task")
"""A task id, or an object with a ``task_id``."""

_NEVER_DRAWN = {
    "other_prompts": "their prompt is not that of the training data's row of their task, counted as"
    " experience_replay/other_prompts. Data that were shuffled or filtered anew give other rows the same"
    " names: name tasks by what they ask, or give the run a pool of its own. If prompts have a clock or a first"
    " observation, return an empty one (task_prompt)",
    "too_long": "longer than the trainer's longest prompt or response, counted as experience_replay/too_long. Raise"
    " max_prompt_length or max_response_length, or import shorter ones",
}
"""Reasons and remedies in the warnings, by metric name."""


@dataclass(frozen=True)
class RatioSchedule:
    """A ratio over training progress: linear between points, constant before the first and after the last.

    Attributes:
        points: ``(training progress, ratio)``, both in [0, 1]; progress rises.

    Raises:
        ConfigurationError: no points, progress that does not rise, or a number outside [0, 1].
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        steps = [progress for progress, _ in self.points]
        rising = all(before < after for before, after in pairwise(steps))
        if not steps or not rising or not all(0 <= number <= 1 for point in self.points for number in point):
            raise ConfigurationError(
                f"exp_ratio: {list(self.points)!r}, must be [progress, ratio] pairs in [0, 1] with rising progress"
            )

    def __call__(self, training_progress: float) -> float:
        """Return the ratio at this progress."""
        steps, ratios = zip(*self.points, strict=True)
        return min(float(np.interp(training_progress, steps, ratios)), 1.0)  # rounding may exceed 1


class ExperienceMixCollateFn(Generic[Task]):
    """Splits every batch into experience tasks, which bring histories, and on-policy tasks.

    Args:
        exp_manager: the pool; its rules have the number of rollouts per task.
        get_task: returns the task of an id, ``None`` if the training data have no such task (any more).
        exp_ratio: maximum share of experience tasks, in [0, 1]; or a function of training progress.
        replay_start_ratio: training progress in [0, 1] before which nothing is replayed.
        offpolicy_trajectories_per_task: maximum number of histories per experience task, below ``n_rollout``; None =
            half of ``n_rollout``, see :func:`histories_per_task`.
        unsolved_first: whether tasks without a success keep their places, and unsolved ones come before solved ones.
        text_of: returns a task's text; needed by ``task_sampling: similar``, which draws, for the training tasks in
            turn, the most similar task of the pool, and falls back to ``by_task`` if none has a word in common.

    Raises:
        ConfigurationError: an argument is out of range, ``text_of`` is needed but absent, or the training data have
            none of the pool's tasks.
    """

    def __init__(
        self,
        exp_manager: ExperienceManager,
        get_task: Callable[[str], Task | None],
        *,
        exp_ratio: float | Callable[[float], float] = 0.5,
        replay_start_ratio: float = 0.0,
        offpolicy_trajectories_per_task: int | None = None,
        unsolved_first: bool = False,
        text_of: Callable[[Task], str] | None = None,
    ) -> None:
        n_rollout = exp_manager.rules.n_rollout
        if offpolicy_trajectories_per_task is not None:
            whole("offpolicy_trajectories_per_task", offpolicy_trajectories_per_task, 1)
        histories = histories_per_task(
            offpolicy_trajectories_per_task, n_rollout, exp_manager.rules.max_trajectories_per_task
        )
        refuse("", history_problems(histories, n_rollout))
        by_similarity = exp_manager.rules.task_sampling == "similar"
        if by_similarity and text_of is None:
            raise ConfigurationError(
                "task_sampling: similar needs the tasks' texts, but the trainer passes no task_text"
            )
        self._similar = SimilarTasks(get_task, text_of) if by_similarity and text_of is not None else None
        self._by_similarity = 0
        self.metrics: dict[str, float] = {}
        """Metrics of the newest call: experience tasks, whether there was nothing to replay, waiting and unknown tasks;
        with ``task_sampling: similar`` also the tasks drawn by similarity."""
        self.asked_share = 0.0
        """Share of the batch's rows that the newest call would have replayed from a pool with enough tasks."""
        self._manager = exp_manager
        self._get_task = get_task
        self._exp_ratio = exp_ratio if callable(exp_ratio) else share("exp_ratio", exp_ratio)
        self._start = share("replay_start_ratio", replay_start_ratio)
        self._histories = histories
        self._unsolved_first = truth("unsolved_first", unsolved_first)
        self._n_rollout = n_rollout
        self._warned: set[str] = set()
        self._known: dict[str, bool] = {}
        """Whether the training data have each task that the pool has had so far."""
        self._given: dict[str, Task] = {}  # waiting tasks as passed in; after a resume, from get_task
        self.check_tasks()

    def check_tasks(self) -> None:
        """Check that the training data have tasks of the pool; to be called after loading another pool.

        Raises:
            ConfigurationError: they have none of them.
        """
        tasks = self._manager.get_task_ids()
        if tasks and all(self._get_task(task) is None for task in tasks):
            raise ConfigurationError(
                f"the experience pool has trajectories of {counted(len(tasks), 'task')} ({listed(tasks, 3)}), the "
                "training data have none of these: another dataset? Give the run a pool of its own, or the data of the "
                "pool. Other names for the same tasks? `trajstore pool seed --task-prefix`"
            )

    def __call__(
        self, training_tasks: Sequence[Task], training_progress: float, enable_replay: bool = True
    ) -> tuple[list[Task], list[Task]]:
        """Return ``(experience_tasks, on_policy_tasks)``, together as many as ``training_tasks``.

        Before ``replay_start_ratio``, or without ``enable_replay``, all are on-policy tasks. Otherwise at most
        ``int(batch_size * exp_ratio)`` experience tasks are drawn from the pool. The rest are tasks that earlier calls
        displaced, in their order, and then training tasks in theirs; experience tasks are not repeated, and tasks
        skipped as solved come only if too few others are left. Tasks for which there is no room wait for the next call.
        A task appears more than once only if ``training_tasks`` repeats it and too few others remain, and never more
        often than there.

        With ``unsolved_first``, tasks without a known success are not displaced, and come first; many of them leave
        room for fewer experience tasks. Where solved tasks would fill up the batch, unsolved tasks of earlier batches
        do so instead.

        Raises:
            ConfigurationError: the training progress, or the schedule's ratio, is outside [0, 1].
        """
        share("training_progress", training_progress)
        task_ids_of(training_tasks)
        if not truth("enable_replay", enable_replay) or training_progress < self._start:
            for task in training_tasks:
                self._manager.waiting_tasks.pop(task_id_of(task), None)
            self.asked_share = 0.0
            self._note(0, replaying=False)
            return [], list(training_tasks)
        ratio = self._exp_ratio
        ratio = share("exp_ratio", ratio(training_progress) if callable(ratio) else ratio)
        target = int(len(training_tasks) * ratio)
        untaught = self._without_success(training_tasks)
        target = min(target, len(training_tasks) - len(untaught))
        experience = self._draw(target, training_tasks)
        self.asked_share = target * self._histories / (len(training_tasks) * self._n_rollout) if target else 0.0

        used = {task_id_of(task) for task in experience}
        skipped = self._manager.skip_uid_set
        fresh = self._take_waiting(used | skipped)
        used.update(map(task_id_of, fresh))
        planned = set(used)
        solved: list[Task] = []
        repeated: list[Task] = []
        for task in training_tasks:
            name = task_id_of(task)
            if name in planned:
                planned.remove(name)  # the plan has this occurrence already
            elif name in used:
                repeated.append(task)
            else:
                used.add(name)
                (solved if name in skipped else fresh).append(task)
        wanted = len(training_tasks) - len(experience)
        fresh.sort(key=lambda task: task_id_of(task) not in untaught)
        self._given = {task_id_of(task): task for task in fresh[wanted:]}
        self._manager.waiting_tasks.update(dict.fromkeys(self._given))
        self._note(len(experience), replaying=True)
        if self._unsolved_first and len(fresh) < wanted:
            drawn = self._manager.sample_unsolved_tasks(wanted - len(fresh), used | self._unknown())
            fresh += [task for task in map(self._get_task, drawn) if task is not None]
        return experience, [*fresh, *solved, *repeated][:wanted]

    def get_histories(self, experience_tasks: Sequence[Task]) -> dict[str, list[AgentTrajectory]]:
        """Return each experience task's histories, best first; tasks without any are absent."""
        histories: dict[str, list[AgentTrajectory]] = {}
        for trajectory in self._manager.get_offpolicy_batch(experience_tasks, self._histories):
            histories.setdefault(trajectory.task_id, []).append(trajectory)
        return histories

    def fresh_rollouts(
        self,
        experience_tasks: Sequence[Task],
        on_policy_tasks: Sequence[Task],
        histories: Mapping[str, Sequence[AgentTrajectory]],
    ) -> list[int]:
        """Return the number of rollouts of each task, experience tasks first: ``n_rollout`` minus its histories."""
        history_counts = [len(histories.get(task_id_of(task), ())) for task in experience_tasks]
        return [self._n_rollout - count for count in history_counts] + [self._n_rollout] * len(on_policy_tasks)

    def _draw(self, target: int, training_tasks: Sequence[Task]) -> list[Task]:
        tasks: list[Task] = []
        drawn = self._unknown()
        strategy: TaskSampling | None = None
        if self._similar is not None:
            self._similar.follow(self._manager.get_task_ids())
            near = self._similar.nearest(training_tasks, self._manager.drawable_task_ids(), target)
            tasks = [task for task in map(self._get_task, near) if task is not None]
            self._by_similarity = len(tasks)
            drawn.update(near)
            strategy = "by_task"
        while len(tasks) < target:
            ids = self._manager.sample_tasks_from_replaypool(
                num_tasks=target - len(tasks), strategy=strategy, exclude=drawn
            )
            if not ids:
                break
            drawn.update(ids)
            tasks.extend(task for task in map(self._get_task, ids) if task is not None)
        return tasks

    def _without_success(self, training_tasks: Sequence[Task]) -> set[str]:
        """Return the tasks that keep their places: no success is known, and the batch has room for them."""
        if not self._unsolved_first:
            return set()
        coming = dict.fromkeys((*self._manager.waiting_tasks, *map(task_id_of, training_tasks)))
        untaught = [name for name in coming if not self._manager.has_succeeded(name)]
        return set(untaught[: len(training_tasks)])

    def _unknown(self) -> set[str]:
        """Return the pool's tasks that the training data lack; these are never drawn, also after a resume."""
        tasks = self._manager.get_task_ids()
        fresh = [name for name in tasks if name not in self._known]
        lacking = [name for name in fresh if self._get_task(name) is None]
        if lacking and all(self._known.values()):
            logger.warning(
                "experience pool: the training data have no task %s; tasks that they lack are not replayed, and"
                " counted as experience_replay/unknown_tasks",
                listed(map(repr, lacking), 3),
            )
        self._known |= dict.fromkeys(fresh, True) | dict.fromkeys(lacking, False)
        return {name for name in tasks if not self._known[name]}

    def _never_drawn(self) -> dict[str, float]:
        """Count the histories that are never drawn, by metric name; warn once of each kind."""
        kinds = self._manager.never_drawn()
        for name, held in kinds.items():
            if held and name not in self._warned:
                self._warned.add(name)
                logger.warning(
                    "experience pool: %s not replayed (of task %s): %s",
                    counted(len(held), "history"),
                    listed(dict.fromkeys(repr(entry.task_id) for entry in held), 3),
                    _NEVER_DRAWN[name],
                )
        return {f"experience_replay/{name}": float(len(held)) for name, held in kinds.items()}

    def _take_waiting(self, passed_over: Collection[str]) -> list[Task]:
        """Return and clear the waiting tasks, longest waiting first, without those passed over."""
        waiting = self._manager.waiting_tasks
        names = [name for name in waiting if name not in passed_over]
        waiting.clear()
        waiting_tasks = [self._given[name] if name in self._given else self._get_task(name) for name in names]
        return [task for task in waiting_tasks if task is not None]

    def _note(self, experience: int, *, replaying: bool) -> None:
        self.metrics = {
            "experience_replay/experience_tasks": float(experience),
            "experience_replay/nothing_to_replay": float(replaying and not experience),
            "experience_replay/waiting_tasks": float(len(self._manager.waiting_tasks)),
            "experience_replay/unknown_tasks": float(len(self._unknown())),
            **self._never_drawn(),
        }
        if self._similar is not None:
            self.metrics["experience_replay/similar_tasks"] = float(self._by_similarity if experience else 0)


def ratio_or_points(name: str, value: Any) -> float | tuple[tuple[float, float], ...]:
    """Return a ratio in [0, 1], or the points of a :class:`RatioSchedule`.

    Raises:
        ConfigurationError: it is neither.
    """
    if not isinstance(value, list | tuple):
        return share(name, value)
    for point in value:
        if not isinstance(point, list | tuple) or len(point) != 2 or not all(map(is_number, point)):
            raise ConfigurationError(f"{name}: {shown(value)}, must be a number in [0, 1] or [progress, ratio] pairs")
    return RatioSchedule(tuple((progress, ratio) for progress, ratio in value)).points


def histories_per_task(wanted: int | None, n_rollout: int, kept: int) -> int:
    """Return the maximum number of histories per experience task.

    Args:
        wanted: the configured number; None = half of ``n_rollout``, at least 1 and at most ``kept``.
        n_rollout: rows of a task in a batch.
        kept: histories that the pool keeps of a task.
    """
    return max(1, min(n_rollout // 2, kept)) if wanted is None else wanted


def history_problems(histories: int, n_rollout: int) -> list[str]:
    """Return why a task cannot have this number of histories, one sentence each."""
    if histories < n_rollout:
        return []
    return [
        f"offpolicy_trajectories_per_task: {histories}, must be below n_rollout = {n_rollout}, so that every task makes"
        " a fresh rollout"
    ]


class SimilarTasks(Generic[Task]):
    """An index of the texts of the pool's tasks, kept in step with the pool. Deterministic.

    Answers depend only on the tasks followed now and their order, not on earlier ones, so they are the same after a
    resume.

    Args:
        get_task: returns the task of an id; ``None`` if the training data have no such task, which is then left out.
        text_of: returns a task's text.
    """

    def __init__(self, get_task: Callable[[str], Task | None], text_of: Callable[[Task], str]) -> None:
        self._get_task = get_task
        self._text_of = text_of
        self._index = RetrievalIndex()
        self._keys: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._next = 0

    def follow(self, names: Sequence[str]) -> None:
        """Make these tasks, in this order, the contents of the index."""
        last, kept = -1, True
        new: list[str] = []
        for name in names:
            key = self._keys.get(name, -1)
            kept = kept and key > last  # from the first new or moved task on, all are added again
            if kept:
                last = key
            else:
                new.append(name)
        there = set(names).difference(new)
        self._remove([name for name in self._keys if name not in there])
        self._add(new)

    def nearest(self, tasks: Sequence[Task], among: Collection[str], n: int) -> list[str]:
        """Return up to ``n`` ids of different tasks: in turn the one most similar to each given task.

        Args:
            tasks: to be compared with, in the order of their turns.
            among: ids that may be returned.
            n: the maximum; fewer are returned if no more have a word in common.
        """
        allowed = set(among)
        without = [key for name, key in self._keys.items() if name not in allowed]
        queues = [
            iter([self._names[hit.key] for hit in self._index.search(self._text_of(task), n, without)])
            for task in tasks
        ]
        chosen: dict[str, None] = {}
        while queues and len(chosen) < n:
            left = []
            for queue in queues:
                nearest_name = next((name for name in queue if name not in chosen), None)
                if nearest_name is not None and len(chosen) < n:
                    chosen[nearest_name] = None
                    left.append(queue)
            queues = left
        return list(chosen)

    def _add(self, names: Sequence[str]) -> None:
        keys, texts = [], []
        for name in names:
            task = self._get_task(name)
            if task is None:
                continue
            self._keys[name], self._names[self._next] = self._next, name
            keys.append(self._next)
            texts.append(self._text_of(task))
            self._next += 1
        self._index.add(keys, texts)

    def _remove(self, names: Sequence[str]) -> None:
        keys = [self._keys.pop(name) for name in names]
        for key in keys:
            del self._names[key]
        self._index.remove(keys)
