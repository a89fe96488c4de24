"""The driver as a process tree."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.crash.processes import ProcessTree


class Driver(ProcessTree):
    """A driver with all of Ray's processes.

    Args:
        folder: the campaign's.
        life: number of the driver.
    """

    def __init__(self, folder: Path, life: int) -> None:
        command = [sys.executable, "-m", "tools.crash.verl.child", str(folder), str(life)]
        super().__init__(command, folder / f"driver_{life:03d}.log")
