"""Fixtures of the reference trainer's tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.grpo.config import TrainerConfig
from examples.grpo.trainer import ReferenceTrainer
from tests.examples.runs import SORT, Train, environment, replay
from trainer_hooks.config import ExperienceReplayConfig


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread: curves depend on the number of threads, and small models run best with one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def started() -> dict[TrainerConfig, dict[str, torch.Tensor]]:
    """Cache weights after the supervised start, once per configuration."""
    return {}


@pytest.fixture
def make(started: dict[TrainerConfig, dict[str, torch.Tensor]]) -> Iterator[Train]:
    """Return a factory of trainers after their supervised start; closes all at teardown."""
    if find_spec("transformers") is None:
        pytest.skip("needs transformers: install the extra 'demo'")
    made: list[ReferenceTrainer] = []

    def make_trainer(config: TrainerConfig = SORT, **replay_options: Any) -> ReferenceTrainer:
        if replay_options:
            config = replace(config, replay=replay(**replay_options))
        trainer = ReferenceTrainer(config, environment(config))
        made.append(trainer)
        key = replace(config, replay=ExperienceReplayConfig(), rollouts=None)
        if key not in started:
            trainer.warm_start()
            started[key] = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        trainer.model.load_state_dict(started[key])
        return trainer

    yield make_trainer
    for trainer in made:
        trainer.close()


@pytest.fixture
def store(tmp_path: Path) -> dict[str, str]:
    """Return options for a pool on disk."""
    return {"path": str(tmp_path / "pool")}
