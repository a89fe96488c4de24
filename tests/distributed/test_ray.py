"""Stores as actors of a real Ray cluster: adding, drawing, kills of actors and nodes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trajstore import TrajectoryReplayBuffer
from trajstore.errors import ConfigurationError, StoreNotFoundError, StoreUnreachableError
from trajstore.inspection.verify import verify
from trajstore.sampling.weighted import WeightedSampler
from trajstore.testing.witness import check_batch, check_trajectory, witness

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.timeout(600)  # processes start, and start again

from ray.cluster_utils import Cluster  # noqa: E402

from trajstore.distributed import Channel, DistributedReplayBuffer, receive  # noqa: E402


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if ray.is_initialized():
        pytest.skip("another test's Ray session is running in this process")
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
    ray.init(address=found.address, log_to_driver=False)
    yield found
    ray.shutdown()
    found.shutdown()


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            pytest.fail("the condition was not met")
        time.sleep(0.1)


def create(name: str, path: Path, **options: Any) -> DistributedReplayBuffer:
    given: dict[str, Any] = {"actor_options": {"num_cpus": 0.1}, "deadline": 120.0, "patience": 60.0}
    return DistributedReplayBuffer.create(name, path, **{**given, **options})


def test_added_drawn_evicted_saved(cluster: Cluster, tmp_path: Path) -> None:
    with create("whole", tmp_path / "run", stores=2, refresh_interval=0.0) as handle:
        receipts = [handle.add_trajectories([witness(key), witness(key + 1)]) for key in range(0, 12, 2)]
        ids = [number for receipt in receipts for number in receipt.committed(120)]
        assert len(set(ids)) == 12
        handle.refresh()
        assert handle.size == 12
        assert handle.is_ready(12)
        assert {number % 1024 for number in ids} == {0, 1}  # both stores took some
        found = handle.sample(64)
        check_batch(found)
        out = {"curr_obs.tag": torch.zeros(64, dtype=torch.int64)}
        drawn = handle.draw(64)
        assert torch.equal(
            handle.read(drawn, columns=["curr_obs.tag"], out=out)["curr_obs"]["tag"], out["curr_obs.tag"]
        )
        assert torch.equal(handle.read(drawn)["curr_obs"]["tag"], out["curr_obs.tag"])
        for key, number in enumerate(ids):
            assert check_trajectory(handle.get(number)) == key
        assert len(handle.sample_trajectories(5)) == 5
        check_batch(handle.sample(32, sampler=WeightedSampler()))
        handle.evict(ids[:3])
        handle.evict(ids[:3])
        assert handle.size == 9
        handle.save_checkpoint(tmp_path / "saved")
        assert handle.get_stats()["num_trajectories"] == 9
        other = DistributedReplayBuffer.connect("whole")
        assert other.stores == [0, 1]
        with pytest.raises(ConfigurationError, match="is there already"):
            create("whole", tmp_path / "elsewhere")
        handle.stop()
    with TrajectoryReplayBuffer(sample_window_size=0) as buffer:
        buffer.load_checkpoint(tmp_path / "saved")
        assert sorted(buffer.trajectory_ids.tolist()) == sorted(ids[3:])
    for rank in range(2):
        assert verify(tmp_path / "run" / f"rank_{rank}").problems == []
    with pytest.raises(StoreNotFoundError):
        DistributedReplayBuffer.connect("whole")


def test_the_same_seed_draws_the_same(cluster: Cluster, tmp_path: Path) -> None:
    with create("seeded", tmp_path, seed=5) as handle:
        handle.add_trajectories([witness(key) for key in range(6)]).committed(120)
        first = handle.draw(100)
        state = handle.state_dict()
        second = handle.draw(100)
        other = DistributedReplayBuffer.connect("seeded", seed=5)
        assert torch.equal(torch.from_numpy(other.draw(100).ids), torch.from_numpy(first.ids))
        other.load_state_dict(state)
        assert torch.equal(torch.from_numpy(other.draw(100).samples), torch.from_numpy(second.samples))
        handle.stop()


def test_options_are_checked(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="patiense"):
        create("wrong", tmp_path, patiense=1)
    with pytest.raises(ConfigurationError, match="deadline"):
        create("wrong", tmp_path, deadline=0)
    with pytest.raises(ConfigurationError, match="stores"):
        create("wrong", tmp_path, stores=0)
    with pytest.raises(StoreNotFoundError, match="wrong"):
        DistributedReplayBuffer.connect("wrong")


def test_nothing_acknowledged_is_lost_when_an_actor_is_killed(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handle = create("killed", tmp_path, refresh_interval=0.0)
    receipts = []
    for key in range(24):
        receipts.append(handle.add_trajectories([witness(key)]))
        if key in (7, 15):
            ray.kill(ray.get_actor("killed/rank_0", namespace="trajstore"), no_restart=False)
    ids = [number for receipt in receipts for number in receipt.committed(120)]
    assert len(set(ids)) == 24
    for key, number in enumerate(ids):
        assert check_trajectory(handle.get(number)) == key
    handle.refresh()
    assert handle.size == 24  # none twice
    check_batch(handle.sample(64))
    handle.stop()
    assert verify(tmp_path / "rank_0").problems == []


def test_a_node_that_is_lost_is_left_out_and_comes_back(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = cluster.add_node(num_cpus=1, resources={"lost": 1})
    cluster.wait_for_nodes()
    handle = create("nodes", tmp_path, stores="per_node", patience=3.0, refresh_interval=0.0)
    assert handle.stores == [0, 1]
    far = next(rank for rank, where in handle.nodes().items() if where == node.node_id)
    near = 1 - far
    keys = {number: key for key in range(8) for number in handle.add_trajectories([witness(key)]).committed(120)}
    assert {number % 1024 for number in keys} == {near}  # the store on this node comes first
    on_far = ray.remote(_add_there).options(resources={"lost": 0.1}, num_cpus=0)
    keys.update(ray.get(on_far.remote("nodes", 100, 8)))
    handle.refresh()
    assert handle.size == 16
    cluster.remove_node(node, allow_graceful=False)
    with caplog.at_level(logging.WARNING):
        until(lambda: (handle.refresh(), handle.size)[1] == 8)
    assert "draws leave out its 8 trajectories" in caplog.text
    assert handle.get_stats()["absent_stores"] == 1
    check_batch(handle.sample(32))
    more = handle.add_trajectories([witness(50)]).committed(120)
    keys[more[0]] = 50
    with pytest.raises(StoreUnreachableError, match=f"rank_{far}"):
        DistributedReplayBuffer.connect("nodes", deadline=2.0).get(next(n for n in keys if n % 1024 == far))
    cluster.add_node(num_cpus=1)  # the machine is back, with its disk
    cluster.wait_for_nodes()
    handle = create("nodes", tmp_path, stores="per_node", refresh_interval=0.0)
    until(lambda: (handle.refresh(), handle.size)[1] == 17)
    for number, key in keys.items():
        assert check_trajectory(handle.get(number)) == key
    handle.stop()


def _add_there(name: str, first: int, count: int) -> dict[int, int]:
    with DistributedReplayBuffer.connect(name) as handle:
        return {handle.add_trajectories([witness(key)]).committed(120)[0]: key for key in range(first, first + count)}


def test_a_channel(cluster: Cluster, tmp_path: Path) -> None:
    channel = Channel.create("rollouts", maxsize=4)
    for key in range(3):
        Channel.connect("rollouts").put([witness(key)])
    assert (channel.qsize(), channel.empty(), channel.full()) == (3, False, False)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        assert receive(channel, buffer, 3, timeout=60) == 3
        for key, number in enumerate(buffer.trajectory_ids.tolist()):
            assert check_trajectory(buffer.get(number)) == key
    with pytest.raises(TimeoutError, match="empty"):
        channel.get(timeout=0.01)
    for key in range(4):
        channel.put(key)
    with pytest.raises(TimeoutError, match="full"):
        channel.put(4, timeout=0.01)
    with pytest.raises(StoreNotFoundError, match="absent"):
        Channel.connect("absent")
