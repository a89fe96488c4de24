"""What verl's data plane does to rows without a word, on a real one, and what a replay session makes of it."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("verl", exc_type=ImportError)
pytest.importorskip("transfer_queue", exc_type=ImportError)

import ray
import transfer_queue as tq
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from tests.trainer_hooks.verl.builders import VOCABULARY, fresh_row
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.guidance_config import GuidanceConfig
from trainer_hooks.verl.config import OnError, OnResume, OutcomeRule, RecordingConfig, ReplayBlock
from trainer_hooks.verl.cuts import read_cut
from trainer_hooks.verl.dataplane import add_rows, prompts_under_way, read_rows, read_whole_row, write_column
from trainer_hooks.verl.histories import TRAINING
from trainer_hooks.verl.loss import EXP_MASK
from trainer_hooks.verl.offers import OFFER, Report
from trainer_hooks.verl.reading import RunTokenizer
from trainer_hooks.verl.rows import FIRST_REPLAYED_SESSION, Row
from trainer_hooks.verl.sampler import ReplaySampler
from trainer_hooks.verl.session import ReplaySession
from trainer_hooks.verl.tasks import TaskTable
from trajstore import TrajectoryReplayBuffer
from trajstore.errors import ConfigurationError, StoreWriteError
from trajstore.experience.entry import DEMONSTRATION
from trajstore.experience.rows import rows_of
from trajstore.guidance import Guidance, Insertion, TrainMode
from trajstore.testing.faults import FaultPlan, failing_disk
from trajstore.trajectory import AgentTrajectory

N = 4
"""Rollouts of each prompt."""
TASKS = [f"sums:{index}" for index in range(4)]
EOS = 1


@pytest.fixture(scope="module")
def _plane() -> Iterator[None]:
    if ray.is_initialized():
        pytest.skip("needs a Ray of its own, and one runs in this process already")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # a worker for every CPU would take long to start
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=150_000_000)
        try:
            storage = {"num_data_storage_units": 1, "total_storage_size": 2000}
            tq.init(OmegaConf.create({"backend": {"SimpleStorage": storage}}))
            yield
        finally:
            tq.close()
            ray.shutdown()


@pytest.fixture(autouse=True)
def _empty_plane(_plane: None) -> Iterator[None]:
    yield
    for partition, rows in (tq.kv_list() or {}).items():
        if rows:
            tq.kv_clear(keys=list(rows), partition_id=partition)


def batch_of(rows: Sequence[Row], partition: str = TRAINING) -> KVBatchMeta:
    return KVBatchMeta(partition_id=partition, keys=[row.key for row in rows], tags=[dict(row.tag) for row in rows])


def put(rows: Sequence[Row], partition: str = TRAINING) -> KVBatchMeta:
    """Write rows as the agent loop does, one session at a time; return them as a sampler does."""
    for row in rows:
        add_rows([row], partition)
    return batch_of(rows, partition)


def put_prompts(*uids: str, partition: str = TRAINING, status: str = "finished") -> None:
    tags = [{"is_prompt": True, "status": status, "global_steps": 1} for _ in uids]
    tq.kv_batch_put(keys=list(uids), partition_id=partition, tags=tags)


def rollouts(uid: str, count: int, index: int = 0, **more: Any) -> list[Row]:
    """Return rollouts of one prompt, no two of the same length; the first two succeeded."""
    return [
        fresh_row(uid, session, response=2 + session, score=float(session < 2), index=index, seed=index, **more)
        for session in range(count)
    ]


def rate(batch: KVBatchMeta, value: float = -0.5) -> None:
    """Write what a pass of the policy gives, for padding rows too."""
    for name, start in (("old_log_probs", value), ("entropy", 1.0)):
        columns = [start - torch.arange(tag["response_len"]) / 100 for tag in batch.tags]
        write_column(batch.keys, TRAINING, name, columns)


def column(batch: KVBatchMeta, name: str) -> dict[str, Tensor]:
    return {row.key: row.columns[name] for row in read_rows(batch, [name])}


class Dataset:
    """Four tasks."""

    def __len__(self) -> int:
        return len(TASKS)

    def __getitem__(self, position: int) -> dict[str, Any]:
        return {"data_source": "sums", "index": position, "raw_prompt": [{"content": f"task {position}"}]}


MakeSession = Callable[..., ReplaySession]


@pytest.fixture
def make_session(tmp_path: Path) -> Iterator[MakeSession]:
    made = []

    def make(
        run: str = "run-a",
        on_resume: OnResume = "exact",
        on_error: OnError = "raise",
        decoder: Any = None,
        guidance: GuidanceConfig | None = None,
        **options: Any,
    ) -> ReplaySession:
        values: dict[str, Any] = {"enable": True, "replay_start_ratio": 0.0, "exp_ratio": 1.0} | options
        block = ReplayBlock(
            experience_replay=ExperienceReplayConfig(**values),
            recording=RecordingConfig(path=str(tmp_path / run / "rollouts"), on_error=on_error),
            outcome=OutcomeRule(),
            on_resume=on_resume,
            folder=tmp_path,
            n_rollout=N,
            guidance=guidance or GuidanceConfig(),
        )
        tokenizer = RunTokenizer("tokens", decoder=decoder)
        made.append(ReplaySession(block, TaskTable(Dataset()), tokenizer=tokenizer, run=run, checkpoints=tmp_path))
        return made[-1]

    yield make
    for session in made:
        session.close()


def fill(session: ReplaySession) -> None:
    """Do the first step of a training: every task has n rollouts, two of which succeed and enter the pool."""
    rows = [row for index in range(len(TASKS)) for row in rollouts(f"first{index}", N, index)]
    joined = session.join(put(rows))
    rate(joined, value=-2.0)
    session.scored(joined, 1)
    tq.kv_clear(keys=joined.keys, partition_id=TRAINING)


def planned(session: ReplaySession) -> dict[str, tuple[AgentTrajectory, ...]]:
    """Return the histories of the next step by task."""
    found = {one.task: one.histories for one in session.plan(TASKS, 0.5, 2)}
    assert sorted(found) == TASKS
    assert all(found.values()), "the pool has histories of every task"
    return found


def sessions(batch: KVBatchMeta) -> Counter[str]:
    """Return the number of sessions of each uid."""
    return Counter(session.split("_")[0] for session in {key.rpartition("_")[0] for key in batch.keys})


def shown(row: Row, mode: TrainMode) -> Row:
    """Return a row as the agent loop of guided rollouts writes it."""
    exchanged = mode == "discard"
    report = Report(Guidance(mode, ("7",), (Insertion(0, "tip: "),), exchanged), exchanged)
    extra = {**row.columns["extra_fields"], OFFER: report.to_json()}
    return Row(row.key, row.tag, {**row.columns, "extra_fields": extra})


# ---- a column that one row lacks ----


def test_the_plane_drops_a_column_that_one_row_lacks() -> None:
    """If this fails, verl's data plane has learned to say so, and read_rows may become simpler."""
    with_bonus = fresh_row("a", 0)
    with_bonus = Row(with_bonus.key, with_bonus.tag, {**with_bonus.columns, "bonus": torch.ones(4)})
    batch = put([with_bonus, fresh_row("a", 1)])
    data = tq.kv_batch_get(keys=batch.keys, partition_id=TRAINING, select_fields=["responses", "bonus"])
    assert set(data.keys()) == {"responses"}


def test_reading_rows_names_the_column_that_one_lacks() -> None:
    first, second = (fresh_row("a", session, response=2 + session) for session in (0, 1))
    more = Row(first.key, first.tag, {**first.columns, "bonus": torch.ones(2), "malus": torch.ones(2)})
    batch = put([more, second])
    with pytest.raises(ConfigurationError, match=r"no column bonus, malus for these 2 rows.*drops it for all"):
        read_rows(batch, ["responses", "bonus", "malus"])
    rows = read_rows(batch, ["responses"], welcome=["bonus"])
    assert [row.columns.keys() for row in rows] == [{"responses"}] * 2
    write_column([second.key], TRAINING, "bonus", [torch.zeros(3)])
    assert {key: value.tolist() for key, value in column(batch, "bonus").items()} == {"a_0_0": [1, 1], "a_1_0": [0] * 3}


def test_rows_come_in_the_order_of_the_batch() -> None:
    rows = rollouts("a", N) + rollouts("b", N)
    put(rows)
    batch = batch_of(rows[::-1])
    found = read_rows(batch, ["uid", "index", "responses", "raw_prompt", "extra_fields"])
    for row, wanted in zip(found, rows[::-1], strict=True):
        assert (row.key, row.tag) == (wanted.key, wanted.tag)
        assert torch.equal(row.columns["responses"], wanted.columns["responses"])
        for name in ("uid", "index", "raw_prompt"):
            assert row.columns[name] == wanted.columns[name]
        assert row.columns["extra_fields"]["min_global_steps"] == 4
    assert read_rows(batch_of([]), ["uid"]) == []


def test_a_row_that_nobody_marked_stops_the_step(make_session: MakeSession) -> None:
    session = make_session()
    joined = session.join(put(rollouts("a", 3)))
    late = fresh_row("a", 3)
    put([late])
    batch = KVBatchMeta(partition_id=TRAINING, keys=[*joined.keys, late.key], tags=[*joined.tags, dict(late.tag)])
    rate(batch)
    with pytest.raises(ConfigurationError, match=rf"no column {EXP_MASK} for these 4 rows"):
        session.scored(batch, 1)


# ---- a uid with an underscore ----


def sampler_of_verl() -> ReplayBuffer:
    return ReplayBuffer(
        trainer_mode="sync",
        trainer_config=OmegaConf.create({}),
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs=OmegaConf.create({}),
        poll_interval=0.05,
    )


def test_verl_loses_the_group_of_a_uid_with_an_underscore_and_we_refuse_it(make_session: MakeSession) -> None:
    put(rollouts("good", 2) + rollouts("b_d", 2))
    put_prompts("good", "b_d")
    batch, _ = sampler_of_verl().sample(global_steps=1, partition_id=TRAINING, batch_size=2)
    assert sorted(batch.keys) == ["good_0_0", "good_1_0"]
    with pytest.raises(ConfigurationError, match=r"'b_d_0_0'.*uid must have no '_'"):
        make_session().join(batch_of(rollouts("good", 2) + rollouts("b_d", 2)))


# ---- more rows than n ----


def test_verl_fills_up_what_stands_on_top_of_n() -> None:
    """The trap: four rows more than four prompts of four make twelve rows of padding, and a second optimizer step."""
    batch = put([row for index in range(4) for row in rollouts(f"u{index}", N + 1, index)])
    filled = upsample_batch_to_divisible_size(batch, 4 * N, EOS)
    assert (len(batch), len(filled)) == (20, 32)
    assert sum(tag.get("is_padding", False) for tag in filled.tags) == 12


@pytest.mark.parametrize("k", [1, 3])
def test_a_joined_batch_keeps_its_size(k: int, make_session: MakeSession) -> None:
    session = make_session(offpolicy_trajectories_per_task=k)
    fill(session)
    histories = planned(session)
    uids = {f"u{index}": histories[task] for index, task in enumerate(TASKS)}
    session.expect(uids)
    fresh = [row for index, (uid, held) in enumerate(uids.items()) for row in rollouts(uid, N - len(held), index)]
    joined = session.join(put(fresh))
    assert len(joined) == 4 * N
    assert sessions(joined) == dict.fromkeys(uids, N)
    assert joined.keys[: len(fresh)] == [row.key for row in fresh]
    assert upsample_batch_to_divisible_size(joined, 4 * N, EOS) is joined


def test_no_prompt_gets_more_than_n_sessions(make_session: MakeSession) -> None:
    session = make_session(offpolicy_trajectories_per_task=2)
    fill(session)
    held = planned(session)["sums:0"]
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
    joined = session.join(put([row for group in rows.values() for row in group]))
    assert sessions(joined) == {"full": N, "roomy": N, "tight": N, "many": N, "alone": 3}
    replayed = [key for key in joined.keys if int(key.split("_")[1]) >= FIRST_REPLAYED_SESSION]
    assert sorted(replayed) == ["many_1000_0", "roomy_1000_0", "roomy_1001_0", "tight_1000_0"]


# ---- the rows that were joined ----


def test_replayed_rows_have_every_column_and_the_mask(make_session: MakeSession) -> None:
    session = make_session()
    fill(session)
    (history,) = planned(session)["sums:2"]
    session.expect({"u": (history,)})
    fresh = rollouts("u", 3, index=2)
    joined = session.join(put(fresh))
    data = tq.kv_batch_get(keys=joined.keys, partition_id=TRAINING)
    assert set(data.keys()) == {*fresh[0].columns, EXP_MASK}, "no column was lost"
    masks = column(joined, EXP_MASK)
    assert not any(masks[row.key].any() for row in fresh)
    assert {key: len(mask) for key, mask in masks.items()} == {
        key: tag["response_len"] for key, tag in zip(joined.keys, joined.tags, strict=True)
    }
    assert history.response_mask is not None
    assert torch.equal(masks["u_1000_0"], history.response_mask.long())
    back = read_whole_row("u_1000_0", joined.tags[-1], TRAINING)
    assert history.input_ids is not None
    assert torch.equal(back.columns["input_ids"], history.input_ids.long())


@pytest.mark.parametrize("correct", [True, False])
def test_scoring_gives_replayed_rows_their_recorded_log_probs(correct: bool, make_session: MakeSession) -> None:
    # Every other run draws in the background.
    session = make_session(exp_is_correct=correct, prepare_in_background=correct)
    fill(session)
    histories = planned(session)
    session.expect({f"u{index}": histories[task] for index, task in enumerate(TASKS)})
    joined = session.join(put([row for index in range(4) for row in rollouts(f"u{index}", N - 1, index)]))
    rate(joined)
    before = column(joined, "old_log_probs")
    figures = session.scored(joined, 2)
    after = column(joined, "old_log_probs")
    assert after.keys() == before.keys()
    for key, current in before.items():
        uid, number, _ = key.split("_")
        expected = current
        if int(number) >= FIRST_REPLAYED_SESSION and correct:
            (history,) = histories[TASKS[int(uid[1:])]]
            assert history.old_log_probs is not None
            assert history.response_mask is not None
            expected = torch.where(history.response_mask.bool(), history.old_log_probs, current)
            assert not torch.equal(expected, current)
        assert torch.equal(after[key], expected), key
    assert figures["recording/rollouts"] == 12
    assert figures["experience_replay/replayed_rows"] == 4
    assert figures["experience_replay/rows"] == 16


def test_histories_of_tasks_like_the_batchs_own(make_session: MakeSession) -> None:
    pytest.importorskip("bm25s")
    session = make_session(task_sampling="similar", exp_ratio=0.5, prepare_in_background=True)
    fill(session)
    plan = session.plan(["sums:1", "sums:3", "sums:0", "sums:2"], 0.5, 2)
    assert [one.task for one in plan if one.histories] == ["sums:1", "sums:3"]
    session.expect({one.task: one.histories for one in plan})
    assert [one.task_id for held in session._histories.expected.values() for one in held] == ["sums:1", "sums:3"]


def test_demonstrations_keep_the_log_probs_of_the_actor(make_session: MakeSession) -> None:
    session = make_session(offpolicy_trajectories_per_task=2)
    fill(session)
    manager = session._hook.manager
    assert manager is not None
    demos = []
    for held in manager.task2trajectories.values():
        ids = held[0].input_ids
        assert ids is not None
        mark = {"old_log_probs": None, "rollout_log_probs": None, "metadata": {DEMONSTRATION: True}}
        demos.append(dataclasses.replace(held[0], input_ids=ids + 1, policy_version=None, **mark))
    assert not manager.seed(demos)
    found = {one.task: one.histories for one in session.plan(TASKS, 0.5, 2)}
    found = {one.task: one.histories for one in session.plan(TASKS, 0.5, 3)}  # the demonstrations' turn
    session.expect({f"u{index}": found[task] for index, task in enumerate(TASKS)})
    joined = session.join(put([row for index in range(4) for row in rollouts(f"u{index}", N - 2, index)]))
    rate(joined)
    before = column(joined, "old_log_probs")
    figures = session.scored(joined, 3)
    after, engine = column(joined, "old_log_probs"), column(joined, "rollout_log_probs")
    scores = column(joined, "rm_scores")
    kept = 0
    for key, current in before.items():
        uid, number, _ = key.split("_")
        if int(number) < FIRST_REPLAYED_SESSION:
            continue
        history = found[TASKS[int(uid[1:])]][int(number) - FIRST_REPLAYED_SESSION]
        if history.old_log_probs is None:
            kept += 1
            assert torch.equal(after[key], current)
            assert torch.equal(engine[key], current), "rollout correction weighs it 1"
            assert scores[key][-1] == 1.0
        else:
            assert not torch.equal(after[key], current)
    assert kept == 4
    assert figures["experience_replay/demonstration_rows"] == 4
    assert figures["experience_replay/demonstration_row_share"] == 0.5


# ---- groups that are filtered ----


def filtering_sampler(metric: str, refill: Callable[[int], None]) -> ReplayBuffer:
    return ReplayBuffer(
        trainer_mode="sync",
        trainer_config=OmegaConf.create({}),
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs=OmegaConf.create({}),
        poll_interval=0.01,
        refill_fn=refill,
        filter_groups_metric=metric,
        train_batch_size=2,
        gen_batch_size=1,
    )


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
    fill(session)
    held = planned(session)
    session.expect({"failed": held["sums:0"], "solved": held["sums:1"]})
    put([*equal_group("failed", 2, 0.0, 0), *equal_group("solved", 2, 1.0, 1)])
    put_prompts("failed", "solved")

    def refill(count: int) -> None:
        put(rollouts("other", N, index=2))
        put_prompts("other")

    sampler = ReplaySampler(
        filtering_sampler(metric, refill),
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
    masks = column(batch, EXP_MASK)
    assert [key for key, mask in sorted(masks.items()) if mask.any()] == replayed
    assert not [key for key in (tq.kv_list(TRAINING) or {}).get(TRAINING, {}) if key.startswith("solved")]
    rate(batch)
    metrics = session.scored(batch, 2)
    assert metrics["experience_replay/replayed_rows"] == 2
    assert (metrics["recording/rollouts"], metrics["recording/dropped"]) == (6, 2)
    assert metrics["experience_replay/fresh_score_mean"] == pytest.approx(2 / 6)
    assert metrics["experience_replay/replayed_score_mean"] == 1.0
    assert metrics["experience_replay/mixed_score_mean"] == pytest.approx(4 / 8)
    assert "sums:1" not in {one.task for one in session.plan(TASKS, 0.5, 3) if one.histories}, "it is solved"
    session.close()
    with TrajectoryReplayBuffer() as recorded:
        recorded.load_checkpoint(tmp_path / "run-a" / "rollouts")
        found = [recorded.get(int(number)) for number in recorded.trajectory_ids]
    second = [one for one in found if isinstance(one, AgentTrajectory) and one.metadata["step"] == 2]
    assert Counter((one.metadata["uid"], one.metadata["trained"]) for one in second) == {
        ("failed", True): 2,
        ("solved", False): 2,
        ("other", True): N,
    }


def test_without_filtering_nothing_joins_before_sampling(make_session: MakeSession) -> None:
    session = make_session()
    sampler = sampler_of_verl()
    ReplaySampler(sampler, session.join, session.join_finished)
    assert "_sync_metadata_from_transfer_queue" not in vars(sampler)


# ---- rollouts that did not come back, or tell nothing ----


def test_what_did_not_come_back_is_unknown(make_session: MakeSession) -> None:
    session = make_session()
    fill(session)
    joined = session.join(put(equal_group("u", 1, 1.0, 0)))  # three of four raised
    rate(joined)
    session.scored(joined, 2)
    assert "sums:0" in {one.task for one in session.plan(TASKS, 0.5, 3) if one.histories}, "one success solves nothing"


def test_versions_of_another_count_of_steps_have_no_age(make_session: MakeSession) -> None:
    session = make_session()
    rows = [row for index in range(len(TASKS)) for row in rollouts(f"first{index}", N, index)]
    joined = session.join(put(rows))
    rate(joined, value=-2.0)
    session.scored(joined, 500)
    session.expect({"u": planned(session)["sums:0"]})
    joined = session.join(put(rollouts("u", 3)))
    rate(joined)
    figures = session.scored(joined, 2)
    assert figures["experience_replay/age_unknown_rows"] == 1
    assert "experience_replay/age_min" not in figures


def test_an_outcome_that_is_missing_is_told_once_and_counted(
    make_session: MakeSession, caplog: pytest.LogCaptureFixture
) -> None:
    session = make_session()
    for step in (1, 2):
        batch = put([fresh_row(f"u{step}", number, score=float("nan")) for number in range(N)])
        rate(joined := session.join(batch))
        assert session.scored(joined, step)["recording/without_outcome"] == N
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
    rate(joined := session.join(put(rows)), value=-2.0)
    figures = session.scored(joined, 1)
    assert (figures["recording/rollouts"], figures["experience_replay/rows"]) == (N, 2 * N)
    assert figures["experience_replay/pool_trajectories"] == 2
    (history,) = next(one.histories for one in session.plan(TASKS, 0.5, 2) if one.task == "sums:0")
    session.expect({"u": (history,)})
    joined = session.join(put([fresh_row("u", number, seed=9) for number in range(N - 1)]))
    assert joined.keys[-2:] == ["u_1000_0", "u_1000_1"]
    rate(joined)
    before = column(joined, "old_log_probs")
    figures = session.scored(joined, 2)
    assert figures["experience_replay/replayed_rows"] == 2
    after = column(joined, "old_log_probs")
    masks = column(joined, EXP_MASK)
    for output, part in enumerate(rows_of(history)):
        key = f"u_1000_{output}"
        assert part.old_log_probs is not None
        assert part.response_mask is not None
        written = part.response_mask == 1
        assert torch.equal(after[key][written], part.old_log_probs[written])
        assert torch.equal(after[key][~written], before[key][~written])
        assert not torch.equal(after[key], before[key])
        assert torch.equal(masks[key], part.response_mask)


# ---- a disk that is full ----


def test_training_goes_on_without_a_disk_and_recording_when_there_is_space_again(
    make_session: MakeSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trajstore.writing.queue._PAUSES", (0.01,))
    session = make_session(on_error="warn", store={"path": str(tmp_path / "pool")})
    plan = FaultPlan(0, "ENOSPC", lasting=True)
    with failing_disk(plan):
        for step in range(1, 5):
            assert sorted(one.task for one in session.plan(TASKS, 0.5, step)) == TASKS
            batch = put(rollouts(f"u{step}", N, index=step - 1))
            rate(joined := session.join(batch))
            figures = session.scored(joined, step)
            session.save(tmp_path / f"global_step_{step}", step)
        plan.heal()
        batch = put(rollouts("after", N, index=0))
        rate(joined := session.join(batch))
        figures = session.scored(joined, 5)
        session.close()
    assert "No space left" in caplog.text
    with TrajectoryReplayBuffer() as recorded:
        recorded.load_checkpoint(tmp_path / "run-a" / "rollouts")
        assert len(recorded) == 5 * N - figures["recording/lost"]
    assert figures["recording/lost"] == 0


def second_step(session: ReplaySession) -> None:
    """Record a step whose rollouts are new to the pool."""
    rows = [
        fresh_row(f"second{index}", number, response=3 + number, score=float(number < 2), index=index, seed=100 + index)
        for index in range(len(TASKS))
        for number in range(N)
    ]
    rate(joined := session.join(put(rows)))
    session.scored(joined, 2)


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_keeping_what_was_recorded_since_on_a_full_disk(
    on_error: OnError, make_session: MakeSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool: Mapping[str, Any] = {"store": {"path": str(tmp_path / "pool"), "capacity": 256}}
    session = make_session(**pool)
    fill(session)
    folder = tmp_path / "global_step_1"
    session.save(folder, 1)
    second_step(session)
    session.close()
    resumed = make_session(on_resume="keep", on_error=on_error, **pool)
    manager = resumed._hook.manager
    assert manager is not None
    manager.flush()
    real = manager.admit

    def full(*_: Any, **__: Any) -> Any:
        raise StoreWriteError(f"{tmp_path}: No space left on device")

    manager.admit = full  # type: ignore[method-assign]
    if on_error == "warn":
        resumed.resume(folder, 1)
        assert "a change was not made, training goes on" in caplog.text
        assert len(manager) == 8, "the pool is that of the checkpoint"
    else:
        with pytest.raises(StoreWriteError) as caught:
            resumed.resume(folder, 1)
        assert "exp_manager.on_resume: keep" in caught.value.__notes__[-1]
        assert "Make room" in caught.value.__notes__[-1]
    manager.admit = real  # type: ignore[method-assign]
    resumed.resume(folder, 1)
    assert len(manager) == 16, "nothing recorded was lost"


def test_a_checkpoint_without_a_cut_goes_back_to_the_pools_files(
    make_session: MakeSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint that was written without the plugin, or copied without its file."""
    files: Mapping[str, Any] = {"pool_path": str(tmp_path / "experience_pool"), "pool_save_freq": 1, "store": None}
    session = make_session(**files)
    session.plan(TASKS, 0.5, 1)
    fill(session)
    session.plan(TASKS, 0.5, 2)
    second_step(session)
    session.close()
    assert sorted(path.name for path in (tmp_path / "experience_pool").iterdir()) == ["step_1", "step_2"]
    resumed = make_session(**files)
    with caplog.at_level(logging.INFO):
        resumed.resume(tmp_path / "global_step_1", 1)
    assert "step_1 with 8 trajectories of 4 tasks" in caplog.text
    assert sum(len(one.histories) for one in resumed.plan(TASKS, 0.5, 2)) == len(TASKS)


# ---- validation ----


def test_validation_goes_through_untouched(make_session: MakeSession) -> None:
    session = make_session()
    fill(session)
    session.expect({"v": planned(session)["sums:0"]})
    sampler = ReplaySampler(sampler_of_verl(), session.join)
    for partition in ("val", TRAINING):
        put(rollouts("v", 3), partition)
        put_prompts("v", partition=partition)
    validated, _ = sampler.sample(1, "val", 1)
    assert sorted(validated.keys) == ["v_0_0", "v_1_0", "v_2_0"]
    assert EXP_MASK not in set(tq.kv_batch_get(keys=validated.keys, partition_id="val").keys())
    trained, _ = sampler.sample(1, TRAINING, 1)
    assert sorted(trained.keys) == ["v_0_0", "v_1000_0", "v_1_0", "v_2_0"]


def test_a_sampler_is_otherwise_what_it_was() -> None:
    sampler = ReplaySampler(sampler_of_verl(), lambda batch: batch)
    assert sampler.poll_interval == 0.05
    assert copy.copy(sampler).trainer_mode == "sync"
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = sampler.no_such_thing


# ---- padding ----


@pytest.mark.parametrize("first", ["fresh", "replayed"])
def test_padding_is_neither_recorded_nor_replaced(first: str, make_session: MakeSession) -> None:
    session = make_session()
    fill(session)
    session.expect({"u": planned(session)["sums:0"]})
    joined = session.join(put(rollouts("u", 2)))  # one rollout failed
    if first == "replayed":  # verl balances rows over ranks, and padding copies whichever comes first
        joined = KVBatchMeta(partition_id=TRAINING, keys=joined.keys[::-1], tags=joined.tags[::-1])
    filled = upsample_batch_to_divisible_size(joined, N, EOS)
    padding = filled.keys[len(joined) :]
    assert (len(joined), len(padding)) == (3, 1)
    copied = column(filled, EXP_MASK)[padding[0]]
    assert torch.equal(copied, column(joined, EXP_MASK)[joined.keys[0]])
    assert bool(copied.any()) == (first == "replayed")
    rate(filled)
    before = column(filled, "old_log_probs")[padding[0]]
    figures = session.scored(filled, 2)
    assert figures["recording/rollouts"] == 2
    assert figures["experience_replay/rows"] == 3
    assert torch.equal(column(filled, "old_log_probs")[padding[0]], before)


# ---- one session key for two rows ----


def test_a_replayed_row_never_takes_the_session_of_a_rollout(make_session: MakeSession) -> None:
    session = make_session()
    fill(session)
    held = planned(session)["sums:0"]
    session.expect({"u": held})
    joined = session.join(put(rollouts("u", 2)))
    assert len(joined.keys) == len({key.rpartition("_")[0] for key in joined.keys}) == 3
    with pytest.raises(ConfigurationError, match="sessions from 1000 on"):
        session.join(joined)


def test_a_sampler_that_uses_the_sessions_of_replay_is_stopped(make_session: MakeSession) -> None:
    session = make_session()
    fill(session)
    session.expect({"u": planned(session)["sums:0"]})
    with pytest.raises(ConfigurationError, match=r"row 'u_1000_0': sessions from 1000 on are those of replayed rows"):
        session.join(put([fresh_row("u", 0), fresh_row("u", FIRST_REPLAYED_SESSION)]))


# ---- prompts under way ----


def test_histories_of_dropped_prompts_are_forgotten(make_session: MakeSession) -> None:
    session = make_session()
    fill(session)
    held = planned(session)
    put_prompts("alive", "dropped", status="running")
    session.expect({"alive": held["sums:0"], "dropped": held["sums:1"]})
    tq.kv_clear(keys=["dropped"], partition_id=TRAINING)
    assert prompts_under_way(TRAINING) == {"alive"}
    session.expect({"next": held["sums:2"]})
    joined = session.join(put([fresh_row(uid, 0) for uid in ("alive", "dropped", "next")]))
    assert sessions(joined) == {"alive": 2, "dropped": 1, "next": 2}


def test_what_is_expected_goes_with_the_checkpoint(make_session: MakeSession, tmp_path: Path) -> None:
    pool: Mapping[str, Any] = {"store": {"path": str(tmp_path / "pool")}}
    session = make_session(**pool)
    fill(session)
    (history,) = planned(session)["sums:1"]
    session.expect({"u": (history,)})
    folder = tmp_path / "global_step_1"
    session.save(folder, 1)
    session.close()

    resumed = make_session(run="run-b", **pool)
    resumed.resume(folder, 1)
    joined = resumed.join(put(rollouts("u", 2, index=1)))
    assert joined.keys[-1] == "u_1000_0"
    assert history.input_ids is not None
    assert torch.equal(column(joined, "input_ids")["u_1000_0"], history.input_ids.long())


@pytest.mark.parametrize(("on_resume", "trajectories"), [("exact", 8), ("keep", 16)])
def test_rollouts_recorded_after_the_checkpoint(
    on_resume: OnResume, trajectories: int, make_session: MakeSession, tmp_path: Path
) -> None:
    pool: Mapping[str, Any] = {"store": {"path": str(tmp_path / "pool")}}
    session = make_session(**pool)
    fill(session)
    folder = tmp_path / "global_step_1"
    session.save(folder, 1)
    session.plan(TASKS, 0.5, 2)
    rows = [
        fresh_row(f"second{index}", number, response=3 + number, score=float(number < 2), index=index, seed=100 + index)
        for index in range(len(TASKS))
        for number in range(N)
    ]
    joined = session.join(put(rows))
    rate(joined)
    assert session.scored(joined, 2)["experience_replay/pool_trajectories"] == 16
    session.close()

    resumed = make_session(on_resume=on_resume, **pool)
    resumed.resume(folder, 1)
    again = put(rollouts("third", N, index=0))
    joined = resumed.join(again)
    rate(joined)
    # The rollouts of the third group are those of the first once more: nothing new for the pool.
    assert resumed.scored(joined, 2)["experience_replay/pool_trajectories"] == trajectories


def test_a_part_of_a_group_is_no_solved_task(make_session: MakeSession, tmp_path: Path) -> None:
    """A crash left two successes of a group and took its failures: both enter, and what was there stays."""
    pool: Mapping[str, Any] = {"store": {"path": str(tmp_path / "pool")}}
    session = make_session(**pool)
    fill(session)
    folder = tmp_path / "global_step_1"
    session.save(folder, 1)
    rows = [fresh_row("second", number, response=3 + number, score=float(number < 2), seed=100) for number in range(N)]
    rate(joined := session.join(put(rows)))
    session.scored(joined, 2)
    session.close()
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "run-a" / "rollouts") as rollouts_store:
        rollouts_store.evict(rollouts_store.trajectory_ids.tolist()[-2:])

    resumed = make_session(on_resume="keep", **pool)
    resumed.resume(folder, 1)
    resumed.save(tmp_path / "global_step_3", 3)
    cut = read_cut(tmp_path / "global_step_3")
    assert cut is not None
    assert cut.pool is not None
    assert {task: len(held) for task, held in cut.pool["entries"].items()} == dict(
        zip(TASKS, (4, 2, 2, 2), strict=True)
    )
    assert cut.pool["skip_uid_set"] == []
    # Two of two that are known succeeded: the two that are lost count neither way, and the task is not solved.
    assert cut.pool["difficulty2task_dict"] == {"2": [*TASKS[1:]], "3": [TASKS[0]]}


@pytest.mark.parametrize("checkpoint", [True, False], ids=["checkpoint without a cut", "no checkpoint"])
@pytest.mark.parametrize(("on_resume", "tasks"), [("exact", 0), ("keep", 4)])
def test_what_the_pool_had_not_committed_yet(
    on_resume: OnResume, tasks: int, checkpoint: bool, make_session: MakeSession, tmp_path: Path
) -> None:
    """Rollouts are committed before what the pool makes of them; here a crash came in between."""
    session = make_session(store={"path": str(tmp_path / "pool")})
    fill(session)
    session.close()

    resumed = make_session(on_resume=on_resume, store={"path": str(tmp_path / "pool as it was before")})
    resumed.resume(tmp_path / "global_step_1" if checkpoint else None, int(checkpoint))
    assert sum(map(bool, (one.histories for one in resumed.plan(TASKS, 0.5, 2)))) == tasks


def test_a_pool_that_has_everything_takes_nothing_in_twice(make_session: MakeSession, tmp_path: Path) -> None:
    pool: Mapping[str, Any] = {"store": {"path": str(tmp_path / "pool")}}
    session = make_session(**pool)
    fill(session)
    session.save(tmp_path / "global_step_1", 1)
    session.close()
    resumed = make_session(on_resume="keep", **pool)
    resumed.resume(None, 0)
    resumed.save(tmp_path / "global_step_2", 2)
    cuts = [read_cut(tmp_path / f"global_step_{step}") for step in (1, 2)]
    before, after = [dict(cut.pool or {}) for cut in cuts if cut is not None]
    for name in ("entries", "skip_uid_set", "difficulty2task_dict"):
        assert after[name] == before[name]


def test_a_session_that_only_records_adds_nothing(make_session: MakeSession) -> None:
    session = make_session(enable=False)
    batch = put(rollouts("u", N))
    assert session.join(batch) is batch
    rate(batch)
    assert session.scored(batch, 1)["recording/rollouts"] == N
    assert not session.replays


class Words:
    """A tokenizer."""

    def batch_decode(self, ids: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        return [" ".join(map(str, one)) for one in ids]


def test_rollouts_are_recorded_with_their_text_and_pooled_without(make_session: MakeSession, tmp_path: Path) -> None:
    """The text comes later than the pool decides."""
    session = make_session(store={"path": str(tmp_path / "pool")}, decoder=Words())
    fill(session)
    session.save(tmp_path / "global_step_1", 1)
    assert session._hook.manager is not None
    pooled = [one for held in session._hook.manager.task2trajectories.values() for one in held]
    assert {len(one.messages) for one in pooled} == {1}
    recorded = {}
    with TrajectoryReplayBuffer.open(tmp_path / "run-a" / "rollouts") as rollouts_store:
        for number in rollouts_store.trajectory_ids.tolist():
            one = rollouts_store.get(number)
            assert isinstance(one, AgentTrajectory)
            assert one.messages[-1]["author"] == "llm"
            recorded[one.rollout_id] = one
    for one in pooled:
        other = recorded[one.rollout_id]
        assert one.input_ids is not None
        assert other.input_ids is not None
        assert torch.equal(one.input_ids, other.input_ids)


class SmallVocabulary(Words):
    """Fails for tokens that a model with a padded vocabulary may sample."""

    def batch_decode(self, ids: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        if any(token >= VOCABULARY for one in ids for token in one):
            raise OverflowError("out of range")
        return super().batch_decode(ids, skip_special_tokens)


def test_a_task_that_nobody_here_wrote(make_session: MakeSession, tmp_path: Path) -> None:
    """Rewards between -1 and 1, some NaN; responses without a token of the model's; tokens that the tokenizer lacks."""
    session = make_session(store={"path": str(tmp_path / "pool")}, decoder=SmallVocabulary())
    scores = [1.0, -1.0, float("nan"), 1.0]
    for step in range(1, 4):
        session.plan(TASKS, 0.5, step)
        rows = []
        for index in range(len(TASKS)):
            for number, score in enumerate(scores):
                uid = f"s{step}i{index}"
                rows.append(fresh_row(uid, number, response=2 + number, score=score, index=index, seed=10 * step))
                if number == 3 and index < 2:
                    for name in ("response_mask", "loss_mask"):
                        rows[-1].columns[name][:] = 0
        rows[0].columns["raw_prompt"] = [{"role": "user", "content": "half a pair: \ud800"}]
        rows[1].columns["extra_fields"]["odd"] = 2**70
        rows[4].columns["responses"][1] = VOCABULARY + 7
        rows[4].columns["input_ids"][-1] = VOCABULARY + 7
        rate(joined := session.join(put(rows)))
        figures = session.scored(joined, step)
    session.save(tmp_path / "global_step_3", 3)
    figures |= session.scored(batch_of([]), 3)
    assert figures["recording/lost"] == 0
    assert figures["recording/without_text"] == 3
    with TrajectoryReplayBuffer.open(tmp_path / "run-a" / "rollouts") as recorded:
        found = [recorded.get(number) for number in recorded.trajectory_ids.tolist()]
    assert len(found) == 3 * len(TASKS) * N
    outcomes = Counter(one.reward.outcome for one in found if isinstance(one, AgentTrajectory) and one.reward)
    assert outcomes[None] >= 3 * len(TASKS)


# ---- guided rollouts ----


@pytest.mark.parametrize("replay", [False, True])
def test_rows_whose_experience_was_taken_out_are_marked_and_others_are_not(
    make_session: MakeSession, tmp_path: Path, replay: bool
) -> None:
    guidance = GuidanceConfig(enable_context_generator=True, rollout_expratio=0.5, updated_freq=0)
    session = make_session(guidance=guidance, enable=replay)
    if replay:
        fill(session)
        session.expect({"a": planned(session)[TASKS[0]][:1]})
    plain, kept, taken = rollouts("a", 3)
    put_prompts("a")
    joined = session.join(put([plain, shown(kept, "keep"), shown(taken, "discard")]))
    masks = {key: mask.tolist() for key, mask in column(joined, EXP_MASK).items()}
    assert masks["a_0_0"] == [0, 0]
    assert masks["a_1_0"] == [0, 0, 0]
    assert masks["a_2_0"] == [1, 1, 1, 1], "the whole response, what the environment said in it too"
    assert len(masks) == 3 + replay
    rate(joined)
    figures = session.scored(joined, 2)
    assert figures["guidance/guided_rollouts"] == 2.0
    engine = column(joined, "rollout_log_probs")
    assert torch.equal(engine["a_1_0"], kept.columns["rollout_log_probs"])
    assert torch.equal(engine["a_2_0"], column(joined, "old_log_probs")["a_2_0"]), "the engine's are of another prompt"
    session.close()
    with TrajectoryReplayBuffer.open(tmp_path / "run-a" / "rollouts") as recorded:
        found = [recorded.get(int(number)) for number in recorded.trajectory_ids]
    by_id = {one.rollout_id: one for one in found if isinstance(one, AgentTrajectory)}
    assert Guidance.of(by_id["a_0_0"]) is None
    assert by_id["a_1_0"].messages[0]["content"] == "tip: task 0"
    assert by_id["a_2_0"].messages[0]["content"] == "task 0"
    assert by_id["a_1_0"].rollout_log_probs is not None
    assert by_id["a_2_0"].rollout_log_probs is None
    assert "extra_fields" not in by_id["a_2_0"].metadata
    if replay:
        history = joined.keys[-1]
        assert masks[history] == column(joined, "response_mask")[history].tolist()
        assert column(joined, "extra_fields")[history].get(OFFER) is None, (
            "what the group was shown is not the history's"
        )
