"""The process that reads damaged directories, with limits of time and memory."""

from __future__ import annotations

import logging
import resource
import sys
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tools.campaigns import Asked, NoAnswerError
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


class Worker(Asked):
    """Probes directories one by one in a separate process, which is replaced when it hangs or dies."""

    def __init__(self) -> None:
        super().__init__(_serve, patience=SECONDS)

    def probe(self, path: Path, kind: Kind) -> Report:
        """Return the report of a directory; a process that hangs or dies is a problem in it."""
        try:
            report: Report = self.ask((path, kind))
        except NoAnswerError as error:
            return Report(ended=False, problems=[f"the process {error}"])
        return report


def _serve(connection: Connection) -> None:
    import tools.crash.warm  # noqa: F401  # before memory and calls are monitored; the fork server may lack it

    used = status("self", "VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (used + _ADDRESS_SPACE, used + _ADDRESS_SPACE))
    sys.addaudithook(_audit)
    logging.disable()  # warnings about damage are no findings
    warnings.simplefilter("ignore")
    while True:
        path, kind = connection.recv()
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
        connection.send(report)


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
