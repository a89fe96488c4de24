"""The loader with several processes: ranks connected by gloo, spawned and killed workers."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from tests.feeding.test_loader import fill, reader, rewards
from tools.crash.forked import forking
from trajstore.errors import StoreClosedError
from trajstore.loader import ReplayLoader


def opened(folder: Path) -> list[str]:
    """Return the files below a folder that this process has open or mapped."""
    names = set[str]()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor
            names.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    maps = Path("/proc/self/maps").read_text().splitlines()
    names.update(line[line.index("/") :] for line in maps if "/" in line)
    return sorted(name for name in names if name.startswith(f"{folder.resolve()}/"))


def test_workers_in_new_processes_give_the_same_sequence(tmp_path: Path) -> None:
    fill(tmp_path / "store", range(10)).close()
    with ReplayLoader(reader(tmp_path / "store"), 8) as plain:
        expected = [rewards(next(plain)) for _ in range(4)]
    dataset = ReplayLoader(reader(tmp_path / "store"), 8)
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context=forking())
    batches = iter(loader)
    assert [rewards(next(batches)) for _ in range(4)] == expected


_KILLED = """
import atexit, gc, os, signal, sys, threading, time
from pathlib import Path


@atexit.register  # before trajstore's, so it runs after them
def at_exit():
    if names := [thread.name for thread in threading.enumerate() if thread.name.startswith("trajstore")]:
        print("Python ends these threads by force:", names, file=sys.stderr, flush=True)
        os._exit(3)


from torch.utils.data import DataLoader
from tests.feeding.test_loader import reader
from tests.feeding.test_processes import opened
from trajstore.loader import ReplayLoader


def killed():
    dataset = ReplayLoader(reader(Path(sys.argv[1])), 8)
    batches = iter(DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=600))
    worker = batches._workers[0]
    errors = []

    def consume():
        next(batches)
        os.kill(worker.pid, signal.SIGKILL)
        for _ in range(20):
            next(batches)

    def fail():
        try:
            consume()
        except (RuntimeError, OSError, EOFError) as error:
            errors.append(repr(error))
        worker.join()

    try:
        fail()
    except RuntimeError as error:  # torch's signal handler raises once, wherever the process is then
        errors.append(repr(error))
        worker.join()
    assert any(word in errors[0] for word in ("exited unexpectedly", "killed", "reset by peer", "EOFError")), errors
    dataset.close()


def left():
    gc.collect()
    return [thread.name for thread in threading.enumerate() if "trajstore" in thread.name], opened(Path(sys.argv[1]))


for _ in range(2):
    killed()
for _ in range(6000):  # what ends in the background may take its time
    if left() == ([], []):
        break
    time.sleep(0.05)
else:
    raise SystemExit(f"threads and files that are left: {left()}")
unclosed = ReplayLoader(reader(Path(sys.argv[1])), 8)
next(unclosed)
"""


def test_a_worker_that_is_killed_is_an_error_and_nothing_is_left(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    fill(tmp_path / "store", range(10)).close()
    environment = {**os.environ, "PYTHONPATH": str(pytestconfig.rootpath)}
    command = [sys.executable, "-c", _KILLED, str(tmp_path / "store")]
    child = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=tmp_path)
    assert child.returncode == 0, child.stderr[-3000:]


def test_a_buffer_that_is_closed_under_the_loader_leaves_nothing_open(tmp_path: Path) -> None:
    """Without reader leases the loader ends, and no file stays open or mapped."""
    buffer = fill(tmp_path / "store", range(10))
    loader = ReplayLoader(buffer, 8)
    next(loader)
    buffer.close()
    with pytest.raises(StoreClosedError):
        next(loader)
    assert opened(tmp_path) != []
    loader.close()
    del buffer, loader
    gc.collect()
    assert opened(tmp_path) == []
