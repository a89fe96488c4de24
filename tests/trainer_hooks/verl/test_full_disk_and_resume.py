"""Sessions on a full disk, and resumed sessions."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import ray
import torch
import transfer_queue as tq

from tests.support.faults import FaultPlan, failing_disk
from tests.trainer_hooks.verl import plane
from tests.trainer_hooks.verl.builders import fresh_row, new_prompts
from tests.trainer_hooks.verl.plane import TASKS, MakeSession, N, rollouts
from trainer_hooks.transfer_queue import RecorderHandle
from trainer_hooks.verl.dataplane import prompts_under_way
from trainer_hooks.verl.histories import TRAINING
from trainer_hooks.verl.session import ReplaySession
from trainer_hooks.verl.trained import loss_terms
from trajstore import TrajectoryReplayBuffer, ledger
from trajstore.ledger import TrainedStep

pytestmark = pytest.mark.usefixtures("data_plane")

# ---- a disk that is full ----


def test_training_goes_on_without_a_disk_and_recording_when_there_is_space_again(
    make_session: MakeSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trajstore._core.writing.queue._PAUSES", (0.01,))
    session = make_session(on_error="warn")
    recorder = RecorderHandle().actor
    plan = FaultPlan(0, "ENOSPC", lasting=True)
    ray.get(recorder.__ray_call__.remote(plane.fill_disk_of))
    try:
        with failing_disk(plan):
            for step in range(1, 5):
                assert sorted(task_plan.task for task_plan in session.plan(TASKS, 0.5, step)) == TASKS
                plane.train(session, rollouts(f"u{step}", N, index=step - 1), step)
                session.save(tmp_path / f"global_step_{step}", step)
            plan.heal()
            ray.get(recorder.__ray_call__.remote(plane.heal_disk_of))
            _, figures = plane.train(session, rollouts("after", N, index=0), 5)
            session.close()
    finally:
        ray.get(recorder.__ray_call__.remote(plane.restore_disk_of))
    assert "rollouts are not recorded, training goes on" in caplog.text
    assert "No space left" in caplog.text
    stored = plane.recorded(tmp_path)
    assert len(stored) == 5 * N
    assert all(rollout.metadata["trained"] and rollout.old_log_probs is not None for rollout in stored)
    assert figures["recording/lost"] == 0


def second_step(session: ReplaySession) -> dict[str, float]:
    """Record a step of rollouts that are new to the pool; return its figures."""
    rows = [
        fresh_row(f"second{index}", number, response=3 + number, score=float(number < 2), index=index, seed=100 + index)
        for index in range(len(TASKS))
        for number in range(N)
    ]
    return plane.train(session, rows, 2)[1]


# ---- prompts in flight ----


def test_histories_of_dropped_prompts_are_forgotten(make_session: MakeSession) -> None:
    session = make_session()
    plane.fill(session)
    held = plane.planned(session)
    plane.put_prompts("alive", "dropped", status="running")
    session.expect({"alive": held["sums:0"], "dropped": held["sums:1"]})
    tq.kv_clear(keys=["dropped"], partition_id=TRAINING)
    assert prompts_under_way(TRAINING) == {"alive"}
    session.expect({"next": held["sums:2"]})
    joined = session.join(
        plane.put([fresh_row(uid, 0, index=index) for index, uid in enumerate(("alive", "dropped", "next"))])
    )
    assert plane.sessions(joined) == {"alive": 2, "dropped": 1, "next": 2}


def test_what_is_expected_goes_with_the_checkpoint(make_session: MakeSession, tmp_path: Path) -> None:
    session = make_session()
    plane.fill(session)
    (history,) = plane.planned(session)["sums:1"]
    session.expect({"u": (history,)})
    folder = tmp_path / "global_step_1"
    session.save(folder, 1)
    session.close()

    resumed = make_session(run="run-b")
    resumed.resume(folder, 1)
    joined = resumed.join(plane.put(rollouts("u", 2, index=1)))
    assert joined.keys[-1] == "u_1000_0"
    assert torch.equal(plane.column(joined, "input_ids")["u_1000_0"], history.input_ids.long())


def test_rollouts_recorded_after_the_checkpoint_are_not_in_the_pool(make_session: MakeSession, tmp_path: Path) -> None:
    session = make_session()
    plane.fill(session)
    folder = tmp_path / "global_step_1"
    session.save(folder, 1)
    session.plan(TASKS, 0.5, 2)
    assert second_step(session)["experience_replay/pool_trajectories"] == 16
    session.close()

    resumed = make_session()
    resumed.resume(folder, 1)
    # The third group repeats the first group's rollouts, so the pool gains nothing.
    _, figures = plane.train(resumed, rollouts("third", N, index=0), 2)
    assert figures["experience_replay/pool_trajectories"] == 8


@pytest.mark.parametrize("checkpoint", [True, False], ids=["checkpoint without a cut", "no checkpoint"])
def test_what_the_pool_had_not_committed_yet(checkpoint: bool, make_session: MakeSession, tmp_path: Path) -> None:
    """A crash between the commit of rollouts and that of the point that names them."""
    session = make_session()
    plane.fill(session)
    session.close()
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "run-a" / "rollouts") as buffer:
        for point in buffer.points.saved:
            buffer.points.remove(point.name)

    resumed = make_session()
    resumed.resume(tmp_path / "global_step_1" if checkpoint else None, int(checkpoint))
    assert not any(task_plan.histories for task_plan in resumed.plan(TASKS, 0.5, 2))


def test_before_the_first_checkpoint_the_pool_is_as_at_the_beginning(
    make_session: MakeSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also after a second crash. A pool without its first point stays as it is."""
    session = make_session()
    session.resume(None, 0)
    plane.fill(session)
    session.close()

    def known(step: int) -> int:
        resumed = make_session()
        resumed.resume(None, 0)
        found = sum(map(bool, (task_plan.histories for task_plan in resumed.plan(TASKS, 0.5, step))))
        if not found:
            plane.train(resumed, rollouts("again", N, 0), 1)
        resumed.close()
        return found

    assert [known(2), known(2)] == [0, 0]
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "run-a" / "rollouts") as buffer:
        first = next((snapshot.name for snapshot in buffer.points.snapshots if snapshot.kind == "point"), None)
        if first is not None:
            buffer.points.remove(first)
    known(2)
    assert "its state before step 1 was removed" in caplog.text


@pytest.mark.parametrize("checkpoint", [0, 1])
@pytest.mark.parametrize("reported", [False, True])
def test_rollouts_of_an_interrupted_step_are_reused_and_not_in_the_pool(
    checkpoint: int, reported: bool, make_session: MakeSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash after the pool committed a step; the rollouts' store has its report, or not.

    The next process is killed while it generates, and the one after it resumes.
    """
    folder, weights, step = tmp_path / "global_step_1", (checkpoint, checkpoint), checkpoint + 1
    session = make_session()
    if checkpoint:
        session.save(folder, 1)
    set_values = RecorderHandle.set_values
    if not reported:
        monkeypatch.setattr(RecorderHandle, "set_values", lambda *_: None)
    plane.train(session, rollouts("scored", N, 0, weights=weights), step)
    plane.put(rollouts("arrived", 2, 1, weights=weights))
    session.close()
    monkeypatch.setattr(RecorderHandle, "set_values", set_values)

    resumed = make_session()
    resumed.resume(folder if checkpoint else None, checkpoint)
    (history,) = [planned.histories for planned in resumed.plan(TASKS, 0.5, step) if planned.task == "sums:0"]
    assert not history
    assert list(resumed.reuse.named(new_prompts(0, 1), step)["uid"]) == ["scored", "arrived"]


def test_the_ledger_has_each_step(make_session: MakeSession, tmp_path: Path) -> None:

    def train(session: ReplaySession, uid: str, count: int, step: int, value: float) -> None:
        joined, _ = plane.train(
            session, [row for i in range(4) for row in rollouts(f"{uid}{i}", count, i)], step, value
        )
        advantages = [torch.full((tag["response_len"],), 0.5 - tag["response_len"]) for tag in joined.tags]
        plane.write_column(joined.keys, TRAINING, "advantages", advantages)
        session.trained(joined, step, bypass=False, loss={"pg_loss": 0.5}, data={"rows": 4}, seeds={"data": 1})
        tq.kv_clear(keys=joined.keys, partition_id=TRAINING)

    def replay(session: ReplaySession, uid: str) -> TrainedStep:
        session.expect({f"{uid}{index}": plane.planned(session)[task] for index, task in enumerate(TASKS)})
        train(session, uid, N - 1, 2, -0.5)
        return ledger.read(tmp_path / "run-a" / "rollouts" / "ledger").steps[2]

    session = make_session()
    train(session, "first", N, 1, -2.0)
    session.save(tmp_path / "global_step_1", 1)
    second = replay(session, "u")
    session.close()
    first = ledger.read(tmp_path / "run-a" / "rollouts" / "ledger").steps[1]
    assert first.tasks == second.tasks == tuple(TASKS)
    assert (first.policy_before, first.policy_after, second.loss, second.seeds) == (1, 2, {"pg_loss": 0.5}, {"data": 1})
    stored = {rollout.rollout_id: number for number, rollout in enumerate(plane.recorded(tmp_path))}
    assert first.rows["trajectory"].tolist() == [stored[f"first{i}_{j}_0"] for i in range(4) for j in range(N)]
    assert (first.rows["ratio"] == 1.0).all()
    assert first.rows["tokens"].tolist() == [2, 2, 3, 4] * 4, "one token of longer responses is not the model's"
    assert first.rows["advantage"].tolist() == [-1.5, -2.5, -3.5, -4.5] * 4
    replayed = second.rows[second.rows["replayed"] == 1]
    assert replayed["group"].tolist() == [0, 1, 2, 3]
    assert set(replayed["trajectory"]) <= {stored[f"first{i}_{j}_0"] for i in range(4) for j in range(2)}
    assert replayed["ratio"] == pytest.approx(math.exp(1.5))

    resumed = make_session(run="run-a")
    with pytest.warns(UserWarning, match="1 step after step 1 will be replaced"):
        resumed.resume(tmp_path / "global_step_1", 1)
    again = replay(resumed, "v")
    names = [name for name in again.rows.dtype.names if name != "trajectory"]
    assert (again.rows[names] == second.rows[names]).all()
    assert again.rows["trajectory"][again.rows["replayed"] == 1].tolist() == replayed["trajectory"].tolist()


def test_the_ledger_has_losses_that_are_not_finite() -> None:
    terms = loss_terms({"actor/pg_loss": math.nan, "actor/lr": 0.1, "actor/perf/mfu": 0.5, "critic/score": 1.0})
    assert (sorted(terms), math.isnan(terms["pg_loss"])) == (["lr", "pg_loss"], True)
