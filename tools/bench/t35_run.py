"""T35: readers of a run of 5,000,000 trajectories in 1, 8 and 64 ranks, shares of it, and a learner's handle of Ray.

Each opens the run in a process of its own; bytes are the growth of its RSS without the kernels, for each trajectory
shown. The shards are holes, as in T8. The handle's index is filled with what 64 stores report of 10,000,000.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from tools.bench.report import Figure, Options
from tools.bench.t08_open import cost, load, write_store
from tools.bench.timing import in_child, status_bytes

RANKS, LEARNERS, SHARE = (1, 8, 64), 8, 3


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
