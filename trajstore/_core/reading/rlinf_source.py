"""Reads RLinf directories in place.

Opening files, and changing the table of open files, needs ``Contents.lock``.
"""

from __future__ import annotations

import logging
import uuid
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from trajstore._core.columns.flat import FlatTrajectory
from trajstore._core.columns.limits import UNKNOWN_VERSION
from trajstore._core.columns.schema import Extent
from trajstore._core.columns.steps import versions_of
from trajstore._core.files.base import Directory
from trajstore._core.formats.base import ShardManifest, ShardReader, StoredFile
from trajstore._core.formats.torch_zip import damaged_members
from trajstore._core.reading.address_table import MappedShard
from trajstore._core.reading.rlinf_contents import RLinfContents, read_contents
from trajstore._core.reading.rlinf_file import RLinfFile, RLinfFileReader
from trajstore._core.reading.shard_access import flat_of
from trajstore._core.reading.sources import Source
from trajstore._core.store.additions import columns_of
from trajstore._core.store.index import TrajectoryIndex
from trajstore._core.store.log_records import ids_in_words
from trajstore._core.store.lost_records import Damage
from trajstore._core.store.rlinf_layout import RLinfEntry
from trajstore._core.store.row_location import STARTS, RowLocation
from trajstore.errors import CorruptStoreError, IncompleteCheckpointError, UnsafeContentError, listed, trajectories

logger = logging.getLogger(__name__)

_OPEN_FILES = 8

OR_WITHOUT_IT = "; strict=False loads the rest, and `trajstore repair` makes a store of it"
"""Suffix of errors about unreadable files."""

NO_SHARD = -1


class RLinfSource(Source):
    """A directory written by RLinf; each trajectory is a shard of its own.

    Attributes:
        metadata: RLinf's ``metadata.json``.
        suffix: file extension of the trajectories.
        entries: trajectories with files, by row.
        missing: indexed trajectories without files.
        before: missing ones older than all present ones; ``index`` lists them without a shard.
        damaged: damaged parts of metadata and index, which were reconstructed.
    """

    linkable = False

    def __init__(self, directory: Directory, contents: RLinfContents) -> None:
        self.directory = directory
        self.metadata = contents.metadata
        self.damaged = contents.damage
        self.suffix = str(self.metadata.get("trajectory_format") or "pt")
        try:
            names = [entry.file_name(self.suffix) for entry in contents.entries]
        except UnsafeContentError as error:
            raise UnsafeContentError(f"{directory.url}: {error}") from error
        present = {name for name in directory.names() if "/" not in name}
        self.entries: list[RLinfEntry] = []
        self.missing: list[RLinfEntry] = []
        self.before: list[RLinfEntry] = []
        for entry, name in zip(contents.entries, names, strict=True):
            (self.entries if name in present else self.missing).append(entry)
            if not self.entries:
                self.before.append(entry)
        self.index = _index_of(directory, self.before, self.entries)
        self._files: OrderedDict[int, RLinfFile] = OrderedDict()
        self._sound: set[int] = set()
        self._told: set[str] = set()

    @property
    def unwritten(self) -> list[RLinfEntry]:
        """Return the oldest indexed trajectories without files, which RLinf probably never wrote.

        RLinf's checkpoints of a buffer in memory list all trajectories ever added, but store only the window.
        """
        return self.before if self.entries else []

    @property
    def gone(self) -> list[RLinfEntry]:
        """Return the trajectories whose files must have existed, and are absent."""
        return self.missing[len(self.unwritten) :]

    def unwritten_in_words(self) -> str:
        """Return the message about absent files that are no damage."""
        ids = ids_in_words([entry.trajectory_id for entry in self.unwritten])
        noun = "id" if len(self.unwritten) == 1 else "ids"
        return (
            f"{trajectories(len(self.unwritten))}, the oldest of the index, without a file ({noun} {ids}), as in "
            "RLinf's checkpoints of a buffer in memory; where all had been written, they were deleted"
        )

    @classmethod
    def open(cls, directory: Directory, strict: bool | None) -> RLinfSource:
        """Read metadata and index, and check which files exist.

        Args:
            directory: an RLinf directory.
            strict: whether all indexed files must exist; False also reconstructs damaged metadata and index.

        Raises:
            StoreNotFoundError: metadata or index is absent.
            IncompleteCheckpointError: the index names absent files (``strict``); lists them.
            CorruptStoreError: metadata or index is torn, or not RLinf's.
            UnsafeContentError: a file name points outside the directory.
        """
        source = cls(directory, read_contents(directory, lenient=strict is False))
        if source.missing and strict:
            total = len(source.missing) + len(source.entries)
            raise IncompleteCheckpointError(
                f"{directory.url}: {len(source.missing):,} of {trajectories(total)} missing: "
                f"{source.names_of(source.missing)}; copy the files there, or load with strict=False to do without them"
            )
        return source

    def names_of(self, entries: Iterable[RLinfEntry]) -> str:
        """Return the files of some trajectories, for a message."""
        return listed(entry.file_name(self.suffix) for entry in entries)

    def missing_in_words(self) -> list[str]:
        """Return a sentence per kind of indexed but absent trajectory.

        Raises:
            IncompleteCheckpointError: all are absent.
        """
        if self.missing and not self.entries:
            raise IncompleteCheckpointError(
                f"{self.directory.url}: the index names {trajectories(len(self.missing))}, and none is there: "
                f"{self.names_of(self.missing)}; copy the files there"
            )
        total = len(self.missing) + len(self.entries)
        return [
            f"{self.directory.url}: the index names {trajectories(total)}; {len(entries):,} not there, {reason}: "
            f"{self.names_of(entries)} (strict=True refuses this)"
            for entries, reason in (
                (self.unwritten, "as in RLinf's checkpoints of a buffer in memory; they are never drawn"),
                (self.gone, "though older ones are: the directory is damaged; copy the files there"),
            )
            if entries
        ]

    @property
    def shards(self) -> int:
        return len(self.entries)

    def file(self, row: int) -> RLinfFile:
        """Return a trajectory's open file; the last few stay open."""
        file = self._files.get(row)
        if file is None:
            name = self.entries[row].file_name(self.suffix)
            file = _opened(self.directory, name, self.entries[row])
            self._tell(file)
            self._files[row] = file  # after the check, because rows are read by the index's numbers
            if len(self._files) > _OPEN_FILES:
                self._files.popitem(last=False)
            if self.checked and row not in self._sound:
                damage = self.damage(row)
                if damage:
                    del self._files[row]
                    raise CorruptStoreError(f"{file.source}: {'; '.join(damage)}; restore it from a copy")
                self._sound.add(row)
        return file

    def leave_out_unreadable(self) -> list[Damage]:
        """Open every file, drop unreadable trajectories, and return their damage.

        Checksums are not compared.
        """
        damage, readable = [], []
        for entry in self.entries:
            try:
                _opened(self.directory, entry.file_name(self.suffix), entry)
            except (CorruptStoreError, UnsafeContentError) as error:
                text = str(error).removesuffix(OR_WITHOUT_IT)
                damage.append(Damage(text, ((entry.trajectory_id, entry.trajectory_id),)))
            else:
                readable.append(entry)
        if damage:
            self.entries = readable
            self.index = _index_of(self.directory, self.before, self.entries)
            self._files.clear()
        return damage

    def _tell(self, file: RLinfFile) -> None:
        """Warn once per field about data that is not sampled or not stored."""
        for name, message in file.unrepresented():
            if name not in self._told:
                self._told.add(name)
                logger.warning("%s: field %s %s (reported once for this field)", file.source, name, message)

    def unrepresented(self, row: int) -> list[str]:
        """Return the fields of a trajectory's file that are not sampled or not stored, with the reason."""
        return [f"field {name} {message}" for name, message in self.file(row).unrepresented()]

    def extent(self, row: int) -> Extent | None:
        return self.file(row).content.extent

    def manifest(self, row: int) -> ShardManifest:
        file = self.file(row)
        name = self.entries[row].file_name(self.suffix)
        schema = file.content.schema
        columns, extent = schema.columns, file.content.extent
        rows = tuple(extent.rows(column.axis) for column in columns)
        return ShardManifest(
            name=name,
            format="rlinf",
            schema=schema,
            files=(StoredFile(name, len(file.map), 0),),
            places=(None,) * len(columns),
            column_crc32=(None,) * len(columns),
            rows=rows,
            nbytes=schema.plain_nbytes(rows),
        )

    def map_shard(self, row: int) -> MappedShard | None:
        return self.file(row).mapped()

    def reader(self, row: int) -> ShardReader:
        return RLinfFileReader(self.file(row))

    def damage(self, row: int) -> list[str]:
        """Return the damage of a readable trajectory file; its pickles have no checksums."""
        file, entry = self.file(row), self.entries[row]
        indexed = {"model_weights_id": entry.model_weights_id, "max_episode_length": entry.max_episode_length}
        return [
            *(
                f"{name}: checksum does not fit the content"
                for name in damaged_members(file.map.view, source=file.source)
            ),
            *(
                f"{name} is {file.fields[name]!r}, the index says {value!r}"
                for name, value in indexed.items()
                if file.fields.get(name, value) != value
            ),
        ]

    def flat(self, row: int) -> FlatTrajectory:
        """Return a trajectory as columns."""
        file = self.file(row)
        entry = self.index.entry(len(self.before) + row)
        trajectory = flat_of(RLinfFileReader(file), file.content.schema, file.content.extent, RowLocation(row), entry)
        trajectory.versions = versions_of(trajectory)
        return trajectory


def _opened(directory: Directory, name: str, entry: RLinfEntry) -> RLinfFile:
    """Open a trajectory's file.

    Raises:
        CorruptStoreError, UnsafeContentError: it is unreadable, or does not match the index.
    """
    try:
        file = RLinfFile(directory, name)
        extent = file.content.extent
        if (extent.steps, extent.batch) != entry.shape[:2]:
            raise CorruptStoreError(
                f"{file.source}: is {[extent.steps, extent.batch]} steps x environments, "
                f"the index says {list(entry.shape[:2])}"
            )
    except (CorruptStoreError, UnsafeContentError) as error:
        raise type(error)(f"{error}{OR_WITHOUT_IT}") from error
    return file


def _index_of(directory: Directory, before: list[RLinfEntry], there: list[RLinfEntry]) -> TrajectoryIndex:
    """Return the entries as an index, those before without a shard; extra rows are filled in when a file is opened."""
    index = TrajectoryIndex()
    entries = before + there
    if not entries:
        return index
    unknown = (UNKNOWN_VERSION, UNKNOWN_VERSION)
    numbers = [(e.num_samples, *e.shape[:2], 0, 0, 0, e.max_episode_length, *unknown) for e in entries]
    weights = [e.model_weights_id for e in entries]
    ids = [e.trajectory_id for e in entries]
    uuids = b"".join(uuid.uuid5(uuid.NAMESPACE_URL, f"{directory.url}/{number}").bytes for number in ids)
    rows = np.maximum(np.arange(-len(before), len(there), dtype=np.int32), NO_SHARD)
    starts = dict.fromkeys(STARTS, np.zeros(len(entries), np.int64))
    index.append({**columns_of(np.array(numbers, np.int64), weights, ids, uuids, index.texts), "shard": rows, **starts})
    return index
