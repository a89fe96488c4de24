"""Damaged files in a pool's store: unreadable records are left out, their neighbours are replayed."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.replay.conftest import build
from tests.support.equality import same
from trainer_hooks.replay import BufferStore, ExperienceManager, PoolRules
from trajstore._core.formats import FORMATS
from trajstore.trajectory import AgentTrajectory

RULES = PoolRules(n_rollout=4)


def begin(path: Path, file_format: str) -> dict[str, AgentTrajectory]:
    """Create a pool of three tasks with two histories each in one shard; return the histories by name."""
    store = BufferStore.open(path, format=file_format)
    manager = ExperienceManager(RULES, store=store)
    manager.admit([build(task, tokens, float(tokens < 3)) for task in "abc" for tokens in range(1, 5)])
    manager.flush()
    histories = replayed(manager)
    store.close()
    assert len(histories) == 6
    return histories


def replayed(manager: ExperienceManager) -> dict[str, AgentTrajectory]:
    return {history.rollout_id: history for history in manager.get_offpolicy_batch(["a", "b", "c"], 4)}


def shards(path: Path) -> Iterator[Path]:
    return (file for file in sorted(path.glob("shards/**/*")) if file.is_file())


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 8]))


def places(path: Path, needle: bytes) -> list[tuple[Path, int]]:
    return [(file, at) for file in shards(path) if (at := file.read_bytes().find(needle)) >= 0]


@pytest.mark.parametrize(
    ("damage", "when"),  # truncating a mapped file kills the process (SIGBUS)
    [("document", "drawn"), ("document", "opened"), ("document", "saved"), ("cut off", "opened")],
)
@pytest.mark.parametrize("file_format", FORMATS)
def test_one_damaged_history_costs_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file_format: str, when: str, damage: str
) -> None:
    path = tmp_path / "pool"
    whole = begin(path, file_format)
    store = BufferStore.open(path, format=file_format)
    manager = ExperienceManager(RULES, store=store)
    if when == "saved":
        manager.flush()
    if when == "drawn":
        manager.admit([build("e", tokens, float(tokens < 3)) for tokens in range(1, 5)])
        manager.flush()
        manager.get_offpolicy_batch(["e"], 1)  # a store keeps the shard open that was read last
    else:
        store.close()
    (file, at), *_ = places(path, b'"rollout_id":"a/1"')  # what its document does not share with the others
    if damage == "cut off":
        os.truncate(file, at)
    else:
        flip(file, at + len('"rollout_id":'))
    with caplog.at_level(logging.WARNING, logger="trajstore"):
        if when != "drawn":
            store = BufferStore.open(path, format=file_format)
            manager = ExperienceManager(RULES, store=store)
        histories = replayed(manager)
    lost = whole.keys() - histories.keys()
    assert all(same(history, whole[name]) for name, history in histories.items())
    if damage == "cut off":
        assert len(lost) > 1, "all of the shard"
    else:
        assert len(lost) == 1
        assert manager.metrics()["experience_replay/unreadable"] == 1.0
        assert manager.left["unreadable"] == 1
        assert "trajectory 0" in caplog.text
    manager.admit([build("d", tokens, float(tokens < 3)) for tokens in range(1, 5)])
    assert len(manager.get_offpolicy_batch(["d"], 4)) == 2, "the pool goes on"
    store.close()
