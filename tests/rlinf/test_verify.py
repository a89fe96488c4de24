"""``verify`` on directories of RLinf: checks by file names and RLinf's checksums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.stores import in_memory
from tests.support.witness import check_trajectory, witness
from trajstore import TrajectoryReplayBuffer
from trajstore._core.store.sealed import INDEX_NAME, METADATA_NAME
from trajstore.cli import main
from trajstore.errors import IncompleteCheckpointError
from trajstore.operations.copying import copy_store
from trajstore.operations.inspect import inspect
from trajstore.operations.verify import verify


def rlinf(path: Path, form: str = "pt") -> Path:
    buffer = in_memory([witness(key) for key in range(3)], trajectory_format=form)
    buffer.save_checkpoint(path, layout="rlinf")
    return path


def test_verify_reads_the_checksums_within_the_files_of_rlinf(tmp_path: Path) -> None:
    path = rlinf(tmp_path / "rlinf")
    file = next(path.glob("trajectory_1_*.pt"))
    data = file.read_bytes()
    at = data.index(witness(1).actions.numpy().tobytes())
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    (problem,) = verify(path).problems
    assert problem.file == file.name
    assert "checksum" in problem.message


@pytest.mark.parametrize("form", ["pt", "pkl"])
def test_verify_sees_that_files_of_rlinf_were_exchanged(tmp_path: Path, form: str) -> None:
    path = tmp_path / "rlinf"
    buffer = in_memory([witness(4), witness(16)], trajectory_format=form)
    buffer.save_checkpoint(path, layout="rlinf")
    assert verify(path).sound
    first_path, second_path = sorted(path.glob("trajectory_?_*"))
    first = first_path.read_bytes()
    first_path.write_bytes(second_path.read_bytes())
    second_path.write_bytes(first)
    assert {problem.file for problem in verify(path).problems} == {first_path.name, second_path.name}


@pytest.mark.parametrize("layout", ["trajstore", "rlinf"])
def test_verify_does_not_overlook_a_rank_without_index_and_metadata(tmp_path: Path, layout: Any) -> None:
    for rank in range(2):
        buffer = in_memory([witness(rank)])
        buffer.save_checkpoint(tmp_path / f"rank_{rank}", layout=layout)
    assert verify(tmp_path).sound
    for name in (METADATA_NAME, INDEX_NAME):
        (tmp_path / "rank_1" / name).unlink()
    assert not verify(tmp_path).sound


def test_verify_reports_names_that_leave_the_directory_of_rlinf(tmp_path: Path) -> None:
    path = rlinf(tmp_path / "rlinf")
    index = path / INDEX_NAME
    value = orjson.loads(index.read_bytes())
    value["trajectory_index"]["1"]["model_weights_id"] = "/../../x"
    index.write_bytes(orjson.dumps(value))
    (problem,) = verify(path).problems
    assert "leaves the directory" in problem.message


def test_what_rlinf_never_wrote_is_no_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = rlinf(tmp_path / "rlinf")
    next(path.glob("trajectory_0_*")).unlink()
    verification = verify(path)
    assert verification.sound
    assert "1 trajectory, the oldest of the index, without a file (id 0)" in verification.notes[0]
    report = inspect(path)
    assert (report["ids"]["without_file"], report["integrity"]["problems"]) == (1, [])
    copied = copy_store(path, tmp_path / "store")
    assert (copied.trajectories, copied.is_whole) == (2, True)
    assert copied.problems == []
    assert "without a file (id 0)" in copied.notes[0]
    capsys.readouterr()
    assert main(["repair", str(path), str(tmp_path / "repaired")]) == 0
    assert capsys.readouterr().out.count("note: 1 trajectory, the oldest of the index, without a file") == 1
    next(path.glob("trajectory_2_*")).unlink()
    (problem,) = verify(path).problems
    assert problem.lost == ((2, 2),)
    assert len(inspect(path)["integrity"]["problems"]) == 1
    assert not copy_store(path, tmp_path / "less").is_whole
    next(path.glob("trajectory_1_*")).unlink()
    assert len(verify(path).problems) == 3, "there must have been something"


@pytest.mark.parametrize("ranks", [None, 2])
def test_a_copy_of_a_directory_of_rlinf_is_a_store(tmp_path: Path, ranks: int | None) -> None:
    for rank in range(ranks or 1):
        rlinf(tmp_path / "rlinf" / (f"rank_{rank}" if ranks else ""))
    copied = copy_store(tmp_path / "rlinf", tmp_path / "copy")
    assert (copied.is_whole, copied.trajectories) == (True, 3 * (ranks or 1))
    store = tmp_path / "copy" / ("rank_1" if ranks else "")
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=store, sample_window_size=0) as buffer:
        assert [check_trajectory(buffer.get(number)) for number in buffer.trajectory_ids.tolist()] == [0, 1, 2]
        buffer.points.save(1)
        assert buffer.add_trajectories([witness(5)]) == [3]


def test_a_hole_in_a_directory_of_rlinf_is_told_as_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = rlinf(tmp_path / "rlinf")
    next(path.glob("trajectory_1_*")).unlink()
    buffer = TrajectoryReplayBuffer(sample_window_size=0)
    assert buffer.load_checkpoint(path) == 1
    assert buffer.trajectory_ids.tolist() == [0, 2]
    assert "the index names 3 trajectories; 1 not there, though older ones are: the directory is damaged" in caplog.text
    assert "buffer in memory" not in caplog.text
    caplog.clear()
    next(path.glob("trajectory_0_*")).unlink()
    assert TrajectoryReplayBuffer(sample_window_size=0).load_checkpoint(path) == 2
    assert "the index names 3 trajectories; 2 not there, as in RLinf's checkpoints of a buffer in memory" in caplog.text
    assert "damaged" not in caplog.text
    next(path.glob("trajectory_2_*")).unlink()
    with pytest.raises(IncompleteCheckpointError, match="the index names 3 trajectories, and none is there"):
        buffer.load_checkpoint(path)
