"""All commands write ids as ``2/1`` for a run directory and as numbers for a single store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.stores import Run
from tests.stores import opened, stored
from trajstore import AgentTrajectory, Reward, TrajectoryReplayBuffer, annotate, notes_of
from trajstore.errors import ConfigurationError, TrajectoryUnavailableError
from trajstore.operations.trajectory_report import inspect_trajectory

polars = pytest.importorskip("polars", reason="needs polars, of the extra 'query'")


def rollout(task: str) -> AgentTrajectory:
    return AgentTrajectory(
        input_ids=torch.arange(6),
        task_id=task,
        messages=[{"role": "user", "content": task}],
        reward=Reward(outcome=1.0),
    )


RUN = [f"{rank}/{own}" for rank in range(3) for own in range(4)]


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    """Return a run of three ranks with four rollouts each."""
    for rank in range(3):
        stored(tmp_path / "run" / f"rank_{rank}", [rollout(f"t{rank}{own}") for own in range(4)])
    return tmp_path / "run"


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return stored(tmp_path / "single", [rollout(f"t{own}") for own in range(4)])


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_command_writes_ids_of_a_run_as_rank_and_id(ranks: Path, tmp_path: Path, run: Run) -> None:
    every = ("--sort", "trajectory_id", "--limit", "0")
    assert [line.split()[0] for line in run.out("list", ranks, *every).splitlines()[1:]] == RUN
    assert [row["trajectory_id"] for row in run.json("list", ranks, *every)] == RUN
    sql = "select trajectory_id, max(trajectory_id) as newest from trajectories group by trajectory_id order by 1"
    assert [(row["trajectory_id"], row["newest"]) for row in run.json("query", ranks, sql)] == [(n, n) for n in RUN]
    assert run.out("query", ranks, "select min(trajectory_id) from trajectories").split()[-1] == "0/0"
    run.out("convert", ranks, tmp_path / "out.jsonl", "--to", "jsonl")
    assert sorted(row["trajectory_id"] for row in rows_of(tmp_path / "out.jsonl")) == RUN
    run.out("convert", ranks, tmp_path / "parts", "--to", "parquet")
    assert sorted(polars.read_parquet(tmp_path / "parts")["trajectory_id"].to_list()) == RUN
    assert run.json("inspect", ranks, "--trajectory", "0/3")["trajectory_id"] == "0/3"
    assert "rollout 0/3" in run.out("inspect", ranks, "--trajectory", "0/3")
    assert inspect_trajectory(ranks, "2/1")["trajectory_id"] == "2/1"


@pytest.mark.parametrize(
    ("condition", "found"),
    [
        ("trajectory_id = '2/1'", ["2/1"]),
        ("'2/1' = trajectory_id", ["2/1"]),
        ("\"trajectory_id\" = '0/3'", ["0/3"]),
        ("trajectory_id in ('2/1','0/3')", ["0/3", "2/1"]),
        ("trajectory_id NOT IN ( '2/1' , '0/3' ) and rank <> 1", ["0/0", "0/1", "0/2", "2/0", "2/2", "2/3"]),
        ("trajectory_id != '1/0' and rank = 1", ["1/1", "1/2", "1/3"]),
        ("trajectory_id between '0/3' and '1/1'", ["0/3", "1/0", "1/1"]),
        ("trajectory_id >= '2/2'", ["2/2", "2/3"]),
        ("task = '2/1'", []),
        ("trajectory_id % 4 = 1 and rank = 2", ["2/1"]),
    ],
)
def test_a_quoted_id_names_a_trajectory_of_a_run(ranks: Path, run: Run, condition: str, found: list[str]) -> None:
    rows = run.json("list", ranks, "--where", condition, "--sort", "trajectory_id", "--limit", "0")
    assert [row["trajectory_id"] for row in rows] == found
    sql = f"select t.trajectory_id from trajectories t where {condition} order by trajectory_id"
    assert [row["trajectory_id"] for row in run.json("query", ranks, sql)] == found
    with TrajectoryReplayBuffer.open(ranks) as reader:
        ids = reader.query().where(condition).ids().tolist()
        assert len(ids) == len(found)
        assert sorted(ids) == sorted(
            number for name in found for number in reader.query().where(f"trajectory_id = '{name}'").ids().tolist()
        )


@pytest.mark.parametrize(
    "condition",
    [
        *("trajectory_id = 2/1", "trajectory_id in (2/1, 3/1)", "2/1 = trajectory_id", "trajectory_id <> 2 / 1"),
        *("trajectory_id = 1", "t.trajectory_id < 2", "trajectory_id >= '1'", "trajectory_id = 'newest'"),
        "trajectory_id not between '0/1' and 3",
    ],
)
def test_another_spelling_is_refused_in_a_run(ranks: Path, run: Run, condition: str) -> None:
    said = "is no id of a run directory, whose ids are rank and id in quotes: trajectory_id = '0/17'"
    assert said in run.err("query", ranks, f"select task from trajectories t where {condition}")
    condition = condition.removeprefix("t.")
    assert said in run.err("list", ranks, "--where", condition)
    assert said in run.err("prune", ranks, "--where", condition, "--yes")
    assert said in run.err("convert", ranks, ranks.parent / "out", "--to", "jsonl", "--where", condition)
    assert len(run.json("list", ranks, "--limit", "0")) == 12


@pytest.mark.parametrize("condition", ["trajectory_id = '2/1'", "trajectory_id in ('1', '3')", "trajectory_id = 2/1"])
def test_another_spelling_is_refused_in_a_single_store(single: Path, run: Run, condition: str) -> None:
    for words in (("list",), ("prune", "--yes")):
        assert "trajectory_id = 17" in run.err(*words[:1], single, "--where", condition, *words[1:])
    with TrajectoryReplayBuffer.open(single) as reader, pytest.raises(ConfigurationError, match="trajectory_id = 17"):
        reader.query().where(condition).ids()


def test_values_are_given_by_the_ids_that_are_shown(ranks: Path, single: Path, run: Run) -> None:
    run.out("annotate", ranks, "0/3", "2/1", "--set", "judge=0.5")
    annotate(ranks, "1/1", {"judge": 0.75})
    with TrajectoryReplayBuffer.open(ranks) as reader:
        rows = reader.query().where("judge is not null").select("trajectory_id", "judge").order_by("judge").rows()
        annotate(ranks, [row["trajectory_id"] for row in rows], {"seen": 1.0})
    words = ("--where", "seen = 1", "--columns", "trajectory_id,judge", "--sort", "trajectory_id")
    rows = [(row["trajectory_id"], row["judge"]) for row in run.json("list", ranks, *words)]
    assert rows == [("0/3", 0.5), ("1/1", 0.75), ("2/1", 0.5)]
    for wrong, message in (("3", "'0/3'"), ("5/1", "rank_5")):
        assert message.strip("'") in run.err("annotate", ranks, wrong, "--set", "judge=1")
    with pytest.raises(TrajectoryUnavailableError, match="0/3"):
        annotate(ranks, 3, {"judge": 1.0})
    with pytest.raises(TrajectoryUnavailableError, match="17"):
        annotate(single, "0/3", {"judge": 1.0})


def test_the_history_of_values_names_the_id_that_was_asked_for(ranks: Path, single: Path) -> None:
    for path, name in ((ranks, "1/3"), (ranks, "0/3"), (single, 3)):
        annotate(path, name, {"judge": 0.5})
        assert [note.trajectory_id for note in notes_of(path, name)] == [name]
    with TrajectoryReplayBuffer.open(ranks) as reader:
        (number,) = reader.query().where("trajectory_id = '1/3'").ids().tolist()
        assert reader.get("0/3").task_id == "t03"
        for absent in ("0/17", 17):
            with pytest.raises(TrajectoryUnavailableError, match=f"id {absent}"):
                reader.get(absent)
    assert [note.trajectory_id for note in notes_of(ranks, number)] == [number]


def test_only_the_value_that_counts_is_in_force(single: Path) -> None:
    for value in (0.5, 0.75, None):
        annotate(single, 0, {"judge": value})
    assert [(note.value, note.in_force) for note in notes_of(single, 0)] == [(0.5, False), (0.75, False), (None, False)]
    annotate(single, 0, {"judge": 0.25})
    assert [note.in_force for note in notes_of(single, 0)] == [False, False, False, True]
    assert [note["in_force"] for note in inspect_trajectory(single, 0)["notes"]] == [False, False, False, True]
    with opened(single) as writer:
        writer.points.save(1)
        annotate(writer, [0], {"judge": [1.0]})
        assert [note.in_force for note in notes_of(writer, 0)][-2:] == [False, True]
        writer.points.rollback(1)
        assert [(note.value, note.in_force) for note in notes_of(writer, 0)][-2:] == [(None, False), (0.25, True)]


def test_a_run_of_one_rank_is_a_run(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "run"
    with opened(path / "rank_0") as writer, TrajectoryReplayBuffer() as reader:
        writer.add_trajectories([rollout("a"), rollout("b")])
        writer.flush()
        reader.load_checkpoint(path)
        assert [row["trajectory_id"] for row in run.json("list", path, "--sort", "trajectory_id")] == ["0/0", "0/1"]
        writer.add_trajectories([rollout("c")])
        writer.evict([0])
        annotate(writer, [1], {"judge": 0.5})
        writer.flush()
        assert reader.refresh()
        facts = reader.query().select("trajectory_id", "judge", "task").order_by("trajectory_id").rows()
        assert [(row["judge"], row["task"]) for row in facts] == [(0.5, "b"), (None, "c")]
        assert [row["trajectory_id"] for row in run.json("list", path, "--sort", "trajectory_id")] == ["0/1", "0/2"]
        assert reader.get("0/2").task_id == "c"


def test_an_empty_condition_is_refused(single: Path, run: Run) -> None:
    for command in ("list", "prune"):
        assert "must be an SQL expression" in run.err(command, single, "--where", "")
