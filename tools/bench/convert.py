"""Memory of a conversion of 4 GB to files of other programs and back.

Peak memory is measured in the process of the command. ``RssAnon`` is its own memory; pages of mapped files are the page
cache's and go when memory is short.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tools.bench.report import Figure, Options, needs
from tools.bench.timing import status_bytes
from tools.proc import status
from trajstore import AgentTrajectory, Trajectory, TrajectoryReplayBuffer

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
    for name, make in (("parquet", _rollout), ("lerobot", _episode)):
        folder = options.folder / name
        least = _both_ways(folder / "least", name, make, 0)
        for least_part, part in zip(least, _both_ways(folder / "all", name, make, options.count(BYTES)), strict=True):
            peak = part.pop("anonymous_mb")
            yield Figure(
                "convert",
                f"anonymous memory of a conversion {part.pop('direction')} {name}",
                peak - least_part["anonymous_mb"],
                TARGET_MB,
                "MB",
                details={"peak_anonymous_mb": peak, **part},
            )
        shutil.rmtree(folder)


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


def _both_ways(folder: Path, name: str, make: Any, least_bytes: int) -> list[dict[str, Any]]:
    """Convert a store to files and these to a store; return the measurements of both."""
    folder.mkdir(parents=True)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=folder / "store", enable_cache=False) as buffer:
        number = 0
        while number == 0 or _size(folder / "store") < least_bytes:
            buffer.add_trajectories([make(number + at) for at in range(16)])
            buffer.flush()
            number += 16
    there = _measured(folder, "store", "files", "--to", name)
    back = _measured(folder, "files", "back", "--from", name)
    assert there["trajectories"] == back["trajectories"] == number
    return [there, back]


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _measured(folder: Path, source: str, target: str, option: str, name: str) -> dict[str, Any]:
    """Run a conversion; return its result and peaks."""
    nbytes = _size(folder / source)
    command = [sys.executable, "-m", "trajstore", "convert", source, target, option, name, "--json"]
    anonymous = resident = 0
    begun = time.monotonic()
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            try:
                anonymous = max(anonymous, status(process.pid, "RssAnon"))
                resident = max(resident, status(process.pid, "VmHWM"))
            except OSError:
                break  # it has just ended
            time.sleep(POLL_SECONDS)
        output = process.communicate()[0]
    result = json.loads(output)
    return {
        "direction": "to" if option == "--to" else "from",
        "anonymous_mb": anonymous / 1e6,
        "resident_mb": resident / 1e6,
        "read_mb": nbytes / 1e6,
        "written_mb": _size(folder / target) / 1e6,
        "trajectories": result["written"],
        "seconds": time.monotonic() - begun,
        "load": os.getloadavg()[0],
    }
