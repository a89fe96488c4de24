"""A process with everything that it starts, which is killed as a whole."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tools.proc import processes, stat

ROOT = Path(__file__).resolve().parents[2]
_MARK = "TRAJSTORE_CRASH_LIFE"
_END_TIMEOUT = 20.0  # seconds


class ProcessTree:
    """A process in a session of its own; the processes it starts, also Ray's, inherit a mark by which they are found.

    Args:
        command: the program and its arguments.
        log: file for its output.
        environment: variables in addition to this process's.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.log = log
        name, value = _MARK, uuid.uuid4().hex
        self._mark = f"{name}={value}"
        # Ray's sockets lie below, and the path of a socket has at most 107 bytes.
        self._temporary = Path(tempfile.mkdtemp(prefix="tsr-"))
        variables = {
            **os.environ,
            **(environment or {}),
            name: value,
            "RAY_TMPDIR": str(self._temporary),
            "TMPDIR": str(self._temporary),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process; None while it runs."""
        return self._process.poll()

    def kill(self) -> int:
        """SIGKILL the process group, then its descendants elsewhere; return the number of processes.

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
                raise TimeoutError(f"processes {found} of a killed process tree are still there after {_END_TIMEOUT} s")
            left.update(found)
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        shutil.rmtree(self._temporary, ignore_errors=True)
        return len(left)

    def _descendants(self) -> list[int]:
        """Return the processes with this mark in their environment, or in this session."""
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
        """Return the end of the log."""
        return self.log.read_bytes()[-size:].decode(errors="replace")
