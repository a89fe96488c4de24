"""After SIGKILL of the driver, acknowledged rollouts exist and the next driver resumes from the checkpoint."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import orjson
import pytest

from tools.crash.journal import entries
from tools.crash.verl.campaign import run_campaign
from tools.crash.verl.checks import Expected, Promises, check_resumed, look
from tools.crash.verl.digest import digest
from tools.crash.verl.layout import ASSETS, calls_path, cut_path, journal_path, rollouts_path, step_named_by_tracker
from tools.crash.verl.moments import ARRIVED, CUT, UPDATE, JournalReader, Moment, wait_for
from tools.crash.verl.processes import Driver
from tools.crash.verl.training import check_ledger, compare, fresh_of, trained_of
from trajstore import AgentTrajectory, TrajectoryReplayBuffer

from .assets import Assets
from .runs import GROUP, PROMPTS, TOLERANCE, comparable, recorded


@pytest.mark.campaign
def test_nothing_is_lost_when_the_driver_is_killed(verl_assets: Assets, tmp_path: Path) -> None:
    """The fixture only skips the test where verl cannot run; the campaign creates its own assets."""
    result = run_campaign(tmp_path, kills=2, seed=1, moments=(CUT, UPDATE))
    assert result.problems == []
    assert result.counts["kills"] == 2
    assert result.counts["acknowledged rollouts"] > 50
    assert len(result.resumed) == 3
    assert result.resumed[-1] >= 2

    # The campaign must detect broken promises.
    step = step_named_by_tracker(tmp_path)
    assert step is not None
    promises = Promises(rollouts={10**6: ["lost_0_0", "0" * 32], 0: ["other_0_0", "0" * 32]})
    path = cut_path(tmp_path, step)
    cut = orjson.loads(path.read_bytes())
    path.write_bytes(orjson.dumps({**cut, "step": step + 1}))
    problems: list[str] = []
    look(tmp_path, promises, "", "exact", problems.append)
    for part in ("rollout 1000000 (lost_0_0) was acknowledged and is lost", "['other_0_0', ", "says step"):
        assert any(part in problem for problem in problems), problems
    path.unlink()
    problems.clear()
    look(tmp_path, Promises(), "", "exact", problems.append)
    assert problems == [f"the checkpoint of step {step} has no sound cut of ours"]


SAID = {"role": "assistant", "content": "1", "author": "llm"}
"""The response message of stored rollouts."""


def make_store(path: Path, trajectories: list[AgentTrajectory]) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path) as buffer:
        buffer.add_trajectories(trajectories)


def test_loss_is_seen(tmp_path: Path) -> None:
    kept = AgentTrajectory(rollout_id="kept_0_0", task_id="digit:1", policy_version=1, messages=[SAID])
    bare = AgentTrajectory(rollout_id="bare_0_0", task_id="digit:1", policy_version=1)
    make_store(rollouts_path(tmp_path), [kept, bare])
    problems: list[str] = []
    promises = Promises()
    promises.take({"event": "acknowledged", "rollouts": {"0": ["kept_0_0", digest(kept)]}}, problems.append)
    report = look(tmp_path, promises, "run", problems.append)
    assert (report.rollouts, report.between, report.expected.step, problems) == (1, False, 0, [])

    promises.take({"event": "acknowledged", "rollouts": {"1": ["bare_0_0", digest(bare)]}}, problems.append)
    promises.take({"event": "acknowledged", "rollouts": {"2": ["lost_0_0", "0" * 32]}}, problems.append)
    promises.take({"event": "acknowledged", "rollouts": {"0": ["again_0_0", "0" * 32]}}, problems.append)
    promises.take({"event": "pooled", "entries": {"digit:1": [0]}}, problems.append)
    assert len(problems) == 1
    assert problems.pop().startswith("id 0 was given to")
    look(tmp_path, promises, "run", problems.append)
    assert problems == [
        "rollout 1 (bare_0_0) has lost its text",
        "rollout 2 (lost_0_0) was acknowledged and is lost",
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


@pytest.mark.campaign
def test_a_step_killed_while_it_generates_keeps_its_finished_rollouts(verl_assets: Assets, tmp_path: Path) -> None:
    """The first driver is killed once rollouts of its first step are on disk; the next one completes this step."""
    kill_at(tmp_path, 0, ARRIVED)
    before = [rollout.rollout_id for rollout in recorded(tmp_path)]
    arrived = [entry for entry in entries(journal_path(tmp_path, 0)) if entry["event"] == "arrived"]
    assert arrived
    assert {name for entry in arrived for name in entry["rollouts"].values()} <= set(before)

    loaded = kill_at(tmp_path, 1, Moment("update", 0.0, (2,)))
    assert loaded["step"] == 0
    rollouts = recorded(tmp_path)
    names = [rollout.rollout_id for rollout in rollouts]
    assert len(set(names)) == len(names)
    assert names[: len(before)] == before
    again = [rollout for rollout in rollouts if rollout.metadata["run"] == loaded["run"]]
    first = [rollout for rollout in again if rollout.metadata.get("trained") and rollout.metadata["step"] == 1]
    assert len(first) == PROMPTS * GROUP
    assert all(rollout.old_log_probs is not None and rollout.reward is not None for rollout in first)

    # Only the missing siblings were generated, and the step equals that of a run that was not killed.
    assert set(before) <= {rollout.rollout_id for rollout in first}
    calls = calls_path(tmp_path, 1).read_text().split()
    missing = {rollout.rollout_id.rpartition("_")[0] for rollout in first if rollout.rollout_id not in before}
    assert len(missing) == PROMPTS * GROUP - len(before)
    assert set(calls[: len(missing)]) == missing
    (resumed,) = first_steps(tmp_path)
    assert (resumed["recording/reused"], resumed["recording/generated"]) == (len(before), len(missing))
    other = tmp_path / "uninterrupted"
    other.mkdir()
    (tmp_path / ASSETS).rename(other / ASSETS)
    kill_at(other, 0, Moment("update", 0.0, (2,)))
    (uninterrupted,) = first_steps(other)
    assert comparable(resumed) == pytest.approx(comparable(uninterrupted), rel=TOLERANCE, abs=TOLERANCE, nan_ok=True)


def first_steps(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics that drivers logged for step 1."""
    lines = [line for path in folder.glob("metrics-*.jsonl") for line in path.read_bytes().splitlines()]
    return [record["data"] for record in map(orjson.loads, lines) if record["step"] == 1]


def kill_at(folder: Path, life: int, moment: Moment | None) -> dict[str, Any]:
    """Kill a driver at a moment; return its start report."""
    journal, driver = JournalReader(journal_path(folder, life)), Driver(folder, life)
    try:
        obstacle = wait_for(moment, driver, journal, random.Random(0))
    finally:
        driver.kill()
    journal.refresh()
    assert obstacle is None, obstacle
    return next(entry for entry in journal.entries if entry["event"] == "loaded")


@pytest.mark.campaign
def test_a_killed_run_has_the_ledger_of_an_uninterrupted_one(verl_assets: Assets, tmp_path: Path) -> None:
    """Killed while it generates, updates and saves; the steps equal those of one process."""
    moments = (
        Moment("arrived", 0.02, (3,)),
        Moment("update", 0.1, (1,)),
        Moment("cut", 0.0, (2,)),
        Moment("scoring", 0.0, (4,)),
    )
    loaded = [kill_at(tmp_path, 0, moments[0])["step"]]
    before = trained_of(tmp_path).rollouts
    finished_ids = {number for number, one in before.items() if one.policy_version == 3}
    finished = {before[number].rollout_id.rpartition("_")[0] for number in finished_ids}
    loaded += [kill_at(tmp_path, life, moment)["step"] for life, moment in enumerate((*moments[1:], None), 1)]
    assert loaded == [0, 2, 2, 2, 4]
    again = [path.read_text().split() for life in range(1, 5) if (path := calls_path(tmp_path, life)).exists()]
    assert not finished.intersection(itertools.chain(*again)), "only what is missing is generated"
    killed = trained_of(tmp_path)
    steps = [step for number, step in killed.contents.steps.items() if number < 6]
    other = tmp_path / "uninterrupted"
    other.mkdir()
    (tmp_path / ASSETS).rename(other / ASSETS)
    kill_at(other, 0, Moment("scoring", 0.0, (6,)))
    problems: list[str] = []
    assert compare(tmp_path, other, problems.append) == 5
    assert problems == []
    assert sum(int(step.rows["replayed"].sum()) for step in steps)

    check_ledger(tmp_path, killed.rollouts.keys(), 4, {3: finished_ids}, problems.append)
    assert problems == []
    left = killed.rollouts.keys() - {number for step in steps for number in fresh_of(step)}
    assert {killed.rollouts[number].policy_version for number in left} <= {4, 6}, "sampled by weights that were lost"

    # Each fault is seen.
    check_ledger(tmp_path, killed.rollouts.keys() - finished_ids, 7, {3: left}, problems.append)
    for part in ("which are not recorded", "which had finished before a kill", "the checkpoint is of step 7"):
        assert any(part in problem for problem in problems), problems
