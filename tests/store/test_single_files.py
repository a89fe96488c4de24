"""No single file is the store: whichever file of a closed run is lost or damaged, repair brings back all else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.stores import flip
from trajstore import AgentTrajectory, Reward, Trajectory, TrajectoryReplayBuffer, annotate
from trajstore._core.files.opening import open_directory
from trajstore._core.formats import FORMATS
from trajstore._core.store.catalog import Catalog
from trajstore.errors import CorruptStoreError
from trajstore.operations.copying import repair_store
from trajstore.operations.verify import verify

pytest.importorskip("polars", reason="needs polars, of the extra 'query'")

State = dict[str, dict[str, Any]]
"""Of each UUID: id, facts, late values, rewards or tokens."""

EVICTED = {0, 4, 8}


def rollout(number: int) -> AgentTrajectory:
    return AgentTrajectory(
        input_ids=torch.full((9,), number),
        messages=[{"role": "user", "content": "go"}, {"role": "assistant", "content": f"{number} é"}],
        task_id=f"task {number}",
        policy_version=number,
        reward=Reward(outcome=number / 8, metadata={"judge": number}),
    )


def block(number: int) -> Trajectory:
    valid = torch.tensor([[True, False], [True, True], [False, True]]) if number % 2 else None
    return Trajectory(rewards=torch.full((3, 2, 1), float(number)), valid=valid, model_weights_id=f"w{number}")


def written(path: Path, form: str) -> None:
    """Two sessions: mixed kinds, evictions, a compacted shard, pins, saved points, late values of all kinds."""
    options: Any = {"auto_save": True, "auto_save_path": path, "trajectory_format": form}
    with TrajectoryReplayBuffer(**options) as buffer:
        for numbers in (range(4), range(4, 6)):
            buffer.add_trajectories([rollout(number) for number in numbers])
            buffer.flush()
        buffer.add_trajectories([block(6), block(7)])
        annotate(buffer, [1, 2], {"score": [0.5, 2], "tag": "good"})
        annotate(buffer, [6], {"per_step": [torch.ones(3, 2)]})
        buffer.evict([0])
        buffer.compact()
        buffer.points.pin("kept")
        buffer.points.save(1, state={"note": 1})
        buffer.evict([4])
    with TrajectoryReplayBuffer(**options) as buffer:
        buffer.add_trajectories([rollout(8), rollout(9)])
        annotate(buffer, [9, 2], {"score": [1, 3]})
        buffer.points.save(2, state={"note": 2})
        buffer.evict([8])


@pytest.fixture(scope="module", params=FORMATS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "zarr":
        pytest.importorskip("zarr")
    path = tmp_path_factory.mktemp(request.param) / "run"
    for rank in range(2):
        written(path / f"rank_{rank}", request.param)
    return path


def shown(path: Path | str, pin: str | None = None, *, time: bool = True) -> State:
    """Return what a rank shows, now or at a snapshot."""
    with TrajectoryReplayBuffer.open(path, pin=pin) as reader:
        rows = reader.query().table().to_dicts()
        facts = {row["trajectory_id"]: {name: row[name] for name in row if row[name] is not None} for row in rows}
        state = {}
        for number, uuid in zip(reader.trajectory_ids, reader._uuids, strict=True):
            content = reader.get(int(number))
            values = content.input_ids if isinstance(content, AgentTrajectory) else content.rewards
            state[str(uuid)] = {
                **facts[number],
                "content": values.tolist(),
                "metadata": getattr(content, "metadata", 0),
                "rows": {name: values.tolist() for name, values in content.notes.items()},
            }
            if not time:
                state[str(uuid)].pop("committed")
    return state


def points(path: Path) -> dict[str, tuple[State, Any]]:
    """Return the snapshots of a rank: what each shows, and its state."""
    catalog = Catalog.open(open_directory(path))
    names = [head.name for head in catalog.snapshots()]
    return {name: (shown(path, name), name != "kept" and catalog.read_state(name)) for name in names}


def without(state: State, lost: set[int]) -> State:
    return {uuid: entry for uuid, entry in state.items() if entry["trajectory_id"] not in lost}


def by_number(state: State) -> State:
    """Return a state without its values by row, and the history of values."""
    return {uuid: entry | {"per_step": 0, "metadata": 0, "rows": {}} for uuid, entry in state.items()}


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def ids_lost(path: Path) -> set[int]:
    """Return the ids that verify says are lost."""
    return {
        number for problem in verify(path).problems for low, high in problem.lost for number in range(low, high + 1)
    }


@pytest.mark.parametrize("damage", [Path.unlink, truncate, flip], ids=["deleted", "truncated", "flipped"])
def test_whatever_file_is_lost_all_else_comes_back(run: Path, damage: Callable[[Path], None], tmp_path: Path) -> None:
    case, new = tmp_path / "run", tmp_path / "new"
    before = {rank: shown(run / rank) for rank in ("rank_0", "rank_1")}
    saved = points(run / "rank_1")
    assert list(saved) == ["kept", "step-1.0", "step-2.0"]
    files = sorted(file.relative_to(run / "rank_1") for file in (run / "rank_1").rglob("*") if file.is_file())
    turn = [Path.unlink, truncate, flip].index(damage)
    if not run.parent.name.startswith("pt"):  # the files around the shards are those of pt: one damage to each shard's
        files = [file for file in files if file.parts[0] == "shards"][turn::3]
    for file in files:
        rank = "" if file.name == "trajectory_index.json" else "rank_1"  # once as a run of two ranks
        shutil.copytree(run / rank, case / rank)
        if (case / "rank_1" / file).stat().st_size or damage is Path.unlink:
            damage(case / "rank_1" / file)
        lost = ids_lost(case / "rank_1")
        assert not lost or file.parts[0] == "shards", file
        repair_store(case / rank, new / rank)
        assert rank or shown(new / "rank_0") == before["rank_0"], file
        left, found, kept = without(before["rank_1"], lost), shown(new / "rank_1"), points(new / "rank_1")
        given = file.parts[0] == "shards" and not lost  # the shard of late values by row
        if given:
            left, found = by_number(left), by_number(found)
        assert found == left, file
        for name, (state, values) in saved.items():
            if file.name.startswith(f"{name}."):  # its own file: what was in it is lost
                assert file.suffix != ".json" or name not in kept
                continue
            assert kept[name][1] == values, (file, name)
            state, then = without(state, lost), kept[name][0]
            assert (by_number(then) == by_number(state)) if given else (then == state), (file, name)
        shutil.rmtree(case)
        shutil.rmtree(new)


def test_the_copy_of_another_index_is_none_of_this_one(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "rank_0"
    shutil.copytree(run / "rank_0", path)
    before = shown(path)
    shutil.copy(run / "rank_1" / "index_copy.json", path)
    (problem,) = verify(path).problems
    assert problem.file == "index_copy.json"
    assert "belongs to another store" in problem.message
    (path / "trajectory_index.json").unlink()
    with pytest.raises(CorruptStoreError, match=r"without trajectory_index\.json"):
        TrajectoryReplayBuffer.open(path)
    repair_store(path, tmp_path / "repaired")
    assert shown(tmp_path / "repaired").keys() >= before.keys(), "what was evicted is not known any more"


@pytest.mark.parametrize("metadata", [True, False])
def test_without_any_index_the_shards_and_pins_say_it(run: Path, metadata: bool, tmp_path: Path) -> None:
    store = shutil.copytree(run / "rank_0", tmp_path / "store")
    before = shown(store, time=False)
    for name in ("trajectory_index.json", "index_copy.json", *(() if metadata else ("metadata.json",))):
        (store / name).unlink()
    problems = str(verify(store).problems)
    assert "evictions (such trajectories may be shown again)" in problems
    assert ("counts 7 trajectories, and 9 are there now" in problems) == metadata
    assert repair_store(store, tmp_path / "new").is_whole
    found = shown(tmp_path / "new", time=False)
    assert {entry["trajectory_id"] for uuid, entry in found.items() if uuid not in before} <= EVICTED
    assert {uuid: found[uuid] for uuid in before} == before
    then, state = points(run / "rank_0")["step-1.0"]
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "new") as buffer:
        assert [point.step for point in buffer.points.saved] == [1, 2]
        assert buffer.points.go_to(1) == state
        assert set(map(str, buffer._uuids)) == then.keys()


@pytest.mark.parametrize("form", ["pt", "pkl"])
def test_an_object_store_without_index_is_rebuilt_from_its_shards(form: str, memory_url: str, tmp_path: Path) -> None:
    options: Any = {"auto_save": True, "auto_save_path": memory_url, "trajectory_format": form}
    with TrajectoryReplayBuffer(**options) as buffer:
        buffer.add_trajectories([rollout(0), rollout(1), block(2)])
        annotate(buffer, [1], {"score": 1})
        buffer.points.save(1)
    before = shown(memory_url, time=False)
    open_directory(memory_url).remove(["trajectory_index.json"])
    repair_store(memory_url, tmp_path / "new")
    assert shown(tmp_path / "new", time=False) == before
