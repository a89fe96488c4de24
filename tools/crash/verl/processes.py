"""Starting a driver, and ending it with everything that it started."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path

from tools.proc import processes, stat
from trainer_hooks.verl.config import OnResume

ROOT = Path(__file__).resolve().parents[3]
_MARK = "TRAJSTORE_CRASH_LIFE"
_END_TIMEOUT = 20.0  # seconds


class Driver:
    """A driver in a session of its own; Ray's processes inherit a mark by which they are found.

    Args:
        folder: the campaign's.
        life: number of the driver.
        on_resume: how it takes up the pool.
    """

    def __init__(self, folder: Path, life: int, on_resume: OnResume) -> None:
        self.log = folder / f"driver_{life:03d}.log"
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        # Ray's sockets lie below, and the path of a socket has at most 107 bytes.
        self._temporary = Path(tempfile.mkdtemp(prefix="tsr-"))
        name, _, value = self._mark.partition("=")
        environment = {
            **os.environ,
            name: value,
            "RAY_TMPDIR": str(self._temporary),
            "TMPDIR": str(self._temporary),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tools.crash.verl.child", str(folder), str(life), on_resume],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """Exit code of the driver; None while it runs."""
        return self._process.poll()

    def kill(self) -> int:
        """SIGKILL the driver's process group, then whatever it started elsewhere; return how many that were.

        Raises:
            TimeoutError: a process is still there after ``_END_TIMEOUT`` seconds.
        """
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        left: set[int] = set()
        end = time.monotonic() + _END_TIMEOUT
        while found := self._descendants():
            if time.monotonic() > end:
                raise TimeoutError(f"processes {found} of a killed driver are still there after {_END_TIMEOUT} s")
            left.update(found)
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        shutil.rmtree(self._temporary, ignore_errors=True)
        return len(left)

    def _descendants(self) -> list[int]:
        """Return the processes that have the driver's mark in their environment or are in its session."""
        found = []
        for number in processes():
            fields, environment = stat(number), Path(f"/proc/{number}/environ")
            if not fields or fields[0] == "Z":
                continue
            with suppress(OSError):  # ended meanwhile, or another user's
                if int(fields[3]) == self._process.pid or self._mark.encode() in environment.read_bytes():
                    found.append(number)
        return found

    def tail(self, size: int = 3000) -> str:
        """Return the end of what the driver and its workers said."""
        return self.log.read_bytes()[-size:].decode(errors="replace")
