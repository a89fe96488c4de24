"""trajstore: trajectories for reinforcement-learning post-training, kept on disk and sampled at the speed of memory.

Names are loaded on first use, so that ``import trajstore`` and the command line are quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trajstore._core.base.extensions import register
from trajstore._core.base.version import VERSION

if TYPE_CHECKING:
    from trajstore import errors
    from trajstore._core.buffer.annotating import annotate, notes_of
    from trajstore._core.buffer.reader import Reader
    from trajstore._core.buffer.replay_buffer import TrajectoryReplayBuffer
    from trajstore._core.buffer.retention import Retention
    from trajstore._core.sessions.folder import SessionInfo
    from trajstore._core.sessions.session import Session
    from trajstore._core.sessions.sessions import Sessions
    from trajstore._core.sessions.tree import Call
    from trajstore._core.store.notes import Note
    from trajstore._core.writing.options import WriterOptions
    from trajstore.attachments import attach, attached
    from trajstore.builder import EmbodiedRolloutResult
    from trajstore.loader import ReplayLoader, TokenLoader
    from trajstore.mirror import Mirror
    from trajstore.samplers import EpochSampler, GroupSampler, WeightedSampler
    from trajstore.stores import verify
    from trajstore.trajectory import AgentTrajectory, ChunkStepResult, Reward, Trajectory

__version__ = VERSION

__all__ = [
    "AgentTrajectory",
    "Call",
    "ChunkStepResult",
    "EmbodiedRolloutResult",
    "EpochSampler",
    "GroupSampler",
    "Mirror",
    "Note",
    "Reader",
    "ReplayLoader",
    "Retention",
    "Reward",
    "Session",
    "SessionInfo",
    "Sessions",
    "TokenLoader",
    "Trajectory",
    "TrajectoryReplayBuffer",
    "WeightedSampler",
    "WriterOptions",
    "annotate",
    "attach",
    "attached",
    "errors",
    "notes_of",
    "verify",
]

_MODULES = {
    "AgentTrajectory": "trajectory",
    "Call": "_core.sessions.tree",
    "ChunkStepResult": "trajectory",
    "EmbodiedRolloutResult": "builder",
    "EpochSampler": "samplers",
    "GroupSampler": "samplers",
    "Mirror": "mirror",
    "Note": "_core.store.notes",
    "Reader": "_core.buffer.reader",
    "ReplayLoader": "loader",
    "Retention": "_core.buffer.retention",
    "Reward": "trajectory",
    "Session": "_core.sessions.session",
    "SessionInfo": "_core.sessions.folder",
    "Sessions": "_core.sessions.sessions",
    "TokenLoader": "loader",
    "Trajectory": "trajectory",
    "TrajectoryReplayBuffer": "_core.buffer.replay_buffer",
    "WeightedSampler": "samplers",
    "WriterOptions": "_core.writing.options",
    "annotate": "_core.buffer.annotating",
    "attach": "attachments",
    "attached": "attachments",
    "notes_of": "_core.buffer.annotating",
    "verify": "stores",
}

# Modules above the core that it uses; imported when they are asked for.
register("mirror options", "trajstore.remote.mirror.options")
register("mirrors", "trajstore.remote.mirror.mirror")
register("queries", "trajstore.query.reader")
register("remote directory", "trajstore.remote.directory")


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("trajstore.errors")
    if name in _MODULES:
        return getattr(importlib.import_module(f"trajstore.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'trajstore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
