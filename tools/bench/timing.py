"""Timing: things in turn, so that the noise of a shared machine meets all of them."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from statistics import median
from typing import TypeVar

import torch

from tools.bench.report import SkippedError
from tools.proc import processes, stat, status

T = TypeVar("T")


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Times:
    """Seconds of the calls of one thing.

    Args:
        warmup: how many of the first times are not kept.
        used: returns processor seconds until now; by default of all threads of this process.

    Attributes:
        clock: seconds of a call by the clock.
        processor: seconds of a call by the processor.
    """

    def __init__(self, warmup: int = 0, used: Callable[[], float] = time.process_time) -> None:
        self.clock: list[float] = []
        self.processor: list[float] = []
        self._warmup, self._used = warmup, used

    def take(self, work: Callable[[], T], calls: int = 1) -> T:
        """Time a call, or the mean of several in a row; return the last result."""
        used, start = self._used(), time.perf_counter()
        for _ in range(calls):
            found = work()
        took, used = time.perf_counter() - start, self._used() - used
        if self._warmup > 0:
            self._warmup -= 1
        else:
            self.clock.append(took / calls)
            self.processor.append(used / calls)
        return found

    @property
    def seconds(self) -> float:
        """Median by the clock."""
        return median(self.clock)

    @property
    def ms(self) -> float:
        """Median by the clock, in milliseconds."""
        return 1e3 * self.seconds

    @property
    def processor_ms(self) -> float:
        """Median by the processor, in milliseconds."""
        return 1e3 * median(self.processor)


def in_turn(
    works: Sequence[Callable[[], object]],
    repeats: int,
    *,
    calls: int = 1,
    warmup: int = 2,
    used: Callable[[], float] = time.process_time,
) -> list[Times]:
    """Time several things, one of each after the other.

    Which comes first is drawn anew each time: what one leaves to the allocator the next one finds.

    Args:
        works: what to time.
        repeats: how many times are kept of each.
        calls: calls in a row that make one time (of things that take well below a millisecond).
        warmup: rounds before the first time that is kept.
        used: returns processor seconds until now.
    """
    chance = random.Random(0)
    times = [Times(warmup, used) for _ in works]
    for _ in range(warmup + repeats):
        for at in chance.sample(range(len(works)), len(works)):
            times[at].take(works[at], calls)
    return times


def ratio(mine: Times, peer: Times) -> float:
    """Return the ratio of two medians by the clock."""
    return mine.seconds / peer.seconds


def processor_ratio(mine: Times, peer: Times) -> float:
    """Return the ratio of two medians by the processor."""
    return mine.processor_ms / peer.processor_ms


def percentile(times: Sequence[float], share: float) -> float:
    """Return the smallest time that at least ``share`` of all times do not exceed."""
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use this many threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def status_bytes(name: str) -> int:
    """Return a number of bytes from the kernel's status of this process: ``VmHWM`` (peak RSS), ``RssAnon``, ...

    Raises:
        SkippedError: the kernel has no such number.
    """
    try:
        return status("self", name)
    except OSError as error:
        raise SkippedError(f"needs /proc: {error}") from error


def processor_seconds() -> float:
    """Return the processor time, of user and kernel, that this process and its living descendants have used so far.

    Raises:
        SkippedError: there is no ``/proc``.
    """
    found = {number: fields for number in processes() if (fields := stat(number))}
    if not found:
        raise SkippedError("needs /proc")
    mine = {os.getpid()}
    while more := {number for number, fields in found.items() if int(fields[1]) in mine} - mine:
        mine |= more
    ticks = sum(int(found[number][11]) + int(found[number][12]) for number in mine)
    return ticks / os.sysconf("SC_CLK_TCK")


def in_child(work: Callable[..., T], *arguments: object) -> T:
    """Call a function in a newly started process; return its result, or raise its error.

    Its output goes to standard error, since standard output has the figures.
    """
    with ProcessPoolExecutor(1, get_context("spawn"), os.dup2, (2, 1)) as pool:
        return pool.submit(work, *arguments).result()
