"""Kill, look, restart, compare: the parent's side."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools import campaigns
from tools.crash.verl.checks import Expected, Promises, check_resumed, look
from tools.crash.verl.layout import ASSETS, journal_path
from tools.crash.verl.moments import MOMENTS, JournalReader, Moment, wait_for
from tools.crash.verl.processes import Driver
from tools.crash.verl.training import compare, trained_of
from trajstore.errors import TrajstoreError


@dataclass
class Result(campaigns.Result):
    """What a campaign found.

    Attributes:
        resumed: steps at which drivers resumed.
    """

    resumed: list[int] = field(default_factory=list)


def run_campaign(
    folder: Path,
    kills: int,
    seed: int,
    progress: Callable[[Result], None] | None = None,
    moments: Sequence[Moment] = MOMENTS,
) -> Result:
    """Kill ``kills`` drivers of one training, and let one more resume; return what was found.

    It ends early when a driver does not get to its moment, for then training does not go on, and when what a kill
    left cannot be read. A training without kills is made too, and the ledgers are compared.

    Args:
        folder: an empty folder; stores, checkpoints, journals and logs are left in it.
        kills: how many.
        seed: of the moments (the machine's timing adds its own chance).
        progress: told after each kill.
        moments: in this order, over and over.
    """
    chance = random.Random(seed)
    result, promises = Result(), Promises()
    expected: Expected | None = None
    for life in range(kills + 1):

        def tell(text: str, life: int = life) -> None:
            result.problems.append(f"driver {life}: {text}")

        moment = None if life == kills else moments[life % len(moments)]
        journal = JournalReader(journal_path(folder, life))
        driver = Driver(folder, life)
        try:
            obstacle = wait_for(moment, driver, journal, chance)
        finally:
            result.counts["processes ended after their driver"] += driver.kill()
        journal.refresh()
        if obstacle is not None:
            tell(obstacle)
        # A driver that came to a later step than its first one has trained that.
        trains = moment is None or min(moment.steps) > 1
        loaded = _take(journal.entries, trains, promises, result, tell)
        if loaded is None:
            break
        if expected is not None:
            check_resumed(loaded, expected, tell)
        try:
            found = look(folder, promises, loaded["run"], tell)
        except (TrajstoreError, OSError, ValueError) as error:
            tell(f"what is left cannot be read: {type(error).__name__}: {error}")
            break
        expected = found.expected
        result.counts["comparisons"] += found.rollouts
        result.counts["acknowledged rollouts"] = len(promises.rollouts)
        if moment is not None:
            result.counts["kills"] += 1
            result.counts["between our cut and verl's checkpoint"] += found.between
            result.counts[f"killed after {journal.phase}"] += 1
        if progress is not None:
            progress(result)
        if obstacle is not None:
            break
    if not result.problems:
        _compare(folder, result)
    return result


def _compare(folder: Path, result: Result) -> None:
    """Train as far without a kill, and compare the ledgers."""
    other = folder / "undisturbed"
    other.mkdir()
    shutil.copytree(folder / ASSETS, other / ASSETS)
    last = max(trained_of(folder).contents.steps)
    journal, driver = JournalReader(journal_path(other, 0)), Driver(other, 0)
    try:
        obstacle = wait_for(Moment("scoring", 0.0, (last + 1,)), driver, journal, random.Random(0))
    finally:
        driver.kill()
    if obstacle is not None:
        result.problems.append(f"undisturbed training: {obstacle}")
        return
    result.counts["steps equal to those of an undisturbed training"] = compare(folder, other, result.problems.append)


def _take(
    entries: Sequence[dict[str, Any]], trains: bool, promises: Promises, result: Result, tell: Callable[[str], None]
) -> dict[str, Any] | None:
    """Take in a driver's journal; return how it resumed, None if it did not get so far.

    Args:
        entries: the journal's.
        trains: whether the driver must have trained a step.
        promises: get what is promised.
        result: gets the steps.
        tell: gets each problem.
    """
    loaded: dict[str, Any] | None = None
    trained = []
    for entry in entries:
        promises.take(entry, tell)
        if entry["event"] == "loaded":
            loaded = entry
            result.resumed.append(entry["step"])
        elif entry["event"] == "phase" and entry["name"] == "trained":
            trained.append(entry["step"])
    result.counts["steps trained"] += len(trained)
    if loaded is not None and (trains or trained) and trained[:1] != [loaded["step"] + 1]:
        tell(f"resumed at step {loaded['step']} and trained {trained}: training does not go on")
    return loaded
