"""Options without effect are reported before anything starts."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.trainer_hooks.verl.conftest import Compose
from trainer_hooks.transfer_queue import BACKEND
from trainer_hooks.verl.config import naming
from trainer_hooks.verl.cuts import DATA_FILE, MODEL_FOLDER, TRACKER_FILE, Cut, mend_tracker, write_cut
from trainer_hooks.verl.early import check_options, install, record_on_arrival
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


@pytest.mark.parametrize(
    ("options", "recorded"),
    [
        (("trainer.v1.trainer_mode=sync_replay",), True),
        (("trainer.v1.trainer_mode=sync_replay", "transfer_queue.backend.storage_backend=MooncakeStore"), True),
        (("trainer.v1.trainer_mode=sync_replay", "trainer.use_v1=False"), False),
        (("trainer.v1.trainer_mode=sync",), False),
    ],
)
def test_transfer_queue_gets_our_backend_where_rollouts_are_recorded(
    override_verl: Compose, options: tuple[str, ...], recorded: bool
) -> None:
    config = override_verl([*BASE, *options])
    configured = config.transfer_queue.backend.storage_backend
    for _ in range(2):
        record_on_arrival(config)
        backend = config.transfer_queue.backend
        assert backend.storage_backend == (BACKEND if recorded else configured)
        assert backend.get(BACKEND) == ({"transport": configured} if recorded else None)


def test_the_check_is_installed_once_also_where_others_wrap_verls(
    override_verl: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("verl.utils.config")
    called = []

    def verls(config: Any) -> None:
        called.append("verl")

    @functools.wraps(verls)
    def others(config: Any) -> None:
        called.append("others")
        verls(config)

    monkeypatch.setattr(module, "validate_config", others)
    install()
    ours = module.validate_config
    install()
    assert module.validate_config is ours
    with pytest.raises(ConfigurationError, match=r"experience_replay\.enable: true, but"):
        ours(override_verl([*BASE, "trainer.v1.trainer_mode=sync", ON]))
    assert called == []
    ours(override_verl(BASE))
    assert called == ["others", "verl"]


def test_an_empty_tracker_file_names_the_newest_complete_checkpoint_again(
    override_verl: Compose, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = override_verl([*BASE, "trainer.v1.trainer_mode=sync_replay", ON, f"trainer.default_local_dir={tmp_path}"])
    tracker = tmp_path / TRACKER_FILE
    tracker.write_text("", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"is empty; none is complete"):
        mend_tracker(config)
    for step in (3, 6, 9):
        folder = tmp_path / f"global_step_{step}"
        write_cut(folder, Cut(step, "run", None, {}))
        (folder / MODEL_FOLDER).mkdir()
        if step < 9:  # a crash prevented the rest of step 9
            (folder / DATA_FILE).touch()
    tracker.write_text("abc", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"not a number: 'abc'; write 6 into it"):
        mend_tracker(config)
    for crashed in ("", "\0\0"):
        tracker.write_text(crashed, encoding="utf-8")
        mend_tracker(config)
        assert tracker.read_text(encoding="utf-8") == "6"
    assert caplog.text.count("names global_step_6 again") == 2
    tracker.write_bytes(b"3\r\n")
    mend_tracker(config)
    assert tracker.read_bytes() == b"3\r\n"
    assert caplog.text.count("again") == 2


def test_what_cannot_be_opened_names_its_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = str(tmp_path / "file" / "rollouts")
    with (
        pytest.raises(ConfigurationError, match=rf"recording\.path: {path}: .*Not a directory"),
        naming("exp_manager.recording.path", path),
    ):
        TrajectoryReplayBuffer(auto_save=True, auto_save_path=path)
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
        TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "taken")
    assert caught.value.__notes__ == ["exp_manager.recording.path: taken"]
