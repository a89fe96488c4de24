"""``verify`` finds every change and reports nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cli.stores import Run, write_store
from tests.stores import stored
from trajstore import Trajectory, TrajectoryReplayBuffer
from trajstore._core.formats import FORMATS
from trajstore.errors import StoreNotFoundError, UnsupportedVersionError
from trajstore.operations.verify import verify


@pytest.mark.parametrize("trajectory_format", list(FORMATS))
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.data())
def test_any_changed_byte_is_found(tmp_path: Path, trajectory_format: str, data: st.DataObject) -> None:
    if trajectory_format == "zarr":
        pytest.importorskip("zarr")
    original = tmp_path / "original"
    if not original.exists():
        write_store(original, range(3), trajectory_format)
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(original, copy)
    files = sorted(file for file in copy.rglob("*") if file.is_file() and file.stat().st_size)
    file = data.draw(st.sampled_from([file for file in files if file.name != "writer.lock"]))
    content = bytearray(file.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    try:
        result = verify(copy)
    except (StoreNotFoundError, UnsupportedVersionError):  # the changed metadata describes another kind of directory
        return
    assert not result.sound or result.notes, f"{file.name}, byte {position}"


def test_directories_of_rlinf(run: Run, shared_fixtures: Path) -> None:
    for name in ("auto_save_pt", "auto_save_pkl", "two_epochs_pt", "per_rank", "checkpoint_from_cache"):
        assert run("verify", shared_fixtures / "rlinf" / name)[0] == 0, name


def test_a_folder_whose_name_cannot_be_told_hides_no_neighbour(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored(tmp_path / "sound", [Trajectory(rewards=torch.zeros(2, 1, 1))])
    (tmp_path / "a\nb").mkdir()
    assert verify(tmp_path).trajectories == 1
    assert r"'a\nb' is skipped" in caplog.text


def test_metadata_without_a_version_is_damaged_and_not_of_the_future(tmp_path: Path) -> None:
    stored(tmp_path / "store", [Trajectory(rewards=torch.zeros(2, 1, 1))])
    metadata = tmp_path / "store" / "metadata.json"
    metadata.write_bytes(metadata.read_bytes().replace(b'"layout_version"', b'"layout_verrion"'))
    assert [problem.file for problem in verify(tmp_path / "store").problems] == ["metadata.json"]
    with TrajectoryReplayBuffer(sample_window_size=0) as reader:
        assert reader.load_checkpoint(tmp_path / "store", strict=False) == 0
        assert len(reader) == 1
