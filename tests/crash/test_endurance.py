"""Few file descriptors, and a store in long use. See docs/crash-testing.md."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from tests.stores import opened
from tests.support.witness import check_batch, check_trajectory, witness
from tools.crash.forked import forking
from tools.crash.interrupted import DESCRIPTORS
from tools.soak.measure import Sample, growth
from tools.soak.session import Plan, judge, soak
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


def test_a_soak_of_seconds(tmp_path: Path) -> None:
    plan = Plan(seconds=3, keep=24, scale=8, pause=0.0, samples=6, followers=1)
    result = soak(tmp_path, plan, seed=2)
    assert judge(result, cost=False) == []
    assert min(result.counts[figure] for figure in ("trajectories added", "rows checked by followers")) > 0


def test_growth_is_seen() -> None:
    flat = [Sample(1, 1, 1, 1 << 30, 40, 900, 9, 3.0)] * 30
    assert growth([*flat, *flat], ["memory", "descriptors", "maps", "threads", "log", "cost"]) == []
    more = Sample(1, 1, 1 << 25, 2 << 30, 80, 2000, 20, 9.0)
    findings = growth([*flat, *[more] * 30], ["memory", "descriptors", "maps", "threads", "log", "cost"])
    assert [text.split()[0] for text in findings] == ["memory", "descriptors", "maps", "threads", "log", "cost"]
