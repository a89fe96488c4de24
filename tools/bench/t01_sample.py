"""T1, T2: ``sample`` with everything cached, and with nothing cached, over the raw gather.

T2 has its files in the page cache and mapped, as after the first batches. The figure is the less favourable of two:
with torch at its default number of threads, and at one (threads of a busy machine wait for each other).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tools.bench.report import Figure, Options
from tools.bench.timing import in_turn, ratio, torch_threads
from tools.bench.workloads import RawGather, Workload, filled, image, raw_columns, state
from trajstore import TrajectoryReplayBuffer
from trajstore._core.columns.fields import walk

SEED = 5
_CALLS = 10


def cached(options: Options) -> Iterator[Figure]:
    """Yield T1 of both workloads."""
    for workload in (state(options), image(options)):
        with TrajectoryReplayBuffer(seed=SEED, sample_window_size=0) as buffer:
            buffer.add_trajectories(workload.trajectories)
            yield _compare("T1", f"sample, cached, {workload.name}", 1.0, buffer, workload, options)


def uncached(options: Options) -> Iterator[Figure]:
    """Yield T2 of both workloads."""
    for workload in (state(options), image(options)):
        with filled(options.folder / workload.name, workload.trajectories, seed=SEED) as buffer:
            yield _compare("T2", f"sample, nothing cached, {workload.name}", 1.1, buffer, workload, options)


def _compare(
    goal: str, name: str, target: float, buffer: TrajectoryReplayBuffer, workload: Workload, options: Options
) -> Figure:
    columns = raw_columns(workload.trajectories)
    check_equal(buffer, RawGather(columns, workload.batch, SEED))
    ratios: dict[int, float] = {}
    details: dict[str, float] = {"batch": workload.batch}
    for threads in sorted({1, torch.get_num_threads()}):
        with torch_threads(threads):
            raw = RawGather(columns, workload.batch, SEED + 1)
            works: list[Callable[[], object]] = [lambda: buffer.sample(workload.batch), raw]
            ours, peer = in_turn(works, options.repeats * 5, calls=_CALLS, warmup=7)
            ratios[threads] = details[f"ratio_torch_threads_{threads}"] = ratio(ours, peer)
            details[f"raw_ms_{threads}"] = peer.ms
    return Figure(goal, name, max(ratios.values()), target, details=details)


def check_equal(buffer: TrajectoryReplayBuffer, raw: RawGather) -> None:
    """Make sure that both give the same batch for a seed.

    Raises:
        RuntimeError: they don't.
    """
    expected = raw()
    batch = buffer.sample(len(next(iter(expected.values()))))
    drawn = {".".join(path): value for path, value in walk(batch, ()) if isinstance(value, torch.Tensor)}
    if drawn.keys() != expected.keys() or any(not torch.equal(drawn[name], expected[name]) for name in expected):
        raise RuntimeError("sample and raw gather differ: there is nothing to compare")
