"""Shards that left the sampling window are compressed, and stay drawable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cli.stores import Run
from tests.support.waiting import wait_until
from trajstore import AgentTrajectory, Retention, Trajectory, TrajectoryReplayBuffer
from trajstore.errors import MissingDependencyError
from trajstore.stores import compact, inspect, verify

zarr = pytest.importorskip("zarr")


Maker = Callable[[int], AgentTrajectory | Trajectory]


def rollout(number: int) -> AgentTrajectory:
    ids = torch.arange(400).repeat(5) + number
    return AgentTrajectory(input_ids=ids, rollout_log_probs=ids.sin().neg().clamp(max=0.0), response_start=0)


def block(number: int) -> Trajectory:
    return Trajectory(rewards=torch.full((16, 4, 1), float(number)), curr_obs={"x": torch.ones(16, 4, 200)})


def formats(path: Path) -> list[str]:
    return sorted(file.suffix for file in (path / "shards").iterdir())


@pytest.mark.parametrize("make", [rollout, block])
def test_compressed_shards_are_smaller_and_read_the_same(tmp_path: Path, make: Maker, run: Run) -> None:
    path = tmp_path / "store"
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path) as buffer:
        for number in range(6):
            buffer.add_trajectories([make(number)])
            buffer.flush()
        before = [buffer.get(number) for number in range(6)]
        buffer.compact()
        buffer.compact(compress=True)
        assert formats(path) == [".zarr"]
        for number, trajectory in enumerate(before):
            for name, value in vars(buffer.get(number)).items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(value, getattr(trajectory, name))
        buffer.evict([0, 1])
        buffer.compact()
        assert formats(path) == [".zarr"], "what is left of a compressed shard stays compressed"
        buffer.add_trajectories([make(6)])
    found = inspect(path)["compressed"]
    assert found["shards"] == 1
    assert 0 < found["bytes"] < found["uncompressed"] / 2
    assert "compressed shards 1 compressed bytes" in " ".join(run.out("inspect", path).split())
    assert formats(path) == [".pt", ".zarr"]
    run.out("compact", path, "--compress")
    assert formats(path) == [".zarr"]
    assert compact(path, compress=True).bytes_after == inspect(path)["compressed"]["bytes"]
    assert verify(path).sound
    with TrajectoryReplayBuffer.open(path) as reader:
        assert len(reader) == 5
        if make is block:
            assert reader.sample(20)["rewards"].unique().tolist() == [2.0, 3.0, 4.0, 5.0, 6.0]


def test_retention_compresses_what_is_older_than_the_newest(tmp_path: Path) -> None:
    limits = Retention(compress_after=4)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path, retention=limits) as buffer:
        large = [Trajectory(rewards=torch.full((1 << 20, 1, 1), float(number))) for number in range(8)]
        for trajectory in large:
            buffer.add_trajectories([trajectory])
            buffer.flush()
        wait_until(lambda: ".zarr" in formats(tmp_path))
        for number in range(8):
            assert buffer.get(number).rewards[0, 0, 0] == number
        assert formats(tmp_path).count(".pt") >= 4


def test_compression_that_cannot_be_is_refused_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Retention(compress_after=4)
    with pytest.warns(UserWarning, match="retention.compress_after .*auto_save"):
        TrajectoryReplayBuffer(retention=limits)
    monkeypatch.setattr("trajstore._core.buffer.replay_buffer.find_spec", lambda _: None)
    with pytest.raises(MissingDependencyError, match="zarr"):
        TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store", retention=limits)
    assert not (tmp_path / "store").exists()
