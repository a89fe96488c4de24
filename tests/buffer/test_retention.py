"""Limits of a store: choice of the trajectories to evict, and their eviction."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stores import add_each, filled, writer_to
from tests.support.witness import witness
from trajstore import Retention, Trajectory, TrajectoryReplayBuffer
from trajstore._core.buffer.sink import StoreSink
from trajstore._core.columns.conversion import flatten
from trajstore._core.columns.flat import FlatTrajectories
from trajstore._core.store.additions import NewEntries, starts_of
from trajstore._core.store.index import TrajectoryIndex


def step(steps: int, version: int | None) -> Trajectory:
    versions = None if version is None else torch.full((steps, 1, 1), float(version))
    return Trajectory(rewards=torch.zeros(steps, 1, 1), versions=versions)


def index_of(sizes: list[tuple[int, int | None]]) -> TrajectoryIndex:
    index = TrajectoryIndex()
    for number, (steps, version) in enumerate(sizes):
        flat = flatten(step(steps, version))
        columns = dict(NewEntries.of(FlatTrajectories.runs([flat]), [number], bytes(16), index.texts).columns) | {
            "shard": np.zeros(1)
        }
        index.append(columns | starts_of(np.array([flat.extent]), flat.schema.kind))
    return index


def newest_in_count(versions: list[int | None], age: int) -> dict[int, int]:
    """Return the version from which the age of each trajectory counts, by position."""
    places = [at for at, version in enumerate(versions) if version is not None]
    known = [version for version in versions if version is not None]
    begins, highest, at = [0], known[:1], 1
    while at < len(known):
        if known[at] < highest[-1] - age:
            before, end = known[at], at + 1  # is it followed by a jump back to the earlier versions?
            while end < len(known) and not (
                known[end] > before + age and known[end] >= max(highest[-1], *known[at : end + 1]) - age
            ):
                before, end = max(before, known[end]), end + 1
            if end == len(known):
                begins.append(at)
                highest.append(known[at])
            else:
                highest[-1] = max(highest[-1], *known[at : end + 1])
                at = end
        highest[-1] = max(highest[-1], known[at])
        at += 1
    return {places[at]: max(highest[sum(begin <= at for begin in begins) - 1 :]) for at in range(len(known))}


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 6), st.none() | st.integers(0, 8)), max_size=12),
    most=st.none() | st.integers(1, 8),
    nbytes=st.none() | st.integers(1, 30 * 4),
    age=st.none() | st.integers(0, 6),
)
def test_decisions_are_those_of_a_loop(
    sizes: list[tuple[int, int | None]], most: int | None, nbytes: int | None, age: int | None
) -> None:
    index = index_of(sizes)
    newest = newest_in_count([version for _, version in sizes], age or 0)
    kept: list[int] = []
    for number in reversed(range(len(sizes))):
        version = sizes[number][1]
        last = number == len(sizes) - 1
        if age is not None and version is not None and version < newest[number] - age:
            if last:
                kept.append(number)
            continue
        counted = [n for n in kept if age is None or sizes[n][1] is None or (sizes[n][1] or 0) >= newest[n] - age]
        fits = (most is None or len(counted) < most) and (
            nbytes is None or sum(index["nbytes"][n] for n in [*counted, number]) <= nbytes
        )
        if last or fits:
            kept.append(number)
        else:
            break
    going = Retention(max_trajectories=most, max_bytes=nbytes, max_policy_age=age).to_evict(index)
    assert [number for number in range(len(sizes)) if number not in set(going.tolist())] == sorted(kept)


def test_older_trajectories_do_not_go_for_ones_that_a_crash_could_take(tmp_path: Path) -> None:
    retention = Retention(max_trajectories=3)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path, retention=retention) as buffer:
        buffer.add_trajectories([witness(key) for key in range(3)])
        buffer.flush()
        assert isinstance(buffer._sink, StoreSink)
        publish = buffer._sink.writer.directory.publish
        fewest: list[int] = []

        def watch(files: object) -> None:
            fewest.append(buffer._sink.writer.log.catalog.index["trajectory_id"].size)
            publish(files)  # type: ignore[arg-type]

        buffer._sink.writer.directory.publish = watch  # type: ignore[method-assign]
        for key in range(3, 30):
            buffer.add_trajectories([witness(key)])
        buffer.flush()
        assert min(fewest) >= 3
        assert buffer.trajectory_ids.tolist() == [27, 28, 29]


@pytest.mark.parametrize("auto_save", [False, True])
def test_limits_hold_for_what_is_loaded_and_what_follows(tmp_path: Path, auto_save: bool) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "source") as source:
        source.add_trajectories([witness(key) for key in range(9)])
        source.flush()
        own = {"auto_save": True, "auto_save_path": tmp_path / "own"} if auto_save else {}
        reader = TrajectoryReplayBuffer(retention=Retention(max_trajectories=4), **own)  # type: ignore[arg-type]
        reader.load_checkpoint(tmp_path / "source")
        assert reader.trajectory_ids.tolist() == [5, 6, 7, 8]
        add_each(source, [9])
        assert reader.refresh()
        assert reader.trajectory_ids.tolist() == [6, 7, 8, 9]
        assert len(source) == 10, "loaded trajectories belong to another store"
        reader.close()


def test_limits_hold_as_soon_as_a_store_is_opened_and_flushed(tmp_path: Path) -> None:
    filled(tmp_path, range(9))
    with writer_to(tmp_path, retention=Retention(max_trajectories=4)) as again:
        assert again.trajectory_ids.tolist() == [5, 6, 7, 8]
        again.flush()
        assert len(list((tmp_path / "shards").iterdir())) <= 4


def test_what_a_load_hides_of_the_own_store_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "own") as buffer:
        buffer.add_trajectories([witness(0)])
        buffer.save_checkpoint(tmp_path / "saved")
        buffer.add_trajectories([witness(1)])
        buffer.load_checkpoint(tmp_path / "saved")
        assert "2 trajectories of this buffer's own store" in caplog.text
        assert str(tmp_path / "own") in caplog.text
        assert buffer.get_stats()["live_bytes"] > 0


@pytest.mark.parametrize("reopened", [False, True])
def test_the_newest_of_a_count_stay_while_it_passes_an_earlier_one(
    tmp_path: Path, reopened: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def opened() -> TrajectoryReplayBuffer:
        return writer_to(tmp_path, retention=Retention(max_policy_age=8))

    buffer = opened()
    buffer.add_trajectories([step(1, version) for version in range(40)])
    buffer.flush()
    for version in range(52):
        if reopened and version % 13 == 0:
            buffer.close()
            buffer = opened()
        buffer.add_trajectories([step(1, version)])
        buffer.flush()
        shown = buffer._live.contents.index["version_high"].tolist()
        new = [*range(max(0, version - 8), version + 1)]
        assert shown[-len(new) :] == new
        assert shown[: -len(new)] == [*range(max(31, version - 8), 40)]
    buffer.close()
    assert "version 0 was committed after 39" in caplog.text
    assert reopened or caplog.text.count("if versions began again") == 1


def test_a_late_rollout_begins_no_count(tmp_path: Path) -> None:
    with writer_to(tmp_path, retention=Retention(max_policy_age=5)) as buffer:
        for version in (*range(10), 2, 10, 1, 3, 11):
            buffer.add_trajectories([step(2, version)])
            buffer.flush()
        assert buffer._live.contents.index["version_high"].tolist() == [*range(6, 12)]
