"""Trajectories packed into one block of bytes for another process. Pure; no I/O.

A block is copied into Ray's object store, and from there into the store's memory, on this or another machine.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from trajstore._core.columns.flat import Copied, FlatTrajectories, copied_together, lay_out
from trajstore._core.columns.memory import Arena, Lease, aligned
from trajstore._core.columns.schema import Schema, intern_schema
from trajstore.errors import ConfigurationError

KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """Trajectories of one call, or a part of them.

    Attributes:
        head: schemas, numbers, weights and facts of the trajectories, as JSON.
        data: the columns, laid out as in blocks.
    """

    head: bytes
    data: npt.NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return len(self.head) + self.data.nbytes


@dataclass(frozen=True, slots=True)
class AddRequest:
    """Trajectories sent together.

    Attributes:
        key: random and unique, :data:`KEY_BYTES` long.
        pieces: the trajectories, in the order in which they were added.
    """

    key: bytes
    pieces: Sequence[Piece]


def uuids_of(key: bytes, count: int) -> bytes:
    """Return the UUIDs of a request's trajectories, 16 bytes each, hashed from the request's key.

    They are deterministic, so that a store recognizes a resent request. They must also look random: names are halves of
    them, and an index whose UUIDs compress below the size of random ones is refused.
    """
    return hashlib.shake_128(key).digest(16 * count)


def new_key() -> bytes:
    """Return a random key for a new request."""
    return os.urandom(KEY_BYTES)


def pack(runs: Sequence[FlatTrajectories], arena: Arena) -> tuple[Piece, list[Copied]]:
    """Pack trajectories into a piece, copied into the arena; return it, and the copies."""
    blocks, data = copied_together(runs, arena)
    numbers: dict[Schema, int] = {}
    rows = [
        (numbers.setdefault(run.schema, len(numbers)), run.numbers.tolist(), run.weights, run.facts) for run in runs
    ]
    head = orjson.dumps({"schemas": [schema.to_json() for schema in numbers], "runs": rows})
    return Piece(head, data), [*zip(runs, blocks, strict=True)]


def unpack(request: AddRequest) -> list[FlatTrajectories]:
    """Return the trajectories of a request; they share its memory.

    Raises:
        ConfigurationError: the request was packed by another version of trajstore.
    """
    try:
        return [run for piece in request.pieces for run in _unpack(piece)]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"a request cannot be read ({type(error).__name__}: {error}): all machines must have the same trajstore"
        ) from error


def _unpack(piece: Piece) -> list[FlatTrajectories]:
    head: dict[str, Any] = orjson.loads(piece.head)
    schemas = [_interned(Schema.from_json(value)) for value in head["schemas"]]
    lease = Lease(_writable(piece.data))
    runs = []
    end = 0
    for schema_number, rows, weights, facts in head["runs"]:
        schema, numbers = schemas[schema_number], np.array(rows, np.int64)
        run = FlatTrajectories(
            schema, numbers, weights, facts, np.empty((len(rows), len(schema.columns)), np.int64), lease
        )
        nbytes = lay_out(run, np.empty_like(run.addresses), run.addresses)
        run.addresses[:] += lease.address + end
        end = aligned(end + nbytes)
        runs.append(run)
    if end != piece.data.nbytes:
        raise ValueError(f"{piece.data.nbytes:,} of {end:,} bytes arrived")
    return runs


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
