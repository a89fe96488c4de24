"""``import_pool``: what is told of an import adds up to what was read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tests.experience.conftest import build
from trajstore import TrajectoryReplayBuffer
from trajstore.experience import REPLAY_MARK, PoolRules
from trajstore.experience.exchange import Exchanged, import_pool
from trajstore.trajectory import AgentTrajectory

ALL = PoolRules(n_rollout=4, max_trajectories_per_task=3)
VARIANTS = {
    "success": ALL,
    "best": dataclasses.replace(ALL, save_filter="best"),
    "positive": dataclasses.replace(ALL, save_filter="positive", exp_select_mode="reward"),
    "bounds": dataclasses.replace(ALL, experience_lbound=0, experience_rbound=3, exp_select_mode="random"),
}


def random_rollouts(generator: np.random.Generator, step: int) -> list[AgentTrajectory]:
    """Return rollouts of a step with everything of which a pool makes something else."""
    made = []
    for task in ["a", "b", "c", "d", ""]:
        easy = generator.random() < 0.4
        for _ in range(4):
            metadata = {REPLAY_MARK: True} if generator.random() < 0.05 else {}
            outcome = [1.0, 0.5, 0.0, None][int(generator.choice(4, p=[1, 0, 0, 0] if easy else [0.4, 0.2, 0.3, 0.1]))]
            log_probs = {"old_log_probs": None} if generator.random() < 0.05 else {}
            number = int(generator.integers(100))
            entropy = float(generator.random())
            made.append(
                build(task, number, outcome, policy_version=step, entropy=entropy, metadata=metadata, **log_probs)
            )
    return made


def check_sums(done: Exchanged) -> None:
    never = sum(int(sentence.split()[0].replace(",", "")) for sentence in done.left_out)
    assert done.read == done.entered + done.refused.total() + never + done.unreadable
    assert done.trajectories == done.before + done.entered - done.left.total()


@pytest.mark.parametrize("rules", VARIANTS.values(), ids=VARIANTS)
def test_what_is_told_of_an_import_adds_up(tmp_path: Path, rules: PoolRules) -> None:
    generator = np.random.default_rng(0)
    left, before = set[str](), 0
    for part in ("first", "second"):  # the second comes into a pool that holds something
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(tmp_path / part)) as buffer:
            buffer.add_trajectories([one for step in range(1, 13) for one in random_rollouts(generator, step)])
        done = import_pool(tmp_path / "pool", tmp_path / part, rules)
        assert (done.read, done.before) == (240, before)
        check_sums(done)
        left |= set(done.left)
        before = done.trajectories
    assert left == {"task_solved", "replaced"}
