"""The loader among processes: real ranks that talk over gloo, workers that are spawned or killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from tests.feeding.test_loader import fill, reader, rewards
from trajstore.feeding import ReplayLoader

_RANK = """
import json, sys
import torch
import torch.distributed as dist
from tests.feeding.test_loader import reader
from trajstore.feeding import ReplayLoader
from pathlib import Path

folder, rank, world, state = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{world}", rank=rank, world_size=world)
loader = ReplayLoader(reader(folder / "store"), 16, rank=(rank, world))
if state != "none":
    loader.load_state_dict(torch.load(state, weights_only=False))
for _ in range(4):
    parts = [None] * world
    dist.all_gather_object(parts, next(loader)["rewards"].reshape(-1).tolist())
    if rank == 0:
        print(json.dumps([value for part in parts for value in part]), flush=True)
if rank == world - 1:
    torch.save(loader.state_dict(), folder / f"state-{world}")
dist.barrier()
loader.close()
"""


def _run(folder: Path, world: int, state: str, root: Path) -> list[list[float]]:
    command = [sys.executable, "-c", _RANK, str(folder)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world), state],
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        for rank in range(world)
    ]
    output = [rank.communicate(timeout=400)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world
    return [json.loads(line) for line in output[0].splitlines()]


def test_ranks_that_talk_over_gloo_resume_on_another_number_of_them(tmp_path: Path, project_root: Path) -> None:
    fill(tmp_path / "store", range(10)).close()
    with ReplayLoader(reader(tmp_path / "store"), 16) as alone:
        expected = [sorted(rewards(next(alone))) for _ in range(8)]
    first = _run(tmp_path, 2, "none", project_root)
    second = _run(tmp_path, 3, str(tmp_path / "state-2"), project_root)
    assert [sorted(batch) for batch in first + second] == expected


def test_workers_that_are_spawned_give_the_same_sequence(tmp_path: Path) -> None:
    fill(tmp_path / "store", range(10)).close()
    with ReplayLoader(reader(tmp_path / "store"), 8) as plain:
        expected = [rewards(next(plain)) for _ in range(4)]
    dataset = ReplayLoader(reader(tmp_path / "store"), 8)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    batches = iter(loader)
    assert [rewards(next(batches)) for _ in range(4)] == expected


def test_a_worker_that_is_killed_is_an_error_and_no_hang(tmp_path: Path) -> None:
    fill(tmp_path / "store", range(10)).close()
    dataset = ReplayLoader(reader(tmp_path / "store"), 8)
    batches = iter(DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=60))
    next(batches)
    os.kill(batches._workers[0].pid, signal.SIGKILL)  # type: ignore[attr-defined]
    with pytest.raises((RuntimeError, OSError), match=r"exited unexpectedly|killed|reset by peer"):
        list(zip(range(20), batches, strict=False))


def test_a_buffer_that_is_closed_under_the_loader_can_still_be_read(tmp_path: Path) -> None:
    """What a closed buffer shows stays readable, so the loader goes on; nothing hangs, and no descriptor is left."""
    buffer = fill(tmp_path / "store", range(10))
    before = len(os.listdir("/proc/self/fd"))
    loader = ReplayLoader(buffer, 8)
    next(loader)
    buffer.close()
    assert all(len(rewards(next(loader))) == 8 for _ in range(5))
    loader.close()
    assert len(os.listdir("/proc/self/fd")) <= before
