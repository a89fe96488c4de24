"""One saved point over all ranks of a run: complete once every rank has it, restored together."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.stateful.places import Ranks
from tests.support.witness import check_trajectory, witness
from trajstore import TrajectoryReplayBuffer
from trajstore.cli import main
from trajstore.errors import ConfigurationError, StoreError, StoreNotFoundError, StoreWriteError
from trajstore.operations.inspect import inspect
from trajstore.operations.verify import verify
from trajstore.points import points_at, run_points

RANKS = 3


def listing(run: Path) -> list[tuple[Any, ...]]:
    """Return step, number of ranks, lacking ranks and trajectories of a run's saved points."""
    return [(point.step, point.ranks, point.lacking, point.trajectories) for point in points_at(run).saved]


def newest(run: Path, ranks: int) -> Any:
    """Return the step at which a job of several ranks goes on, or the error that each of them raises."""

    def look(rank: int) -> int | None:
        with open_rank(run, rank) as buffer:
            return run_points(buffer).newest()

    results = Ranks(ranks, None, lambda *_: None).call(look)
    assert len(set(map(str, results))) == 1
    return results[0]


def join(folder: Path, name: str, rank: int) -> None:
    """Join a process group as a rank."""
    import torch.distributed as dist

    store = dist.FileStore(str(folder / name), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=600))


def open_rank(run: Path, rank: int) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(seed=rank, auto_save=True, auto_save_path=run / f"rank_{rank}", sample_window_size=0)


def record(run: Path, rank: int, results: Any) -> None:
    """Record four steps; rank 1 is killed in the third, before it saves."""
    join(run.parent, "first", rank)
    buffer = open_rank(run, rank)
    points = run_points(buffer)
    assert points.newest() is None  # a new run, whichever rank opens its store last
    for step in range(1, 5):
        buffer.add_trajectories([witness(100 * step + 10 * rank + k) for k in range(rank + 1)])
        if step == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            points.save(step, {"step": step, "rank": rank}, keep=2)
        except StoreWriteError as error:
            results.put((rank, step, str(error)))
            return


def go_on(run: Path, rank: int, results: Any) -> None:
    """Roll back to the newest point that every rank has, and save two more."""
    join(run.parent, "second", rank)
    with open_rank(run, rank) as buffer:
        points = run_points(buffer)
        step = points.newest()
        assert step is not None
        state = points.go_to(step)
        keys = sorted(check_trajectory(buffer.get(trajectory_id)) for trajectory_id in buffer.trajectory_ids.tolist())
        results.put((rank, step, state, keys))
        for step in (3, 4):
            buffer.add_trajectories([witness(1000 * step + rank)])
            points.save(step, {"step": step}, keep=2)


def start(target: Any, run: Path) -> tuple[list[Any], Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch.distributed", "trajstore._core.buffer.runs", __name__]
    )  # saves six imports of torch
    results = context.Queue()
    children = [context.Process(target=target, args=(run, rank, results)) for rank in range(RANKS)]
    for child in children:
        child.start()
    return children, results


def test_a_rank_that_is_killed_between_leaves_the_point_incomplete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    children, results = start(record, run)
    errors = {rank: (step, text) for rank, step, text in (results.get(timeout=600) for _ in range(RANKS - 1))}
    for child in children:
        child.join()
    assert errors.keys() == {0, 2}
    assert all(step == 3 and "a rank does not answer" in text for step, text in errors.values())
    assert listing(run) == [(1, RANKS, (), 6), (2, RANKS, (), 12), (3, RANKS, (1,), 3 + 9)]
    sentence = "the saved point of step 3 is incomplete: of 3 ranks, it is not in rank_1"
    verification = verify(run)
    assert verification.sound
    assert verification.notes == [sentence]
    damaged = Path(shutil.copytree(run, tmp_path / "damaged"))
    (damaged / "rank_0" / "metadata.json").write_text("no metadata")
    assert verify(damaged).notes == [sentence], "whether rank_0 has the points is not known"
    assert inspect(run)["run_points"][2]["lacking"] == [1]
    assert main(["inspect", str(run)]) == 0
    assert "lacking" in capsys.readouterr().out
    with pytest.raises(StoreNotFoundError, match=f"{sentence}; complete are: 1, 2"):
        points_at(run).go_to(3)
    with pytest.raises(StoreNotFoundError, match="no saved point of step 3"):
        TrajectoryReplayBuffer.open(run, pin="step-3")
    with TrajectoryReplayBuffer.open(run, pin="step-2") as reader:
        assert len(reader) == 12

    lost = Path(shutil.copytree(run, tmp_path / "lost"))
    shutil.rmtree(lost / "rank_1")
    assert "no saved point is complete, of 3: rank_1 lacks some" in str(newest(lost, RANKS))

    children, results = start(go_on, run)
    answers = {rank: rest for rank, *rest in (results.get(timeout=600) for _ in range(RANKS))}
    for child in children:
        child.join()
        assert child.exitcode == 0
    for rank, (step, state, keys) in answers.items():
        assert (step, state) == (2, {"step": 2, "rank": rank})
        assert keys == sorted(100 * step + 10 * rank + k for step in (1, 2) for k in range(rank + 1))
    assert listing(run) == [(3, RANKS, (), 15), (4, RANKS, (), 18)]
    assert verify(run).sound
    assert sum(change.trajectories for change in points_at(run).changes(3)) == 15
    assert points_at(run).go_to(3) == {"step": 3}
    with TrajectoryReplayBuffer.open(run) as everything:
        assert len(everything) == 15


def begin(run: Path, rank: int, told: Any) -> None:
    """Run the first step; rank 0 is killed where the file ``killed`` says, after the others have saved."""
    import torch.distributed as dist

    point = (run.parent / "killed").read_text()
    join(run.parent, f"begin {point}", rank)
    buffer = open_rank(run, rank)
    points = run_points(buffer)
    assert points.newest() is None
    if point != "opened":
        buffer.add_trajectories([witness(rank)])
        points.save(1)
    elif rank:
        buffer.add_trajectories([witness(rank)])
        buffer._own_store.save(1, {}, RANKS)
    dist.barrier()
    if point and not rank:
        os.kill(os.getpid(), signal.SIGKILL)
    buffer.close()


def begun(run: Path, point: str) -> list[int | None]:
    """Return the exit codes of the ranks of a job that is killed at a point."""
    (run.parent / "killed").write_text(point)
    children, _ = start(begin, run)
    for child in children:
        child.join()
    return [child.exitcode for child in children]


def test_a_job_killed_in_its_first_step_starts_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert begun(run, "opened") == [-signal.SIGKILL, 0, 0]
    assert begun(run, "") == [0, 0, 0]
    assert listing(run) == [(1, RANKS, (), 5)]
    assert verify(run).sound

    for rank in range(2):
        shutil.rmtree(run / f"rank_{rank}")  # lost, and another store begins in its place
    assert "rank_0, rank_1, so a store was lost" in str(newest(run, RANKS))


@pytest.mark.parametrize("begun", ["empty", "absent", "filled"])
def test_the_only_point_of_a_run_whose_store_was_lost_is_not_taken_for_that_of_a_killed_job(
    tmp_path: Path, begun: str
) -> None:
    with open_rank(tmp_path, 0) as buffer:
        buffer.add_trajectories([witness(1)])
        buffer._own_store.save(1, {}, 2)
    if begun != "absent":
        with open_rank(tmp_path, 1) as buffer:
            buffer.add_trajectories([witness(2)] if begun == "filled" else [])
    if begun == "filled":  # killed while saving
        assert newest(tmp_path, 2) is None
    else:
        assert "nothing was ever added to rank_1, so a store was lost" in str(newest(tmp_path, 2))


def test_what_is_no_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    with open_rank(tmp_path, 0) as buffer:
        with pytest.raises(ConfigurationError, match="init first"):
            run_points(buffer)
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_rank", lambda group: 1)
        monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
        with pytest.raises(ConfigurationError, match="rank 1 of 2 writes to a folder rank_1"):
            run_points(buffer)
    with pytest.raises(StoreError, match="no store of its own"):
        run_points(TrajectoryReplayBuffer())
    with pytest.raises(StoreNotFoundError):
        points_at(tmp_path / "nowhere")


def test_another_number_of_ranks_does_not_begin_anew_in_an_old_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A point of two ranks is rejected by three, and by a single one."""
    for rank in range(2):
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / f"rank_{rank}") as buffer:
            buffer.add_trajectories([witness(rank)])
            buffer._own_store.save(10, {}, 2)
            buffer._own_store.save(20, {}, 2)
            if rank == 0:
                buffer._own_store.save(30, {}, 2)  # rank 1 was killed before saving
    assert newest(tmp_path, 2) == 20
    for ranks, point in ((1, "step-"), (3, "step-20")):  # one alone cannot know what the other one has
        refusal = str(newest(tmp_path, ranks))
        assert all(part in refusal for part in ("2 ranks saved", f"{ranks} now", "start a new run", point))
        assert ("rank_2 and above are not part of it: delete them if they are empty" in refusal) == (ranks == 3)
    assert [point.lacking for point in points_at(tmp_path).saved] == [(), (), (1,)], "rank_2 is not part of the points"
    with TrajectoryReplayBuffer.open(tmp_path, pin="step-20") as reader:
        assert len(reader) == 2
    assert "rank_2 is skipped: 2 ranks saved step-20 together" in caplog.text
    assert main(["rollback", str(tmp_path), "--step", "10"]) == 0
    assert "rank_2: is skipped: it is empty, and 2 ranks saved the point" in caplog.text
