"""Silent changes of rows by verl's data plane, and their handling by a replay session."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size

from tests.support.waiting import wait_until
from tests.trainer_hooks.verl import plane
from tests.trainer_hooks.verl.builders import fresh_row
from tests.trainer_hooks.verl.plane import TASKS, MakeSession, N, rollouts
from trainer_hooks.metrics import PREFIX
from trainer_hooks.replay.entry import DEMONSTRATION
from trainer_hooks.transfer_queue import Row
from trainer_hooks.verl.dataplane import read_rows, write_column
from trainer_hooks.verl.histories import TRAINING, ReplaySampler
from trainer_hooks.verl.loss import EXP_MASK
from trainer_hooks.verl.rows import FIRST_REPLAYED_SESSION
from trajstore import TrajectoryReplayBuffer, annotate
from trajstore.errors import ConfigurationError

pytestmark = pytest.mark.usefixtures("data_plane")

# ---- a column that one row lacks ----


def test_reading_rows_names_the_column_that_one_lacks() -> None:
    first, second = (fresh_row("a", session, response=2 + session) for session in (0, 1))
    more = Row(first.key, first.tag, {**first.columns, "bonus": torch.ones(2), "malus": torch.ones(2)})
    batch = plane.put([more, second])
    with pytest.raises(ConfigurationError, match=r"no column bonus, malus for these 2 rows.*drops it for all"):
        read_rows(batch, ["responses", "bonus", "malus"])
    rows = read_rows(batch, ["responses"], welcome=["bonus"])
    assert [row.columns.keys() for row in rows] == [{"responses"}] * 2
    write_column([second.key], TRAINING, "bonus", [torch.zeros(3)])
    assert {key: value.tolist() for key, value in plane.column(batch, "bonus").items()} == {
        "a_0_0": [1, 1],
        "a_1_0": [0] * 3,
    }


# ---- a uid with an underscore ----


def test_verl_loses_the_group_of_a_uid_with_an_underscore_and_we_refuse_it(make_session: MakeSession) -> None:
    plane.put(rollouts("good", 2) + rollouts("b_d", 2))
    plane.put_prompts("good", "b_d")
    batch, _ = plane.sampler_of_verl().sample(global_steps=1, partition_id=TRAINING, batch_size=2)
    assert sorted(batch.keys) == ["good_0_0", "good_1_0"]
    with pytest.raises(ConfigurationError, match=r"'b_d_0_0'.*uid must have no '_'"):
        make_session().join(plane.batch_of(rollouts("good", 2) + rollouts("b_d", 2)))


# ---- more rows than n ----


def test_no_prompt_gets_more_than_n_sessions(make_session: MakeSession) -> None:
    session = make_session(offpolicy_trajectories_per_task=2)
    plane.fill(session)
    held = plane.planned(session)["sums:0"]
    assert len(held) == 2
    many = [*rollouts("many", 3)[:2], fresh_row("many", 2), fresh_row("many", 2, output=1, seed=5)]
    rows = {
        "full": rollouts("full", N),
        "roomy": rollouts("roomy", 2),
        "tight": rollouts("tight", 3),
        "many": many,  # four rows, but three sessions
        "alone": rollouts("alone", 3),
    }
    session.expect(dict.fromkeys(("full", "roomy", "tight", "many", "absent"), held))
    joined = session.join(plane.put([row for group in rows.values() for row in group]))
    assert plane.sessions(joined) == {"full": N, "roomy": N, "tight": N, "many": N, "alone": 3}
    replayed = [key for key in joined.keys if int(key.split("_")[1]) >= FIRST_REPLAYED_SESSION]
    assert sorted(replayed) == ["many_1000_0", "roomy_1000_0", "roomy_1001_0", "tight_1000_0"]


@pytest.mark.parametrize("filtered", [False, True], ids=["sampled", "joined before"])
def test_groups_keep_their_size_beside_sessions_of_several_outputs(filtered: bool, make_session: MakeSession) -> None:
    """A session of two outputs adds a row beyond the plan: verl pads 17 rows to 32."""
    session = make_session()
    plane.fill(session)
    uids = plane.expecting(session)
    fresh = [row for index, uid in enumerate(uids) for row in rollouts(uid, N - 1, index)]
    fresh.append(fresh_row("u2", 0, output=1, seed=7))
    batch = plane.put(fresh)
    if filtered:
        tags = dict(zip(batch.keys, batch.tags, strict=True))
        session.join_finished(set(uids), tags, "acc")
        batch = KVBatchMeta(partition_id=TRAINING, keys=list(tags), tags=list(tags.values()))
        assert len(batch) == 4 * N + 1
    joined = session.join(batch)
    assert plane.sessions(joined) == dict.fromkeys(uids, N)
    there = [key for key in (tq.kv_list(TRAINING) or {}).get(TRAINING, {}) if "_" in key]
    assert sorted(there) == sorted(joined.keys)
    plane.rate(joined)
    figures = session.scored(joined, 2)
    assert figures["experience_replay/histories_refused/without_room"] == 0
    assert figures["experience_replay/replayed_rows"] == 4
    padded = session.balanced(upsample_batch_to_divisible_size(joined, 4 * N, plane.EOS), ranks=1, multiple=4 * N)
    for part in (padded.keys[: 4 * N], padded.keys[4 * N :]):
        replayed = [key for key in part if key in joined.keys and int(key.split("_")[1]) >= FIRST_REPLAYED_SESSION]
        assert len(replayed) == 2
        assert len([key for key in part if key in joined.keys]) in (8, 9), "neither mini-batch is mostly padding"


def test_the_age_counts_in_the_step_that_trains(make_session: MakeSession, caplog: pytest.LogCaptureFixture) -> None:
    """Rollouts of step 1 are 4 steps old in step 5."""
    session = make_session(max_policy_age=3, draws_ahead=1)
    plane.fill(session)
    assert [len(item.histories) for item in session.plan(TASKS, 0.5, 4)] == [0] * 4, "trained in step 5"
    session.expect({f"u{number}": item.histories for number, item in enumerate(session.plan(TASKS, 0.5, 3))})
    fresh = [row for number in range(4) for row in rollouts(f"u{number}", N - 1, number)]
    session.plan(TASKS, 0.5, 5)
    joined = session.join(plane.put(fresh))
    assert len(joined) == len(fresh), "the prompts waited for another step"
    plane.rate(joined)
    assert session.scored(joined, 5)["experience_replay/histories_refused/too_old"] == 4
    assert "its age in step 5 is 4, above max_policy_age" in caplog.text


def test_prompts_may_say_how_many_sessions_they_have(make_session: MakeSession) -> None:
    session = make_session(offpolicy_trajectories_per_task=2)
    plane.fill(session)
    held = plane.planned(session)["sums:0"]
    assert len(held) == 2
    wanted = {"one": 1, "two": 2, "usual": N, "many": 7}
    joining = session.expect(dict.fromkeys(wanted, held), wanted)
    assert joining == {"two": 1, "usual": 2, "many": 2}, "each makes a fresh rollout"
    rows = [row for uid, count in wanted.items() for row in rollouts(uid, count - joining.get(uid, 0))]
    joined = session.join(plane.put(rows))
    assert plane.sessions(joined) == wanted
    plane.rate(joined)
    session.scored(joined, 2)
    assert session._histories.asked == {"one": 1, "two": 1, "usual": 2, "many": 5}


@pytest.mark.parametrize(
    ("changed", "left_out", "joining"),
    [
        ({"asks": [3, 2, 1, 0]}, {"other_prompts": 8.0}, 0),
        ({"longest": (2, None)}, {"too_long": 8.0}, 0),
        ({"longest": (3, 2)}, {"too_long": 4.0}, 1),
        ({"longest": (3, 5)}, {}, 1),
    ],
    ids=["reversed data", "prompts", "responses of half", "within"],
)
def test_histories_that_do_not_fit_are_refused_and_told(
    changed: dict[str, Any],
    left_out: dict[str, float],
    joining: int,
    make_session: MakeSession,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The pool comes from an earlier run with other prompts for the same tasks, or other length limits."""
    first = make_session()
    plane.fill(first)
    first.close()
    session = make_session(**changed)
    asks = changed.get("asks", range(4))
    plan = session.plan(TASKS, 0.5, 2)
    assert [item.fresh_rollouts for item in plan] == [N - joining] * 4
    session.expect({f"u{number}": item.histories for number, item in enumerate(plan)})
    fresh = []
    for number, item in enumerate(plan):
        index = int(item.task.split(":")[1])
        rows = rollouts(f"u{number}", item.fresh_rollouts, index)
        prompt = [{"role": "user", "content": f"task {asks[index]}"}]
        fresh += [Row(row.key, row.tag, {**row.columns, "raw_prompt": prompt}) for row in rows]
    joined = session.join(plane.put(fresh))
    assert plane.sessions(joined) == {f"u{number}": N for number in range(4)}, "groups are complete"
    plane.rate(joined)
    figures = session.scored(joined, 2)
    counted = {name.removeprefix(PREFIX): value for name, value in figures.items() if value}
    reasons = ("histories_refused/", "other_prompts", "too_long")
    assert {name: value for name, value in counted.items() if name.startswith(reasons)} == left_out
    warned = [item.getMessage() for item in caplog.records if "not replayed" in item.getMessage()]
    assert len(warned) == len(left_out), warned


def test_mini_batches_have_their_share_of_replayed_rows(make_session: MakeSession) -> None:
    session = make_session(offpolicy_trajectories_per_task=N - 1)
    plane.fill(session)
    uids = {f"u{index}": plane.planned(session)[task] for index, task in enumerate(TASKS)}
    assert set(session.expect(uids).values()) == {2}
    joined = session.join(plane.put([row for index, uid in enumerate(uids) for row in rollouts(uid, N - 2, index)]))
    before = list(joined.keys)
    assert all(int(key.split("_")[1]) >= FIRST_REPLAYED_SESSION for key in before[2 * N :])
    batch = session.balanced(joined, ranks=2, multiple=N)
    assert sorted(batch.keys[: 2 * N]) == sorted(before[: 2 * N]), "each rank keeps its rows"
    for number in range(4):  # of four rows each, two on each rank
        places = [rank * 2 * N + number * 2 + place for rank in range(2) for place in range(2)]
        sides = Counter(int(batch.keys[place].split("_")[1]) >= FIRST_REPLAYED_SESSION for place in places)
        assert sides == {False: 2, True: 2}


# ---- the rows that were joined ----


@pytest.mark.parametrize("correct", [True, False])
def test_scoring_gives_replayed_rows_their_recorded_log_probs(correct: bool, make_session: MakeSession) -> None:
    session = make_session(exp_is_correct=correct)
    plane.fill(session)
    histories = plane.expecting(session)
    joined = session.join(plane.put([row for index in range(4) for row in rollouts(f"u{index}", N - 1, index)]))
    plane.rate(joined)
    before = plane.column(joined, "old_log_probs")
    figures = session.scored(joined, 2)
    after = plane.column(joined, "old_log_probs")
    assert after.keys() == before.keys()
    for key, current in before.items():
        uid, number, _ = key.split("_")
        expected = current
        if int(number) >= FIRST_REPLAYED_SESSION and correct:
            (history,) = histories[uid]
            expected = torch.where(history.response_mask.bool(), history.old_log_probs, current)
            assert not torch.equal(expected, current)
        assert torch.equal(after[key], expected), key
    assert figures["recording/rollouts"] == 12
    assert figures["experience_replay/replayed_rows"] == 4
    assert figures["experience_replay/rows"] == 16


def test_histories_of_tasks_like_the_batchs_own(make_session: MakeSession) -> None:
    session = make_session(task_sampling="similar", exp_ratio=0.5)
    plane.fill(session)
    plan = session.plan(["sums:1", "sums:3", "sums:0", "sums:2"], 0.5, 2)
    assert [item.task for item in plan if item.histories] == ["sums:1", "sums:3"]
    session.expect({item.task: item.histories for item in plan})
    assert [item.task_id for held in session._histories.expected.values() for item in held] == ["sums:1", "sums:3"]


def test_demonstrations_keep_the_log_probs_of_the_actor(make_session: MakeSession) -> None:
    session = make_session(offpolicy_trajectories_per_task=2, in_turns=True)
    plane.fill(session)
    manager = session.hook.manager
    demos = []
    for held in manager.task2trajectories.values():
        ids = held[0].input_ids
        mark = {"old_log_probs": None, "rollout_log_probs": None, "metadata": {DEMONSTRATION: True}}
        demos.append(dataclasses.replace(held[0], input_ids=ids + 1, policy_version=None, **mark))
    assert not manager.seed(demos)
    histories = {task_plan.task: task_plan.histories for task_plan in session.plan(TASKS, 0.5, 2)}
    histories = {
        task_plan.task: task_plan.histories for task_plan in session.plan(TASKS, 0.5, 3)
    }  # the demonstrations' turn
    session.expect({f"u{index}": histories[task] for index, task in enumerate(TASKS)})
    joined = session.join(plane.put([row for index in range(4) for row in rollouts(f"u{index}", N - 2, index)]))
    plane.rate(joined)
    before = plane.column(joined, "old_log_probs")
    figures = session.scored(joined, 3)
    after, engine = plane.column(joined, "old_log_probs"), plane.column(joined, "rollout_log_probs")
    scores = plane.column(joined, "rm_scores")
    kept = 0
    for key, current in before.items():
        uid, number, _ = key.split("_")
        if int(number) < FIRST_REPLAYED_SESSION:
            continue
        history = histories[TASKS[int(uid[1:])]][int(number) - FIRST_REPLAYED_SESSION]
        if history.old_log_probs is None:
            kept += 1
            assert torch.equal(after[key], current)
            assert torch.equal(engine[key], current), "rollout correction weighs it 1"
            assert scores[key][-1] == 1.0
        else:
            assert not torch.equal(after[key], current)
    assert kept == 4
    assert figures["experience_replay/demonstration_rows"] == 4


def test_without_replay_rows_are_recorded_and_left_as_they_are(make_session: MakeSession, tmp_path: Path) -> None:
    session = make_session(enable=False)
    assert not session._block.masks_rows, "the loss is verl's own"
    batch = plane.put(rollouts("a", N))
    joined = session.join(batch)
    assert joined.keys == batch.keys
    plane.rate(joined)
    before = plane.column(joined, "old_log_probs")
    assert session.scored(joined, 1)["recording/rollouts"] == N
    assert all(torch.equal(value, before[key]) for key, value in plane.column(joined, "old_log_probs").items())
    assert EXP_MASK not in set(tq.kv_batch_get(keys=joined.keys, partition_id=TRAINING).keys())
    session.close()
    assert len(plane.recorded(tmp_path)) == N


# ---- one session key for two rows ----


def test_a_replayed_row_never_takes_the_session_of_a_rollout(make_session: MakeSession) -> None:
    session = make_session()
    plane.fill(session)
    held = plane.planned(session)["sums:0"]
    session.expect({"u": held})
    joined = session.join(plane.put(rollouts("u", 2)))
    assert len(joined.keys) == len({key.rpartition("_")[0] for key in joined.keys}) == 3
    with pytest.raises(ConfigurationError, match=r"row 'u_1000_0': .*1000"):
        session.join(joined)


# ---- padding ----


@pytest.mark.parametrize("first", ["fresh", "replayed"])
def test_padding_is_neither_recorded_nor_replaced(first: str, make_session: MakeSession) -> None:
    session = make_session()
    plane.fill(session)
    session.expect({"u": plane.planned(session)["sums:0"]})
    joined = session.join(plane.put(rollouts("u", 2)))  # one rollout failed
    if first == "replayed":  # verl balances rows over ranks, and padding copies the first
        joined = KVBatchMeta(partition_id=TRAINING, keys=joined.keys[::-1], tags=joined.tags[::-1])
    filled = upsample_batch_to_divisible_size(joined, N, plane.EOS)
    padding = filled.keys[len(joined) :]
    assert (len(joined), len(padding)) == (3, 1)
    copied = plane.column(filled, EXP_MASK)[padding[0]]
    assert torch.equal(copied, plane.column(joined, EXP_MASK)[joined.keys[0]])
    assert bool(copied.any()) == (first == "replayed")
    plane.rate(filled)
    before = plane.column(filled, "old_log_probs")[padding[0]]
    figures = session.scored(filled, 2)
    assert figures["recording/rollouts"] == 2
    assert figures["experience_replay/rows"] == 3
    assert torch.equal(plane.column(filled, "old_log_probs")[padding[0]], before)


# ---- validation ----


def test_validation_goes_through_untouched(make_session: MakeSession) -> None:
    session = make_session()
    plane.fill(session)
    session.expect({"v": plane.planned(session)["sums:0"]})
    sampler = ReplaySampler(plane.sampler_of_verl(), session.join)
    for partition in ("val", TRAINING):
        plane.put(rollouts("v", 3), partition)
        plane.put_prompts("v", partition=partition)
    validated, _ = sampler.sample(1, "val", 1)
    assert sorted(validated.keys) == ["v_0_0", "v_1_0", "v_2_0"]
    assert EXP_MASK not in set(tq.kv_batch_get(keys=validated.keys, partition_id="val").keys())
    trained, _ = sampler.sample(1, TRAINING, 1)
    assert sorted(trained.keys) == ["v_0_0", "v_1000_0", "v_1_0", "v_2_0"]


def test_a_sampler_is_otherwise_what_it_was() -> None:
    sampler = ReplaySampler(plane.sampler_of_verl(), lambda batch: batch)
    assert sampler.poll_interval == 0.05
    assert copy.copy(sampler).trainer_mode == "sync"
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = sampler.no_such_thing


def test_rewards_that_come_after_the_rollouts_are_replayed(make_session: MakeSession) -> None:
    """As of a reward model on the actor's devices, which verl runs when a batch was sampled."""
    session = make_session()
    rows = [row for index in range(len(TASKS)) for row in rollouts(f"first{index}", N, index)]
    bare = [Row(row.key, row.tag, {n: v for n, v in row.columns.items() if n != "rm_scores"}) for row in rows]
    joined = session.join(plane.put(bare))
    write_column(joined.keys, TRAINING, "rm_scores", [row.columns["rm_scores"] for row in rows])
    plane.rate(joined, -2.0)
    assert session.scored(joined, 1)["experience_replay/pool_trajectories"] == 8
    tq.kv_clear(keys=joined.keys, partition_id=TRAINING)
    histories = plane.expecting(session)
    again = session.join(plane.put([row for i in range(4) for row in rollouts(f"u{i}", N - 1, i)]))
    scores = {key: column.tolist() for key, column in plane.column(again, "rm_scores").items() if "_1000_" in key}
    assert sorted(scores) == [f"u{i}_1000_0" for i in range(4)]
    assert all(values == [0.0] * (len(values) - 1) + [1.0] for values in scores.values())
    assert {history.reward.outcome for (history,) in histories.values()} == {1.0}


def test_an_outcome_that_is_corrected_in_the_record_reaches_the_pool(make_session: MakeSession, tmp_path: Path) -> None:
    session = make_session()
    plane.fill(session)
    chosen = {history.rollout_id for (history,) in plane.planned(session).values()}
    with TrajectoryReplayBuffer.open(tmp_path / "run-a" / "rollouts") as reader:
        numbers = [number for number in reader.trajectory_ids.tolist() if reader.get(number).rollout_id in chosen]
    annotate(tmp_path / "run-a" / "rollouts", numbers, {"outcome": [0.0] * 4})
    wait_until(lambda: len(session.hook.manager._ledger.store.outcomes_given(numbers)) == 4)
    assert chosen.isdisjoint(history.rollout_id for (history,) in plane.planned(session).values())
