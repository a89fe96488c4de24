"""``python -m trainer_hooks.verl.check``: the command of a run, checked and not started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl", exc_type=ImportError)
pytest.importorskip("transfer_queue", exc_type=ImportError)

from tests.trainer_hooks.verl.conftest import Compose
from trainer_hooks.verl import check
from trajstore.errors import ConfigurationError

BASE = (
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
)


def test_the_command_of_a_run_is_checked_and_leaves_nothing_behind(project_root: Path, tmp_path: Path) -> None:
    options = (f"--config-dir={project_root / 'docs' / 'howto'}", "--config-name=verl_replay", *BASE)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
    done = subprocess.run(
        [sys.executable, "-m", "trainer_hooks.verl.check", *options, f"trainer.default_local_dir={tmp_path / 'run'}"],
        cwd=tmp_path,
        env={**clean, "PYTHONPATH": str(project_root), "VERL_USE_EXTERNAL_MODULES": "trainer_hooks.verl.plugin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trainer.v1.trainer_mode=sync_replay: the options can take effect\n" in done.stdout
    assert f"pool: {tmp_path / 'run' / 'trajstore' / 'pool'}\n" in done.stdout
    assert not list(tmp_path.iterdir())


def test_what_is_off_is_said(override_verl: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check.check(override_verl([*BASE, "trainer.v1.trainer_mode=sync"]))[1:] == [
        "nothing is recorded or replayed"
    ]
    on = [*BASE, "trainer.v1.trainer_mode=sync_replay", "+exp_manager.experience_replay.enable=true"]
    told = check.check(override_verl([*on, "+exp_manager.recording.enable=false"]))
    assert "rollouts: not recorded (exp_manager.recording.enable=false)" in told
    with pytest.raises(ConfigurationError, match=r"on_resume: keep, needs exp_manager\.recording\.enable=true"):
        check.check(override_verl([*on, "+exp_manager.recording.enable=false", "+exp_manager.on_resume=keep"]))
    monkeypatch.setattr(check, "validate_config", lambda **_: None)
    with pytest.raises(ConfigurationError, match="verl has not loaded trajstore's plugin"):
        check.check(override_verl(on))
