"""Options that cannot take effect, told before anything is started."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer_hooks.verl.conftest import Compose
from trainer_hooks.verl import check
from trainer_hooks.verl.config import naming
from trainer_hooks.verl.cuts import MODEL_FOLDER, Cut, write_cut
from trainer_hooks.verl.early import check_options
from trainer_hooks.verl.reading import RunTokenizer, Scribe
from trainer_hooks.verl.recorder import RolloutRecorder
from trajstore import TrajectoryReplayBuffer
from trajstore.errors import ConfigurationError, StoreLockedError

ON = "+exp_manager.experience_replay.enable=true"
BASE = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "trainer.resume_mode=auto")


@pytest.mark.parametrize("how", ["trainer.v1.trainer_mode=sync", "trainer.v1.trainer_mode=colocate_async"])
def test_replay_with_a_trainer_that_ignores_it_is_refused(override_verl: Compose, how: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"experience_replay\.enable: true, but {how} replays and records"):
        check_options(override_verl([*BASE, how, ON]))


def test_other_options_that_have_no_effect_are_told(override_verl: Compose, caplog: pytest.LogCaptureFixture) -> None:
    check_options(override_verl(BASE))
    assert not caplog.records
    check_options(override_verl([*BASE, "trainer.v1.trainer_mode=sync", "+exp_manager.recording.path=/disk"]))
    assert "exp_manager has no effect with trainer.v1.trainer_mode=sync" in caplog.text


def test_contradictions_are_told_as_early(override_verl: Compose) -> None:
    config = override_verl([*BASE, "trainer.v1.trainer_mode=sync_replay", ON, "+exp_manager.outcome.sucess=1"])
    with pytest.raises(ConfigurationError, match=r"exp_manager\.outcome: sucess: unknown key"):
        check_options(config)


@pytest.mark.parametrize(("text", "what"), [("", "is empty"), ("abc", "is not a number: 'abc'")])
def test_an_empty_tracker_file_names_the_newest_complete_checkpoint(
    override_verl: Compose, tmp_path: Path, text: str, what: str
) -> None:
    config = override_verl([*BASE, "trainer.v1.trainer_mode=sync_replay", ON, f"trainer.default_local_dir={tmp_path}"])
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=rf"{what}.*No checkpoint there is complete"):
        check_options(config)
    for step in (3, 6, 9):
        folder = tmp_path / f"global_step_{step}"
        write_cut(folder, Cut(step, "run", -1, "", None, {}))
        (folder / MODEL_FOLDER).mkdir()
        if step < 9:  # a crash came before the rest of step 9
            (folder / "data.pt").touch()
    with pytest.raises(ConfigurationError, match=rf"{what}.*global_step_6: write 6 into the file"):
        check_options(config)
    tracker.write_text("6", encoding="utf-8")
    check_options(config)


def test_what_cannot_be_opened_names_its_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = str(tmp_path / "file" / "rollouts")
    scribe = Scribe(RunTokenizer("f1"), text=False)
    with (
        pytest.raises(ConfigurationError, match=rf"recording\.path: {path}: .*Not a directory"),
        naming("exp_manager.recording.path", path),
    ):
        RolloutRecorder(path, "pt", None, "raise", scribe)
    with (
        pytest.raises(ConfigurationError, match=r"recording\.path: s3://b/r: cannot be opened: .*no credentials"),
        naming("exp_manager.recording.path", "s3://b/r"),
    ):
        raise LookupError("no credentials")
    with (
        TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "taken"),
        pytest.raises(StoreLockedError) as caught,
        naming("exp_manager.recording.path", "taken"),
    ):
        RolloutRecorder(str(tmp_path / "taken"), "pt", None, "raise", scribe)
    assert caught.value.__notes__ == ["exp_manager.recording.path: taken"]


# -- ``python -m trainer_hooks.verl.check``: the command of a run, checked and not started --


CHECKED = (
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
)


def test_the_command_of_a_run_is_checked_and_leaves_nothing_behind(project_root: Path, tmp_path: Path) -> None:
    """With the configuration file of the guide; verl finds the plugin by its name alone."""
    page = (project_root / "docs" / "howto" / "verl.md").read_text()
    [command] = re.findall(r"^python -m trainer_hooks\.verl\.check (.*?)\n```", page, re.MULTILINE | re.DOTALL)
    options = [word for word in command.replace("\\\n", " ").split() if not word.startswith("--")]
    assert len(options) == 4
    named = {"VERL_USE_EXTERNAL_MODULES": "trainer_hooks.verl.plugin", "VERL_USE_EXTERNAL_PLUGINS": "none"}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
    where = (f"--config-dir={project_root / 'docs' / 'howto'}", "--config-name=verl_replay")
    options.append(f"trainer.default_local_dir={tmp_path / 'run'}")
    done = subprocess.run(
        [sys.executable, "-m", "trainer_hooks.verl.check", *where, *options],
        cwd=tmp_path,
        env={**clean, **named, "PYTHONPATH": str(project_root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trainer.v1.trainer_mode=sync_replay: the options can take effect\n" in done.stdout
    assert f"pool: {tmp_path / 'run' / 'trajstore' / 'pool'}\n" in done.stdout
    assert not list(tmp_path.iterdir())


def test_what_is_wrong_with_an_option_of_ours_is_one_sentence(
    override_verl: Compose, capsys: pytest.CaptureFixture[str]
) -> None:
    on = ("trainer.v1.trainer_mode=sync_replay", "+exp_manager.experience_replay.exp_ratio=3")
    with pytest.raises(SystemExit, match=r"^ConfigurationError: exp_manager\.experience_replay: exp_ratio: 3, "):
        check.main(override_verl([*CHECKED, *on]))
    assert "checks passed" not in capsys.readouterr().out  # verl ends its own with these words


def test_what_is_off_is_said(override_verl: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check.check(override_verl([*CHECKED, "trainer.v1.trainer_mode=sync"]))[1:] == [
        "nothing is recorded or replayed"
    ]
    on = [*CHECKED, "trainer.v1.trainer_mode=sync_replay", "+exp_manager.experience_replay.enable=true"]
    told = check.check(override_verl([*on, "+exp_manager.recording.enable=false"]))
    assert "rollouts: not recorded (exp_manager.recording.enable=false)" in told
    with pytest.raises(ConfigurationError, match=r"on_resume: keep, needs exp_manager\.recording\.enable=true"):
        check.check(override_verl([*on, "+exp_manager.recording.enable=false", "+exp_manager.on_resume=keep"]))
    monkeypatch.setattr(check, "validate_config", lambda **_: None)
    with pytest.raises(ConfigurationError, match="verl has not loaded trajstore's plugin"):
        check.check(override_verl(on))
