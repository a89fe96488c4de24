"""Programs that run in a fork of a process that has imported torch, as importing takes seconds in a new one.

Functions that trajstore registered with ``atexit`` were registered before the program's own.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from tools.crash.forked import forking


def run(folder: Path, code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program until its interpreter has ended; its outputs are files of ``folder`` meanwhile."""
    outputs = [folder / name for name in ("program.out", "program.err")]
    words = ["-c", *map(str, arguments)]
    child = forking().Process(target=_become, args=(code, words, outputs))
    child.start()
    child.join(600)
    assert child.exitcode is not None, "it did not end"
    return subprocess.CompletedProcess(words, child.exitcode, *(path.read_text() for path in outputs))


def _become(code: str, words: list[str], outputs: Sequence[Path]) -> None:
    for descriptor, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.argv, status = words, 0
    sys.modules["__main__"] = ModuleType("__main__")  # its names are gone before the end
    try:
        exec(code, vars(sys.modules["__main__"]))
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        traceback.print_exc()
        status = 1
    ctypes.pythonapi.Py_Exit(status)  # joins threads and calls atexit, where multiprocessing only leaves
