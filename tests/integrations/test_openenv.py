"""Harbor rollouts of OpenEnv: contracts as its package exports them, made by it where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.stores import opened
from trainer_hooks.integrations.openenv import record_rollout
from trajstore import Reward, Sessions
from trajstore.errors import ConfigurationError, InvalidCallError

TOOLS = [{"type": "function", "function": {"name": "ls"}}]


def made_entry(turn: int, prompt: list[int], completion: list[int], mask: list[int], text: str) -> dict[str, Any]:
    return {
        "request": {"messages": [{"role": "user", "content": "go"}], "tools": TOOLS},
        "response": {
            "choices": [
                {"message": {"role": "assistant", "content": text, "tool_calls": None}, "finish_reason": "stop"}
            ]
        },
        "prompt_token_ids": prompt,
        "completion_token_ids": completion,
        "per_token_logps": [-0.25 * token for token in completion],
        "loss_mask": [0] * len(prompt) + mask,
        "metadata": {"turn": turn, "node_id": f"n{turn}", "sampling_params": {"temperature": 1.0}, "n_tools": 1},
    }


def made_contract(**change: Any) -> dict[str, Any]:
    entries = [
        made_entry(0, [1, 2], [3, 4, 5], [1, 1, 1], "a"),
        made_entry(2, [1, 2, 3, 4, 5, 6], [7, 8, 9, 10], [1, 0, 1, 0], "b"),
        made_entry(3, [1, 2, 9], [4], [1], "rewritten"),
    ]
    turns = [{"turn": turn, "trainable": turn != 1, "discarded": turn == 1} for turn in range(4)]
    return {
        **{"schema_version": 1, "task_id": "t", "session_id": "s", "reward": 0.5, "rollout_type": "train"},
        **{"rewards": {"tests": 0.5}, "trace_entries": entries, "turns": turns},
    } | change


def test_a_contract_becomes_rollouts_with_its_masks(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        first, second = (buffer.get(number) for number in record_rollout(buffer, made_contract(), policy_version=3))
        assert first.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
        assert first.loss_mask.tolist() == [0, 0, 1, 1, 1, 0, 1, 0, 1, 0]
        log_probs = [0, 0, 0.75, 1.0, 1.25, 0, 1.75, 0, 2.25, 0]
        assert (-first.rollout_log_probs).tolist() == log_probs[first.response_start :]
        assert (second.input_ids.tolist(), second.loss_mask.tolist()) == ([1, 2, 9, 4], [0, 0, 0, 1])
        assert first.messages[-1]["content"] == "b"
        assert (first.task_id, first.rollout_id, first.reward) == ("t", "s", Reward(outcome=0.5))
        rest = first.metadata["openenv"]
        assert (rest["excluded"], rest["rewards"], first.policy_version) == ([1], {"tests": 0.5}, 3)


def test_bad_contracts_are_refused_whole(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        for wrong, message in (
            ({"schema_version": 2}, "schema_version: 2, must be 1"),
            ({"trace_entries": [made_entry(0, [1], [2], [1, 1], "a")]}, "turn 0: loss_mask"),
            ({"trace_entries": [made_entry(0, [1], [2], [1], "a"), made_entry(1, [-1], [2], [1], "b")]}, "-1"),
        ):
            with pytest.raises((ConfigurationError, InvalidCallError), match=message):
                record_rollout(buffer, made_contract(**wrong))
        with pytest.raises(ConfigurationError, match="has no 'turns'"):
            record_rollout(buffer, {name: value for name, value in made_contract().items() if name != "turns"})
        buffer.flush()
        assert (len(buffer), Sessions(tmp_path).listed()) == (0, [])


def test_openenv_itself_exports_what_is_recorded(tmp_path: Path) -> None:
    contracts = pytest.importorskip("openenv.harbor.contract", reason="openenv is not installed")
    from openenv.harbor.models import HarborRolloutResult, HarborTurn

    turns = [
        HarborTurn(
            turn=entry["metadata"]["turn"],
            text=entry["response"]["choices"][0]["message"]["content"],
            request_messages=entry["request"]["messages"],
            request_tools=TOOLS,
            finish_reason="stop",
            node_id=entry["metadata"]["node_id"],
            **{name: entry[name] for name in ("prompt_token_ids", "completion_token_ids", "per_token_logps")},
            loss_mask=entry["loss_mask"],
        )
        for entry in made_contract()["trace_entries"]
    ]
    result = HarborRolloutResult(task_id="t", session_id="s", reward=0.5, turns=turns)
    with opened(tmp_path) as buffer:
        rows = [buffer.get(number) for number in record_rollout(buffer, contracts.export_training_contract(result))]
        assert [row.loss_mask.tolist() for row in rows] == [[0, 0, 1, 1, 1, 0, 1, 0, 1, 0], [0, 0, 0, 1]]
