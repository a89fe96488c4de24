"""Curves and sample rollouts of a store reach wandb and TensorBoard, read back from the files that these write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples import log_curves
from trajstore import AgentTrajectory, Reward, TrajectoryReplayBuffer
from trajstore.ledger import ROW, Ledger, TrainedStep

LINK = "http://127.0.0.1:8421/#/trajectory/"
CURVES = {
    0: {"outcome": 0.5, "tokens": 4.5, "turns": 1.0, "rollouts": 2},
    1: {"outcome": 1.0, "turns": 1.0, "rollouts": 1},
    2: {"age": 1.5},
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rollouts of version 0, one of version 1 without tokens, one of none; versions 0 and 1 were trained at 2."""
    path = tmp_path_factory.mktemp("logged") / "store"
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path) as buffer:
        for version, outcome, tokens in ((0, 1.0, 3), (0, 0.0, 6), (1, 1.0, 0), (None, None, 0)):
            rollout = AgentTrajectory(
                task_id="sort",
                messages=[{"role": "user", "content": "3 1 2"}, {"role": "assistant", "content": "1|2"}],
                policy_version=version,
            )
            rollout.input_ids = torch.arange(tokens) if tokens else None
            rollout.reward = None if outcome is None else Reward(outcome=outcome)
            buffer.add_trajectories([rollout])
    with Ledger(path / "ledger") as ledger:
        rows = np.zeros(2, ROW)
        rows["trajectory"], rows["version"] = [0, 2], [0, 1]
        ledger.record(TrainedStep(3, rows, tasks=["sort"], policy_before=2, policy_after=3))
    return path


def _records(file: bytes) -> Iterator[bytes]:
    """Return the records of a LevelDB log behind 7 bytes of wandb: each has 7 bytes of checksum, length and part."""
    at, record = 7, b""
    while at + 7 < len(file):
        if (left := -at % 32768) and left < 7:
            at += left  # no header fits into the rest of a block
            continue
        length, part = int.from_bytes(file[at + 4 : at + 6], "little"), file[at + 6]
        record += file[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):  # the whole, or the last part
            yield record
            record = b""


@pytest.mark.verl
def test_wandb(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="needs wandb, which verl brings")
    from wandb.proto import wandb_internal_pb2 as records

    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    assert log_curves.main([str(store), "--wandb", "project"]) == 0
    wandb.teardown()  # its service has written all then
    history: list[dict[str, Any]] = []
    axes: dict[str, str] = {}
    for data in _records(next(tmp_path.rglob("*.wandb")).read_bytes()):
        record = records.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            history.append(items)
        if record.HasField("metric"):
            axes[record.metric.name or record.metric.glob_name] = record.metric.step_metric
    assert axes["rollouts/*"] == "policy_version"
    assert {
        int(items["policy_version"]): {
            key.removeprefix("rollouts/"): float(value) for key, value in items.items() if key.startswith("rollouts/")
        }
        for items in history
        if "policy_version" in items
    } == CURVES
    assert any(key.startswith("samples") for key in history[-1])
    (table,) = tmp_path.rglob("*.table.json")
    assert f"{LINK}3" in table.read_text()


def test_tensorboard(store: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard, which verl brings")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert log_curves.main([str(store), "--tensorboard", str(tmp_path), "--viewer", "http://viewer"]) == 0
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            found.setdefault(event.step, {})[tag.removeprefix("rollouts/")] = event.value
    assert found == CURVES
    (event,) = events.Tensors("samples/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert "1\\|2 | [3](http://viewer/#/trajectory/3)" in text
    assert event.step == 2
