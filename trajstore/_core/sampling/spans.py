"""Consecutive steps of one environment: their rows, and the ends of episodes. Arithmetic only.

A trajectory ``[T, B, ...]`` holds B environments side by side; row ``t * B + b`` is step t of environment b, and the
environment's next step is B rows later.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trajstore._core.base.types import FloatArray, IntArray

Mask = npt.NDArray[np.bool_]


def rows_around(samples: IntArray, steps: IntArray, batch: IntArray, offsets: IntArray) -> tuple[IntArray, Mask]:
    """Return the rows at some steps before and after each row, and a mask of existing ones.

    Args:
        samples: row within its trajectory, ``[n]``.
        steps: T of each trajectory, ``[n]``.
        batch: B of each trajectory, ``[n]``.
        offsets: steps from the row, negative ones before it, ``[k]``.

    Returns:
        Rows ``[n, k]``, with the environment's first or last row in place of absent ones, and a mask of the same shape.
    """
    times = (samples // batch)[:, None] + offsets
    inside = (times >= 0) & (times < steps[:, None])
    rows: IntArray = np.clip(times, 0, steps[:, None] - 1) * batch[:, None] + (samples % batch)[:, None]
    return rows, inside


def epoch_starts(samples: IntArray, steps: IntArray, batch: IntArray, epochs: IntArray, offsets: IntArray) -> Mask:
    """Return a mask of the steps that begin a rollout epoch, ``[n, k]``.

    Args:
        samples: row within its trajectory, ``[n]``.
        steps: T of each trajectory, ``[n]``.
        batch: B of each trajectory, ``[n]``.
        epochs: E of each trajectory, ``[n]``; 0 counts as 1.
        offsets: steps from the row, ``[k]``.
    """
    each = steps // np.maximum(epochs, 1)
    starts: Mask = ((samples // batch)[:, None] + offsets) % each[:, None] == 0
    return starts


def within_episode(inside: Mask, ends: Mask, at: int = 0) -> Mask:
    """Return a mask of the steps in the same episode as one step of their span.

    Args:
        inside: mask of existing steps, ``[n, k]``; true at that one.
        ends: mask of steps that end an episode, ``[n, k]``; such a step still belongs to it.
        at: index of the step.
    """
    goes_on = inside[:, :-1] & inside[:, 1:] & ~ends[:, :-1]
    before = np.logical_and.accumulate(goes_on[:, :at][:, ::-1], axis=1)[:, ::-1]
    after = np.logical_and.accumulate(goes_on[:, at:], axis=1)
    return np.concatenate([before, inside[:, at : at + 1], after], axis=1)


def last_of(mask: Mask) -> IntArray:
    """Return the index of each span's last step, ``[n]``, if it begins with the first one."""
    last: IntArray = mask.sum(axis=1).astype(np.int64) - 1
    return last


def discounts(length: int, gamma: float) -> FloatArray:
    """Return ``gamma ** i`` for ``i = 0 .. length - 1``."""
    powers: FloatArray = gamma ** np.arange(length, dtype=np.float64)
    return powers
