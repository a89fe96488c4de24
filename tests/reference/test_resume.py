"""A resumed run equals the uninterrupted one, and a killed one leaves its pool."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reference.runs import HOUSEHOLD, SORT, Train, summary
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.reference.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint
from trainer_hooks.reference.config import TrainerConfig
from trainer_hooks.reference.model import ModelConfig
from trajstore.errors import ConfigurationError, CorruptStoreError, StoreNotFoundError
from trajstore.experience import BufferStore, ExperienceManager
from trajstore.experience.persistence import read_pool

CHILD = Path(__file__).with_name("killed_run.py")


@pytest.mark.parametrize(
    ("config", "on_disk"), [(SORT, False), (HOUSEHOLD, True)], ids=["sort-memory", "household-disk"]
)
def test_a_resumed_run_equals_the_uninterrupted_one(
    make: Train, tmp_path: Path, config: TrainerConfig, on_disk: bool
) -> None:
    """Also when the first run went on after the checkpoint, so that its store holds what came later."""
    options = {"experience_rbound": None, "offpolicy_trajectories_per_task": 2, "exp_select_mode": "random"}
    places = [{"store": {"path": str(tmp_path / name)}} if on_disk else {} for name in ("whole", "parts")]
    whole, first = (make(config, **options, **place) for place in places)
    whole.train()
    half = config.steps // 2
    first.train(until=half)
    saved = save_checkpoint(first, tmp_path / "checkpoints")
    first.train(until=half + 2)
    first.close()

    second = make(config, **options, **places[1])
    assert newest_checkpoint(tmp_path / "checkpoints") == saved
    load_checkpoint(second, saved)
    assert second.step == half
    assert second.train() == whole.curve
    assert all(whole.model.state_dict()[name].equal(value) for name, value in second.model.state_dict().items())
    assert summary(second.hook.manager) == summary(whole.hook.manager)
    replayed = "experience_replay/replayed_rows"
    assert second.metrics[replayed] == whole.metrics[replayed]


def test_checkpoints_of_another_run_and_damaged_ones_are_refused(make: Train, tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "none") is None
    trainer = make(SORT)
    path = save_checkpoint(trainer, tmp_path)
    with pytest.raises(ConfigurationError, match="another tokenizer"):
        load_checkpoint(make(HOUSEHOLD), path)
    with pytest.raises(ConfigurationError, match="another size of model"):
        load_checkpoint(make(replace(SORT, warm_start_steps=0, model=ModelConfig(16, 1, 2))), path)
    with pytest.raises(StoreNotFoundError, match="step_9"):
        load_checkpoint(trainer, tmp_path / "step_9.pt")
    for damage in (path.read_bytes()[:-200], b"", b"not a checkpoint"):
        path.write_bytes(damage)
        with pytest.raises(CorruptStoreError, match=path.name):
            load_checkpoint(trainer, path)
    torch.save({"version": 1, "model": {}}, path)
    with pytest.raises(CorruptStoreError, match="lacks tokenizer_fingerprint, optimizer"):
        load_checkpoint(trainer, path)
    torch.save({"version": 99}, path)
    with pytest.raises(CorruptStoreError, match="version 99"):
        load_checkpoint(trainer, path)


@pytest.fixture(scope="module")
def killed(project_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of what killed runs left, by name."""
    folder = tmp_path_factory.mktemp("killed")
    environment = {**os.environ, "PYTHONPATH": str(project_root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(CHILD), str(folder)]
    done = subprocess.run(command, env=environment, cwd=project_root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def reopened(folder: Path) -> dict[str, Any]:
    """Open the pool that a killed run left, and return what it holds."""
    store = BufferStore.open(folder / "pool")
    try:
        manager = ExperienceManager(ExperienceReplayConfig().pool_rules(SORT.n_rollout), store=store)
        return summary(manager)
    finally:
        store.close()


def test_kill_in_the_middle_of_a_step_leaves_the_pool_of_the_last_flush(killed: Path) -> None:
    flushed = json.loads((killed / "in-step" / "flushed.json").read_text())
    found = reopened(killed / "in-step")
    assert found == flushed["pool"]
    assert sum(map(len, found["trajectories"].values())) > 0


def test_kill_at_any_moment_leaves_a_pool_that_opens(killed: Path) -> None:
    flushed = json.loads((killed / "run" / "flushed.json").read_text())
    found = reopened(killed / "run")
    for task, several in flushed["pool"]["trajectories"].items():
        kept = found["trajectories"].get(task, [])
        newer = [one for one in kept if one[1] > flushed["step"]]
        # Later steps may have solved the task, which then left the pool, or given it better trajectories.
        assert all(one in several for one in kept if one not in newer)
        assert newer or kept in (several, [])
    assert found["trajectories"] or found["skip"]


def test_a_killed_run_resumes_with_the_pools_files(make: Train, killed: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The checkpoint has no cut of the pool, as that of a trainer which saves the model alone."""
    files = killed / "files" / "experience_pool"
    assert sorted(path.name for path in files.iterdir()) == ["step_2", "step_4"]
    newest = newest_checkpoint(killed / "files" / "checkpoints")
    assert newest is not None
    state = torch.load(newest, weights_only=True)
    assert state["curve"][-1]["step"] == 4
    resumed = make(SORT, pool_path=str(files), pool_save_freq=2, experience_rbound=None)
    with caplog.at_level(logging.INFO):
        resumed.load_state_dict({**state, "replay": {}})
    assert f"loaded {files / 'step_4'} with" in caplog.text
    kept = read_pool(files / "step_4")
    manager = resumed.hook.manager
    assert manager.difficulty2task_dict == kept.difficulty2task_dict
    assert {task: len(held) for task, held in manager.task2trajectories.items()} == {
        task: len(held) for task, held in kept.task2trajectories.items()
    }
    resumed.train(until=6)
    assert resumed.metrics["experience_replay/replayed_rows"] > 0
    assert resumed.metrics["experience_replay/age_max"] >= 2
    assert (files / "step_6").is_dir()
