"""T9: checkpoint of 10,000 trajectories on the same file system over ``cp -r``, and how long adders are held.

Agent workload, added in lists of 16, sharded as the writer does by default. ``cp`` copies the checkpoint: the store's
own files may be replaced while it runs. A checkpoint is durable when it returns, what ``cp`` wrote is not. Held is the
longest ``add_trajectories`` of one 1 KB trajectory, called every millisecond by another thread while checkpoints are
made.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tools.bench.report import Figure, Options
from tools.bench.timing import in_turn, percentile, ratio, seconds
from tools.bench.workloads import add_all, agents, opened, smalls
from tools.meanwhile import meanwhile
from trajstore import AgentTrajectory, TrajectoryReplayBuffer, WriterOptions


def figures(options: Options) -> Iterator[Figure]:
    """Yield the figures of the default sharding, and of one trajectory per shard, at a tenth of the number."""
    total = options.count(10_000, 32)
    yield from _of_store(options, "default", total, WriterOptions())
    yield from _of_store(options, "one per shard", options.count(1000, 16), WriterOptions(shard_bytes=1, threads=8))


def _of_store(options: Options, sharding: str, total: int, writer: WriterOptions) -> Iterator[Figure]:
    folder, checkpoint, copy = options.folder / "store", options.folder / "checkpoint", options.folder / "copy"
    name = f"checkpoint of {total:,} trajectories, {sharding}"
    is_default = sharding == "default"
    with opened(folder, writer=writer) as buffer:
        add_all(buffer, agents(), total)
        files = sum(1 for path in (folder / "shards").rglob("*") if path.is_file())
        buffer.save_checkpoint(checkpoint)
        works = [partial(buffer.save_checkpoint, checkpoint), partial(_copy, checkpoint, copy)]
        ours, plain = in_turn(works, options.repeats, warmup=1)
        details = {"files": files, "checkpoint_s": ours.seconds}
        yield Figure("T9", f"{name}, over cp -r", ratio(ours, plain), 0.1 if is_default else 0.25, details=details)
        held: list[float] = []
        add = partial(_add, buffer, smalls(1), held)
        add()
        with meanwhile(add, 0.001):
            for _ in range(options.repeats):
                buffer.save_checkpoint(checkpoint)
        details = {"p99_ms": percentile(held, 0.99) * 1e3}
        target = 20.0 if is_default else None
        yield Figure("T9", f"{name}, adders held", max(held) * 1e3, target, "ms", details=details)
    shutil.rmtree(checkpoint)
    shutil.rmtree(folder)


def _copy(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run(["cp", "-r", source, target], check=True)


def _add(buffer: TrajectoryReplayBuffer, made: list[AgentTrajectory], times: list[float]) -> None:
    times.append(seconds(partial(buffer.add_trajectories, made)))
