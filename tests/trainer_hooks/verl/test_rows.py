"""A row of verl's data plane survives the way through a store into another group."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer_hooks.verl.builders import RULE, fresh_row, rated, trained_of
from trainer_hooks.metrics import fresh_metrics
from trainer_hooks.replay.entry import DEMONSTRATION, of_earlier_run
from trainer_hooks.replay.outcomes import asked_for, known_outcome
from trainer_hooks.replay.rows import row_count
from trainer_hooks.transfer_queue import Row
from trainer_hooks.verl.config import OutcomeRule
from trainer_hooks.verl.histories import spread
from trainer_hooks.verl.rows import (
    FIRST_REPLAYED_SESSION,
    finished_of,
    in_order,
    plain,
    recorded_log_probs,
    replayed_row,
    session_of,
    why_no_outcome,
)
from trainer_hooks.verl.tasks import task_name
from trajstore import TrajectoryReplayBuffer
from trajstore.errors import ConfigurationError, InvalidTrajectoryError
from trajstore.trajectory import AgentTrajectory, AnyTrajectory, Reward


def recorded(row: Row, outcome: OutcomeRule = RULE) -> AgentTrajectory:
    return trained_of([row], outcome)[0]


def through_a_store(trajectories: list[AgentTrajectory], folder: Path) -> list[AgentTrajectory]:
    """Return the trajectories as read back by another process."""
    ids: list[int] = []
    stored: list[AnyTrajectory] = []
    for opened in ("to write", "to read"):
        with TrajectoryReplayBuffer(
            auto_save=True, auto_save_path=folder, trajectory_format="pt", enable_cache=False
        ) as buffer:
            if opened == "to write":
                ids = buffer.add_trajectories(trajectories)
            else:
                stored = [buffer.get(number) for number in ids]
    agents = [trajectory for trajectory in stored if isinstance(trajectory, AgentTrajectory)]
    assert len(agents) == len(stored) == len(trajectories)
    return agents


def with_scores(row: Row, scores: Tensor) -> Row:
    return Row(row.key, row.tag, {**row.columns, "rm_scores": scores})


# ---- there and back ----


@settings(max_examples=25, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**31), log_probs=st.booleans())
def test_a_row_comes_back_as_it_was(
    data: st.DataObject, seed: int, log_probs: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 7)), min_size=1, max_size=4))
    made = []
    for session, (prompt, response) in enumerate(lengths):
        row = rated(fresh_row("old", session, prompt=prompt, response=response, seed=seed, log_probs=log_probs), seed)
        dense = data.draw(st.sampled_from(["last", "every", "none"]))
        scores = {"last": row.columns["rm_scores"], "every": torch.rand(response), "none": torch.zeros(response)}
        tag = {**row.tag, "min_global_steps": data.draw(st.integers(0, 4)), "max_global_steps": 9}
        made.append(with_scores(Row(row.key, tag, row.columns), scores[dense]))

    held = through_a_store([recorded(row) for row in made], tmp_path_factory.mktemp("store"))

    template = fresh_row("new", response=2, seed=seed + 1, log_probs=log_probs)
    for number, (row, trajectory) in enumerate(zip(made, held, strict=True)):
        back = replayed_row(template, trajectory, number, own_group=False)
        assert back.columns.keys() == template.columns.keys()
        same = ["prompts", "responses", "input_ids", "position_ids", "response_mask", "loss_mask", "rm_scores"]
        for name in [*same, *(["rollout_log_probs"] if log_probs else [])]:
            assert back.columns[name].dtype == row.columns[name].dtype, name
            assert torch.equal(back.columns[name], row.columns[name]), name
        lengths_of = {name: row.tag[name] for name in ("prompt_len", "response_len", "seq_len")}
        versions = {name: row.tag[name] for name in ("min_global_steps", "max_global_steps")}
        assert back.tag == {**template.tag, **lengths_of, **versions}
        assert versions.items() <= back.columns["extra_fields"].items()
        values, known = recorded_log_probs(trajectory, len(row.columns["responses"]))
        assert known.all()
        assert trajectory.policy_version == row.tag["min_global_steps"] + 1
        waited = log_probs and row.tag["min_global_steps"] < 4
        assert torch.equal(values, row.columns["rollout_log_probs" if waited else "old_log_probs"])


def test_a_loss_mask_alone_says_which_tokens_are_replayed() -> None:
    """Imported rollouts of another loop may lack ``response_mask``."""
    row = rated(fresh_row("old", response=4))
    imported = dataclasses.replace(recorded(row), response_mask=None)
    back = replayed_row(fresh_row("new"), imported, 0, own_group=False)
    for name in ("response_mask", "loss_mask"):
        assert back.columns[name].dtype == torch.int64
        assert torch.equal(back.columns[name], row.columns["response_mask"])


def test_what_a_trajectory_says_of_its_row(tmp_path: Path) -> None:
    row = rated(fresh_row("u1", 3, index=17, score=0.75))
    (held,) = through_a_store([recorded(row)], tmp_path)
    assert held.task_id == task_name("sums", 17) == "sums:17"
    assert (held.data_id, held.rollout_id, held.policy_version) == ("sums", "u1_3_0", 5)
    assert held.tokenizer_fingerprint == "tokens"
    assert held.reward.outcome == 0.75
    assert held.reward.metadata == {"score": 0.75, "extra": {"acc": 0.75}}
    assert held.metadata == {
        "run": "run-a",
        "step": 5,
        "uid": "u1",
        "min_global_steps": 4,
        "max_global_steps": 5,
        "token_scores": [[3, 0.75]],
        "outputs": 1,
        "task_rollouts": 1,
        "trained": True,
        "ground_truth": "1",
        "num_turns": 2,
    }
    assert held.messages == [{"role": "user", "content": "task 17"}]
    assert held.loss_mask.tolist() == [0, 0, 0, *row.columns["response_mask"].tolist()]
    assert held.loss_mask.dtype == held.response_mask.dtype == torch.uint8, "a byte for each token, not verl's eight"
    assert held.input_ids.dtype == torch.int32
    assert replayed_row(row, held, 0, own_group=False).columns["response_mask"].dtype == torch.int64
    assert torch.equal(held.entropys, row.columns["entropy"])


def test_a_row_without_the_columns_that_are_only_welcome() -> None:
    row = rated(fresh_row("u1", log_probs=False))
    columns = {name: value for name, value in row.columns.items() if name not in ("entropy", "extra_fields")}
    made = recorded(Row(row.key, {}, columns))
    assert made.entropys is None
    assert made.rollout_log_probs is None
    assert made.reward.metadata == {"score": 1.0, "extra": {}}
    assert made.metadata["min_global_steps"] is None


def test_a_reward_without_the_figure_is_an_unknown_outcome_and_ends_nothing() -> None:
    made = recorded(rated(fresh_row("u1", score=0.5)), rule := OutcomeRule(key="f1"))
    assert made.reward.outcome is None
    assert known_outcome(made) is None
    assert why_no_outcome(made, rule) == "exp_manager.outcome.key: the reward function gave no 'f1'; it gave: acc"


def test_a_score_that_is_no_number_is_recorded_and_has_no_outcome(tmp_path: Path) -> None:
    row = rated(fresh_row("u1"))
    scores = torch.tensor([0.0, 0.0, 0.0, torch.nan])
    (held,) = through_a_store([recorded(with_scores(row, scores))], tmp_path)
    assert (held.reward.outcome, held.reward.metadata["score"]) == (None, "nan")
    assert why_no_outcome(held, RULE) == "its score is nan"
    back = replayed_row(row, held, 0, own_group=False).columns["rm_scores"]
    assert torch.equal(back.isnan(), scores.isnan())


def test_scores_are_shown_in_the_units_of_the_reward() -> None:
    rule = OutcomeRule(success=0.5)
    fresh = [recorded(rated(fresh_row("u", number, score=score)), rule) for number, score in enumerate((0.1, 0.3))]
    assert fresh_metrics(fresh, 1.0)["experience_replay/fresh_score_mean"] == pytest.approx(0.2)


def with_extra(row: Row, num_turns: int, **extra: Any) -> Row:
    fields = {**row.columns["extra_fields"], **extra}
    return Row(row.key, row.tag, {**row.columns, "num_turns": num_turns, "extra_fields": fields})


def test_what_the_agent_loop_tells_is_recorded_and_stays_with_its_rollout(tmp_path: Path) -> None:
    row = with_extra(
        rated(fresh_row("old")), 6, turn_scores=[0.5, np.float32(1.0)], tool_rewards=[0.25], preempted=1, nothing=None
    )
    (held,) = through_a_store([recorded(row)], tmp_path)
    recorded_values = {
        name: held.metadata[name] for name in ("num_turns", "turn_scores", "tool_rewards", "extra_fields")
    }
    assert recorded_values == {
        "num_turns": 6,
        "turn_scores": [0.5, 1.0],
        "tool_rewards": [0.25],
        "extra_fields": {"preempted": 1},
    }
    template = with_extra(fresh_row("new"), 2, turn_scores=[0.0], tool_rewards=[], other=7)
    back = replayed_row(template, held, 0, own_group=False).columns
    assert back["num_turns"] == 6
    extra = back["extra_fields"]
    assert (extra["turn_scores"], extra["tool_rewards"], extra["preempted"]) == ([0.5, 1.0], [0.25], 1)
    assert extra["other"] is None, "another rollout's: the history has none"


# ---- the replayed row ----


def test_a_replayed_row_belongs_to_the_template_s_prompt() -> None:
    history = recorded(rated(fresh_row("old", index=3, seed=9)))
    template = fresh_row("new", 2, index=3)
    for number in (0, 1, 7):
        back = replayed_row(template, history, number, own_group=False)
        session = FIRST_REPLAYED_SESSION + number
        assert back.key == f"new_{session}_0"
        assert back.columns["session_id"] == session
        assert back.columns["uid"] == "new"
        for name in ("index", "data_source", "raw_prompt", "reward_model", "global_steps", "multi_modal_inputs"):
            assert back.columns[name] == template.columns[name], name


def test_a_group_of_its_own() -> None:
    history = recorded(rated(fresh_row("old")))
    template = fresh_row("new")
    rows = [replayed_row(template, history, number, own_group=True) for number in range(3)]
    assert [row.columns["uid"] for row in rows] == ["new-replayed-0", "new-replayed-1", "new-replayed-2"]
    assert [row.key.split("_")[0] for row in rows] == ["new"] * 3, "clearing the prompt must clear these rows too"
    assert not any("_" in row.columns["uid"] for row in rows)


def test_columns_that_only_some_rows_have() -> None:
    history = recorded(rated(fresh_row("old", response=5)))
    template = fresh_row("new")
    more = Row(template.key, template.tag, {**template.columns, "attention_mask": torch.ones(7), "tools_kwargs": {}})
    back = replayed_row(more, history, 0, own_group=False)
    assert back.columns["attention_mask"].tolist() == [1] * 8
    assert back.columns["tools_kwargs"] == {}
    assert back.columns.keys() == more.columns.keys()


def test_log_probs_of_the_engine_that_were_not_recorded() -> None:
    history = recorded(rated(fresh_row("old", log_probs=False)))
    back = replayed_row(fresh_row("new"), history, 0, own_group=False)
    assert torch.equal(back.columns["rollout_log_probs"], history.old_log_probs)


@pytest.mark.parametrize(("version", "expected"), [(None, 0), (6, 5)])
def test_versions_that_were_not_recorded_are_those_of_the_step(version: int | None, expected: int) -> None:
    made = recorded(rated(Row("old_0_0", {}, fresh_row("old").columns)))
    history = dataclasses.replace(made, policy_version=version)
    tag = replayed_row(fresh_row("new"), history, 0, own_group=False).tag
    assert (tag["min_global_steps"], tag["max_global_steps"]) == (expected, expected)
    assert type(tag["min_global_steps"]) is int


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("routed_experts", torch.zeros(7, 2, 2)),
        ("teacher_ids", torch.zeros(7, 4)),
        ("teacher_logprobs", torch.zeros(7, 4)),
        ("multi_modal_inputs", {"pixel_values": torch.zeros(3)}),
    ],
)
def test_columns_that_no_history_has_are_refused(name: str, value: Any) -> None:
    history = recorded(rated(fresh_row("old")))
    template = fresh_row("new")
    with pytest.raises(ConfigurationError, match=rf"{name}.*experience_replay\.enable=false"):
        replayed_row(Row(template.key, template.tag, {**template.columns, name: value}), history, 0, own_group=False)


@pytest.mark.parametrize(
    "names", [("input_ids",), ("response_start",), ("loss_mask", "response_mask"), ("old_log_probs",)]
)
def test_a_history_without_its_tokens_is_refused(names: tuple[str, ...]) -> None:
    history = recorded(rated(fresh_row("old")))
    for name in names:
        setattr(history, name, None)
    with pytest.raises(InvalidTrajectoryError, match="'old_0_0'"):
        replayed_row(fresh_row("new"), history, 0, own_group=False)


def test_versions_of_an_earlier_run_are_no_tags_of_this_one(tmp_path: Path) -> None:
    row = rated(fresh_row("old"))
    tag = {**row.tag, "min_global_steps": 300, "max_global_steps": 301}
    (held,) = through_a_store([recorded(Row(row.key, tag, row.columns))], tmp_path)
    template = fresh_row("new")
    names = ("min_global_steps", "max_global_steps")
    for rollout, expected in ((held, (300, 301)), (of_earlier_run(held), tuple(template.tag[name] for name in names))):
        back = replayed_row(template, rollout, 0, own_group=False)
        assert tuple(back.tag[name] for name in names) == expected
        assert tuple(back.columns["extra_fields"][name] for name in names) == expected


def demonstration(**metadata: Any) -> AgentTrajectory:
    history = recorded(rated(fresh_row("old")))
    changes: dict[str, Any] = {"old_log_probs": None, "rollout_log_probs": None, "policy_version": None}
    reward = Reward(outcome=1.0, metadata=metadata)
    return dataclasses.replace(history, reward=reward, metadata={DEMONSTRATION: True}, **changes)


@pytest.mark.parametrize(("metadata", "score"), [({}, 1.0), ({"score": 2.5}, 2.5)])
def test_a_demonstration_has_its_score_and_no_log_probs(metadata: dict[str, Any], score: float) -> None:
    template = fresh_row("new")
    back = replayed_row(template, demonstration(**metadata), 0, own_group=False)
    assert back.columns.keys() == template.columns.keys()
    assert back.columns["rm_scores"].tolist() == [0.0] * 3 + [score]
    assert back.columns["rollout_log_probs"].tolist() == [0.0] * 4
    assert {name: back.tag[name] for name in ("min_global_steps", "max_global_steps")} == {
        "min_global_steps": 4,
        "max_global_steps": 5,
    }, "the lag of this step is not that of another program's model"


# ---- recorded log-probs ----


def test_recorded_log_probs_are_known_where_they_are_numbers() -> None:
    history = AgentTrajectory(old_log_probs=torch.tensor([-1.0, float("nan"), -2.0, float("-inf")]))
    values, known = recorded_log_probs(history, 5)
    assert values.tolist() == [-1.0, 0.0, -2.0, 0.0, 0.0]
    assert known.tolist() == [True, False, True, False, False]
    values, known = recorded_log_probs(history, 1)
    assert (values.tolist(), known.tolist()) == ([-1.0], [True])
    values, known = recorded_log_probs(AgentTrajectory(), 2)
    assert (values.tolist(), known.tolist()) == ([0.0, 0.0], [False, False])


# ---- keys ----


@pytest.mark.parametrize("key", ["a_b_0_0", "a_0", "a", "a_x_0", "a_0_x", "a_-1_0", "a_0_", "a_1.5_0", ""])
def test_other_keys_are_refused(key: str) -> None:
    with pytest.raises(ConfigurationError, match="uid must have no '_'"):
        session_of(key)


def made_in_a_step() -> list[AgentTrajectory]:
    """Two prompts of one task and one of another; session 1 of the first prompt has two outputs."""
    places = [("b", 1, 0, 1), ("a", 10, 0, 1), ("a", 1, 1, 1), ("a", 0, 0, 1), ("a", 1, 0, 1), ("c", 0, 0, 2)]
    return trained_of(
        [rated(fresh_row(uid, session, output=output, index=index)) for uid, session, output, index in places]
    )


def test_a_session_of_two_outputs_is_one_rollout_of_two_rows(tmp_path: Path) -> None:
    """Outputs arrive in any order; ``plane/test_unusual_groups.py`` replays the rows."""
    made = made_in_a_step()
    assert [rollout.rollout_id for rollout in in_order(made)] == ["a_0_0", "b_1_0", "a_1_0", "a_10_0", "c_0_0"]
    outputs = [rated(fresh_row("u", output=output)) for output in (1, 0)]
    scored = [with_scores(row, torch.full((4,), 0.2 - number / 10)) for number, row in enumerate(outputs)]
    (held,) = through_a_store(trained_of(scored), tmp_path)
    assert (held.metadata["outputs"], row_count(held)) == (2, 2)
    assert held.reward.metadata["score"] == pytest.approx(0.8), "that of the last output"
    assert held.entropy == pytest.approx(float(held.entropys[held.response_mask == 1].mean()))


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_reports_of_rollouts_are_those_of_whole_rollouts(data: st.DataObject) -> None:
    rows = []
    for session in range(data.draw(st.integers(1, 4))):
        versions = {
            name: data.draw(st.sampled_from([None, 2, 4, 9])) for name in ("min_global_steps", "max_global_steps")
        }
        for output in range(data.draw(st.integers(1, 2))):
            row = rated(fresh_row(f"u{session % 2}", session, output=output, index=session % 2))
            scores = torch.tensor([0.0, 0.25, data.draw(st.sampled_from([0.0, 0.5, math.nan])), 0.0])
            columns = {**row.columns, "rm_scores": data.draw(st.sampled_from([None, scores]))}
            columns["extra_fields"] = {"reward_extra_info": {"acc": data.draw(st.sampled_from([0.0, 1.0, "no"]))}}
            rows.append(Row(row.key, {**row.tag, **versions}, columns))
    rows = data.draw(st.permutations(rows))
    rule = OutcomeRule(key=data.draw(st.sampled_from([None, "acc"])))
    kept = ("index", "data_source", "rm_scores", "extra_fields")
    few = [Row(row.key, row.tag, {name: row.columns[name] for name in kept}) for row in rows]
    for whole, report in zip(trained_of(rows, rule), finished_of(few, rule, step=5), strict=True):
        for name in ("rollout_id", "task_id", "data_id", "policy_version", "reward"):
            assert repr(getattr(report, name)) == repr(getattr(whole, name)), name
        assert report.metadata == {"task_rollouts": whole.metadata["task_rollouts"]}


def test_what_a_crash_took_of_a_group_was_asked_for_too() -> None:
    sessions = made_in_a_step()
    whole = dict(Counter(session.task_id for session in sessions))
    assert asked_for(sessions) == whole
    assert asked_for([session for session in sessions if session.rollout_id != "a_0_0"]) == whole
    assert asked_for([]) == {}
    assert asked_for([AgentTrajectory(task_id="sums:1")]) == {}, "recorded without the number of rollouts"


# ---- values ----


PLAIN = {
    "1": (np.float32(0.5), 0.5),
    "flag": (np.bool_(True), True),
    "whole": (np.int64(3), 3),
    "list": ((1, [np.array([1, 2]), torch.tensor([[1.5]])]), [1, [[1, 2], [[1.5]]]]),
    "scalar": (torch.tensor(2), 2),
    "zero-dim": (np.array(4.5), 4.5),
    "nan": (float("nan"), "nan"),
    "nan in an array": (np.array([1.0, np.nan]), [1.0, "nan"]),
    "inf in a tensor": (torch.tensor([[float("inf")]]), [["inf"]]),
    "inf": (np.float64("inf"), "inf"),
    "none": (None, None),
    "object": (Path("a"), "a"),
    "long": (2**70, str(2**70)),
    "unsigned": (2**64 - 1, 2**64 - 1),
    "half \\ud800": ("\udc80 é", "\\udc80 é"),
}


def test_plain() -> None:
    keys: dict[str, Any] = {"1": 1, "half \\ud800": "half \ud800"}
    result = plain({keys.get(name, name): value for name, (value, _) in PLAIN.items()})
    assert result == {name: expected for name, (_, expected) in PLAIN.items()}
    assert type(result["flag"]) is bool
    assert type(result["whole"]) is int
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([AgentTrajectory(input_ids=torch.tensor([1]), metadata=result)])


# -- Dtypes --


def test_ids_and_masks_are_small_where_they_can_be() -> None:
    row = rated(fresh_row("u"))
    for largest, mask, dtypes in ((7, 1, (torch.int32, torch.uint8)), (2**40, 2, (torch.int64, torch.int64))):
        columns = {**row.columns, "prompts": torch.tensor([largest]), "response_mask": torch.full((4,), mask)}
        made = recorded(Row(row.key, row.tag, columns))
        assert (made.input_ids.dtype, made.loss_mask.dtype) == dtypes


def test_scores_of_half_precision() -> None:
    row = rated(fresh_row("u"))
    columns = {
        "response_mask": torch.tensor([1, 1, 0, 0]),
        "rm_scores": torch.tensor([0.0, 0.5, 0.0, 0.0], dtype=torch.bfloat16),
        "entropy": torch.tensor([1.0, 2.0, 0.0, 0.0], dtype=torch.bfloat16),
    }
    made = recorded(Row(row.key, row.tag, {**row.columns, **columns}))
    assert (made.reward.metadata["score"], made.metadata["token_scores"], made.entropy) == (0.5, [[1, 0.5]], 1.5)


# -- Mini-batches --


@given(ranks=st.integers(1, 4), mini_batches=st.integers(1, 5), size=st.integers(1, 4), data=st.data())
def test_every_mini_batch_has_its_share(ranks: int, mini_batches: int, size: int, data: st.DataObject) -> None:
    each = mini_batches * size
    count = ranks * each
    kinds = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    order = spread(kinds, ranks, mini_batches)
    for rank in range(ranks):
        mine = range(rank * each, (rank + 1) * each)
        assert sorted(order[place] for place in mine) == list(mine)
    parts = [
        [kinds[order[rank * each + part * size + place]] for rank in range(ranks) for place in range(size)]
        for part in range(mini_batches)
    ]
    for kind, most in ((0, 1), (1, ranks), (2, ranks)):
        counts = [part.count(kind) for part in parts]
        assert max(counts) - min(counts) <= most
