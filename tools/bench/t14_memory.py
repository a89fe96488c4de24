"""T14: memory of a process that samples uniformly from a store four times its cache and memory limit.

Anonymous memory (``RssAnon``) of a process of its own, at its highest, above the limit: at most 300 MB. Pages of
mapped files are the page cache's and go when memory is short. ``pkl`` cannot be mapped, so whatever a batch needs
is decoded; its batches are of 32.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import orjson
import torch

from tools.bench.report import Figure, Options
from tools.bench.timing import in_child, status_bytes
from tools.bench.workloads import state_trajectory
from trajstore import TrajectoryReplayBuffer

LIMIT = 256 << 20
TARGET_MB = 300.0


def figures(options: Options) -> Iterator[Figure]:
    """Yield a figure for a mapped and one for a decoded format.

    Raises:
        SkippedError: the kernel does not tell a process's anonymous memory.
    """
    status_bytes("RssAnon")
    limit = options.count(LIMIT, 4 << 20)
    generator = torch.Generator().manual_seed(0)
    pool = [state_trajectory(generator) for _ in range(8)]
    for kind, batch in (("pt", 1024), ("pkl", 32)):
        folder = options.folder / kind
        with TrajectoryReplayBuffer(
            enable_cache=False, auto_save=True, auto_save_path=folder, trajectory_format=kind
        ) as buffer:
            while buffer.total_samples * 768 < 4 * limit:
                buffer.add_trajectories(pool)
        found = in_child("tools.bench.t14_memory", folder, kind, limit, batch, options.count(200, 3))
        yield Figure(
            "T14",
            f"anonymous memory above the limit, {kind}",
            (found["anonymous"] - limit) / 1e6,
            TARGET_MB,
            "MB",
            details={"limit_mb": limit / 1e6, "peak_mb": found["anonymous"] / 1e6, "before_mb": found["before"] / 1e6},
        )


def _child(folder: str, kind: str, *numbers: str) -> None:
    limit, batch, batches = map(int, numbers)
    with TrajectoryReplayBuffer(
        enable_cache=True,
        cache_size=sys.maxsize,
        cache_bytes=limit,
        sample_window_size=0,
        auto_save=True,
        auto_save_path=folder,
        trajectory_format=kind,
    ) as buffer:
        before = peak = status_bytes("RssAnon")
        for _ in range(batches):
            buffer.sample(batch)
            peak = max(peak, status_bytes("RssAnon"))
    sys.stdout.write(orjson.dumps({"before": before, "anonymous": peak}).decode())


if __name__ == "__main__":
    _child(*sys.argv[1:])
