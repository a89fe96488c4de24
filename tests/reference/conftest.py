"""Small runs of the reference trainer that all tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.reference.environments import Environment, HouseholdEnvironment, SortEnvironment
from trainer_hooks.reference.model import ModelConfig
from trainer_hooks.reference.trainer import ReferenceTrainer, TrainerConfig


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Curves depend on the number of threads; models this small want one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


SORT = TrainerConfig(
    environment="sort",
    steps=12,
    tasks_per_step=6,
    n_rollout=4,
    evaluate_every=4,
    evaluation_rollouts=1,
    warm_start_steps=30,
    model=ModelConfig(hidden_size=32, layers=1, heads=2),
)
HOUSEHOLD = replace(SORT, environment="household", steps=6)


def replay(**changes: Any) -> ExperienceReplayConfig:
    """Return a configuration that replays from the first step on in which the pool has something."""
    return ExperienceReplayConfig(**{"enable": True, "replay_start_ratio": 0.0, **changes})


def environment(config: TrainerConfig) -> Environment:
    """Return a small environment in which some tasks are partly solved from the start."""
    if config.environment == "sort":
        return SortEnvironment(lengths=(2, 3), tasks_per_length=4)
    return HouseholdEnvironment(things=2, max_turns=5)


Train = Callable[..., ReferenceTrainer]


@pytest.fixture
def make() -> Iterator[Train]:
    """Return a function that makes a trainer after its supervised start; all are closed at the end."""
    made: list[ReferenceTrainer] = []

    def make_trainer(config: TrainerConfig = SORT, **replay_options: Any) -> ReferenceTrainer:
        if replay_options:
            config = replace(config, replay=replay(**replay_options))
        trainer = ReferenceTrainer(config, environment(config))
        made.append(trainer)
        trainer.warm_start()
        return trainer

    yield make_trainer
    for trainer in made:
        trainer.close()


@pytest.fixture
def store(tmp_path: Path) -> dict[str, str]:
    """Return the options of a pool on disk."""
    return {"path": str(tmp_path / "pool")}
