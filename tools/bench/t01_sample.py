"""T1, T2: ``sample`` with everything cached, and with nothing cached, over the raw gather.

T2 has its files in the page cache and mapped, as after the first batches; ``first_batches`` tells what the first
ones of a newly opened store cost, while its pages come into the process. The figure is the less favourable of two:
with torch at its default number of threads, and at one (threads of a busy machine wait for each other).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from tools.bench.report import Figure, Options
from tools.bench.timing import alternate, ratio
from tools.bench.workloads import RawGather, Workload, image, raw_columns, state
from trajstore import TrajectoryReplayBuffer
from trajstore.columns.fields import walk

SEED = 5
_CALLS = 10
_FIRST = 20


def figures(options: Options, names: tuple[str, ...] = ("T1", "T2")) -> Iterator[Figure]:
    """Yield the figures of both workloads."""
    for make in (state, image):
        workload = make(options)
        columns = raw_columns(workload.trajectories)
        if "T1" in names:
            yield _cached(workload, columns, options)
        if "T2" in names:
            yield from _uncached(workload, columns, options)


def _cached(workload: Workload, columns: dict[str, torch.Tensor], options: Options) -> Figure:
    with TrajectoryReplayBuffer(seed=SEED, sample_window_size=0) as buffer:
        buffer.add_trajectories(workload.trajectories)
        check_equal(buffer, RawGather(columns, workload.batch, SEED))
        return _compare("T1", f"sample, cached, {workload.name}", 1.0, buffer, columns, workload, options)


def _uncached(workload: Workload, columns: dict[str, torch.Tensor], options: Options) -> Iterator[Figure]:
    for kind, target in (("pt", 1.1), ("zarr", None)):
        open_buffer = partial(
            TrajectoryReplayBuffer,
            seed=SEED,
            enable_cache=False,
            sample_window_size=0,
            auto_save=True,
            auto_save_path=options.folder / f"{workload.name}_{kind}",
            trajectory_format=kind,
        )
        with open_buffer() as buffer:
            for trajectory in workload.trajectories:
                buffer.add_trajectories([trajectory])
        with open_buffer() as buffer:
            raw = RawGather(columns, workload.batch, SEED)
            check_equal(buffer, raw)
            first = alternate([lambda: buffer.sample(workload.batch), raw], _FIRST, warmup=0)
            name = f"sample, nothing cached, {workload.name}, {kind}"
            figure = _compare("T2", name, target, buffer, columns, workload, options)
            yield replace(figure, details={**figure.details, "first_batches": sum(first[0]) / sum(first[1])})


def _compare(
    goal: str,
    name: str,
    target: float | None,
    buffer: TrajectoryReplayBuffer,
    columns: dict[str, torch.Tensor],
    workload: Workload,
    options: Options,
) -> Figure:
    default = torch.get_num_threads()
    ratios: dict[int, float] = {}
    details: dict[str, float] = {}
    try:
        for threads in sorted({1, default}):
            torch.set_num_threads(threads)
            raw = RawGather(columns, workload.batch, SEED + 1)
            ours, peer = alternate(
                [lambda: buffer.sample(workload.batch), raw], options.repeats * 5, calls=_CALLS, warmup=5
            )
            ratios[threads] = details[f"ratio_torch_threads_{threads}"] = ratio(ours, peer)
            details[f"raw_ms_{threads}"] = sorted(peer)[len(peer) // 2] * 1e3
    finally:
        torch.set_num_threads(default)
    return Figure(goal, name, max(ratios.values()), target, details={"batch": workload.batch, **details})


def check_equal(buffer: TrajectoryReplayBuffer, raw: RawGather) -> None:
    """Make sure that both give the same batch for a seed.

    Raises:
        RuntimeError: they don't.
    """
    expected = raw()
    drawn = dict(walk_batch(buffer.sample(len(next(iter(expected.values()))))))
    if drawn.keys() != expected.keys() or any(not torch.equal(drawn[name], expected[name]) for name in expected):
        raise RuntimeError("sample and raw gather differ: there is nothing to compare")


def walk_batch(batch: dict[str, object]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a nested batch with their dotted names."""
    for path, value in walk(batch, ()):
        if isinstance(value, torch.Tensor):
            yield ".".join(path), value
