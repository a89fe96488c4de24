"""T3: ``sample`` over TorchRL's replay buffer on ``LazyMemmapStorage``: same batch, same bytes, same disk.

Ours has nothing cached. The peer is sampled as its documentation shows (random sampler, with replacement) and, as
``ratio_to_storage_alone``, by reading drawn rows from its storage without a sampler. A second figure sets batches as
fast as they come from our prefetching loader beside those of TorchRL's prefetching buffer. Skipped without ``torchrl``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tools.bench.report import Figure, Options, needs
from tools.bench.timing import alternate, ratio
from tools.bench.workloads import RawGather, Workload, image, raw_columns, state
from trajstore import TrajectoryReplayBuffer
from trajstore.feeding import ReplayLoader

TARGET = 0.4
PREFETCH = 4


def figures(options: Options) -> Iterator[Figure]:
    """Yield one figure per workload.

    Raises:
        SkippedError: torchrl is not installed.
    """
    needs("torchrl")
    for make in (state, image):
        workload = make(options)
        columns = raw_columns(workload.trajectories)
        folder = options.folder / f"{workload.name}_torchrl"
        peer, storage_alone, prefetching = _peer(columns, workload.batch, folder)
        with TrajectoryReplayBuffer(
            seed=0,
            enable_cache=False,
            sample_window_size=0,
            auto_save=True,
            auto_save_path=options.folder / f"{workload.name}_ours",
        ) as buffer:
            buffer.add_trajectories(workload.trajectories)
            buffer.flush()
            yield _figure(workload, buffer, [peer, storage_alone, RawGather(columns, workload.batch, 1)], options)
            yield _prefetched(workload, buffer, prefetching, options)


def _figure(
    workload: Workload, buffer: TrajectoryReplayBuffer, peers: list[Callable[[], object]], options: Options
) -> Figure:
    def ours() -> object:
        return buffer.sample(workload.batch)

    times = alternate([ours, *peers], options.repeats * 5, calls=5, warmup=5)
    return Figure(
        "T3",
        f"sample over TorchRL memmap, {workload.name}",
        ratio(times[0], times[1]),
        TARGET,
        details={
            "ratio_to_storage_alone": ratio(times[0], times[2]),
            "peer_over_raw_gather": ratio(times[1], times[3]),
        },
    )


def _prefetched(
    workload: Workload, buffer: TrajectoryReplayBuffer, peer: Callable[[], object], options: Options
) -> Figure:
    # Each makes batches ahead while the other is timed, so a time is that of more batches than either keeps ready.
    with ReplayLoader(buffer, workload.batch, prefetch=PREFETCH) as loader:
        times = alternate([lambda: next(loader), peer], options.repeats, calls=10 * PREFETCH)
    return Figure("T3", f"loader over TorchRL's prefetching buffer, {workload.name}", ratio(*times), TARGET)


def _peer(
    columns: dict[str, torch.Tensor], batch: int, folder: Path
) -> tuple[Callable[[], object], Callable[[], object], Callable[[], object]]:
    from tensordict import TensorDict
    from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

    samples = len(next(iter(columns.values())))
    storage: Any = LazyMemmapStorage(samples, scratch_dir=str(folder))
    buffer: Any = TensorDictReplayBuffer(storage=storage, batch_size=min(batch, samples))
    nested = TensorDict({tuple(name.split(".")): column for name, column in columns.items()}, batch_size=[samples])
    buffer.extend(nested)
    generator = torch.Generator().manual_seed(2)

    def storage_alone() -> object:
        return storage.get(torch.randint(0, samples, (min(batch, samples),), generator=generator))

    prefetching: Any = TensorDictReplayBuffer(storage=storage, batch_size=min(batch, samples), prefetch=PREFETCH)
    return buffer.sample, storage_alone, prefetching.sample
