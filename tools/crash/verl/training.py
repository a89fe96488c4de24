"""Checks the ledger of a campaign, and compares it with that of an undisturbed training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.ledgers import first_unlike
from tools.crash.verl.layout import rollouts_path
from trainer_hooks.verl.arrival import recorded_rollouts
from trajstore import AgentTrajectory, TrajectoryReplayBuffer, ledger
from trajstore.errors import StoreNotFoundError
from trajstore.ledger import LedgerContents, TrainedStep

TOLERANCE = 1e-4
"""Of two trainings: rows arrive in any order, and float32 sums depend on the order."""


@dataclass(frozen=True)
class Trained:
    """The ledger of a training, and its rollouts by id."""

    contents: LedgerContents
    rollouts: Mapping[int, AgentTrajectory]


def trained_of(folder: Path) -> Trained:
    """Return the ledger and the rollouts of a training."""
    with TrajectoryReplayBuffer.open(rollouts_path(folder)) as reader:
        rollouts = dict(zip(reader.trajectory_ids.tolist(), recorded_rollouts(reader), strict=True))
    return Trained(_contents(folder), rollouts)


def _contents(folder: Path) -> LedgerContents:
    return ledger.read(rollouts_path(folder) / "ledger")


def fresh_of(step: TrainedStep) -> list[int]:
    """Return the ids of the rows that are not replayed."""
    fresh: list[int] = step.rows["trajectory"][step.rows["replayed"] == 0].tolist()
    return fresh


def check_ledger(
    folder: Path, present: Container[int], step: int, finished: Mapping[int, set[int]], report: Callable[[str], None]
) -> None:
    """Check what was trained: every step once, no rollout twice, and none generated again that had finished.

    Args:
        folder: the campaign's.
        present: ids of the recorded rollouts.
        step: of the newest checkpoint; 0 = none.
        finished: rollouts of interrupted steps, all of which the repeated step trains.
        report: gets each problem.
    """
    try:
        contents = _contents(folder)
    except StoreNotFoundError:
        if step:
            report(f"there is a checkpoint of step {step} and no ledger")
        return
    # A kill may interrupt the last record.
    for problem in ledger.audit(dataclasses.replace(contents, torn=0)).problems:
        report(f"ledger: {problem}")
    if list(contents.steps) != list(range(1, len(contents.steps) + 1)) or len(contents.steps) < step:
        report(f"the ledger has steps {list(contents.steps)}, the checkpoint is of step {step}")
    for number, trained in contents.steps.items():
        fresh = fresh_of(trained)
        if len(set(fresh)) < len(fresh):
            report(f"step {number} trained a fresh rollout twice: {fresh}")
        if lost := [rollout for rollout in trained.rows["trajectory"].tolist() if rollout not in present]:
            report(f"step {number} trained rollouts {lost}, which are not recorded")
        if again := finished.get(number, set()) - set(fresh):
            report(f"step {number} did not train rollouts {sorted(again)}, which had finished before a kill")


def compare(folder: Path, other: Path, report: Callable[[str], None]) -> int:
    """Compare the steps that two trainings share, row by row; return their number.

    Floating-point numbers are compared with ``TOLERANCE``, everything else exactly.

    Args:
        folder: of a training.
        other: of another one from the same model and data.
        report: gets the first step that differs.
    """
    one, two = _contents(folder), _contents(other)
    shared = [number for number in one.steps if number in two.steps]
    mine, its = (dataclasses.replace(of, steps={number: of.steps[number] for number in shared}) for of in (one, two))
    if (unlike := first_unlike(mine, its, TOLERANCE)) is not None:
        report(f"step {unlike} differs from that of an undisturbed training")
    return len(shared)
