"""A store with more shards than a process may have descriptors. See docs/crash-testing.md."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from tests.stores import opened
from tests.support.witness import check_batch, check_trajectory, witness
from tools.crash.child import DESCRIPTORS
from tools.crash.forked import forking
from trajstore import TrajectoryReplayBuffer, WriterOptions
from trajstore.operations.verify import verify


@pytest.mark.parametrize("name", ["pt", "zarr"])
def test_a_whole_session_with_few_descriptors(tmp_path: Path, name: str) -> None:
    process = forking().Process(target=_use, args=(tmp_path, name))
    process.start()
    process.join()
    assert process.exitcode == 0


def _use(folder: Path, name: str) -> None:
    """Write, sample, read, pin, evict, save, load and verify more shards than descriptors."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    torch.set_num_threads(1)
    shards = DESCRIPTORS + 20 if name == "pt" else DESCRIPTORS // 9 + 10  # zarr has a file per column
    options = WriterOptions(threads=2, shard_bytes=1, commit_interval=0.0)
    with opened(folder / "store", trajectory_format=name, enable_cache=False, writer=options) as buffer:
        buffer.add_trajectories([witness(key) for key in range(shards)])
        buffer.flush()
        check_batch(buffer.sample(4096))
        for number in buffer.trajectory_ids.tolist():
            check_trajectory(buffer.get(number))
        buffer.points.pin("all")
        buffer.evict(list(range(0, shards, 2)))
        buffer.save_checkpoint(folder / "checkpoint")
    for path, pin, count in ((folder / "store", "all", shards), (folder / "checkpoint", None, shards // 2)):
        with TrajectoryReplayBuffer(sample_window_size=0, enable_cache=False) as reader:
            reader.load_checkpoint(path, pin=pin)
            assert len(reader) == count
            check_batch(reader.sample(4096))
        assert verify(path).problems == []
