"""Task difficulties, and the probabilities with which tasks are drawn. Pure; the generator is passed in.

The *difficulty* of a task is its number of successes out of ``n_rollout``, by the fresh rollouts of its newest step
(:meth:`~trainer_hooks.replay.outcomes.TaskOutcome.difficulty`). Tasks of one difficulty share a *bucket*.

Takes no lock: only the training loop that owns the pool calls it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from trajstore.errors import ConfigurationError

TaskSampling = Literal["by_task", "by_difficulty", "normal", "linear", "sqrt", "linear_clip", "similar"]
TASK_SAMPLING: tuple[TaskSampling, ...] = get_args(TaskSampling)


class DifficultyBuckets:
    """A partition of tasks by difficulty, in order of arrival.

    A task is in at most one bucket, and no bucket is empty.
    """

    def __init__(self, buckets: Mapping[int, Iterable[str]] | None = None) -> None:
        self._tasks: dict[int, dict[str, None]] = {}  # a dict as an ordered set: removal in constant time
        self._difficulty: dict[str, int] = {}
        for difficulty, tasks in (buckets or {}).items():
            for task in tasks:
                if task in self._difficulty:
                    raise ConfigurationError(
                        f"difficulty2task_dict: task {task!r} is in the buckets {self._difficulty[task]} and"
                        f" {difficulty}; keep it in one"
                    )
                self.place(task, difficulty)

    def __len__(self) -> int:
        return len(self._difficulty)

    def __contains__(self, task: object) -> bool:
        return task in self._difficulty

    def difficulty(self, task: str) -> int | None:
        """Return the task's difficulty; ``None`` if it is in no bucket."""
        return self._difficulty.get(task)

    def place(self, task: str, difficulty: int) -> None:
        """Move a task into a bucket. A task that is already there keeps its position."""
        if self._difficulty.get(task) == difficulty:
            return
        self.remove(task)
        self._difficulty[task] = difficulty
        self._tasks.setdefault(difficulty, {})[task] = None

    def remove(self, task: str) -> None:
        """Remove a task from its bucket, if it is in one."""
        difficulty = self._difficulty.pop(task, None)
        if difficulty is None:
            return
        bucket = self._tasks[difficulty]
        del bucket[task]
        if not bucket:
            del self._tasks[difficulty]

    def to_dict(self) -> dict[int, list[str]]:
        """Return ``{difficulty: [task, ...]}``, a copy."""
        return {difficulty: list(tasks) for difficulty, tasks in self._tasks.items()}

    def sizes(self) -> dict[int, int]:
        """Return the number of tasks per difficulty."""
        return {difficulty: len(tasks) for difficulty, tasks in self._tasks.items()}


def bucket_probabilities(sizes: Mapping[int, int], strategy: TaskSampling, n_rollout: int) -> np.ndarray:
    """Return the probability with which the next task comes from each bucket, in the order of ``sizes``.

    With difficulty d, bucket size m and n = ``n_rollout``, a bucket's weight is

    ================= ===========================================================
    ``by_task``       m: every task is equally likely
    ``by_difficulty`` 1: every bucket is equally likely, then a task of it
    ``normal``        exp(-(d - n/2)² / 2): half-solved tasks, sigma 1
    ``linear``        d / n: easy tasks
    ``sqrt``          sqrt(d / n)
    ``linear_clip``   min(d / n, 1/2)
    ================= ===========================================================

    The last four are the weightings of ExGRPO (arXiv 2510.02245). A bucket of weight zero is never drawn. ``similar``
    is no weighting: see :class:`~trainer_hooks.replay.mixing.SimilarTasks`.

    Returns:
        float64 ``[len(sizes)]`` that sums to 1, or zeros if no bucket has any weight.

    Raises:
        ConfigurationError: the strategy is unknown.
    """
    weights = np.array([_log_weight(d, m, strategy, n_rollout) for d, m in sizes.items()], dtype=np.float64)
    if not weights.size or np.isneginf(weights).all():
        return np.zeros(len(sizes))
    # Relative to the largest, since exp(-(n/2)² / 2) underflows for large n.
    weights = np.exp(weights - weights.max())
    return np.asarray(weights / weights.sum(), dtype=np.float64)


def _log_weight(difficulty: int, size: int, strategy: TaskSampling, n_rollout: int) -> float:
    if strategy == "normal":
        return -((difficulty - n_rollout / 2) ** 2) / 2 if size else -math.inf
    if strategy == "similar":
        raise ConfigurationError(
            "task_sampling: similar compares with the tasks of a batch: ExperienceMixCollateFn does"
        )
    share = difficulty / n_rollout
    weights = {"by_difficulty": 1.0}
    weights |= {"by_task": size, "linear": share, "sqrt": math.sqrt(share), "linear_clip": min(share, 0.5)}
    weight = weights[strategy]
    return math.log(weight) if size and weight > 0 else -math.inf


def draw_tasks(
    buckets: Mapping[int, Sequence[str]],
    n: int,
    strategy: TaskSampling,
    n_rollout: int,
    generator: np.random.Generator,
    exclude: Collection[str] = (),
) -> list[str]:
    """Draw up to ``n`` tasks without replacement: each time a bucket by its weight, then one of its tasks.

    Args:
        buckets: candidate tasks per difficulty.
        n: number of tasks to draw; fewer are returned if the buckets with any weight hold fewer.
        strategy: see :func:`bucket_probabilities`; weights follow the buckets as they empty.
        n_rollout: rollouts per task.
        generator: source of all randomness.
        exclude: tasks that are not drawn.
    """
    left = {d: [task for task in tasks if task not in exclude] for d, tasks in buckets.items()}
    drawn: list[str] = []
    while len(drawn) < n:
        left = {difficulty: tasks for difficulty, tasks in left.items() if tasks}
        probabilities = bucket_probabilities({d: len(tasks) for d, tasks in left.items()}, strategy, n_rollout)
        if not probabilities.any():
            break
        tasks = list(left.values())[int(generator.choice(len(left), p=probabilities))]
        place = int(generator.integers(len(tasks)))
        tasks[place], tasks[-1] = tasks[-1], tasks[place]
        drawn.append(tasks.pop())
    return drawn
