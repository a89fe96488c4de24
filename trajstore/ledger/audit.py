"""Checks one ledger, alone or against its store, and finds the first difference of two. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trajstore._core.base.types import IntArray
from trajstore._core.columns.limits import UNKNOWN_VERSION
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.run_ids import shown_id
from trajstore.errors import counted, listed
from trajstore.ledger.contents import LedgerContents
from trajstore.ledger.step import ROW, TrainedStep

TOLERANCE = 1e-5
"""Largest difference of floats that count as equal: sums over rows in another order differ by about 1e-6."""

MATCHED = ("replayed", "row", "token_digest", "mask_digest")
"""Columns by which rows of a group are matched; without the tokens' digests, only their order."""

_ORDER = sorted(ROW.names or (), key=lambda name: (name == "ratio") - (name in MATCHED))


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
        row: its first row that differs; None if only fields do, or rows that this ledger lacks.
        columns: of matched rows, by column; ``ratio`` is last, as it follows from earlier updates.
        rows: number of rows that differ, and of rows that only one ledger has.
    """

    step: int
    absent: Literal["this", "other"] | None = None
    fields: dict[str, tuple[object, object]] = field(default_factory=dict)
    row: int | None = None
    columns: dict[str, ColumnDifference] = field(default_factory=dict)
    rows: int = 0


def audit(ledger: LedgerContents, max_age: int | None = None, store: Catalog | None = None) -> Audit:
    """Check a ledger: no gaps, ages in bounds, finite numbers, and no rollout that is fresh in two steps.

    With a store, also check that it has committed every id, and that a stored trajectory has its group's task and its
    row's policy version.

    Args:
        ledger: the ledger.
        max_age: highest age of a row in policy versions; None = any.
        store: the store that its ids are of; None: the ledger is checked alone.
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


def first_difference(one: LedgerContents, other: LedgerContents, tolerance: float = TOLERANCE) -> Difference | None:
    """Return the first step in which two ledgers differ, and its first row; None if they are equal.

    Rows are matched by task, group and tokens, as trainers receive rollouts in any order. Where both ledgers have the
    tokens' digests, ids are not compared; elsewhere two ids are equal if they first occur in matched rows, as each
    store numbers its own trajectories. :func:`config_difference` compares configurations.

    Args:
        one: this ledger.
        other: the other one.
        tolerance: largest difference of equal floats, relative above 1; 0 = compare bit by bit.
    """
    same: tuple[dict[int, int], dict[int, int]] = {}, {}
    for number in sorted(one.steps.keys() | other.steps.keys()):
        mine, its = one.steps.get(number), other.steps.get(number)
        if mine is None or its is None:
            return Difference(number, "this" if mine is None else "other")
        if (found := _difference(mine, its, same, tolerance)) is not None:
            return found
    return None


def config_difference(
    one: LedgerContents, other: LedgerContents, step: int | None = None
) -> dict[str, tuple[object, object]]:
    """Return both values of each option in which the configurations of a step differ; empty if one is unknown.

    Args:
        one: this ledger.
        other: the other one.
        step: its number; None = the newest one that both have.
    """
    shared = [number for number in one.steps if number in other.steps and step in (None, number)]
    configs = [_flat("config", ledger.steps[shared[-1]].config) for ledger in (one, other)] if shared else []
    return _unequal(*configs) if all(configs) and configs else {}


def _matched_rows(mine: TrainedStep, its: TrainedStep) -> npt.NDArray[np.int64]:
    """Return the numbers of matching rows of two steps, ``[n, 2]``, by the first one's."""
    known = "token_digest" not in (*mine.unknown, *its.unknown)
    names = [name for name in MATCHED if known and name not in (*mine.unknown, *its.unknown)]
    if [*mine.tasks] == [*its.tasks] and np.array_equal(mine.rows[[*names, "group"]], its.rows[[*names, "group"]]):
        return np.repeat(np.arange(len(mine.rows))[:, None], 2, axis=1)
    return np.array(sorted(_paired(_keys(mine, names), _keys(its, names))), np.int64).reshape(-1, 2)


def _keys(step: TrainedStep, names: list[str]) -> list[tuple[Hashable, ...]]:
    """Return the keys by which each row is matched: with all of its group, by its own content, and by ever less."""
    contents: list[tuple[int, ...]] = step.rows[names].tolist()
    groups: list[int] = step.rows["group"].tolist()
    members: dict[int, list[tuple[int, ...]]] = {}
    for group, content in zip(groups, contents, strict=True):
        members.setdefault(group, []).append(content)
    whole = {group: tuple(sorted(rows)) for group, rows in members.items()}
    return [
        ((task := _task(step, group), content, whole[group]), *((task, content[:end]) for end in (4, 3, 2, 0)))
        for group, content in zip(groups, contents, strict=True)
    ]


def _paired(mine: Sequence[tuple[Hashable, ...]], its: Sequence[tuple[Hashable, ...]]) -> list[tuple[int, int]]:
    """Pair the places of equal keys in order: by the first key of each, what is left by the second, and so on."""
    pairs: list[tuple[int, int]] = []
    left, rest = [*range(len(mine))], [*range(len(its))]
    for level in range(len(mine[0]) if mine else 0):
        waiting: dict[Hashable, deque[int]] = {}
        for place in rest:
            waiting.setdefault(its[place][level], deque()).append(place)
        found = {place: waiting[key].popleft() for place in left if waiting.get(key := mine[place][level])}
        pairs += found.items()
        left, rest = [place for place in left if place not in found], sorted(chain(*waiting.values()))
    return pairs


def _task(step: TrainedStep, group: int) -> str | None:
    return step.tasks[group] if step.tasks else None


def _difference(
    mine: TrainedStep, its: TrainedStep, same: tuple[dict[int, int], dict[int, int]], tolerance: float
) -> Difference | None:
    pairs = _matched_rows(mine, its)
    here, there = mine.rows[pairs[:, 0]], its.rows[pairs[:, 1]]
    absent = {"group", *mine.unknown, *its.unknown}
    columns: dict[str, ColumnDifference] = {}
    differ = np.zeros(len(pairs), bool)
    if "token_digest" not in absent:
        absent.add("trajectory")
    for name in _ORDER:
        if name in absent:
            continue
        ids = name == "trajectory"
        unlike = _other_ids(here[name], there[name], same) if ids else _unlike(here[name], there[name], tolerance)
        differ |= unlike
        if unlike.any():
            columns[name] = _column_difference(mine, its, pairs[unlike], name)
    unequal = _unequal(_fields(mine), _fields(its))
    for name in {**mine.loss, **its.loss}:
        pair = mine.loss.get(name), its.loss.get(name)
        if None in pair or _unlike(np.array(pair[:1], np.float64), np.array(pair[1:], np.float64), tolerance)[0]:
            unequal[f"loss.{name}"] = pair
    alone = [np.setdiff1d(np.arange(len(step.rows)), pairs[:, side]) for side, step in enumerate((mine, its))]
    if alone[0].size or alone[1].size:
        unequal["tasks of unmatched rows"] = (_tasks_of(mine, alone[0]), _tasks_of(its, alone[1]))
    elif _updates(mine, dict(pairs[:, [0, 0]].tolist())) != _updates(its, dict(pairs[:, ::-1].tolist())):
        unequal["updates"] = (mine.updates, its.updates)
    count = int(differ.sum()) + sum(map(len, alone))
    if not unequal and not count:
        return None
    first = min([*pairs[differ, 0].tolist(), *alone[0].tolist()], default=None)
    return Difference(mine.step, fields=unequal, row=first, columns=columns, rows=count)


def _tasks_of(step: TrainedStep, rows: npt.NDArray[np.int64]) -> list[str]:
    return sorted({str(_task(step, group)) for group in step.rows["group"][rows].tolist()})


def _updates(step: TrainedStep, numbers: Mapping[int, int]) -> list[list[int]]:
    """Return the rows of each loss computation, renumbered, in order."""
    return [sorted(numbers[row] for row in update) for update in step.updates]


def _other_ids(
    here: npt.NDArray[np.int64], there: npt.NDArray[np.int64], same: tuple[dict[int, int], dict[int, int]]
) -> npt.NDArray[np.bool_]:
    """Return which rows have another trajectory than earlier rows say; add the new ones to ``same``.

    Ids below 0 are of this step alone.
    """
    local: tuple[dict[int, int], dict[int, int]] = {}, {}
    unlike = np.zeros(len(here), bool)
    for place, (a, b) in enumerate(zip(here.tolist(), there.tolist(), strict=True)):
        forth, back = same if a >= 0 else local
        unlike[place] = (a < 0) != (b < 0) or forth.setdefault(a, b) != b or back.setdefault(b, a) != a
    return unlike


def _unlike(here: npt.NDArray[Any], there: npt.NDArray[Any], tolerance: float) -> npt.NDArray[np.bool_]:
    """Return which values differ: NaN equals itself; bit by bit, -0.0 differs from 0.0."""
    if tolerance and here.dtype.kind == "f":
        return np.asarray(~np.isclose(here, there, tolerance, tolerance, equal_nan=True))
    a, b = (values.copy().view(f"V{values.itemsize}") for values in (here, there))
    return np.asarray(a != b)


def _column_difference(
    mine: TrainedStep, its: TrainedStep, pairs: npt.NDArray[np.int64], name: str
) -> ColumnDifference:
    """Return how matched rows differ in a column; ``pairs`` are the numbers of those that do."""
    (row, other), here, there = pairs[0].tolist(), mine.rows, its.rows
    return ColumnDifference(
        len(pairs),
        row,
        int(here["trajectory"][row]),
        int(there["trajectory"][other]),
        _task(mine, int(here["group"][row])),
        here[name][row].item(),
        there[name][other].item(),
    )


def _fields(step: TrainedStep) -> dict[str, object]:
    """Return the fields of a step that are compared as they are, those of mappings by their keys."""
    values: dict[str, object] = {"number of rows": len(step.rows)}
    for name in ("policy_before", "policy_after", "data", "seeds", "options", "unknown"):
        values |= _flat(name, getattr(step, name))
    return values


def _flat(name: str, value: object) -> dict[str, object]:
    if not isinstance(value, Mapping):
        return {name: value}
    return {key: part for inner, item in value.items() for key, part in _flat(f"{name}.{inner}", item).items()}


def _unequal(mine: Mapping[str, object], its: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    pairs = {name: (mine.get(name), its.get(name)) for name in (*mine, *(its.keys() - mine.keys()))}
    return {name: pair for name, pair in pairs.items() if repr(pair[0]) != repr(pair[1])}
