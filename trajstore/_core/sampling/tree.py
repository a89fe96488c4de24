"""A sum tree over leaf weights: draws and updates in O(log n).

Source of the use in replay: Schaul et al., "Prioritized Experience Replay", 2016, appendix B.2.1. Nodes have sixteen
children instead of two, so a search reads a sixth as many distant cache lines.

Needs the same lock as :class:`~trajstore._core.sampling.base.Sampler`.
"""

from __future__ import annotations

import numpy as np

from trajstore._core.base.machine_code import tree_kernels
from trajstore._core.base.types import FloatArray, IntArray
from trajstore.errors import ConfigurationError

_FANOUT = 16


class SumTree:
    """Weights of leaves ``0 .. capacity - 1``, float64, at least 0; initially 0.

    Every node is recomputed from its children on each change, so rounding errors do not accumulate.

    Args:
        capacity: number of leaves.
    """

    def __init__(self, capacity: int) -> None:
        self._offsets = _offsets(capacity)
        self._sums = np.zeros(int(self._offsets[-1]), np.float64)

    @property
    def capacity(self) -> int:
        """Number of leaves."""
        return int(self._offsets[1])

    @property
    def leaves(self) -> FloatArray:
        """Weights of all leaves, ``[capacity]``; a read-only view."""
        return self._sums[: self.capacity]

    @property
    def total(self) -> float:
        """Sum of all weights."""
        return float(self._sums[-1])

    def set(self, leaves: IntArray, weights: FloatArray) -> None:
        """Set the weights of some leaves; for duplicates the last weight counts.

        Raises:
            ConfigurationError: a weight is negative, infinite or NaN; nothing was set.
        """
        if not np.all((weights >= 0) & (weights < np.inf)):
            bad = weights[~((weights >= 0) & (weights < np.inf))][0]
            raise ConfigurationError(f"weight {bad}: must be a finite number, at least 0")
        if len(leaves):
            tree_kernels.set_leaves(self._sums, self._offsets, leaves, weights)

    def total_from(self, low: int) -> float:
        """Return the sum of the weights from a leaf on, added directly: a difference of sums could lose it."""
        return float(self._partial(low)[-1])

    def find(self, targets: FloatArray, low: int = 0) -> IntArray:
        """Return the leaf at which the running total first exceeds each target in ``[0, total_from(low))``.

        The running total begins at leaf ``low``. For uniform targets, a leaf's probability is proportional to its
        weight; leaves of weight 0 or before ``low`` are never returned. The total must be positive.
        """
        leaves = np.empty(len(targets), np.int64)
        tree_kernels.find_leaves(self._sums, self._offsets, low, self._partial(low), targets.copy(), leaves)
        return leaves

    def _partial(self, low: int) -> FloatArray:
        partial = np.zeros(len(self._offsets) - 1, np.float64)
        if low < self.capacity:
            tree_kernels.sum_from(self._sums, self._offsets, low, partial)
        return partial

    def replace(self, weights: FloatArray, capacity: int) -> None:
        """Replace all weights by these, then zeros up to ``capacity``. Takes O(capacity)."""
        self.__init__(capacity)  # type: ignore[misc]
        self._sums[: len(weights)] = weights
        tree_kernels.rebuild(self._sums, self._offsets)


def _offsets(capacity: int) -> IntArray:
    sizes = [max(1, capacity)]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // _FANOUT))
    return np.cumsum([0, *sizes], dtype=np.int64)
