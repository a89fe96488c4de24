"""``python -m trainer_hooks.verl.check``: the command of a run, checked and not started."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def said_of(project_root: Path, tmp_path: Path, *options: str) -> tuple[int, str, str]:
    """Run the check with the configuration file of the guide; return exit code, stdout, and what it wrote of errors.

    verl finds the plugin by its name alone.
    """
    named = {"VERL_USE_EXTERNAL_MODULES": "trainer_hooks.verl.plugin", "VERL_USE_EXTERNAL_PLUGINS": "none"}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
    where = (f"--config-dir={project_root / 'docs' / 'howto'}", "--config-name=verl_replay")
    done = subprocess.run(
        [sys.executable, "-m", "trainer_hooks.verl.check", *where, *options],
        cwd=tmp_path,
        env={**clean, **named, "PYTHONPATH": str(project_root)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_command_of_a_run_is_checked_and_leaves_nothing_behind(project_root: Path, tmp_path: Path) -> None:
    page = (project_root / "docs" / "howto" / "verl.md").read_text()
    [command] = re.findall(r"^python -m trainer_hooks\.verl\.check (.*?)\n```", page, re.MULTILINE | re.DOTALL)
    options = [word for word in command.replace("\\\n", " ").split() if not word.startswith("--")]
    assert len(options) == 4
    code, out, err = said_of(project_root, tmp_path, *options, f"trainer.default_local_dir={tmp_path / 'run'}")
    assert code == 0, out + err
    assert "trainer.v1.trainer_mode=sync_replay: the options can take effect\n" in out
    assert f"pool: {tmp_path / 'run' / 'trajstore' / 'pool'}\n" in out
    assert not list(tmp_path.iterdir())


def test_what_is_wrong_with_an_option_of_ours_is_one_sentence(project_root: Path, tmp_path: Path) -> None:
    code, out, err = said_of(project_root, tmp_path, *BASE, "exp_manager.experience_replay.exp_ratio=3")
    assert code == 1
    assert "Traceback" not in out + err
    assert "checks passed" not in out + err  # verl ends its own with these words
    assert err.rstrip().splitlines()[-1].startswith("ConfigurationError: exp_manager.experience_replay: exp_ratio: 3, ")


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
