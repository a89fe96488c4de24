"""Trajectories in private memory: what a buffer keeps between ``add_trajectories`` and the disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import numpy as np

from trajstore.columns.flat import Block, BlockTensors, FlatTrajectory
from trajstore.columns.memory import ALIGNMENT, Arena
from trajstore.columns.portions import portions
from trajstore.machine_code import kernels

_FEW_BYTES = 4 << 20

_BLOCK_BYTES = 1 << 20
"""Most bytes of a block of several trajectories: it stays as long as one of them is needed."""


@dataclass(slots=True, eq=False)
class OwnedTrajectory(FlatTrajectory):
    """A flat trajectory whose columns lie in memory of their own, those of several one after the other."""

    tensors: BlockTensors


def copied(flats: Sequence[FlatTrajectory], arena: Arena) -> list[OwnedTrajectory]:
    """Return copies of trajectories in memory of the arena; the caller may then change or free their tensors."""
    owned: list[OwnedTrajectory] = []
    for _, run in groupby(flats, attrgetter("schema")):
        for portion, _ in portions(run, _BLOCK_BYTES, attrgetter("nbytes")):
            owned += _in_one_block(portion, arena)
    return owned


def _in_one_block(flats: Sequence[FlatTrajectory], arena: Arena) -> Iterator[OwnedTrajectory]:
    schema = flats[0].schema
    extents = np.array([flat.extent for flat in flats], np.int64)
    sources = np.array([flat.addresses for flat in flats], np.int64)
    sizes, targets = np.empty_like(sources), np.empty_like(sources)
    nbytes = kernels().lay_out(extents, *schema.layout, sizes, targets, ALIGNMENT)
    lease, offset = arena.take(nbytes)
    targets += lease.address + offset
    copy = kernels().copy_few_blocks if nbytes <= _FEW_BYTES else kernels().copy_blocks
    copy(targets.reshape(-1), sources.reshape(-1), sizes.reshape(-1))
    block = Block(schema, lease, targets, sizes)
    for at, flat in enumerate(flats):
        yield OwnedTrajectory(
            schema,
            flat.extent,
            BlockTensors(block, at, flat.extent),
            flat.num_samples,
            flat.max_episode_length,
            flat.model_weights_id,
            flat.versions,
            flat.facts,
        )
