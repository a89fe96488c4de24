"""Checks a ledger, alone or against its store. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from trajstore._core.base.types import IntArray
from trajstore._core.columns.limits import UNKNOWN_VERSION
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.run_ids import shown_id
from trajstore.errors import counted, listed
from trajstore.ledger.contents import LedgerContents
from trajstore.ledger.step import ROW, TrainedStep


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of :func:`audit`.

    Attributes:
        steps: number of steps.
        rows: number of trained rows.
        replayed: number of them that are replayed.
        replaced: number of steps that a resumed run replaced.
        first: the lowest step; None without steps.
        last: the highest step; None without steps.
        problems: inconsistencies, each naming its step.
        most: the highest number of steps that trained a trajectory; None without a store, like the next two.
        untrained: number of the store's trajectories that no step trained.
        gone: number of trained trajectories that the store has evicted since.
    """

    steps: int
    rows: int
    replayed: int
    replaced: int
    first: int | None
    last: int | None
    problems: tuple[str, ...]
    most: int | None = None
    untrained: int | None = None
    gone: int | None = None


def audit(ledger: LedgerContents, store: Catalog | None = None) -> Audit:
    """Check a ledger: no gaps, no row of a later policy, finite numbers, and no rollout that is fresh in two steps.

    With a store, also check that it has committed every id, and that a stored trajectory has its group's task and its
    row's policy version.

    Args:
        ledger: the ledger.
        store: the store that its ids are of; None: the ledger is checked alone.
    """
    problems: list[str] = []
    before: int | None = None
    for number, step in ledger.steps.items():
        if before is not None and number != before + 1:
            problems.append(f"step {number}: follows step {before}; steps between them are missing")
        before = number
        problems += _problems(step)
    problems += _fresh_twice(ledger)
    if ledger.torn:
        problems.append(f"after step {ledger.last}: {counted(ledger.torn, 'byte')} of an incomplete record")
    if ledger.empty:
        ends = "no step is recorded" if ledger.last is None else f"nothing is recorded after step {ledger.last}"
        problems.append(f"the newest file is empty: {ends}, or what was recorded is lost")
    problems += ledger.damaged
    of_store: dict[str, int] = {}
    if store is not None:
        problems += chain.from_iterable(_contradictions(step, store) for step in ledger.steps.values())
        each = [np.unique(step.rows["trajectory"]) for step in ledger.steps.values()]
        trained, times = np.unique(np.concatenate([np.zeros(0, np.int64), *each]), return_counts=True)
        trained, times = trained[trained >= 0], times[trained >= 0]
        ids = store.index["trajectory_id"]
        of_store = {
            "most": int(times.max(initial=0)),
            "untrained": int((~np.isin(ids, trained)).sum()),
            "gone": int((~np.isin(trained, ids) & (trained < store.next_id)).sum()),
        }
    return Audit(
        steps=len(ledger.steps),
        rows=sum(len(step.rows) for step in ledger.steps.values()),
        replayed=sum(int(step.rows["replayed"].sum()) for step in ledger.steps.values()),
        replaced=len(ledger.replaced),
        first=min(ledger.steps, default=None),
        last=max(ledger.steps, default=None),
        problems=tuple(problems),
        **of_store,
    )


def _fresh_twice(ledger: LedgerContents) -> list[str]:
    """Return a sentence on the stored rollouts that several steps trained as fresh ones."""
    steps: dict[int, list[int]] = {}
    for number, step in ledger.steps.items():
        is_fresh = (step.rows["trajectory"] >= 0) & (step.rows["replayed"] == 0)
        for trajectory in set(step.rows["trajectory"][is_fresh].tolist()):
            steps.setdefault(trajectory, []).append(number)
    twice = [(trajectory, numbers) for trajectory, numbers in steps.items() if len(numbers) > 1]
    return [
        f"{counted(len(twice), 'trajectory')} fresh in several steps, first {shown_id(trajectory)} in steps "
        f"{listed(map(str, numbers))}"
        for trajectory, numbers in twice[:1]
    ]


def _problems(step: TrainedStep) -> list[str]:
    problems = [
        f"step {step.step}: loss {name} is {value}" for name, value in step.loss.items() if not np.isfinite(value)
    ]
    numbers = [name for name in ROW.names or () if ROW[name].kind == "f" and name not in step.unknown]
    bad = {f"{name} is not finite": ~np.isfinite(step.rows[name]) for name in numbers}
    if step.policy_before is not None:
        bad["version is after the policy's"] = step.rows["version"] > step.policy_before
    return problems + _problems_of_rows(step, bad)


def _contradictions(step: TrainedStep, store: Catalog) -> list[str]:
    """Return a sentence on the rows of each kind that contradict the store's trajectories."""
    index = store.index
    numbers: IntArray = step.rows["trajectory"]
    versions: IntArray = step.rows["version"]
    lost = {f"trajectory never committed (the store's next id is {store.next_id})": numbers >= store.next_id}
    there = np.isin(numbers, index["trajectory_id"])
    if not there.any():
        return _problems_of_rows(step, lost)
    at = np.where(there, np.searchsorted(index["trajectory_id"], numbers), 0)
    low, high, tasks = index["version_low"][at], index["version_high"][at], index.fact("task")[at].tolist()
    other_task = np.zeros(len(numbers), np.bool_)
    if step.tasks:
        texts = [index.texts[text] if text >= 0 else "" for text in tasks]
        wanted = [step.tasks[group] for group in step.rows["group"].tolist()]
        other_task = there & np.array([text != task for text, task in zip(texts, wanted, strict=True)])
    known = there & (versions >= 0) & (low != UNKNOWN_VERSION)
    others = {
        "trajectory of another task than its group": other_task,
        "trajectory sampled by another policy version than the store says": known
        & ((versions < low) | (versions > high)),
    }
    return _problems_of_rows(step, lost | others)


def _problems_of_rows(step: TrainedStep, bad: Mapping[str, npt.NDArray[np.bool_]]) -> list[str]:
    """Return a sentence on the rows of each mask, ``[n]``, that is not empty, by what is wrong with them."""
    return [
        f"step {step.step}: {reason} in {counted(int(mask.sum()), 'row')}, first row {int(mask.argmax())} "
        f"(trajectory {shown_id(int(step.rows['trajectory'][mask.argmax()]))})"
        for reason, mask in bad.items()
        if mask.any()
    ]
