"""Steps that follow each other in one environment: which rows they are, and where an episode ends. Arithmetic only.

A trajectory ``[T, B, ...]`` holds B environments beside each other; row ``t * B + b`` is step t of environment b, and
the next step of the same environment lies B rows later.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trajstore.core.sampling.base import FloatArray, IntArray

Mask = npt.NDArray[np.bool_]


def rows_after(samples: IntArray, steps: IntArray, batch: IntArray, length: int) -> tuple[IntArray, Mask]:
    """Return the rows of ``length`` steps from each row on, and which of them the trajectory has.

    Args:
        samples: first row of each span within its trajectory, ``[n]``.
        steps: T of each trajectory, ``[n]``.
        batch: B of each trajectory, ``[n]``.
        length: steps of a span.

    Returns:
        Rows ``[n, length]``, those beyond the trajectory's end being its last of that environment, and a mask of the
        same shape.
    """
    time = samples // batch
    ahead = time[:, None] + np.arange(length)
    inside = ahead < steps[:, None]
    rows: IntArray = np.minimum(ahead, steps[:, None] - 1) * batch[:, None] + (samples % batch)[:, None]
    return rows, inside


def within_episode(inside: Mask, ends: Mask) -> Mask:
    """Return which steps of spans belong to the episode of their first step.

    Args:
        inside: which steps there are, ``[n, length]``.
        ends: after which steps an episode ends, ``[n, length]``; that step still belongs to it.
    """
    before = np.zeros_like(ends)
    before[:, 1:] = np.logical_or.accumulate(ends & inside, axis=1)[:, :-1]
    mask: Mask = inside & ~before
    return mask


def last_of(mask: Mask) -> IntArray:
    """Return the place of the last step of each span, ``[n]``; spans have at least one."""
    last: IntArray = mask.sum(axis=1).astype(np.int64) - 1
    return last


def discounts(length: int, gamma: float) -> FloatArray:
    """Return ``gamma ** i`` for ``i = 0 .. length - 1``."""
    powers: FloatArray = gamma ** np.arange(length, dtype=np.float64)
    return powers
