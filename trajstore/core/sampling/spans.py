"""Consecutive steps of one environment: their rows, and the ends of episodes. Arithmetic only.

A trajectory ``[T, B, ...]`` holds B environments side by side; row ``t * B + b`` is step t of environment b, and the
environment's next step is B rows later.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trajstore.core.sampling.base import FloatArray, IntArray

Mask = npt.NDArray[np.bool_]


def rows_after(samples: IntArray, steps: IntArray, batch: IntArray, length: int) -> tuple[IntArray, Mask]:
    """Return the rows of ``length`` steps from each row on, and a mask of existing ones.

    Args:
        samples: first row of each span within its trajectory, ``[n]``.
        steps: T of each trajectory, ``[n]``.
        batch: B of each trajectory, ``[n]``.
        length: number of steps in a span.

    Returns:
        Rows ``[n, length]``, with the environment's last row in place of rows beyond the end, and a mask of the same
        shape.
    """
    time = samples // batch
    ahead = time[:, None] + np.arange(length)
    inside = ahead < steps[:, None]
    rows: IntArray = np.minimum(ahead, steps[:, None] - 1) * batch[:, None] + (samples % batch)[:, None]
    return rows, inside


def epoch_starts(samples: IntArray, steps: IntArray, batch: IntArray, epochs: IntArray, length: int) -> Mask:
    """Return a mask of the steps after the first that begin a rollout epoch, ``[n, length]``.

    Args:
        samples: first row of each span within its trajectory, ``[n]``.
        steps: T of each trajectory, ``[n]``.
        batch: B of each trajectory, ``[n]``.
        epochs: E of each trajectory, ``[n]``; 0 counts as 1.
        length: number of steps in a span.
    """
    each = steps // np.maximum(epochs, 1)
    starts: Mask = ((samples // batch)[:, None] + np.arange(length)) % each[:, None] == 0
    starts[:, 0] = False
    return starts


def within_episode(inside: Mask, ends: Mask) -> Mask:
    """Return a mask of the steps in the same episode as their span's first step.

    Args:
        inside: mask of existing steps, ``[n, length]``.
        ends: mask of steps that end an episode, ``[n, length]``; such a step still belongs to it.
    """
    before = np.zeros_like(ends)
    before[:, 1:] = np.logical_or.accumulate(ends & inside, axis=1)[:, :-1]
    mask: Mask = inside & ~before
    return mask


def last_of(mask: Mask) -> IntArray:
    """Return the index of each span's last step, ``[n]``; spans have at least one step."""
    last: IntArray = mask.sum(axis=1).astype(np.int64) - 1
    return last


def discounts(length: int, gamma: float) -> FloatArray:
    """Return ``gamma ** i`` for ``i = 0 .. length - 1``."""
    powers: FloatArray = gamma ** np.arange(length, dtype=np.float64)
    return powers
