"""The process that reads damaged directories, with limits of time and memory."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any

from tools.crash.forked import forking
from tools.mutate.pristine import Kind
from tools.mutate.probe import Report, probe
from tools.proc import status

SECONDS = 300.0
"""Limit of a case in seconds: a longer one hangs, or the machine is very busy."""
CPU_SECONDS = 10.0
"""Limit of a case in processor seconds."""
GROWTH = 256 << 20
"""Bytes by which the resident memory of a process may grow in one case; the directories have less than 0.1 MB."""
_ADDRESS_SPACE = 3 << 30  # protects the machine; beyond it, MemoryError
_FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "os.startfile",
    "subprocess.Popen",
    "pickle.find_class",
)


class Worker:
    """Probes directories one by one in a separate process, which is replaced when it hangs or dies. To be closed.

    Attributes:
        patience: seconds after which the process hangs.
        pid: number of the process.
    """

    def __init__(self) -> None:
        self.patience = SECONDS
        self._begin()

    def _begin(self) -> None:
        self._pool = ProcessPoolExecutor(1, forking(), _limit)
        self.pid = self._pool.submit(os.getpid).result()

    def probe(self, path: Path, kind: Kind) -> Report:
        """Return the report of a directory; a process that hangs or dies is a problem in it."""
        try:
            return self._pool.submit(_probe, path, kind).result(self.patience)
        except TimeoutError:
            problem = f"the process has not come to an end in {self.patience:g} s"
        except BrokenProcessPool:
            problem = "the process died"
        self.close()
        self._begin()
        return Report(ended=False, problems=[problem])

    def close(self) -> None:
        """End the process."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._pool.shutdown()


def _limit() -> None:
    import tools.crash.warm  # noqa: F401  # before memory and calls are monitored; the fork server may lack it

    used = status("self", "VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (used + _ADDRESS_SPACE, used + _ADDRESS_SPACE))
    sys.addaudithook(_audit)
    logging.disable()  # warnings about damage are no findings
    warnings.simplefilter("ignore")


def _probe(path: Path, kind: Kind) -> Report:
    _calls.clear()
    _reset_peak()
    before, begun = status("self", "VmRSS"), time.process_time()
    report = probe(path, kind)
    if time.process_time() - begun > CPU_SECONDS:
        report.problems.append(f"took {time.process_time() - begun:.0f} s of processor time")
    grown = status("self", "VmHWM") - before
    if _calls:
        report.problems.append(f"code was about to run: {', '.join(sorted(set(_calls)))}")
    if grown > GROWTH:
        report.problems.append(f"memory grew by {grown >> 20} MiB")
    return report


_calls: list[str] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _FORBIDDEN and not _loads_kernels():
        _calls.append(f"{event}{arguments!r}"[:200])


def _loads_kernels() -> bool:
    """Return whether numba is compiling: it pickles its results and inspects the machine."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__", "").startswith("numba."):
            return True
    return False


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # man 5 proc: resets VmHWM
