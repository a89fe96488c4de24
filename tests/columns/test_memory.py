"""Column memory is reused, and never while any view of it exists."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from tests.support.interleaving import interleavings
from trajstore._core.columns import memory
from trajstore._core.columns.memory import Arena, Lease

SLAB = 4096


def view(lease: Lease, offset: int, nbytes: int) -> memoryview:
    return lease.data[offset : offset + nbytes]


def test_a_slab_comes_back_when_the_last_view_of_it_is_gone() -> None:
    arena = Arena(SLAB, spare=1)

    def next_slabs() -> set[int]:
        return {arena.take(SLAB // 4)[0].address for _ in range(12)}

    lease, offset = arena.take(SLAB // 4)
    address = lease.address
    tensor = torch.frombuffer(view(lease, offset, SLAB // 4), dtype=torch.uint8)
    tensor.fill_(7)
    row = tensor[3:7]
    del lease, tensor
    gc.collect()
    next_slabs()  # the rest of this slab, then further slabs
    assert address not in next_slabs()
    assert row.tolist() == [7, 7, 7, 7]
    del row
    gc.collect()
    assert address in next_slabs()


def test_threads_get_different_blocks() -> None:
    def filling() -> tuple[Callable[[], Any], Callable[[], Any]]:
        arena = Arena(SLAB, spare=1)

        def fill(value: int) -> Any:
            arena.take(200)  # and return
            lease, offset = arena.take(200)
            block = np.frombuffer(view(lease, offset, 200), np.uint8)
            block[:] = value
            return lease, block

        return partial(fill, 1), partial(fill, 2)

    for (_, first), (_, second) in interleavings(memory, filling):
        assert np.all(first == 1)
        assert np.all(second == 2)
