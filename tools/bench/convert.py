"""Memory of a conversion of 4 GB to files of other programs and back.

Each conversion has a process of its own. ``RssAnon`` is its memory without the pages of mapped files, which are the
page cache's and go when memory is short.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tools.bench.report import Figure, Options, needs
from tools.bench.timing import in_child, status_bytes
from tools.bench.workloads import opened
from tools.meanwhile import meanwhile
from trajstore import AgentTrajectory, Trajectory, TrajectoryReplayBuffer
from trajstore.cli import main
from trajstore.trajectory import AnyTrajectory

BYTES = 4 << 30
TARGET_MB = 600.0
TOKENS, STEPS = 32_768, 256
POLL_SECONDS = 0.05


def figures(options: Options) -> Iterator[Figure]:
    """Yield the peak memory of each conversion, above that of a conversion of one trajectory.

    Raises:
        SkippedError: a package is not installed, or the kernel does not report anonymous memory.
    """
    needs("polars", "pyarrow", "PIL", extra="convert")
    status_bytes("RssAnon")
    kinds: dict[str, Callable[[int], AnyTrajectory]] = {"parquet": _rollout, "lerobot": _episode}
    for name, make in kinds.items():
        least, peaks = (_both_ways(options.folder / name, name, make, size) for size in (0, options.count(BYTES)))
        for direction, few, peak in zip(("to", "from"), least, peaks, strict=True):
            what = f"anonymous memory of a conversion {direction} {name}"
            details = {"peak_anonymous_mb": peak / 1e6}
            yield Figure("convert", what, (peak - few) / 1e6, TARGET_MB, "MB", details=details)


def _rollout(number: int) -> AgentTrajectory:
    ids = torch.arange(TOKENS) + number
    return AgentTrajectory(
        messages=[{"role": "user", "content": f"question {number}"}],
        input_ids=ids,
        loss_mask=torch.ones(TOKENS, dtype=torch.bool),
        old_log_probs=-torch.rand(TOKENS),
        rollout_log_probs=-torch.rand(TOKENS),
        response_start=0,
    )


def _episode(number: int) -> Trajectory:
    ends = torch.zeros(STEPS, 1, 1, dtype=torch.bool)
    ends[-1] = True
    return Trajectory(
        actions=torch.rand(STEPS, 1, 8),
        rewards=torch.zeros(STEPS, 1, 1),
        terminations=ends,
        curr_obs={
            "states": torch.rand(STEPS, 1, 1024),
            "image": torch.randint(0, 255, (STEPS, 1, 64, 64, 3), dtype=torch.uint8),
        },
        forward_inputs={"fps": torch.tensor(10.0)},
    )


def _both_ways(folder: Path, name: str, make: Callable[[int], AnyTrajectory], least_bytes: int) -> tuple[int, int]:
    """Convert a store to files and these to a store; return the peak of both."""
    store, files, back = (str(folder / part) for part in ("store", "files", "back"))
    with opened(store) as buffer:
        total = 0
        while not total or buffer.get_stats()["shard_bytes"] < least_bytes:
            buffer.add_trajectories([make(total + number) for number in range(16)])
            buffer.flush()
            total = len(buffer)
    peaks = in_child(_peak, store, files, "--to", name), in_child(_peak, files, back, "--from", name)
    with TrajectoryReplayBuffer.open(back) as reader:
        if len(reader) != total:
            raise RuntimeError(f"{name}: {len(reader)} of {total} trajectories came back")
    shutil.rmtree(folder)
    return peaks


def _peak(*words: str) -> int:
    """Run a conversion; return the most anonymous memory of this process."""
    seen = [0]
    with meanwhile(lambda: seen.append(status_bytes("RssAnon")), POLL_SECONDS):
        if main(["convert", *words]):
            raise RuntimeError(f"convert {' '.join(words)} failed")
    return max(seen)
