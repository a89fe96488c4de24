"""Options of guidance beside verl's own: what they mean, and what is refused because it could have no effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer_hooks.verl.conftest import Compose
from trainer_hooks.verl.config import ReplayBlock
from trainer_hooks.verl.early import check_options
from trajstore.errors import ConfigurationError

BASE = (
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=4",
    "trainer.default_local_dir=checkpoints/here",
    "trainer.v1.trainer_mode=sync_replay",
    "trainer.resume_mode=disable",
)
SHOWS = ("+experience_maker.enable_context_generator=true", "+exp_manager.rollout_expratio=0.5")
MAKES = ("+experience_maker.enable_summarizer=true", "+experience_maker.updated_freq=1")


def block_of(compose: Compose, *overrides: str) -> ReplayBlock:
    return ReplayBlock.from_config(compose([*BASE, *overrides]))


def test_experiences_lie_beside_the_rollouts_unless_told_otherwise(override_verl: Compose) -> None:
    block = block_of(override_verl, *SHOWS, *MAKES)
    assert block.guidance.store == {"path": str(Path("checkpoints/here/trajstore/experiences").absolute())}
    assert block_of(override_verl, *SHOWS, *MAKES, "+experience_maker.store=null").guidance.store is None
    assert block_of(override_verl, *MAKES, "+exp_manager.reme.store.path=/a").guidance.store == {"path": "/a"}
    assert not block_of(override_verl).guidance.is_on


def test_the_names_of_today_and_the_other_place_of_the_maker(override_verl: Compose) -> None:
    block = block_of(
        override_verl,
        "+exp_manager.reme.enable_context_generator=true",
        "+exp_manager.reme.base_url=http://127.0.0.1:8001",
        "+exp_manager.train_rollout_mode=all",
        "+exp_manager.train_sample_mode=allkeep",
    )
    assert block.guidance.base_url == "http://127.0.0.1:8001"
    assert block.guidance.train_rollout_expmode == "all"
    assert not block.masks_rows, "kept rows are trained on as they were sampled"


def test_discarded_rows_need_the_loss_that_knows_them(override_verl: Compose) -> None:
    assert block_of(override_verl, *SHOWS).masks_rows
    assert not block_of(override_verl, *MAKES).masks_rows
    assert not block_of(override_verl, SHOWS[0], "+exp_manager.val_rollout_mode=all").masks_rows


REFUSED = {
    (*SHOWS, "+exp_manager.train_rollout_expmod=all"): "exp_manager: train_rollout_expmod: unknown key; known are ",
    (*SHOWS, "+experience_maker.basis=a"): "experience_maker.basis: unknown key",
    (*SHOWS, "+exp_manager.rollout_ratio=0.5"): "is the same option as exp_manager.rollout_expratio",
    (SHOWS[0],): "no rollout is guided: train_rollout_expmode is mixed",
    (SHOWS[0], "+exp_manager.rollout_expratio=0.1"): "0.1 of the rollouts of a task are none",
    (SHOWS[1],): "neither enable_context_generator nor enable_summarizer is true",
    ("+experience_maker.retrieve_top_k=3",): "neither enable_context_generator nor enable_summarizer is true",
    (MAKES[0],): "nothing becomes experience: set experience_maker.updated_freq",
    (*MAKES, "+exp_manager.recording.text=false"): "needs exp_manager.recording.text=true",
    (*MAKES, "+experience_maker.val_summarizer_save=true", "trainer.val_before_train=False"): "and a validation",
    (
        *MAKES,
        "+exp_manager.init_exp_before_training=true",
        "trainer.val_before_train=False",
    ): "trainer.val_before_train=True, whose rollouts become experience",
    (
        *MAKES,
        "+exp_manager.init_exp_before_training=true",
        "+exp_manager.init_exp_only=true",
    ): "needs trainer.val_only=True",
    (
        *MAKES,
        "+experience_maker.val_summarizer_save=true",
        "reward.reward_model.enable=true",
    ): "have no reward yet",
    (*SHOWS, "algorithm.adv_estimator=remax"): "shown nothing",
    (*SHOWS, "skip.rollout_tq.enable=true"): "skipped rollouts are shown nothing",
    (*SHOWS, "actor_rollout_ref.actor.policy_loss.loss_mode=gspo"): "policy_loss.loss_mode: gspo",
    (
        *SHOWS,
        "algorithm.rollout_correction.bypass_mode=true",
    ): "rows without their experience need log-probs of the actor",
    (*SHOWS, "distillation.enabled=true"): "the one that rows without their experience need",
}


@pytest.mark.parametrize("overrides", list(REFUSED), ids=range(len(REFUSED)))
def test_what_could_have_no_effect_is_refused(override_verl: Compose, overrides: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        block_of(override_verl, *overrides)
    assert REFUSED[overrides] in str(caught.value)


def test_kept_experience_goes_with_losses_of_verl(override_verl: Compose) -> None:
    kept = (*SHOWS, "+exp_manager.train_sample_expmode=allkeep")
    block_of(override_verl, *kept, "actor_rollout_ref.actor.policy_loss.loss_mode=gspo")
    block_of(override_verl, *kept, "algorithm.rollout_correction.bypass_mode=true")


def test_a_trainer_that_ignores_guidance_is_told_of_before_anything_starts(override_verl: Compose) -> None:
    for how in ("trainer.v1.trainer_mode=sync", "trainer.use_v1=False"):
        config = override_verl([*BASE, how, *SHOWS])
        with pytest.raises(ConfigurationError, match=rf"options of guidance, but {how} guides nothing"):
            check_options(config)


def test_options_of_what_is_switched_off_are_no_error(override_verl: Compose) -> None:
    off = ("+experience_maker.enable_context_generator=false", *SHOWS[1:], "+experience_maker.retrieve_top_k=2")
    assert not block_of(override_verl, *off).guidance.is_on
    check_options(override_verl([*BASE, "trainer.v1.trainer_mode=sync", *off]))


def test_nothing_but_guidance_is_enough_for_the_trainer(override_verl: Compose) -> None:
    assert block_of(override_verl, *SHOWS, "+exp_manager.recording.enable=false").guidance.is_on
