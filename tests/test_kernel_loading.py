"""After Ctrl-C while numba loads or compiles, the next call works; in a real process with real signals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import os, random, signal, sys, threading, time

seed, interval, signals = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
armed = False


def interrupt(number, frame):
    global armed
    if armed:  # not between two tries
        armed = False
        raise KeyboardInterrupt


def ignored(raised):  # an interrupt in a weakref callback or finalizer cannot reach the caller
    if raised.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(raised)


sys.unraisablehook = ignored
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
signal.signal(signal.SIGINT, interrupt)

import numpy as np
import torch

import trajstore._core.base.machine_code
from trajstore import TrajectoryReplayBuffer
from trajstore._core.sampling.tree import SumTree
from tests.support.witness import check_batch, witness

assert "numba" not in sys.modules
with trajstore._core.base.machine_code.MachineCode._lock:  # as if loading never ended
    buffer = TrajectoryReplayBuffer(sample_window_size=0)
interrupted = 0
sent = threading.Event()


def bombard():
    chance = random.Random(seed)
    for _ in range(signals):
        time.sleep(interval * chance.random())
        os.kill(os.getpid(), signal.SIGINT)
    sent.set()


def tried(call):
    global armed, interrupted
    while True:
        try:
            armed = True
            result = call()
            armed = False
            return result
        except KeyboardInterrupt:
            interrupted += 1


def use_tree():
    tree = SumTree(40)
    tree.set(np.arange(3), np.ones(3))
    tree.replace(np.ones(3), 40)
    return tree.find(np.array([0.5])).tolist(), tree.total_from(2)


threading.Thread(target=bombard).start()
found = tried(use_tree)
tried(lambda: buffer.add_trajectories([witness(0)]))
check_batch(tried(lambda: buffer.sample(1)))
while not sent.wait(0.05):
    tried(lambda: buffer.sample(1))
assert found == ([0], 1.0), found
buffer.add_trajectories([witness(1)])
check_batch(buffer.sample(4))
print("sound", interrupted)
"""


def bombarded(seed: int, interval: float, signals: int, cache: Path | None) -> tuple[str, int]:
    """Interrupt a process that loads the kernels; return its verdict and the number of interrupts."""
    environment = dict(os.environ) | ({} if cache is None else {"NUMBA_CACHE_DIR": str(cache)})
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(seed), str(interval), str(signals)],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
    )
    assert (child.returncode, child.stderr) == (0, ""), child.stderr[-3000:]
    verdict, times = child.stdout.split()
    return verdict, int(times)


def test_kernels_can_be_used_after_an_interrupt_while_they_were_loaded() -> None:
    verdict, interrupts = bombarded(0, 0.02, 60, None)
    assert verdict == "sound"
    assert interrupts > 0


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(30))
def test_kernels_can_be_used_whenever_the_interrupt_comes(seed: int, tmp_path: Path) -> None:
    cold = tmp_path / "cache" if seed % 3 else None
    assert bombarded(seed, (0.004, 0.02, 0.1)[seed % 3], 200, cold)[0] == "sound"


def test_kernels_are_compiled_where_no_cache_can_be_written() -> None:
    compiles = (
        "import numba.core.caching as caching\n"
        "for locator in (caching.FunctionCache, caching.CompileResultCacheImpl):\n"
        "    locator._locator_classes = []\n"
        "from trajstore._core.sampling import _tree_kernels\n"
        "from trajstore._core.base import _kernels\n"
    )
    child = subprocess.run([sys.executable, "-c", compiles], capture_output=True, text=True, timeout=1500)
    assert child.returncode == 0, child.stderr
    assert child.stderr.count("set NUMBA_CACHE_DIR to a folder") == 1
