"""Rollouts are recorded where they arrive, from any process, and late fields find them."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import transfer_queue as tq

from tests.trainer_hooks.verl import plane
from tests.trainer_hooks.verl.builders import fresh_row
from trainer_hooks.replay.late_values import TASK_ROLLOUTS, TRAINED_STEP
from trainer_hooks.transfer_queue import RecorderHandle, Row, StoreOptions
from trainer_hooks.transfer_queue.storage import RecordingStorage
from trainer_hooks.verl.arrival import VerlRollouts, recorded_rollouts
from trainer_hooks.verl.config import OutcomeRule
from trainer_hooks.verl.dataplane import add_rows, write_column
from trainer_hooks.verl.histories import TRAINING
from trainer_hooks.verl.reading import RunTokenizer
from trajstore import TrajectoryReplayBuffer, attached
from trajstore.errors import ConfigurationError
from trajstore.trajectory import AgentTrajectory

pytestmark = pytest.mark.usefixtures("data_plane")


@ray.remote
def put_elsewhere(rows: list[Row], partition: str = TRAINING) -> None:
    """Put rows from another process, like a worker of the agent loop."""
    tq.init()
    add_rows(rows, partition)


@ray.remote
def write_elsewhere(keys: list[str], name: str, values: list[torch.Tensor]) -> None:
    tq.init()
    write_column(keys, TRAINING, name, values)


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[RecorderHandle]:
    handle = RecorderHandle()
    handle.open(
        StoreOptions(str(tmp_path / "rollouts")),
        VerlRollouts(OutcomeRule(), RunTokenizer("tokens"), "run-a", text=False),
    )
    yield handle
    handle.close()


@ray.remote(num_cpus=0)
class Nothing:
    """Another actor."""


def test_what_is_left_of_an_earlier_transfer_queue_does_not_end_a_later_one() -> None:
    """TransferQueue closes managers when they are collected."""
    earlier = object.__new__(RecordingStorage)
    earlier._recorder = Nothing.remote()
    del earlier
    gc.collect()
    plane.put([fresh_row("u0", 0)])
    assert tq.kv_list()[TRAINING]


def recorded(folder: Path) -> dict[str, AgentTrajectory]:
    with TrajectoryReplayBuffer.open(folder / "rollouts") as store:
        rollouts = list(recorded_rollouts(store))
    names = [rollout.rollout_id for rollout in rollouts]
    assert len(set(names)) == len(names)
    return dict(zip(names, rollouts, strict=True))


def late(rows: list[Row], start: float) -> list[torch.Tensor]:
    return [start - torch.arange(len(row.columns["responses"])) for row in rows]


def test_rollouts_are_recorded_on_arrival_and_find_their_late_fields(
    recorder: RecorderHandle, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    single = plane.rollouts("a", 2)
    outputs = [fresh_row("b", 0, response=3, output=0), fresh_row("b", 0, prompt=4, response=2, output=1)]
    padding = fresh_row("pad", 0)
    routes = torch.arange(20, dtype=torch.int16).reshape(5, 2, 2)
    single[0] = Row(single[0].key, single[0].tag, {**single[0].columns, "routed_experts": routes})
    for rows in (single[:1], single[1:], outputs):
        ray.get(put_elsewhere.remote(rows))
    add_rows([fresh_row("a", 1000), Row(padding.key, {**padding.tag, "is_padding": True}, padding.columns)], TRAINING)
    add_rows([fresh_row("validation")], "val")
    assert recorder.flush().waiting == 0
    arrived = recorded(tmp_path)
    assert sorted(arrived) == ["a_0_0", "a_1_0", "b_0_0"]
    for row in single:
        assert torch.equal(arrived[row.key].input_ids, row.columns["input_ids"])
        assert arrived[row.key].reward.metadata["score"] == row.columns["rm_scores"].sum()
        assert arrived[row.key].old_log_probs is None
        assert "trained" not in arrived[row.key].metadata

    rows = [*single, *outputs]
    assert torch.equal(attached(arrived["a_0_0"].metadata)["routed_experts"], routes)
    assert "trajstore.attached" not in arrived["a_1_0"].metadata

    keys, old, entropy = [row.key for row in rows], late(rows, -1.0), late(rows, 9.0)
    for part in (slice(0, 3), slice(3, 4)):  # ranks have parts of the batch: the outputs of a session come one by one
        ray.get(write_elsewhere.remote(keys[part], "old_log_probs", old[part]))
    write_column([*keys, "a_1000_0"], TRAINING, "entropy", [*entropy, torch.zeros(4)])
    write_column(["a_0_0"], TRAINING, "ref_log_prob", [old[0] - 1])
    write_column(["a_0_0"], TRAINING, "of_all_tokens", [torch.arange(5.0)])
    write_column(["a_0_0"], TRAINING, "values", [old[0]])
    with caplog.at_level(logging.WARNING):
        write_column(["a_0_0"], TRAINING, "wide", [torch.zeros(2, 2)])
    assert "later column wide does not have a number per token and is not recorded" in caplog.text
    names = ["a_0_0", "b_0_0", "a_1000_0"]
    recorder.set_values(names, {TRAINED_STEP: [5, 5, 5], TASK_ROLLOUTS: [2, 1, 1], "outcome": [0.25] * 3})
    assert recorder.flush().lost == 0
    trained = recorded(tmp_path)
    assert sorted(trained) == sorted(arrived)
    first, both = trained["a_0_0"], trained["b_0_0"]
    assert torch.equal(first.old_log_probs, old[0])
    with TrajectoryReplayBuffer.open(tmp_path / "rollouts") as store:
        notes = store.get(0).notes
    assert notes.keys() == {"old_log_probs", "entropys", "ref_log_prob", "of_all_tokens"}
    assert torch.equal(notes["of_all_tokens"], torch.arange(5.0))
    assert torch.equal(first.entropys, entropy[0])
    assert first.reward.outcome == 1.0, "it arrived with its reward"
    assert (first.metadata["step"], first.metadata["trained"], first.metadata["task_rollouts"]) == (5, True, 2)
    assert torch.equal(both.old_log_probs, torch.cat([old[2], torch.zeros(4), old[3]]))
    assert trained["a_1_0"].metadata["step"] == 6, "no step was reported: the one that asked for it"


def test_an_index_of_the_plane_that_is_used_again_is_another_rollout(recorder: RecorderHandle, tmp_path: Path) -> None:
    (first,), (second,) = plane.rollouts("a", 1), plane.rollouts("b", 1)
    add_rows([first], TRAINING)
    write_column([first.key], TRAINING, "old_log_probs", late([first], -1.0))
    tq.kv_clear(keys=[first.key], partition_id=TRAINING)
    add_rows([second], TRAINING)
    write_column([second.key], TRAINING, "old_log_probs", late([second], -2.0))
    assert recorder.flush().recorded == 2
    notes = {name: rollout.notes["old_log_probs"][0].item() for name, rollout in recorded(tmp_path).items()}
    assert notes == {"a_0_0": -1.0, "b_0_0": -2.0}


def test_queued_rollouts_are_recorded_on_closing(recorder: RecorderHandle, tmp_path: Path) -> None:
    def pause_until_closing(recorder: Any) -> None:
        gate, close = threading.Event(), recorder._background.close

        def closing() -> None:
            gate.set()
            close()

        recorder._background.submit(gate.wait)
        recorder._background.close = closing

    ray.get(recorder.actor.__ray_call__.remote(pause_until_closing))
    (row,) = plane.rollouts("a", 1)
    add_rows([row], TRAINING)
    write_column([row.key], TRAINING, "old_log_probs", late([row], -1.0))
    recorder.close()
    assert recorded(tmp_path)[row.key].notes["old_log_probs"][0] == -1.0


def test_rows_that_are_no_rollouts_are_reported_and_cost_only_themselves(
    recorder: RecorderHandle, tmp_path: Path
) -> None:
    row = fresh_row("u")
    add_rows([fresh_row("u_with_underscores")], TRAINING)
    add_rows([row], TRAINING)
    status = recorder.flush()
    assert (status.recorded, status.lost, status.waiting) == (1, 1, 0)
    assert "u_with_underscores_0_0" in str(status.error)
    assert "a uid must have no '_'" in str(status.error)
    assert recorder.status().error is None, "reported once"
    with pytest.raises(ConfigurationError, match=r"elsewhere: .*already.*rollouts"):
        recorder.open(StoreOptions("elsewhere"), VerlRollouts(OutcomeRule(), RunTokenizer("t"), "run-b", text=False))
