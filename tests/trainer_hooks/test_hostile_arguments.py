"""Every public call refuses what is not for it: an error of trajstore that names the argument, whatever the value is.

Each call is made with good arguments, and then again with each of them replaced by each of the hostile values.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
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
from trainer_hooks.dataproto import batch_of
from trainer_hooks.guidance_config import GuidanceConfig
from trainer_hooks.plan import PlannedTask
from trainer_hooks.reference.config import TrainerConfig
from trainer_hooks.verl.config import OutcomeRule, RecordingConfig
from trajstore.errors import ConfigurationError, InvalidTrajectoryError, StoreClosedError, TrajstoreError
from trajstore.experience import PoolRules
from trajstore.guidance import ExtractiveSummarizer, TrajExpConfig
from trajstore.trajectory import AgentTrajectory, Reward

ALIASES = {"training_tasks": "tasks", "experience_tasks": "tasks", "value": "metadata.guidance", "task": "tasks"}
"""What a message calls an argument that goes by another name there."""

TAKES_ANY = {"on_policy_tasks", "tokenizer"}
"""Arguments that are handed on, and looked at by others only."""

TAKES: dict[str, set[str]] = {}
"""Which arguments take a hostile value; no other does."""
for value, names in (
    (math.nan, "is_success.outcome"),
    (-1, "outcome score threshold success_threshold min_reward not_after"),
    (-1, "experience_lbound policy_version TrainerConfig.seed LocalMaker.add.step Experience.to_trajectory.step"),
    (-1, "filled.load_experience_pool_from_disk.global_steps BatchRow.group_id rows_of_rollout.group"),
    (-1, "rows_of_rollout.number"),
    (2.5, "outcome score threshold success_threshold min_reward success"),
    (2.5, "experience_lbound experience_rbound timeout retrieve_timeout summary_timeout backoff rest epsilon"),
    (2.5, "cliprange cliprange_low cliprange_high off_cliprange_high clip_ratio_c off_policy_shaping learning_rate"),
    (2.5, "warm_start_learning_rate entropy_coeff max_grad_norm"),
    (True, "same_run enable_replay unsolved_first taken_out add_exp is_experience_replay is_replayed jagged enable"),
    (True, "norm_adv_by_std_in_grpo drop_negative_off_policy clip_off_policy use_current_policy_entropy text"),
    (True, "exp_is_correct prepare_in_background enable_summarizer enable_context_generator val_summarizer_save"),
    (True, "init_experience_before_training in_turns"),
    ("x", "task_id task directory task_prefix name query tokenizer_fingerprint reward_fingerprint think_hint base"),
    ("x", "workspace_id model api_key prompt when_to_use content before after text path source store experience"),
    ("x", "pool_path key TrainerConfig.environment TrainerConfig.device"),
):
    TAKES.setdefault(repr(value), set()).update(names.split())


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], Call]]:
    folder = tmp_path_factory.mktemp("hostile")
    filled().save_experience_pool_to_disk(folder / "saved")
    return {name: make for name, make in (*calls_of_methods(folder), *calls_of_functions(folder)) if make()[1]}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # "x" is a fine path


def may_take(name: str, argument: str, value: Any) -> bool:
    if argument in TAKES_ANY:
        return True
    return type(value) is not object and (
        repr(value) not in TAKES or not TAKES[repr(value)].isdisjoint((argument, f"{name}.{argument}"))
    )


def outcome(function: Callable[..., Any], given: Mapping[str, Any]) -> str | None:
    """What a call says: None if it was taken; of an error that is none of trajstore's a text that begins with RAW."""
    try:
        function(**given)
    except TrajstoreError as error:
        return str(error)
    except Exception as error:
        return f"RAW {error!r}"
    return None


def test_hostile_arguments_are_refused_by_name(everything: dict[str, Callable[[], Call]]) -> None:
    wrong = []
    for name, make in everything.items():
        otherwise = outcome(*make())  # some calls fail in any case, for want of a folder or a service
        assert otherwise is None or not otherwise.startswith("RAW"), (name, otherwise)
        for argument, value in itertools.product(make()[1], HOSTILE):
            function, given = make()
            said = outcome(function, {**given, argument: value})
            if said is None:
                fine = may_take(name, argument, value)
            else:
                named = argument in said or ALIASES.get(argument, argument) in said
                fine = said == otherwise or (named and not said.startswith("RAW"))
            if not fine:
                wrong.append(f"{name}({argument}={value!r}): {said or 'is taken'}")
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong)


KINDS = (ExperienceReplayConfig, PoolRules, GuidanceConfig, TrainerConfig, RecordingConfig, OutcomeRule)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_configurations_are_refused_by_name(kind: type[Any]) -> None:
    given = {"n_rollout": 8} if kind is PoolRules else {}
    for field, value in itertools.product(dataclasses.fields(kind), HOSTILE):
        said = outcome(kind, {**given, field.name: value})
        assert said is None or (field.name in said and not said.startswith("RAW")), (field.name, value, said)
        assert said is not None or may_take(kind.__name__, field.name, value), (field.name, value)


def test_calls_that_read_configurations(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "trainer.yaml"
    path.write_text("exp_manager: {experience_replay: {enable: false}}")
    for function, given in (
        (ExperienceReplayConfig.from_mapping, {"values": {}, "n_rollout": 8}),
        (ExperienceReplayConfig.from_yaml, {"path": path, "section": "exp_manager", "n_rollout": 8}),
        (ExperienceReplayConfig().pool_rules, {"n_rollout": 8}),
        (ExperienceReplayConfig().warn, {"knows_entropy": True}),
        (GuidanceConfig.from_config, {"config": {}}),
        (batch_of, {"data": None}),
    ):
        for argument, value in itertools.product(given, HOSTILE):
            said = outcome(function, {**given, argument: value})
            assert said is not None or type(value) is not object, (function, argument)
            assert said is None or not said.startswith("RAW"), (function, argument, value, said)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("replay_hook.loss_computed", {"rows": [0, 2]}),
        ("replay_hook.loss_computed", {"rows": [-1, 0]}),
        ("replay_hook.loss_computed", {"rows": [0]}),
        ("replay_hook.rollouts_done", {"task_ids": ["a"]}),
        ("replay_hook.rollouts_done", {"policy_versions": []}),
        ("filled.get_offpolicy_batch", {"tasks": "ab"}),
        ("PlannedTask", {"task": None}),
        ("EndpointSummarizer", {"most_rollouts": 0}),
        ("UpdateQueue", {"capacity": 0}),
        ("ExperienceWorker", {"retrieve_top_k": 0}),
        ("compute_grpo_outcome_advantage", {"response_mask": torch.ones(2, 1)}),
        ("compute_grpo_outcome_advantage", {"index": [0]}),
        ("het_compute_token_on_off_policy_loss", {"cliprange": None}),
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


# ---- fields of rollouts ----

FIELDS = [field.name for field in dataclasses.fields(AgentTrajectory)]
OF_REWARD = [field.name for field in dataclasses.fields(Reward)]


def broken() -> Iterator[tuple[str, AgentTrajectory]]:
    """Rollouts with one field that holds something hostile, and the field."""
    for value in (*HOSTILE, "1", torch.ones(2, 2)):
        for field in FIELDS:
            yield field, dataclasses.replace(rollouts()[0], **{field: value})
        for field in OF_REWARD:
            reward = dataclasses.replace(Reward(outcome=1.0), **{field: value})
            yield f"reward.{field}", dataclasses.replace(rollouts()[0], reward=reward)
    yield "rows", dataclasses.replace(rollouts()[0], metadata={"rows": 3})
    yield "guidance", dataclasses.replace(rollouts()[0], metadata={"guidance": 3})


def test_rollouts_with_a_field_of_another_kind_are_refused_by_its_name() -> None:
    batch = build_batch(batch_rows(), 0)
    rows = torch.zeros(batch.tensors["responses"].shape)
    plan = [PlannedTask("a", 1, ())]
    hook, guidance = replay_hook(), guidance_hook()
    wrong = []
    for step, (field, one) in enumerate(broken()):
        hook.tasks_chosen(TASKS, 0.5, step)
        several = {
            "batch_rows": lambda one=one: build_batch(hook.batch_rows(plan, [one]), 0),
            "step_done": lambda one=one: hook.step_done(batch, [one], rows, rows),
            "rollouts_done": lambda one=one: hook.rollouts_done([one], [], [], []),
            "admit": lambda one=one: hook.admit([one]),
            "seed": lambda one=one: filled().seed([one]),
            "finished": lambda one=one: guidance.finished(one, TrajExpConfig()),
            "guidance": lambda one=one, step=step: guidance.step_done([one], step),
            "validated": lambda one=one: guidance.validated([one]),
            "summarize": lambda one=one: ExtractiveSummarizer()([one]),
        }
        for name, call in several.items():
            said = outcome(call, {})
            if said is not None and (said.startswith("RAW") or not re.search(rf"{field}|rollout", said)):
                wrong.append(f"{name}({field}={vars(one).get(field, one.reward)!r}): {said}")
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong)


def test_an_outcome_that_is_a_text_is_named() -> None:
    with pytest.raises(InvalidTrajectoryError, match=r"done\[0\].*rollout 'a/0'.*field reward\.outcome: '1' is a str"):
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
    with pytest.raises(InvalidTrajectoryError, match=r"rollout \('a', 'a/0'\): was handed over already in step 1"):
        hook.step_done(batch, rollouts(), rows, rows)
    assert (manager.difficulty2task_dict, dict(manager.refused)) == (buckets, refused)
    state = hook.state_dict()
    hook.tasks_chosen(TASKS, 0.5, 2)
    hook.step_done(batch, rollouts(), rows, rows)  # another step
    hook.load_state_dict(state)
    hook.tasks_chosen(TASKS, 0.5, 2)
    hook.step_done(batch, rollouts(), rows, rows)  # the same once more, after going back


def test_a_step_of_guidance_is_done_once() -> None:
    guidance = guidance_hook()
    guidance.step_done(rollouts(), 1)
    figures = guidance.metrics()
    with pytest.raises(InvalidTrajectoryError, match=r"was handed over already in step 1"):
        guidance.step_done(rollouts(), 1)
    assert guidance.metrics() == figures
    guidance.step_done(rollouts(), 2)
