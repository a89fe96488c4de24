"""``verify`` on directories of RLinf: what their own checksums and names tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from trajstore import TrajectoryReplayBuffer
from trajstore.inspection.verify import verify
from trajstore.store.sealed import INDEX_NAME, METADATA_NAME
from trajstore.testing.witness import witness


def rlinf(path: Path, form: str = "pt") -> Path:
    buffer = TrajectoryReplayBuffer(trajectory_format=form)
    buffer.add_trajectories([witness(key) for key in range(3)])
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
    buffer = TrajectoryReplayBuffer(trajectory_format=form)
    buffer.add_trajectories([witness(4), witness(16)])  # of one shape
    buffer.save_checkpoint(path, layout="rlinf")
    assert verify(path).sound
    one, two = sorted(path.glob("trajectory_?_*"))
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)
    assert {problem.file for problem in verify(path).problems} == {one.name, two.name}


@pytest.mark.parametrize("layout", ["trajstore", "rlinf"])
def test_verify_does_not_overlook_a_rank_without_index_and_metadata(tmp_path: Path, layout: Any) -> None:
    for rank in range(2):
        buffer = TrajectoryReplayBuffer()
        buffer.add_trajectories([witness(rank)])
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
