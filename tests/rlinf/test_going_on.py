"""A store converted from a directory of RLinf accepts further writes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.stores import flip, writer_to
from trajstore import Retention, TrajectoryReplayBuffer
from trajstore._core.formats import FORMATS
from trajstore._core.store.index import TrajectoryIndex
from trajstore.errors import CorruptStoreError
from trajstore.operations.copying import copy_store
from trajstore.operations.verify import verify


def convert(source: Path, target: Path, trajectory_format: str = "pt") -> None:
    with TrajectoryReplayBuffer(seed=0, sample_window_size=0, trajectory_format=trajectory_format) as buffer:
        buffer.load_checkpoint(source)
        buffer.save_checkpoint(target)


def shards(path: Path) -> list[str]:
    return sorted(file.name for file in (path / "shards").iterdir())


@pytest.mark.parametrize("trajectory_format", list(FORMATS))
def test_it_knows_how_many_bytes_it_has(shared_fixtures: Path, tmp_path: Path, trajectory_format: str) -> None:
    convert(shared_fixtures / "rlinf" / "auto_save_pt", tmp_path / "store", trajectory_format)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store", sample_window_size=0) as buffer:
        stats = buffer.get_stats()
        assert 0.9 * stats["shard_bytes"] < stats["live_bytes"] < stats["shard_bytes"]
        before = stats["live_bytes"]
        expected = {number: buffer.get(number).rewards for number in range(1, 6)}
        buffer.evict([0])
        buffer.compact()
        assert buffer.get_stats()["live_bytes"] < before
        for number, rewards in expected.items():
            assert buffer.get(number).rewards.equal(rewards)
        buffer.add_trajectories([buffer.get(1)])
        buffer.flush()
    assert verify(tmp_path / "store").sound
    with writer_to(tmp_path / "store", retention=Retention(max_bytes=int(before // 2))) as buffer:
        assert 0 < buffer.get_stats()["live_bytes"] <= before // 2


def test_rewriting_ends_whatever_the_index_says_of_bytes(
    shared_fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill = TrajectoryIndex.fill
    monkeypatch.setattr(TrajectoryIndex, "fill", lambda *at, nbytes=0, **values: fill(*at, **values))
    convert(shared_fixtures / "rlinf" / "auto_save_pt", tmp_path / "store")
    with writer_to(tmp_path / "store") as buffer:
        buffer.evict([0])
        buffer.compact()
    assert shards(tmp_path / "store") == ["shard_00000002.pt"]
    assert "gives too few bytes for trajectories" in caplog.text
    assert verify(tmp_path / "store").sound


def test_it_knows_the_policy_versions_of_its_trajectories(shared_fixtures: Path, tmp_path: Path) -> None:
    convert(shared_fixtures / "rlinf" / "auto_save_pt", tmp_path / "store")
    with TrajectoryReplayBuffer.open(tmp_path / "store") as reader:
        expected = {number: reader.get(number).versions for number in range(6)}
    version_ranges = {
        number: (int(values.min()), int(values.max())) for number, values in expected.items() if values is not None
    }
    assert len(version_ranges) == 6
    newest = max(high for _, high in version_ranges.values())
    limit = Retention(max_policy_age=1)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store", retention=limit) as buffer:
        assert buffer.trajectory_ids.tolist() == [
            number for number, (_, high) in version_ranges.items() if high >= newest - 1
        ]


def test_a_damaged_file_is_not_copied_under_a_fresh_checksum(shared_fixtures: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(shared_fixtures / "rlinf" / "auto_save_pt", tmp_path / "source"))
    file = min(source.glob("trajectory_3_*.pt"))
    flip(file)
    with pytest.raises(CorruptStoreError, match=f"{file.name}.*checksum"):
        copy_store(source, tmp_path / "copy")
