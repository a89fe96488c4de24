"""Trajectories with several sets of columns, added in turn, share shards and commits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forging import forged_log
from tests.stores import keys_at, opened, reader_of
from tests.support.copies import copy_live, tell_ids
from tests.support.witness import check_trajectory, witness
from trajstore import Trajectory, TrajectoryReplayBuffer, WriterOptions
from trajstore.errors import CorruptStoreError, UnwritableTrajectoryError
from trajstore.operations.verify import verify

KEYS = [0, 1, 3, 4, 6, 7, 2, 9]
"""Keys of witnesses; multiples of three have other columns than the rest."""

LATE = WriterOptions(commit_interval=30.0)
"""Writes nothing before a flush, so that all additions make one commit."""


def shards_in(path: Path) -> int:
    return len(list((path / "shards").iterdir()))


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """A store after a crash, with one commit of two shards in its log."""
    with opened(tmp_path / "live", writer=LATE) as buffer:
        for key in KEYS:
            buffer.add_trajectories([witness(key)])
        buffer.flush()
        copy_live(tmp_path / "live", tmp_path / "crashed", "readers", "writer.lock")
    return tmp_path / "crashed"


@pytest.mark.parametrize(("form", "at_once"), [("pt", 1), ("pkl", 3), ("zarr", len(KEYS))])
def test_kinds_that_are_added_in_turn_make_one_shard_each(tmp_path: Path, form: str, at_once: int) -> None:
    with opened(tmp_path / "store", writer=LATE, trajectory_format=form, enable_cache=False) as buffer:
        ids = []
        for begin in range(0, len(KEYS), at_once):
            ids += buffer.add_trajectories([witness(key) for key in KEYS[begin : begin + at_once]])
        assert ids == list(range(len(KEYS)))
        buffer.flush()
        assert shards_in(tmp_path / "store") == 2
        assert buffer.trajectory_ids.tolist() == ids
        assert [check_trajectory(buffer.get(number)) for number in ids] == KEYS
        assert keys_at(tmp_path / "store") == dict(enumerate(KEYS))
    assert keys_at(tmp_path / "store") == dict(enumerate(KEYS))
    report = verify(tmp_path / "store")
    assert (report.problems, report.notes, report.trajectories) == ([], [], len(KEYS))


def test_a_torn_commit_of_several_shards_is_there_whole_or_not_at_all(crashed: Path) -> None:
    (log,) = (crashed / "log").iterdir()
    data = log.read_bytes()
    tell_ids(crashed, 0)  # the metadata as before the commit
    for cut in [*range(0, len(data), len(data) // 10), len(data) - 1]:
        log.write_bytes(data[:cut])
        assert keys_at(crashed) == {}
    log.write_bytes(data)
    assert keys_at(crashed) == dict(enumerate(KEYS))


def test_ranks_share_out_interleaved_shards(crashed: Path) -> None:
    shares = [keys_at(crashed, True, rank, 3) for rank in range(3)]
    assert [list(share) for share in shares] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert {number: key for share in shares for number, key in share.items()} == dict(enumerate(KEYS))


def test_a_checkpoint_of_memory_has_one_shard_for_each_kind(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(sample_window_size=0) as buffer:
        buffer.add_trajectories([witness(key) for key in KEYS])
        buffer.save_checkpoint(tmp_path / "saved")
    assert shards_in(tmp_path / "saved") == 2
    assert keys_at(tmp_path / "saved") == dict(enumerate(KEYS))


# -- failures ----------------------------------------------------------------------------------------


def test_a_kind_that_comes_to_nothing_leaves_no_gap_in_the_numbers_of_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trajstore._core.writing import commits

    real = commits.manifest_to_json

    def refused(manifest: Any, schema: int) -> Any:
        if manifest.schema.columns[0].dtype == "float64":
            raise ValueError("no such value")
        return real(manifest, schema)

    monkeypatch.setattr(commits, "manifest_to_json", refused)
    with opened(tmp_path / "live") as buffer:
        for number, dtype in enumerate((torch.float32, torch.float64, torch.float16)):
            buffer.add_trajectories([Trajectory(rewards=torch.full((2, 1, 1), number, dtype=dtype))])
            if number == 1:
                with pytest.raises(UnwritableTrajectoryError):
                    buffer.flush()
            buffer.flush()
        copy_live(tmp_path / "live", tmp_path / "crashed", "readers", "writer.lock")
    with reader_of(tmp_path / "crashed") as reader:
        kinds = {number: reader.get(number).rewards.dtype for number in reader.trajectory_ids.tolist()}
    assert kinds == {0: torch.float32, 2: torch.float16}


def test_a_damaged_commit_costs_what_it_committed_and_no_kind_is_taken_for_another(tmp_path: Path) -> None:
    with opened(tmp_path / "live", writer=LATE) as buffer:
        for begin in range(0, 9, 3):
            wide = torch.float64 if begin < 3 else torch.float16
            for at, kind in enumerate((torch.float32, wide, torch.float32 if begin < 6 else torch.bfloat16)):
                buffer.add_trajectories([Trajectory(rewards=torch.full((2, 1, 1), begin + at, dtype=kind))])
            buffer.flush()
        copy_live(tmp_path / "live", tmp_path / "crashed", "readers", "writer.lock")
    (log,) = (tmp_path / "crashed" / "log").iterdir()
    lines = log.read_bytes().split(b"\n")
    log.write_bytes(b"\n".join([lines[0], b"?" + lines[1][1:], *lines[2:]]))
    with TrajectoryReplayBuffer(sample_window_size=0) as reader:
        reader.load_checkpoint(tmp_path / "crashed", strict=False)
        rewards_by_id = {number: reader.get(number).rewards for number in reader.trajectory_ids.tolist()}
    assert all(rewards.unique().tolist() == [number] for number, rewards in rewards_by_id.items())
    assert {0, 1, 2} <= set(rewards_by_id)


def _descending(record: dict[str, Any]) -> None:
    entries = record["shards"][0]["entries"]
    entries["ids"] = [[number, number] for first, last in entries["ids"] for number in range(first, last + 1)][::-1]


@pytest.mark.parametrize(
    "forge",
    [
        _descending,
        lambda record: record.update(shards=[]),
        lambda record: record.update(shards=record["shards"][:1] * 2),
        lambda record: record.update(shards={"0": record["shards"][0]}),
    ],
    ids=["descending", "without shards", "one twice", "no list"],
)
def test_a_forged_commit_is_refused(crashed: Path, forge: Any) -> None:
    with forged_log(crashed) as records:
        forge(records[-1])
    with pytest.raises(CorruptStoreError, match="generation 1"):
        keys_at(crashed)


def test_commits_whose_ids_are_among_each_other_are_refused(crashed: Path) -> None:
    with forged_log(crashed) as records:
        (record,) = records
        first, second = record.pop("shards")
        records[:] = [{**record, "shards": [first]}, {**record, "shards": [second], "generation": 2, "schemas": []}]
    with pytest.raises(CorruptStoreError, match="ascend"):
        keys_at(crashed)
