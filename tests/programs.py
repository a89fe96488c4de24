"""Programs that run in a fork of a process that has imported torch, as importing takes seconds in a new one.

Functions that trajstore registered with ``atexit`` were registered before the program's own.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import TextIO

from tools.crash.forked import forking

COMMAND = """
import signal, sys
from trajstore.__main__ import run
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
sys.exit(run())
"""
"""The command line as a process."""


def run(folder: Path, code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program until its interpreter has ended; its outputs are files of ``folder`` meanwhile."""
    outputs = [folder / name for name in ("program.out", "program.err")]
    child = _started(code, arguments, outputs)
    child.join(600)
    assert child.exitcode is not None, "it did not end"
    return subprocess.CompletedProcess([*arguments], child.exitcode, *(path.read_text() for path in outputs))


@contextmanager
def begun(code: str, *arguments: object) -> Iterator[tuple[ForkServerProcess, TextIO, TextIO]]:
    """Yield a running program, its output and its errors; wait for its end."""
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
    child = _started(code, arguments, [sender for _, sender in pipes])
    for _, sender in pipes:
        sender.close()
    with ExitStack() as streams:
        out, err = (streams.enter_context(os.fdopen(os.dup(heard.fileno()))) for heard, _ in pipes)
        for heard, _ in pipes:
            heard.close()
        try:
            yield child, out, err
        except BaseException:
            child.kill()
            raise
        finally:
            child.join(600)


def _started(code: str, arguments: Sequence[object], outputs: Sequence[Path | Connection]) -> ForkServerProcess:
    child = forking().Process(target=_become, args=(code, ["-c", *map(str, arguments)], outputs))
    child.start()
    return child


def _become(code: str, words: list[str], outputs: Sequence[Path | Connection]) -> None:
    for descriptor, output in enumerate(outputs, 1):
        if isinstance(output, Path):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        else:
            os.dup2(output.fileno(), descriptor)
            output.close()
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
