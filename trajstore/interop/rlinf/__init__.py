"""RLinf's names on trajstore's store, for code written for RLinf.

``from trajstore.interop.rlinf import TrajectoryReplayBuffer, Trajectory`` replaces the imports from
``rlinf.data.storage.replay`` and ``rlinf.data.schema``. It provides trajstore's classes with the additional members
that RLinf's workers and tools call. See ``docs/howto/rlinf.md``.

``layout`` and ``source`` read and write RLinf's directories; ``guard`` keeps writers out of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trajstore._core.feeding.datasets import (
        PreloadReplayBufferDataset,
        ReplayBufferDataset,
        replay_buffer_collate_fn,
    )
    from trajstore.builder import EmbodiedRolloutResult
    from trajstore.interop.rlinf.buffer import TrajectoryReplayBuffer
    from trajstore.interop.rlinf.priority_store import PriorityStore
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

_MODULES = {
    "ChunkStepResult": "trajstore.trajectory",
    "EmbodiedRolloutResult": "trajstore.builder",
    "EmbodiedTrajectoryBuilder": "trajstore.interop.rlinf.trajectory",
    "PreloadReplayBufferDataset": "trajstore._core.feeding.datasets",
    "PriorityStore": "trajstore.interop.rlinf.priority_store",
    "ReplayBufferDataset": "trajstore._core.feeding.datasets",
    "Trajectory": "trajstore.interop.rlinf.trajectory",
    "TrajectoryReplayBuffer": "trajstore.interop.rlinf.buffer",
    "convert_trajectories_to_batch": "trajstore.interop.rlinf.trajectory",
    "get_model_weights_id": "trajstore.trajectory",
    "replay_buffer_collate_fn": "trajstore._core.feeding.datasets",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'trajstore.interop.rlinf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
