"""What ``inspect`` says, against what was written."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cli.stores import ENVIRONMENTS, STEPS, Run, write_store
from tests.experience.conftest import build
from trajstore import AgentTrajectory, Trajectory, TrajectoryReplayBuffer
from trajstore.cli import DAMAGED, FAILED
from trajstore.cli.output import format_bytes
from trajstore.errors import SchemaMismatchError
from trajstore.experience import BufferStore, ExperienceManager, PoolRules
from trajstore.experience.persistence import PoolContents, write_pool
from trajstore.inspection.inspect import inspect
from trajstore.inspection.statistics import RewardStatistics
from trajstore.inspection.verify import verify
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
    assert report["ids"] == {"first": 0, "last": 4, "absent": 0, "gaps": []}
    assert report["policy"]["versions"] == {"min": 10, "max": 14}
    assert report["policy"]["ages"] == {"min": 0, "mean": 2.0, "max": 4}
    assert report["rewards"]["mean"] == 1.0
    assert report["rewards"]["std"] == 0.0
    assert report["episodes"] == {
        "ended": 5 * 4,
        "length": {"min": 2, "mean": (4 + 2 + 6 + 6) / 4, "max": 6},
        "return": {"min": 2.0, "mean": 4.5, "max": 6.0},
        "spanning": None,
        "begun_before": 0,
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
    report = inspect(store)
    live, shards = format_bytes(report["live_bytes"]), format_bytes(report["shard_bytes"])
    assert re.search(rf"live in shards +{re.escape(live)} of {re.escape(shards)}\n", out)
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
    assert code == DAMAGED
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
    assert run("inspect", tmp_path)[0] == DAMAGED, "ranks between them are absent"


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
    assert report["agents"] == {
        "rollouts": 4,
        "tasks": 4,
        "outcomes": {"min": 0.0, "mean": 0.5, "max": 1.0},
        "without_outcome": 0,
        "turns": {"min": 1, "mean": 1.0, "max": 1},
        "with_messages": 4,
    }
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
    assert "0 to 6, none absent; 2 of them have no file" in out
    report = inspect(shared_fixtures / "rlinf" / "per_rank")
    assert report["trajectories"] == 12


def test_what_opening_a_run_does_not_show_is_told(run: Run, tmp_path: Path) -> None:
    for name in ("rank_0", "rank_1", "step_5/rank_0"):
        write_store(tmp_path / "run" / name, range(2))
    code, out, _ = run("inspect", tmp_path / "run")
    assert code == 0
    out = " ".join(out.split())
    assert "ranks 2, a store for each" in out
    assert "opened as one 4 trajectories of rank_*; the others lie in step_5" in out
    (note,) = verify(tmp_path / "run").notes
    assert "step_5" in note


def test_experience_pool(run: Run, shared_fixtures: Path) -> None:
    report = inspect(shared_fixtures / "experience_pool" / "step_120")
    assert report["kind"] == "experience_pool"
    assert report["difficulties"] == {"1": 1, "3": 2, "5": 2}
    assert report["skipped_tasks"] == 2
    assert report["trajectories"] > 0
    assert run("inspect", shared_fixtures / "experience_pool")[0] == 0


def test_an_experience_pool_tells_what_of_it_can_be_replayed(run: Run, tmp_path: Path) -> None:
    whole = AgentTrajectory(
        input_ids=torch.tensor([1, 2]),
        loss_mask=torch.tensor([0, 1]),
        response_start=1,
        old_log_probs=torch.tensor([-0.5]),
        task_id="a",
    )
    held = {"a": [whole, AgentTrajectory(task_id="a", messages=[{"role": "user", "content": "no tokens"}])]}
    write_pool(tmp_path / "step_1", PoolContents({1: ["a"]}, [], held))
    report = inspect(tmp_path / "step_1")
    assert (report["trajectories"], report["replayable"]) == (2, 1)
    assert report["refused"] == {"no_response_mask": 1}
    code, out, _ = run("inspect", tmp_path / "step_1")
    assert code == 0
    assert "no_response_mask" in out


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


# -- agents, runs, episodes ----------------------------------------------------------------------------

HOSTILE = "look\x1b[2J\x1b]0;owned\x07 \u202ehere\x9b\n  at a glance: all files there"


def agent_store(path: Path, count: int = 4, **more: object) -> Path:
    """Rollouts of ten tokens: four of the prompt, and two turns of two with an answer between them."""
    written = torch.tensor([1, 1, 0, 0, 1, 1])
    values: dict[str, object] = {
        "messages": [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": "x" * 5000}],
        "input_ids": torch.arange(10),
        "loss_mask": torch.cat([torch.zeros(4, dtype=torch.int64), written]),
        "response_mask": written,
        "old_log_probs": torch.arange(6) / -8,
        "response_start": 4,
        "reward": Reward(outcome=1.0, success_rate=0.5, description="exact", metadata={"format": 0.25}),
        "data_id": "row_7",
        "metadata": {"engine": "vllm\x1b[31m"},
        "is_terminated": True,
    }
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path) as buffer:
        buffer.add_trajectories(
            [AgentTrajectory(task_id=f"task_{n % 2}", policy_version=40 + n, **(values | more)) for n in range(count)]  # type: ignore[arg-type]
        )
    return path


def test_agents_are_told_in_words_of_agents(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("inspect", agent_store(tmp_path / "agents", messages=[]))
    assert code == 0
    assert "rollouts" in out
    assert "tokens of a rollout   10" in out
    assert "turns of the model  2" in out
    assert not {"environments B", "steps T", "samples"} & {line.strip().split("  ")[0] for line in out.splitlines()}
    report = inspect(tmp_path / "agents")
    assert report["tokens"] == {"min": 10, "mean": 10.0, "max": 10}
    assert report["response_tokens"]["max"] == 6
    assert report["steps"] is report["batch"] is None


def test_lengths_are_of_the_rollouts_that_tell_theirs(tmp_path: Path) -> None:
    """Rollouts without log-probs have ``response_start``; rollouts of messages alone have no length."""
    mask = torch.tensor([0, 0, 1, 1, 1])
    tokens = AgentTrajectory(input_ids=torch.arange(5), loss_mask=mask, response_start=2)
    rated = dataclasses.replace(tokens, old_log_probs=-torch.ones(3))
    longer = AgentTrajectory(input_ids=torch.arange(11), loss_mask=torch.ones(11, dtype=torch.int64), response_start=2)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store") as buffer:
        buffer.add_trajectories([tokens, rated, longer, AgentTrajectory(messages=[{"role": "user", "content": "?"}])])
    report = inspect(tmp_path / "store")
    assert report["tokens"] == {"min": 5, "mean": 7.0, "max": 11}
    assert report["response_tokens"] == {"min": 3, "mean": 5.0, "max": 9}
    json.dumps(report)


def figures(out: str) -> dict[str, str]:
    pairs = [re.split(r"  +", line.strip(), maxsplit=1) for line in out.splitlines()]
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def test_what_was_read_of_some_is_said_of_every_figure_of_them(run: Run, tmp_path: Path) -> None:
    outcomes = [1.0, None, 0.0, None, 1.0, None]
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(tmp_path / "store")) as buffer:
        buffer.add_trajectories(
            [
                AgentTrajectory(
                    messages=[{"role": "assistant", "content": "4"}],
                    input_ids=torch.arange(5),
                    response_start=3,
                    reward=None if outcome is None else Reward(outcome=outcome),
                    task_id=f"task_{number}",
                )
                for number, outcome in enumerate(outcomes)
            ]
        )
    told = figures(run("inspect", tmp_path / "store", "--measure", 4)[1])
    assert told["outcomes"] == "0 to 1, mean 0.5; 2 rollouts without one (4 of 6 read)"
    for name in ("turns of the model", "tasks", "with messages"):
        assert told[name].endswith(" (4 of 6 read)"), name
    assert told["of its response"] == "2 (of 4 rollouts)"
    assert not told["tokens of a rollout"].endswith("read)"), "the index tells it of all"
    told = figures(run("inspect", tmp_path / "store")[1])
    assert told["outcomes"] == "0 to 1, mean 0.6667; 3 rollouts without one"
    assert told["of its response"] == "2"


def test_a_pools_store_is_told_as_a_pool(run: Run, tmp_path: Path) -> None:
    store = BufferStore.open(tmp_path / "pool")
    manager = ExperienceManager(PoolRules(n_rollout=4, max_trajectories_per_task=2), store=store)
    for number in range(4):
        made = [build(task, number, 1.0, entropy=1 - number / 10, policy_version=number) for task in "ab"]
        manager.admit([*made, build("a", 10, 0.0), build("b", 10, 0.0), build("c", 1, 1.0), build("c", 2, 1.0)])
    store.close()
    report = inspect(tmp_path / "pool")
    assert (report["kind"], report["trajectories"]) == ("store", 10)
    assert report["pool"] == {
        "trajectories": 4,
        "tasks": 2,
        "demonstrations": 0,
        "difficulties": {"2": 2},
        "skipped_tasks": 1,
        "journal_records": 2,
        "left_records": 4,
    }
    assert report["tokens"]["min"] > 0, "records of the journal have no tokens, and are no rollouts"
    assert (report["agents"]["rollouts"], report["agents"]["tasks"], report["measured"]) == (4, 2, 4)
    assert report["policy"]["versions"] == {"min": 2, "max": 3}
    code, out, _ = run("inspect", tmp_path / "pool")
    told = figures(out)
    assert code == 0
    assert f"{tmp_path / 'pool'}: experience pool" in out
    assert told["trajectories"] == "4 of 2 tasks"
    assert told["records besides"] == "2 of its journal, 4 of what left it and is not deleted yet"
    assert told["tasks by successes"] == "2: 2"
    assert told["solved tasks left out"] == "1"
    told = figures(run("inspect", tmp_path / "pool", "--measure", 1)[1])
    assert told["outcomes"] == "1 (1 of 4 read)"


def test_files_of_a_pool_have_no_single_trajectory(run: Run, shared_fixtures: Path) -> None:
    code, _, err = run("inspect", shared_fixtures / "experience_pool" / "step_120", "--trajectory", 0)
    assert code == FAILED
    assert "this is the files of a pool" in err


def test_one_rollout_is_shown_whole_and_nothing_of_it_reaches_the_terminal(run: Run, tmp_path: Path) -> None:
    path = agent_store(tmp_path / "agents")
    code, out, _ = run("inspect", path, "--trajectory", 1)
    assert code == 0
    for text in ("task_1", "row_7", "exact", "format", "0.25", "41", "engine", "4 to 5", "the model wrote 4"):
        assert text in out
    assert "3,000 more characters" in out
    assert all(character.isprintable() or character == "\n" for character in out)
    assert "\\x1b[2J" in out
    assert "\\u202e" in out
    assert "\n  | " in out
    assert "\n  at a glance" not in out, "no message passes for a line of the report"
    code, out, _ = run("inspect", path, "--trajectory", 1, "--json")
    assert all(character.isprintable() or character == "\n" for character in out)
    report = json.loads(out)
    assert report["messages"][0]["content"] == HOSTILE
    assert len(report["messages"][1]["content"]) == 5000
    assert report["reward"]["metadata"] == {"format": 0.25}
    assert [part["part"] for part in report["token_parts"]] == ["prompt", "model", "told", "model"]


def test_one_token_of_a_rollout(run: Run, tmp_path: Path) -> None:
    path = agent_store(tmp_path / "agents")
    report = json.loads(run("inspect", path, "--trajectory", 0, "--sample", 8, "--json")[1])
    assert report["part"] == "model"
    assert report["values"] == {"input_ids": 8, "loss_mask": 1, "response_mask": 1, "old_log_probs": -0.5}
    report = json.loads(run("inspect", path, "--trajectory", 0, "--sample", 3, "--json")[1])
    assert (report["part"], report["values"]) == ("prompt", {"input_ids": 3, "loss_mask": 0})
    assert "the model wrote" in run("inspect", path, "--trajectory", 0, "--sample", 8)[1]
    code, _, err = run("inspect", path, "--trajectory", 0, "--sample", 10)
    assert code == FAILED
    assert "tokens 0 to 9" in err


def test_tokens_as_text(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tokenizer:
        @staticmethod
        def from_pretrained(name: str, **_: object) -> Tokenizer:
            if "absent" in name:
                raise OSError("no such folder")
            return Tokenizer()

        @staticmethod
        def decode(ids: list[int], **_: object) -> str:
            return "".join(f"<{number}\x1b>" for number in ids)

    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers, "AutoTokenizer", Tokenizer)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    path = agent_store(tmp_path / "agents", metadata={"tokenizer": str(tmp_path)})
    code, out, _ = run("inspect", path, "--trajectory", 0)
    assert code == 0
    assert "<4\\x1b><5\\x1b>" in out
    (path.parent / "other").mkdir()
    code, out, _ = run("inspect", path, "--trajectory", 0, "--sample", 4, "--tokenizer", path.parent / "other")
    assert "<4" in out
    code, _, err = run("inspect", path, "--trajectory", 0, "--tokenizer", "absent")
    assert code == FAILED
    assert "tokenizer: absent: no such folder" in err
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run("inspect", path, "--trajectory", 0)[0] == 0, "what the store names is of use only if it is there"
    code, _, err = run("inspect", path, "--trajectory", 0, "--tokenizer", "x")
    assert code == FAILED
    assert "pip install 'trajstore[demo]'" in err


@pytest.mark.parametrize("stream", [0, 1])
def test_episodes_are_joined_over_trajectories(tmp_path: Path, stream: int) -> None:
    """One environment of episodes of 5 and 8 steps, cut into blocks of 3; another worker's blocks come between."""
    generator = torch.Generator().manual_seed(3)

    def blocks(lengths: list[int], worker: int) -> list[Trajectory]:
        total = sum(lengths)
        states = torch.rand(total + 1, 1, 4, generator=generator) + worker
        dones = torch.zeros(total, 1, 1, dtype=torch.bool)
        dones[torch.tensor(lengths).cumsum(0) - 1] = True
        return [
            Trajectory(
                rewards=torch.ones(stop - start, 1, 1),
                dones=dones[start:stop],
                curr_obs={"states": states[start:stop], "task": torch.zeros(stop - start, 1, 1)},
                next_obs={"states": states[start + 1 : stop + 1], "task": torch.zeros(stop - start, 1, 1)},
            )
            for start in range(0, total, 3)
            for stop in [min(start + 3, total)]
        ]

    one, other = blocks([5, 8, 5], 0), blocks([7, 7, 4], 10)
    mixed = [block for pair in zip(one, other, strict=True) for block in pair] if stream else [*one, *other]
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store") as buffer:
        buffer.add_trajectories(mixed)
    episodes = inspect(tmp_path / "store")["episodes"]
    assert episodes["ended"] == 6
    assert episodes["length"] == {"min": 4, "mean": 6.0, "max": 8}
    assert episodes["return"] == {"min": 4.0, "mean": 6.0, "max": 8.0}
    assert (episodes["spanning"], episodes["begun_before"]) == (6, 0)
    newest = inspect(tmp_path / "store", measure=4)["episodes"]
    assert newest["begun_before"] > 0
    assert newest["ended"] > newest["begun_before"] or newest["length"] is None


@pytest.mark.parametrize("evicted", [1, 2, 3, 7])
def test_episodes_whose_beginning_was_evicted_are_in_no_length(run: Run, tmp_path: Path, evicted: int) -> None:
    """Two workers in turn, each of two environments with episodes of 5 steps, or 6, in blocks of 4."""
    generator = torch.Generator().manual_seed(3)
    blocks: list[Trajectory] = []
    states = [torch.rand(41, 2, 4, generator=generator) for _ in range(2)]
    ends = torch.zeros(40, 2, 1, dtype=torch.bool)
    ends[4::5, 0] = ends[5::6, 1] = True
    for start in range(0, 40, 4):
        for worker in range(2):
            rows, after = slice(start, start + 4), slice(start + 1, start + 5)
            observed = {"states": states[worker][rows]}, {"states": states[worker][after]}
            blocks.append(
                Trajectory(rewards=torch.ones(4, 2, 1), dones=ends[rows], curr_obs=observed[0], next_obs=observed[1])
            )
    path = tmp_path / "store"
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, sample_window_size=0) as buffer:
        buffer.add_trajectories(blocks)
        buffer.flush()
        whole = inspect(path)["episodes"]
        buffer.evict(list(range(evicted)))
    assert (whole["length"]["min"], whole["length"]["max"], whole["begun_before"]) == (5, 6, 0)
    episodes = inspect(path)["episodes"]
    assert (episodes["length"]["min"], episodes["length"]["max"]) == (5, 6)
    assert (episodes["return"]["min"], episodes["return"]["max"]) == (5, 6)
    assert episodes["begun_before"] == 4, "of both workers, who could have begun in what is gone"
    assert "4 of them begun before what was read, not counted below" in run("inspect", path)[1]


def test_whole_episodes_are_counted_whatever_was_evicted_before(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    dones = torch.zeros(5, 2, 1, dtype=torch.bool)
    dones[-1] = True
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path, sample_window_size=0) as buffer:
        for _ in range(6):
            before, after = torch.rand(2, 5, 2, 4, generator=generator)
            buffer.add_trajectories(
                [Trajectory(rewards=torch.ones(5, 2, 1), dones=dones, curr_obs={"x": before}, next_obs={"x": after})]
            )
        buffer.evict([0, 1])
    episodes = inspect(tmp_path)["episodes"]
    assert (episodes["ended"], episodes["begun_before"], episodes["length"]["min"]) == (8, 0, 5)


def test_what_nothing_joins_is_said(run: Run, store: Path) -> None:
    assert "length within one trajectory" in run("inspect", store)[1]


def test_a_run_is_one_table(run: Run, tmp_path: Path) -> None:
    for rank in range(4):
        write_store(tmp_path / f"rank_{rank}", range(10 * rank, 10 * rank + 2 + rank))
    (tmp_path / "rank_1" / "trajectory_index.json").write_bytes(b"damaged")
    next((tmp_path / "rank_2" / "shards").iterdir()).unlink()
    code, out, _ = run("inspect", tmp_path)
    assert code == DAMAGED
    assert len(out.splitlines()) < 35
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith("  rank_")}
    assert rows["rank_0"][1] == "2"
    assert rows["rank_1"][1] == "?"
    assert rows["rank_2"][-1] != rows["rank_3"][-1]
    assert "rank_1: cannot be read" in out
    assert "rank_2: shards/" in out
    report = inspect(tmp_path)
    assert report["trajectories"] == 2 + 4 + 5
    assert report["rewards"]["mean"] == 1.0
    assert report["policy"]["versions"] == {"min": 0, "max": 34}
    code, out, _ = run("inspect", tmp_path, "--each")
    assert out.count("columns") == 3


def test_a_file_is_told_to_be_one(run: Run, store: Path) -> None:
    for command in ("inspect", "verify"):
        code, _, err = run(command, store / "metadata.json")
        assert code == FAILED
        assert "is a file; give the directory" in err


@pytest.mark.parametrize("module", ["trajstore", "trajstore.cli"])
def test_the_command_line_is_a_module(module: str, project_root: Path) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--help"], cwd=project_root, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"inspect" in done.stdout


def test_steps_cannot_be_drawn_of_agents(tmp_path: Path) -> None:
    path = agent_store(tmp_path / "agents")
    buffer = TrajectoryReplayBuffer()
    buffer.load_checkpoint(path)
    for columns in (None, ["input_ids"]):
        with pytest.raises(SchemaMismatchError, match=r"sample_trajectories\(count\)"):
            buffer.sample(2, columns=columns)
    assert len(buffer.sample_trajectories(2)) == 2


@pytest.mark.parametrize("layout", ["trajstore", "rlinf"])
@pytest.mark.parametrize("empty", ["rewards", "dones"])
def test_columns_with_rows_of_no_values(tmp_path: Path, layout: Any, empty: str) -> None:
    columns = {"rewards": torch.zeros(2, 1, 1), "dones": torch.zeros(3, 1, 1, dtype=torch.bool)}
    columns[empty] = columns[empty][..., :0]
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([Trajectory(**columns) for _ in range(3)])
    buffer.save_checkpoint(tmp_path / "here", layout=layout)
    assert inspect(tmp_path / "here")["trajectories"] == 3
