"""The configuration file of the how-to is one that verl and the plugin understand, and says the defaults."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf, open_dict

from trainer_hooks.guidance_config import GuidanceConfig
from trainer_hooks.verl.config import ReplayBlock

OVERRIDES = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8", "trainer.default_local_dir=/checkpoints")


def composed(project_root: Path) -> Any:
    with initialize_config_dir(str(project_root / "docs" / "howto"), version_base=None):
        return compose("verl_replay", overrides=[*OVERRIDES, "hydra.searchpath=[pkg://verl.trainer.config]"])


def test_it_is_understood_and_says_the_defaults(project_root: Path) -> None:
    config = composed(project_root)
    assert config.trainer.v1.trainer_mode == "sync_replay"
    block = ReplayBlock.from_config(config)
    with open_dict(config):
        config.exp_manager = {"experience_replay": {"enable": True}}
    assert block == ReplayBlock.from_config(config)


def test_it_names_every_option(project_root: Path) -> None:
    block = ReplayBlock.from_config(composed(project_root))
    given = OmegaConf.to_container(composed(project_root).exp_manager)
    assert isinstance(given, dict)
    for section in ("recording", "outcome", "experience_replay"):
        known = {field.name for field in dataclasses.fields(getattr(block, section))}
        assert known - set(given[section]) <= (
            {"store", "success_threshold"} if section == "experience_replay" else set()
        )
    options = {field.name for field in dataclasses.fields(block.guidance)} - {"store"}
    said = OmegaConf.to_container(composed(project_root).experience_maker)
    assert isinstance(said, dict)
    assert options <= {*said, *given}
    assert GuidanceConfig.from_config(composed(project_root)) == GuidanceConfig()
