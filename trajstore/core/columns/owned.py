"""Copies trajectories to private memory, where a buffer keeps them until they are on disk."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

import numpy as np

from trajstore.core.base.machine_code import kernels
from trajstore.core.columns.flat import Block, FlatTrajectory
from trajstore.core.columns.memory import ALIGNMENT, Arena
from trajstore.core.columns.portions import portions

_FEW_BYTES = 4 << 20

_BLOCK_BYTES = 1 << 20
"""Size limit of a block of several trajectories: it stays as long as one of them is needed."""


def copied(flats: Sequence[FlatTrajectory], arena: Arena) -> list[Block]:
    """Copy trajectories to memory of the arena, in blocks of consecutive ones.

    The caller may then change or free their tensors.
    """
    return [
        _block_of(portion, arena)
        for _, run in groupby(flats, attrgetter("schema"))
        for portion, _ in portions(run, _BLOCK_BYTES, attrgetter("nbytes"))
    ]


def _block_of(flats: Sequence[FlatTrajectory], arena: Arena) -> Block:
    schema = flats[0].schema
    extents = np.array([flat.extent for flat in flats], np.int64)
    sources = np.array([flat.addresses for flat in flats], np.int64)
    sizes, targets = np.empty_like(sources), np.empty_like(sources)
    nbytes = kernels.lay_out(extents, *schema.layout, sizes, targets, ALIGNMENT)
    lease, offset = arena.take(nbytes)
    targets += lease.address + offset
    copy = kernels.copy_few_blocks if nbytes <= _FEW_BYTES else kernels.copy_blocks
    copy(targets.reshape(-1), sources.reshape(-1), sizes.reshape(-1))
    return Block(schema, lease, targets, sizes)
