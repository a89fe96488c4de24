r"""Field names, column names and the row arithmetic of step trajectories. Pure; no I/O.

A step trajectory is a set of tensors ``[T, B, ...]`` (T steps, B parallel environments). Nested
dicts of tensors become flat *columns* with dotted names (``curr_obs.states``); a dot inside a key
is written ``\.``.

Some fields may carry extra rows, one for each of E rollout epochs (T divisible by E), and so have
T + E rows. ``dones``, ``terminations`` and ``truncations`` begin every epoch with a bootstrap row;
``prev_values`` ends every epoch with the value of the last observation; ``actions``, ``intervene_flags``
and ``forward_inputs`` may end it with the policy's response to that observation (RLinf's real-world RLT), ``versions``
with an unused row (RLinf without final values).
Sampling skips these rows, files keep them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any, TypeVar

from trajstore._core.columns.limits import MOST_NESTED
from trajstore.errors import InvalidTrajectoryError, SchemaMismatchError, counted, listed

TENSOR_FIELDS = (
    "actions",
    "intervene_flags",
    "rewards",
    "terminations",
    "truncations",
    "dones",
    "prev_logprobs",
    "prev_values",
    "versions",
    "valid",
)
"""Tensor fields of a step trajectory, in the order of batches."""

VALID = "valid"
"""The field that says which steps count; no batch has it, because its rows are all valid."""

DICT_FIELDS = ("curr_obs", "next_obs", "forward_inputs")
"""Fields that hold (nested) dicts of tensors, in the order of batches."""

FIRST_ROW_EXTRA = frozenset({"dones", "terminations", "truncations"})
LAST_ROW_EXTRA = frozenset({"prev_values", "actions", "intervene_flags", "forward_inputs", "versions"})


class Axis(IntEnum):
    """The unit that a column's rows count. Columns on one axis of one trajectory have equally many rows."""

    SAMPLES = 0
    """Step: T·B transitions, row = t·B + b. Agent: L tokens."""
    FIRST_EXTRA = 1
    """Step: (T + E)·B rows, the first of each epoch is skipped when sampling."""
    LAST_EXTRA = 2
    """Step: (T + E)·B rows, the last of each epoch is skipped when sampling."""
    RESPONSE = 3
    """Agent: R response tokens."""
    DOCUMENT = 4
    """Bytes of the trajectory's JSON document."""
    NEXT = 5
    """Step: T·B transitions, as on ``SAMPLES``. A shard has a row of its own only for those that differ from the
    observation of the next step; see :mod:`trajstore._core.formats.frames`."""


T = TypeVar("T")


def join_name(path: Sequence[str]) -> str:
    """Return the dotted column name of a path of dict keys, e.g. ``("curr_obs", "states")``."""
    return _joined(tuple(path))


@lru_cache(maxsize=4096)  # every added trajectory has the same names as the one before
def _joined(path: tuple[str, ...]) -> str:
    return ".".join(key.replace("\\", "\\\\").replace(".", "\\.") for key in path)


def split_name(name: str) -> tuple[str, ...]:
    """Return the path of dict keys of a dotted column name; inverse of :func:`join_name`."""
    if "\\" not in name:
        return tuple(name.split("."))
    parts = [""]
    escaped = False
    for char in name:
        if escaped:
            parts[-1] += char
            escaped = False
        elif char == "\\":
            escaped = True
        elif char == ".":
            parts.append("")
        else:
            parts[-1] += char
    return tuple(parts)


def resolved(name: str, known: Collection[str]) -> str:
    """Return the column that a dotted name means: its dots may be those of keys, if only one column fits.

    A name that fits no column is returned as it is.

    Raises:
        SchemaMismatchError: several columns fit.
    """
    plain = ".".join(split_name(name))
    fitting = [name] if name in known else [other for other in known if ".".join(split_name(other)) == plain]
    if len(fitting) > 1:
        raise SchemaMismatchError(
            f"columns: {name} may be any of {listed(fitting)}; write a dot inside a key with a backslash before it"
        )
    return fitting[0] if fitting else name


def columns_of(name: str, known: Collection[str]) -> list[str]:
    """Return the columns that a dotted name means: the :func:`resolved` one, or all columns in a dict of this name.

    Raises:
        SchemaMismatchError: several columns fit.
    """
    column, path = resolved(name, known), split_name(name)
    within = [] if column in known else [other for other in known if split_name(other)[: len(path)] == path]
    return within or [column]


def walk(value: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield ``(path, leaf)`` for every leaf of a nested dict, in insertion order; an empty dict is a leaf.

    Raises:
        InvalidTrajectoryError: a key is not a string, or dicts are nested too deeply.
    """
    if len(path) > MOST_NESTED:
        raise InvalidTrajectoryError(f"field {join_name(path[:3])}...: nested in more than {MOST_NESTED} dicts")
    for key, item in value.items():
        if not isinstance(key, str):
            raise InvalidTrajectoryError(
                f"field {join_name(path) or '(top)'}: key {key!r} is a {type(key).__name__}; use string keys"
            )
        if isinstance(item, Mapping) and len(item.keys()):
            yield from walk(item, (*path, key))
        else:
            yield (*path, key), item


def nest(items: Mapping[str, T]) -> dict[str, Any]:
    """Return the nested dict of a flat one with dotted names; inverse of :func:`walk` + :func:`join_name`."""
    result: dict[str, Any] = {}
    for name, item in items.items():
        path = split_name(name)
        target = result
        for key in path[:-1]:
            target = target.setdefault(key, {})
        target[path[-1]] = item
    return result


def unnest(items: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flat dict with dotted names of a nested one; inverse of :func:`nest`."""
    return {join_name(path): item for path, item in walk(items)}


def axis_of(field: str, rows: int, steps: int) -> tuple[Axis, int]:
    """Return the axis of a step column and its number of extra rows E.

    Args:
        field: the column's dotted name; its first part determines which extra rows it may have.
        rows: length of the field's leading dimension.
        steps: T, the number of steps of the trajectory.

    Raises:
        InvalidTrajectoryError: ``rows`` is neither T nor, for a field that may have extra rows,
            T + E with T divisible by E.
    """
    if rows == steps:
        return Axis.SAMPLES, 0
    extra = rows - steps
    top = field.split(".", 1)[0]
    may_have_extra = top in FIRST_ROW_EXTRA or top in LAST_ROW_EXTRA
    if may_have_extra and extra > 0 and steps % extra == 0:
        return (Axis.FIRST_EXTRA if top in FIRST_ROW_EXTRA else Axis.LAST_EXTRA), extra
    allowed = f"T = {steps}" + (" or T + E with T divisible by E" if may_have_extra else "")
    raise InvalidTrajectoryError(f"field {field}: has {counted(rows, 'row')}, must have {allowed}")


def skip_extra_rows(axis: Axis, sample: int, batch: int, epoch_samples: int) -> int:
    """Return the row of a column on ``axis`` that belongs to sample ``t·B + b``.

    Args:
        axis: the column's axis.
        sample: index of the transition within its trajectory, ``t·B + b``.
        batch: B.
        epoch_samples: (T / E)·B, transitions per rollout epoch; ignored on ``SAMPLES``.

    The gather kernel repeats this arithmetic.
    """
    if axis is Axis.FIRST_EXTRA:
        return sample + (sample // epoch_samples + 1) * batch
    if axis is Axis.LAST_EXTRA:
        return sample + (sample // epoch_samples) * batch
    return sample
