"""Directories of every released layout, as they were written then, still load and give the same draws."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests import stores
from tests.golden.make import rows
from trajstore import TrajectoryReplayBuffer, notes_of
from trajstore.operations.verify import verify

GOLDEN = Path(__file__).parent / "golden"
LAYOUTS = sorted(path.name for path in GOLDEN.iterdir() if path.name.startswith("layout_") and path.is_dir())
VALUES = sorted(path.name for path in GOLDEN.iterdir() if path.name.startswith("values_"))
KEYS = {1: 5, 2: 3, 3: 4, 4: 11}


def keys_of(layout: str) -> dict[int, int]:
    """Return ids and keys of the trajectories that are live in a golden directory."""
    return KEYS if int(layout.removeprefix("layout_")) < 4 else {**KEYS, 5: 6, 6: 7}


def test_there_is_one_for_every_layout_version() -> None:
    from trajstore.core.store.sealed import LAYOUT_VERSION

    assert [f"layout_{number}" for number in range(1, LAYOUT_VERSION + 1)] == LAYOUTS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_holds_what_it_held(layout: str) -> None:
    buffer = TrajectoryReplayBuffer(seed=5, sample_window_size=0)
    state = buffer.state_dict()
    buffer.load_checkpoint(GOLDEN / layout)
    assert stores.keys_of(buffer) == keys_of(layout)
    buffer.load_state_dict(state)
    expected = json.loads((GOLDEN / f"{layout}.json").read_text())["drawn"]
    assert buffer.sample(8)["curr_obs"]["tag"].reshape(-1).tolist() == expected
    buffer.load_checkpoint(GOLDEN / layout, pin="start")
    assert stores.keys_of(buffer) == {0: 1, 1: 5}
    assert verify(GOLDEN / layout).sound


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_writer_continues_it(layout: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / layout, tmp_path / "store")
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store") as buffer:
        assert buffer.trajectory_ids.tolist() == sorted(keys_of(layout))
        assert buffer.add_trajectories([buffer.get(4)]) == [max(keys_of(layout)) + 1]
    assert verify(tmp_path / "store").sound


@pytest.mark.parametrize("layout", VALUES)
def test_values_that_came_late_are_as_they_were(layout: str, tmp_path: Path) -> None:
    pytest.importorskip("polars", reason="needs polars, of the extra 'query'")
    shutil.copytree(GOLDEN / layout, tmp_path / "store")
    with TrajectoryReplayBuffer.open(tmp_path / "store") as reader:
        assert [tuple(row.values()) for row in reader.query().select("score", "tag").rows()] == [
            (0.5, "é"),
            (2.0, None),
            (None, "late"),
        ]
    notes = notes_of(tmp_path / "store", 0)
    assert [(note.value, note.who, note.in_force) for note in notes if note.name != "label"] == [
        (0.5, "anna", True),
        ("é", "anna", True),
        (9.0, "bob", False),
    ]
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store") as writer:  # takes in the inbox
        notes = notes_of(writer, 2)
        assert [(note.name, note.value, note.who) for note in notes if note.name != "label"] == [
            ("tag", "late", ""),
            ("score", 4.0, "other"),
        ]
    assert verify(tmp_path / "store").sound


def test_values_by_row_are_as_they_were(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "values_7", tmp_path / "store")
    for _ in range(2):  # from the log, then from a snapshot of today
        with TrajectoryReplayBuffer.open(tmp_path / "store") as reader:
            for key in range(3):
                assert torch.equal(reader.get(key).notes["label"], rows(key))
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store") as writer:
            told = [(note.who, note.in_force) for note in notes_of(writer, 0) if note.name == "label"]
            assert told == [("bob", False), ("anna", True)]
    assert verify(tmp_path / "store").sound
