"""T3: ``sample`` over TorchRL's replay buffer on ``LazyMemmapStorage``: same batch, same bytes, same disk.

Ours has nothing cached. The peer is sampled as its documentation shows (random sampler, with replacement). A second
figure sets batches as fast as they come from our prefetching loader beside those of TorchRL's prefetching buffer.
Skipped without ``torchrl``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tools.bench.report import Figure, Options, needs
from tools.bench.timing import in_turn, ratio
from tools.bench.workloads import RawGather, filled, image, raw_columns, state
from trajstore.loader import ReplayLoader

TARGET = 0.4
PREFETCH = 4


def figures(options: Options) -> Iterator[Figure]:
    """Yield one figure per workload.

    Raises:
        SkippedError: torchrl is not installed.
    """
    needs("torchrl")
    for workload in (state(options), image(options)):
        columns = raw_columns(workload.trajectories)
        folder = options.folder / f"{workload.name}_torchrl"
        peer, prefetching = _peer(columns, workload.batch, folder)
        with filled(options.folder / f"{workload.name}_ours", workload.trajectories, seed=0) as buffer:
            mine = partial(buffer.sample, workload.batch)
            works: list[Callable[[], object]] = [mine, peer, RawGather(columns, workload.batch, 1)]
            ours, theirs, raw = in_turn(works, options.repeats * 5, calls=5, warmup=5)
            details = {"peer_over_raw_gather": ratio(theirs, raw)}
            name = f"sample over TorchRL memmap, {workload.name}"
            yield Figure("T3", name, ratio(ours, theirs), TARGET, details=details)
            # Each makes batches ahead while the other is timed: a time is that of more batches than either keeps ready.
            with ReplayLoader(buffer, workload.batch, prefetch=PREFETCH) as loader:
                times = in_turn([partial(next, loader), prefetching], options.repeats, calls=10 * PREFETCH)
            name = f"loader over TorchRL's prefetching buffer, {workload.name}"
            yield Figure("T3", name, ratio(*times), TARGET)


def _peer(
    columns: dict[str, torch.Tensor], batch: int, folder: Path
) -> tuple[Callable[[], object], Callable[[], object]]:
    from tensordict import TensorDict
    from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

    samples = len(next(iter(columns.values())))
    storage: Any = LazyMemmapStorage(samples, scratch_dir=str(folder))
    buffer: Any = TensorDictReplayBuffer(storage=storage, batch_size=min(batch, samples))
    nested = TensorDict({tuple(name.split(".")): column for name, column in columns.items()}, batch_size=[samples])
    buffer.extend(nested)
    prefetching: Any = TensorDictReplayBuffer(storage=storage, batch_size=min(batch, samples), prefetch=PREFETCH)
    return buffer.sample, prefetching.sample
