"""The machine code that moves rows. Loaded on first use, because importing numba takes a while."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

_memcpy = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))

SAMPLES, FIRST_EXTRA, LAST_EXTRA = 0, 1, 2


def _loader(element: types.Type) -> Any:
    """Return an intrinsic that copies one element from one address to another."""

    @intrinsic
    def copy(typing_context: Any, target: Any, source: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = context.get_value_type(element).as_pointer()
            value = builder.load(builder.inttoptr(args[1], pointer), align=1)
            builder.store(value, builder.inttoptr(args[0], pointer), align=1)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp), generate

    return copy


_copy1, _copy2, _copy4, _copy8 = (_loader(t) for t in (types.uint8, types.uint16, types.uint32, types.uint64))


@numba.njit(nogil=True, cache=True)
def locate_rows(
    samples: np.ndarray[Any, Any],
    first: int,
    end: int,
    ends: np.ndarray[Any, Any],
    slots: np.ndarray[Any, Any],
    start_samples: np.ndarray[Any, Any],
    start_extra: np.ndarray[Any, Any],
    steps: np.ndarray[Any, Any],
    batch: np.ndarray[Any, Any],
    extra: np.ndarray[Any, Any],
    position: np.ndarray[Any, Any],
    slot: np.ndarray[Any, Any],
    rows: np.ndarray[Any, Any],
) -> None:
    """Find trajectory and rows of samples drawn from the window of positions ``first <= p < end``.

    Sample s of the window lies in the first trajectory whose running total exceeds s (``bucketize`` with
    ``right=True``). ``rows[axis, k]`` becomes the row of sample k within its slot, see ``fields.skip_extra_rows``.
    """
    base = ends[first - 1] if first > 0 else 0
    for k in range(len(samples)):
        wanted = samples[k] + base
        low, high = first, end
        while low < high:
            middle = (low + high) // 2
            if ends[middle] > wanted:
                high = middle
            else:
                low = middle + 1
        p = low
        sample = wanted - (ends[p - 1] if p > 0 else 0)
        position[k] = p
        slot[k] = slots[p]
        rows[SAMPLES, k] = start_samples[p] + sample
        head = start_extra[p] + sample
        tail = head
        if extra[p] > 0:
            epoch = sample // (np.int64(steps[p]) // extra[p] * batch[p])
            head += (epoch + 1) * batch[p]
            tail += epoch * batch[p]
        rows[FIRST_EXTRA, k] = head
        rows[LAST_EXTRA, k] = tail


@numba.njit(nogil=True, cache=True)
def copy_rows(
    slot: np.ndarray[Any, Any],
    rows: np.ndarray[Any, Any],
    addresses: np.ndarray[Any, Any],
    axes: np.ndarray[Any, Any],
    columns: np.ndarray[Any, Any],
    row_nbytes: np.ndarray[Any, Any],
    targets: np.ndarray[Any, Any],
    begin: int,
    end: int,
) -> None:
    """Copy, for samples ``begin <= k < end``, row ``rows[axis, k]`` of each column of slot ``slot[k]``.

    ``addresses[s, c]`` is the address of the first row of column c of slot s, ``axes[s, c]`` its axis;
    ``columns[j]`` is the c that output j takes, ``targets[j]`` the address of its row 0.
    """
    for j in range(len(columns)):
        c = columns[j]
        width = row_nbytes[j]
        target = targets[j]
        if width == 4:
            for k in range(begin, end):
                _copy4(target + k * 4, addresses[slot[k], c] + rows[axes[slot[k], c], k] * 4)
        elif width == 1:
            for k in range(begin, end):
                _copy1(target + k, addresses[slot[k], c] + rows[axes[slot[k], c], k])
        elif width == 8:
            for k in range(begin, end):
                _copy8(target + k * 8, addresses[slot[k], c] + rows[axes[slot[k], c], k] * 8)
        elif width == 2:
            for k in range(begin, end):
                _copy2(target + k * 2, addresses[slot[k], c] + rows[axes[slot[k], c], k] * 2)
        elif width > 0:
            for k in range(begin, end):
                _memcpy(target + k * width, addresses[slot[k], c] + rows[axes[slot[k], c], k] * width, width)


@numba.njit(nogil=True, cache=True)
def copy_blocks(targets: np.ndarray[Any, Any], sources: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any]) -> None:
    """Copy blocks of bytes from addresses to addresses."""
    for i in range(len(sizes)):
        _memcpy(targets[i], sources[i], sizes[i])
