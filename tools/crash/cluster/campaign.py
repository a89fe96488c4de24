"""Producers on a Ray cluster of three nodes; actors, and once a whole node, are killed while they add."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from tests.support.witness import WitnessError, check_batch, check_trajectory, witness
from tools.campaigns import Result
from trajstore import TrajectoryReplayBuffer
from trajstore.distributed import DistributedReplayBuffer
from trajstore.errors import TrajstoreError
from trajstore.operations.verify import verify

NAME = "campaign"
_KEYS = 1 << 20  # of one producer
_LONGEST_START = 120.0  # seconds
_MOMENT = 1.0  # seconds; a producer asks a store that did not answer again after two at the most


def produce(number: int, seconds: float) -> tuple[dict[int, int], int]:
    """Add trajectories for a while; return the keys by acknowledged id, and the number of errors."""
    acknowledged: dict[int, int] = {}
    errors = 0
    end = time.monotonic() + seconds
    key = number * _KEYS
    open_receipts: list[tuple[Any, list[int]]] = []
    with DistributedReplayBuffer.connect(NAME, patience=5.0, deadline=120.0) as handle:
        while time.monotonic() < end or open_receipts:
            try:
                if time.monotonic() < end and len(open_receipts) < 8:
                    keys = list(range(key, key + 1 + key % 3))
                    key = keys[-1] + 1
                    open_receipts.append((handle.add_trajectories([witness(one) for one in keys]), keys))
                    continue
                receipt, keys = open_receipts[0]
                acknowledged.update(zip(receipt.committed(), keys, strict=True))
                open_receipts.pop(0)
            except TrajstoreError:
                errors += 1
                if time.monotonic() > end + 300:
                    break
    return acknowledged, errors


def run(folder: Path, seconds: float, producers: int, seed: int, progress: object = None) -> Result:
    """Run a campaign in an empty folder; ``progress`` is told nothing.

    Raises:
        StoreUnreachableError: the stores do not start.
    """
    chance = random.Random(seed)
    result = Result()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"promises": producers}})
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
        cluster.wait_for_nodes()
        handle = DistributedReplayBuffer.create(
            NAME, folder, stores=3, actor_options={"num_cpus": 0.1}, shared_path=True, deadline=120.0
        )
        task = ray.remote(max_retries=0)(produce)
        # On the node that stays: a promise that died with its producer cannot be checked.
        work = [
            task.options(num_cpus=0, resources={"promises": 1}).remote(number, seconds) for number in range(producers)
        ]
        _let_them_begin(handle, producers)
        end = time.monotonic() + seconds
        node_dies = time.monotonic() + seconds / 2
        while time.monotonic() < end:
            time.sleep(chance.uniform(1.0, 4.0))
            rank = chance.randrange(3)
            try:
                actor = ray.get_actor(f"{NAME}/rank_{rank}", namespace="trajstore")
                if chance.random() < 0.75:  # else it is often killed while it starts, and has nothing to lose
                    _let_it_work(actor, end)
                ray.kill(actor, no_restart=False)
                result.counts["actors killed"] += 1
            except ValueError as error:
                result.problems.append(f"rank_{rank} has no actor: {error}")
            if nodes and time.monotonic() > node_dies:
                cluster.remove_node(nodes.pop(), allow_graceful=False)
                result.counts["nodes killed"] += 1
                node_dies = end + 1e9
        acknowledged: dict[int, int] = {}
        for answer in work:
            _collect(answer, acknowledged, result)
        check_batch(handle.sample(256))
        handle.stop()
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]
    _judge(folder, acknowledged, result)
    return result


def _let_them_begin(handle: DistributedReplayBuffer, producers: int) -> None:
    """Wait until there is something to lose: on a busy machine producers start for longer than a campaign takes."""
    end = time.monotonic() + _LONGEST_START
    while not handle.is_ready(producers) and time.monotonic() < end:
        time.sleep(0.2)


def _let_it_work(actor: Any, end: float) -> None:
    """Wait until an actor that starts again has started, and a moment longer, in which producers find it."""
    with suppress(ray.exceptions.RayError):  # it is lost with its node
        ray.get(actor.describe.remote(), timeout=max(0.1, end - time.monotonic()))
        time.sleep(_MOMENT)


def _collect(answer: Any, acknowledged: dict[int, int], result: Result) -> None:
    try:
        keys, errors = ray.get(answer, timeout=600)
    except ray.exceptions.RayError as error:
        result.problems.append(f"a producer died: {error}")
        return
    for number in acknowledged.keys() & keys.keys():
        result.problems.append(f"id {number} was given twice")
    acknowledged.update(keys)
    result.counts["errors told to producers"] += errors


def _judge(folder: Path, acknowledged: dict[int, int], result: Result) -> None:
    result.counts["trajectories acknowledged"] = len(acknowledged)
    for part in sorted(folder.glob("rank_*")):
        result.problems += [f"{part.name}: {problem}" for problem in verify(part).problems]
    with TrajectoryReplayBuffer(sample_window_size=0) as buffer:
        buffer.load_checkpoint(folder)
        ids = buffer.trajectory_ids.tolist()
        result.counts["stored"] = len(ids)
        keys: dict[int, int] = {}
        for number in ids:
            try:
                key = check_trajectory(buffer.get(number))
            except WitnessError as error:
                result.problems.append(f"trajectory {number}: {error}")
                continue
            if key in keys:
                result.problems.append(f"key {key} is stored twice, as {keys[key]} and {number}")
            keys[key] = number
    for number, key in acknowledged.items():
        if key not in keys:
            result.problems.append(f"key {key}, acknowledged as {number}, is lost")
