"""What processes and directories take, and whether it grows."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from tools.proc import status

_SLACK = {
    "memory": (1.15, 48 << 20),
    "descriptors": (1.0, 16),
    "maps": (1.1, 96),
    "threads": (1.0, 4),
    "log": (1.0, 16 << 20),
    "cost": (2.0, 1.0),
}
"""By how much the median of the last quarter may exceed that of the second: a factor and a summand."""


@dataclass(frozen=True)
class Sample:
    """What was taken at one moment, writer and followers together.

    Attributes:
        shards: bytes of shard files.
        live: bytes of the trajectories that can be read, pinned ones among them.
        log: bytes of all other files of the store.
        memory: resident bytes that are not of files.
        descriptors, maps, threads: how many.
        cost: seconds of adding and flushing over those of writing as many bytes plainly and durably.
    """

    shards: int
    live: int
    log: int
    memory: int
    descriptors: int
    maps: int
    threads: int
    cost: float


def taken_by(processes: Sequence[int]) -> dict[str, int]:
    """Return memory, descriptors, maps and threads of some processes together."""
    found = dict.fromkeys(("memory", "descriptors", "maps", "threads"), 0)
    for process in processes:
        folder = Path("/proc") / str(process)
        found["memory"] += status(process, "RssAnon")
        found["threads"] += status(process, "Threads")
        found["descriptors"] += len(os.listdir(folder / "fd"))
        found["maps"] += (folder / "maps").read_bytes().count(b"\n")
    return found


def bytes_of(store: Path) -> tuple[int, int]:
    """Return the bytes of shard files, and of all others."""
    shards = other = 0
    for folder, _, names in os.walk(store):
        for name in names:
            try:
                size = os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:  # deleted meanwhile
                continue
            if Path(folder).is_relative_to(store / "shards"):
                shards += size
            else:
                other += size
    return shards, other


def growth(samples: Sequence[Sample], names: Sequence[str]) -> list[str]:
    """Return what took more in the last quarter than in the second, beyond its slack."""
    quarter = len(samples) // 4
    problems = []
    for name in names:
        early = statistics.median(getattr(one, name) for one in samples[quarter : 2 * quarter])
        late = statistics.median(getattr(one, name) for one in samples[-quarter:])
        factor, more = _SLACK[name]
        if late > factor * early + more:
            problems.append(f"{name} grew from {early:,.6g} in the second quarter to {late:,.6g} in the last")
    return problems


def table(samples: Sequence[Sample]) -> str:
    """Return the medians of the quarters."""
    quarter = max(len(samples) // 4, 1)
    lines = []
    for field in fields(Sample):
        found = [
            statistics.median(getattr(one, field.name) for one in samples[at : at + quarter])
            for at in range(0, 4 * quarter, quarter)
            if samples[at : at + quarter]
        ]
        lines.append(f"{field.name:12}" + "".join(f"{value:>16,.6g}" for value in found))
    return "\n".join(lines)
