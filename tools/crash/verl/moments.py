"""When a driver is killed: a phase of a step, and how long after the phase began."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.crash.journal import entries
from tools.crash.verl.layout import SAVE_EVERY
from tools.crash.verl.processes import Driver

_START_LIMIT = 900.0
"""Seconds in which a driver must get to its moment."""
_LOOK_EVERY = 0.001


@dataclass(frozen=True)
class Moment:
    """A kind of moment.

    Attributes:
        phase: as the driver notes it; ``ACKNOWLEDGED`` = when rollouts of the step are.
        most: seconds after the phase began at the most, about as long as it takes with the tiny model.
        steps: in which step after resuming; one of these. Checkpoints are in every second step.
    """

    phase: str
    most: float
    steps: tuple[int, ...]


FIRST_CUT = Moment("cut", 0.008, (SAVE_EVERY,))
"""Our cut is there, and verl is writing its own files; the tracker names an older step, or is not there yet."""
CUT = Moment("cut", 0.012, (2 * SAVE_EVERY,))
GENERATION = Moment("generation", 0.5, (3,))
ARRIVED = Moment("arrived", 0.02, (1,))
"""Some rollouts of a step are committed, others are being generated."""
SCORING = Moment("scoring", 0.25, (2, 3))
"""Log-probs are computed, then rollouts are reported and the pool is saved: the writer is at work for a while."""
UPDATE = Moment("update", 0.1, (2, 3))
SAVING = Moment("saving", 0.006, (SAVE_EVERY, 2 * SAVE_EVERY))
"""The stores are flushed and our cut is written."""
SAVED = Moment("saved", 0.02, (SAVE_EVERY,))
MOMENTS = (FIRST_CUT, GENERATION, ARRIVED, UPDATE, CUT, SCORING, SAVING, SAVED)
"""In this order, over and over."""


class JournalReader:
    """Reads what a driver writes while it writes it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.entries: list[dict[str, Any]] = []

    def refresh(self) -> list[dict[str, Any]]:
        """Return the lines that came since the last call. One without its line feed was no promise."""
        fresh = entries(self._path)[len(self.entries) :]
        self.entries += fresh
        return fresh

    @property
    def phase(self) -> str:
        """The phase that was noted last; ``"none"`` if the driver did not get so far."""
        return str(next((entry["name"] for entry in reversed(self.entries) if entry["event"] == "phase"), "none"))


def wait_for(moment: Moment | None, driver: Driver, journal: JournalReader, chance: random.Random) -> str | None:
    """Return when a driver has come to a moment; None, or what went wrong.

    Args:
        moment: None = when one step is trained.
        driver: that runs.
        journal: the driver's.
        chance: for the step, and the time within the phase.
    """
    end = time.monotonic() + _START_LIMIT
    phase = "trained" if moment is None else moment.phase
    target: int | None = None
    step: int | None = None
    while time.monotonic() < end:
        for entry in journal.refresh():
            if entry["event"] == "loaded":
                target = entry["step"] + (1 if moment is None else chance.choice(moment.steps))
                continue
            if entry["event"] == "phase":
                step = entry["step"]
                if target is not None:  # of a step whose rollouts are all reused, none arrives
                    target = max(target, step)
            if target is not None and (entry.get("name", entry["event"]), step) == (phase, target):
                if moment is not None:
                    time.sleep(chance.uniform(0.0, moment.most))
                return None
        if (code := driver.exit_code) is not None:
            return f"the driver ended by itself with exit code {code}: {driver.tail()}"
        time.sleep(_LOOK_EVERY)
    return f"the driver did not get to its moment in {_START_LIMIT:.0f} s: {driver.tail()}"
