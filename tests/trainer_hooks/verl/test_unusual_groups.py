"""Filtered groups, missing rollouts, sessions of several outputs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transfer_queue as tq

from tests.trainer_hooks.verl import plane
from tests.trainer_hooks.verl.builders import fresh_row
from tests.trainer_hooks.verl.plane import TASKS, MakeSession, N, rollouts
from trainer_hooks.guidance import Guidance
from trainer_hooks.guidance.config import GuidanceConfig
from trainer_hooks.replay.rows import rows_of
from trainer_hooks.transfer_queue import Row
from trainer_hooks.verl.dataplane import weigh_sessions, write_column
from trainer_hooks.verl.histories import TRAINING, ReplaySampler
from trainer_hooks.verl.loss import EXP_MASK
from trainer_hooks.verl.offers import OFFER
from trainer_hooks.verl.trained import WEIGHTS

pytestmark = pytest.mark.usefixtures("data_plane")

# ---- filtered groups ----


def equal_group(uid: str, count: int, score: float, index: int) -> list[Row]:
    return [
        fresh_row(uid, number, response=2 + number, score=score, index=index, seed=50 + index)
        for number in range(count)
    ]


@pytest.mark.parametrize("metric", ["acc", "reward"])
def test_histories_join_before_groups_are_filtered_and_every_rollout_is_recorded(
    metric: str, make_session: MakeSession, tmp_path: Path
) -> None:
    session = make_session(offpolicy_trajectories_per_task=2)
    plane.fill(session)
    held = plane.planned(session)
    session.expect({"failed": held["sums:0"], "solved": held["sums:1"]})
    plane.put([*equal_group("failed", 2, 0.0, 0), *equal_group("solved", 2, 1.0, 1)])
    plane.put_prompts("failed", "solved")

    def refill(count: int) -> None:
        plane.put(rollouts("other", N, index=2))
        plane.put_prompts("other")

    sampler = ReplaySampler(
        plane.sampler_of_verl(
            refill_fn=refill, filter_groups_metric=metric, train_batch_size=2, gen_batch_size=1, poll_interval=0.01
        ),
        session.join,
        session.join_finished,
        lambda batch: session.dropped(batch, 2),
    )
    batch, figures = sampler.sample(2, TRAINING, 2)
    replayed = ["failed_1000_0", "failed_1001_0"]
    assert sorted(batch.keys) == sorted(
        ["failed_0_0", "failed_1_0", *replayed, *(f"other_{number}_0" for number in range(N))]
    ), "two failures beside two successes are a group that says something; four successes are none"
    assert figures["training/filter_groups/evicted_samples"] == 1
    masks = plane.column(batch, EXP_MASK)
    assert [key for key, mask in sorted(masks.items()) if mask.any()] == replayed
    assert not [key for key in (tq.kv_list(TRAINING) or {}).get(TRAINING, {}) if key.startswith("solved")]
    plane.rate(batch)
    metrics = session.scored(batch, 2)
    assert metrics["experience_replay/replayed_rows"] == 2
    assert (metrics["recording/rollouts"], metrics["recording/dropped"]) == (6, 2)
    assert metrics["recording/dropped_successes"] == 2
    assert metrics["experience_replay/fresh_score_mean"] == pytest.approx(2 / 6)
    assert "sums:1" not in {item.task for item in session.plan(TASKS, 0.5, 3) if item.histories}, "it is solved"
    session.close()
    second = [item for item in plane.recorded(tmp_path) if item.metadata["step"] == 2]
    assert Counter((item.metadata["uid"], item.metadata["trained"]) for item in second) == {
        ("failed", True): 2,
        ("solved", False): 2,
        ("other", True): N,
    }


def test_without_filtering_nothing_joins_before_sampling(make_session: MakeSession) -> None:
    session = make_session()
    sampler = plane.sampler_of_verl()
    ReplaySampler(sampler, session.join, session.join_finished)
    assert "_sync_metadata_from_transfer_queue" not in vars(sampler)


# ---- rollouts that are missing or have no outcome ----


def test_an_outcome_that_is_missing_is_told_once_and_counted(
    make_session: MakeSession, caplog: pytest.LogCaptureFixture
) -> None:
    session = make_session()
    for step in (1, 2):
        rows = [fresh_row(f"u{step}", number, score=float("nan")) for number in range(N)]
        assert plane.train(session, rows, step)[1]["recording/without_outcome"] == N
    warnings = [record.getMessage() for record in caplog.records if "rollouts have no outcome" in record.getMessage()]
    assert len(warnings) == 1
    assert "4 of 4 rollouts have no outcome (u1_0_0 is the first): its score is nan" in warnings[0]


# ---- sessions of several outputs ----


def test_a_session_of_several_outputs_is_replayed_whole(make_session: MakeSession) -> None:
    session = make_session()
    session.plan(TASKS, 0.5, 1)
    rows = [
        fresh_row("first", number, output=output, response=2 + number + output, score=float(number < 2), seed=output)
        for number in range(N)
        for output in range(2)
    ]
    _, figures = plane.train(session, rows, 1, value=-2.0)
    assert (figures["recording/rollouts"], figures["experience_replay/rows"]) == (N, 2 * N)
    assert figures["experience_replay/pool_trajectories"] == 2
    (history,) = next(task_plan.histories for task_plan in session.plan(TASKS, 0.5, 2) if task_plan.task == "sums:0")
    session.expect({"u": (history,)})
    joined = session.join(plane.put([fresh_row("u", number, seed=9) for number in range(N - 1)]))
    assert joined.keys[-2:] == ["u_1000_0", "u_1000_1"]
    plane.rate(joined)
    before = plane.column(joined, "old_log_probs")
    figures = session.scored(joined, 2)
    assert figures["experience_replay/replayed_rows"] == 2
    after = plane.column(joined, "old_log_probs")
    masks = plane.column(joined, EXP_MASK)
    for output, part in enumerate(rows_of(history)):
        key = f"u_1000_{output}"
        written = part.response_mask == 1
        assert torch.equal(after[key][written], part.old_log_probs[written])
        assert torch.equal(after[key][~written], before[key][~written])
        assert not torch.equal(after[key], before[key])
        assert torch.equal(masks[key], part.response_mask)


# ---- texts ----


def test_rollouts_are_recorded_once_with_their_text(make_session: MakeSession, tmp_path: Path) -> None:
    session = make_session(decoder=plane.Words())
    plane.fill(session)
    session.save(tmp_path / "global_step_1", 1)
    pooled = [rollout for held in session.hook.manager.task2trajectories.values() for rollout in held]
    recorded = {rollout.rollout_id: rollout for rollout in plane.recorded(tmp_path)}
    assert (len(recorded), len(pooled)) == (4 * N, 8), "the pool has no copies"
    for rollout in pooled:
        other = recorded[rollout.rollout_id]
        assert torch.equal(rollout.input_ids, other.input_ids)
        assert (rollout.messages, rollout.messages[-1]["author"]) == (other.messages, "llm")


# ---- guided rollouts ----


@pytest.mark.parametrize("replay", [False, True])
def test_rows_whose_experience_was_taken_out_are_marked_and_others_are_not(
    make_session: MakeSession, tmp_path: Path, replay: bool
) -> None:
    guidance = GuidanceConfig(enable_context_generator=True, rollout_expratio=0.5, updated_freq=0)
    session = make_session(guidance=guidance, enable=replay)
    if replay:
        plane.fill(session)
        session.expect({"a": plane.planned(session)[TASKS[0]][:1]})
    plain, kept, taken = rollouts("a", 3)
    plane.put_prompts("a")
    joined = session.join(plane.put([plain, plane.shown(kept, "keep"), plane.shown(taken, "discard")]))
    masks = {key: mask.tolist() for key, mask in plane.column(joined, EXP_MASK).items()}
    assert masks["a_0_0"] == [0, 0]
    assert masks["a_1_0"] == [0, 0, 0]
    assert masks["a_2_0"] == [1, 1, 1, 1], "the whole response, with the environment tokens"
    assert len(masks) == 3 + replay
    plane.rate(joined)
    assert session.scored(joined, 2)["guidance/guided_rollouts"] == 2.0
    engine = plane.column(joined, "rollout_log_probs")
    assert torch.equal(engine["a_1_0"], kept.columns["rollout_log_probs"])
    assert torch.equal(engine["a_2_0"], plane.column(joined, "old_log_probs")["a_2_0"]), (
        "the engine's are of another prompt"
    )
    session.close()
    by_id = {rollout.rollout_id: rollout for rollout in plane.recorded(tmp_path)}
    assert Guidance.of(by_id["a_0_0"]) is None
    assert by_id["a_1_0"].messages[0]["content"] == "tip: task 0"
    assert by_id["a_2_0"].messages[0]["content"] == "task 0"
    assert by_id["a_1_0"].rollout_log_probs is not None
    assert by_id["a_2_0"].rollout_log_probs is None
    assert "extra_fields" not in by_id["a_2_0"].metadata
    if replay:
        history = joined.keys[-1]
        assert masks[history] == plane.column(joined, "response_mask")[history].tolist()
        assert plane.column(joined, "extra_fields")[history].get(OFFER) is None, (
            "the group has another prompt than the history"
        )


# ---- weights of sessions of several outputs ----


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(
    ("mode", "estimator"), [("seq-mean-token-mean", "grpo"), ("seq-mean-token-mean", "rloo"), ("token-mean", "grpo")]
)
def test_a_session_of_several_outputs_is_one_sequence_of_the_loss(
    override_verl: Any, caplog: pytest.LogCaptureFixture, mode: str, estimator: str, given: bool
) -> None:
    config = override_verl([f"actor_rollout_ref.actor.loss_agg_mode={mode}", f"algorithm.adv_estimator={estimator}"])
    outputs = [fresh_row("u", 1, response=3 + output, output=output, seed=output) for output in range(3)]
    batch = plane.put([fresh_row("u", 0, response=5), *outputs])
    batch.fields = ["response_mask"]
    masks, before = plane.column(batch, "response_mask"), dict.fromkeys(batch.keys, 1.0)
    if given:  # by verl's rollout correction
        before = {key: 0.5 + place for place, key in enumerate(batch.keys)}
        columns = [torch.full((len(masks[key]),), before[key]) for key in batch.keys]
        write_column(batch.keys, TRAINING, WEIGHTS, columns)
    warned: set[str] = set()
    for _ in range(2):
        weigh_sessions(alone := plane.batch_of([fresh_row("u", 0, response=5)]), config, warned)
        assert alone.fields is None
    weigh_sessions(batch, config, warned)
    assert len([message for message in caplog.messages if "adv_estimator=rloo counts" in message]) == (
        estimator == "rloo"
    )
    if mode == "token-mean":
        assert batch.fields == ["response_mask"]
        return
    weights, tokens = plane.column(batch, WEIGHTS), {key: int(mask.sum()) for key, mask in masks.items()}
    session = sum(count for key, count in tokens.items() if key.startswith("u_1"))
    for key, weight in weights.items():
        share = tokens[key] / session if key.startswith("u_1") else 1.0
        assert weight.tolist() == pytest.approx([share * before[key]] * len(masks[key]))
    assert batch.fields == ["response_mask", WEIGHTS]
