"""trajstore and RLinf in one directory detect each other's files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.stores import keys_at, reader_of, stored
from tests.support.copies import copy_live
from tests.support.waiting import wait_until
from tests.support.witness import check_trajectory, witness
from trajstore import TrajectoryReplayBuffer
from trajstore.errors import ConfigurationError, CorruptStoreError
from trajstore.operations.inspect import inspect
from trajstore.operations.verify import verify

from .test_layout import small


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return stored(tmp_path / "store", [witness(key) for key in range(4)])


@pytest.mark.parametrize("saved", [False, True])
def test_rlinf_cannot_take_our_index_for_an_empty_one(store: Path, tmp_path: Path, saved: bool) -> None:
    if saved:
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=store) as buffer:
            buffer.save_checkpoint(tmp_path / "checkpoint")
        store = tmp_path / "checkpoint"
    index = json.loads((store / "trajectory_index.json").read_text())
    with pytest.raises(ValueError, match=r"written by trajstore.*save_checkpoint\(layout='rlinf'\)"):
        [int(number) for number in index.get("trajectory_id_list", [])]  # like RLinf's buffer and tools


def test_a_directory_of_rlinf_is_not_written_to(tmp_path: Path) -> None:
    small(tmp_path / "theirs")
    before = {file.name: file.read_bytes() for file in (tmp_path / "theirs").iterdir()}
    with pytest.raises(ConfigurationError, match=r"theirs: .*RLinf.*load_checkpoint"):
        TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "theirs")
    assert {file.name: file.read_bytes() for file in (tmp_path / "theirs").iterdir()} == before
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "ours", sample_window_size=0) as buffer:
        buffer.load_checkpoint(tmp_path / "theirs")  # as the message recommends
        buffer.add_trajectories([buffer.get(0)])
        buffer.save_checkpoint(tmp_path / "both")
    assert len(reader_of(tmp_path / "both")) == 2


def test_a_store_that_rlinf_wrote_into_is_told_as_such(store: Path) -> None:
    ours = {name: (store / name).read_bytes() for name in ("metadata.json", "trajectory_index.json")}
    small(store)
    before = sorted(file.name for file in store.iterdir())
    pattern = r"store.metadata\.json: RLinf has written into this store.*Move RLinf's files"
    for call in (
        lambda: TrajectoryReplayBuffer(auto_save=True, auto_save_path=store),
        lambda: TrajectoryReplayBuffer().load_checkpoint(store),
    ):
        with pytest.raises(CorruptStoreError, match=pattern):
            call()
    assert sorted(file.name for file in store.iterdir() if file.name != "readers") == before
    assert "RLinf has written into this store" in inspect(store)["integrity"]["problems"][0]
    assert len(keys_at(store, strict=False)) == 4, "by the copy of the index"
    assert not verify(store).sound
    assert "RLinf has written into this store" in verify(store).problems[0].message

    moved = store.with_name("theirs")
    moved.mkdir()
    for file in [*store.glob("*.json"), *store.glob("trajectory_*.pt")]:
        file.rename(moved / file.name)
    for name, data in ours.items():
        (store / name).write_bytes(data)
    for path, count in ((store, 4), (moved, 1)):
        assert verify(path).sound
        assert len(reader_of(path)) == count


def test_what_the_log_still_tells_is_read_beside_rlinfs_files(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "live") as buffer:
        buffer.add_trajectories([witness(key) for key in range(4)])
        buffer.flush()
        store = copy_live(tmp_path / "live", tmp_path / "killed")  # the state after SIGKILL
    small(store)
    lenient = TrajectoryReplayBuffer(sample_window_size=0)
    lenient.load_checkpoint(store, strict=False)
    assert [check_trajectory(lenient.get(number)) for number in range(4)] == [0, 1, 2, 3]
    lenient.save_checkpoint(tmp_path / "saved")
    assert verify(tmp_path / "saved").trajectories == 4


@pytest.mark.parametrize("by", ["flush", "close"])
def test_what_rlinf_writes_over_a_live_store_is_noticed_named_and_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    def said() -> list[str]:
        return [text for text in caplog.messages if "RLinf has written into this store while it was open" in text]

    store = tmp_path / "store"
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=store) as buffer:
        buffer.add_trajectories([witness(0)])
        buffer.flush()
        wait_until(lambda: json.loads((store / "metadata.json").read_text())["size"] == 1)  # idle now
        small(store)
        theirs = {name: (store / name).read_bytes() for name in ("metadata.json", "trajectory_index.json")}
        buffer.add_trajectories([witness(1)])
        if by == "flush":
            buffer.flush()
            wait_until(lambda: bool(said()))  # metadata.json is updated in the background
            assert inspect(store)["trajectories"] == 2
            buffer.add_trajectories([witness(2)])
    assert len(said()) == 1
    assert "trajectory_index.json.rlinf" in said()[0]
    assert verify(store).sound
    assert verify(store).trajectories == (3 if by == "flush" else 2)
    assert {name: (store / f"{name}.rlinf").read_bytes() for name in theirs} == theirs

    moved = tmp_path / "theirs"
    moved.mkdir()
    for file in [*store.glob("*.rlinf"), *store.glob("trajectory_*.pt")]:
        file.rename(moved / file.name.removesuffix(".rlinf"))
    assert verify(moved).sound
