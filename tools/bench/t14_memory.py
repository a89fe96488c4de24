"""T14: memory of a process that samples uniformly from a store four times its cache and memory limit.

Anonymous memory (``RssAnon``) of a process of its own, at its highest, above the limit: at most 300 MB. Pages of
mapped files are the page cache's and go when memory is short. ``pkl`` cannot be mapped, so whatever a batch needs
is decoded; its batches are of 32.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from tools.bench.report import Figure, Options
from tools.bench.timing import in_child, status_bytes
from tools.bench.workloads import opened, states

LIMIT = 256 << 20
TARGET_MB = 300.0


def figures(options: Options) -> Iterator[Figure]:
    """Yield a figure for a mapped and one for a decoded format.

    Raises:
        SkippedError: the kernel does not report a process's anonymous memory.
    """
    status_bytes("RssAnon")
    limit = options.count(LIMIT, 4 << 20)
    pool = states(8)
    for kind, batch in (("pt", 1024), ("pkl", 32)):
        folder = options.folder / kind
        with opened(folder, trajectory_format=kind) as buffer:
            while buffer.total_samples * 768 < 4 * limit:
                buffer.add_trajectories(pool)
        found = in_child(_measured, folder, kind, limit, batch, options.count(200, 3))
        yield Figure(
            "T14",
            f"anonymous memory above the limit, {kind}",
            (found["anonymous"] - limit) / 1e6,
            TARGET_MB,
            "MB",
            details={"limit_mb": limit / 1e6, "peak_mb": found["anonymous"] / 1e6, "before_mb": found["before"] / 1e6},
        )


def _measured(folder: Path, kind: str, limit: int, batch: int, batches: int) -> dict[str, int]:
    """Return the anonymous memory of this process before it samples, and at its highest."""
    cache = {"enable_cache": True, "cache_size": sys.maxsize, "cache_bytes": limit}
    with opened(folder, trajectory_format=kind, **cache) as buffer:
        before = peak = status_bytes("RssAnon")
        for _ in range(batches):
            buffer.sample(batch)
            peak = max(peak, status_bytes("RssAnon"))
    return {"before": before, "anonymous": peak}
