"""Invalid configuration values and arguments are refused by name; a step is accepted once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer_hooks.public_calls import (
    HOSTILE,
    RULES,
    TASKS,
    Call,
    batch_rows,
    calls_of_functions,
    calls_of_methods,
    filled,
    guidance_hook,
    replay_hook,
    rollouts,
)
from trainer_hooks.batch import build_batch
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.guidance.config import GuidanceConfig
from trainer_hooks.replay import PoolRules
from trainer_hooks.verl.config import OutcomeRule, RecordingConfig
from trajstore.errors import ConfigurationError, InvalidTrajectoryError, StoreClosedError, TrajstoreError
from trajstore.trajectory import Reward

TAKES: dict[str, set[str]] = {}
"""The only keys that accept a hostile value."""
for value, names in (
    (-1, "success_threshold min_reward experience_lbound"),
    (2.5, "success_threshold min_reward success experience_lbound experience_rbound retrieve_timeout summary_timeout"),
    (2.5, "cliprange_low cliprange_high off_cliprange_high clip_ratio_c off_policy_shaping learning_rate"),
    (2.5, "entropy_coeff max_grad_norm"),
    (True, "enable unsolved_first drop_negative_off_policy clip_off_policy text reuse"),
    (True, "exp_is_correct enable_summarizer enable_context_generator val_summarizer_save"),
    (True, "in_turns init_experience_before_training ledger"),
    ("x", "ledger workspace_id path key"),
):
    TAKES.setdefault(repr(value), set()).update(names.split())


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], Call]]:
    folder = tmp_path_factory.mktemp("hostile")
    filled().save_experience_pool_to_disk(folder / "saved")
    return {name: make for name, make in (*calls_of_methods(folder), *calls_of_functions(folder)) if make()[1]}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # "x" is a valid path


def may_take(name: str, key: str, value: Any) -> bool:
    return type(value) is not object and (
        repr(value) not in TAKES or not TAKES[repr(value)].isdisjoint((key, f"{name}.{key}"))
    )


def outcome(function: Callable[..., Any], given: Mapping[str, Any]) -> str | None:
    """Return a call's error message; None on success; prefixed with RAW if the error is not trajstore's."""
    try:
        function(**given)
    except TrajstoreError as error:
        return str(error)
    except Exception as error:
        return f"RAW {error!r}"
    return None


KINDS = (ExperienceReplayConfig, PoolRules, GuidanceConfig, RecordingConfig, OutcomeRule)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_configurations_are_refused_by_name(kind: type[Any]) -> None:
    given = {"n_rollout": 8} if kind is PoolRules else {}
    for field, value in itertools.product(dataclasses.fields(kind), HOSTILE):
        answer = outcome(kind, {**given, field.name: value})
        assert answer is None or (field.name in answer and not answer.startswith("RAW")), (field.name, value, answer)
        assert answer is not None or may_take(kind.__name__, field.name, value), (field.name, value)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("replay_hook.loss_computed", {"rows": [0, 2]}),
        ("replay_hook.loss_computed", {"rows": [-1, 0]}),
        ("replay_hook.loss_computed", {"rows": [0]}),
        ("replay_hook.rollouts_done", {"policy_versions": []}),
        ("filled.get_offpolicy_batch", {"tasks": "ab"}),
        ("UpdateQueue", {"capacity": 0}),
        ("ExperienceWorker", {"retrieve_top_k": 0}),
        ("compute_grpo_outcome_advantage", {"response_mask": torch.ones(2, 1)}),
        ("compute_grpo_outcome_advantage", {"index": [0]}),
        # Values that would be accepted silently without validation.
        ("filled.load_experience_pool_from_disk", {"same_run": "false"}),
        ("collate.__call__", {"enable_replay": "false"}),
        ("ExperienceMixCollateFn", {"unsolved_first": "false"}),
        ("guidance_hook.before_rollout", {"mode": "sampel"}),
        ("manager.allocate_add_exp", {"mode": "sampel"}),
        ("TrajExpConfig", {"train_mode": "discarded"}),
        ("EMClient", {"dialect": "0.3"}),
        ("aggregate_loss", {"loss_agg_mode": "mean"}),
        ("assign_group_ids", {"group_offpolicy": "alone"}),
        ("to_tensordict", {"jagged": "false"}),
        ("compute_grpo_outcome_advantage", {"norm_adv_by_std_in_grpo": "false"}),
        ("het_compute_token_on_off_policy_loss", {"drop_negative_off_policy": "false"}),
        ("het_compute_token_on_off_policy_loss", {"clip_off_policy": "false"}),
        ("rows_of_messages", {"context": "tree"}),
        ("het_compute_token_on_off_policy_loss", {"clip_ratio_c": 0.5}),
        ("het_compute_token_on_off_policy_loss", {"off_policy_shaping": 0.0}),
        ("het_compute_token_on_off_policy_loss", {"exp_mask": torch.zeros(9, 9)}),
        ("build_exp_mask", {"attention_mask": torch.ones(2, 4)}),
        ("build_exp_mask", {"is_discarded": torch.zeros(2)}),
        ("replace_recorded_old_log_probs", {"recorded_mask": torch.ones(2, 5)}),
        ("replace_recorded_old_log_probs", {"exp_mask": torch.ones(1, 6)}),
        ("assign_group_ids", {"is_experience_replay": [True]}),
        ("build_batch", {"rows": []}),
        ("ExperienceMixCollateFn", {"offpolicy_trajectories_per_task": 0}),
        ("ExperienceMixCollateFn", {"offpolicy_trajectories_per_task": RULES.n_rollout}),
        ("EMClient", {"base_url": "localhost:8001"}),
    ],
)
def test_what_is_out_of_range_is_refused(
    call: str, arguments: dict[str, Any], everything: dict[str, Callable[[], Call]]
) -> None:
    function, given = everything[call]()
    with pytest.raises(ConfigurationError) as caught:
        function(**{**given, **arguments})
    (name,) = arguments
    assert name in str(caught.value)


def test_an_outcome_that_is_a_text_is_named() -> None:
    with pytest.raises(InvalidTrajectoryError, match=r"rollout 'a/0' of task 'a': .*reward\.outcome: '1'"):
        replay_hook().admit([dataclasses.replace(rollouts()[0], reward=Reward(outcome="1"))])  # type: ignore[arg-type]


# ---- after close, and twice ----


@pytest.mark.parametrize(("make", "still"), [(replay_hook, set()), (guidance_hook, {"metrics"})])
def test_a_closed_hook_says_so(
    make: Callable[[], Any], still: set[str], everything: dict[str, Callable[[], Call]]
) -> None:
    methods = {name: dict(call()[1]) for name, call in everything.items() if name.startswith(f"{make.__name__}.")}
    arguments = {name.partition(".")[2]: given for name, given in methods.items()}
    hook = make()
    public = {name for name, member in vars(type(hook)).items() if callable(member) and not name.startswith("_")}
    assert public == arguments.keys() | {"flush", "state_dict", "metrics", "close"} & public
    hook.close()
    hook.close()
    for name in public - still - {"close"}:
        with pytest.raises(StoreClosedError, match=rf"{type(hook).__name__}\.{name}: called after close"):
            getattr(hook, name)(**arguments.get(name, {}))
    for name in still:
        getattr(hook, name)()


def test_a_step_is_done_once() -> None:
    batch = build_batch(batch_rows(), 0)
    rows = torch.zeros(batch.tensors["responses"].shape)
    hook = replay_hook()
    hook.step_done(batch, rollouts(), rows, rows)
    manager = hook.manager
    buckets, refused = manager.difficulty2task_dict, dict(manager.refused)
    with pytest.raises(InvalidTrajectoryError, match=r"rollout \('a', 'a/0'\): was passed already in step 1"):
        hook.step_done(batch, rollouts(), rows, rows)
    assert (manager.difficulty2task_dict, dict(manager.refused)) == (buckets, refused)
    state = hook.state_dict()
    hook.tasks_chosen(TASKS, 0.5, 2)
    hook.step_done(batch, rollouts(), rows, rows)  # another step
    hook.load_state_dict(state)
    hook.tasks_chosen(TASKS, 0.5, 2)
    hook.step_done(batch, rollouts(), rows, rows)  # the same step again after a rollback


def test_a_step_of_guidance_is_done_once() -> None:
    guidance = guidance_hook()
    guidance.step_done(rollouts(), 1)
    assert guidance.wait(600)
    figures = guidance.metrics()
    with pytest.raises(InvalidTrajectoryError, match=r"was passed already in step 1"):
        guidance.step_done(rollouts(), 1)
    assert guidance.metrics() == figures
    guidance.step_done(rollouts(), 2)
