"""Every public call refuses what is not for it: an error of trajstore that names the argument, whatever the value is.

Each call is made with good arguments, and then again with each of them replaced by each of the hostile values.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.experience.conftest import build
from trainer_hooks import metrics
from trainer_hooks.advantages import compute_grpo_outcome_advantage, share_by_rollout
from trainer_hooks.batch import BatchRow, assign_group_ids, build_batch, to_tensordict
from trainer_hooks.completion import completed_rollouts
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.guidance import GuidanceHook
from trainer_hooks.guidance_config import GuidanceConfig
from trainer_hooks.hook import ReplayHook
from trainer_hooks.losses import aggregate_loss, het_compute_token_on_off_policy_loss
from trainer_hooks.masks import (
    build_exp_mask,
    compute_response_mask,
    regularizer_masks,
    replace_recorded_old_log_probs,
)
from trainer_hooks.plan import MixedTasks, PlannedTask, rows_of_plan, rows_of_rollout
from trajstore.errors import ConfigurationError, InvalidTrajectoryError, StoreClosedError, TrajstoreError
from trajstore.experience import (
    BufferStore,
    ChatTemplate,
    ExperienceManager,
    ExperienceMixCollateFn,
    PoolRules,
    RatioSchedule,
    TokenRow,
    is_success,
    mean_entropy,
    newest_pool,
    rows_of_messages,
    with_tokens,
)
from trajstore.experience.exchange import export_pool, import_pool
from trajstore.experience.transcripts import TranscriptReader
from trajstore.guidance import (
    AllocationRules,
    EMClient,
    EndpointSummarizer,
    Experience,
    ExperienceTemplate,
    ExperienceWorker,
    ExtractiveSummarizer,
    Guidance,
    GuidanceManager,
    Insertion,
    LocalMaker,
    RetirementRule,
    Retrieved,
    TaskExpConfig,
    TrajExpConfig,
    UpdateQueue,
    Worth,
    WorthLedger,
    allocate_add_exp,
    allocate_train_mode,
    as_text,
    count_worth,
    plain_messages,
    put_in,
    strip_template,
    take_out,
    with_guidance,
)
from trajstore.retrieval import RetrievalIndex
from trajstore.trajectory import AgentTrajectory, Reward

HOSTILE: tuple[Any, ...] = (None, -1, 2.5, True, "x", [], {}, math.nan, object(), [None], {"x": None}, [object()])

Call = tuple[Callable[..., Any], Mapping[str, Any]]

TASKS = ["a", "b"]
RULES = PoolRules(n_rollout=4)
MESSAGES = [{"role": "user", "content": "go"}]
TEMPLATE = ExperienceTemplate.of("<{}>")


def rollouts(count: int = 2) -> list[AgentTrajectory]:
    return [build("a", number, float(number == 0), entropys=torch.ones(4)) for number in range(count)]


def replay_hook() -> ReplayHook[str]:
    config = ExperienceReplayConfig(enable=True, replay_start_ratio=0.0, use_current_policy_entropy=False)
    hook: ReplayHook[str] = ReplayHook(config, n_rollout=4, get_task=dict(zip(TASKS, TASKS, strict=True)).get)
    hook.tasks_chosen(TASKS, 0.5, 1)
    hook.admit(rollouts())
    return hook


def guidance_hook() -> GuidanceHook:
    said = {"enable_summarizer": True, "enable_context_generator": True, "updated_freq": 1}
    return GuidanceHook(
        GuidanceConfig.from_config({"experience_maker": said, "exp_manager": {"rollout_expratio": 0.5}})
    )


def filled() -> ExperienceManager:
    manager = ExperienceManager(RULES)
    manager.admit(rollouts())
    return manager


def batch_rows() -> list[BatchRow]:
    return [BatchRow(trajectory=one, group_id=0) for one in rollouts()]


def template() -> ChatTemplate:
    return ChatTemplate(lambda messages, ask: "".join(map(str, messages)), lambda text: [1, 2], {2})


def calls(tmp_path: Path) -> Iterator[tuple[str, Callable[[], Call]]]:
    """Name and maker of every call; each is made anew, for a call may change what it is called on."""
    plan = [PlannedTask("a", 2, ())]
    batch = build_batch(batch_rows(), 0)
    tensors = batch.tensors
    shape = tensors["responses"].shape
    rows, mask, exp = torch.zeros(shape), tensors["response_mask"], tensors["exp_mask"]
    loss = het_compute_token_on_off_policy_loss(rows, rows, rows, mask, exp, cliprange=0.2)
    generator = np.random.default_rng(0)

    def methods(make: Callable[[], Any], arguments: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
        for name, given in arguments.items():
            yield f"{make.__name__}.{name}", lambda name=name, given=given: (getattr(make(), name), given)

    def plain(*functions: tuple[Callable[..., Any], Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
        for function, given in functions:
            yield function.__qualname__, lambda function=function, given=given: (function, given)

    mixed = MixedTasks(("a",), ("b",))
    yield from methods(
        replay_hook,
        {
            "tasks_chosen": {"tasks": TASKS, "training_progress": 0.5, "global_steps": 1},
            "before_rollout": {"mixed": mixed},
            "batch_rows": {"plan": plan, "fresh": rollouts()},
            "log_probs_computed": {"batch": batch, "old_log_probs": rows},
            "replace_log_probs": {
                "old_log_probs": rows,
                "recorded_old_log_probs": rows,
                "recorded_mask": tensors["recorded_mask"],
                "exp_mask": exp,
                "response_mask": mask,
            },
            "regularizer_masks": {"batch": batch},
            "loss_computed": {
                "batch": batch,
                "rows": [0, 1],
                "loss": loss,
                "advantages": rows,
                "cliprange_low": 0.2,
            },
            "watch": {"figures": {}},
            "step_done": {"batch": batch, "fresh": rollouts(), "old_log_probs": rows, "entropys": rows},
            "rollouts_done": {
                "done": rollouts(),
                "task_ids": ["a", "a"],
                "is_experience_replay": [False, False],
                "policy_versions": [1, None],
                "asked": {"a": 2},
                "replayed": [],
            },
            "admit": {"done": rollouts(), "asked": {"a": 2}},
            "load_state_dict": {"state": replay_hook().state_dict()},
            "resume": {"state": None, "step": 0},
        },
    )
    yield from methods(
        guidance_hook,
        {
            "before_rollout": {"plan": plan, "mode": "sample"},
            "context": {"messages": MESSAGES, "config": TrajExpConfig()},
            "training_messages": {"messages": MESSAGES, "config": TrajExpConfig()},
            "finished": {"trajectory": rollouts()[0], "config": TrajExpConfig()},
            "step_done": {"fresh": rollouts(), "global_steps": 1},
            "validated": {"rollouts": rollouts()},
            "begin": {"rollouts": rollouts(), "timeout": 0.0},
            "wait": {"timeout": 0.0},
            "load_state_dict": {"state": guidance_hook().state_dict()},
            "close": {"timeout": 0.0},
        },
    )
    yield from methods(
        filled,
        {
            "update_difficulty2task_dict": {"trajectories": rollouts(), "asked": {"a": 2}},
            "update_skip_uid_set_and_filter_trajectories": {
                "trajectories": rollouts(),
                "entropys": rows,
                "response_mask": mask,
                "asked": {"a": 2},
            },
            "admit": {"rollouts": rollouts(), "asked": {"a": 2}},
            "save_trajectories_to_memory": {"trajectories": rollouts()},
            "seed": {"demonstrations": rollouts()},
            "sample_tasks_from_replaypool": {"n": 1, "difficulty": None, "strategy": "by_task", "exclude": ()},
            "get_offpolicy_trajectories_from_memory": {"task_id": "a", "n": 1},
            "get_offpolicy_batch": {"tasks": TASKS, "n": 1},
            "count_offpolicy": {"tasks": TASKS, "n": 1},
            "get_all_candidates_batch": {"tasks": TASKS},
            "hold": {"cuts": []},
            "load_state_dict": {"state": filled().state_dict()},
            "save_experience_pool_to_disk": {"directory": tmp_path / "saved"},
            "load_experience_pool_from_disk": {"directory": tmp_path / "saved"},
        },
    )

    def collate() -> ExperienceMixCollateFn[str]:
        return ExperienceMixCollateFn(filled(), dict(zip(TASKS, TASKS, strict=True)).get)

    yield from methods(
        collate,
        {
            "__call__": {"training_tasks": TASKS, "training_progress": 0.5, "enable_replay": True},
            "get_histories": {"experience_tasks": TASKS},
            "count_histories": {"experience_tasks": TASKS},
            "fresh_rollouts": {"experience_tasks": TASKS, "on_policy_tasks": TASKS, "histories": {}},
        },
    )

    maker = LocalMaker()

    def queue() -> UpdateQueue:
        return UpdateQueue(maker)

    def worker() -> ExperienceWorker:
        return ExperienceWorker(maker, template=TEMPLATE)

    def manager() -> GuidanceManager:
        return GuidanceManager(AllocationRules(rollout_expratio=0.5))

    experience = Experience(when_to_use="x", content="y")
    yield from methods(queue, {"submit": {"rollouts": rollouts()}, "wait": {"timeout": 0.0}, "close": {"timeout": 0.0}})
    yield from methods(
        worker,
        {
            "manage_rollout_context": {"messages": MESSAGES, "traj_config": TrajExpConfig()},
            "manage_training_context": {"messages": MESSAGES, "traj_config": TrajExpConfig()},
            "find": {"messages": MESSAGES},
        },
    )
    yield from methods(
        manager,
        {
            "allocate_train_mode": {"tasks": TASKS},
            "allocate_add_exp": {"rollouts": [1, 2], "mode": "sample"},
            "get_complete_exp_configs": {"tasks": TASKS, "rollouts": [1, 2], "mode": "sample"},
            "update_experience_pool": {"trajectories": rollouts(), "global_steps": 1},
            "load_state_dict": {"state": manager().state_dict()},
        },
    )
    yield from methods(
        LocalMaker,
        {
            "get": {"name": "0"},
            "retrieve": {"query": "go", "k": 1, "without": ()},
            "summarize": {"rollouts": rollouts()},
            "add": {"experiences": [experience], "step": 1},
        },
    )
    yield from methods(
        RetrievalIndex,
        {
            "add": {"keys": [0], "texts": ["go"]},
            "remove": {"keys": [], "texts": []},
            "search": {"query": "go", "k": 1, "without": ()},
        },
    )
    yield from methods(WorthLedger, {"note": {"rollouts": rollouts()}})
    client = functools.partial(EMClient, "http://127.0.0.1:9", retries=0, retrieve_timeout=0.1, summary_timeout=0.1)
    client.__name__ = "client"  # type: ignore[attr-defined]
    yield from methods(
        client,
        {"retrieve": {"query": "go", "k": 1, "without": ()}, "summarize": {"rollouts": []}},
    )
    template_ = template()
    guided = Guidance("discard", ("0",), (Insertion(0, "<x>"),))
    yield from plain(
        (
            ReplayHook,
            {
                "config": ExperienceReplayConfig(),
                "n_rollout": 4,
                "get_task": str,
                "tokenizer_fingerprint": "",
                "current_entropy": None,
                "task_text": None,
            },
        ),
        (GuidanceHook, {"config": GuidanceConfig(), "maker": None}),
        (
            ExperienceManager,
            {
                "rules": RULES,
                "store": None,
                "tokenizer_fingerprint": "",
                "current_entropy": None,
                "reward_fingerprint": "",
            },
        ),
        (
            ExperienceMixCollateFn,
            {
                "exp_manager": filled(),
                "get_task": str,
                "exp_ratio": 0.5,
                "replay_start_ratio": 0.0,
                "offpolicy_trajectories_per_task": 1,
                "text_of": None,
            },
        ),
        (RatioSchedule, {"points": ((0.0, 0.5),)}),
        (ChatTemplate, {"render": str, "encode": list, "special_ids": {1}}),
        (TokenRow, {"input_ids": [1], "loss_mask": [1], "response_start": 0}),
        (rows_of_messages, {"messages": MESSAGES, "template": template_, "context": "linear", "think_hint": ""}),
        (with_tokens, {"trajectory": rollouts()[0], "template": template_, "context": "linear", "think_hint": ""}),
        (is_success, {"outcome": 1.0, "threshold": 1.0}),
        (mean_entropy, {"entropys": rows, "response_mask": mask}),
        (newest_pool, {"base": tmp_path, "not_after": 1}),
        (BufferStore.open, {"path": tmp_path / "pool", "format": "pt", "capacity": None}),
        (export_pool, {"store": tmp_path / "none", "folder": tmp_path / "out", "rules": RULES}),
        (import_pool, {"store": tmp_path / "new", "source": tmp_path / "none", "rules": RULES, "replace": False}),
        (
            TranscriptReader,
            {
                "tokenizer": SimpleNamespace(get_vocab=dict),
                "context": "linear",
                "think_hint": "",
                "outcome": None,
                "success_threshold": 1.0,
            },
        ),
        (
            GuidanceManager,
            {"rules": AllocationRules(), "seed": 1, "updates": None, "updated_freq": 0},
        ),
        (
            AllocationRules,
            {
                "train_rollout_expmode": "mixed",
                "val_rollout_expmode": "woexp",
                "rollout_expratio": 0.5,
                "train_sample_expmode": "hybrid",
                "train_sample_keepratio": 0.5,
            },
        ),
        (
            EMClient,
            {
                "base_url": "http://127.0.0.1:9",
                "workspace_id": "x",
                "dialect": "0.2",
                "retrieve_timeout": 1.0,
                "summary_timeout": 1.0,
                "retries": 1,
                "backoff": 1.0,
                "rest": 1.0,
            },
        ),
        (
            EndpointSummarizer,
            {
                "base_url": "http://127.0.0.1:9",
                "model": "x",
                "api_key": "",
                "prompt": "",
                "timeout": 1.0,
                "most_rollouts": 1,
                "most_characters": 1,
            },
        ),
        (
            Experience,
            {"when_to_use": "x", "content": "x", "query": "", "task_id": "", "score": None, "sources": ()},
        ),
        (experience.to_trajectory, {"step": 1}),
        (Experience.of_trajectory, {"trajectory": rollouts()[0]}),
        (ExperienceTemplate, {"before": "<", "after": ">"}),
        (TEMPLATE.fill, {"experience": "x"}),
        (ExperienceWorker, {"maker": None, "template": TEMPLATE, "retrieve_top_k": 1, "retired": ()}),
        (ExtractiveSummarizer, {"threshold": 1.0}),
        (Guidance, {"train_mode": "keep", "experiences": (), "insertions": (), "taken_out": False}),
        (Guidance.of, {"trajectory": rollouts()[0]}),
        (Guidance.of_json, {"value": None}),
        (Insertion, {"message": 0, "text": "x"}),
        (LocalMaker, {"store": None, "summarizer": None, "present": as_text}),
        (RetirementRule, {"below": 0.0, "least_count": 1}),
        (RetirementRule(below=0.0).retires, {"worth": Worth()}),
        (Retrieved, {"text": "x", "names": ()}),
        (TaskExpConfig, {"add_exp": (True,), "train_mode": "keep"}),
        (
            TrajExpConfig,
            {
                "add_exp": False,
                "train_mode": "keep",
                "task_id": "",
                "experience_list": [],
                "names": [],
                "insertions": [],
            },
        ),
        (UpdateQueue, {"maker": maker, "capacity": 1, "batch_size": 1, "template": None}),
        (Worth, {"shown": 1, "shown_reward": 1.0, "other": 1, "other_reward": 1.0}),
        (WorthLedger, {"store": None, "rule": None}),
        (allocate_train_mode, {"tasks": 2, "mode": "hybrid", "keep_ratio": 0.5, "generator": generator}),
        (allocate_add_exp, {"rollouts": [2], "mode": "mixed", "ratio": 0.5, "generator": generator}),
        (as_text, {"experiences": [experience]}),
        (count_worth, {"rollouts": rollouts()}),
        (plain_messages, {"trajectory": with_guidance(dataclasses.replace(rollouts()[0], messages=MESSAGES), None)}),
        (put_in, {"messages": MESSAGES, "text": "x"}),
        (strip_template, {"text": "x", "template": TEMPLATE}),
        (take_out, {"messages": MESSAGES, "insertions": []}),
        (with_guidance, {"trajectory": rollouts()[0], "guidance": guided}),
        (
            BatchRow,
            {
                "trajectory": rollouts()[0],
                "group_id": 0,
                "is_experience_replay": False,
                "add_exp": False,
                "train_mode": "keep",
                "rollout": None,
                "extras": {},
            },
        ),
        (MixedTasks, {"experience": ("a",), "on_policy": ()}),
        (PlannedTask, {"task": "a", "fresh_rollouts": 1, "histories": ()}),
        (
            assign_group_ids,
            {"task_positions": [0, 0], "is_experience_replay": [False, True], "group_offpolicy": "shared"},
        ),
        (build_batch, {"rows": batch_rows(), "pad_token_id": 0, "prompt_length": None, "response_length": None}),
        (to_tensordict, {"batch": batch, "jagged": False}),
        (rows_of_plan, {"plan": plan, "fresh": rollouts(), "group_offpolicy": "shared"}),
        (rows_of_rollout, {"trajectory": rollouts()[0], "group": 0, "number": 0, "is_replayed": False}),
        (
            completed_rollouts,
            {"batch": batch, "fresh": rollouts(), "old_log_probs": rows, "entropys": rows, "policy_version": 1},
        ),
        (compute_response_mask, {"mask": exp, "response_length": 4}),
        (regularizer_masks, {"response_mask": mask, "exp_mask": exp, "regularize_replayed": "both"}),
        (
            build_exp_mask,
            {
                "loss_mask": tensors["loss_mask"],
                "attention_mask": tensors["attention_mask"],
                "prompt_length": 2,
                "is_experience_replay": torch.zeros(2, dtype=torch.bool),
                "is_discarded": torch.zeros(2, dtype=torch.bool),
            },
        ),
        (
            replace_recorded_old_log_probs,
            {
                "old_log_probs": rows,
                "recorded_old_log_probs": rows,
                "recorded_mask": tensors["recorded_mask"],
                "exp_mask": exp,
            },
        ),
        (
            compute_grpo_outcome_advantage,
            {
                "token_level_rewards": rows,
                "response_mask": mask,
                "index": [0, 0],
                "epsilon": 1e-6,
                "norm_adv_by_std_in_grpo": True,
                "rollouts": None,
            },
        ),
        (share_by_rollout, {"advantages": rows, "rollouts": batch.rollouts}),
        (
            het_compute_token_on_off_policy_loss,
            {
                "old_log_prob": rows,
                "log_prob": rows,
                "advantages": rows,
                "response_mask": mask,
                "exp_mask": exp,
                "cliprange": 0.2,
                "cliprange_low": 0.2,
                "cliprange_high": 0.2,
                "off_cliprange_high": 1.0,
                "clip_ratio_c": 3.0,
                "loss_agg_mode": "token-mean",
                "off_policy_shaping": None,
                "drop_negative_off_policy": False,
                "clip_off_policy": True,
            },
        ),
        (aggregate_loss, {"losses": rows, "response_mask": mask.bool(), "loss_agg_mode": "token-mean"}),
        (metrics.loss_metrics, {"loss": loss, "response_mask": mask, "exp_mask": exp[:, -shape[1] :]}),
    )


ALIASES = {"training_tasks": "tasks", "experience_tasks": "tasks", "value": "metadata.guidance", "task": "tasks"}
"""What a message calls an argument that goes by another name there."""

TAKES_ANY = {"on_policy_tasks", "tokenizer"}
"""Arguments that are handed on, and looked at by others only."""


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], Call]]:
    folder = tmp_path_factory.mktemp("hostile")
    filled().save_experience_pool_to_disk(folder / "saved")
    return {name: make for name, make in calls(folder) if make()[1]}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # "x" is a fine path


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
                fine = type(value) is not object or argument in TAKES_ANY
            else:
                named = argument in said or ALIASES.get(argument, argument) in said
                fine = said == otherwise or (named and not said.startswith("RAW"))
            if not fine:
                wrong.append(f"{name}({argument}={value!r}): {said or 'is taken'}")
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("replay_hook.tasks_chosen", {"training_progress": -3}),
        ("replay_hook.tasks_chosen", {"training_progress": 1.5}),
        ("replay_hook.tasks_chosen", {"training_progress": math.nan}),
        ("replay_hook.tasks_chosen", {"global_steps": -1}),
        ("replay_hook.loss_computed", {"rows": [0, 2]}),
        ("replay_hook.loss_computed", {"rows": [-1, 0]}),
        ("replay_hook.loss_computed", {"rows": [0]}),
        ("replay_hook.loss_computed", {"cliprange_low": -0.1}),
        ("replay_hook.rollouts_done", {"task_ids": ["a"]}),
        ("replay_hook.rollouts_done", {"policy_versions": []}),
        ("replay_hook.resume", {"step": -1}),
        ("guidance_hook.step_done", {"fresh": [], "global_steps": -1}),
        ("guidance_hook.before_rollout", {"mode": "train"}),
        ("guidance_hook.wait", {"timeout": -1.0}),
        ("guidance_hook.close", {"timeout": math.nan}),
        ("filled.sample_tasks_from_replaypool", {"n": -1}),
        ("filled.get_offpolicy_batch", {"n": -1}),
        ("filled.get_offpolicy_batch", {"tasks": "ab"}),
        ("collate.__call__", {"training_progress": 2.0}),
        ("LocalMaker.retrieve", {"k": -1}),
        ("build_batch", {"pad_token_id": -1}),
        ("build_batch", {"prompt_length": -1}),
        ("PlannedTask", {"fresh_rollouts": -1}),
        ("PlannedTask", {"task": None}),
        ("Experience", {"score": math.nan}),
        ("EMClient", {"retries": -1}),
        ("EMClient", {"rest": math.nan}),
        ("EndpointSummarizer", {"most_rollouts": 0}),
        ("UpdateQueue", {"capacity": 0}),
        ("ExperienceWorker", {"retrieve_top_k": 0}),
        ("GuidanceManager", {"seed": -1}),
        ("AllocationRules", {"rollout_expratio": 1.5}),
        ("Insertion", {"message": -1}),
        ("TokenRow", {"response_start": -1}),
        ("is_success", {"threshold": math.nan}),
        ("compute_grpo_outcome_advantage", {"epsilon": math.nan}),
        ("compute_grpo_outcome_advantage", {"epsilon": -1.0}),
    ],
)
def test_what_is_out_of_range_is_refused(
    call: str, arguments: dict[str, Any], everything: dict[str, Callable[[], Call]]
) -> None:
    function, given = everything[call]()
    said = outcome(function, {**given, **arguments})
    assert said is not None
    (name,) = set(arguments) - {"fresh"}
    assert name in said or ALIASES.get(name, name) in said
    assert not said.startswith("RAW")


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


def test_a_config_of_a_rollout_that_is_none_is_named() -> None:
    with pytest.raises(ConfigurationError, match="config: None, must be a TrajExpConfig"):
        guidance_hook().context(MESSAGES, None)  # type: ignore[arg-type]


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
    assert manager is not None
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
    worth = guidance.worth.worth
    with pytest.raises(InvalidTrajectoryError, match=r"was handed over already in step 1"):
        guidance.step_done(rollouts(), 1)
    assert guidance.worth.worth == worth
    guidance.step_done(rollouts(), 2)
