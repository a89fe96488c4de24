"""The demo trains, stops, goes on, and leaves a sound store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.cli.stores import Run
from trajstore.cli import DAMAGED, INTERRUPTED
from trajstore.demo import DEFAULT_TASK, TASKS, load_task
from trajstore.demo.dqn import DQNLearner, dump_state, parse_state
from trajstore.inspection.inspect import inspect
from trajstore.inspection.verify import verify

pytest.importorskip("gymnasium", reason="the demo needs  pip install 'trajstore[demo]'")


def test_every_task_can_be_loaded() -> None:
    assert DEFAULT_TASK in TASKS
    assert all(callable(load_task(name)) for name in TASKS)


def test_cartpole_goes_on_where_it_ended(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run"
    code, out, err = run("demo", "--task", "cartpole", "--path", path, "--updates", 64)
    assert (code, err) == (0, "")
    assert "trajectories" in out
    before = inspect(path)["trajectories"]
    assert before == 4  # two rounds to warm up, two with 32 updates each
    code, out, _ = run("demo", "--task", "cartpole", "--path", path, "--updates", 128)
    assert code == 0
    assert f"continuing in {path}: 4 trajectories on disk, learner at 64 updates" in out
    report = inspect(path / "replay")
    assert report["trajectories"] == 6
    assert report["policy"]["versions"] == {"min": 0, "max": 96}
    assert verify(path).sound


def test_without_its_learner_it_trains_anew_on_what_is_stored(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run("demo", "--task", "cartpole", "--path", path, "--updates", 32)
    (path / "learner.pt").unlink()
    code, out, _ = run("demo", "--task", "cartpole", "--path", path, "--updates", 32)
    assert code == 0
    assert "3 trajectories on disk, a new learner" in out


def test_a_damaged_learner_is_told(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run("demo", "--task", "cartpole", "--path", path, "--updates", 32)
    (path / "learner.pt").write_bytes(b"not a checkpoint")
    code, _, err = run("demo", "--task", "cartpole", "--path", path, "--updates", 64)
    assert code == DAMAGED
    assert "learner.pt" in err
    assert "remove it" in err


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL])
def test_stopped_from_outside_it_leaves_a_sound_store(by: signal.Signals, tmp_path: Path, project_root: Path) -> None:
    path = tmp_path / "run"
    # A shell's background job ignores SIGINT, and so would its children: as at a terminal, this one does not.
    hear = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code = hear + "import sys; from trajstore.cli import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "demo", "--task", "cartpole", "--path", path, "--updates", str(10**9)],
        cwd=project_root,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    while not (path / "learner.pt").exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(by)
    _, err = process.communicate()
    assert "Traceback" not in err
    if by is signal.SIGINT:
        assert process.returncode == INTERRUPTED
        assert err == "trajstore: interrupted\n"
    result = verify(path)
    assert result.sound, result.problems
    assert result.trajectories >= 10


def test_learner_continues_exactly() -> None:
    generator = torch.Generator().manual_seed(0)

    def batch() -> dict[str, object]:
        return {
            "curr_obs": {"states": torch.randn(8, 4, generator=generator)},
            "next_obs": {"states": torch.randn(8, 4, generator=generator)},
            "actions": torch.randint(2, (8, 1), generator=generator),
            "rewards": torch.rand(8, 1, generator=generator),
            "terminations": torch.rand(8, 1, generator=generator) < 0.2,
        }

    first = DQNLearner(4, 2, generator)
    for _ in range(3):
        first.update(batch())
    second = DQNLearner(4, 2, generator)
    second.load_state_dict(parse_state(dump_state(first.state_dict()), "checkpoint"))
    following = [batch() for _ in range(3)]
    assert [first.update(item) for item in following] == [second.update(item) for item in following]


@pytest.mark.slow
def test_cartpole_is_learned(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("demo", "--task", "cartpole", "--path", tmp_path / "run")
    assert code == 0
    words = next(line for line in out.splitlines() if line.startswith("mean return")).split()
    first, last = float(words[words.index("at") - 1]), float(words[words.index("after") - 1])
    assert first < 60
    assert last > 150
