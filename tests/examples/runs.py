"""Small runs of the reference trainer, and their pools' contents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from examples.grpo.config import TrainerConfig
from examples.grpo.environments import Environment, HouseholdEnvironment, SortEnvironment
from examples.grpo.model import ModelConfig
from examples.grpo.trainer import ReferenceTrainer
from trainer_hooks.config import ExperienceReplayConfig
from trajstore.trajectory import AgentTrajectory

Train = Callable[..., ReferenceTrainer]
"""Creates a trainer after its supervised start; keyword arguments are replay options, none = no replay."""

SORT = TrainerConfig(
    environment="sort",
    steps=8,
    tasks_per_step=6,
    n_rollout=4,
    evaluate_every=4,
    evaluation_rollouts=1,
    warm_start_steps=120,
    model=ModelConfig(hidden_size=32, layers=1, heads=2),
)
HOUSEHOLD = replace(SORT, environment="household")


def replay(**changes: Any) -> ExperienceReplayConfig:
    """Return a configuration that replays from the first step with a non-empty pool."""
    return ExperienceReplayConfig(**{"enable": True, **changes})


def environment(config: TrainerConfig) -> Environment:
    """Return a small environment with some tasks partly solved from the start."""
    if config.environment == "sort":
        return SortEnvironment(lengths=(2, 3), tasks_per_length=4)
    return HouseholdEnvironment(things=2, max_turns=5)


def pool_of(trainer: ReferenceTrainer) -> dict[tuple[int, ...], AgentTrajectory]:
    """Return the pool's trajectories by their tokens."""
    manager = trainer.hook.manager
    held = [history for several in manager.task2trajectories.values() for history in several]
    return {tuple(history.input_ids.tolist()): history for history in held if history.input_ids is not None}
