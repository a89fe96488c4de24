"""Copies of live stores are whole, and what is whole of damaged ones is copied."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from tests.cli.stores import Run
from trajstore import Retention, TrajectoryReplayBuffer
from trajstore.cli import DAMAGED, FAILED
from trajstore.inspection.copying import copy_store, repair_store
from trajstore.inspection.verify import verify
from trajstore.testing.witness import check_trajectory, witness


def fill(path: Path, keys: range, trajectory_format: str = "pt") -> Path:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, trajectory_format=trajectory_format) as buffer:
        for key in keys:
            buffer.add_trajectories([witness(key)])
            buffer.flush()
    return path


def content(path: Path) -> dict[int, int]:
    """Return the key of each trajectory by id, each of them checked."""
    buffer = TrajectoryReplayBuffer(sample_window_size=0)
    buffer.load_checkpoint(path, strict=True)
    return {number: check_trajectory(buffer.get(number)) for number in buffer.trajectory_ids.tolist()}


def files_of(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("trajectory_format", ["pt", "zarr"])
def test_a_copy_of_a_live_store_is_one_moment_of_it(run: Run, tmp_path: Path, trajectory_format: str) -> None:
    live = tmp_path / "live"
    done = threading.Event()
    with TrajectoryReplayBuffer(
        auto_save=True,
        auto_save_path=live,
        trajectory_format=trajectory_format,
        retention=Retention(max_trajectories=9),
    ) as buffer:
        buffer.add_trajectories([witness(key) for key in range(9)])
        buffer.flush()

        def add() -> None:
            key = 9
            while not done.is_set():
                buffer.add_trajectories([witness(key)])
                buffer.flush()
                key += 1

        adder = threading.Thread(target=add)
        adder.start()
        try:
            for number in range(4):
                code, out, _ = run("copy", live, tmp_path / f"copy_{number}")
                assert code == 0
                assert "verified" in out
        finally:
            done.set()
            adder.join()
    for number in range(4):
        found = content(tmp_path / f"copy_{number}")
        assert all(key == number for number, key in found.items())
        assert list(found) == list(range(min(found), min(found) + len(found)))
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / f"copy_{number}") as again:
            assert again.add_trajectories([witness(0)])[0] > max(found)


def test_what_is_whole_of_a_damaged_store_is_copied(run: Run, tmp_path: Path) -> None:
    store = fill(tmp_path / "store", range(5))
    shards = sorted((store / "shards").iterdir())
    shards[1].unlink()
    data = bytearray(shards[3].read_bytes())
    data[len(data) // 2] ^= 1
    shards[3].write_bytes(data)
    (store / "metadata.json").write_bytes(b"{")
    before = files_of(store)
    code, out, _ = run("repair", store, tmp_path / "whole")
    assert code == DAMAGED, "what is lost does not pass for done"
    assert "lost: 2 trajectories, ids 1, 3" in out
    assert "metadata.json" in out
    assert content(tmp_path / "whole") == {0: 0, 2: 2, 4: 4}
    assert verify(tmp_path / "whole").sound
    assert files_of(store) == before
    code, out, _ = run("repair", store, tmp_path / "again", "--json")
    report = json.loads(out)
    assert (report["lost"], report["trajectories"]) == ([1, 3], 3)
    code, _, err = run("copy", store, tmp_path / "copy")
    assert code == DAMAGED
    assert "metadata.json" in err
    assert not (tmp_path / "copy").exists()


def test_runs_are_copied_rank_by_rank(tmp_path: Path) -> None:
    for rank in range(3):
        fill(tmp_path / "run" / f"rank_{rank}", range(2 * rank, 2 * rank + 2))
    copied = copy_store(tmp_path / "run", tmp_path / "copy")
    assert copied.trajectories == 6
    assert content(tmp_path / "copy" / "rank_2") == {0: 4, 1: 5}
    os.truncate(tmp_path / "run" / "rank_1" / "trajectory_index.json", 5)
    repaired = repair_store(tmp_path / "run", tmp_path / "whole")
    assert repaired.trajectories == 4
    assert any("rank_1: is left out" in problem for problem in repaired.problems)
    assert content(tmp_path / "whole" / "rank_1") == {}, "so that the run can be opened"
    assert len(content(tmp_path / "whole" / "rank_2")) == 2


@pytest.mark.parametrize("command", ["copy", "repair"])
def test_nothing_is_overwritten(run: Run, store: Path, tmp_path: Path, command: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    code, _, err = run(command, store, tmp_path / "mine")
    assert code == FAILED
    assert "is not empty" in err
    assert run(command, tmp_path / "absent", tmp_path / "new")[0] == FAILED
    assert not (tmp_path / "new").exists()
    assert os.listdir(tmp_path / "mine") == ["thesis.tex"]


def test_what_to_do_with_a_damaged_directory_of_rlinf(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "rlinf"
    with TrajectoryReplayBuffer(sample_window_size=0) as buffer:
        buffer.add_trajectories([witness(key) for key in range(3)])
        buffer.save_checkpoint(source, layout="rlinf")
    first, second, _ = sorted(source.glob("trajectory_[0-9]*"))
    first.write_bytes(b"no archive")
    second.unlink()
    code, _, error = run("repair", source, tmp_path / "new")
    assert code == FAILED
    assert "move the files that `trajstore verify` names away" in error
    first.rename(tmp_path / first.name)  # as it says
    with TrajectoryReplayBuffer(sample_window_size=0) as rest:
        assert rest.load_checkpoint(source, strict=False) == 2
        rest.save_checkpoint(tmp_path / "saved")
    assert content(tmp_path / "saved") == {2: 2}
