"""T9: checkpoint of 10,000 trajectories on the same file system over ``cp -r``, and how long adders are held.

Agent workload, added in lists of 16, sharded as the writer does by default. ``ratio_to_synced_copy`` is to ``cp -r``
followed by ``sync -f``: a checkpoint is durable when it returns, what ``cp`` wrote is not. Held is the longest
``add_trajectories`` of one 1 KB trajectory, called every millisecond by another thread while checkpoints are made.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch

from tools.bench.report import Figure, Options
from tools.bench.timing import alternate, percentile, ratio
from tools.bench.workloads import agent_trajectory, small_trajectory
from trajstore import AgentTrajectory, TrajectoryReplayBuffer, WriterOptions

LIST = 16


def figures(options: Options) -> Iterator[Figure]:
    """Yield the figures of the default sharding, and of one trajectory per shard, at a tenth of the number."""
    total = options.count(10_000, 32)
    yield from _of_store(options, "default", total, WriterOptions())
    yield from _of_store(options, "one per shard", options.count(1000, 16), WriterOptions(shard_bytes=1, threads=8))


def _of_store(options: Options, sharding: str, total: int, writer: WriterOptions) -> Iterator[Figure]:
    generator = torch.Generator().manual_seed(0)
    pool = [agent_trajectory(generator, number) for number in range(256)]
    folder = options.folder / "store"
    with TrajectoryReplayBuffer(enable_cache=False, auto_save=True, auto_save_path=folder, writer=writer) as buffer:
        for start in range(0, total, LIST):
            at = start % len(pool)
            buffer.add_trajectories(pool[at : at + min(LIST, total - start)])
        buffer.flush()
        files = sum(1 for path in (folder / "shards").rglob("*") if path.is_file())
        ours, plain, synced = alternate(
            [
                partial(buffer.save_checkpoint, options.folder / "checkpoint"),
                partial(_copy, folder, options.folder / "copy", sync=False),
                partial(_copy, folder, options.folder / "copy", sync=True),
            ],
            options.repeats,
            warmup=1,
        )
        name = f"checkpoint of {total:,} trajectories, {sharding}"
        yield Figure(
            "T9",
            f"{name}, over cp -r",
            ratio(ours, plain),
            0.1 if sharding == "default" else 0.25,
            details={"ratio_to_synced_copy": ratio(ours, synced), "files": files, "checkpoint_s": median(ours)},
        )
        held, usual = _held(buffer, small_trajectory(generator, 0), options)
        target = 20.0 if sharding == "default" else None
        yield Figure(
            "T9",
            f"{name}, adders held",
            max(held) * 1e3,
            target,
            "ms",
            details={"p99_ms": percentile(held, 0.99) * 1e3, "longest_without_checkpoint_ms": max(usual) * 1e3},
        )
    shutil.rmtree(options.folder / "checkpoint")
    shutil.rmtree(folder)


def _copy(source: Path, target: Path, *, sync: bool) -> None:
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run(["cp", "-r", source, target], check=True)
    if sync:
        subprocess.run(["sync", "-f", target], check=True)


def _held(
    buffer: TrajectoryReplayBuffer, trajectory: AgentTrajectory, options: Options
) -> tuple[list[float], list[float]]:
    """Return the times inside ``add_trajectories`` with checkpoints being made, and for as long without."""
    kept: list[list[float]] = []
    for checkpoints in (True, False):
        times: list[float] = []
        stop = threading.Event()
        thread = threading.Thread(target=_add_until, args=(stop, buffer, trajectory, times))
        thread.start()
        start = time.perf_counter()
        if checkpoints:
            for _ in range(options.repeats):
                buffer.save_checkpoint(options.folder / "checkpoint")
            took = time.perf_counter() - start
        else:
            time.sleep(took)
        stop.set()
        thread.join()
        kept.append(times)
    return kept[0], kept[1]


def _add_until(
    stop: threading.Event, buffer: TrajectoryReplayBuffer, trajectory: AgentTrajectory, times: list[float]
) -> None:
    while not stop.is_set() or not times:
        start = time.perf_counter()
        buffer.add_trajectories([trajectory])
        times.append(time.perf_counter() - start)
        time.sleep(0.001)
