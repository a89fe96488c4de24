"""Imported by the fork server, so that children are at work at once and not busy with loading kernels."""

from __future__ import annotations

import torch

from trajstore import TrajectoryReplayBuffer
from trajstore.formats import get_format
from trajstore.testing.witness import check_batch, witness

torch.set_num_threads(1)  # a child is forked from this process: it must have no threads
get_format("zarr")
_buffer = TrajectoryReplayBuffer(sample_window_size=1)
_buffer.add_trajectories([witness(0), witness(1)])  # the first one leaves memory, for which there is a kernel too
check_batch(_buffer.sample(1))
