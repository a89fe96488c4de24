"""Traces of verifiers become rollouts; with the real package, its branches."""

from __future__ import annotations

import json
import random
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.stores import stored
from trajstore import AgentTrajectory, TrajectoryReplayBuffer
from trajstore.interop.convert import convert_from
from trajstore.interop.verifiers import rollouts_of


def made_trace(seed: int = 0, size: int = 12, *, relayed: bool = False, **more: Any) -> dict[str, Any]:
    """Return a record of a trace with a random graph; ``relayed`` has no tokens."""
    chance = random.Random(seed)
    nodes: list[dict[str, Any]] = []
    for number in range(size):
        parent = None if not number else chance.choice([number - 1, number - 1, chance.randrange(number)])
        sampled = bool(number and chance.random() < 0.5)
        ids = [] if relayed else [chance.randrange(1 << 18) for _ in range(chance.randrange(1, 5))]
        mask = [sampled and at >= 1 for at in range(len(ids))]
        role = "assistant" if sampled else "user"
        nodes.append(
            {
                **({} if parent is None else {"parent": parent}),
                "message": {"role": role, "content": f"é{number}"},
                "sampled": sampled,
                "timestamp": 1.5e9 + number,
                "token_ids": ids,
                "mask": mask,
                "is_content": mask if chance.random() < 0.5 else [],
                # some are no float32
                "logprobs": [chance.choice([-0.5, -0.1, 0.0]) for _ in range(sum(mask))],
                "advantages": [0.25] * sum(mask),
            }
        )
    return {
        "version": 1,
        "id": uuid.UUID(int=seed + 1).hex,
        "task": {"type": "Task", "data": {"idx": 7, "prompt": "x"}, "key": "t-7"},
        "agent": {"config": {}, "name": "agent", "trainable": True},
        "nodes": nodes,
        "calls": [{"node": at, "finish_reason": "stop"} for at, node in enumerate(nodes) if node["sampled"]],
        "rewards": {"right": {"score": 1.0, "weight": 0.5}, "format": {"score": 0.5, "weight": 1.0}, "late": None},
        "is_completed": True,
        "stop_condition": "agent_completed",
        **more,
    }


def through_a_store(path: Path, trace: dict[str, Any]) -> list[AgentTrajectory]:
    with TrajectoryReplayBuffer.open(stored(path, rollouts_of(trace))) as reader:
        return [reader.get(number) for number in reader.trajectory_ids.tolist()]


@pytest.mark.parametrize(("seed", "size"), [(seed, 1 + 3 * seed) for seed in range(8)])
@pytest.mark.parametrize("relayed", [False, True])
def test_a_rollout_for_each_branch_trains_each_sampled_token_once(
    seed: int, size: int, relayed: bool, tmp_path: Path
) -> None:
    trace = made_trace(seed, size, relayed=relayed)
    rows = through_a_store(tmp_path / "store", trace)
    assert trace == made_trace(seed, size, relayed=relayed)  # not changed
    assert rows[0].metadata["verifiers"]["trace"] == {name: trace[name] for name in trace if name != "nodes"}
    parents = {node.get("parent") for node in trace["nodes"]}
    assert len(rows) == len([number for number in range(size) if number not in parents])
    assert {row.reward and row.reward.outcome for row in rows} == {1.0}
    assert {(row.task_id, row.rollout_id, row.is_terminated) for row in rows} == {("t-7", trace["id"], True)}
    if not relayed:
        trained = sum(int(row.loss_mask.sum()) for row in rows if row.loss_mask is not None)
        assert trained == sum(sum(node["mask"]) for node in trace["nodes"])
    for row in rows:
        for call in row.metadata["session"]["calls"]:
            node = trace["nodes"][int(call["id"])]
            assert row.input_ids is not None
            assert row.input_ids[call["start"] : call["stop"]].tolist() == node["token_ids"][1:]
            assert (row.response_start, row.rollout_log_probs) != (None, None)
            shown = row.rollout_log_probs[call["start"] - row.response_start :][: len(node["logprobs"])]
            assert shown.tolist() == pytest.approx(node["logprobs"])


def test_an_agent_that_is_not_trained_has_a_group_of_its_own_and_no_mask() -> None:
    trace = made_trace(3, agent={"name": "judge", "trainable": False})
    rows = rollouts_of(trace)
    assert {row.task_id for row in rows} == {"t-7/judge"}
    assert all(row.loss_mask is None or not row.loss_mask.any() for row in rows)


def test_files_of_a_run_are_converted_and_bad_traces_are_named(tmp_path: Path) -> None:
    good, other = made_trace(1), made_trace(2, 5, id=uuid.UUID(int=99).hex)
    broken = made_trace(4)
    broken["nodes"][2]["mask"] = [True]
    broken["nodes"][2]["token_ids"] = [1, 2]
    work = {"type": "train", "id": "r", "work": {"type": "train", "step": 4, "policy": {"start": 3, "end": 4}}}
    lines = [
        json.dumps({"id": "e", "ok": True, "run": work, "traces": [good, broken]}),
        "{",
        json.dumps({"prompt": "of another program"}),
        json.dumps(other),
        json.dumps(made_trace(5, 0)),
    ]
    run = tmp_path / "run"
    run.mkdir()
    (run / "traces.jsonl").write_text("\n".join(lines))
    done = convert_from(run, tmp_path / "store", "verifiers", check=True)
    assert list(done.problems) == ["line 1, trace 1", "line 2", "line 3"]
    assert "nodes[2].mask: has 1 values for 2 tokens" in done.problems["line 1, trace 1"]
    with TrajectoryReplayBuffer.open(tmp_path / "store") as reader:
        rows = [reader.get(number) for number in reader.trajectory_ids.tolist()]
    by_trace: dict[str, list[AgentTrajectory]] = {}
    for row in rows:
        by_trace.setdefault(row.rollout_id, []).append(row)
    first, second, empty = by_trace.values()
    assert [len(rows) for rows in (first, second)] == [len(rollouts_of(trace)) for trace in (good, other)]
    assert (len(empty), empty[0].messages) == (1, [])
    assert ({row.policy_version for row in first}, second[0].policy_version) == ({3}, None)
    assert first[0].metadata["verifiers"]["episode"] == {"id": "e", "ok": True, "run": work}


def test_verifiers_itself_reads_the_same_branches(tmp_path: Path) -> None:
    vf = pytest.importorskip("verifiers.v1", reason="verifiers is not installed")
    from verifiers.v1 import graph

    task = vf.TraceTask(type="Task", data=vf.TaskData(idx=0, prompt="x"), key="t")
    trace = vf.Trace(agent=vf.AgentInfo(config=vf.AgentConfig()), task=task)
    user = vf.UserMessage(content="u")

    def turn(history: list[Any], prompt: list[int], spans: list[Any], answer: str, sampled: list[int]) -> list[Any]:
        message = vf.AssistantMessage(content=answer)
        tokens = vf.types.TurnTokens(
            prompt_ids=prompt,
            completion_ids=sampled,
            completion_logprobs=[-0.25 * at for at in range(1, len(sampled) + 1)],
            message_spans=spans,
        )
        made = {"id": answer, "created": 0, "model": "m", "finish_reason": "stop"}
        graph.prepare_turn(trace, history).commit(vf.Response(**made, message=message, tokens=tokens))
        return [*history, message]

    begun = turn([user], [1, 2, 3], [(0, 2)], "a", [4, 5])
    for more, ids in (("b", [6]), ("c", [7, 8])):
        said = [*begun, vf.UserMessage(content=more)]
        turn(said, [1, 2, 3, 4, 5, *ids], [(0, 2), None, (5, 5 + len(ids))], more.upper(), [9, 10, 11])
    turn([user, vf.AssistantMessage(content="rewritten")], [1, 2, 30], [(0, 2), (2, 3)], "d", [12])
    trace.record_reward("r", 1.0)
    rows = through_a_store(tmp_path / "store", trace.to_record())
    assert len(trace.branches) == len(rows) == 3
    for branch, row in zip(trace.branches, rows, strict=True):
        assert row.input_ids is not None
        assert row.rollout_log_probs is not None
        assert row.input_ids.tolist() == branch.token_ids
        log_probs = torch.zeros(len(branch.token_ids))
        log_probs[row.response_start :] = row.rollout_log_probs
        assert log_probs.tolist() == branch.logprobs
