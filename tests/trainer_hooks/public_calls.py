"""Every public function, constructor and method of hooks, pool and guidance, with good arguments."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.experience.conftest import build
from trainer_hooks import guidance
from trainer_hooks import replay as experience
from trainer_hooks.advantages import compute_grpo_outcome_advantage, share_by_rollout
from trainer_hooks.batch import BatchRow, assign_group_ids, build_batch, to_tensordict
from trainer_hooks.completion import completed_rollouts
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.guidance.config import GuidanceConfig
from trainer_hooks.guidance.hook import GuidanceHook
from trainer_hooks.hook import ReplayHook
from trainer_hooks.losses import aggregate_loss, het_compute_token_on_off_policy_loss
from trainer_hooks.masks import (
    build_exp_mask,
    compute_response_mask,
    regularizer_masks,
    replace_recorded_old_log_probs,
)
from trainer_hooks.plan import MixedTasks, PlannedTask, rows_of_plan, rows_of_rollout
from trainer_hooks.replay.exchange import export_pool, import_pool
from trainer_hooks.replay.transcripts import TranscriptReader
from trainer_hooks.retrieval import RetrievalIndex
from trainer_hooks.token_sums import token_sums
from trajstore.trajectory import AgentTrajectory

HOSTILE: tuple[Any, ...] = (None, -1, 2.5, True, "x", [], {}, math.nan, object(), [None], {"x": None}, [object()])

Call = tuple[Callable[..., Any], Mapping[str, Any]]

TASKS = ["a", "b"]
RULES = experience.PoolRules(n_rollout=4)
MESSAGES = [{"role": "user", "content": "go"}]
TEMPLATE = guidance.ExperienceTemplate.of("<{}>")


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


def filled() -> experience.ExperienceManager:
    manager = experience.ExperienceManager(RULES)
    manager.admit(rollouts())
    return manager


def collate() -> experience.ExperienceMixCollateFn[str]:
    return experience.ExperienceMixCollateFn(filled(), dict(zip(TASKS, TASKS, strict=True)).get)


def queue() -> guidance.UpdateQueue:
    return guidance.UpdateQueue(guidance.LocalMaker())


def worker() -> guidance.ExperienceWorker:
    return guidance.ExperienceWorker(guidance.LocalMaker(), template=TEMPLATE)


def manager() -> guidance.GuidanceManager:
    return guidance.GuidanceManager(guidance.AllocationRules(rollout_expratio=0.5))


def client() -> guidance.EMClient:
    return guidance.EMClient("http://127.0.0.1:9", retries=0, retrieve_timeout=5.0, summary_timeout=5.0)


def batch_rows() -> list[BatchRow]:
    return [BatchRow(trajectory=one, group_id=0) for one in rollouts()]


def template() -> experience.ChatTemplate:
    return experience.ChatTemplate(lambda messages, ask: "".join(map(str, messages)), lambda text: [1, 2], {2})


def good(folder: Path) -> dict[str, Any]:
    """Return a good value for each name of an argument that has no default; of a batch of two rollouts of one task."""
    made = build_batch(batch_rows(), 0)
    values = torch.zeros(made.tensors["responses"].shape)
    of_batch = {name: made.tensors[name] for name in ("attention_mask", "exp_mask", "response_mask", "recorded_mask")}
    loss = het_compute_token_on_off_policy_loss(
        values, values, values, of_batch["response_mask"], of_batch["exp_mask"], cliprange=0.2
    )
    numbers = ("advantages", "entropys", "log_prob", "losses", "old_log_prob", "old_log_probs")
    lists = ("done", "demonstrations", "fresh", "rollouts", "trajectories")
    return {
        **of_batch,
        **dict.fromkeys((*numbers, "recorded_old_log_probs", "token_level_rewards"), values),
        **dict.fromkeys(lists, rollouts()),
        **dict.fromkeys(("tasks", "experience_tasks", "on_policy_tasks", "training_tasks"), TASKS),
        **dict.fromkeys(("before", "after", "content", "model", "text", "when_to_use"), "x"),
        **dict.fromkeys(("fresh_rollouts", "global_steps", "k", "num_tasks", "policy_version"), 1),
        **dict.fromkeys(("group", "group_id", "message", "number", "pad_token_id", "response_start", "step"), 0),
        **dict.fromkeys(("cuts", "experiences", "insertions", "keys", "on_policy", "histories"), ()),
        **dict.fromkeys(("below", "timeout"), 0.0),
        **dict.fromkeys(("keep_ratio", "ratio", "training_progress"), 0.5),
        "add_exp": (True,),
        "base": folder,
        "base_url": "http://127.0.0.1:9",
        "batch": made,
        "cliprange_low": 0.2,
        "config": guidance.TrajExpConfig(),
        "directory": folder / "saved",
        "encode": list,
        "exp_manager": filled(),
        "experience": ("a",),
        "figures": {},
        "folder": folder / "out",
        "generator": np.random.default_rng(0),
        "get_task": str,
        "group_offpolicy": "shared",
        "guidance": guidance.Guidance("discard", ("0",), (guidance.Insertion(0, "<x>"),)),
        "index": [0, 0],
        "input_ids": [1],
        "is_discarded": torch.zeros(2, dtype=torch.bool),
        "is_experience_replay": [False, True],
        "is_replayed": False,
        "loss": loss,
        "loss_agg_mode": "token-mean",
        "loss_mask": made.tensors["loss_mask"],
        "maker": guidance.LocalMaker(),
        "mask": made.tensors["exp_mask"],
        "messages": MESSAGES,
        "mixed": MixedTasks(("a",), ("b",)),
        "mode": "sample",
        "n_rollout": 4,
        "name": "0",
        "outcome": 1.0,
        "path": folder / "pool",
        "plan": [PlannedTask("a", 2, ())],
        "points": ((0.0, 0.5),),
        "policy_versions": [1, None],
        "prompt_length": 2,
        "query": "go",
        "render": str,
        "response_length": 4,
        "rows": batch_rows(),
        "rules": RULES,
        "source": folder / "none",
        "special_ids": {1},
        "state": None,
        "store": folder / "new",
        "task": "a",
        "task_id": "a",
        "task_ids": ["a", "a"],
        "task_positions": [0, 0],
        "template": template(),
        "texts": ["go"],
        "tokenizer": SimpleNamespace(
            get_vocab=dict,
            chat_template="x",
            all_special_tokens=[],
            all_special_ids=[],
            convert_tokens_to_ids=list,
        ),
        "train_mode": "keep",
        "traj_config": guidance.TrajExpConfig(),
        "trajectory": rollouts()[0],
        "value": None,
    }


def with_defaults(function: Callable[..., Any], given: Mapping[str, Any], known: Mapping[str, Any]) -> Call:
    """Return a call with what is given, else with an argument's default, else with what is known to be good."""
    parameters = inspect.signature(function).parameters.values()
    named = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    arguments = {one.name: known[one.name] for one in named if one.default is one.empty and one.name not in given}
    arguments |= {one.name: one.default for one in named if one.default is not one.empty}
    if dataclasses.is_dataclass(function):
        made = {one.name: one.default_factory for one in dataclasses.fields(function)}
        arguments |= {name: make() for name, make in made.items() if make is not dataclasses.MISSING}
    return function, arguments | given


METHODS: dict[Callable[[], Any], str] = {
    replay_hook: "tasks_chosen before_rollout batch_rows log_probs_computed replace_log_probs regularizer_masks"
    " loss_computed watch step_done rollouts_done admit load_state_dict resume",
    guidance_hook: "before_rollout context finished step_done validated begin wait load_state_dict close",
    filled: "update_difficulty2task_dict update_skip_uid_set_and_filter_trajectories admit save_trajectories_to_memory"
    " seed sample_tasks_from_replaypool get_offpolicy_trajectories_from_memory get_offpolicy_batch count_offpolicy"
    " get_all_candidates_batch hold load_state_dict save_experience_pool_to_disk load_experience_pool_from_disk",
    collate: "__call__ get_histories count_histories fresh_rollouts",
    queue: "submit wait close",
    worker: "manage_rollout_context manage_training_context find",
    manager: "allocate_train_mode allocate_add_exp get_complete_exp_configs update_experience_pool load_state_dict",
    guidance.LocalMaker: "get retrieve summarize add",
    RetrievalIndex: "add remove search",
    client: "retrieve summarize",
}


def special_arguments(known: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what methods are given in the place of the usual values, or of defaults."""
    step = {"entropys": known["entropys"], "response_mask": known["response_mask"]}
    return {
        "replay_hook.loss_computed": {"rows": [0, 1]},
        "replay_hook.rollouts_done": {"is_experience_replay": [False, False]},
        "replay_hook.load_state_dict": {"state": replay_hook().state_dict()},
        "guidance_hook.load_state_dict": {"state": guidance_hook().state_dict()},
        "guidance_hook.close": {"timeout": 0.0},
        "filled.update_skip_uid_set_and_filter_trajectories": step,
        "filled.load_state_dict": {"state": filled().state_dict()},
        "collate.fresh_rollouts": {"histories": {}},
        "queue.close": {"timeout": 0.0},
        "manager.allocate_add_exp": {"rollouts": [1, 2]},
        "manager.get_complete_exp_configs": {"rollouts": [1, 2]},
        "manager.load_state_dict": {"state": manager().state_dict()},
        "LocalMaker.add": {"experiences": [guidance.Experience(when_to_use="x", content="y")]},
        "RetrievalIndex.add": {"keys": [0]},
        "client.summarize": {"rollouts": []},
    }


def calls_of_methods(folder: Path) -> Iterator[tuple[str, Callable[[], Call]]]:
    """Name and maker of every call; each is made anew, for a call may change what it is called on."""
    known = good(folder)
    special = special_arguments(known)

    def make_call(make: Callable[[], Any], name: str) -> Call:
        return with_defaults(getattr(make(), name), special.get(f"{make.__name__}.{name}", {}), known)

    for make, names in METHODS.items():
        for name in names.split():
            yield f"{make.__name__}.{name}", functools.partial(make_call, make, name)


EXPERIENCE = (
    "ChatTemplate ExperienceManager ExperienceMixCollateFn RatioSchedule rows_of_messages with_tokens is_success"
    " mean_entropy of_earlier_run newest_pool"
)
GUIDANCE = (
    "AllocationRules EMClient EndpointSummarizer Experience ExperienceTemplate ExtractiveSummarizer Guidance Insertion"
    " LocalMaker Retrieved TaskExpConfig TrajExpConfig UpdateQueue put_in"
    " take_out with_guidance"
)


def special_functions(folder: Path, known: Mapping[str, Any]) -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Yield functions that are given something in the place of the usual values, or of defaults."""
    made = guidance.Experience(when_to_use="x", content="y")
    width = known["response_mask"].shape[1]
    yield ReplayHook, {"config": ExperienceReplayConfig()}
    yield GuidanceHook, {"config": GuidanceConfig()}
    yield experience.TokenRow, {"loss_mask": [1]}
    yield export_pool, {"store": folder / "none"}
    yield guidance.GuidanceManager, {"rules": guidance.AllocationRules()}
    yield made.to_trajectory, {"step": 1}
    yield TEMPLATE.fill, {"experience": "x"}
    yield guidance.ExperienceWorker, {"maker": None, "template": TEMPLATE}
    yield guidance.as_text, {"experiences": [made]}
    yield guidance.plain_messages, {"trajectory": dataclasses.replace(rollouts()[0], messages=MESSAGES)}
    yield guidance.strip_template, {"template": TEMPLATE}
    yield build_exp_mask, {"is_experience_replay": torch.zeros(2, dtype=torch.bool)}
    yield share_by_rollout, {"rollouts": known["batch"].rollouts}
    yield het_compute_token_on_off_policy_loss, {"cliprange": 0.2}
    yield aggregate_loss, {"response_mask": known["response_mask"].bool()}
    yield token_sums, {"exp_mask": known["exp_mask"][:, -width:]}


def calls_of_functions(folder: Path) -> Iterator[tuple[str, Callable[[], Call]]]:
    """Name and maker of every call."""
    known = good(folder)
    usual = (
        *(getattr(experience, name) for name in EXPERIENCE.split()),
        *(getattr(guidance, name) for name in GUIDANCE.split()),
        *(
            experience.BufferStore.open,
            guidance.Experience.of_trajectory,
            guidance.Guidance.of,
            guidance.Guidance.of_json,
        ),
        *(import_pool, TranscriptReader),
        *(BatchRow, MixedTasks, PlannedTask, assign_group_ids, build_batch),
        *(to_tensordict, rows_of_plan, rows_of_rollout, completed_rollouts, compute_response_mask, regularizer_masks),
        *(replace_recorded_old_log_probs, compute_grpo_outcome_advantage),
    )
    for function, given in (*((one, {}) for one in usual), *special_functions(folder, known)):
        yield function.__qualname__, functools.partial(with_defaults, function, given, known)
