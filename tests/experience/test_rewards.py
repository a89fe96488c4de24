"""Which reward function gave an outcome, and one record that cannot be read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from trajstore.experience import ExperienceManager, MemoryStore, PoolRules
from trajstore.trajectory import AgentTrajectory

Make = Callable[..., AgentTrajectory]
RULES = PoolRules(n_rollout=4)


def filled(make: Make, store: MemoryStore | None = None, reward: str = "exact:1") -> ExperienceManager:
    manager = ExperienceManager(RULES, store=store, reward_fingerprint=reward)
    manager.save_trajectories_to_memory([make(task, tokens) for task in "ab" for tokens in (1, 2)])
    return manager


@pytest.mark.parametrize("way", ["restart", "checkpoint", "files"])
def test_another_reward_function_is_told(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    store = MemoryStore()
    first = filled(make, store)
    first.save_experience_pool_to_disk(tmp_path / "step_1")
    for fingerprint, told in (("exact:1", False), ("", False), ("partial:2", True)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="trajstore"):
            other = ExperienceManager(RULES, store=store if way == "restart" else None, reward_fingerprint=fingerprint)
            if way == "checkpoint":
                other.load_state_dict(first.state_dict())
            if way == "files":
                other.load_experience_pool_from_disk(tmp_path / "step_1")
        assert ("4 trajectories have outcomes of another reward function: 'exact:1' (4)" in caplog.text) is told
    assert len(other) == 4
