"""Imported by the fork server, so that children are at work at once and not busy with loading modules and kernels.

A child that may be interrupted, or whose memory is watched, imports it too before it says that it is ready.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import torch

from tests.support.witness import check_batch, check_trajectory, witness
from trajstore import TrajectoryReplayBuffer
from trajstore._core.base.machine_code import packing_kernels
from trajstore._core.formats import FORMATS, get_format
from trajstore._core.sampling.tree import SumTree
from trajstore.operations.inspect import inspect
from trajstore.operations.verify import verify


def _use(folder: Path, form: str) -> None:
    """Do with a store what children do."""
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=folder / "store", trajectory_format=form) as buffer:
        buffer.add_trajectories([witness(0)])
        buffer.add_trajectories([witness(key) for key in range(1, 20)])
        buffer.flush()
        buffer.evict([1])
        buffer.points.pin("pin")
        buffer.points.remove("pin")
        check_batch(buffer.sample(8))
        buffer.save_checkpoint(folder / "checkpoint")
    with TrajectoryReplayBuffer(sample_window_size=0, enable_cache=False) as reader:
        reader.load_checkpoint(folder / "store")
        check_batch(reader.sample(8))
        check_trajectory(reader.get(0))
    verify(folder / "store")
    inspect(folder / "store")


def _use_kernels() -> None:
    """Load and call what a small store does not need."""
    packing_kernels._load()
    with TrajectoryReplayBuffer(sample_window_size=1) as buffer:
        buffer.add_trajectories([witness(0), witness(1)])  # the first one leaves memory
        check_batch(buffer.sample(1))
    tree = SumTree(40)
    tree.set(np.arange(3), np.ones(3))
    tree.total_from(2)
    tree.find(np.array([0.5]))
    tree.replace(np.ones(3), 40)


torch.set_num_threads(1)  # a child is forked from this process: it must have no threads
# Torch renews its thread pool at the first use in a child; threads that do so at once get "Invalid thread pool".
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
for _form in list(FORMATS):
    get_format(_form)
    with tempfile.TemporaryDirectory() as _folder:
        _use(Path(_folder), _form)
_use_kernels()
