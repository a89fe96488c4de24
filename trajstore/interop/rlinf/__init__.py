"""RLinf's names on trajstore's store, for code written for RLinf.

``from trajstore.interop.rlinf import TrajectoryReplayBuffer, Trajectory`` replaces the imports from
``rlinf.data.storage.replay`` and ``rlinf.data.schema``. It provides trajstore's classes with the additional members
that RLinf's workers and tools call. See ``docs/howto/rlinf.md``.
"""

from __future__ import annotations

from trajstore._core.feeding.datasets import PreloadReplayBufferDataset, ReplayBufferDataset, replay_buffer_collate_fn
from trajstore.builder import EmbodiedRolloutResult
from trajstore.interop.rlinf.buffer import PriorityStore, TrajectoryReplayBuffer
from trajstore.interop.rlinf.trajectory import EmbodiedTrajectoryBuilder, Trajectory, convert_trajectories_to_batch
from trajstore.trajectory import ChunkStepResult, get_model_weights_id

__all__ = [
    "ChunkStepResult",
    "EmbodiedRolloutResult",
    "EmbodiedTrajectoryBuilder",
    "PreloadReplayBufferDataset",
    "PriorityStore",
    "ReplayBufferDataset",
    "Trajectory",
    "TrajectoryReplayBuffer",
    "convert_trajectories_to_batch",
    "get_model_weights_id",
    "replay_buffer_collate_fn",
]
