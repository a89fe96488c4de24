"""Stores whose content is known, for the commands to look into."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from trajstore import Trajectory, TrajectoryReplayBuffer

Run = Callable[..., tuple[int, str, str]]
"""Runs a command line; returns exit code, standard output, standard error."""

STEPS, ENVIRONMENTS = 6, 3


def make_rollout(version: int) -> Trajectory:
    """Rewards 1 everywhere; environment 0 ends an episode at step 4, and every environment at step 6."""
    dones = torch.zeros(STEPS, ENVIRONMENTS, 1, dtype=torch.bool)
    dones[3, 0] = True
    dones[-1] = True
    return Trajectory(
        max_episode_length=100,
        actions=torch.full((STEPS, ENVIRONMENTS, 2), float(version)),
        rewards=torch.ones(STEPS, ENVIRONMENTS, 1),
        dones=dones,
        versions=torch.full((STEPS, ENVIRONMENTS, 1), float(version)),
        curr_obs={"states": torch.arange(STEPS * ENVIRONMENTS, dtype=torch.float32).reshape(STEPS, ENVIRONMENTS, 1)},
    )


def write_store(path: Path, versions: range, trajectory_format: str = "pt") -> Path:
    with TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=str(path), trajectory_format=trajectory_format
    ) as buffer:
        buffer.add_trajectories([make_rollout(version) for version in versions])
        buffer.flush()
    return path
