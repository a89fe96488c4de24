"""Reports of ``inspect``, compared with the written data."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.stores import ENVIRONMENTS, STEPS, Run, write_store
from tests.stores import add_each, flip, in_memory, opened, overwrite_by_rlinf, stored
from trajstore import Trajectory
from trajstore._core.formats import FORMATS
from trajstore.cli import DAMAGED
from trajstore.cli.output import format_bytes
from trajstore.operations.inspect import inspect
from trajstore.operations.verify import verify
from trajstore.points import points_at


@pytest.mark.parametrize("trajectory_format", FORMATS)
def test_report_of_a_store(run: Run, tmp_path: Path, trajectory_format: str) -> None:
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
    actions = {"name": "actions", "dtype": "float32", "row_shape": [2], "bytes": 5 * STEPS * ENVIRONMENTS * 8}
    assert columns["actions"] == actions
    assert set(columns) >= {"rewards", "dones", "versions", "curr_obs.states"}
    assert report["steps"]["min"] == report["steps"]["max"] == STEPS
    assert report["batch"]["mean"] == ENVIRONMENTS
    assert report["ids"] == {"first": 0, "last": 4, "absent": 0, "gaps": []}
    assert report["policy"]["versions"] == {"min": 10, "max": 14}
    assert report["policy"]["ages"] == {"min": 0, "mean": 2.0, "max": 4}
    assert report["integrity"]["problems"] == []
    told = run.json("inspect", path)
    assert told["last_addition"]["age"] >= report["last_addition"]["age"] >= 0
    assert told | {"last_addition": report["last_addition"]} == report
    out = " ".join(run.out("inspect", path).split())
    for expected in (
        f"live bytes {format_bytes(report['live_bytes'])} shard bytes {format_bytes(report['shard_bytes'])}",
        "policy versions 10 to 14",
        "curr_obs.states float32 [1] 360 B",
    ):
        assert expected in out


def test_one_trajectory(run: Run, store: Path) -> None:
    report = run.json("inspect", store, "--trajectory", 3)
    assert report["trajectory_id"] == 3
    assert report["versions"] == [13, 13]
    assert next(column for column in report["columns"] if column["name"] == "actions")["range"]["max"] == 13.0


def test_episodes_of_a_block_by_environment(run: Run, tmp_path: Path) -> None:
    ends = torch.zeros(6, 2, 1, dtype=torch.bool)
    ends[2, 0] = ends[5, 1] = True
    valid = torch.ones(6, 2, dtype=torch.bool)
    valid[3, 0] = False  # a reset
    rewards = torch.arange(12.0).reshape(6, 2, 1)
    image = torch.zeros(6, 2, 64, 64, 3, dtype=torch.uint8)
    made = Trajectory(
        rewards=rewards,
        dones=ends,
        truncations=ends & (rewards < 9),
        terminations=ends & (rewards > 9),
        valid=valid,
        curr_obs={"wrist_camera": image},
    )
    stored(tmp_path / "store", [made])
    names = ("environment", "first", "last", "return_in_block", "end")
    rows = [(0, 0, 2, 6.0, "truncated"), (0, 4, 5, 18.0, None), (1, 0, 5, 36.0, "terminated")]
    report = run.json("inspect", tmp_path / "store", "--trajectory", 0)
    assert report["episodes"] == [dict(zip(names, row, strict=True)) for row in rows]
    out = run.out("inspect", tmp_path / "store", "--trajectory", 0)
    lines = [line.split() for line in out.splitlines()]
    assert ["0", "4", "5", "18"] in lines
    assert ["1", "0", "5", "36", "terminated"] in lines
    assert max(map(len, out.splitlines()[2:])) <= 80


def test_numbers_that_json_lacks(run: Run, tmp_path: Path) -> None:
    rewards = torch.tensor([1.0, float("nan"), float("-inf")]).reshape(3, 1, 1)
    stored(tmp_path / "store", [Trajectory(rewards=rewards)])
    column = run.json("inspect", tmp_path / "store", "--trajectory", 0)["columns"][0]
    assert (column["not_finite"], column["range"]) == (2, {"min": 1.0, "mean": 1.0, "max": 1.0})
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


def test_directories_of_rlinf(run: Run, shared_fixtures: Path) -> None:
    for name in ("auto_save_pt", "auto_save_pkl"):
        report = inspect(shared_fixtures / "rlinf" / name)
        assert (report["kind"], report["trajectories"], report["samples"]) == ("rlinf", 6, 180)
        assert report["steps"] == {"min": 8, "mean": 10.0, "max": 12}
        assert report["policy"]["weights"] == 6
        assert report["integrity"]["problems"] == []
    out = run.out("inspect", shared_fixtures / "rlinf" / "checkpoint_from_cache")
    assert "at a glance: 5 of 7 with a file, sizes fit" in out
    ids = run.json("inspect", shared_fixtures / "rlinf" / "checkpoint_from_cache")["ids"]
    assert ids == {"first": 0, "last": 6, "absent": 0, "gaps": [], "without_file": 2}
    report = inspect(shared_fixtures / "rlinf" / "per_rank")
    assert report["trajectories"] == 12


def test_verdict_and_writer_are_first(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "store"
    with opened(path) as buffer:
        add_each(buffer, range(5))
        buffer.evict([3])
        lines = run.out("inspect", path).splitlines()
        assert "at a glance: all files there" in lines[2]
        assert lines[4].split()[:3] == ["writer", "process", str(os.getpid())]
        assert "seconds ago" in lines[5]
        writer = run.json("inspect", path)["writer"]
        assert (writer["pid"], writer["state"]) == (os.getpid(), "running")
    out = " ".join(run.out("inspect", path).split())
    assert "writer none last addition" in out
    assert "ids gaps 3" in out


@pytest.mark.parametrize("sent", [signal.SIGSTOP, signal.SIGKILL])
def test_a_stopped_and_a_killed_writer_are_told(run: Run, tmp_path: Path, sent: signal.Signals) -> None:
    path = tmp_path / "store"
    child = multiprocessing.get_context("fork").Process(target=_write_until_stopped, args=(path, sent))
    child.start()
    try:
        os.waitid(os.P_PID, child.pid or 0, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        writer = run.json("inspect", path)["writer"]
        assert writer["pid"] == child.pid
        assert writer["state"] == ("stopped" if sent == signal.SIGSTOP else "gone")
        if sent == signal.SIGSTOP:
            assert f"which is stopped (`kill -CONT {child.pid}` continues it)" in run.err("compact", path)
    finally:
        child.kill()
        child.join()
    assert ", gone without closing; the next writer continues" in run.out("inspect", path)


def _write_until_stopped(path: Path, sent: signal.Signals) -> None:
    with opened(path) as buffer:
        add_each(buffer, [0])
        os.kill(os.getpid(), sent)


def test_a_store_without_an_addition_for_long_is_a_problem_if_asked(run: Run, tmp_path: Path) -> None:
    for rank in range(2):
        write_store(tmp_path / f"rank_{rank}", range(1))
    with opened(tmp_path / "rank_2"):
        pass
    assert run("inspect", tmp_path, "--max-age", "inf")[0] == DAMAGED
    *_, problem = run.json("inspect", tmp_path, "--max-age", "0", code=DAMAGED)["integrity"]["problems"]
    assert problem == f"{tmp_path}/rank_2: no trajectory, no writer is open (--max-age)"
    assert "must be 0 or more" in run.err("inspect", tmp_path, "--max-age", "nan")
    assert "rank_1: the last addition was" in run("inspect", tmp_path, "--max-age", "0")[1]
    assert run("inspect", tmp_path / "rank_0", "--max-age", "3600")[0] == 0
    with opened(tmp_path / "rank_1"):
        assert "ago, its writer is running: it" in run("inspect", tmp_path / "rank_1", "--max-age", "0")[1]
    before = inspect(tmp_path / "rank_0")["last_addition"]["at"]
    points_at(tmp_path / "rank_0").pin("now")
    assert inspect(tmp_path / "rank_0")["last_addition"]["at"] == before, "other changes are no additions"
    assert "without --trajectory" in run.err("inspect", tmp_path, "--max-age", "1", "--trajectory", "0")


def test_another_number_of_ranks_is_a_problem_if_asked(run: Run, tmp_path: Path) -> None:
    for rank in range(2):
        write_store(tmp_path / f"rank_{rank}", range(1))
    for command in ("inspect", "verify"):
        assert run(command, tmp_path, "--ranks", "2")[0] == run(command, tmp_path)[0] == 0
        for wanted in ("1", "3"):
            code, out, _ = run(command, tmp_path, "--ranks", wanted)
            assert (code, f"{tmp_path}: has 2 ranks, not {wanted}" in " ".join(out.split())) == (DAMAGED, True)
        assert "has 0 ranks, not 2" in run(command, tmp_path / "rank_0", "--ranks", "2")[1]
    text = f"{tmp_path}: has 2 ranks, not 4: rank_2 to rank_3 are absent"
    assert inspect(tmp_path, ranks=4)["integrity"]["problems"] == [text]
    assert [problem.message for problem in verify(tmp_path, ranks=4).problems] == [text]
    for wanted, verdict in (("1", "TOO MANY RANKS"), ("2", "sound"), ("4", "INCOMPLETE")):
        assert f"{tmp_path}: {verdict}: 2 trajectories" in run("verify", tmp_path, "--ranks", wanted)[1]
    shutil.rmtree(tmp_path / "rank_0")
    assert f"{tmp_path}: INCOMPLETE: 1 trajectory" in run.out("verify", tmp_path, code=DAMAGED)
    flip(next((tmp_path / "rank_1" / "shards").iterdir()))
    assert f"{tmp_path}: DAMAGED: " in run.out("verify", tmp_path, code=DAMAGED)
    assert "without --trajectory" in run.err("inspect", tmp_path, "--ranks", "2", "--trajectory", "0/0")


def test_a_mirror_without_a_copy_is_a_problem(run: Run, store: Path) -> None:
    record = {"url": "s3://absent/run", "generation": -1, "newest_id": -1, "at": None, "error": None}
    for error, text in ((None, "the mirror has no copy yet"), ("no such bucket", "is not written: no such bucket")):
        (store / "mirrored.json").write_text(json.dumps(record | {"error": error}))
        out = " ".join(run.out("inspect", store, code=DAMAGED).split())
        assert text in out
        assert "mirror generation never copied" in out
    assert run.json("inspect", store, code=DAMAGED)["mirror"]["generation"] is None


def test_what_opening_a_run_does_not_show_is_told(run: Run, tmp_path: Path) -> None:
    for name in ("rank_0", "rank_1", "step_5/rank_0"):
        write_store(tmp_path / "run" / name, range(2))
    out = run.out("inspect", tmp_path / "run")
    out = " ".join(out.split())
    assert "ranks 2 opened 4 beside step_5" in out
    (note,) = verify(tmp_path / "run").notes
    assert "step_5" in note


# -- runs ----------------------------------------------------------------------------


def test_a_run_is_one_table(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for rank in range(4):
        write_store(tmp_path / f"rank_{rank}", range(10 * rank, 10 * rank + 2 + rank))
    overwrite_by_rlinf(tmp_path / "rank_1")
    next((tmp_path / "rank_2" / "shards").iterdir()).unlink()
    out = run.out("inspect", tmp_path, code=DAMAGED)
    assert len(out.splitlines()) < 40
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith("  rank_")}
    assert rows["rank_0"][1] == "2"
    assert rows["rank_1"][1] == "?"
    assert rows["rank_2"][-1] != rows["rank_3"][-1]
    assert "rank_1: cannot be read" in out
    assert "rank_2: shards/" in out
    report = inspect(tmp_path)
    assert report["trajectories"] == 2 + 4 + 5
    assert report["policy"]["versions"] == {"min": 0, "max": 34}
    assert run("inspect", tmp_path, "--json")[0] == DAMAGED
    assert run("inspect", tmp_path / "rank_0")[0] == 0
    code, out, _ = run("verify", tmp_path)
    verdicts = {line.split(": ")[0]: line for line in out.splitlines() if "checked" in line}
    assert (code, "sound" in verdicts[str(tmp_path / "rank_0")]) == (DAMAGED, True)
    assert "DAMAGED" in verdicts[str(tmp_path / "rank_2")]


@pytest.mark.parametrize("layout", ["trajstore", "rlinf"])
@pytest.mark.parametrize("empty", ["rewards", "dones"])
def test_columns_with_rows_of_no_values(tmp_path: Path, layout: Any, empty: str) -> None:
    columns = {"rewards": torch.zeros(2, 1, 1), "dones": torch.zeros(3, 1, 1, dtype=torch.bool)}
    columns[empty] = columns[empty][..., :0]
    buffer = in_memory([Trajectory(**columns) for _ in range(3)])
    buffer.save_checkpoint(tmp_path / "here", layout=layout)
    assert inspect(tmp_path / "here")["trajectories"] == 3
