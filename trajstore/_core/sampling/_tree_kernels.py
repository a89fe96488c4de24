"""Kernels of trees and orders, compiled on import by :mod:`trajstore._core.base.machine_code`."""

from __future__ import annotations

from typing import Any

import numpy as np

from trajstore._core.base._kernels import compiled

FANOUT = 16
"""Children per node: two cache lines of sums, so a search misses the cache once or twice per level."""

_Array = np.ndarray[Any, Any]

_WEIGHTS, _NUMBERS, _BITS = "float64[::1]", "int64[::1]", "uint64[::1]"


@compiled(_WEIGHTS, _NUMBERS, _NUMBERS, _WEIGHTS)
def set_leaves(sums: _Array, offsets: _Array, leaves: _Array, values: _Array) -> None:
    """Set leaves and update all their ancestors.

    ``sums[offsets[k] : offsets[k + 1]]`` is level k, the leaves at 0.
    """
    for i in range(len(leaves)):
        sums[leaves[i]] = values[i]
    width = FANOUT
    for level in range(1, len(offsets) - 1):
        below, here = offsets[level - 1], offsets[level]
        size_below = offsets[level] - below
        last = -1
        for i in range(len(leaves)):
            node = leaves[i] // width
            if node == last:
                continue
            last = node
            start = node * FANOUT
            total = 0.0
            for child in range(below + start, below + min(start + FANOUT, size_below)):
                total += sums[child]
            sums[here + node] = total
        width *= FANOUT


@compiled(_WEIGHTS, _NUMBERS)
def rebuild(sums: _Array, offsets: _Array) -> None:
    """Recompute every node above the leaves."""
    for level in range(1, len(offsets) - 1):
        below, here = offsets[level - 1], offsets[level]
        size_below = here - below
        for node in range(offsets[level + 1] - here):
            total = 0.0
            for child in range(node * FANOUT, min((node + 1) * FANOUT, size_below)):
                total += sums[below + child]
            sums[here + node] = total


@compiled(_WEIGHTS, _NUMBERS, "int64", _WEIGHTS)
def sum_from(sums: _Array, offsets: _Array, low: int, partial: _Array) -> None:
    """Compute each node's sum over the leaves from this one on; ``partial[k]`` is that of level k."""
    node = low
    partial[0] = sums[node]
    for level in range(len(offsets) - 2):
        base = offsets[level]
        total = partial[level]
        stop = min(node - node % FANOUT + FANOUT, offsets[level + 1] - base)
        for sibling in range(node + 1, stop):
            total += sums[base + sibling]
        partial[level + 1] = total
        node //= FANOUT


@compiled(_WEIGHTS, _NUMBERS, "int64", _WEIGHTS, _WEIGHTS, _NUMBERS)
def find_leaves(sums: _Array, offsets: _Array, low: int, partial: _Array, targets: _Array, found: _Array) -> None:
    """Find for each target the leaf, from ``low`` on, at which the running total first exceeds it.

    ``partial`` is the result of :func:`sum_from` for ``low``, where the running total begins. Targets are overwritten.
    A target that rounding puts at or above the total finds the last positive leaf. All targets descend level by level,
    so that memory for some is fetched while others are searched.
    """
    found[:] = 0
    for level in range(len(offsets) - 2, -1, -1):
        base = offsets[level]
        size = offsets[level + 1] - base
        edge = low
        for _ in range(level):
            edge //= FANOUT
        for i in range(len(targets)):
            rest = targets[i]
            child = found[i] * FANOUT
            stop = min(child + FANOUT, size)
            child = max(child, edge)
            chosen = child
            before = 0.0
            while child < stop:
                weight = partial[level] if child == edge else sums[base + child]
                if weight > 0:
                    chosen = child
                    before = rest
                    if rest < weight:
                        break
                    rest -= weight
                child += 1
            # Rounding may leave a remainder beyond the last child: it stays in the last positive one.
            targets[i] = before
            found[i] = chosen


@compiled(_BITS, _BITS, "uint64", "uint64")
def walk(values: _Array, keys: _Array, half: np.uint64, count: np.uint64) -> None:
    """Pass each value through the network of :mod:`~trajstore._core.sampling.permutation` until it is below ``count``.

    ``half`` is the number of bits in half a value; each key is a round. All values are unsigned, because numba converts
    mixed signed and unsigned operands to float.
    """
    mask = (np.uint64(1) << half) - np.uint64(1)
    for i in range(len(values)):
        value = values[i]
        while True:
            left, right = value >> half, value & mask
            for key in keys:
                mixed = right ^ key
                mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
                mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
                left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & mask)
            value = (left << half) | right
            if value < count:  # each pass fails with a chance of at most three in four
                break
        values[i] = value
