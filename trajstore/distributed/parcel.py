"""Trajectories packed into one block of bytes for another process. Pure; no I/O.

A block is copied into Ray's object store, and from there into the store's memory, on this or another machine.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from trajstore.core.base.machine_code import kernels
from trajstore.core.columns.flat import Block, BlockTensors, FlatTrajectory
from trajstore.core.columns.memory import Arena, Lease, aligned
from trajstore.core.columns.portions import portions
from trajstore.core.columns.schema import Extent, Schema, intern_schema
from trajstore.errors import ConfigurationError

KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """Trajectories of one call, or a part of them.

    Attributes:
        head: schemas, extents and numbers of the trajectories, as JSON.
        data: concatenated columns, each aligned to 64 bytes.
    """

    head: bytes
    data: npt.NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return len(self.head) + self.data.nbytes


@dataclass(frozen=True, slots=True)
class Parcel:
    """Trajectories sent together.

    Attributes:
        key: random and unique, :data:`KEY_BYTES` long.
        pieces: the trajectories, in the order in which they were added.
    """

    key: bytes
    pieces: Sequence[Piece]


def uuids_of(key: bytes, count: int) -> bytes:
    """Return the UUIDs of a parcel's trajectories, 16 bytes each, hashed from the parcel's key.

    They are deterministic, so that a store recognizes a resent parcel. They must also look random: names are halves of
    them, and an index whose UUIDs compress below the size of random ones is refused.
    """
    return hashlib.shake_128(key).digest(16 * count)


def split(flats: Sequence[FlatTrajectory], limit: int) -> Iterator[tuple[list[FlatTrajectory], int]]:
    """Yield parts of a list and their bytes; a part of several trajectories has at most ``limit`` bytes."""
    return portions(flats, limit, lambda flat: flat.nbytes)


def new_key() -> bytes:
    """Return a random key for a new parcel."""
    return os.urandom(KEY_BYTES)


def pack(flats: Sequence[FlatTrajectory], arena: Arena) -> Piece:
    """Pack trajectories into a piece; their columns are copied into the arena."""
    sizes = [size for flat in flats for size in flat.sizes]
    sources = [address for flat in flats for address in flat.addresses]
    starts = [0, *accumulate(map(aligned, sizes))]
    lease, offset = arena.take(starts[-1])
    targets = np.array(starts[:-1], np.int64) + (lease.address + offset)
    kernels.copy_blocks(targets, np.array(sources, np.int64), np.array(sizes, np.int64))
    numbers: dict[Schema, int] = {}
    rows = []
    for flat in flats:
        number = numbers.setdefault(flat.schema, len(numbers))
        extent = flat.extent
        rows.append(
            (
                number,
                (extent.steps, extent.batch, extent.extra, extent.document),
                flat.num_samples,
                flat.max_episode_length,
                flat.model_weights_id,
                flat.versions,
                flat.facts,
            )
        )
    head = orjson.dumps({"schemas": [schema.to_json() for schema in numbers], "trajectories": rows})
    return Piece(head, lease.memory[offset : offset + starts[-1]])


def unpack(parcel: Parcel) -> list[FlatTrajectory]:
    """Return the trajectories of a parcel; they share its memory.

    Raises:
        ConfigurationError: the parcel was packed by another version of trajstore.
    """
    try:
        return [flat for piece in parcel.pieces for flat in _unpack(piece)]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"a parcel cannot be read ({type(error).__name__}: {error}): all machines must have the same trajstore"
        ) from error


def _unpack(piece: Piece) -> list[FlatTrajectory]:
    head: dict[str, Any] = orjson.loads(piece.head)
    schemas = [_interned(Schema.from_json(value)) for value in head["schemas"]]
    lease = Lease(_writable(piece.data))
    flats = []
    start = lease.address
    for number, extents, samples, longest, weights, versions, facts in head["trajectories"]:
        schema, extent = schemas[number], Extent(*extents)
        addresses, sizes = [], []
        for spec, width in zip(schema.columns, schema.row_nbytes, strict=True):
            addresses.append(start)
            sizes.append(extent.rows(spec.axis) * width)
            start += aligned(sizes[-1])
        block = Block(schema, lease, np.array([addresses], np.int64), np.array([sizes], np.int64))
        tensors = BlockTensors(block, extent)
        flats.append(
            FlatTrajectory(schema, extent, tensors, samples, longest, weights, versions and tuple(versions), facts)
        )
    if start - lease.address != piece.data.nbytes:
        raise ValueError(f"{piece.data.nbytes:,} of {start - lease.address:,} bytes arrived")
    return flats


def _interned(schema: Schema) -> Schema:
    return intern_schema(schema.kind, [(c.name, c.torch_dtype, c.row_shape, c.axis) for c in schema.columns])


def _writable(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return a writable alias of the bytes, to avoid torch's warning about read-only arrays; it is never written.

    Arrays from Ray's object store are read-only.
    """
    if data.flags.writeable or not data.nbytes:
        return data
    alias: Any = (ctypes.c_uint8 * data.nbytes).from_address(data.ctypes.data)
    alias.keeps = data  # keeps the memory alive
    return np.frombuffer(alias, np.uint8)
