"""The writer's side: adds, evicts, pins, saves, and looks now and then at what all of it takes."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.witness import check_batch, witness
from tools import campaigns
from tools.campaigns import start
from tools.crash.forked import forking
from tools.soak.follower import follow
from tools.soak.measure import Sample, bytes_of, growth, taken_by
from trajstore import Retention, TrajectoryReplayBuffer, WriterOptions
from trajstore._core.columns.fields import walk
from trajstore.operations.verify import verify
from trajstore.trajectory import Trajectory

_PATIENCE = 30.0
"""Seconds in which followers must have gone on and space must have been given back."""


@dataclass(frozen=True)
class Plan:
    """What is done.

    Attributes:
        seconds: how long.
        keep: trajectories that retention leaves.
        scale: T of the witnesses is multiplied by it.
        pause: seconds between two additions.
        samples: how often it is measured.
        followers: processes that follow.
    """

    seconds: float
    keep: int = 400
    scale: int = 48
    pause: float = 0.05
    samples: int = 120
    followers: int = 2


@dataclass(kw_only=True)
class Result(campaigns.Result):
    """What was found.

    Attributes:
        samples: in the order of time.
        worst: shard bytes over live bytes, at the worst moment.
    """

    samples: list[Sample] = field(default_factory=list)
    worst: float = 0.0


def soak(folder: Path, plan: Plan, seed: int, progress: Callable[[Result], None] | None = None) -> Result:
    """Use a store for a while.

    Args:
        folder: an empty folder to work in.
        plan: the calls.
        seed: of the additions, evictions and pins.
        progress: called after each sample.
    """
    context = forking()
    begun, done = context.Semaphore(0), context.Event()
    session = _Session(folder, plan, seed)
    result = session.result
    pipes, processes = [], []
    for number in range(plan.followers):
        ours, theirs = context.Pipe()
        arguments = (str(folder / "store"), plan.scale, seed + number, begun, done, theirs)
        process = start(follow, *arguments)
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        session.add()
        for _ in processes:
            begun.acquire(timeout=_PATIENCE)  # what they load is no growth; who ended before says so in the end
        session.run([process.pid or 0 for process in processes], progress)
    finally:
        done.set()
        for ours, process in zip(pipes, processes, strict=True):
            if not ours.poll(_PATIENCE):
                result.problems.append("a follower did not end")
                process.kill()
            elif isinstance(found := ours.recv(), int):
                result.counts["rows checked by followers"] += found
            else:
                result.problems.append(str(found))
            process.join()
        session.buffer.close()
    result.problems += [f"{trouble.file}: {trouble.message}" for trouble in verify(folder / "store").problems]
    return result


class _Session:
    def __init__(self, folder: Path, plan: Plan, seed: int) -> None:
        self.folder, self.plan, self.chance = folder, plan, random.Random(seed)
        self.result = Result()
        self.sizes: dict[int, int] = {}
        self.pins: dict[str, set[int]] = {}
        self.key = 0
        self.costs: list[float] = []
        self.buffer = TrajectoryReplayBuffer(
            auto_save=True,
            auto_save_path=folder / "store",
            sample_window_size=0,
            retention=Retention(max_trajectories=plan.keep),
            writer=WriterOptions(threads=2, shard_bytes=1 << 20),
        )

    def run(self, followers: list[int], progress: Callable[[Result], None] | None) -> None:
        begin = time.monotonic()
        every = self.plan.seconds / self.plan.samples
        # On a slow machine the samples take longer than they should.
        while (now := time.monotonic() - begin) < self.plan.seconds or len(self.result.samples) < self.plan.samples:
            self.step()
            if now >= every * (len(self.result.samples) + 1):
                self.measure(followers)
                if progress is not None:
                    progress(self.result)
            time.sleep(self.plan.pause)

    def step(self) -> None:
        actions = (self.add, self.evict, self.sample, self.pin, self.unpin, self.checkpoint)
        self.chance.choices(actions, weights=(70, 10, 10, 2, 3, 1))[0]()

    def add(self) -> None:
        count = self.chance.randint(1, 8)
        made = [witness(self.key + number, self.plan.scale) for number in range(count)]
        self.key += count
        sizes = [_bytes_of(one) for one in made]
        begin = time.perf_counter()
        ids = self.buffer.add_trajectories(made)
        self.buffer.flush()
        taken = time.perf_counter() - begin
        self.costs.append(taken / self.plain_write(sum(sizes)))
        self.sizes |= dict(zip(ids, sizes, strict=True))
        self.result.counts["trajectories added"] += count

    def plain_write(self, nbytes: int) -> float:
        begin = time.perf_counter()
        with open(self.folder / "plain", "wb", buffering=0) as file:
            file.write(bytes(nbytes))
            os.fdatasync(file.fileno())
        return time.perf_counter() - begin

    def ids(self) -> list[int]:
        found: list[int] = self.buffer.trajectory_ids.tolist()
        return found

    def evict(self) -> None:
        ids = self.ids()
        self.buffer.evict(sorted(self.chance.sample(ids, len(ids) // 10)))

    def sample(self) -> None:
        if len(self.buffer):
            check_batch(self.buffer.sample(64))

    def pin(self) -> None:
        if len(self.pins) < 2:
            name = f"pin{self.key}"
            self.buffer.points.pin(name)
            self.pins[name] = set(self.ids())

    def unpin(self) -> None:
        if self.pins:
            name = next(iter(self.pins))
            self.buffer.points.remove(name)
            del self.pins[name]

    def checkpoint(self) -> None:
        self.buffer.save_checkpoint(self.folder / "checkpoint")

    def live(self) -> int:
        kept = set(self.ids()).union(*self.pins.values())
        self.sizes = {number: size for number, size in self.sizes.items() if number in kept}
        return sum(self.sizes.values())

    def measure(self, followers: list[int]) -> None:
        """Wait until followers hold nothing evicted, then take a sample."""
        limit = time.monotonic() + _PATIENCE
        while True:
            live = self.live()
            shards, log = bytes_of(self.folder / "store")
            if shards <= 2 * live or time.monotonic() > limit:
                break
            time.sleep(1.0)
            ids = self.ids()
            self.buffer.evict(ids[:1])  # the writer gives space back when something changes
        self.result.worst = max(self.result.worst, shards / max(live, 1))
        if shards > 2 * live:
            self.result.problems.append(
                f"sample {len(self.result.samples)}: {shards:,} bytes of shards hold {live:,} bytes that can be read"
            )
        try:
            taken = taken_by([os.getpid(), *followers])
        except FileNotFoundError:
            self.result.problems.append("a follower is gone")
            raise
        cost = statistics.median(self.costs)
        self.costs = self.costs[-1:]
        self.result.samples.append(Sample(shards, live, log, cost=cost, **taken))


def _bytes_of(trajectory: Trajectory) -> int:
    return sum(value.nbytes for _, value in walk(vars(trajectory)) if hasattr(value, "nbytes"))


def judge(result: Result, *, cost: bool = True) -> list[str]:
    """Return everything that is wrong, growth included; that of ``cost`` only means something over minutes."""
    names = ["memory", "descriptors", "maps", "threads", "log"]
    return result.problems + growth(result.samples, [*names, "cost"] if cost else names)
