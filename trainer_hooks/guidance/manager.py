"""``GuidanceManager``: chooses guided rollouts and tasks that keep experience; schedules summaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from trainer_hooks.guidance.context import TrainMode
from trainer_hooks.guidance.updates import UpdateQueue
from trainer_hooks.replay.state import generator_state, set_generator_state
from trajstore._core.base.arguments import one_of, whole
from trajstore._core.base.settings import Settings, Share
from trajstore.errors import ConfigurationError
from trajstore.trajectory import AgentTrajectory

RolloutMode = Literal["sample", "validate"]
RolloutExpMode = Literal["woexp", "all", "mixed"]
SampleExpMode = Literal["allkeep", "alldiscard", "hybrid"]


@dataclass(frozen=True, slots=True)
class TaskExpConfig:
    """Guidance of one task in a step.

    Attributes:
        add_exp: for each rollout of the task, whether it is guided.
        train_mode: whether training keeps the experience in their prompts.
    """

    add_exp: tuple[bool, ...]
    train_mode: TrainMode


@dataclass(frozen=True, kw_only=True)
class AllocationRules(Settings):
    """Rules for which rollouts are guided and which experience is kept.

    Attributes:
        train_rollout_expmode: which rollouts are guided: ``all``, none (``woexp``), or a share of each task's
            (``mixed``): ``round(n * rollout_expratio)`` of n (halves to even, as in Python), drawn at random for each
            task.
        val_rollout_expmode: which validation rollouts are guided, by the same names.
        rollout_expratio: share of a task's rollouts that are guided, with ``mixed``.
        train_sample_expmode: whether guided rollouts are trained on with the experience in their prompt: no
            (``alldiscard``), yes (``allkeep``), or those of a share of the tasks (``hybrid``): ``int(tasks *
            train_sample_keepratio)``, drawn at random.
        train_sample_keepratio: share of the tasks that keep experience in training, with ``hybrid``.

    Raises:
        ConfigurationError: no such mode, or a ratio outside [0, 1].
    """

    train_rollout_expmode: RolloutExpMode = "mixed"
    val_rollout_expmode: RolloutExpMode = "woexp"
    rollout_expratio: Share = 0.0
    train_sample_expmode: SampleExpMode = "alldiscard"
    train_sample_keepratio: Share = 1.0


class GuidanceManager:
    """Allocates guidance by a seeded generator and updates the pool. For the training loop's thread only.

    Args:
        rules: for allocation.
        seed: of the generator; managers with the same seed and calls decide alike.
        updates: queue of rollouts to summarize; ``None`` = none.
        updated_freq: steps between updates; 0 = none.
    """

    def __init__(
        self, rules: AllocationRules, *, seed: int = 1234, updates: UpdateQueue | None = None, updated_freq: int = 0
    ) -> None:
        whole("seed", seed, 0)
        self._rules = rules
        self._generator = np.random.Generator(np.random.PCG64(seed))
        self._updates = updates
        self._updated_freq = whole("updated_freq", updated_freq, 0)

    def allocate_train_mode(self, tasks: Sequence[Any]) -> list[TrainMode]:
        """Return the train mode of each task."""
        mode, count = self._rules.train_sample_expmode, len(tasks)
        if mode != "hybrid":
            return ["keep" if mode == "allkeep" else "discard"] * count
        order = self._generator.permutation(count)
        keeping = set(order[: int(count * self._rules.train_sample_keepratio)].tolist())
        return ["keep" if task in keeping else "discard" for task in range(count)]

    def allocate_add_exp(self, rollouts: Sequence[int], mode: RolloutMode) -> list[tuple[bool, ...]]:
        """Return which rollouts of each task are guided.

        Args:
            rollouts: number of rollouts of each task.
            mode: ``sample`` in training, ``validate`` in validation.

        Raises:
            ConfigurationError: a negative number.
        """
        for place, count in enumerate(rollouts):
            whole(f"rollouts[{place}]", count, 0)
        one_of("mode", mode, get_args(RolloutMode))
        rules = self._rules
        chosen = rules.train_rollout_expmode if mode == "sample" else rules.val_rollout_expmode
        if chosen != "mixed":
            return [(chosen == "all",) * count for count in rollouts]
        result = []
        for count in rollouts:
            guided = set(self._generator.permutation(count)[: round(count * rules.rollout_expratio)].tolist())
            result.append(tuple(rollout in guided for rollout in range(count)))
        return result

    def get_complete_exp_configs(
        self, tasks: Sequence[Any], rollouts: Sequence[int], mode: RolloutMode
    ) -> list[TaskExpConfig]:
        """Return train mode and guided rollouts of each task.

        Args:
            tasks: of the step.
            rollouts: number of rollouts of each task.
            mode: ``sample`` in training, ``validate`` in validation.
        """
        if len(tasks) != len(rollouts):
            raise ConfigurationError(
                f"rollouts: {len(rollouts)} numbers for {len(tasks)} tasks, must have one for each"
            )
        modes = self.allocate_train_mode(tasks)
        flags = self.allocate_add_exp(rollouts, mode)
        return [TaskExpConfig(add_exp, train_mode) for add_exp, train_mode in zip(flags, modes, strict=True)]

    def update_experience_pool(self, trajectories: Sequence[AgentTrajectory], global_steps: int) -> bool:
        """Queue rollouts for summarizing in every ``updated_freq``-th step; never waits.

        Returns:
            Whether they were queued: False in other steps, and if the queue is full (counted and logged).
        """
        whole("global_steps", global_steps, 0)
        if self._updates is None or self._updated_freq == 0 or global_steps % self._updated_freq:
            return False
        return self._updates.submit(trajectories)

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state: plain containers."""
        return {"generator": generator_state(self._generator)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that :meth:`state_dict` returned.

        Raises:
            CorruptStoreError: ``state`` is not such a state; nothing was changed.
        """
        set_generator_state(self._generator, state.get("generator", ""))
