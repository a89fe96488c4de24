"""The block ``exp_manager`` in verl's configuration, composed by Hydra."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf, open_dict

from tests.trainer_hooks.verl.conftest import Compose
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.guidance.config import GuidanceConfig
from trainer_hooks.verl.config import OutcomeRule, RecordingConfig, ReplayBlock
from trainer_hooks.verl.early import check_options
from trajstore.errors import ConfigurationError, InvalidTrajectoryError, TrajstoreError

GRPO = "algorithm.adv_estimator=grpo"
REPLAY = "exp_manager.experience_replay"
ON = f"+{REPLAY}.enable=true"
GROUP = "actor_rollout_ref.rollout.n=4"
SHOWS = ("+experience_maker.enable_context_generator=true", "+exp_manager.rollout_expratio=0.5")
MAKES = ("+experience_maker.enable_summarizer=true", "+experience_maker.updated_freq=1")
BASE = (GRPO, GROUP, "trainer.default_local_dir=checkpoints/here")


def block_of(compose: Compose, *overrides: str) -> ReplayBlock:
    return ReplayBlock.from_config(compose([*BASE, *overrides]))


# ---- defaults ----


def test_what_rollouts_depend_on_is_known_by_its_contents(override_verl: Compose, tmp_path: Path) -> None:
    """An edited file at the same path, and a template or tokenizer of one's own, make rollouts that do not mix."""
    file, model = tmp_path / "reward.py", "actor_rollout_ref.model"
    options = (
        f"{model}.custom_chat_template=x",
        f"{model}.custom_chat_template=y",
        f"{model}.tokenizer_path={tmp_path}",
    )
    seen = {block_of(override_verl, option).sampling for option in options}
    for option in ("reward.custom_reward_function.path", "data.tool_config_path"):
        for contents in ("one", "two"):
            file.write_text(contents)
            seen.add(block_of(override_verl, f"{option}={file}").sampling)
            assert block_of(override_verl, f"{option}={file}").sampling in seen
    assert len(seen) == 7


def test_a_configuration_without_the_block_records_and_replays_nothing(override_verl: Compose) -> None:
    block = block_of(override_verl)
    folder = Path("checkpoints/here/trajstore").absolute()
    assert block.sampling != block_of(override_verl, "actor_rollout_ref.rollout.temperature=0.5").sampling
    assert block.sampling == block_of(override_verl, "actor_rollout_ref.rollout.gpu_memory_utilization=0.3").sampling
    assert dataclasses.replace(block, sampling="") == ReplayBlock(
        experience_replay=ExperienceReplayConfig(enable=False),
        recording=RecordingConfig(path=None, format="pt", capacity=None, on_error="raise"),
        outcome=OutcomeRule(key=None, success=1.0),
        folder=folder,
        n_rollout=4,
        max_prompt_length=512,
        max_response_length=512,
    )
    assert block.recording_path == str(folder / "rollouts")


@pytest.mark.parametrize("block", ["null", "{}", "{recording:null,outcome:null,experience_replay:null}"])
def test_empty_is_as_good_as_absent(override_verl: Compose, block: str) -> None:
    assert block_of(override_verl, f"+exp_manager={block}") == block_of(override_verl)


def test_every_key(compose_verl: Compose) -> None:
    block = block_of(
        compose_verl,
        "+exp_manager.recording={path:s3://bucket/rollouts,format:pkl,capacity:10000,on_error:warn}",
        "+exp_manager.outcome={key:acc,success:2}",
        f"+{REPLAY}={{enable:true,exp_ratio:[[0.0,0.1],[1.0,0.5]],offpolicy_trajectories_per_task:3,"
        "off_policy_shaping:none,group_offpolicy:shared}",
    )
    assert block.recording == RecordingConfig(
        path="s3://bucket/rollouts", format="pkl", capacity=10_000, on_error="warn"
    )
    assert block.recording_path == "s3://bucket/rollouts"
    assert block.outcome == OutcomeRule(key="acc", success=2)
    replay = block.experience_replay
    assert replay.exp_ratio == ((0.0, 0.1), (1.0, 0.5))
    assert (replay.off_policy_shaping, replay.group_offpolicy) == (None, "shared")


def test_values_may_be_interpolations(override_verl: Compose) -> None:
    block = block_of(override_verl, "+exp_manager.recording.path=${trainer.default_local_dir}/r")
    assert block.recording.path == "checkpoints/here/r"


def test_the_configuration_is_not_changed(compose_verl: Compose) -> None:
    config = compose_verl([*BASE, ON, "+exp_manager.recording.capacity=5000"])
    assert OmegaConf.is_struct(config), "the composed configuration takes no new keys"
    before = OmegaConf.to_container(config)
    ReplayBlock.from_config(config)
    assert OmegaConf.to_container(config) == before
    assert OmegaConf.is_struct(config)


# ---- refusals ----

WRONG = {
    # unknown keys and wrong kinds
    "+exp_manager.recordings.enable=true": "exp_manager: recordings: unknown key",
    "+exp_manager.folder=a": "exp_manager: folder: unknown key",
    "+exp_manager=5": "exp_manager: must be a mapping",
    "+exp_manager.recording=yes": "exp_manager.recording: must be a mapping",
    "+exp_manager.recording.paht=a": "exp_manager.recording: paht: unknown key",
    "+exp_manager.outcome=1": "exp_manager.outcome: must be a mapping",
    f"+{REPLAY}=true": f"{REPLAY}: must be a mapping",
    f"+{REPLAY}.exp_ration=0.5": f"{REPLAY}: exp_ration: unknown key",
    f"+{REPLAY}.use_current_policy_entropy=false": f"{REPLAY}: use_current_policy_entropy: unknown key",
    "+exp_manager.on_resume=keep": "exp_manager: on_resume: unknown key",
    # recording
    "+exp_manager.recording.path=''": "exp_manager.recording: path: ''",
    "+exp_manager.recording.format=csv": "csv",
    # outcome
    "+exp_manager.outcome.success=0": "exp_manager.outcome: success: 0",
    "+exp_manager.experience_replay.success_threshold=0.5": "experience_replay.success_threshold: an outcome is 1",
    # replay
    f"+{REPLAY}.exp_ratio=1.5": "exp_ratio: 1.5",
    f"+{REPLAY}.store.capacity=5": "store.path: None",
    f"+{REPLAY}.store={{path:pool,format:csv}}": "store.format: 'csv', must be one of 'pt'",
    # verl's options
    "actor_rollout_ref.actor.clip_ratio_low=-1": "actor.clip_ratio_low: -1, must be at least 0",
    "actor_rollout_ref.actor.clip_ratio_high=-0.1": "actor.clip_ratio_high: -0.1, must be at least 0",
    "actor_rollout_ref.actor.clip_ratio=nan": "actor.clip_ratio: nan, must be at least 0",
    "actor_rollout_ref.actor.clip_ratio_c=0.5": "actor.clip_ratio_c: 0.5, must be above 1",
    "actor_rollout_ref.rollout.n=0": "rollout.n: 0, must be",
    "data.train_batch_size=null": "data.train_batch_size: None",
    "trainer.default_local_dir=null": "trainer.default_local_dir: None, must be a local folder",
    "trainer.default_local_dir=s3://a/b": "trainer.default_local_dir: s3://a/b, must be a local folder",
    # paths
    "+exp_manager.recording.path=checkpoints/here": "is the folder of exp_manager.recording.path too",
    "+exp_manager.recording.path=checkpoints/../checkpoints/here/": "is the folder of exp_manager.recording.path too",
}


CONTRADICTIONS: dict[str, tuple[Sequence[str], str]] = {
    "het without replay": (["actor_rollout_ref.actor.policy_loss.loss_mode=het"], "policy_loss.loss_mode: het"),
    "another loss": ([ON, "actor_rollout_ref.actor.policy_loss.loss_mode=gspo"], "policy_loss.loss_mode: gspo"),
    "bypass": ([ON, "algorithm.rollout_correction.bypass_mode=true"], "algorithm.rollout_correction.bypass_mode"),
    "gae": ([ON, "algorithm.adv_estimator=gae"], "algorithm.adv_estimator: gae"),
    "remax": ([ON, "algorithm.adv_estimator=remax"], "algorithm.adv_estimator: remax"),
    "older than that": (
        [ON, "trainer.v1.trainer_mode=colocate_async_replay", f"+{REPLAY}.max_policy_age=1"],
        "max_policy_age: 1, must be at least 2 with trainer.v1.colocate_async.num_warmup_batches = 1",
    ),
    "no groups": ([ON, "algorithm.adv_estimator=reinforce_plus_plus"], "adv_estimator: reinforce_plus_plus"),
    "no task": ([ON, f"+{REPLAY}.exp_ratio=0.5", "data.train_batch_size=1"], "0.5, of data.train_batch_size = 1"),
    "distillation": ([ON, "distillation.enabled=true"], "distillation.enabled"),
    "skipped rollouts": ([ON, "skip.rollout_tq.enable=true"], "skip.rollout_tq.enable"),
    "k = n": ([ON, f"+{REPLAY}.offpolicy_trajectories_per_task=4"], "offpolicy_trajectories_per_task: 4"),
    "copies": ([ON, f"+{REPLAY}.store.path=fast"], f"{REPLAY}.store.path: fast, would have copies of the rollouts in "),
    "the ledger and guidance": (
        [ON, *MAKES, "+experience_maker.store.path=checkpoints/here/trajstore/rollouts/ledger"],
        "is the folder of exp_manager.recording.path (its ledger) too",
    ),
    "a step is deleted": (
        ["+exp_manager.recording.capacity=4095"],
        "capacity: 4095, is below the 4096 rollouts of 1 step (data.train_batch_size = 1024, rollout.n = 4)",
    ),
    "a step that waits": (
        ["+exp_manager.recording.capacity=8191", "trainer.v1.trainer_mode=colocate_async_replay"],
        "is below the 8192 rollouts of 2 steps",
    ),
    "less than a task": ([ON, f"+{REPLAY}.store={{path:pool,capacity:1}}"], "store.capacity: 1, is below the 2 hist"),
    "n = 1": ([ON, "actor_rollout_ref.rollout.n=1"], "offpolicy_trajectories_per_task: 1"),
}


def test_all_contradictions_are_told_at_once(override_verl: Compose) -> None:
    with pytest.raises(ConfigurationError) as caught:
        block_of(override_verl, ON, "algorithm.adv_estimator=gae", "distillation.enabled=true")
    assert "adv_estimator" in str(caught.value)
    assert "distillation.enabled" in str(caught.value)


def test_what_only_replay_cannot_be_together_with_is_no_matter_to_recording(override_verl: Compose) -> None:
    block = block_of(
        override_verl,
        "algorithm.adv_estimator=gae",
        "distillation.enabled=true",
        "algorithm.rollout_correction.bypass_mode=true",
        "actor_rollout_ref.rollout.n=1",
    )
    assert not block.experience_replay.enable


@pytest.mark.parametrize("mode", ["vanilla", "het"])
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_replay_with_either_name_of_the_loss(override_verl: Compose, mode: str, estimator: str) -> None:
    overrides = (f"actor_rollout_ref.actor.policy_loss.loss_mode={mode}", f"algorithm.adv_estimator={estimator}")
    assert block_of(override_verl, ON, *overrides).experience_replay.enable


# ---- outcomes ----


@pytest.mark.parametrize(
    ("rule", "score", "extra", "expected"),
    [
        (OutcomeRule(), 0.4, {}, 0.4),
        (OutcomeRule(), 3.0, {}, 1.0),
        (OutcomeRule(), -2.0, {}, -2.0),
        (OutcomeRule(success=4.0), 3.0, {}, 0.75),
        (OutcomeRule(key="acc"), 0.0, {"acc": True}, 1.0),
        (OutcomeRule(key="acc", success=0.5), 0.0, {"acc": 0.25}, 0.5),
        (OutcomeRule(success=0.7), 0.699999988079071, {}, 1.0),  # 0.7 in float32
        (OutcomeRule(success=0.9), 0.8999999761581421, {}, 1.0),
        (OutcomeRule(success=1.3), 1.2999999523162842, {}, 1.0),
        (OutcomeRule(), math.inf, {}, math.inf),
    ],
)
def test_outcome(rule: OutcomeRule, score: float, extra: dict[str, Any], expected: float) -> None:
    assert rule.of(score, extra) == expected


@pytest.mark.parametrize("extra", [{}, {"acc": None}, {"acc": "1"}, {"other": 1.0}])
def test_a_reward_that_gives_no_such_number(extra: dict[str, Any]) -> None:
    with pytest.raises(InvalidTrajectoryError, match=r"outcome\.key.*'acc'"):
        OutcomeRule(key="acc").of(1.0, extra)


# -- The how-to's configuration file is valid for verl and the plugin, and lists the defaults --


OVERRIDES = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8", "trainer.default_local_dir=/checkpoints")


def test_the_file_is_understood_names_every_option_and_says_the_defaults(project_root: Path) -> None:
    with initialize_config_dir(str(project_root / "docs" / "howto"), version_base=None):
        config = compose("verl_replay", overrides=[*OVERRIDES, "hydra.searchpath=[pkg://verl.trainer.config]"])
    assert config.trainer.v1.trainer_mode == "sync_replay"
    block, given = ReplayBlock.from_config(config), OmegaConf.to_container(config.exp_manager)
    left_out = {"experience_replay": {"store", "success_threshold"}}
    for section in ("recording", "outcome", "experience_replay"):
        known = {field.name for field in dataclasses.fields(getattr(block, section))}
        assert known - set(given[section]) <= left_out.get(section, set())
    options = {field.name for field in dataclasses.fields(block.guidance)} - {"store"}
    assert options <= {*OmegaConf.to_container(config.experience_maker), *given}
    assert GuidanceConfig.from_config(config) == GuidanceConfig()
    with open_dict(config):
        config.exp_manager = {"experience_replay": {"enable": True}}
    assert block == ReplayBlock.from_config(config)


# -- Guidance options: their meaning, and combinations refused as having no effect --


def test_experiences_lie_beside_the_rollouts_unless_told_otherwise(override_verl: Compose) -> None:
    block = block_of(override_verl, *SHOWS, *MAKES)
    assert block.guidance.store == {"path": str(Path("checkpoints/here/trajstore/experiences").absolute())}
    assert block_of(override_verl, *SHOWS, *MAKES, "+experience_maker.store=null").guidance.store is None
    assert block_of(override_verl, *MAKES, "+exp_manager.reme.store.path=/a").guidance.store == {"path": "/a"}
    assert not block_of(override_verl).guidance.is_on


def test_discarded_rows_need_the_loss_that_knows_them(override_verl: Compose) -> None:
    assert block_of(override_verl, *SHOWS).masks_rows
    assert not block_of(override_verl, *MAKES).masks_rows
    assert not block_of(override_verl, SHOWS[0], "+exp_manager.val_rollout_expmode=all").masks_rows


REFUSED = {
    (
        *SHOWS,
        "+exp_manager.train_rollout_expmod=all",
    ): "exp_manager: train_rollout_expmod: unknown key; did you mean train_rollout_expmode?",
    (*SHOWS, "+experience_maker.basis=a"): "experience_maker.basis: unknown key",
    (*SHOWS, "+exp_manager.rollout_ratio=0.5"): "rollout_ratio: unknown key",
    (SHOWS[1],): "neither enable_context_generator nor enable_summarizer is true",
    ("+experience_maker.retrieve_top_k=3",): "neither enable_context_generator nor enable_summarizer is true",
    (*MAKES, "+exp_manager.recording.text=false"): "needs exp_manager.recording.text=true",
    (*MAKES, "+experience_maker.val_summarizer_save=true", "trainer.val_before_train=False"): "and a validation",
    (
        *MAKES,
        "+exp_manager.init_experience_before_training=true",
        "trainer.val_before_train=False",
    ): "trainer.val_before_train=True, whose rollouts become experience",
    (*MAKES, "+experience_maker.val_summarizer_save=true", "reward.reward_model.enable=true"): "have no reward yet",
    (*SHOWS, "algorithm.adv_estimator=remax"): "shown nothing",
    (*SHOWS, "skip.rollout_tq.enable=true"): "skipped rollouts are shown nothing",
    (*SHOWS, "actor_rollout_ref.actor.policy_loss.loss_mode=gspo"): "policy_loss.loss_mode: gspo",
    (
        *SHOWS,
        "algorithm.rollout_correction.bypass_mode=true",
    ): "rows without their experience need log-probs of the actor",
    (*SHOWS, "distillation.enabled=true"): "the one that rows without their experience need",
}
ALL_REFUSED = [*(((override,), says) for override, says in WRONG.items()), *CONTRADICTIONS.values(), *REFUSED.items()]


@pytest.mark.parametrize(("overrides", "says"), ALL_REFUSED, ids=range(len(ALL_REFUSED)))
def test_what_cannot_be_is_refused_by_its_key(override_verl: Compose, overrides: Sequence[str], says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        block_of(override_verl, *overrides)


def test_document_000_verbatim_is_accepted_with_warnings(
    override_verl: Compose, caplog: pytest.LogCaptureFixture
) -> None:
    replay = "{enable: true, replay_start_ratio: 0.35, exp_ratio: 0.5, offpolicy_trajectories_per_task: 1"
    reme = "{base_url: 'http://localhost:8001', workspace_id: default, enable_context_generator: true"
    block_of(
        override_verl,
        f"+exp_manager.experience_replay={replay}, max_trajectories_per_task: 10, off_cliprange_high: 1.0}}",
        f"+exp_manager.reme={reme}, enable_summarizer: true}}",
        "+exp_manager.rollout_expratio=0.1",
    )
    assert "nothing becomes experience: set experience_maker.updated_freq" in caplog.text
    assert "no rollout is guided: train_rollout_expmode is mixed" in caplog.text
    assert "0.1 of the rollouts of a task are none" in caplog.text


def test_kept_experience_goes_with_losses_of_verl(override_verl: Compose) -> None:
    kept = (*SHOWS, "+exp_manager.train_sample_expmode=allkeep")
    assert block_of(override_verl, *kept, "actor_rollout_ref.actor.policy_loss.loss_mode=gspo").guidance.is_on
    assert block_of(override_verl, *kept, "algorithm.rollout_correction.bypass_mode=true").guidance.is_on


def test_a_trainer_that_ignores_guidance_is_told_of_before_anything_starts(override_verl: Compose) -> None:
    for how in ("trainer.v1.trainer_mode=sync", "trainer.use_v1=False"):
        config = override_verl([*BASE, how, *SHOWS])
        with pytest.raises(ConfigurationError, match=rf"options of guidance, but {how} guides nothing"):
            check_options(config)


def test_options_of_what_is_switched_off_are_no_error(override_verl: Compose) -> None:
    off = ("+experience_maker.enable_context_generator=false", *SHOWS[1:], "+experience_maker.retrieve_top_k=2")
    assert not block_of(override_verl, *off).guidance.is_on
    check_options(override_verl([*BASE, "trainer.v1.trainer_mode=sync", *off]))


@pytest.mark.parametrize(
    ("path", "says"),
    [("nosuch://a/b", "Protocol not known: nosuch"), ("~/x", "only a shell expands '~'"), ("FILE", "must be a folder")],
)
def test_paths_that_cannot_be_opened_are_refused_before_anything_starts(
    path: str, says: str, override_verl: Compose, tmp_path: Path
) -> None:
    (tmp_path / "FILE").touch()
    path = str(tmp_path / path) if path == "FILE" else path
    mode = "trainer.v1.trainer_mode=sync_replay"
    for overrides in ((f"+exp_manager.recording.path='{path}'",), (*MAKES, f"+experience_maker.store.path='{path}'")):
        with pytest.raises(TrajstoreError, match=says) as caught:
            check_options(override_verl([*BASE, mode, *overrides]))
        option = overrides[-1].split("=")[0].removeprefix("+")
        assert option in "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
