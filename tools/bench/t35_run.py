"""T35: readers of a run of 5,000,000 trajectories in 1, 8 and 64 ranks, shares of it, and a learner's handle of Ray.

Each opens the run in a process of its own; bytes are the growth of its RSS without the kernels, for each trajectory
shown. The shards are holes, as in T8. The handle's index is filled with what 64 stores report of 10,000,000.

Besides, a refresh of a run of 200 ranks on a local disk without news, one of 8 ranks of 100,000 rollouts in which one
has committed 100, beside opening them, and ``points.save`` of a handle of 64 stores on
one disk. Their servers are in this process and called by threads, instead of actors called through Ray; once each has
got 16 rollouts of *agent* just before.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from tools.bench.report import Figure, Options
from tools.bench.t08_open import cost, load, write_store
from tools.bench.timing import Times, in_child, status_bytes
from tools.bench.workloads import agents, opened, smalls
from trajstore import Reader, TrajectoryReplayBuffer

if TYPE_CHECKING:
    from trajstore.distributed.server import StoreServer
    from trajstore.points import Points

RANKS, LEARNERS, SHARE = (1, 8, 64), 8, 3
IDLE_RANKS, PENDING, EACH, NEW = 200, 16, 100_000, 100


def figures(options: Options) -> Iterator[Figure]:
    """Yield bytes of readers and of the handle, and the time of opening a share."""
    total = options.count(5_000_000, 6_400)
    write_store(options.folder / "one", 1, 1)
    kernels = in_child(cost, load, options.folder / "one")["held"]
    for ranks in RANKS:
        run = options.folder / f"run_{ranks}"
        for rank in range(ranks):
            write_store(run / f"rank_{rank}", total // ranks, 100)
        whole = in_child(cost, load, run)
        each, seconds = (whole["held"] - kernels) / total, {"open_s": whole["seconds"]}
        yield Figure("T35", f"reader of {total:,} in {ranks} ranks, bytes each", each, 150.0, "bytes", details=seconds)
        if ranks == RANKS[-1]:
            yield from _shares(run, total, whole, kernels)
        shutil.rmtree(run)
    number = options.count(10_000_000, 6_400)
    held = in_child(_handle, number, RANKS[-1])
    name = f"handle of {number:,} trajectories in {RANKS[-1]} stores"
    yield Figure("T35", name, held["held"] / 1e6, 100.0, "MB", details={"peak_mb": held["peak"] / 1e6})
    yield _idle(options, max(2, options.count(IDLE_RANKS, 2)))
    yield _followed(options, options.count(EACH, 100))
    yield from _saving(options, max(2, options.count(RANKS[-1], 2)))


def _idle(options: Options, ranks: int) -> Figure:
    for rank in range(ranks):
        path = options.folder / "idle" / f"rank_{rank}"
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, sample_window_size=0) as buffer:
            buffer.add_trajectories(agents()[:1])
    times = Times(warmup=3)
    with Reader.open(options.folder / "idle") as reader:
        for _ in range(10 * options.repeats):
            times.take(reader.refresh)
    return Figure("T35", f"idle refresh of {ranks} ranks", times.ms, 10.0, "ms", details={"cpu_ms": times.processor_ms})


def _followed(options: Options, each: int) -> Figure:
    run, ranks, rollouts = options.folder / "followed", RANKS[1], smalls(NEW)
    for rank in range(ranks):
        write_store(run / f"rank_{rank}", each, 100)
    refreshes, openings = Times(warmup=1), Times(warmup=1)
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(opened(run / f"rank_{rank}")) for rank in range(ranks)]
        reader = stack.enter_context(Reader.open(run))
        for number in range(options.repeats + 1):
            writers[number % ranks].add_trajectories(rollouts)
            writers[number % ranks].flush()
            refreshes.take(reader.refresh)
            openings.take(partial(Reader.open, run)).close()
    name = f"refresh of {ranks} ranks of {each:,} after a commit of {NEW} ÷ opening them, processor time"
    details = {"refresh_ms": refreshes.processor_ms, "opening_ms": openings.processor_ms}
    return Figure("T35", name, refreshes.processor_ms / openings.processor_ms, 0.05, details=details)


def _saving(options: Options, stores: int) -> Iterator[Figure]:
    from trajstore.distributed.server import StoreServer

    servers = [StoreServer(str(options.folder / "saved"), rank, {}, ("", "", "")) for rank in range(stores)]
    points, rollouts, step = points_of(servers), agents()[:PENDING], 0
    for pending in (0, PENDING):
        times = Times(warmup=1)
        for _ in range(options.repeats + 1):
            for server in servers if pending else ():
                server._buffer.add_trajectories(rollouts)
            times.take(partial(points.save, step := step + 1))
        name = f"points.save of {stores} stores, {pending} rollouts just added to each"
        yield Figure("T35", name, times.seconds, 1.0, "s", details={"longest_s": max(times.clock)})
    for server in servers:
        server.close()


def points_of(servers: Sequence[StoreServer]) -> Points:
    """Return the points of a handle that calls servers in this process by threads."""
    from trajstore.distributed.handle import DistributedReplayBuffer

    handle: Any = DistributedReplayBuffer.__new__(DistributedReplayBuffer)
    handle._lock, handle._draws = Lock(), SimpleNamespace(state_dict=dict)
    handle._options, handle.flush = SimpleNamespace(patience=10.0), lambda: None
    handle._stores = _Called(servers)
    points: Points = handle.points
    return points


class _Called:
    """Calls servers as :class:`~trajstore.distributed.actors.Stores` calls actors."""

    name, deadline = "bench", 60.0

    def __init__(self, servers: Sequence[StoreServer]) -> None:
        self._servers = servers
        self._pool = ThreadPoolExecutor(len(servers))

    def look_whole(self) -> list[int]:
        return self.all_ranks

    look = look_whole

    @property
    def all_ranks(self) -> list[int]:
        return [*range(len(self._servers))]

    def submit(self, rank: int, method: str, *arguments: Any) -> Future[Any]:
        return self._pool.submit(getattr(self._servers[rank], method), *arguments)

    def call(self, rank: int, method: str, *arguments: Any) -> Any:
        return self.submit(rank, method, *arguments).result()

    def call_all(self, arguments: Mapping[int, Sequence[Any]], method: str, *_: float) -> dict[int, Any]:
        running = {rank: self.submit(rank, method, *given) for rank, given in arguments.items()}
        return {rank: call.result() for rank, call in running.items()}


def _shares(run: Path, total: int, whole: dict[str, float], kernels: float) -> Iterator[Figure]:
    shares = [in_child(cost, partial(load, rank=rank, ranks=LEARNERS), run) for rank in range(LEARNERS)]
    mine, name = shares[SHARE], f"share=({SHARE}, {LEARNERS})"
    each = (mine["held"] - kernels) * LEARNERS / total
    yield Figure("T35", f"{name}, bytes for each shown", each, 200.0, "bytes")
    opening = {"share_s": mine["seconds"], "whole_s": whole["seconds"]}
    yield Figure("T35", f"opening {name} ÷ the whole run", mine["seconds"] / whole["seconds"], 0.25, details=opening)
    together = sum(one["held"] - kernels for one in shares) / (whole["held"] - kernels)
    yield Figure("T35", f"memory of {LEARNERS} learners with a share each ÷ one whole reader", together, 1.5)


def _handle(total: int, stores: int) -> dict[str, float]:
    """Return the bytes that a handle's index holds, and the most while the stores' first answers come in."""
    from trajstore._core.sampling.base import Additions
    from trajstore.distributed.change_log import Changes
    from trajstore.distributed.run_index import RunIndex
    from trajstore.distributed.server import MOST_STORES

    index, before, each = RunIndex(), status_bytes("VmRSS"), total // stores
    names = np.random.default_rng(0).integers(1, 1 << 62, (stores, each))
    for rank in range(stores):
        ids = rank + MOST_STORES * np.arange(each, dtype=np.int64)
        lengths = np.full(each, 1, np.int64)
        additions = Additions(ids, lengths, np.zeros(each, np.int64), names=names[rank])
        index.take(rank, Changes("", 0, True, [additions], MOST_STORES * each))
    del additions, ids, lengths, names
    index.show(lambda shown: np.zeros(len(shown), np.int64))
    return {"held": status_bytes("VmRSS") - before, "peak": status_bytes("VmHWM") - before}
