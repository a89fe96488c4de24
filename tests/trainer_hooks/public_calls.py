"""Every public method of hooks, pool and guidance with good arguments: those that have no default, or need another."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.experience.conftest import build
from trainer_hooks.batch import BatchRow, build_batch
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.guidance import GuidanceHook
from trainer_hooks.guidance_config import GuidanceConfig
from trainer_hooks.hook import ReplayHook
from trainer_hooks.losses import het_compute_token_on_off_policy_loss
from trainer_hooks.plan import MixedTasks, PlannedTask
from trajstore.experience import (
    ChatTemplate,
    ExperienceManager,
    ExperienceMixCollateFn,
    PoolRules,
)
from trajstore.guidance import (
    AllocationRules,
    EMClient,
    Experience,
    ExperienceTemplate,
    ExperienceWorker,
    GuidanceManager,
    LocalMaker,
    TrajExpConfig,
    UpdateQueue,
    WorthLedger,
)
from trajstore.retrieval import RetrievalIndex
from trajstore.trajectory import AgentTrajectory

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


def of_a_step() -> tuple[list[PlannedTask[str]], Any, torch.Tensor, torch.Tensor, torch.Tensor, Any]:
    """Return a plan, its batch, zeros of the batch's shape, its masks of responses and of replay, and a loss."""
    batch = build_batch(batch_rows(), 0)
    mask, exp = batch.tensors["response_mask"], batch.tensors["exp_mask"]
    rows = torch.zeros(batch.tensors["responses"].shape)
    loss = het_compute_token_on_off_policy_loss(rows, rows, rows, mask, exp, cliprange=0.2)
    return [PlannedTask("a", 2, ())], batch, rows, mask, exp, loss


def template() -> ChatTemplate:
    return ChatTemplate(lambda messages, ask: "".join(map(str, messages)), lambda text: [1, 2], {2})


def with_defaults(function: Callable[..., Any], given: Mapping[str, Any]) -> Call:
    """Return a call with what is given, and with the default of every other argument that has one."""
    parameters = inspect.signature(function).parameters.values()
    defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
    if dataclasses.is_dataclass(function):
        made = {one.name: one.default_factory for one in dataclasses.fields(function)}
        defaults |= {name: make() for name, make in made.items() if make is not dataclasses.MISSING}
    return function, defaults | given


def methods(make: Callable[[], Any], arguments: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, given in arguments.items():
        yield f"{make.__name__}.{name}", lambda name=name, given=given: with_defaults(getattr(make(), name), given)


def plain(*functions: tuple[Callable[..., Any], Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    for function, given in functions:
        yield function.__qualname__, lambda function=function, given=given: with_defaults(function, given)


mixed = MixedTasks(("a",), ("b",))


def calls_of_methods(tmp_path: Path) -> Iterator[tuple[str, Callable[[], Call]]]:
    """Name and maker of every call; each is made anew, for a call may change what it is called on."""
    plan, batch, rows, mask, exp, loss = of_a_step()
    tensors = batch.tensors

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
            "loss_computed": {"batch": batch, "rows": [0, 1], "loss": loss, "advantages": rows, "cliprange_low": 0.2},
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
            "before_rollout": {"plan": plan},
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
            "sample_tasks_from_replaypool": {"num_tasks": 1, "strategy": "by_task"},
            "get_offpolicy_trajectories_from_memory": {"task_id": "a"},
            "get_offpolicy_batch": {"tasks": TASKS},
            "count_offpolicy": {"tasks": TASKS},
            "get_all_candidates_batch": {"tasks": TASKS},
            "hold": {"cuts": []},
            "load_state_dict": {"state": filled().state_dict()},
            "save_experience_pool_to_disk": {"directory": tmp_path / "saved"},
            "load_experience_pool_from_disk": {"directory": tmp_path / "saved", "global_steps": 1},
        },
    )

    def collate() -> ExperienceMixCollateFn[str]:
        return ExperienceMixCollateFn(filled(), dict(zip(TASKS, TASKS, strict=True)).get)

    yield from methods(
        collate,
        {
            "__call__": {"training_tasks": TASKS, "training_progress": 0.5},
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
            "retrieve": {"query": "go", "k": 1},
            "summarize": {"rollouts": rollouts()},
            "add": {"experiences": [experience], "step": 1},
        },
    )
    yield from methods(
        RetrievalIndex,
        {
            "add": {"keys": [0], "texts": ["go"]},
            "remove": {"keys": []},
            "search": {"query": "go", "k": 1},
        },
    )
    yield from methods(WorthLedger, {"note": {"rollouts": rollouts()}})
    client = functools.partial(EMClient, "http://127.0.0.1:9", retries=0, retrieve_timeout=5.0, summary_timeout=5.0)
    client.__name__ = "client"  # type: ignore[attr-defined]
    yield from methods(client, {"retrieve": {"query": "go", "k": 1}, "summarize": {"rollouts": []}})
