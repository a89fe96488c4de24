"""Rollouts of what agents of AReaL and OpenRLHF return, of the shape in their public sources."""

from __future__ import annotations

import asyncio
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.pages import run_section
from trainer_hooks.integrations.areal import rollouts_of
from trainer_hooks.integrations.openrlhf import rollout_of
from trajstore import TrajectoryReplayBuffer
from trajstore.errors import InvalidTrajectoryError


def episode() -> dict[str, Any]:
    """Return AReaL's tensors: a rollout with a tool's token, and a shorter one without a trained token."""
    return {
        "input_ids": torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 0, 0]]),
        "attention_mask": torch.tensor([[1] * 5, [1, 1, 1, 0, 0]], dtype=torch.bool),
        "loss_mask": torch.tensor([[0, 0, 1, 0, 1], [0] * 5]),
        "logprobs": torch.tensor([[0, 0, -0.5, 0, -1.5], [0.0] * 5]),
        "versions": torch.tensor([[-1, -1, 7, -1, 6], [-1] * 5]),
        "rewards": torch.tensor([1.0, float("nan")]),
    }


def execution(**changes: Any) -> dict[str, Any]:
    """Return OpenRLHF's result of two actions around a feedback."""
    return {
        "prompt": "2+2", "reward": 0.5, "scores": 1, "observation_tokens": [1, 2, 3, 4, 5],
        "action_ranges": [(2, 3), (4, 5)], "rollout_log_probs": [0.0, 0.0, -0.5, 0.0, -1.5], "truncated": True,
    } | changes  # fmt: skip


def test_an_episode_of_areal_is_a_rollout_per_row() -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories(rollouts_of(episode()))
        whole, empty = buffer.get(0), buffer.get(1)
    assert (whole.response_start, whole.policy_version, whole.reward.outcome) == (2, 6, 1.0)
    assert whole.loss_mask.tolist() == [0, 0, 1, 0, 1]
    assert whole.rollout_log_probs.tolist() == [-0.5, 0, -1.5]
    assert (empty.input_ids.tolist(), empty.response_start, empty.policy_version) == ([1, 2, 3], 3, None)
    assert empty.reward.outcome is None
    assert rollouts_of(None) == []
    interactions = {name: SimpleNamespace(to_tensor_dict=episode) for name in ("first", "second")}
    assert len(rollouts_of(interactions)) == 4


@pytest.mark.parametrize("log_probs", [True, False])
def test_an_execution_of_openrlhf_is_a_rollout(log_probs: bool) -> None:
    given = execution() if log_probs else execution(rollout_log_probs=None, reward=None, scores=None, truncated=False)
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([rollout_of(given, version=3)])
        stored = buffer.get(0)
    assert (stored.response_start, stored.policy_version, stored.is_terminated) == (2, 3, not log_probs)
    assert stored.loss_mask.tolist() == [0, 0, 1, 0, 1]
    assert stored.reward.outcome == (0.5 if log_probs else None)
    assert (stored.rollout_log_probs is not None) == log_probs
    several_turns = {name: value for name, value in execution().items() if name != "truncated"}
    assert rollout_of(several_turns).is_terminated is None
    empty = rollout_of(execution(observation_tokens=[1], action_ranges=[], rollout_log_probs=[0.0]))
    assert (empty.response_start, len(empty.input_ids)) == (1, 1)
    with pytest.raises(InvalidTrajectoryError, match="rollout_log_probs has 2 values for 3"):
        rollout_of(execution(rollout_log_probs=[0.0] * 4))


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Workflow:
        async def arun_episode(self, engine: Any, data: Any) -> dict[str, Any]:
            return episode()

    class Executor:
        async def execute(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return execution()

    logged: list[Any] = []
    gauge = SimpleNamespace(labels=lambda name: SimpleNamespace(set=lambda value: logged.append((name, value))))
    for name, members in {
        "areal.api": {"RolloutWorkflow": object},
        "openrlhf.utils.agent": {"SingleTurnAgentExecutor": Executor},
        "prometheus_client": {"Gauge": lambda *_: gauge, "start_http_server": lambda port: None},
    }.items():
        for part in itertools.accumulate(name.split("."), "{}.{}".format):
            if part not in sys.modules or part == name:
                monkeypatch.setitem(sys.modules, part, SimpleNamespace(__path__=[], **members))
    monkeypatch.chdir(tmp_path)
    names = run_section("trainers.md", "AReaL, OpenRLHF, NeMo-RL, RLinf, and logging", MyWorkflow=Workflow)
    asyncio.run(names["RecordedWorkflow"]().arun_episode(None, {}))
    asyncio.run(names["AgentExecutor"]().execute("2+2"))
    names["export_store"](names["buffer"])
    for name in ("buffer", "engine_buffer"):
        names[name].close()
    assert dict(logged)["num_trajectories"] == 2
    with TrajectoryReplayBuffer.open(next((tmp_path / "engines").iterdir())) as reader:
        assert len(reader) == 1


def test_versions_and_rewards_of_areal() -> None:
    """Versions of -1 are unknown; a reward may have a further axis, but several are refused."""
    some = torch.tensor([[-1, -1, -1, -1, 6], [-1] * 5])
    rollouts = rollouts_of(episode() | {"versions": some, "rewards": torch.tensor([[1.0], [2.0]])})
    assert [(one.policy_version, one.reward.outcome) for one in rollouts if one.reward] == [(6, 1.0), (None, 2.0)]
    assert rollouts_of(episode() | {"versions": torch.full((2, 5), -1)})[0].policy_version is None
    with pytest.raises(InvalidTrajectoryError, match=r"rewards: shape \[2, 3\], must have one of each row"):
        rollouts_of(episode() | {"rewards": torch.zeros(2, 3)})


@pytest.mark.parametrize("scores", [{"acc": 1, "why": "short"}, [0.5, 1.0]])
def test_several_scores_of_openrlhf_are_kept(scores: Any) -> None:
    stored = rollout_of(execution(scores=scores))
    assert stored.reward is not None
    assert (stored.reward.metadata, stored.metadata["openrlhf"]["scores"]) == ({}, scores)
