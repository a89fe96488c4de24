"""Saved points of stores and runs: save them, list them, read their state, go back to one."""

from trajstore._core.buffer.points import Points
from trajstore._core.buffer.runs import run_points
from trajstore._core.buffer.saved_points import points_at
from trajstore._core.store.rollback import SnapshotChanges
from trajstore._core.store.saved_points import SavedPoint

__all__ = ["Points", "SavedPoint", "SnapshotChanges", "points_at", "run_points"]
