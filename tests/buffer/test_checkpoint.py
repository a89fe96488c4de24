"""Checkpoints: equality, resuming, ranks, replacing, links, consistency; pins."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import stores
from tests.stores import add_each, contents_of, keys_of, reader_of, stored
from tests.support.copies import copy_live
from tests.support.faults import FaultPlan, failing_disk
from tests.support.witness import check_batch, key_of, witness
from trajstore import Trajectory, TrajectoryReplayBuffer, errors
from trajstore._core.files import folders
from trajstore._core.files.held import HeldFolder
from trajstore._core.store.run_ids import own_id
from trajstore.operations.copying import copy_store, repair_store
from trajstore.operations.inspect import inspect
from trajstore.operations.verify import verify
from trajstore.remote.mirror.restoring import restore


def make(kind: str, fmt: str, path: Path, **options: Any) -> TrajectoryReplayBuffer:
    options = {"sample_window_size": 0, **options}
    if kind == "memory":
        return TrajectoryReplayBuffer(trajectory_format=fmt, **options)
    return TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, trajectory_format=fmt, **options)


def filled(kind: str, fmt: str, path: Path, count: int, first: int = 0, **options: Any) -> TrajectoryReplayBuffer:
    buffer = make(kind, fmt, path, **options)
    for key in range(first, first + count):
        buffer.add_trajectories([witness(key)])
        if key % 3 == 0:
            buffer.flush()
    return buffer


def listing(path: Path) -> dict[str, tuple[int, int, int]]:
    keys_found = {}
    for file in sorted(path.rglob("*")):
        if "readers" not in file.relative_to(path).parts:
            state = file.stat()
            written = state.st_mtime_ns if file.is_file() else 0
            keys_found[str(file.relative_to(path))] = state.st_size, written, state.st_mode
    return keys_found


@pytest.mark.parametrize(("kind", "fmt"), [("memory", "pt"), ("store", "zarr")])
def test_what_is_saved_is_loaded(tmp_path: Path, kind: str, fmt: str) -> None:
    with filled(kind, fmt, tmp_path / "store", 8, seed=3) as buffer:
        buffer.evict([2, 5])
        buffer.sample(10)
        buffer.save_checkpoint(tmp_path / "checkpoint")
        expected = [buffer.sample(20)["curr_obs"]["tag"] for _ in range(3)]
        for target in ("memory", "store"):
            with make(target, fmt, tmp_path / f"other {kind} {target}", seed=1) as other:
                assert other.load_checkpoint(tmp_path / "checkpoint") == 0
                assert keys_of(other) == {number: number for number in (0, 1, 3, 4, 6, 7)}
                assert (len(other), other.total_samples) == (len(buffer), buffer.total_samples)
                assert (other._trajectory_counter, other.seed) == (8, 3)
                for value in expected:
                    assert torch.equal(other.sample(20)["curr_obs"]["tag"], value)
                assert other.add_trajectories([witness(50)]) == [8]
    assert verify(tmp_path / "checkpoint").sound


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6), readers=st.integers(1, 9), stored=st.booleans())
def test_any_number_of_ranks_loads_what_any_number_saved(
    tmp_path: Path, sizes: list[int], readers: int, stored: bool
) -> None:
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    key = 0
    for rank, size in enumerate(sizes):
        kind = "store" if stored and rank < 2 else "memory"
        with filled(kind, "pt", tmp_path / "run" / f"store_{rank}", size, key) as buffer:
            buffer.save_checkpoint(tmp_path / "run" / "saved" / f"rank_{rank}")
        key += size
    all_keys: list[int] = []
    ids: list[int] = []
    for rank in range(readers):
        buffer = TrajectoryReplayBuffer(sample_window_size=0)
        buffer.load_checkpoint(tmp_path / "run" / "saved", True, rank, readers)
        share = keys_of(buffer)
        each, more = divmod(key, readers)
        assert len(share) == each + (rank < more)
        assert buffer.total_samples == sum(witness(k).curr_obs["tag"].numel() for k in share.values())
        assert buffer._trajectory_counter == max(map(own_id, share), default=-1) + 1
        all_keys += share.values()
        ids += [*share, *buffer.add_trajectories([witness(1000), witness(1001)])]
        buffer.close()
    assert all_keys == list(range(key))
    assert len(set(ids)) == len(ids)


# -- saving -----------------------------------------------------------------------------------------


def test_a_checkpoint_that_cannot_be_written_leaves_the_earlier_one(tmp_path: Path) -> None:
    with filled("store", "pt", tmp_path / "store", 3) as buffer:
        buffer.save_checkpoint(tmp_path / "checkpoint")
        add_each(buffer, [3])
        full = failing_disk(FaultPlan(0, "ENOSPC", lasting=True))
        with full, pytest.raises(errors.StoreWriteError, match="checkpoint"):
            buffer.save_checkpoint(tmp_path / "checkpoint")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "store"]
    assert contents_of(tmp_path / "checkpoint") == [0, 1, 2]


def test_a_checkpoint_that_an_overlay_cannot_replace_is_kept_and_the_way_out_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like overlayfs for a folder of its lower layer, which can be neither exchanged nor renamed."""
    genuine = HeldFolder.rename

    def rename(folder: HeldFolder, old: str, new: str) -> None:
        if old == "checkpoint":
            raise OSError(errno.EXDEV, "Invalid cross-device link", old)
        genuine(folder, old, new)

    with filled("memory", "pt", tmp_path, 3) as buffer:
        buffer.save_checkpoint(tmp_path / "checkpoint")
        with monkeypatch.context() as patch:
            patch.setattr(folders, "exchange", lambda *_: False)
            patch.setattr(HeldFolder, "rename", rename)
            with pytest.raises(errors.StoreWriteError, match=r"lower layer cannot be replaced.*; choose another path"):
                buffer.save_checkpoint(tmp_path / "checkpoint")
            buffer.save_checkpoint(tmp_path / "another")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another", "checkpoint"]
    assert contents_of(tmp_path / "checkpoint") == [0, 1, 2]


def test_files_are_linked_and_live_on_when_the_store_is_gone(tmp_path: Path) -> None:
    with filled("store", "zarr", tmp_path / "store", 4) as buffer:
        buffer.save_checkpoint(tmp_path / "checkpoint")
    shards = [path for path in (tmp_path / "checkpoint" / "shards").rglob("*") if path.is_file()]
    assert shards
    assert all(path.stat().st_nlink == 2 for path in shards)
    shutil.rmtree(tmp_path / "store")
    assert contents_of(tmp_path / "checkpoint") == [0, 1, 2, 3]


# -- loading ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "store"])
def test_loading_writes_nothing_into_the_directory(tmp_path: Path, kind: str) -> None:
    with filled("store", "pt", tmp_path / "store", 5) as buffer:
        buffer.save_checkpoint(tmp_path / "checkpoint")
    for source in (tmp_path / "store", tmp_path / "checkpoint"):
        before = listing(source)
        with make(kind, "pt", tmp_path / f"own {source.name}") as other:
            other.load_checkpoint(source)
            check_batch(other.sample(20))
            other.evict([1])
            add_each(other, [77])
            assert sorted(keys_of(other).values()) == [0, 2, 3, 4, 77]
            assert listing(source) == before
            other.save_checkpoint(tmp_path / "both")
        assert listing(source) == before
        assert not list(source.glob("readers/*"))
        assert sorted(keys_of(reader_of(tmp_path / "both")).values()) == [0, 2, 3, 4, 77]


def test_nothing_there(tmp_path: Path) -> None:
    buffer = filled("memory", "pt", tmp_path, 2)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "absent", tmp_path / "empty", tmp_path / "file"):
        with pytest.raises(errors.StoreNotFoundError, match=path.name):
            buffer.load_checkpoint(path)
    assert keys_of(buffer) == {0: 0, 1: 1}
    assert not (tmp_path / "absent").exists()
    assert os.listdir(tmp_path / "empty") == []


# -- pins -------------------------------------------------------------------------------------------


def test_pins_keep_a_state(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with filled("store", "pt", path, 6, seed=4) as buffer:
        buffer.points.pin("first")
        expected = buffer.sample(30)["curr_obs"]["tag"]
        buffer.evict([0, 1, 2, 3])
        buffer.add_trajectories([witness(6)])
        buffer.points.pin("second")
        buffer.clear()
    with make("store", "pt", path) as buffer:  # pins outlive the writer
        add_each(buffer, [7])
        other = TrajectoryReplayBuffer(seed=1, sample_window_size=0)
        other.load_checkpoint(path, pin="first")
        assert torch.equal(other.sample(30)["curr_obs"]["tag"], expected)
        assert sorted(keys_of(other)) == [0, 1, 2, 3, 4, 5]
        other.load_checkpoint(path, pin="second")
        assert sorted(map(key_of, map(other.get, other.trajectory_ids.tolist()))) == [4, 5, 6]
        other.load_checkpoint(path)
        assert keys_of(other) == {7: 7}
        for name in ("none", "../first"):
            with pytest.raises((errors.StoreNotFoundError, errors.UnsafeContentError)):
                other.load_checkpoint(path, pin=name)
        for name in ("../../outside", "a/b", ".", ".hidden", "a\nb", "x" * 201, "\ud800"):
            with pytest.raises(errors.ConfigurationError, match="must be the name of a file"):
                buffer.points.pin(name)
        other.close()
        buffer.points.remove("first")
        buffer.points.remove("second")
        assert len(list((path / "shards").iterdir())) == 1
    assert verify(path).sound
    with pytest.raises(errors.StoreError, match="auto_save"):
        TrajectoryReplayBuffer().points.pin("x")


def test_a_pin_that_was_let_go_before_a_crash_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with filled("store", "pt", path, 2) as buffer:
        buffer.points.pin("only")
        buffer.evict([0, 1])
    with make("store", "pt", path) as buffer:
        buffer.points.remove("only")
        copy_live(path, tmp_path / "crashed")  # the snapshot still has the pinned entries, without files
    assert list((tmp_path / "crashed" / "shards").iterdir()) == []
    assert verify(tmp_path / "crashed").sound


@pytest.mark.parametrize("base", ["", "memory://test-within"])
def test_a_checkpoint_and_a_store_within_a_store_are_refused(tmp_path: Path, base: str) -> None:
    store = f"{base or tmp_path}/store"
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=store) as buffer:
        buffer.add_trajectories([witness(0)])
        for inner in () if base else ("rank_0", "shards/inner", "other/deep"):
            with pytest.raises(errors.ConfigurationError, match="lies within the store"):
                stores.opened(f"{store}/{inner}")
        for below in ("rank_0", "shards", "shards/new", "log", "readers", "pins", "new", "a/b/c", "."):
            with pytest.raises(errors.ConfigurationError, match=r"lies within the store|is a store|holds other files"):
                buffer.save_checkpoint(store if below == "." else f"{store}/{below}")
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=f"{base or tmp_path}/other") as buffer:
        with pytest.raises(errors.ConfigurationError, match="is a store of its own" if not base else "is a store"):
            buffer.save_checkpoint(store)  # no writer is active
        buffer.save_checkpoint(f"{base or tmp_path}/beside")
        buffer.save_checkpoint(f"{base or tmp_path}/beside")
        with pytest.raises(errors.ConfigurationError, match="lies within the store"):
            buffer.save_checkpoint(f"{base or tmp_path}/beside/within")  # the next save would delete it
    with TrajectoryReplayBuffer.open(store) as reader:
        assert len(reader) == 1


def test_what_holds_files_of_other_people_is_not_replaced(tmp_path: Path) -> None:
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([witness(0)])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(errors.ConfigurationError, match=r"thesis\.tex"):
        buffer.save_checkpoint(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"
    for layout in ("trajstore", "rlinf"):
        target = tmp_path / layout
        buffer.save_checkpoint(target, layout=layout)  # type: ignore[arg-type]
        buffer.save_checkpoint(target)
        (target / "model.pt").write_bytes(b"weights")
        with pytest.raises(errors.ConfigurationError, match=r"holds other files \(model\.pt"):
            buffer.save_checkpoint(target)
        assert (target / "model.pt").read_bytes() == b"weights"


@pytest.mark.parametrize("copy", [copy_store, repair_store, restore])
def test_a_copy_within_its_own_source_is_refused(tmp_path: Path, copy: Callable[..., object]) -> None:
    stored(tmp_path / "store", [witness(0)])
    with pytest.raises(errors.ConfigurationError, match="or contains it"):
        copy(tmp_path / "store", tmp_path / "store/inner")
    assert verify(tmp_path / "store").sound


def test_copy_says_that_it_brings_no_saved_points(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store") as buffer:
        buffer.add_trajectories([witness(0)])
        buffer.points.save(7)
    [note, _] = copy_store(tmp_path / "store", tmp_path / "copy").notes
    assert note.startswith(
        "pins/: 1 saved points and pins are not copied, and the copy cannot go back to them; a mirror"
    )


def test_what_a_run_has_lost_is_told_by_the_ids_of_the_store_that_lost_it(tmp_path: Path) -> None:
    """Merged stores have new ids, unlike inspect, verify and copies of a single store."""
    for rank in range(2):
        stores.filled(tmp_path / f"run/rank_{rank}", range(3))
    os.truncate(sorted((tmp_path / "run/rank_1/shards").iterdir())[1], 10)
    for call in (TrajectoryReplayBuffer.open, lambda run: copy_store(run, tmp_path / "copy")):
        with pytest.raises(errors.IncompleteCheckpointError, match="rank_1: trajectory 1 is lost"):
            call(tmp_path / "run")


def test_removing_a_pin_that_is_not_there_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with filled("store", "pt", tmp_path / "store", 1) as buffer:
        buffer.points.pin("kept")
        with pytest.raises(errors.StoreNotFoundError, match=r"no snapshot is called 'kpet'; there are \['kept'\]"):
            buffer.points.remove("kpet")
        buffer.points.remove("kept")
        assert not caplog.records
        with pytest.raises(errors.TrajectoryUnavailableError, match="no trajectory has the id -4"):
            buffer.wait([0, -4])


# -- Draws after ranks load checkpoints: an equal number continues, other numbers draw differently from each other --


SAVED = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of four ranks, with 60 single-sample trajectories."""
    path = tmp_path_factory.mktemp("run")
    for rank in range(SAVED):
        with TrajectoryReplayBuffer(seed=rank) as buffer:
            buffer.add_trajectories([Trajectory(rewards=torch.zeros(1, 1, 1)) for _ in range(60)])
            buffer.sample(3)
            buffer.save_checkpoint(path / f"rank_{rank}")
    return path


def drawn(path: Path, rank: int, ranks: int, seed: int | None) -> tuple[int, ...]:
    """Return the places of its share that a rank draws."""
    with TrajectoryReplayBuffer(seed=seed, sample_window_size=0) as buffer:
        buffer.load_checkpoint(path, is_distributed=True, local_rank=rank, world_size=ranks)
        return tuple((buffer.draw(8).ids - buffer.trajectory_ids[0]).tolist())


@pytest.mark.parametrize("ranks", [3, 5])
def test_no_two_ranks_of_another_number_draw_alike(run: Path, ranks: int) -> None:
    for seeds in ([1000 + rank for rank in range(ranks)], [1234] * ranks, [-1] * ranks, [None] * ranks):
        each = [drawn(run, rank, ranks, seed) for rank, seed in enumerate(seeds)]
        assert len(set(each)) == ranks
        assert each == [drawn(run, rank, ranks, seed) for rank, seed in enumerate(seeds)], "and the same every time"
    assert drawn(run, 0, ranks, 77) != drawn(run, 0, ranks, 78), "by its own seed"


@pytest.mark.parametrize("given", [{}, {"local_rank": 0}, {"world_size": 2}, {"local_rank": 0.0, "world_size": 2}])
def test_a_share_needs_its_rank_and_their_number_as_integers(run: Path, given: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigurationError, match=r"(local_rank|world_size): .*, must be an int"):
        TrajectoryReplayBuffer().load_checkpoint(run, is_distributed=True, **given)


@pytest.mark.parametrize("url", ["memory://a/../b", "memory://./b", "memory://a/./b", "memory://a/new\nline"])
def test_a_url_with_dots_or_control_characters_is_refused(url: str) -> None:
    with pytest.raises(errors.ConfigurationError, match="as part of a name"):
        TrajectoryReplayBuffer(auto_save=True, auto_save_path=url)


@pytest.mark.parametrize("absent", [3, 1])
def test_a_rank_whose_share_was_not_saved_is_named(run: Path, tmp_path: Path, absent: int) -> None:
    for rank in {0, 1, 2, 3} - {absent}:
        with TrajectoryReplayBuffer() as buffer:
            buffer.load_checkpoint(run, is_distributed=True, local_rank=rank, world_size=4)
            buffer.save_checkpoint(tmp_path / f"rank_{rank}")
    with pytest.raises(errors.IncompleteCheckpointError, match=f"rank_{absent} is absent"):
        TrajectoryReplayBuffer.open(tmp_path)
    assert f"rank_{absent} is absent" in str(verify(tmp_path).problems)
    assert f"rank_{absent} is absent" in str(inspect(tmp_path)["integrity"]["problems"])


def test_as_many_ranks_as_before_take_up_where_each_was(run: Path) -> None:
    for rank in range(SAVED):
        with reader_of(run / f"rank_{rank}") as buffer:
            own = tuple(buffer.draw(8).ids.tolist())
        assert drawn(run, rank, SAVED, 77) == drawn(run, rank, SAVED, 78) == own


def test_a_share_that_is_opened(run: Path) -> None:
    def opened(rank: int, seed: int | None) -> list[int]:
        with TrajectoryReplayBuffer.open(run, share=(rank, 2), seed=seed) as reader:
            return (reader.draw(8).ids - reader.trajectory_ids[0]).tolist()

    assert opened(0, None) == opened(0, None) != opened(1, None)
    assert opened(0, 5) == opened(1, 5), "a seed that is given is kept as it is"


def test_of_a_directory_of_rlinf_every_rank_draws_as_rlinf_does(run: Path, tmp_path: Path) -> None:
    with reader_of(run) as buffer:
        buffer.save_checkpoint(tmp_path / "rlinf", layout="rlinf")
    assert drawn(tmp_path / "rlinf", 0, 2, 77) == drawn(tmp_path / "rlinf", 1, 2, 78)
