"""Valid calls of hooks, pool and guidance; a test replaces one argument."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.replay.conftest import build
from trainer_hooks import guidance
from trainer_hooks import replay as experience
from trainer_hooks.advantages import compute_grpo_outcome_advantage
from trainer_hooks.batch import BatchRow, assign_group_ids, build_batch, to_tensordict
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.guidance.config import GuidanceConfig
from trainer_hooks.guidance.hook import GuidanceHook
from trainer_hooks.hook import ReplayHook
from trainer_hooks.losses import aggregate_loss, het_compute_token_on_off_policy_loss
from trainer_hooks.masks import build_exp_mask, replace_recorded_old_log_probs
from trainer_hooks.plan import MixedTasks, PlannedTask
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
    config = ExperienceReplayConfig(enable=True)
    hook: ReplayHook[str] = ReplayHook(config, n_rollout=4, get_task=dict(zip(TASKS, TASKS, strict=True)).get)
    hook.tasks_chosen(TASKS, 0.5, 1)
    hook.admit(rollouts())
    return hook


def guidance_hook() -> GuidanceHook:
    options = {"enable_summarizer": True, "enable_context_generator": True, "updated_freq": 1}
    return GuidanceHook(
        GuidanceConfig.from_config({"experience_maker": options, "exp_manager": {"rollout_expratio": 0.5}})
    )


def filled() -> experience.ExperienceManager:
    manager = experience.ExperienceManager(RULES)
    manager.admit(rollouts())
    return manager


def collate() -> experience.ExperienceMixCollateFn[str]:
    return experience.ExperienceMixCollateFn(filled(), dict(zip(TASKS, TASKS, strict=True)).get)


def manager() -> guidance.GuidanceManager:
    return guidance.GuidanceManager(guidance.AllocationRules(rollout_expratio=0.5))


def batch_rows() -> list[BatchRow]:
    return [BatchRow(trajectory=rollout, group_id=0) for rollout in rollouts()]


def template() -> experience.ChatTemplate:
    return experience.ChatTemplate(lambda messages, ask: "".join(map(str, messages)), lambda text: [1, 2], {2})


def good(folder: Path) -> dict[str, Any]:
    """Return a valid value for each required argument, for a batch of two rollouts of one task."""
    made = build_batch(batch_rows(), 0)
    values = torch.zeros(made.tensors["responses"].shape)
    of_batch = {name: made.tensors[name] for name in ("attention_mask", "exp_mask", "response_mask", "recorded_mask")}
    loss = het_compute_token_on_off_policy_loss(
        values, values, values, of_batch["response_mask"], of_batch["exp_mask"], cliprange=0.2
    )
    return {
        **of_batch,
        **dict.fromkeys(("advantages", "entropys", "log_prob", "losses", "old_log_prob", "old_log_probs"), values),
        **dict.fromkeys(("recorded_old_log_probs", "token_level_rewards"), values),
        **dict.fromkeys(("done", "fresh", "rollouts"), rollouts()),
        **dict.fromkeys(("tasks", "training_tasks"), TASKS),
        "base_url": "http://127.0.0.1:9",
        "batch": made,
        "cliprange_low": 0.2,
        "config": guidance.TrajExpConfig(),
        "directory": folder / "saved",
        "exp_manager": filled(),
        "figures": {},
        "get_task": str,
        "global_steps": 1,
        "index": [0, 0],
        "is_discarded": torch.zeros(2, dtype=torch.bool),
        "is_experience_replay": [False, True],
        "loss": loss,
        "loss_agg_mode": "token-mean",
        "loss_mask": made.tensors["loss_mask"],
        "maker": guidance.LocalMaker(),
        "messages": MESSAGES,
        "mixed": MixedTasks(("a",), ("b",)),
        "mode": "sample",
        "pad_token_id": 0,
        "plan": [PlannedTask("a", 2, ())],
        "policy_versions": [1, None],
        "prompt_length": 2,
        "rows": batch_rows(),
        "state": None,
        "step": 0,
        "task_ids": ["a", "a"],
        "task_positions": [0, 0],
        "template": template(),
        "timeout": 0.0,
        "training_progress": 0.5,
        "trajectory": rollouts()[0],
    }


def with_defaults(function: Callable[..., Any], given: Mapping[str, Any], known: Mapping[str, Any]) -> Call:
    """Return a call with given values, else defaults, else known valid values."""
    parameters = inspect.signature(function).parameters.values()
    named = [
        parameter for parameter in parameters if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    arguments = {
        parameter.name: known[parameter.name]
        for parameter in named
        if parameter.default is parameter.empty and parameter.name not in given
    }
    arguments |= {parameter.name: parameter.default for parameter in named if parameter.default is not parameter.empty}
    if dataclasses.is_dataclass(function):
        made = {parameter.name: parameter.default_factory for parameter in dataclasses.fields(function)}
        arguments |= {name: make() for name, make in made.items() if make is not dataclasses.MISSING}
    return function, arguments | given


METHODS: dict[Callable[[], Any], str] = {
    replay_hook: "tasks_chosen before_rollout replacements batch_rows log_probs_computed replace_log_probs"
    " regularizer_masks loss_computed watch step_done rollouts_done admit load_state_dict resume hold",
    guidance_hook: "before_rollout context finished step_done validated begin wait load_state_dict close",
    filled: "get_offpolicy_batch load_experience_pool_from_disk",
    collate: "__call__",
    manager: "allocate_add_exp",
}


def special_arguments() -> dict[str, dict[str, Any]]:
    """Return method arguments that replace the usual values or defaults."""
    return {
        "replay_hook.loss_computed": {"rows": [0, 1]},
        "replay_hook.rollouts_done": {"is_experience_replay": [False, False]},
        "replay_hook.load_state_dict": {"state": replay_hook().state_dict()},
        "replay_hook.hold": {"states": []},
        "guidance_hook.load_state_dict": {"state": guidance_hook().state_dict()},
        "guidance_hook.close": {"timeout": 0.0},
        "manager.allocate_add_exp": {"rollouts": [1, 2]},
    }


def calls_of_methods(folder: Path) -> Iterator[tuple[str, Callable[[], Call]]]:
    """Name and factory of every method call; a call may change its object, so each gets a new one."""
    known = good(folder)
    special = special_arguments()

    def make_call(make: Callable[[], Any], name: str) -> Call:
        return with_defaults(getattr(make(), name), special.get(f"{make.__name__}.{name}", {}), known)

    for make, names in METHODS.items():
        for name in names.split():
            yield f"{make.__name__}.{name}", functools.partial(make_call, make, name)


def calls_of_functions(folder: Path) -> Iterator[tuple[str, Callable[[], Call]]]:
    """Name and factory of every function call."""
    known = good(folder)
    calls: tuple[tuple[Callable[..., Any], dict[str, Any]], ...] = (
        *((target, {}) for target in (experience.ExperienceMixCollateFn, experience.rows_of_messages)),
        *((target, {}) for target in (guidance.EMClient, guidance.UpdateQueue)),
        *((target, {}) for target in (guidance.TrajExpConfig, assign_group_ids, build_batch, to_tensordict)),
        *((target, {}) for target in (replace_recorded_old_log_probs, compute_grpo_outcome_advantage)),
        (guidance.ExperienceWorker, {"maker": None, "template": TEMPLATE}),
        (build_exp_mask, {"is_experience_replay": torch.zeros(2, dtype=torch.bool)}),
        (het_compute_token_on_off_policy_loss, {"cliprange": 0.2}),
        (aggregate_loss, {"response_mask": known["response_mask"].bool()}),
    )
    for function, given in calls:
        yield function.__qualname__, functools.partial(with_defaults, function, given, known)
