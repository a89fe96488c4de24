"""Commands on a damaged store process the intact part, name the rest, and exit with 1."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.stores import Run
from tests.stores import files_of, flip, opened, stored
from tests.support.copies import copy_live
from trajstore import AgentTrajectory, Reward
from trajstore.cli import DAMAGED
from trajstore.operations.verify import verify

pytest.importorskip("polars", reason="needs polars, of the extra 'query'")


def rollout(number: int) -> AgentTrajectory:
    return AgentTrajectory(input_ids=torch.full((64,), number), task_id=f"t{number}", reward=Reward(outcome=number / 8))


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Return a store of six rollouts in a shard each; the third shard is missing."""
    path = stored(tmp_path / "store", [rollout(number) for number in range(6)], each=True)
    sorted((path / "shards").iterdir())[2].unlink()
    return path


LEFT = [0, 1, 3, 4, 5]


def test_a_missing_shard_hides_only_what_is_in_it(damaged: Path, tmp_path: Path, run: Run, caplog: Any) -> None:
    rows = run.json("list", damaged, "--sort", "trajectory_id", code=DAMAGED)
    assert [row["trajectory_id"] for row in rows] == LEFT
    assert "ids 2" in caplog.text or "trajectory 2" in caplog.text
    assert "strict" not in caplog.text
    rows = run.json("query", damaged, "select trajectory_id from trajectories order by 1", code=DAMAGED)
    assert [row["trajectory_id"] for row in rows] == LEFT
    assert "5 rollouts" in run.out("convert", damaged, tmp_path / "out.jsonl", "--to", "jsonl", code=DAMAGED)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 5
    assert run.json("prune", damaged, "--where", "outcome >= 0.5", code=DAMAGED)["trajectories"] == 2
    assert run.json("prune", damaged, "--where", "outcome >= 0.5", "--yes", code=DAMAGED)["trajectories"] == 2
    rows = run.json("list", damaged, "--sort", "trajectory_id", code=DAMAGED)
    assert [row["trajectory_id"] for row in rows] == [0, 1, 3]


def test_corrupted_tokens_are_not_exported(tmp_path: Path, run: Run) -> None:
    path = stored(tmp_path / "store", [rollout(number) for number in range(4)], each=True)
    shard = sorted((path / "shards").iterdir())[1]
    data = bytearray(shard.read_bytes())
    block = torch.load(shard)["columns"]["input_ids"].numpy().tobytes()
    data[data.index(block) + len(block) - 1] ^= 1
    shard.write_bytes(bytes(data))
    assert not verify(path).sound
    out = run.out("convert", path, tmp_path / "out.jsonl", "--to", "jsonl", code=DAMAGED)
    assert "trajectory 1 was left out" in out
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["trajectory_id"] for line in lines] == [0, 2, 3]
    assert all(set(line["input_ids"]) == {line["trajectory_id"]} for line in lines)
    assert "trajectory 1 cannot be read" in run.out("view", path, "--bundle", tmp_path / "page", code=DAMAGED)


COMMANDS = {
    # exit codes with: a flipped byte in a shard, a missing shard, a damaged index (its copy is used), a torn log
    "inspect STORE": (0, 1, 1, 1),  # compares names and sizes
    "inspect STORE --trajectory LOST": (1, 1, 0, 0),  # taken from its shard
    "inspect STORE --trajectory 0": (0, 0, 0, 0),
    "list STORE": (0, 1, 0, 1),  # reads the index
    "query STORE 'select count(*) from trajectories'": (0, 1, 0, 1),
    "query STORE 'select count(*) from tokens'": (1, 1, 0, 1),
    "view STORE --bundle OUT": (1, 1, 0, 1),
    "verify STORE": (1, 1, 1, 1),
    "convert STORE OUT --to jsonl": (1, 1, 0, 1),
    "convert STORE OUT --to parquet": (1, 1, 0, 1),
    "copy STORE OUT": (1, 1, 0, 1),
    "repair STORE OUT": (1, 1, 0, 0),
    "convert STORE OUT --to pkl": (1, 1, 0, 0),
    "prune STORE --where 'outcome > 0'": (0, 1, 0, 1),
    "rollback STORE --step 1 --dry-run": (0, 0, 0, 1),
}


def only_file(path: Path, number: int = 0) -> Path:
    return sorted(path.iterdir())[number]


@pytest.mark.parametrize(
    ("column", "damage", "named", "lost"),
    [
        (0, lambda store: flip(only_file(store / "shards", 1)), "shard_00000001.pt", 1),
        (1, lambda store: only_file(store / "shards", 1).unlink(), "shard_00000001.pt", 1),
        (2, lambda store: os.truncate(store / "trajectory_index.json", 50), "trajectory_index.json", 1),
        (3, lambda store: os.truncate(segment := only_file(store / "log"), segment.stat().st_size - 20), "log", 2),
    ],
    ids=["flipped byte", "missing shard", "damaged index", "torn log"],
)
def test_every_command_names_damage_and_says_so_by_its_exit_code(
    column: int, damage: Callable[[Path], Any], named: str, lost: int, tmp_path: Path, run: Run, caplog: Any
) -> None:
    with opened(tmp_path / "live") as writer:
        for number in range(3):
            writer.add_trajectories([rollout(number)])
            writer.flush()
        writer.points.save(1)
        store = copy_live(tmp_path / "live", tmp_path / "store", "readers", "writer.lock")
    damage(store)
    before = files_of(store)
    codes = {}
    for at, words in enumerate(COMMANDS):
        caplog.clear()
        places = {"STORE": store, "OUT": tmp_path / f"out{at}", "LOST": lost}
        codes[words], out, err = run(*(places.get(word, word) for word in shlex.split(words)))
        if codes[words] == DAMAGED:
            assert named in out + err + caplog.text, words
    assert codes == {words: row[column] for words, row in COMMANDS.items()}
    kept = {name: data for name, data in files_of(store).items() if not name.startswith("readers/")}
    assert kept == before, "a command that fails leaves its reader announced until its process ends"
