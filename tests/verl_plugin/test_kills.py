"""SIGKILL of a training's driver: what was acknowledged is there, and the next driver goes on from the checkpoint."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from tools.crash.verl.campaign import run_campaign
from tools.crash.verl.checks import Expected, Promises, check_resumed, look
from tools.crash.verl.digest import digest
from tools.crash.verl.layout import cut_path, pool_path, rollouts_path, step_named_by_tracker
from tools.crash.verl.moments import CUT, UPDATE
from trajstore import AgentTrajectory, TrajectoryReplayBuffer

from .assets import Assets


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_is_lost_when_the_driver_is_killed(verl_assets: Assets, tmp_path: Path) -> None:
    """The fixture only skips where verl's trainer cannot run; a campaign makes its own assets."""
    result = run_campaign(tmp_path, kills=2, seed=1, moments=(CUT, UPDATE))
    assert result.problems == []
    assert result.kills == 2
    assert result.rollouts > 50
    assert len(result.resumed) == 3
    assert result.resumed[-1] >= 2

    # The campaign itself: what is not as promised must be seen.
    step = step_named_by_tracker(tmp_path)
    assert step is not None
    promises = Promises(rollouts={10**6: ["lost_0_0", "0" * 32], 0: ["other_0_0", "0" * 32]})
    path = cut_path(tmp_path, step)
    cut = orjson.loads(path.read_bytes())
    path.write_bytes(orjson.dumps({**cut, "step": step + 1}))
    problems: list[str] = []
    look(tmp_path, promises, "", problems.append)
    for part in ("rollout 1000000 (lost_0_0) was acknowledged and is lost", "['other_0_0', ", "says step"):
        assert any(part in problem for problem in problems), problems
    path.unlink()
    problems.clear()
    look(tmp_path, Promises(), "", problems.append)
    assert problems == [f"the checkpoint of step {step} has no sound cut of ours"]


def make_store(path: Path, trajectories: list[AgentTrajectory]) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path) as buffer:
        buffer.add_trajectories(trajectories)


def test_loss_is_seen(tmp_path: Path) -> None:
    kept = AgentTrajectory(rollout_id="kept_0_0", task_id="digit:1", policy_version=1)
    make_store(rollouts_path(tmp_path), [kept])
    make_store(pool_path(tmp_path), [])
    problems: list[str] = []
    promises = Promises()
    promises.take({"event": "acknowledged", "rollouts": {"0": ["kept_0_0", digest(kept)]}}, problems.append)
    found = look(tmp_path, promises, "run", problems.append)
    assert (found.rollouts, found.between, found.expected.step, problems) == (1, False, 0, [])

    promises.take({"event": "acknowledged", "rollouts": {"1": ["lost_0_0", "0" * 32]}}, problems.append)
    promises.take({"event": "acknowledged", "rollouts": {"0": ["again_0_0", "0" * 32]}}, problems.append)
    promises.take({"event": "pooled", "entries": {"digit:1": [0]}}, problems.append)
    assert len(problems) == 1
    assert problems.pop().startswith("id 0 was given to")
    look(tmp_path, promises, "run", problems.append)
    assert problems == [
        "rollout 1 (lost_0_0) was acknowledged and is lost",
        "trajectory 0 of task digit:1 was in the pool, committed, and is lost",
    ]


def test_another_pool_is_seen() -> None:
    expected = Expected(2, {"skip_uid_set": ["digit:1"], "refused": {"no_entropy": 0}}, {"digit:2": [["a_0_0", "ab"]]})
    loaded = {"step": 2, "pool": {"skip_uid_set": ["digit:1"], "refused": {}}, "held": {"digit:2": [["a_0_0", "ab"]]}}
    problems: list[str] = []
    check_resumed(loaded, expected, problems.append)
    assert problems == []
    check_resumed({**loaded, "step": 3}, expected, problems.append)
    check_resumed({**loaded, "held": {"digit:2": [["a_0_0", "cd"]]}}, expected, problems.append)
    check_resumed({**loaded, "pool": {"skip_uid_set": [], "refused": {}}}, expected, problems.append)
    assert [problem.split(":")[0] for problem in problems] == [
        "resumed at step 3, verl's tracker says 2",
        "resumed at step 2",
        "resumed at step 2",
    ]
