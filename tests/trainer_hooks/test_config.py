from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.replay import PoolRules, RatioSchedule
from trajstore.errors import ConfigurationError


class Node:
    """Behaves like an OmegaConf node: has keys and items without being a dict or list."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def keys(self) -> Iterator[str]:
        return iter(self._values)

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        return Node(value) if isinstance(value, dict) else value


def test_nothing_said_is_the_defaults() -> None:
    """``verl/test_config.py`` compares the other defaults with the how-to's file."""
    config = ExperienceReplayConfig()
    assert (config.store, config.success_threshold) == (None, 1.0)
    assert ExperienceReplayConfig.from_mapping({}) == config
    assert ExperienceReplayConfig.from_mapping(dataclasses.asdict(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.enable = True  # type: ignore[misc]


def test_every_rule_of_the_pool_is_that_of_the_configuration() -> None:
    other = {
        "max_trajectories_per_task": 3,
        "experience_lbound": 1,
        "experience_rbound": 4,
        "exp_select_mode": "argmax",
        "policy_versions": "spread",
        "in_turns": True,
        "replay_difficulty": 2,
        "success_threshold": 0.5,
        "save_filter": "best",
        "min_reward": 0.25,
        "max_policy_age": 9,
        "task_sampling": "sqrt",
        "seed": 5,
    }
    of_the_trainer = {"n_rollout", "max_prompt_length", "max_response_length"}
    assert {rule.name for rule in dataclasses.fields(PoolRules)} == {*other, *of_the_trainer}
    assert ExperienceReplayConfig().pool_rules(8) == PoolRules(n_rollout=8)
    assert ExperienceReplayConfig(**other).pool_rules(6) == PoolRules(n_rollout=6, **other)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrap", [dict, Node])
def test_it_comes_from_anything_with_keys(wrap: type) -> None:
    values = {"enable": True, "exp_ratio": [[0.2, 0.0], [0.8, 0.5]], "store": {"path": "pool", "capacity": 1000}}
    config = ExperienceReplayConfig.from_mapping(wrap(values))
    assert config.enable
    assert config.store == {"path": "pool", "capacity": 1000}
    assert config.ratio() == RatioSchedule(((0.2, 0.0), (0.8, 0.5)))
    assert ExperienceReplayConfig().ratio() == 0.5


def test_it_comes_from_omegaconf() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    node = omegaconf.OmegaConf.create(
        {"n": 3, "replay": {"seed": "${n}", "store": {"path": "p"}, "exp_ratio": [[0, 0.5]]}}
    )
    config = ExperienceReplayConfig.from_mapping(node.replay)
    assert (config.seed, config.store, config.exp_ratio) == (3, {"path": "p"}, ((0, 0.5),))
    assert ExperienceReplayConfig(exp_ratio=[[0, 0.5]]).exp_ratio == config.exp_ratio  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("exp_ratio", [[0.5, 2.0]]),
        ("exp_ratio", [[0.5]]),
        ("exp_ratio", [[0.5, 0.1], [0.5, 0.2]]),
        ("exp_ratio", [[0.5, 0.1], [0.2, 0.2]]),
        ("offpolicy_trajectories_per_task", 0),
        ("store", {"path": ""}),
        ("store", {"path": "p", "format": 3}),
        ("store", {"path": "p", "capacity": 0}),
        ("store", {"path": "p", "folder": 1}),
        ("max_trajectories_per_task", 0),
        ("experience_rbound", 0),
        ("save_filter", None),
        ("in_turns", "often"),
        ("policy_versions", "all"),
        ("seed", None),
        ("off_policy_shaping", 0),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_key(key: str, value: Any) -> None:
    named = "experience_lbound" if key == "experience_rbound" else key
    with pytest.raises(ConfigurationError, match=rf"{named}(\.\w+)?: "):
        ExperienceReplayConfig.from_mapping({key: value})


def test_k_must_be_below_n_rollout() -> None:
    assert ExperienceReplayConfig.from_mapping({"offpolicy_trajectories_per_task": 3}, n_rollout=4)
    message = "offpolicy_trajectories_per_task: 4, must be below n_rollout = 4"
    with pytest.raises(ConfigurationError, match=message):
        ExperienceReplayConfig.from_mapping({"offpolicy_trajectories_per_task": 4}, n_rollout=4)
    with pytest.raises(ConfigurationError, match=message):
        ExperienceReplayConfig(offpolicy_trajectories_per_task=4).pool_rules(4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"experience_lbound": 3},
            "experience_lbound: 3, experience_rbound: null .* 1 to 3 successes out of n_rollout = 4",
        ),
        ({"experience_rbound": 1}, "experience_lbound: 0, experience_rbound: 1 "),
        ({"replay_difficulty": 4}, "replay_difficulty: 4, must be below n_rollout = 4"),
        (
            {"offpolicy_trajectories_per_task": 3, "group_offpolicy": "separate"},
            "separate, .*_per_task = 3 of n_rollout",
        ),
        ({"offpolicy_trajectories_per_task": 3, "max_trajectories_per_task": 2}, "3, .* max_trajectories_per_task = 2"),
        ({"max_policy_age": 0}, "max_policy_age: 0, but a history is at least 1 step old"),
        ({"min_reward": 1.5}, "min_reward: 1.5, with success_threshold = 1 "),
        ({"enable": True, "replay_start_ratio": 1}, "replay_start_ratio: 1, .* enable: false"),
    ],
)
def test_options_under_which_nothing_could_be_replayed_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ExperienceReplayConfig.from_mapping(values, n_rollout=4)
    accepted = {
        "experience_lbound": 2,
        "replay_difficulty": 3,
        "offpolicy_trajectories_per_task": 2,
        "group_offpolicy": "separate",
        "max_policy_age": 1,
        "enable": True,
        "replay_start_ratio": 0.99,
    }
    assert ExperienceReplayConfig.from_mapping(accepted, n_rollout=4)
    outcomes_above_1 = {"min_reward": 8, "success_threshold": 6}
    assert ExperienceReplayConfig.from_mapping(outcomes_above_1, n_rollout=4).min_reward == 8


def test_all_problems_are_told_at_once() -> None:
    alone = {"exp_ratio": 2, "experience_lbound": "9", "sede": 1, "enable": None}
    with pytest.raises(ConfigurationError, match=r"sede: unknown key; did you mean seed\?"):
        ExperienceReplayConfig.from_mapping(alone)
    beside_others = {"off_cliprange_high": 2.0, "clip_off_policy": False}
    for wrong in (alone, beside_others):
        with pytest.raises(ConfigurationError) as caught:
            ExperienceReplayConfig.from_mapping(wrong)
        for key in wrong.keys() - {"clip_off_policy"}:
            assert f"{key}: " in str(caught.value)


def test_what_is_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="is a list"):
        ExperienceReplayConfig.from_mapping([])


def test_it_opens_the_pools_store(tmp_path: Path) -> None:
    assert ExperienceReplayConfig().open_store() is None
    store = ExperienceReplayConfig(store={"path": str(tmp_path / "pool"), "format": "pkl"}).open_store()
    assert store.store_id
    assert store.ids() == []
    store.close()
