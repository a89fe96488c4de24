"""Checks one ledger, and finds the first difference of two."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

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
        problems: inconsistencies, each naming its step.
    """

    steps: int
    rows: int
    replayed: int
    replaced: int
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ColumnDifference:
    """How the rows of a step differ in a column.

    Attributes:
        rows: number of rows that differ.
        row: the first one.
        trajectory: its id in this ledger.
        other: its id in the other ledger.
        task: its task in this ledger; None if unknown.
        here: its value in this ledger.
        there: its value in the other one.
    """

    rows: int
    row: int
    trajectory: int
    other: int
    task: str | None
    here: object
    there: object


@dataclass(frozen=True, slots=True)
class Difference:
    """The first step in which two ledgers differ.

    Attributes:
        step: its number.
        absent: which ledger lacks it, "this" or "other"; None if both have it.
        fields: both values of each field of the step that differs; of mappings, of each key (``loss.pg_loss``).
        row: its first row that differs; None if only fields do.
        columns: of rows that both ledgers have, by column; ``ratio`` is last, as it follows from earlier updates.
        rows: number of rows that differ, with those that only one ledger has.
    """

    step: int
    absent: Literal["this", "other"] | None = None
    fields: dict[str, tuple[object, object]] = field(default_factory=dict)
    row: int | None = None
    columns: dict[str, ColumnDifference] = field(default_factory=dict)
    rows: int = 0


def audit(ledger: LedgerContents, max_age: int | None = None) -> Audit:
    """Check a ledger: no gaps, ages in bounds, finite numbers, and no rollout that is fresh in two steps.

    Args:
        ledger: the ledger.
        max_age: highest age of a row in policy versions; None = any.
    """
    problems: list[str] = []
    before: int | None = None
    for number, step in ledger.steps.items():
        if before is not None and number != before + 1:
            problems.append(f"step {number}: follows step {before}; steps between them are missing")
        before = number
        problems += _problems(step, max_age)
    problems += _fresh_twice(ledger)
    if ledger.torn:
        problems.append(f"after step {ledger.last}: {counted(ledger.torn, 'byte')} of an incomplete record")
    if ledger.empty:
        ends = "no step is recorded" if ledger.last is None else f"nothing is recorded after step {ledger.last}"
        problems.append(f"the newest file is empty: {ends}, or what was recorded is lost")
    problems += ledger.damaged
    rows = sum(len(step.rows) for step in ledger.steps.values())
    replayed = sum(int(step.rows["replayed"].sum()) for step in ledger.steps.values())
    return Audit(len(ledger.steps), rows, replayed, len(ledger.replaced), tuple(problems))


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


def _problems(step: TrainedStep, max_age: int | None) -> list[str]:
    problems = [
        f"step {step.step}: loss {name} is {value}" for name, value in step.loss.items() if not np.isfinite(value)
    ]
    numbers = [name for name in ROW.names or () if ROW[name].kind == "f" and name not in step.unknown]
    bad = {f"{name} is not finite": ~np.isfinite(step.rows[name]) for name in numbers}
    if step.policy_before is not None:
        bad["version is after the policy's"] = step.rows["version"] > step.policy_before
        if max_age is not None:
            age = step.policy_before - step.rows["version"].astype(np.int64)
            bad[f"age is above {max_age}"] = (step.rows["version"] >= 0) & (age > max_age)
    for reason, mask in bad.items():
        if mask.any():
            first = int(mask.argmax())
            name = shown_id(int(step.rows["trajectory"][first]))
            problems.append(
                f"step {step.step}: {reason} in {counted(int(mask.sum()), 'row')}, first row {first} "
                f"(trajectory {name})"
            )
    return problems


def first_difference(one: LedgerContents, other: LedgerContents) -> Difference | None:
    """Return the first step in which two ledgers differ, and its first row, bit by bit; None if they are equal.

    Each store numbers its own trajectories, so two ids are equal if they first occur in the same place.
    """
    places = [_first_places(one), _first_places(other)]
    for number in sorted(one.steps.keys() | other.steps.keys()):
        mine, its = one.steps.get(number), other.steps.get(number)
        if mine is None or its is None:
            return Difference(number, "this" if mine is None else "other")
        if (found := _difference(mine, its, *(of_steps[number] for of_steps in places))) is not None:
            return found
    return None


def _first_places(ledger: LedgerContents) -> dict[int, npt.NDArray[np.int64]]:
    """Return, for each row of each step, where its trajectory first occurs; ids below 0 are unchanged."""
    parts = [step.rows["trajectory"] for step in ledger.steps.values()]
    ids = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    places = np.where(ids < 0, ids, first[inverse])
    ends = np.cumsum([len(part) for part in parts])
    return dict(zip(ledger.steps, np.split(places, ends[:-1]), strict=True)) if parts else {}


def _difference(
    mine: TrainedStep, its: TrainedStep, my_places: npt.NDArray[np.int64], its_places: npt.NDArray[np.int64]
) -> Difference | None:
    both = min(len(mine.rows), len(its.rows))
    columns: dict[str, ColumnDifference] = {}
    differ = np.zeros(both, bool)
    for name in sorted(ROW.names or (), key="ratio".__eq__):
        here, there = mine.rows[name][:both], its.rows[name][:both]
        values = (my_places[:both], its_places[:both]) if name == "trajectory" else (here, there)
        unlike, found = column_difference(mine, its, here, there, values)
        differ |= unlike
        if found is not None:
            columns[name] = found
    unequal = _unequal(_fields(mine), _fields(its))
    count = int(differ.sum()) + abs(len(mine.rows) - len(its.rows))
    if not unequal and not count:
        return None
    first = int(differ.argmax()) if columns else both if count else None
    return Difference(mine.step, fields=unequal, row=first, columns=columns, rows=count)


def column_difference(
    mine: TrainedStep,
    its: TrainedStep,
    here: npt.NDArray[Any],
    there: npt.NDArray[Any],
    compared: tuple[npt.NDArray[Any], npt.NDArray[Any]] | None = None,
) -> tuple[npt.NDArray[np.bool_], ColumnDifference | None]:
    """Return which rows of a step differ in a column, bit by bit: NaN equals itself, -0.0 differs from 0.0.

    Args:
        mine: the step in this ledger.
        its: that in the other one.
        here: values of this ledger's rows.
        there: those of the other one.
        compared: values to compare instead.
    """
    a, b = (values.copy().view(f"V{values.itemsize}") for values in compared or (here, there))
    unlike = a != b
    if not unlike.any():
        return unlike, None
    row = int(unlike.argmax())
    trajectory, other = (int(step.rows["trajectory"][row]) for step in (mine, its))
    task = mine.tasks[int(mine.rows["group"][row])] if mine.tasks else None
    return unlike, ColumnDifference(
        int(unlike.sum()), row, trajectory, other, task, here[row].item(), there[row].item()
    )


def _fields(step: TrainedStep) -> dict[str, object]:
    """Return the fields of a step, those of mappings by their keys."""
    values: dict[str, object] = {"number of rows": len(step.rows)}
    for item in dataclasses.fields(TrainedStep):
        value = getattr(step, item.name)
        if isinstance(value, Mapping):
            values |= {f"{item.name}.{key}": part for key, part in value.items()}
        elif item.name != "rows":
            values[item.name] = value
    return values


def _unequal(mine: Mapping[str, object], its: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    pairs = {name: (mine.get(name), its.get(name)) for name in (*mine, *(its.keys() - mine.keys()))}
    return {name: pair for name, pair in pairs.items() if repr(pair[0]) != repr(pair[1])}
