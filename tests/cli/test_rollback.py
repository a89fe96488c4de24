"""``trajstore rollback``, and saved points in ``inspect``."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.cli.stores import Run
from tests.saved_points.stores import add, loaded, make
from tests.support.witness import witness
from trajstore import TrajectoryReplayBuffer
from trajstore.errors import StoreNotFoundError
from trajstore.points import points_at


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a store with the points 750 and 760."""
    _fill(tmp_path / "store")
    return tmp_path / "store"


def _fill(path: Path) -> None:
    with make(path) as buffer:
        add(buffer, range(4))
        buffer.points.save(750, {"note": "here"})
        buffer.evict([0])
        add(buffer, range(4, 6))
        buffer.points.save(760)
        buffer.points.pin("mine")


def test_inspect_shows_points_pins_and_what_was_set_aside(path: Path, run: Run) -> None:
    shown = run.json("inspect", path)
    assert [point["step"] for point in shown["saved_points"]] == [750, 760]
    assert shown["saved_points"][0]["trajectories"] == 4
    assert shown["saved_points"][0]["state_bytes"] > 0
    assert (shown["aside"], shown["pins"], shown["stores"]) == ([], ["mine"], "shared")
    run.out("rollback", path, "--step", 750)
    shown = run.json("inspect", path)
    assert [point["step"] for point in shown["saved_points"]] == [750]
    [aside] = shown["aside"]
    assert (aside["left_for"], aside["trajectories"], aside["points"]) == ("step-750.0", 5, ["step-760.0"])
    assert shown["other_points"] == ["step-760.0"]
    text = run.out("inspect", path)
    for expected in ("saved points", aside["name"], "kept on disk", "`trajstore.points.points_at(PATH).remove(NAME)`"):
        assert expected in text
    assert "step-760.0 `trajstore rollback PATH --to NAME` goes there again" in " ".join(text.split())


def test_inspect_says_which_snapshots_keep_evicted_trajectories(path: Path, run: Run) -> None:
    """With their bytes in the files of the shards."""
    run.out("rollback", path, "--step", 750)
    with make(path) as buffer:
        buffer.evict([1])

    def kept() -> list[tuple[list[str], int]]:
        rows = run.json("inspect", path)["kept_on_disk"]
        files = sum(file.stat().st_size for file in (path / "shards").iterdir())
        assert 0 <= sum(row["bytes"] for row in rows) < files
        return sorted((row["names"], row["trajectories"]) for row in rows if row["bytes"] > 0)

    [aside] = [row["name"] for row in run.json("inspect", path)["aside"]]
    assert kept() == sorted([([aside, "mine", "step-760.0"], 2), ([aside, "mine", "step-750.0", "step-760.0"], 1)])
    points = points_at(path)
    points.remove(aside)  # with its point of step 760
    assert kept() == [(["mine"], 2), (["mine", "step-750.0"], 1)]
    points.remove("mine")
    assert kept() == [(["step-750.0"], 1)]
    points.remove(750)
    assert kept() == []


def test_a_dry_run_says_what_the_rollback_then_does(path: Path, run: Run) -> None:
    before = loaded(path)
    planned = run.json("rollback", path, "--step", 750, "--dry-run")
    assert loaded(path) == before
    done = run.json("rollback", path, "--step", 750)
    assert planned == {**done, "dry_run": True}
    assert (done["leaving"], done["returning"], done["later_steps"]) == (2, 1, [760])
    assert loaded(path) == {number: number for number in range(4)}
    left = {number: number for number in range(1, 6)}
    assert loaded(path, done["aside"]) == left
    planned = run.json("rollback", path, "--to", done["aside"], "--dry-run")
    assert loaded(path) == {number: number for number in range(4)}
    again = run.json("rollback", path, "--to", done["aside"])
    assert planned == {**again, "dry_run": True}
    assert (again["trajectories"], again["aside"], again["left"]) == (5, None, "step-750.0")
    assert loaded(path) == left
    undo = f"the state that was left is {done['aside']}: `trajstore rollback {path} --to {done['aside']}` undoes this"
    assert undo in run.out("rollback", path, "--step", 750)
    run.out("rollback", path, "--to", done["aside"])
    assert run.json("rollback", path, "--to", "mine")["leaving"] == 0


def test_the_left_state_has_the_announced_name_in_an_object_store(run: Run) -> None:
    pytest.importorskip("fsspec", reason="needs fsspec, of the extra 's3'")
    url = f"memory://rollback-{uuid.uuid4()}"
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=url) as buffer:
        buffer.add_trajectories([witness(0)])
        buffer.points.save(1)
        buffer.add_trajectories([witness(1)])
    planned = run.json("rollback", url, "--step", 1, "--dry-run")
    assert run.json("rollback", url, "--step", 1) == {**planned, "dry_run": False}
    assert [aside["name"] for aside in run.json("inspect", url)["aside"]] == [planned["aside"]]


def test_what_came_later_can_be_deleted(path: Path, run: Run) -> None:
    assert run.json("rollback", path, "--step", 750, "--delete")["aside"] is None
    assert run.json("inspect", path)["aside"] == []


def test_the_stores_of_a_run_go_back_together_or_not_at_all(tmp_path: Path, run: Run) -> None:
    for rank in range(2):
        _fill(tmp_path / f"rank_{rank}")
    done = run.json("rollback", tmp_path, "--step", 760)
    assert [part["leaving"] for part in done["parts"]] == [0, 0]
    with make(tmp_path / "rank_0") as buffer:
        add(buffer, [9])
        buffer.points.save(770)
    message = "the saved point of step 770 is incomplete: of 2 ranks, it is not in rank_1; complete are: 750, 760"
    assert message in run.err("rollback", tmp_path, "--step", 770)
    assert run.json("inspect", tmp_path)["stores"] == "per_rank"
    assert run.json("inspect", tmp_path / "rank_1")["stores"] == "per_rank"
    assert run.json("rollback", tmp_path, "--step", 750)["leaving"] == 5
    assert " aside" in run.out("inspect", tmp_path)
    assert "no snapshot is called 'aside-1'" in run.err("rollback", tmp_path, "--to", "aside-1")
    assert run.json("rollback", tmp_path, "--to", "mine")["returning"] == 4
    run.out("rollback", tmp_path, "--step", 750)
    assert len(loaded(tmp_path / "rank_0")) == 4


def test_the_undo_of_a_run_names_each_rank_and_a_name_that_some_lack_is_removed_from_the_others(
    tmp_path: Path, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    for rank in range(2):
        _fill(tmp_path / f"rank_{rank}")
    with make(tmp_path / "rank_0") as buffer:
        add(buffer, [9])
    done = run.out("rollback", tmp_path, "--step", 750)
    names = [aside["name"] for rank in range(2) for aside in run.json("inspect", tmp_path / f"rank_{rank}")["aside"]]
    for rank, name in enumerate(names):
        assert f"`trajstore rollback {tmp_path}/rank_{rank} --to {name}` undoes this" in done
    assert names[0] != names[1]
    points_at(tmp_path).remove(names[0])
    assert f"points.remove: {tmp_path}/rank_1: no snapshot is called {names[0]!r}" in caplog.text
    with pytest.raises(StoreNotFoundError, match=names[0]):
        points_at(tmp_path).remove(names[0])
    left = [aside["name"] for rank in range(2) for aside in run.json("inspect", tmp_path / f"rank_{rank}")["aside"]]
    assert left == names[1:]


def test_a_store_that_is_being_written_is_not_rolled_back(path: Path, run: Run) -> None:
    with make(path):
        assert "wri" in run.err("rollback", path, "--step", 750)
