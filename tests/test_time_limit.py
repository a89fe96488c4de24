"""A test that exceeds its time limit fails alone; the others still run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HANGING = """
import subprocess, threading, time

import pytest

from trajstore._core.base.interrupts import uninterrupted


def a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def a_child():
    subprocess.run(["sleep", "60"])


def swallowed():
    while True:
        try:
            time.sleep(60)
        except Exception:
            pass


def a_change():
    uninterrupted(lambda: time.sleep(1))


def arithmetic():
    while True:
        sum(range(1000))


@pytest.mark.parametrize("hang", [a_lock, a_child, swallowed, a_change, arithmetic])
def test_hangs(hang):
    hang()


@pytest.mark.timeout(600)
def test_goes_on():
    pass
"""


def test_a_test_that_hangs_costs_itself_alone(tmp_path: Path, project_root: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    options = ["--rootdir", tmp_path, "-n0", "--timeout", "0.5", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", "-c", project_root / "pyproject.toml", *options, tmp_path]
    done = subprocess.run(command, cwd=project_root, capture_output=True, text=True, timeout=600, check=False)
    assert "5 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("Failed: Timeout") >= 5
