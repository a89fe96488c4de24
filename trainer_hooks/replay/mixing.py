"""Which tasks make up the next batch: some that bring history, the rest fresh.

Takes no lock: the one training loop that owns the pool is the one caller.
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
from trajstore.core.base.arguments import is_number, share, truth, whole
from trajstore.core.base.settings import refuse
from trajstore.core.columns.limits import shown
from trajstore.errors import ConfigurationError, listed
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

Task = TypeVar("Task")
"""A task id, or an object with a ``task_id``."""


@dataclass(frozen=True)
class RatioSchedule:
    """A ratio over training progress: straight lines between points, constant before the first and after the last.

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
        return min(float(np.interp(training_progress, steps, ratios)), 1.0)  # rounding must not make it more


class ExperienceMixCollateFn(Generic[Task]):
    """Splits every batch into experience tasks, which bring histories, and on-policy tasks.

    Args:
        exp_manager: the pool; its rules say how many rollouts a task has.
        get_task: returns the task of an id, ``None`` if the training data have no such task (any more).
        exp_ratio: share of experience tasks at the most, in [0, 1]; or a function of training progress.
        replay_start_ratio: training progress in [0, 1] before which nothing is replayed.
        offpolicy_trajectories_per_task: histories per experience task at the most, below ``n_rollout``.
        unsolved_first: whether tasks without a success keep their places, and unsolved ones come before solved ones.
        text_of: returns what a task asks for; needed by ``task_sampling: similar``, which then draws, for the training
            tasks in turn, the pool's task most like each, and goes on ``by_task`` where none has a word in common.

    Raises:
        ConfigurationError: an argument is out of range, ``text_of`` is absent where it is needed, or the training data
            have none of the pool's tasks.
    """

    def __init__(
        self,
        exp_manager: ExperienceManager,
        get_task: Callable[[str], Task | None],
        *,
        exp_ratio: float | Callable[[float], float] = 0.5,
        replay_start_ratio: float = 0.35,
        offpolicy_trajectories_per_task: int = 1,
        unsolved_first: bool = False,
        text_of: Callable[[Task], str] | None = None,
    ) -> None:
        n_rollout = exp_manager.rules.n_rollout
        histories = whole("offpolicy_trajectories_per_task", offpolicy_trajectories_per_task, 1)
        refuse("", history_problems(histories, n_rollout))
        by_similarity = exp_manager.rules.task_sampling == "similar"
        if by_similarity and text_of is None:
            raise ConfigurationError(
                "task_sampling: similar, but nothing says what a task asks for: the trainer gives no task_text"
            )
        self._similar = SimilarTasks(get_task, text_of) if by_similarity and text_of is not None else None
        self._by_similarity = 0
        self.metrics: dict[str, float] = {}
        """What the newest call did: experience tasks, share of them, whether there was nothing to replay, tasks that
        gave way and tasks that wait, unknown tasks; with ``task_sampling: similar`` those that came by similarity."""
        self.replaying = False
        """Whether the newest call was one in which replay has begun."""
        self.asked_share = 0.0
        """Share of the batch's rows that the newest call would have replayed from a pool with enough tasks."""
        self._manager = exp_manager
        self._get_task = get_task
        self._exp_ratio = exp_ratio if callable(exp_ratio) else share("exp_ratio", exp_ratio)
        self._start = share("replay_start_ratio", replay_start_ratio)
        self._histories = histories
        self._unsolved_first = truth("unsolved_first", unsolved_first)
        self._n_rollout = n_rollout
        self._told_others = False
        self._known: dict[str, bool] = {}
        """Of each task that the pool had so far, whether the training data have it."""
        self._given: dict[str, Task] = {}  # waiting tasks as they were given; after a resume get_task finds them
        self.check_tasks()

    def check_tasks(self) -> None:
        """See that the training data have tasks of the pool; to be called when another pool was loaded.

        Raises:
            ConfigurationError: they have none of them.
        """
        tasks = self._manager.get_task_ids()
        if tasks and all(self._get_task(task) is None for task in tasks):
            raise ConfigurationError(
                f"the experience pool has trajectories of {len(tasks)} tasks ({listed(tasks, 3)}), the training data"
                " have none of these: another dataset? Give the run a pool of its own, or the data of the pool."
                " Other names for the same tasks? `trajstore pool import --task-prefix`"
            )

    def __call__(
        self, training_tasks: Sequence[Task], training_progress: float, enable_replay: bool = True
    ) -> tuple[list[Task], list[Task]]:
        """Return ``(experience_tasks, on_policy_tasks)``, together as many as ``training_tasks``.

        Before ``replay_start_ratio``, or switched off, these are none and all. Otherwise
        ``int(batch_size * exp_ratio)`` experience tasks at the most, drawn from the pool; the rest are tasks that gave
        way to experience tasks in earlier calls, in their order, and then training tasks in theirs, none of them an
        experience task, tasks that are skipped as solved only where too few others are left. Those that find no room
        wait for the next call. No task comes twice unless ``training_tasks`` has it twice and too few others, and none
        more often than there.

        With ``unsolved_first``, tasks of which no success is known do not give way, and come first; so the experience
        tasks are fewer while there are many of them. And where solved tasks would fill up, unsolved ones of earlier
        batches do.

        Raises:
            ConfigurationError: the training progress, or the schedule's ratio, is outside [0, 1].
        """
        share("training_progress", training_progress)
        task_ids_of(training_tasks)
        if not truth("enable_replay", enable_replay) or training_progress < self._start:
            for task in training_tasks:
                self._manager.waiting_tasks.pop(task_id_of(task), None)
            self.asked_share = 0.0
            self._note(0, len(training_tasks), replaying=False)
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
        earlier = len(fresh)
        used.update(map(task_id_of, fresh))
        planned = set(used)
        solved: list[Task] = []
        repeated: list[Task] = []
        for task in training_tasks:
            name = task_id_of(task)
            if name in planned:
                planned.remove(name)  # it is this one that the plan has already
            elif name in used:
                repeated.append(task)
            else:
                used.add(name)
                (solved if name in skipped else fresh).append(task)
        wanted = len(training_tasks) - len(experience)
        fresh.sort(key=lambda task: task_id_of(task) not in untaught)
        self._given = {task_id_of(task): task for task in fresh[wanted:]}
        self._manager.waiting_tasks.update(dict.fromkeys(self._given))
        displaced = len(fresh) - max(wanted, earlier) if len(fresh) > wanted else 0
        self._note(len(experience), len(training_tasks), replaying=True, displaced=displaced)
        if self._unsolved_first and len(fresh) < wanted:
            drawn = self._manager.sample_unsolved_tasks(wanted - len(fresh), used | self._unknown())
            fresh += [task for task in map(self._get_task, drawn) if task is not None]
        return experience, [*fresh, *solved, *repeated][:wanted]

    def get_histories(self, experience_tasks: Sequence[Task]) -> dict[str, list[AgentTrajectory]]:
        """Return each experience task's histories, best first; tasks for which none were found are absent."""
        histories: dict[str, list[AgentTrajectory]] = {}
        for trajectory in self._manager.get_offpolicy_batch(experience_tasks, self._histories):
            histories.setdefault(trajectory.task_id, []).append(trajectory)
        return histories

    def count_histories(self, experience_tasks: Sequence[Task]) -> dict[str, int]:
        """Return how many histories :meth:`get_histories` will find of each task that has any; nothing is drawn."""
        return self._manager.count_offpolicy(experience_tasks, self._histories)

    def fresh_rollouts(
        self,
        experience_tasks: Sequence[Task],
        on_policy_tasks: Sequence[Task],
        histories: Mapping[str, Sequence[AgentTrajectory]],
    ) -> list[int]:
        """Return how many rollouts each task makes, experience tasks first: ``n_rollout`` less its histories."""
        found = [len(histories.get(task_id_of(task), ())) for task in experience_tasks]
        return [self._n_rollout - k for k in found] + [self._n_rollout] * len(on_policy_tasks)

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
            ids = self._manager.sample_tasks_from_replaypool(target - len(tasks), None, strategy, drawn)
            if not ids:
                break
            drawn.update(ids)
            tasks.extend(task for task in map(self._get_task, ids) if task is not None)
        return tasks

    def _without_success(self, training_tasks: Sequence[Task]) -> set[str]:
        """Return the tasks that do not give way: no success is known of them, and the batch has places for them."""
        if not self._unsolved_first:
            return set()
        coming = dict.fromkeys((*self._manager.waiting_tasks, *map(task_id_of, training_tasks)))
        untaught = [name for name in coming if not self._manager.has_succeeded(name)]
        return set(untaught[: len(training_tasks)])

    def _unknown(self) -> set[str]:
        """Return the tasks of the pool that the training data lack: none is drawn, after a resume neither."""
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

    def _other_prompts(self) -> int:
        """Return how many histories answer another prompt than their task's row; told once."""
        others = self._manager.of_other_rows()
        if others and not self._told_others:
            self._told_others = True
            logger.warning(
                "experience pool: %d histories, of task %s, answer another prompt than the training data's row of their"
                " task: they are not replayed, and counted as experience_replay/other_prompts. Data that were shuffled"
                " or filtered anew give other rows the same names: name tasks by what they ask, or give the run a pool"
                " of its own",
                len(others),
                listed(dict.fromkeys(repr(one.task_id) for one in others), 3),
            )
        return len(others)

    def _take_waiting(self, passed_over: Collection[str]) -> list[Task]:
        """Return the tasks that wait, the first one longest, and forget them. Those passed over need not wait more."""
        waiting = self._manager.waiting_tasks
        names = [name for name in waiting if name not in passed_over]
        waiting.clear()
        found = [self._given[name] if name in self._given else self._get_task(name) for name in names]
        return [task for task in found if task is not None]

    def _note(self, experience: int, batch: int, *, replaying: bool, displaced: int = 0) -> None:
        self.replaying = replaying
        self.metrics = {
            "experience_replay/experience_tasks": float(experience),
            "experience_replay/experience_task_ratio": experience / batch if batch else 0.0,
            "experience_replay/nothing_to_replay": float(replaying and not experience),
            "experience_replay/displaced_tasks": float(displaced),
            "experience_replay/waiting_tasks": float(len(self._manager.waiting_tasks)),
            "experience_replay/unknown_tasks": float(len(self._unknown())),
            "experience_replay/other_prompts": float(self._other_prompts()),
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


def history_problems(histories: int, n_rollout: int) -> list[str]:
    """Return why a task cannot have so many histories, a sentence each."""
    if histories < n_rollout:
        return []
    return [
        f"offpolicy_trajectories_per_task: {histories}, must be below n_rollout = {n_rollout}, so that every task makes"
        " a fresh rollout"
    ]


class SimilarTasks(Generic[Task]):
    """An index of the texts of the pool's tasks, which follows the pool. Nothing is left to chance.

    What it answers depends on the tasks that it follows and on their order, not on those that were there before: after
    a resume it answers the same.

    Args:
        get_task: returns the task of an id; ``None`` if the training data have no such task, which is then left out.
        text_of: returns what a task asks for.
    """

    def __init__(self, get_task: Callable[[str], Task | None], text_of: Callable[[Task], str]) -> None:
        self._get_task = get_task
        self._text_of = text_of
        self._index = RetrievalIndex()
        self._keys: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._next = 0

    def follow(self, names: Sequence[str]) -> None:
        """Have these tasks in the index, in this order, and no others."""
        last, kept = -1, True
        new: list[str] = []
        for name in names:
            key = self._keys.get(name, -1)
            kept = kept and key > last  # from the first that is new, or stands elsewhere, all are added anew
            if kept:
                last = key
            else:
                new.append(name)
        there = set(names).difference(new)
        self._remove([name for name in self._keys if name not in there])
        self._add(new)

    def nearest(self, tasks: Sequence[Task], among: Collection[str], n: int) -> list[str]:
        """Return up to ``n`` ids of different tasks: in turn the one most like each of the given tasks.

        Args:
            tasks: to be compared with, in the order of their turns.
            among: ids that may be returned.
            n: how many at the most; fewer if no more have a word in common.
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
                found = next((name for name in queue if name not in chosen), None)
                if found is not None and len(chosen) < n:
                    chosen[found] = None
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
