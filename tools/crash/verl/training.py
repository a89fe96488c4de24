"""Checks the ledger of a campaign, and compares it with that of an undisturbed training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tools.crash.verl.layout import rollouts_path
from trainer_hooks.verl.arrival import recorded_rollouts
from trajstore import AgentTrajectory, TrajectoryReplayBuffer, ledger
from trajstore.errors import StoreNotFoundError
from trajstore.ledger import ROW, LedgerContents, TrainedStep

TOLERANCE = 1e-4
"""Of two trainings: rows arrive in any order, and float32 sums depend on the order."""


@dataclass(frozen=True)
class Trained:
    """The ledger of a training, and its rollouts by id."""

    contents: LedgerContents
    rollouts: Mapping[int, AgentTrajectory]

    def identities(self, step: TrainedStep) -> list[tuple[str, int | None, str]]:
        """Return each row's rollout by task, policy version and session, which equal trainings share."""
        rollouts = [self.rollouts[number] for number in step.rows["trajectory"].tolist()]
        return [(one.task_id, one.policy_version, one.rollout_id.split("_")[1]) for one in rollouts]


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
    folder: Path,
    present: Container[int],
    step: int,
    finished: Mapping[int, set[int]] | None,
    report: Callable[[str], None],
) -> None:
    """Check what was trained: every step once, no rollout twice, and none generated again that had finished.

    Args:
        folder: the campaign's.
        present: ids of the recorded rollouts.
        step: of the newest checkpoint; 0 = none.
        finished: rollouts of interrupted steps, all of which the repeated step trains; None = it may replay rollouts of
            lost weights instead.
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
        if finished is not None or "version is after the policy's" not in problem:
            report(f"ledger: {problem}")
    if list(contents.steps) != list(range(1, len(contents.steps) + 1)) or len(contents.steps) < step:
        report(f"the ledger has steps {list(contents.steps)}, the checkpoint is of step {step}")
    for number, trained in contents.steps.items():
        fresh = fresh_of(trained)
        if len(set(fresh)) < len(fresh):
            report(f"step {number} trained a fresh rollout twice: {fresh}")
        if lost := [rollout for rollout in trained.rows["trajectory"].tolist() if rollout not in present]:
            report(f"step {number} trained rollouts {lost}, which are not recorded")
        if again := (finished or {}).get(number, set()) - set(fresh):
            report(f"step {number} did not train rollouts {sorted(again)}, which had finished before a kill")


def compare(folder: Path, other: Path, report: Callable[[str], None]) -> int:
    """Compare the steps that two trainings share, row by row; return their number.

    Floating-point numbers are compared with ``TOLERANCE``, everything else exactly.

    Args:
        folder: of a training.
        other: of another one from the same model and data.
        report: gets the first step that differs.
    """
    one, two = trained_of(folder), trained_of(other)
    shared = [number for number in one.contents.steps if number in two.contents.steps]
    for number in shared:
        if unlike := _differences(one, two, number):
            report(f"step {number} differs from that of an undisturbed training: {'; '.join(unlike)}")
            break
    return len(shared)


def _differences(one: Trained, two: Trained, number: int) -> list[str]:
    """Return what two trainings have different in a step."""
    mine, its = one.contents.steps[number], two.contents.steps[number]
    found = [
        f"{name} is {getattr(mine, name)}, not {getattr(its, name)}"
        for name in ("tasks", "data", "seeds", "policy_before", "policy_after")
        if getattr(mine, name) != getattr(its, name)
    ]
    if mine.loss.keys() != its.loss.keys():
        found.append(f"loss has {[*mine.loss]}, not {[*its.loss]}")
    else:
        found += [
            f"loss {name} is {value}, not {its.loss[name]}"
            for name, value in mine.loss.items()
            if not math.isclose(value, its.loss[name], rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        ]
    if one.identities(mine) != two.identities(its):
        return [*found, "its rows are of other rollouts"]
    for name in ROW.names or ():
        if name == "trajectory":  # each training numbers its own
            continue
        a, b = mine.rows[name], its.rows[name]
        close = np.isclose(a, b, TOLERANCE, TOLERANCE, equal_nan=True) if a.dtype.kind == "f" else a == b
        if not close.all():
            row = int((~close).argmax())
            found.append(f"{name} of row {row} is {a[row]}, not {b[row]}")
    return found
