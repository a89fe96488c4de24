"""Timing: two things in turn, so that the noise of a shared machine meets both."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tools.bench.report import SkippedError


def seconds(work: Callable[[], object], calls: int = 1) -> float:
    """Return the seconds that one call takes, as the mean of ``calls`` in a row."""
    start = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - start) / calls


def alternate(
    works: Sequence[Callable[[], object]], repeats: int, *, calls: int = 1, warmup: int = 2
) -> list[list[float]]:
    """Time several things in turn.

    Args:
        works: what to time.
        repeats: how many times are kept of each.
        calls: calls in a row that make one time (of things that take well below a millisecond).
        warmup: rounds before the first time that is kept.

    Returns:
        Seconds per call, ``[len(works)][repeats]``.
    """
    times: list[list[float]] = [[] for _ in works]
    for repeat in range(-warmup, repeats):
        for kept, work in zip(times, works, strict=True):
            took = seconds(work, calls)
            if repeat >= 0:
                kept.append(took)
    return times


def in_turn(
    works: Sequence[Callable[[], object]], calls: int, warmup: int
) -> tuple[list[list[float]], list[list[float]]]:
    """Return seconds and processor seconds of each call, ``[len(works)][calls]``, one call of each after the other.

    Which comes first is drawn anew each time: what one leaves to the allocator the next one finds.

    Args:
        works: what to time.
        calls: how many are kept of each.
        warmup: calls of each before these.
    """
    chance = random.Random(0)
    took: list[list[float]] = [[] for _ in works]
    used: list[list[float]] = [[] for _ in works]
    for call in range(-warmup, calls):
        for at in chance.sample(range(len(works)), len(works)):
            before = time.thread_time()
            duration = seconds(works[at])
            if call >= 0:
                took[at].append(duration)
                used[at].append(time.thread_time() - before)
    return took, used


def ratio(mine: Sequence[float], peer: Sequence[float]) -> float:
    """Return the ratio of two medians."""
    return statistics.median(mine) / statistics.median(peer)


def percentile(times: Sequence[float], share: float) -> float:
    """Return the smallest time that at least ``share`` of all times do not exceed."""
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]


def status_bytes(name: str) -> int:
    """Return a number of bytes that the kernel tells of this process: ``VmHWM`` (peak RSS), ``RssAnon``, ...

    Raises:
        SkippedError: it tells no such number.
    """
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise SkippedError(f"needs {name} in {status}")


def processor_seconds() -> float:
    """Return the processor time, of user and kernel, that this process and its living descendants have used so far.

    Raises:
        SkippedError: there is no ``/proc``.
    """
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        parents[int(file.parent.name)] = int(fields[1])
        ticks[int(file.parent.name)] = int(fields[11]) + int(fields[12])
    if not ticks:
        raise SkippedError("needs /proc")
    mine = {os.getpid()}
    while found := {number for number, parent in parents.items() if parent in mine} - mine:
        mine |= found
    return sum(ticks[number] for number in mine) / os.sysconf("SC_CLK_TCK")


def repeats_told(said: str | None, usual: int) -> int:
    """Return the repeats that the command line of a benchmark asks for, and use as many threads as it says."""
    parser = argparse.ArgumentParser(description=said, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=usual)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    repeats: int = options.repeats
    return repeats


def in_child(module: str, *arguments: object) -> Any:
    """Run ``python -m module arguments`` in a process of its own and return the JSON value that it writes.

    Raises:
        RuntimeError: it failed; with what it wrote to standard error.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[2:])} failed:\n{done.stderr}")
    return json.loads(done.stdout)
