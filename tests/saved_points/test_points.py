"""Saved points and rollback: restored, set-aside and retained data, and refusals."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.saved_points.stores import add, keys_of, loaded, make, names_in, state_files
from tests.stores import flip
from tests.support.copies import copy_live
from trajstore import TrajectoryReplayBuffer, annotate
from trajstore.errors import ConfigurationError, CorruptStoreError, StoreError, StoreNotFoundError
from trajstore.operations.inspect import inspect
from trajstore.operations.verify import verify
from trajstore.points import points_at
from trajstore.samplers import EpochSampler


@pytest.mark.parametrize(("trajectory_format", "where"), [("zarr", "local"), ("pt", "remote")])
def test_a_rollback_shows_what_the_point_named_and_sets_the_rest_aside(
    tmp_path: Path, trajectory_format: str, where: str
) -> None:
    path = str(tmp_path / "store") if where == "local" else f"memory://saved-{trajectory_format}"
    with make(path, trajectory_format=trajectory_format) as buffer:
        add(buffer, range(6))
        saved = buffer.points.save(750, {"note": "here"})
        assert (saved.step, saved.trajectories, saved.state_bytes > 0) == (750, 6, True)
        buffer.evict([1, 2])
        add(buffer, range(6, 9))
        drawn = buffer.sample(8)["rewards"]
    with make(path, trajectory_format=trajectory_format) as buffer:
        assert list(keys_of(buffer)) == [0, 3, 4, 5, 6, 7, 8]
        assert buffer.points.rollback(750) == {"note": "here"}
        assert keys_of(buffer) == {number: number for number in range(6)}
        assert add(buffer, [77]) == [9]  # ids of trajectories set aside are not reused
        assert len(drawn) == 8
    assert loaded(path) == {**{number: number for number in range(6)}, 9: 77}
    [aside] = [snapshot["name"] for snapshot in inspect(path)["aside"]]
    left = {0: 0, **{number: number for number in range(3, 9)}}
    assert loaded(path, aside) == left
    assert verify(path).sound
    with make(path, trajectory_format=trajectory_format) as buffer:
        buffer.points.go_to(aside)
        assert keys_of(buffer) == left
        buffer.points.go_to(names_in(path, "aside")[-1])
        assert keys_of(buffer) == {**{number: number for number in range(6)}, 9: 77}
        with pytest.raises(StoreNotFoundError, match=r"no snapshot is called 'aside-99'; there are \['aside-"):
            buffer.points.go_to("aside-99")


def test_going_there_and_back_names_nothing_twice(tmp_path: Path) -> None:
    with make(tmp_path) as buffer:
        add(buffer, range(2))
        buffer.points.save(1)
        files = sorted(tmp_path.rglob("*"))
        buffer.points.rollback(1)
        assert sorted(tmp_path.rglob("*")) == files, "it is there"
        add(buffer, range(2, 4))
        buffer.points.rollback(1)
        [name] = names_in(tmp_path, "aside")
        for _ in range(3):
            buffer.points.go_to(name)
            assert len(keys_of(buffer)) == 4
            buffer.points.go_to(1)
            assert len(keys_of(buffer)) == 2
        assert names_in(tmp_path, "aside") == [name]


def test_a_replaced_point_does_not_return_to_the_line_when_its_successor_is_released(tmp_path: Path) -> None:
    with make(tmp_path) as buffer:
        add(buffer, [0])
        buffer.points.save(1)
        add(buffer, [1])
        buffer.points.rollback(1)  # the head that is left keeps step-1.0
        buffer.points.save(1)
        add(buffer, [2])
        buffer.points.save(2, keep=1)
        assert [point.name for point in buffer.points.saved] == ["step-2.1"]
        assert "step-1.0" in [point.name for point in buffer.points.snapshots]
        with pytest.raises(StoreNotFoundError, match=r"step 1; there are: 2; on other lines: step-1\.0"):
            buffer.points.rollback(1)
    assert [point.step for point in points_at(tmp_path).saved] == [2]


def test_what_cannot_be_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with make(tmp_path / "store") as buffer:
        add(buffer, range(2))
        buffer.points.save(7)
        with pytest.raises(ConfigurationError, match=r"step 7, .*earlier"):
            buffer.points.save(6)
        with pytest.raises(ConfigurationError, match=r"state\['a'\]\[1\]: a object cannot be saved"):
            buffer.points.save(8, {"a": [1, object()]})
        for name in ("step-8", "aside-3", "step-9.2"):
            with pytest.raises(ConfigurationError, match="such names are reserved for saved points"):
                buffer.points.pin(name)
        assert [point.step for point in buffer.points.saved] == [7]
        assert state_files(tmp_path / "store") == 0
        buffer.save_checkpoint(tmp_path / "copy")
    with TrajectoryReplayBuffer() as buffer, pytest.raises(StoreError, match="no store of its own"):
        buffer.points.save(1)
    with make(tmp_path / "store") as buffer:
        buffer.load_checkpoint(tmp_path / "copy")
        for call in (
            lambda: buffer.points.save(8),
            lambda: buffer.points.rollback(7),
            lambda: buffer.points.go_to("aside-1"),
        ):
            with pytest.raises(StoreError, match=r"shows trajectories loaded from .*copy"):
                call()


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "optimizer": {"state": {0: {"exp_avg": torch.randn(3).bfloat16()}}, "lr": 1e-3, "betas": (0.9, 0.999)},
        "numpy": np.random.RandomState(1).get_state(),
        "array": np.arange(6, dtype=np.uint8).reshape(2, 3)[:, ::-1],
        "number": np.float64(0.1),
        "none": None,
        "bytes": b"\0\xff",
        "sampler": EpochSampler(),
    }
    with make(tmp_path) as buffer:
        add(buffer, range(2))
        buffer.points.save(1, state)
        back = buffer.points.rollback(1)
    assert torch.equal(back["optimizer"]["state"][0]["exp_avg"], state["optimizer"]["state"][0]["exp_avg"])
    assert back["optimizer"]["betas"] == (0.9, 0.999)
    assert back["numpy"][0] == "MT19937"
    assert np.array_equal(back["numpy"][1], state["numpy"][1])
    assert np.array_equal(back["array"], state["array"])
    assert (back["number"], back["none"], back["bytes"]) == (0.1, None, b"\0\xff")
    assert set(back["sampler"]) == set(EpochSampler().state_dict())


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_state_is_told_before_anything_is_changed(tmp_path: Path, damage: str) -> None:
    with make(tmp_path) as buffer:
        add(buffer, range(2))
        buffer.points.save(1, {"x": torch.arange(100)})
        add(buffer, range(2, 4))
        [file] = (tmp_path / "pins").glob("*.state")
        if damage == "flip":
            flip(file)
        elif damage == "cut":
            file.write_bytes(file.read_bytes()[:-1])
        else:
            file.unlink()
        with pytest.raises(CorruptStoreError, match=file.name):
            buffer.points.rollback(1)
        assert len(keys_of(buffer)) == 4
    with pytest.raises(CorruptStoreError, match=file.name):
        points_at(tmp_path).state(1)
    assert [problem.file for problem in verify(tmp_path).problems] == [f"pins/{file.name}"]


def test_a_state_of_many_rows_takes_the_bytes_of_its_numbers(tmp_path: Path) -> None:
    """Priorities of 10⁶ rows take as many bytes on disk as in memory."""
    rows = 1_000_000
    with make(tmp_path) as buffer:
        add(buffer, range(2))
        saved = buffer.points.save(1, {"sampler": {"powers": torch.rand(rows, dtype=torch.float64)}})
    assert 8 * rows < saved.state_bytes < 8 * rows + 10_000
    assert (tmp_path / "pins" / "step-1.0.json").stat().st_size < 20_000


def test_an_object_that_is_asked_for_its_state_may_read_the_store_and_not_change_it(tmp_path: Path) -> None:
    changes: dict[str, Callable[[], object]] = {
        "flush": lambda: buffer.flush(),
        "evict": lambda: buffer.evict([0]),
        "annotate": lambda: annotate(buffer, [0], {"outcome": 1.0}),
        "pin": lambda: buffer.points.pin("pin"),
        "save": lambda: buffer.points.save(2),
        "remove": lambda: buffer.points.remove(0),
        "go_to": lambda: buffer.points.go_to(0),
        "compact": lambda: buffer.compact(),
        "close": lambda: buffer.close(),
    }

    class Asks:
        def state_dict(self) -> dict[str, Any]:
            for change in changes.values():
                with pytest.raises(ConfigurationError, match="may read the store, but not change it"):
                    change()
            return {"bytes": buffer.get_stats()["live_bytes"], "rows": len(buffer.sample(4)["rewards"])}

    with make(tmp_path) as buffer:
        add(buffer, range(2))
        buffer.points.save(0)
        buffer.points.save(1, {"asks": Asks()})
        assert buffer.points.state(1)["asks"] == {"bytes": buffer.get_stats()["live_bytes"], "rows": 4}
        assert len(buffer) == 2


def test_a_point_has_what_its_state_knows_and_nothing_that_others_add_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Part:
        def state_dict(self) -> dict[str, Any]:
            adding.append(elsewhere.submit(add, buffer, [2]))
            with pytest.raises(TimeoutError):
                adding[0].result(0.1)  # it waits until the point is taken
            return {"committed": buffer.get_stats()["committed"]}

    adding: list[Future[list[int]]] = []
    with make(tmp_path) as buffer, ThreadPoolExecutor(1) as elsewhere:
        add(buffer, [0])
        monkeypatch.setattr(buffer._sink, "warn_of_open", lambda _: add(buffer, [1]))  # after the flush by ``save``
        buffer.points.save(1, {"part": Part()})
        monkeypatch.undo()
        assert adding[0].result() == [2]
        assert buffer.points.rollback(1) == {"part": {"committed": 1}}
        assert list(keys_of(buffer)) == [0, 1]


@pytest.mark.parametrize("saves", [True, False])
def test_the_line_is_known_without_the_index(tmp_path: Path, saves: bool) -> None:
    """Its log still begins with the first commit, as after a kill while ``rollback`` deletes the old segments."""
    path, first = tmp_path / "store", tmp_path / "first"
    with make(path) as buffer:
        for step in (1, 2):
            add(buffer, [step])
            buffer.points.save(step)
        shutil.copytree(path / "log", first)
        buffer.points.rollback(1)
        add(buffer, [3])
        if saves:
            buffer.points.save(2)
        copy = copy_live(path, tmp_path / "copy")
    shutil.copytree(first, copy / "log", dirs_exist_ok=True)
    (copy / "trajectory_index.json").unlink()
    report = inspect(copy)
    assert [point["name"] for point in report["saved_points"]] == ["step-1.0", "step-2.1"][: 1 + saves]
    assert report["other_points"] == ["step-2.0"]
    assert [head["points"] for head in report["aside"]] == [["step-2.0"]]


def test_refresh_of_a_points_reader_tells_of_commits_and_draws_on(tmp_path: Path) -> None:
    with make(tmp_path) as buffer:
        add(buffer, range(4))
        buffer.points.save(1)
        reader, still = (TrajectoryReplayBuffer.open(tmp_path, pin="step-1", seed=5) for _ in range(2))
        with reader, still:
            assert not reader.refresh()
            add(buffer, range(4, 8))
            buffer.evict([0])
            assert reader.refresh()
            assert reader.trajectory_ids.tolist() == [0, 1, 2, 3]
            assert not reader.refresh()
            assert torch.equal(reader.sample(8)["rewards"], still.sample(8)["rewards"])
