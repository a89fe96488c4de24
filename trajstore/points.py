"""Saved points of stores and runs: list them, read their state, go back to one."""

from trajstore._core.buffer.runs import RunPoint, roll_back_run, run_points, save_run_point
from trajstore._core.buffer.saved_points import PointsOfBuffer, saved_points, saved_state
from trajstore._core.store.saved_points import SavedPoint
from trajstore.operations.points import WentTo, go_to

__all__ = [
    "PointsOfBuffer",
    "RunPoint",
    "SavedPoint",
    "WentTo",
    "go_to",
    "roll_back_run",
    "run_points",
    "save_run_point",
    "saved_points",
    "saved_state",
]
