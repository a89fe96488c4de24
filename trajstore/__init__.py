"""trajstore: trajectories for reinforcement-learning post-training, kept on disk and sampled at the speed of memory.

Names are loaded on first use, so that ``import trajstore`` and the command line are quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trajstore import errors
    from trajstore.attachments import attach, attached, filled_rows
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
    "attach",
    "attached",
    "errors",
    "filled_rows",
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
    "Mirror": "remote.mirror.options",
    "MirrorState": "remote.mirror.options",
    "Note": "core.store.notes",
    "Reader": "core.buffer.reader",
    "Retention": "core.buffer.retention",
    "Reward": "trajectory",
    "RunPoint": "core.buffer.runs",
    "SavedPoint": "core.store.saved_points",
    "Trajectory": "trajectory",
    "TrajectoryReplayBuffer": "core.buffer.replay_buffer",
    "WriterOptions": "core.writing.options",
    "annotate": "core.buffer.annotating",
    "attach": "attachments",
    "attached": "attachments",
    "filled_rows": "attachments",
    "notes_of": "core.buffer.annotating",
    "roll_back_run": "core.buffer.runs",
    "run_points": "core.buffer.runs",
    "save_run_point": "core.buffer.runs",
    "saved_points": "core.buffer.saved_points",
    "saved_state": "core.buffer.saved_points",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("trajstore.errors")
    if name in _MODULES:
        return getattr(importlib.import_module(f"trajstore.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'trajstore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
