"""What ``inspect`` says, against what was written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cli.stores import ENVIRONMENTS, STEPS, Run, write_store
from trajstore import AgentTrajectory, Trajectory, TrajectoryReplayBuffer
from trajstore.cli import FAILED
from trajstore.inspect import inspect
from trajstore.statistics import RewardStatistics
from trajstore.trajectory import Reward

FORMATS = ["pt", "pkl", "zarr"]


@pytest.mark.parametrize("trajectory_format", FORMATS)
def test_report_of_a_store(tmp_path: Path, trajectory_format: str) -> None:
    if trajectory_format == "zarr":
        pytest.importorskip("zarr")
    path = write_store(tmp_path / "store", range(10, 15), trajectory_format)
    report = inspect(path)
    assert report["kind"] == "store"
    assert report["format"] == trajectory_format
    assert report["trajectories"] == 5
    assert report["samples"] == 5 * STEPS * ENVIRONMENTS
    assert report["size_on_disk"] == sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    columns = {column["name"]: column for column in report["columns"]}
    assert columns["actions"] | {"name": ""} == {
        "name": "",
        "dtype": "float32",
        "row_shape": [2],
        "bytes": 5 * STEPS * ENVIRONMENTS * 8,
    }
    assert set(columns) >= {"rewards", "dones", "versions", "curr_obs.states"}
    assert report["steps"]["min"] == report["steps"]["max"] == STEPS
    assert report["batch"]["mean"] == ENVIRONMENTS
    assert report["ids"] == {"first": 0, "last": 4, "missing": 0, "gaps": []}
    assert report["policy"]["versions"] == {"min": 10, "max": 14}
    assert report["policy"]["ages"] == {"min": 0, "mean": 2.0, "max": 4}
    assert report["rewards"]["mean"] == 1.0
    assert report["rewards"]["std"] == 0.0
    assert report["episodes"] == {
        "ended": 5 * 4,
        "length": {"min": 2, "mean": (4 + 2 + 6 + 6) / 4, "max": 6},
        "return": {"min": 2.0, "mean": 4.5, "max": 6.0},
    }
    assert report["integrity"]["problems"] == []


def test_json_and_words_tell_the_same(run: Run, store: Path) -> None:
    code, out, _ = run("inspect", store, "--json")
    assert code == 0
    assert json.loads(out) == inspect(store)
    code, out, _ = run("inspect", store)
    assert code == 0
    assert "policy versions" in out
    assert "10 to 14" in out
    assert "curr_obs.states" in out


def test_only_the_newest_are_measured_when_asked(store: Path) -> None:
    report = inspect(store, measure=2)
    assert report["measured"] == 2
    assert report["episodes"]["ended"] == 8
    assert report["trajectories"] == 5


def test_one_trajectory_and_one_sample(run: Run, store: Path) -> None:
    code, out, _ = run("inspect", store, "--trajectory", 3, "--json")
    report = json.loads(out)
    assert code == 0
    assert report["trajectory_id"] == 3
    assert report["versions"] == [13, 13]
    assert next(column for column in report["columns"] if column["name"] == "actions")["range"]["max"] == 13.0
    code, out, _ = run("inspect", store, "--trajectory", 3, "--sample", 7, "--json")
    report = json.loads(out)
    assert (report["step"], report["environment"]) == (2, 1)
    assert report["values"]["curr_obs.states"] == [7.0]
    assert run("inspect", store, "--trajectory", 3)[0] == 0
    assert run("inspect", store, "--trajectory", 3, "--sample", 7)[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trajectory", 99], "99"),
        (["--trajectory", 0, "--sample", STEPS * ENVIRONMENTS], "0 to 17"),
        (["--sample", 1], "--trajectory"),
        (["--measure", -1], "-1"),
    ],
)
def test_what_is_not_there_is_told(run: Run, store: Path, words: list[object], message: str) -> None:
    code, _, err = run("inspect", store, *words)
    assert code == FAILED
    assert message in err


def test_a_missing_shard_shows_at_a_glance(run: Run, store: Path, shard: Path) -> None:
    shard.unlink()
    report = inspect(store)
    assert [problem for problem in report["integrity"]["problems"] if shard.name not in problem] == []
    assert report["unreadable"] > 0
    assert report["measured"] + report["unreadable"] == 5
    code, out, _ = run("inspect", store)
    assert code == 0
    assert f"shards/{shard.name}: missing" in out


def test_numbers_that_json_lacks(run: Run, tmp_path: Path) -> None:
    rewards = torch.tensor([1.0, float("nan"), float("-inf")]).reshape(3, 1, 1)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(tmp_path / "store")) as buffer:
        buffer.add_trajectories([Trajectory(rewards=rewards)])
    code, out, _ = run("inspect", tmp_path / "store", "--trajectory", 0, "--json")
    column = json.loads(out)["columns"][0]
    assert code == 0
    assert (column["not_finite"], column["range"]) == (2, {"min": 1.0, "mean": 1.0, "max": 1.0})
    _, out, _ = run("inspect", tmp_path / "store", "--trajectory", 0, "--sample", 2, "--json")
    assert json.loads(out)["values"] == {"rewards": ["-inf"]}
    assert run("inspect", tmp_path / "store", "--json")[0] == 0


def test_a_run_directory_is_the_sum_of_its_ranks(run: Run, tmp_path: Path) -> None:
    for rank in (0, 2, 10):
        write_store(tmp_path / "replay_buffer" / f"rank_{rank}", range(rank, rank + 1))
    report = inspect(tmp_path)
    inner = report["parts"][0]
    assert report["kind"] == inner["kind"] == "run"
    assert report["trajectories"] == 3
    assert [Path(part["path"]).name for part in inner["parts"]] == ["rank_0", "rank_2", "rank_10"]
    assert run("inspect", tmp_path)[0] == 0


def test_agent_trajectories(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "agents"
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(path)) as buffer:
        buffer.add_trajectories(
            [
                AgentTrajectory(
                    messages=[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}],
                    input_ids=torch.arange(5),
                    response_start=3,
                    old_log_probs=torch.tensor([-0.5, -0.25]),
                    reward=Reward(outcome=float(number % 2)),
                    task_id=f"task_{number}",
                    policy_version=number,
                )
                for number in range(4)
            ]
        )
    report = inspect(path)
    assert report["agents"] == {"tasks": 4, "outcomes": {"min": 0.0, "mean": 0.5, "max": 1.0}}
    assert report["policy"]["ages"]["max"] == 3
    assert report["rewards"] is None
    code, out, _ = run("inspect", path, "--trajectory", 1)
    assert code == 0
    assert "2 + 2?" in out
    code, out, _ = run("inspect", path, "--trajectory", 1, "--sample", 4, "--json")
    assert json.loads(out)["values"]["input_ids"] == 4


def test_directories_of_rlinf(run: Run, shared_fixtures: Path) -> None:
    for name in ("auto_save_pt", "auto_save_pkl"):
        report = inspect(shared_fixtures / "rlinf" / name)
        assert (report["kind"], report["trajectories"], report["samples"]) == ("rlinf", 6, 180)
        assert report["steps"] == {"min": 8, "mean": 10.0, "max": 12}
        assert report["policy"]["weights"] == 6
        assert report["integrity"]["problems"] == []
    code, out, _ = run("inspect", shared_fixtures / "rlinf" / "checkpoint_from_cache")
    assert code == 0
    assert "2 problems" in out
    report = inspect(shared_fixtures / "rlinf" / "per_rank")
    assert report["trajectories"] == 12


def test_experience_pool(run: Run, shared_fixtures: Path) -> None:
    report = inspect(shared_fixtures / "experience_pool" / "step_120")
    assert report["kind"] == "experience_pool"
    assert report["difficulties"] == {"1": 1, "3": 2, "5": 2}
    assert report["skipped_tasks"] == 2
    assert report["trajectories"] > 0
    assert run("inspect", shared_fixtures / "experience_pool")[0] == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(-10, 10, width=32), st.booleans()), min_size=1, max_size=30), st.booleans())
def test_episodes_are_those_of_a_plain_loop(steps: list[tuple[float, bool]], bootstrap: bool) -> None:
    lengths, returns, length, total = [], [], 0, 0.0
    for reward, done in steps:
        length, total = length + 1, total + reward
        if done:
            lengths.append(length)
            returns.append(total)
            length, total = 0, 0.0
    dones = torch.tensor([done for _, done in steps]).reshape(-1, 1, 1)
    if bootstrap:
        dones = torch.cat([torch.ones(1, 1, 1, dtype=torch.bool), dones])
    statistics = RewardStatistics()
    statistics.add(torch.tensor([reward for reward, _ in steps]).reshape(-1, 1, 1), dones)
    assert statistics.lengths == lengths
    assert statistics.returns == pytest.approx(returns, abs=1e-9)
