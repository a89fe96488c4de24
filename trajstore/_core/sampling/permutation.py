"""A random order of n items, computed place by place; only short ones are stored.

Source: a Feistel network over a power of four at least n, walked until it lands below n (Black and Rogaway, "Ciphers
with Arbitrary Finite Domains", 2002); the round function is the finaliser of splitmix64 (Steele, Lea and Flood, 2014).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trajstore._core.base.machine_code import tree_kernels

_ROUNDS = 8
_WRITTEN_OUT = 4096
"""Orders of at most this length are shuffled, because a network over so few values is not quite uniform."""
_U64 = np.uint64


def permuted(places: npt.NDArray[np.int64], count: int, key: int) -> npt.NDArray[np.int64]:
    """Return the values at some places of the order of ``0 .. count - 1`` given by a key.

    Args:
        places: ``[n]``, each in ``[0, count)``.
        count: length of the order.
        key: 64-bit key of the order.
    """
    if count <= _WRITTEN_OUT:
        return np.random.Generator(np.random.PCG64(key)).permutation(count)[places]
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    keys = _mix(_U64(key % (1 << 64)) + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * _U64(0x9E3779B97F4A7C15))
    result = places.astype(np.uint64)
    tree_kernels.walk(result, keys, _U64(half), _U64(count))
    return result.astype(np.int64)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> _U64(27))) * _U64(0x94D049BB133111EB)
    return values ^ (values >> _U64(31))
