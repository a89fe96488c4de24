"""``trajstore convert``, ``prune``, ``compact`` neither lose nor add trajectories."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.stores import Run
from tests.stores import flip, keys_at, opened, stored
from tests.support.witness import check_trajectory, witness
from trajstore import AgentTrajectory, Reward, TrajectoryReplayBuffer, annotate, notes_of
from trajstore._core.buffer import checkpoint
from trajstore.cli import DAMAGED, main
from trajstore.operations.conversion import convert
from trajstore.operations.copying import copy_store
from trajstore.operations.verify import verify
from trajstore.samplers import EpochSampler, Priorities, WeightedSampler

pytest.importorskip("polars", reason="needs polars, of the extra 'query'")


def asked(path: Path, *names: str) -> list[tuple[Any, ...]]:
    with TrajectoryReplayBuffer.open(path) as reader:
        return [tuple(row.values()) for row in reader.query().select(*names).rows()]


def rollout(number: int) -> AgentTrajectory:
    return AgentTrajectory(
        input_ids=torch.arange(5) + number, reward=Reward(outcome=float(number % 2)), task_id=f"t{number % 3}"
    )


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    with opened(tmp_path / "agents") as store:
        for first in (0, 3):
            store.add_trajectories([rollout(number) for number in range(first, first + 3)])
            store.flush()
        annotate(store, [1, 4], {"judge": [0.5, 0.25], "tag": ["a", "b"]})
        store.points.pin("kept")
        store.evict([2])
    return tmp_path / "agents"


FACTS = ("task", "outcome", "judge", "tag", "committed")


def test_facts_and_values_that_came_late_go_along(agents: Path, tmp_path: Path) -> None:
    before = asked(agents, *FACTS)
    with opened(tmp_path / "run" / "other") as store:
        store.add_trajectories([rollout(9)])
        annotate(store, [0], {"tag": "of the other"})
    (tmp_path / "run" / "agents").symlink_to(agents)
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "both"), "--to", "pt"]) == 0
    other = asked(tmp_path / "run" / "other", "task", "outcome", "tag", "committed")[0]
    assert asked(tmp_path / "both", *FACTS) == [*before, (*other[:2], None, *other[2:])]
    assert main(["convert", str(tmp_path / "both"), str(tmp_path / "zarr"), "--to", "zarr"]) == 0
    assert asked(tmp_path / "zarr", *FACTS) == asked(tmp_path / "both", *FACTS)
    assert {path.suffix for path in (tmp_path / "zarr" / "shards").iterdir()} == {".zarr"}
    for name, condition in (("some", "judge > 0"), ("rest", "judge is null")):
        assert main(["convert", str(agents), str(tmp_path / name), "--to", "pt", "--where", condition]) == 0
    assert asked(tmp_path / "some", "trajectory_id", *FACTS) == [(1, *before[1]), (4, *before[3])]
    rest = [(task, outcome, committed) for task, outcome, *_, committed in (before[0], before[2], before[4])]
    assert asked(tmp_path / "rest", "task", "outcome", "committed") == rest
    for made in ("both", "zarr", "some", "rest"):
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / made) as writer:
            annotate(writer, writer.trajectory_ids[:1].tolist(), {"judge": 9})
        assert verify(tmp_path / made).sound
    assert asked(agents, *FACTS) == before


def test_a_part_of_a_run_is_one_store(tmp_path: Path, run: Run) -> None:
    """Ids in the condition are those of the run, also where a rank is absent; the absent one is named."""
    for rank in (0, 2):
        stored(tmp_path / "run" / f"rank_{rank}", [witness(10 * rank + number) for number in range(3)])
    words = ["convert", tmp_path / "run", tmp_path / "part", "--to", "pt", "--where", "trajectory_id in ('2/1', '0/2')"]
    assert f"{tmp_path / 'run'}: rank_1 is absent" in run.out(*words, code=DAMAGED)
    assert keys_at(tmp_path / "part") == {0: 2, 1: 21}


def test_united_stores_order_late_values_by_time_and_keep_their_history(agents: Path, tmp_path: Path) -> None:
    copy_store(agents, tmp_path / "copy")
    with opened(tmp_path / "copy") as copied:
        annotate(copied, 1, {"outcome": 0.0, "judge": 0.9}, who="anna")
        annotate(copied, [3], {"adv": [torch.arange(5.0)]})
    with opened(agents) as original:
        annotate(original, 1, {"judge": 0.7}, who="ben")
        annotate(original, [3], {"adv": [torch.ones(5)]}, who="ben")
        annotate(original, 4, {"tag": None})
    histories = []
    for made, sources in (("one", (agents, tmp_path / "copy")), ("other", (tmp_path / "copy", agents))):
        (tmp_path / f"run {made}").mkdir()
        for rank, source in enumerate(sources):
            (tmp_path / f"run {made}" / f"rank_{rank}").symlink_to(source)
        done = convert(tmp_path / f"run {made}", tmp_path / made, "pt")
        assert "5 trajectories are in more than one of the sources, and once in the result" in done.notes
        assert verify(tmp_path / made).sound
        values = asked(tmp_path / made, "outcome", "judge", "tag")
        assert values == [(0.0, None, None), (0.0, 0.7, "a"), (1.0, None, None), (0.0, 0.25, None), (1.0, None, None)]
        with TrajectoryReplayBuffer.open(tmp_path / made) as reader:
            rollouts = [reader.get(number) for number in reader.trajectory_ids.tolist()]
            assert [rollout.notes["adv"].tolist() for rollout in rollouts if rollout.notes] == [[1.0] * 5]
        notes = [notes_of(tmp_path / made, number) for number in (0, 1, 3, 4, 5)]
        histories.append([[(note.name, note.value, note.who, note.time) for note in of_one] for of_one in notes])
    assert histories[0] == histories[1]
    assert [note[:3] for note in histories[0][1]] == [
        *(("judge", 0.5, ""), ("tag", "a", "")),
        *(("outcome", 0.0, "anna"), ("judge", 0.9, "anna"), ("judge", 0.7, "ben")),
    ]


def test_the_state_of_a_sampler_goes_on_with_saved_shares_as_ranks(tmp_path: Path) -> None:
    stored(tmp_path / "store", [witness(key) for key in range(6)])
    for rank in range(2):
        with TrajectoryReplayBuffer.open(tmp_path / "store", share=(rank, 2)) as share:
            share.save_checkpoint(tmp_path / "run" / f"rank_{rank}")
    with TrajectoryReplayBuffer.open(tmp_path / "store") as store, TrajectoryReplayBuffer.open(tmp_path / "run") as run:
        epoch, rest = EpochSampler(unit="trajectory"), EpochSampler(unit="trajectory")
        drawn = store.sample_trajectories(2, sampler=epoch)
        rest.follow(run)
        rest.load_state_dict(epoch.state_dict())
        drawn += run.sample_trajectories(4, sampler=rest)
        assert sorted(map(check_trajectory, drawn)) == [*range(6)]
        weighted, again = WeightedSampler(priorities=Priorities()), WeightedSampler(priorities=Priorities())
        batch = store.sample(99, sampler=weighted).drawn
        store.update_priorities(weighted, batch, batch.ids + batch.samples / 8)
        again.follow(run)
        again.load_state_dict(weighted.state_dict())
        assert torch.equal(again.state_dict()["priorities"], weighted.state_dict()["priorities"])


@pytest.mark.parametrize("command", ["copy", "convert --to pkl"])
def test_a_store_begun_at_the_target_meanwhile_is_kept(
    command: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint._write_store

    def write_and_begin(*arguments: Any, **options: Any) -> None:
        write(*arguments, **options)
        monkeypatch.setattr(checkpoint, "_write_store", write)
        stored(tmp_path / "new", [witness(9)])

    store = stored(tmp_path / "store", [witness(key) for key in range(3)])
    monkeypatch.setattr(checkpoint, "_write_store", write_and_begin)
    name, *options = command.split()
    assert str(tmp_path / "new") in run.err(name, store, tmp_path / "new", *options)
    assert keys_at(tmp_path / "new") == {0: 9}


@pytest.mark.parametrize("command", ["copy", "repair", "convert --to pkl"])
def test_only_the_same_result_at_a_url_is_accepted(command: str, tmp_path: Path, run: Run) -> None:
    files = pytest.importorskip("fsspec", reason="needs fsspec, of the extra 's3'").filesystem("memory")
    store, url = stored(tmp_path / "store", [witness(key) for key in range(3)]), f"memory://moved-{uuid.uuid4()}"
    name, *options = command.split()
    run.out(name, store, f"{url}/new", *options)
    expected = keys_at(f"{url}/new")
    metadata = min(name for name in files.find(f"{url}/new") if name.endswith("metadata.json"))
    written = files.modified(metadata)
    run.out(name, store, f"{url}/new", *options)
    assert files.modified(metadata) == written
    files.rm(metadata)  # as after an interruption
    run.out(name, store, f"{url}/new", *options)
    assert keys_at(f"{url}/new") == expected
    other = stored(tmp_path / "other", [witness(9)])
    assert "is not empty" in run.err(name, other, f"{url}/new", *options)
    assert keys_at(f"{url}/new") == expected
    files.pipe(f"{url}/taken/readme", b"")
    assert "is not empty" in run.err(name, other, f"{url}/taken", *options)


def test_compact_reports_a_damaged_shard_that_stays(tmp_path: Path, run: Run) -> None:
    path = stored(tmp_path / "store", [witness(key) for key in range(3)])
    stored(path, [witness(key) for key in range(3, 6)])
    flip(min((path / "shards").iterdir()))
    assert run.json("compact", path, code=DAMAGED)["damaged"] == 1


def test_prune_and_compact_report_what_saved_points_keep(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "run"
    for rank in range(2):
        with opened(path / f"rank_{rank}") as buffer:
            buffer.add_trajectories([rollout(number) for number in range(4)])
            buffer.points.pin("a")
            buffer.add_trajectories([rollout(number) for number in range(4)])
            if rank:
                buffer.points.save(1)
            buffer.add_trajectories([rollout(number) for number in range(4)])
    words = ["prune", f"{path}/", "--where", "outcome = 0"]
    for command in (words, [*words, "--yes"], ["compact", f"{path}/"], ["compact", f"{path}/"]):
        held = run.json(*command)["held_by_points"]
        assert (held["trajectories"], held["names"]) == (6, ["a", "step-1.0"])
        assert 0 < held["bytes"] < sum(file.stat().st_size for file in path.glob("rank_*/shards/*")), "as in the files"
    text = run.out("compact", path)
    assert "  6 trajectories (" in text
    assert " of files) stay on disk for a, step-1.0, and are shown again by a rollback there, until these are" in text
    assert "removed: `trajstore.points" in text
    nothing = "nothing to evict: the condition holds for none of 12 trajectories\n"
    assert run.out(*words, "--yes") == run.out(*words) == f"{path}: {nothing}"
    assert run.json(*words, "--yes")["held_by_points"] == {"trajectories": 0, "bytes": 0, "names": []}
    with opened(path / "rank_0") as buffer:
        buffer.points.remove("a")
    assert run.json("compact", path / "rank_0")["held_by_points"]["names"] == []
    assert "stay on disk" not in run.out("compact", path / "rank_0")


def test_prune_and_compact(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "run"
    for rank in range(2):
        stored(path / f"rank_{rank}", [rollout(number) for number in range(6)])
    words = ["prune", path, "--where", "outcome = 0"]
    before = len(asked(path, "task"))
    assert "nothing was changed" in run.out(*words)
    assert len(asked(path, "task")) == before
    report = run.json(*words, "--yes")
    assert (report["trajectories"], report["kept"]) == (6, 6)
    assert {row[0] for row in asked(path, "outcome")} == {1.0}
    size = sum(file.stat().st_size for file in path.glob("rank_*/shards/*"))
    run.out("compact", path)
    assert sum(file.stat().st_size for file in path.glob("rank_*/shards/*")) < size
    assert verify(path).sound
    with opened(path / "rank_1"):
        run.err(*words, "--yes")
        run.err("compact", path / "rank_1")
