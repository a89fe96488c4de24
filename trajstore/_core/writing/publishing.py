"""Makes the shards of a group durable, except unwritable trajectories; small pieces of columns are joined."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from trajstore._core.base.clock import microseconds
from trajstore._core.base.machine_code import kernels
from trajstore._core.files.base import Buffer, Directory, EncodedFile
from trajstore._core.formats.base import ShardContent, ShardManifest, TrajectoryFormat
from trajstore._core.formats.checksums import encoded_shard
from trajstore._core.formats.frames import could_be_stored_once
from trajstore._core.store.additions import entries_to_json, for_label
from trajstore._core.store.shard_table import shard_name
from trajstore._core.writing.groups import Run, ShardDraft
from trajstore.errors import StoreLockedError, listed

logger = logging.getLogger(__name__)

_JOIN_BELOW = 16 << 10
"""Pieces of a column that are smaller than this on average are joined, since each piece has a fixed cost."""


class Scratch:
    """Reusable memory of one writer thread."""

    def __init__(self) -> None:
        self._blocks: list[npt.NDArray[np.uint8]] = []
        self._used = 0

    def reset(self) -> None:
        """Allow all blocks to be reused."""
        self._used = 0

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return ``nbytes`` bytes, uninitialised, until the next :meth:`reset`."""
        if self._used == len(self._blocks):
            self._blocks.append(np.empty(0, np.uint8))
        if len(self._blocks[self._used]) < nbytes:
            self._blocks[self._used] = np.empty(nbytes, np.uint8)
        self._used += 1
        return self._blocks[self._used - 1][:nbytes]


def content_of(runs: Sequence[Run], extents: npt.NDArray[np.int64], scratch: Scratch) -> ShardContent:
    """Return the content of a shard, its small columns joined in ``scratch``.

    Args:
        runs: its trajectories.
        extents: of all of them, ``[trajectories, 4]``.
        scratch: memory for the joined pieces.
    """
    addresses = np.array([run.block.places[run.first] for run in runs])
    sizes = np.array([run.block.sizes[run.first : run.first + len(run)].sum(axis=0) for run in runs])
    totals = sizes.sum(axis=0)
    small = (totals < len(runs) * _JOIN_BELOW) & (len(runs) > 1)
    joined = scratch.take(int(totals[small].sum()))
    sources, lengths = addresses.T[small].reshape(-1), sizes.T[small].reshape(-1)
    kernels.copy_blocks(np.cumsum(lengths) - lengths + joined.ctypes.data, sources, lengths)
    pieces: list[Sequence[Buffer]] = []
    position = 0
    view: Any = joined
    for column, nbytes in enumerate(totals.tolist()):
        if small[column]:
            pieces.append([memoryview(view)[position : position + nbytes]])
            position += nbytes
        else:
            starts, ends = addresses[:, column].tolist(), sizes[:, column].tolist()
            pieces.append([run.block.bytes_at(*place) for run, *place in zip(runs, starts, ends, strict=True)])
    return ShardContent(runs[0].block.schema, extents, pieces)


_CONTENT = (TypeError, ValueError, ArithmeticError, LookupError, RecursionError)
_ENVIRONMENT = (OSError, ImportError, StoreLockedError)
_CONTENT_ERRNOS = (errno.ENAMETOOLONG, errno.EILSEQ)

_DOUBTS = 3
"""Attempts after which an ambiguous error is attributed to the trajectory."""


@dataclass(frozen=True, slots=True)
class Unwritable:
    """Unwritable trajectories: ids, bytes in memory, and the error."""

    ids: list[int]
    nbytes: int
    error: Exception


def is_of_content(error: Exception, failures: int) -> bool:
    """Return whether a write failed because of its content, not because of the disk or the machine.

    Args:
        error: the cause.
        failures: number of earlier failures.
    """
    if isinstance(error, OSError) and error.errno in _CONTENT_ERRNOS:
        return True
    if isinstance(error, _ENVIRONMENT):
        return False
    return isinstance(error, _CONTENT) or failures >= _DOUBTS


class Publisher:
    """Encodes and publishes parts of groups. One per thread.

    Args:
        directory: target.
        trajectory_format: format of the shards.
        new_shard: assigns and returns a shard number.
        once: store equal rows of ``next_obs`` and ``curr_obs`` once.
    """

    def __init__(
        self, directory: Directory, trajectory_format: TrajectoryFormat, new_shard: Callable[[], int], *, once: bool
    ) -> None:
        self._directory = directory
        self._format = trajectory_format
        self._once = once
        self._told: set[str] = set()
        self._new_shard = new_shard
        self._scratch = Scratch()

    def publish(self, parts: Sequence[ShardDraft], failures: int) -> tuple[list[ShardDraft], list[Unwritable]]:
        """Make parts durable; return the durable ones, perhaps split further, and the unwritable trajectories.

        Args:
            parts: of one group.
            failures: number of earlier failures.

        Raises:
            OSError: the disk failed, or accepts no file as large as a single trajectory.
            MemoryError: there is no memory to encode a single trajectory.
        """
        try:
            self._write(parts)
        except Exception as error:  # formats may raise anything; classified below
            too_much = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.EFBIG
            if not too_much and not is_of_content(error, failures):
                raise
            pieces = self._smaller(parts)
            if not pieces:
                if too_much:
                    raise
                (part,) = parts
                return [], [Unwritable(part.ids, part.nbytes, error)]
        else:
            return list(parts), []
        durable: list[ShardDraft] = []
        unwritable: list[Unwritable] = []
        for piece in pieces:
            good, bad = self.publish([piece], failures)
            durable += good
            unwritable += bad
        return durable, unwritable

    def _smaller(self, parts: Sequence[ShardDraft]) -> list[ShardDraft]:
        """Return smaller parts to try one by one; none for a single trajectory."""
        if len(parts) > 1:
            return list(parts)
        return parts[0].split(self._new_shard()) if len(parts[0].ids) > 1 else []

    def _write(self, parts: Sequence[ShardDraft]) -> None:
        files: list[EncodedFile] = []
        manifests = []
        self._scratch.reset()
        for part in parts:
            name = shard_name(part.number)
            content = content_of(part.runs, part.entries.extents, self._scratch)
            values = entries_to_json(part.entries)
            entries = for_label(values, np.full(len(part.entries), microseconds()))
            encoded, manifest = encoded_shard(self._format, name, content, entries=entries, search=self._once)
            manifests.append(manifest)
            if self._once:
                self._tell_twice(manifest)
            files += encoded
            part.record = orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
        self._directory.publish(files)
        for part, manifest in zip(parts, manifests, strict=True):
            part.manifest = manifest

    def _tell_twice(self, manifest: ShardManifest) -> None:
        """Warn once of each column whose rows do not repeat."""
        names = [manifest.schema.columns[number].name for number in could_be_stored_once(manifest.schema)]
        if fresh := [name for name in names if name not in self._told]:
            self._told.update(fresh)
            logger.warning(
                "%s: store_frames_once has no effect on %s in %s: too few rows equal curr_obs of the next step",
                self._directory.url,
                listed(fresh),
                manifest.name,
            )
