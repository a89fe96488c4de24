"""A locale without UTF-8: reports escape what it cannot show, and names that it cannot have are refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from trajstore import Trajectory, TrajectoryReplayBuffer

PIN_AND_LOOK = """
import sys
from trajstore import TrajectoryReplayBuffer
from trajstore.cli import main
from trajstore.errors import ConfigurationError, CorruptStoreError

plain, pinned = sys.argv[1:]
with TrajectoryReplayBuffer(auto_save=True, auto_save_path=plain) as buffer:
    try:
        buffer.points.pin("n\\u00e4del")
    except ConfigurationError as error:
        assert "PYTHONUTF8=1" in str(error)
    else:
        raise SystemExit("pinned")
    assert buffer.points.pin("plain")
try:
    TrajectoryReplayBuffer.open(pinned)
except CorruptStoreError as error:
    assert "PYTHONUTF8=1" in str(error)
else:
    raise SystemExit("opened")
assert main(["inspect", plain]) == 0
assert main(["inspect", plain, "--json"]) == 0
"""


def test_a_locale_without_utf_8(tmp_path: Path) -> None:
    for name, pin in (("plain", "kept"), ("pinned", "nädel")):
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / name) as buffer:
            buffer.add_trajectories(
                [Trajectory(rewards=torch.zeros(3, 2, 1), curr_obs={"größe": torch.zeros(3, 2, 1)})]
            )
            buffer.points.pin(pin)
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PIN_AND_LOOK, tmp_path / "plain", tmp_path / "pinned"],
        env=environment,
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    report, text = done.stdout.decode("ascii").split("\n{", 1)
    assert "curr_obs.gr\\xf6\\xdfe" in report
    assert "curr_obs.größe" in {column["name"] for column in json.loads("{" + text)["columns"]}
