"""The demo trains, stops, resumes, and leaves a sound store."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from examples.cartpole.dqn import DQNLearner
from examples.cartpole.run import SAMPLERS
from examples.common import read_checkpoint, write_checkpoint
from examples.demo import main
from tests.cli.stores import Run
from tools.crash.forked import forking
from trajstore.cli import DAMAGED, INTERRUPTED
from trajstore.operations.inspect import inspect
from trajstore.operations.verify import verify
from trajstore.points import points_at

pytest.importorskip("gymnasium", reason="the demo needs  pip install 'trajstore[demo]'")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys, main)


@pytest.mark.parametrize("wrong", ["--updates 0", "--updates x", "--task x", "--sampler x"])
def test_wrong_options_are_refused(capsys: pytest.CaptureFixture[str], wrong: str) -> None:
    with pytest.raises(SystemExit):
        main(wrong.split())
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize("sampler", sorted(set(SAMPLERS) - {"uniform"}))
def test_cartpole_by_each_sampler_goes_on_with_its_state(run: Run, tmp_path: Path, sampler: str) -> None:
    path = tmp_path / "run"
    for updates in (32, 64):
        run.out("--task", "cartpole", "--path", path, "--updates", updates, "--sampler", sampler)
    [*_, point] = points_at(path / "replay").saved
    name, kept = points_at(path / "replay").state(point.step)["sampler"]
    assert name == sampler
    if sampler == "epochs":
        assert kept["place"] + 256 * 16 * (kept["epoch"] - 1) >= 64 * 256 - 1024  # 16 x 16 transitions a round
    if sampler == "prioritized":
        assert len(kept["ids"]) == 4
        assert kept["priorities"].unique().numel() > 100  # each drawn transition has its own priority


def test_a_sampler_where_it_has_no_effect_is_refused(run: Run, tmp_path: Path) -> None:
    code, _, err = run("--path", tmp_path, "--sampler", "prioritized")
    assert code != 0
    assert "use --task cartpole" in err


def test_a_damaged_learner_is_told_and_without_one_it_trains_anew_on_what_is_stored(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run("--task", "cartpole", "--path", path, "--updates", 32)
    (path / "learner.pt").write_bytes(b"not a checkpoint")
    code, _, err = run("--task", "cartpole", "--path", path, "--updates", 64)
    assert code == DAMAGED
    assert "learner.pt" in err
    assert "remove it" in err
    (path / "learner.pt").unlink()
    out = run.out("--task", "cartpole", "--path", path, "--updates", 32)
    assert "3 trajectories on disk, a new learner" in out


def test_store_and_learner_go_on_at_one_round(run: Run, tmp_path: Path) -> None:
    """A kill between the saved point and the learner's checkpoint repeats that round."""
    path = tmp_path / "run"
    run("--task", "cartpole", "--path", path, "--updates", 32)
    learner = (path / "learner.pt").read_bytes()
    run("--task", "cartpole", "--path", path, "--updates", 96)
    assert inspect(path / "replay")["trajectories"] == 5
    (path / "learner.pt").write_bytes(learner)
    out = run.out("--task", "cartpole", "--path", path, "--updates", 64)
    assert "3 trajectories on disk, learner at 32 updates" in out
    report = inspect(path / "replay")
    assert report["trajectories"] == 4
    assert [aside["trajectories"] for aside in report["aside"]] == [5]
    assert [point["step"] for point in report["saved_points"]] == [3, 4]


def train_until_interrupted(path: Path, errors: Path) -> None:
    for descriptor, file in ((1, Path(os.devnull)), (2, errors)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell and their children ignore it
    sys.exit(main(["--task", "cartpole", "--path", str(path), "--updates", str(10**9)]))


def test_interrupted_it_leaves_a_sound_store(tmp_path: Path) -> None:
    path, errors = tmp_path / "run", tmp_path / "errors"
    process = forking().Process(target=train_until_interrupted, args=(path, errors))
    process.start()
    while not (path / "learner.pt").exists() and process.is_alive():
        time.sleep(0.02)
    assert process.pid is not None
    while process.is_alive():  # an exception in a callback of weakref is only printed
        os.kill(process.pid, signal.SIGINT)
        process.join(20)
    assert (process.exitcode, errors.read_text()) == (INTERRUPTED, "demo: interrupted\n")
    result = verify(path)
    assert result.sound, result.problems
    assert result.trajectories >= 10


def batch(generator: torch.Generator) -> dict[str, object]:
    return {
        "curr_obs": {"states": torch.randn(8, 4, generator=generator)},
        "next_obs": {"states": torch.randn(8, 4, generator=generator)},
        "actions": torch.randint(2, (8, 1), generator=generator),
        "rewards": torch.rand(8, 1, generator=generator),
        "terminations": torch.rand(8, 1, generator=generator) < 0.2,
    }


def test_learner_continues_exactly(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    first = DQNLearner(4, 2, generator)
    for _ in range(3):
        first.update(batch(generator))
    second = DQNLearner(4, 2, generator)
    write_checkpoint(tmp_path / "learner.pt", first.state_dict())
    second.load_state_dict(read_checkpoint(tmp_path / "learner.pt", "remove it"))
    following = [batch(generator) for _ in range(3)]
    assert [first.update(item).loss for item in following] == [second.update(item).loss for item in following]


def test_weights_of_one_change_nothing_and_errors_are_those_of_the_loss() -> None:
    def learner() -> DQNLearner:
        return DQNLearner(4, 2, torch.Generator().manual_seed(1))

    made = batch(torch.Generator().manual_seed(2))
    plain, weighted = learner().update(made), learner().update(made, torch.ones(8))
    assert plain.loss == weighted.loss
    small = plain.errors < 1
    huber = torch.where(small, plain.errors**2 / 2, plain.errors - 0.5)
    assert plain.loss == pytest.approx(huber.mean().item())
    assert learner().update(made, torch.full((8,), 0.5)).loss == pytest.approx(plain.loss / 2)


@pytest.mark.campaign
@pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
def test_cartpole_is_learned(run: Run, tmp_path: Path, sampler: str) -> None:
    out = run.out("--task", "cartpole", "--path", tmp_path / "run", "--sampler", sampler)
    words = next(line for line in out.splitlines() if line.startswith("mean return")).split()
    first, last = float(words[words.index("at") - 1]), float(words[words.index("after") - 1])
    assert first < 60
    assert last > 150
