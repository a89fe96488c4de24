"""trajstore: trajectories for reinforcement-learning post-training, kept on disk and sampled at the speed of memory.

Names are loaded on first use, so that ``import trajstore`` and the command line are quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trajstore import errors
    from trajstore.builder import EmbodiedRolloutResult
    from trajstore.core.buffer.annotating import annotate, notes_of
    from trajstore.core.buffer.reader import Reader
    from trajstore.core.buffer.replay_buffer import TrajectoryReplayBuffer
    from trajstore.core.buffer.retention import Retention
    from trajstore.core.buffer.runs import RunPoint, roll_back_run, run_points, save_run_point
    from trajstore.core.buffer.saved_points import saved_points, saved_state
    from trajstore.core.store.notes import Note
    from trajstore.core.store.saved_points import SavedPoint
    from trajstore.core.writing.options import WriterOptions
    from trajstore.remote.mirror.options import Mirror, MirrorState
    from trajstore.trajectory import AgentTrajectory, ChunkStepResult, Reward, Trajectory

__version__ = "0.1.0"

__all__ = [
    "AgentTrajectory",
    "ChunkStepResult",
    "EmbodiedRolloutResult",
    "Mirror",
    "MirrorState",
    "Note",
    "Reader",
    "Retention",
    "Reward",
    "RunPoint",
    "SavedPoint",
    "Trajectory",
    "TrajectoryReplayBuffer",
    "WriterOptions",
    "annotate",
    "errors",
    "notes_of",
    "roll_back_run",
    "run_points",
    "save_run_point",
    "saved_points",
    "saved_state",
]

_MODULES = {
    "AgentTrajectory": "trajectory",
    "ChunkStepResult": "trajectory",
    "EmbodiedRolloutResult": "builder",
    "Mirror": "mirroring.options",
    "MirrorState": "mirroring.options",
    "Note": "store.notes",
    "Reader": "buffer.reader",
    "Retention": "buffer.retention",
    "Reward": "trajectory",
    "RunPoint": "buffer.runs",
    "SavedPoint": "store.saved_points",
    "Trajectory": "trajectory",
    "TrajectoryReplayBuffer": "buffer.replay_buffer",
    "WriterOptions": "writing.options",
    "annotate": "buffer.annotating",
    "notes_of": "buffer.annotating",
    "roll_back_run": "buffer.runs",
    "run_points": "buffer.runs",
    "save_run_point": "buffer.runs",
    "saved_points": "buffer.saved_points",
    "saved_state": "buffer.saved_points",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("trajstore.errors")
    if name in _MODULES:
        return getattr(importlib.import_module(f"trajstore.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'trajstore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
