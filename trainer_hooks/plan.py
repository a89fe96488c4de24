"""The rollouts planned for a step, and the rows of its batch. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Generic, TypeVar

from trainer_hooks.batch import BatchRow, GroupOffPolicy, assign_group_ids
from trainer_hooks.guidance import Guidance
from trainer_hooks.replay.contract import task_id_of
from trainer_hooks.replay.outcomes import REPLAYED_ID
from trainer_hooks.replay.rows import rows_of
from trajstore._core.base.arguments import whole
from trajstore.errors import ConfigurationError
from trajstore.trajectory import AgentTrajectory

Task = TypeVar("Task")
"""A task id, or an object with a ``task_id``."""


@dataclass(frozen=True, slots=True)
class MixedTasks(Generic[Task]):
    """The tasks of one step.

    Attributes:
        experience: tasks with replayed histories.
        on_policy: tasks with fresh rollouts only.
    """

    experience: tuple[Task, ...]
    on_policy: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class PlannedTask(Generic[Task]):
    """One task of a step, its histories, and its number of rollouts to make.

    Attributes:
        task: as given by the trainer.
        fresh_rollouts: number of rollouts to make.
        histories: its replayed trajectories.
    """

    task: Task
    fresh_rollouts: int
    histories: Sequence[AgentTrajectory]

    def __post_init__(self) -> None:
        task_id_of(self.task)
        whole("fresh_rollouts", self.fresh_rollouts, 0)


def with_replacements(
    plan: Sequence[PlannedTask[Task]], joining: Sequence[PlannedTask[Task]], fresh: Sequence[AgentTrajectory]
) -> tuple[list[PlannedTask[Task]], list[AgentTrajectory]]:
    """Return a plan and its rollouts with the replacements of histories counted and sorted to their tasks.

    Args:
        plan: the tasks of the step.
        joining: the same tasks with the histories that join the batch.
        fresh: the rollouts of ``plan``, and after them the replacements, in the order of the plan.
    """
    planned = sum(planned_task.fresh_rollouts for planned_task in plan)
    first, further = iter(fresh[:planned]), iter(fresh[planned:])
    tasks: list[PlannedTask[Task]] = []
    rollouts: list[AgentTrajectory] = []
    for asked, joined in zip(plan, joining, strict=True):
        missing = len(asked.histories) - len(joined.histories)
        rollouts += [*islice(first, asked.fresh_rollouts), *islice(further, missing)]
        tasks.append(replace(joined, fresh_rollouts=asked.fresh_rollouts + missing))
    return tasks, [*rollouts, *further]  # more than planned are refused by rows_of_plan


def rows_of_plan(
    plan: Sequence[PlannedTask[Any]], fresh: Sequence[AgentTrajectory], group_offpolicy: GroupOffPolicy
) -> list[BatchRow]:
    """Return the rows of a batch, task by task, each task's fresh rollouts before its histories.

    A rollout with a guidance record (``trainer_hooks.guidance.Guidance``) gives a row with its flag and train mode.

    Args:
        plan: the tasks of the step.
        fresh: the rollouts made, in the order of the plan.
        group_offpolicy: whether histories are in their task's group.

    Raises:
        ConfigurationError: there are more or fewer rollouts than planned, or a rollout is of another task than planned
            at its place.
        InvalidTrajectoryError: a trajectory's guidance record is invalid.
    """
    planned = sum(planned_task.fresh_rollouts for planned_task in plan)
    if len(fresh) != planned:
        raise ConfigurationError(f"fresh: {len(fresh)} rollouts, the plan asks for {planned}")
    rollouts = iter(fresh)
    trajectories: list[AgentTrajectory] = []
    positions: list[int] = []
    replayed: list[bool] = []
    for position, planned_task in enumerate(plan):
        mine = [next(rollouts) for _ in range(planned_task.fresh_rollouts)]
        _check_tasks(task_id_of(planned_task.task), mine, len(trajectories))
        trajectories += mine
        histories = list(planned_task.histories)
        trajectories += histories
        positions += [position] * (planned_task.fresh_rollouts + len(histories))
        replayed += [False] * planned_task.fresh_rollouts + [True] * len(histories)
    groups = assign_group_ids(positions, replayed, group_offpolicy)
    return [
        row
        for number, (trajectory, group, is_replayed) in enumerate(zip(trajectories, groups, replayed, strict=True))
        for row in rows_of_rollout(trajectory, group, number, is_replayed=is_replayed)
    ]


def _check_tasks(task: str, rollouts: Sequence[AgentTrajectory], first: int) -> None:
    """Refuse rollouts of other tasks than planned, whose advantages would be those of another group."""
    for place, rollout in enumerate(rollouts, first):
        if rollout.task_id not in ("", task):
            raise ConfigurationError(
                f"fresh: rollout {place} is of task {rollout.task_id!r}, the plan has {task!r} there; give them "
                "in the order of the plan, all of a task together"
            )


def rows_of_rollout(trajectory: AgentTrajectory, group: int, number: int, *, is_replayed: bool) -> list[BatchRow]:
    """Return the rows of a rollout, usually one.

    Args:
        trajectory: the rollout.
        group: of all its rows.
        number: of the rollout in the batch.
        is_replayed: whether it was drawn from the pool.

    Raises:
        InvalidTrajectoryError: the trajectory's guidance record is invalid.
    """
    parts = rows_of(trajectory)
    guidance = Guidance.of(trajectory)
    stored_as = trajectory.metadata.get(REPLAYED_ID) if is_replayed else None
    extras = {} if stored_as is None else {"trajectory_id": stored_as}
    return [
        BatchRow(
            trajectory=part,
            group_id=group,
            is_experience_replay=is_replayed,
            add_exp=guidance is not None,
            train_mode="keep" if guidance is None else guidance.train_mode,
            rollout=None if len(parts) == 1 else (number, place, len(parts)),
            extras=extras,
        )
        for place, part in enumerate(parts)
    ]
