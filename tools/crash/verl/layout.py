"""Where things lie in a campaign's folder, and how often the training saves."""

from __future__ import annotations

from pathlib import Path

from trainer_hooks.verl.cuts import TRACKER_FILE, restorable_cuts

ASSETS = "assets"
CHECKPOINTS = "checkpoints"
SAVE_EVERY = 2
"""Steps from one checkpoint to the next."""
GROUP = 4
"""Rollouts that a task has in a batch."""


def journal_path(folder: Path, life: int) -> Path:
    """Return the journal of a driver."""
    return folder / f"journal_{life:03d}"


def rollouts_path(folder: Path) -> Path:
    """Return the store of all rollouts, among which the pool chooses."""
    return folder / CHECKPOINTS / "trajstore" / "rollouts"


def calls_path(folder: Path, life: int) -> Path:
    """Return the file with the sessions that a driver generated, ``{uid}_{session}`` a line."""
    return folder / f"calls_{life:03d}"


def step_named_by_tracker(folder: Path) -> int | None:
    """Return the step of verl's newest complete checkpoint; None if it has none yet.

    The kill may have come while verl wrote the file, after the checkpoint: the next driver mends it.
    """
    tracker = folder / CHECKPOINTS / TRACKER_FILE
    if not tracker.is_file():
        return None
    text = tracker.read_text()
    return int(text) if text else max(cut.step for cut in restorable_cuts(folder / CHECKPOINTS))


def cut_path(folder: Path, step: int) -> Path:
    """Return our file in verl's checkpoint of a step."""
    return folder / CHECKPOINTS / f"global_step_{step}" / "trajstore.json"


def beginning_path(folder: Path) -> Path:
    """Return our file with the state before the first step."""
    return folder / CHECKPOINTS / "trajstore.json"
