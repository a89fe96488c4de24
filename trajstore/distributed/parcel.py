"""Trajectories on their way to another process: checked, and packed into one block of bytes. Pure; no I/O.

The block travels through Ray's object store without being copied, and is copied once more, into the store's memory.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from trajstore.columns.flat import BlockTensors, FlatTrajectory
from trajstore.columns.memory import Lease, aligned
from trajstore.columns.schema import Extent, Schema, intern_schema
from trajstore.errors import ConfigurationError
from trajstore.machine_code import kernels

KEY_BYTES = 12
"""A trajectory's UUID is its parcel's key and its place in it; the place is in both halves, which names go by."""

_STEP = 0x9E3779B97F4A7C15  # odd, so that no two places of 2**64 give the same first half; 2**64 by the golden ratio


@dataclass(frozen=True, slots=True)
class Parcel:
    """A list of trajectories.

    Attributes:
        key: random, :data:`KEY_BYTES` long; two parcels never have the same.
        head: schemas, extents and numbers of the trajectories, as JSON.
        data: their columns one after another, each from a multiple of 64 bytes on.
    """

    key: bytes
    head: bytes
    data: npt.NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return len(self.head) + self.data.nbytes


def uuids_of(key: bytes, count: int) -> bytes:
    """Return the UUIDs of a parcel's trajectories, 16 bytes each.

    They are the same each time, so that whoever is sent a parcel twice can tell.
    """
    first, rest = int.from_bytes(key[:8], "big"), key[8:]
    halves = [((first + place * _STEP) % (1 << 64), place) for place in range(count)]
    return b"".join([half.to_bytes(8, "big") + rest + place.to_bytes(4, "big") for half, place in halves])


def split(flats: Sequence[FlatTrajectory], limit: int) -> Iterator[list[FlatTrajectory]]:
    """Cut a list so that each part, if it has more than one trajectory, has at most ``limit`` bytes."""
    part: list[FlatTrajectory] = []
    total = 0
    for flat in flats:
        nbytes = flat.nbytes
        if part and total + nbytes > limit:
            yield part
            part, total = [], 0
        part.append(flat)
        total += nbytes
    if part:
        yield part


def pack(flats: Sequence[FlatTrajectory]) -> Parcel:
    """Return trajectories as a parcel, their columns copied."""
    sizes = [tensor.nbytes for flat in flats for tensor in flat.tensors]
    starts = np.cumsum([0, *map(aligned, sizes)], dtype=np.int64)
    data = np.empty(int(starts[-1]), np.uint8)
    sources = np.array([tensor.data_ptr() for flat in flats for tensor in flat.tensors], np.int64)
    kernels().copy_blocks(starts[:-1] + data.ctypes.data, sources, np.array(sizes, np.int64))
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
            )
        )
    head = orjson.dumps({"schemas": [schema.to_json() for schema in numbers], "trajectories": rows})
    return Parcel(os.urandom(KEY_BYTES), head, data)


def unpack(parcel: Parcel) -> list[FlatTrajectory]:
    """Return the trajectories of a parcel; their columns lie in it.

    Raises:
        ConfigurationError: it was not packed by this version of trajstore.
    """
    try:
        return _unpack(parcel)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"a parcel cannot be read ({type(error).__name__}: {error}): all machines must have the same trajstore"
        ) from error


def _unpack(parcel: Parcel) -> list[FlatTrajectory]:
    head: dict[str, Any] = orjson.loads(parcel.head)
    schemas = [_interned(Schema.from_json(value)) for value in head["schemas"]]
    lease = Lease(_writable(parcel.data))
    flats = []
    start = lease.address
    for number, extents, samples, longest, weights, versions in head["trajectories"]:
        schema, extent = schemas[number], Extent(*extents)
        addresses = []
        for spec, width in zip(schema.columns, schema.row_nbytes, strict=True):
            addresses.append(start)
            start += aligned(extent.rows(spec.axis) * width)
        tensors = BlockTensors(schema, extent, lease, np.array(addresses, np.int64))
        flats.append(
            FlatTrajectory(
                schema, extent, tensors, samples, longest, weights, None if versions is None else tuple(versions)
            )
        )
    if start - lease.address != parcel.data.nbytes:
        raise ValueError(f"{parcel.data.nbytes:,} bytes arrived of {start - lease.address:,}")
    return flats


def _interned(schema: Schema) -> Schema:
    return intern_schema(schema.kind, [(c.name, c.torch_dtype, c.row_shape, c.axis) for c in schema.columns])


def _writable(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return the same bytes as an array that torch takes without a warning; nobody writes to it.

    What comes out of Ray's object store is read-only, of which torch knows nothing.
    """
    if data.flags.writeable or not data.nbytes:
        return data
    alias: Any = (ctypes.c_uint8 * data.nbytes).from_address(data.ctypes.data)
    alias.keeps = data  # as long as anything refers to the alias
    return np.frombuffer(alias, np.uint8)
