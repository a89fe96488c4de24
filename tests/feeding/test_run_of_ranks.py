"""A plain ``torch.distributed`` job: ranks record and learn, in one run directory, and go on from one step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from trajstore import TrajectoryReplayBuffer, run_points
from trajstore.buffer.internals import internals_of
from trajstore.inspection.inspect import inspect
from trajstore.inspection.verify import verify

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, SAVED, KILLED = 6, 3, 5

_RANK = """
import json, os, signal, sys
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from tests.feeding.test_loader import block
from trajstore import TrajectoryReplayBuffer, roll_back_run, save_run_point
from trajstore.sampling import Priorities, WeightedSampler

run, rank, world, meet, killed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
meeting = f"file://{run.parent}/{meet}"
dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=timedelta(seconds=120))
model = torch.nn.Linear(1, 1)
torch.nn.init.ones_(model.weight)
torch.nn.init.zeros_(model.bias)
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
buffer = TrajectoryReplayBuffer(seed=rank, auto_save=True, auto_save_path=run / f"rank_{rank}", sample_window_size=0)
sampler = WeightedSampler(priorities=Priorities())
done, state = roll_back_run(buffer)
if done:
    model.load_state_dict(state["model"])
    buffer.follow(sampler)
    sampler.load_state_dict(state["sampler"])
for step in range((done or 0) + 1, SAVED_AND_ON + 1):
    buffer.add_trajectories([block(100 * rank + step)])
    batch = buffer.sample(16, sampler=sampler)
    loss = (model(batch["rewards"].float().reshape(-1, 1)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == killed and rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    rows = batch["rewards"].reshape(-1).tolist()
    print(json.dumps([step, rows, model.module.weight.item()]), flush=True)
    buffer.update_priorities(sampler, batch.drawn, [value % 7 for value in rows])
    if step == SAVED:
        save_run_point(buffer, step, {"model": model, "sampler": sampler})
buffer.close()
dist.barrier()
dist.destroy_process_group()
"""


def job(run: Path, world: int, meet: str, killed: int, root: Path) -> list[dict[int, list[object]]]:
    """Run a job; return what each rank trained on at each step. ``killed``: step in which its last rank is killed."""
    run.mkdir(parents=True, exist_ok=True)
    text = _RANK.replace("SAVED_AND_ON", str(STEPS)).replace("SAVED", str(SAVED))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", text, str(run), str(rank), str(world), meet, str(killed)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(world)
    ]
    if killed:
        ranks[-1].wait(timeout=400)
        for other in ranks[:-1]:  # as a launcher ends a job of which a rank is gone
            other.send_signal(signal.SIGKILL)
    found = []
    for rank in ranks:
        output, errors = rank.communicate(timeout=400)
        assert rank.returncode == (-signal.SIGKILL if killed else 0), errors
        lines: Sequence[list[object]] = [json.loads(line) for line in output.splitlines()]
        found.append({line[0]: line[1:] for line in lines})
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_record_and_learn_and_go_on_from_one_step(tmp_path: Path, project_root: Path, world: int) -> None:
    expected = job(tmp_path / "whole" / "run", world, "meet", 0, project_root)
    assert all(sorted(rank) == list(range(1, STEPS + 1)) for rank in expected)
    assert len({rank[STEPS][1] for rank in expected}) == 1  # one model

    run = tmp_path / "killed" / "run"
    job(run, world, "meet", KILLED, project_root)
    assert [(point.step, point.is_complete, point.saved_by) for point in run_points(run)] == [(SAVED, True, world)]
    resumed = job(run, world, "meet_again", 0, project_root)
    for rank, of_rank in enumerate(resumed):
        assert sorted(of_rank) == list(range(SAVED + 1, STEPS + 1))
        for step, told in of_rank.items():
            assert told == expected[rank][step]

    with TrajectoryReplayBuffer.open(run) as everything:
        assert len(everything) == world * STEPS
        assert len({one.tobytes() for one in internals_of(everything).trajectory_uuids}) == world * STEPS
        everything.save_checkpoint(tmp_path / "united")
    with TrajectoryReplayBuffer(sample_window_size=0) as reader:
        assert reader.load_checkpoint(run) == 0
        keys = {int(reader.get(number).rewards[0, 0, 0]) // 1000 for number in reader.trajectory_ids.tolist()}
        assert keys == {100 * rank + step for rank in range(world) for step in range(1, STEPS + 1)}
    with TrajectoryReplayBuffer.open(tmp_path / "united") as one:
        assert len(one) == world * STEPS
    assert verify(run).sound
    assert len(inspect(run)["parts"]) == world
    with TrajectoryReplayBuffer.open(run, pin=f"step-{SAVED}") as then:
        assert len(then) == world * SAVED
