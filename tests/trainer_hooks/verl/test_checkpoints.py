"""TransferQueue's own checkpoints with the backend ``trajstore``."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
import transfer_queue as tq

from tests.trainer_hooks.verl import plane
from trainer_hooks.replay.late_values import TRAINED_STEP
from trainer_hooks.transfer_queue import RecorderHandle, Row, StoreOptions
from trainer_hooks.transfer_queue.recorder import Recorder
from trainer_hooks.verl.arrival import VerlRollouts, recorded_rollouts
from trainer_hooks.verl.config import OutcomeRule
from trainer_hooks.verl.dataplane import add_rows, write_column
from trainer_hooks.verl.histories import TRAINING
from trainer_hooks.verl.reading import RunTokenizer
from trajstore import TrajectoryReplayBuffer

pytestmark = pytest.mark.usefixtures("data_plane")


def start(folder: Path) -> RecorderHandle:
    handle = RecorderHandle()
    handle.open(StoreOptions(str(folder)), VerlRollouts(OutcomeRule(), RunTokenizer("tokens"), "run-a", text=False))
    return handle


def write(row: Row, name: str, value: float) -> None:
    write_column([row.key], TRAINING, name, [torch.full((len(row.columns["responses"]),), value)])


def notes(folder: Path, name: str) -> dict[str, float]:
    """Return the first value of a late column, by rollout."""
    with TrajectoryReplayBuffer.open(folder) as store:
        rollouts = [store.get(number) for number in store.trajectory_ids.tolist()]
    return {r.rollout_id: r.notes[name][0].item() for r in rollouts if r.notes and name in r.notes}


def steps(folder: Path) -> dict[str, int]:
    with TrajectoryReplayBuffer.open(folder) as store:
        return {rollout.rollout_id: rollout.metadata["step"] for rollout in recorded_rollouts(store)}


def test_rows_of_a_checkpoint_are_the_rollouts_that_they_were(tmp_path: Path) -> None:
    (first,), (second,) = plane.rollouts("a", 1), plane.rollouts("b", 1)
    recorder = start(tmp_path / "store")
    add_rows([first], TRAINING)
    tq.save_checkpoint(tmp_path / "saved")
    tq.kv_clear(keys=[first.key], partition_id=TRAINING)
    add_rows([second], TRAINING)  # with the index of the first
    write(second, "of_b", 1.0)
    tq.load_checkpoint(tmp_path / "saved")
    write(first, "back", 2.0)
    recorder.close()
    assert notes(tmp_path / "store", "of_b") == {"b_0_0": 1.0}
    assert notes(tmp_path / "store", "back") == {"a_0_0": 2.0}

    for step, opened_first in ((7, True), (8, False)):  # a new process
        recorder = start(tmp_path / "store") if opened_first else recorder
        tq.load_checkpoint(tmp_path / "saved")
        recorder = recorder if opened_first else start(tmp_path / "store")
        write(first, f"resumed_{step}", 3.0)
        recorder.set_values([first.key], {TRAINED_STEP: [step]})
        recorder.close()
        assert notes(tmp_path / "store", f"resumed_{step}") == {"a_0_0": 3.0}
        assert steps(tmp_path / "store")["a_0_0"] == step

    recorder = start(tmp_path / "another")
    tq.load_checkpoint(tmp_path / "saved")
    write(first, "back", 4.0)
    recorder.close()
    assert notes(tmp_path / "another", "back") == {}
    assert notes(tmp_path / "store", "back") == {"a_0_0": 2.0}


def test_a_checkpoint_without_the_rows_of_its_rollouts_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()
    assert recorder.save_rows() == b"", "nothing is recorded"
    rollouts = VerlRollouts(OutcomeRule(), RunTokenizer("tokens"), "run-a", text=False)
    recorder.open(StoreOptions(str(tmp_path / "one")), rollouts)
    rows = recorder.save_rows()
    recorder.close()
    recorder.open(StoreOptions(str(tmp_path / "two")), rollouts)
    with caplog.at_level(logging.WARNING):
        recorder.load_rows("empty", b"")
        recorder.load_rows("of_simple_storage", None)
        recorder.load_rows("elsewhere", rows)
        recorder.load_rows("damaged", rows[:-9])
        recorder.close()
    first, second, third = caplog.messages
    assert first == "of_simple_storage: late values of its rollouts are not recorded: it has none"
    assert second.startswith("elsewhere: late values of its rollouts are not recorded: they are in store ")
    assert second.endswith(f", not in {tmp_path / 'two'}")
    assert third.startswith("damaged: late values of its rollouts are not recorded: ")


def test_rows_in_memory_are_in_every_checkpoint(tmp_path: Path) -> None:
    add_rows(plane.rollouts("a", 1), TRAINING)
    tq.save_checkpoint(tmp_path / "saved", include_storage=False)
    assert json.loads((tmp_path / "saved" / "metadata.json").read_text())["storage_saved"] is True
