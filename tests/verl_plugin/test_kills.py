"""SIGKILL of a training's driver: what was acknowledged is there, and the next driver goes on from the checkpoint."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch

from tools.crash.verl.campaign import run_campaign
from tools.crash.verl.checks import Promises, check_resumed, look
from tools.crash.verl.digest import digest
from tools.crash.verl.keeping import Kept, kept_pool
from tools.crash.verl.layout import (
    pool_path,
    rollouts_path,
)
from tools.crash.verl.moments import ACKNOWLEDGED, CUT, FIRST_ACKNOWLEDGED, UPDATE, Moment
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.hook import ReplayHook
from trainer_hooks.verl.rows import replayable
from trajstore import AgentTrajectory, TrajectoryReplayBuffer
from trajstore.trajectory import Reward

from .assets import Assets


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_is_lost_when_the_driver_is_killed(verl_assets: Assets, tmp_path: Path) -> None:
    """The fixture only skips where verl's trainer cannot run; a campaign makes its own assets."""
    result = run_campaign(tmp_path, kills=2, seed=1, moments=(CUT, UPDATE))
    assert result.problems == []
    assert result.counts["kills"] == 2
    assert result.counts["acknowledged rollouts"] > 50
    assert len(result.resumed) == 3
    assert result.resumed[-1] >= 2


SAID = {"role": "assistant", "content": "1", "author": "llm"}
"""The text of a response, which rollouts have on disk."""


def make_store(path: Path, trajectories: list[AgentTrajectory]) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path) as buffer:
        buffer.add_trajectories(trajectories)


def test_loss_is_seen(tmp_path: Path) -> None:
    kept = AgentTrajectory(rollout_id="kept_0_0", task_id="digit:1", policy_version=1, messages=[SAID])
    bare = AgentTrajectory(rollout_id="bare_0_0", task_id="digit:1", policy_version=1)
    make_store(rollouts_path(tmp_path), [kept, bare])
    make_store(pool_path(tmp_path), [])
    problems: list[str] = []
    promises = Promises()
    promises.take({"event": "acknowledged", "rollouts": {"0": ["kept_0_0", digest(kept)]}}, problems.append)
    found = look(tmp_path, promises, "run", "exact", problems.append)
    assert (found.rollouts, found.between, found.expected.step, problems) == (1, False, 0, [])

    promises.take({"event": "acknowledged", "rollouts": {"1": ["bare_0_0", digest(bare)]}}, problems.append)
    promises.take({"event": "acknowledged", "rollouts": {"2": ["lost_0_0", "0" * 32]}}, problems.append)
    promises.take({"event": "acknowledged", "rollouts": {"0": ["again_0_0", "0" * 32]}}, problems.append)
    promises.take({"event": "pooled", "entries": {"digit:1": [0]}}, problems.append)
    assert len(problems) == 1
    assert problems.pop().startswith("id 0 was given to")
    look(tmp_path, promises, "run", "exact", problems.append)
    assert problems == [
        "rollout 1 (bare_0_0) has lost its text",
        "rollout 2 (lost_0_0) was acknowledged and is lost",
        "trajectory 0 of task digit:1 was in the pool, committed, and is lost",
    ]


# ---- on_resume: keep ----


def rollout(
    name: str, task: str, step: int, *, outcome: float = 1.0, entropy: float = 1.0, of: int = 2, run: str = "run-a"
) -> AgentTrajectory:
    """Return a rollout with the tokens of its name; ``of``: how many the step made of its task."""
    return AgentTrajectory(
        messages=[SAID],
        input_ids=torch.tensor([1, *name.encode()]),
        loss_mask=torch.tensor([0, *[1] * len(name)]),
        response_start=1,
        old_log_probs=torch.full((len(name),), -0.5),
        entropys=torch.full((len(name),), entropy),
        response_mask=torch.ones(len(name), dtype=torch.int64),
        reward=Reward(outcome=outcome),
        entropy=entropy,
        rollout_id=name,
        task_id=task,
        policy_version=step,
        metadata={"run": run, "step": step, "task_rollouts": of, "outputs": 1},
    )


def names(kept: Kept) -> dict[str, list[str]]:
    return {task: [one.rollout_id for one in held] for task, held in kept.held.items()}


def test_the_hook_keeps_what_is_promised(tmp_path: Path) -> None:
    """The campaign's rules, reckoned apart, are the pool's: for many steps of few tasks, in a pool that is full."""
    chance = random.Random(1)
    steps = []
    for step in range(1, 60):
        made = []
        for task in range(4):
            count = chance.choice([3, 4, 4])  # fewer where histories took the place of some
            for session in range(count):
                name = f"{chance.choice('abcdefgh')}_{session}_0"
                outcome = float(chance.random() < 0.75)
                entropy = chance.choice([1.0, 2.0, 3.0, 4.0])
                made.append(rollout(name, f"digit:{task}", step, outcome=outcome, entropy=entropy, of=count))
        steps.append(made)
    kept = kept_pool({"difficulty2task_dict": {}, "skip_uid_set": []}, {}, itertools.chain(*steps), 3, 4)
    config = ExperienceReplayConfig.from_mapping({"enable": True, "max_trajectories_per_task": 3}, n_rollout=4)
    with ReplayHook[str](config, n_rollout=4, get_task=str) as hook:
        for made in steps:
            hook.admit(replayable(made))
        pool = hook.manager.task2trajectories
        assert {task: [one.rollout_id for one in held] for task, held in pool.items()} == names(kept)
        buckets = {str(key): tasks for key, tasks in hook.manager.difficulty2task_dict.items()}
        assert buckets == kept.buckets()
        assert hook.manager.skip_uid_set == set(kept.skip)
        assert +hook.manager.refused == +kept.refused
        assert {"not_better", "duplicate"} <= kept.refused.keys()


def test_what_keep_leaves_out_is_seen(tmp_path: Path) -> None:
    """Two rollouts were acknowledged before there was a checkpoint; the pool's store has neither."""
    made = [rollout("a_0_0", "digit:1", 1), rollout("b_0_0", "digit:2", 1), rollout("b_1_0", "digit:2", 1, outcome=0.0)]
    make_store(rollouts_path(tmp_path), made)
    make_store(pool_path(tmp_path), [])
    problems: list[str] = []
    promises = Promises()
    acknowledged = {str(number): [one.rollout_id, digest(one)] for number, one in enumerate(made)}
    promises.take({"event": "acknowledged", "rollouts": acknowledged}, problems.append)
    assert look(tmp_path, promises, "run", "exact", problems.append).expected.held == {}
    found = look(tmp_path, promises, "run", "keep", problems.append)
    held = {"digit:1": [["a_0_0", digest(made[0])]], "digit:2": [["b_0_0", digest(made[1])]]}
    assert (found.since, found.expected.held, problems) == (2, held, [])

    pool = {"difficulty2task_dict": {"2": ["digit:1", "digit:2"]}, "skip_uid_set": []}  # 1 of 2 is 2 of 4
    check_resumed({"step": 0, "pool": pool, "held": held}, found.expected, problems.append)
    assert problems == []
    without = {"digit:1": held["digit:1"]}
    check_resumed({"step": 0, "pool": pool, "held": without}, found.expected, problems.append)
    assert problems[0] == "resumed at step 0: rollout b_0_0 of task digit:2 belongs in the pool and is missing"
    problems.clear()
    twice = {**held, "digit:1": held["digit:1"] * 2}
    check_resumed({"step": 0, "pool": pool, "held": twice}, found.expected, problems.append)
    assert problems[0] == "resumed at step 0: rollout a_0_0 of task digit:1 is in the pool 2 times"
    problems.clear()
    other = {**held, "digit:1": [["a_0_0", "0" * 32]]}
    check_resumed({"step": 0, "pool": pool, "held": other}, found.expected, problems.append)
    assert len(problems) == 1
    assert "must hold" in problems[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_was_acknowledged_is_in_the_next_pool(verl_assets: Assets, tmp_path: Path) -> None:
    """One kill before the first checkpoint, one after it."""
    moments = (FIRST_ACKNOWLEDGED, Moment(ACKNOWLEDGED, 0.1, (3,)))
    result = run_campaign(tmp_path, kills=2, seed=1, moments=moments, on_resume="keep")
    assert result.problems == []
    assert result.counts["kills"] == 2
    assert result.resumed == [0, 0, 2]
    assert result.counts["times an acknowledged rollout had to be in the pool that the cut had not"] > 0
