"""What a step is to roll out, and the rows that come of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

from trainer_hooks.batch import BatchRow, GroupOffPolicy, assign_group_ids
from trainer_hooks.guidance import Guidance
from trainer_hooks.replay.contract import task_id_of
from trainer_hooks.replay.prompts import Prompt, prompt_of
from trainer_hooks.replay.rows import rows_of
from trajstore.core.base.arguments import whole
from trajstore.errors import ConfigurationError
from trajstore.trajectory import AgentTrajectory

Task = TypeVar("Task")
"""A task id, or an object with a ``task_id``."""


@dataclass(frozen=True, slots=True)
class MixedTasks(Generic[Task]):
    """The tasks of one step: those that bring history, and the rest.

    Attributes:
        experience: tasks of which histories are replayed.
        on_policy: tasks of which all rollouts are made.
    """

    experience: tuple[Task, ...]
    on_policy: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class PlannedTask(Generic[Task]):
    """One task of a step, its histories, and how many rollouts are to be made of it.

    Attributes:
        task: as the trainer gave it.
        fresh_rollouts: how many rollouts of the task are to be made.
        histories: what is replayed of it. With ``prepare_in_background`` their number is known at once, and looking at
            one waits for all.
    """

    task: Task
    fresh_rollouts: int
    histories: Sequence[AgentTrajectory]

    def __post_init__(self) -> None:
        task_id_of(self.task)
        whole("fresh_rollouts", self.fresh_rollouts, 0)


def prompts_of_rollouts(plan: Sequence[PlannedTask[Any]], fresh: Sequence[AgentTrajectory]) -> dict[str, Prompt]:
    """Return what the rollouts of tasks with histories were asked, by task: of each the first rollout's prompt."""
    rollouts = iter(fresh)
    found = {}
    for one in plan:
        mine = list(islice(rollouts, one.fresh_rollouts))
        if mine and one.histories:
            found[task_id_of(one.task)] = prompt_of(mine[0])
    return found


def rows_of_plan(
    plan: Sequence[PlannedTask[Any]], fresh: Sequence[AgentTrajectory], group_offpolicy: GroupOffPolicy
) -> list[BatchRow]:
    """Return the rows of a batch, task by task, each task's fresh rollouts before its histories.

    A history with another prompt than its task's first rollout is left out.

    A rollout that records guidance (``trainer_hooks.guidance.Guidance``) gives a row with its flag and its train mode.

    Args:
        plan: the tasks of the step.
        fresh: the rollouts made, in the order of the plan.
        group_offpolicy: whether histories are in their task's group.

    Raises:
        ConfigurationError: there are more or fewer rollouts than planned, or a rollout is of another task than the plan
            has at its place.
        InvalidTrajectoryError: a trajectory's record of its guidance cannot be understood.
    """
    planned = sum(one.fresh_rollouts for one in plan)
    if len(fresh) != planned:
        raise ConfigurationError(f"fresh: {len(fresh)} rollouts, the plan asks for {planned}")
    rollouts = iter(fresh)
    trajectories: list[AgentTrajectory] = []
    prompts = prompts_of_rollouts(plan, fresh)
    positions: list[int] = []
    replayed: list[bool] = []
    for position, one in enumerate(plan):
        mine = [next(rollouts) for _ in range(one.fresh_rollouts)]
        _check_tasks(task_id_of(one.task), mine, len(trajectories))
        trajectories += mine
        asked = prompts.get(task_id_of(one.task))
        histories = [held for held in one.histories if asked is None or not prompt_of(held).differs(asked)]
        trajectories += histories
        positions += [position] * (one.fresh_rollouts + len(histories))
        replayed += [False] * one.fresh_rollouts + [True] * len(histories)
    groups = assign_group_ids(positions, replayed, group_offpolicy)
    return [
        row
        for number, (trajectory, group, is_replayed) in enumerate(zip(trajectories, groups, replayed, strict=True))
        for row in rows_of_rollout(trajectory, group, number, is_replayed=is_replayed)
    ]


def _check_tasks(task: str, rollouts: Sequence[AgentTrajectory], first: int) -> None:
    """Refuse rollouts of other tasks than the plan's: their advantages would be those of another group."""
    for place, rollout in enumerate(rollouts, first):
        if rollout.task_id not in ("", task):
            raise ConfigurationError(
                f"fresh: rollout {place} is of task {rollout.task_id!r}, the plan has {task!r} there; give them "
                "in the order of the plan, all of a task together"
            )


def rows_of_rollout(trajectory: AgentTrajectory, group: int, number: int, *, is_replayed: bool) -> list[BatchRow]:
    """Return the rows of a rollout, which most have one of.

    Args:
        trajectory: the rollout.
        group: of all its rows.
        number: of the rollout in the batch.
        is_replayed: whether it came out of the pool.

    Raises:
        InvalidTrajectoryError: the trajectory's record of its guidance cannot be understood.
    """
    parts = rows_of(trajectory)
    guidance = Guidance.of(trajectory)
    return [
        BatchRow(
            trajectory=part,
            group_id=group,
            is_experience_replay=is_replayed,
            add_exp=guidance is not None,
            train_mode="keep" if guidance is None else guidance.train_mode,
            rollout=None if len(parts) == 1 else (number, place, len(parts)),
        )
        for place, part in enumerate(parts)
    ]
