"""Groups that are filtered, rollouts that did not come back, sessions of several outputs."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
import transfer_queue as tq

from tests.trainer_hooks.verl.builders import fresh_row
from tests.trainer_hooks.verl.plane import sessions as plane
from tests.trainer_hooks.verl.plane.sessions import TASKS, MakeSession, N, rollouts
from trainer_hooks.verl.dataplane import write_column
from trainer_hooks.verl.histories import TRAINING
from trainer_hooks.verl.loss import EXP_MASK
from trainer_hooks.verl.rows import Row
from trainer_hooks.verl.sampler import ReplaySampler
from trajstore.experience.rows import rows_of

# ---- groups that are filtered ----


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
    assert metrics["experience_replay/replayed_score_mean"] == 1.0
    assert metrics["experience_replay/mixed_score_mean"] == pytest.approx(4 / 8)
    assert "sums:1" not in {one.task for one in session.plan(TASKS, 0.5, 3) if one.histories}, "it is solved"
    session.close()
    second = [one for one in plane.recorded(tmp_path) if one.metadata["step"] == 2]
    assert Counter((one.metadata["uid"], one.metadata["trained"]) for one in second) == {
        ("failed", True): 2,
        ("solved", False): 2,
        ("other", True): N,
    }


def test_successes_that_were_dropped_say_what_they_say_and_are_not_refused(make_session: MakeSession) -> None:
    """Two of four rollouts of a dropped group succeeded: the task has its difficulty, the pool nothing of them."""
    session = make_session()
    session.dropped(plane.put(rollouts("gone", N)), 1)
    _, figures = plane.train(session, rollouts("other", N, index=1), 1)
    assert (figures["recording/dropped"], figures["recording/dropped_successes"]) == (N, 2)
    assert figures["experience_replay/tasks_at_difficulty/2"] == 2
    assert figures["experience_replay/pool_tasks"] == 1
    assert figures["experience_replay/refused"] == 0
    assert figures["recording/rollouts"] == N


def test_without_filtering_nothing_joins_before_sampling(make_session: MakeSession) -> None:
    session = make_session()
    sampler = plane.sampler_of_verl()
    ReplaySampler(sampler, session.join, session.join_finished)
    assert "_sync_metadata_from_transfer_queue" not in vars(sampler)


# ---- rollouts that did not come back, or tell nothing ----


def test_what_did_not_come_back_is_unknown(make_session: MakeSession) -> None:
    session = make_session()
    plane.fill(session)
    joined = session.join(plane.put(equal_group("u", 1, 1.0, 0)))  # three of four raised
    plane.rate(joined)
    session.scored(joined, 2)
    assert "sums:0" in {one.task for one in session.plan(TASKS, 0.5, 3) if one.histories}, "one success solves nothing"


def test_an_outcome_that_is_missing_is_told_once_and_counted(
    make_session: MakeSession, caplog: pytest.LogCaptureFixture
) -> None:
    session = make_session()
    for step in (1, 2):
        rows = [fresh_row(f"u{step}", number, score=float("nan")) for number in range(N)]
        assert plane.train(session, rows, step)[1]["recording/without_outcome"] == N
    told = [one.getMessage() for one in caplog.records if "no outcome" in one.getMessage()]
    assert len(told) == 1
    assert "4 of 4 rollouts have no outcome (u1_0_0 is the first): its score is nan" in told[0]


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
    (history,) = next(one.histories for one in session.plan(TASKS, 0.5, 2) if one.task == "sums:0")
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


# ---- rollouts that the pool refuses ----


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, ""),
        ({"response_mask": 0.0}, "no_llm_token"),
        ({"old_log_probs": math.nan}, "log_probs_mismatch"),
        ({"old_log_probs": 1.0}, "log_probs_above_zero"),
        ({"rm_scores": math.nan}, "no_outcome"),
    ],
)
def test_what_a_success_lacks_is_named(changed: dict[str, float], reason: str, make_session: MakeSession) -> None:
    session = make_session()
    batch = session.join(plane.put(rollouts("first", N)))
    plane.rate(batch)
    [key] = [key for key in batch.keys if key.startswith("first_0_")]
    for name, value in changed.items():
        old = plane.column(batch, name)[key]
        write_column([key], TRAINING, name, [torch.full_like(old, value)])
    figures = session.scored(batch, 1)
    begin = "experience_replay/refused/"
    told = {name.removeprefix(begin): value for name, value in figures.items() if name.startswith(begin)}
    assert told == ({reason: 1.0} if reason else {})
