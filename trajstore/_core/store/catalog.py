"""The committed state of one directory: its snapshot and the valid tail of its log.

A writer keeps its catalog current; a reader loads and refreshes one. No lock on the directory is needed: snapshots are
replaced by rename, the log only grows, and an overlap of the two is harmless. Among threads, a writer's catalog is
guarded by ``CommitLog._lock``, a follower's by ``View.steady``.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import orjson

from trajstore._core.columns.limits import MAX_GENERATION, MAX_ID
from trajstore._core.files.base import Directory, version_in
from trajstore._core.formats.base import SHARDS_FOLDER
from trajstore._core.store.committed import NONSENSE, Change, Committed
from trajstore._core.store.index import COLUMNS, TrajectoryIndex
from trajstore._core.store.index_file import index_from_json
from trajstore._core.store.json_arrays import array_from_json, declared_rows
from trajstore._core.store.log_records import (
    LOG_FOLDER,
    LogTail,
    decode_lines,
    natural,
    segment_generation,
    segment_name,
)
from trajstore._core.store.notes import Notes
from trajstore._core.store.run_ids import RANK_LIMIT
from trajstore._core.store.saved_points import Pins, Snapshot, pin_name
from trajstore._core.store.sealed import (
    COPY_NAME,
    FROM_A_COPY,
    INDEX_NAME,
    LAYOUT,
    LEDGER_NAME,
    METADATA_NAME,
    OR_WHAT_IS_WHOLE,
    check_owner,
    parse_metadata,
    unseal,
    without_advice,
)
from trajstore._core.store.shard_table import ShardTable
from trajstore.errors import CorruptStoreError, StoreError, StoreNotFoundError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_RECORDS_AT_ONCE = 256  # log records applied at once, while a refresh holds a lock
_ATTEMPTS = 20  # a reader that raced with a snapshot loads again


def log_segments(directory: Directory) -> list[tuple[int, str]]:
    """Return first generation and name of each log segment, in order.

    Folders with such a name are included; reading one raises a clear error.
    """
    files, folders = directory.listing(LOG_FOLDER)
    return sorted((first, name) for name in (*files, *folders) if (first := segment_generation(name)) is not None)


class Catalog(Committed):
    """The committed state of one directory, loaded from it and refreshed.

    Attributes:
        directory: location of the files.
        segment: the newest log segment that was read; its valid records end at ``segment_end``, followed by
            ``segment_torn`` bytes.
    """

    def __init__(self, directory: Directory) -> None:
        super().__init__(Pins(directory))
        self.directory = directory
        self.segment = ""
        self.segment_end = 0
        self.segment_torn = 0
        self.index_damage = ""
        """Damage of the index file, where its copy was read; empty if there is none."""
        self._seen: Any = None
        """Version of the files that have no commits beyond those loaded, see :meth:`behind`."""
        self.shares: int | None = None
        """Number of ranks whose shares are checkpoints beside this one; None if it is no checkpoint of a share."""
        self.told_ids = 0
        """Next id according to ``metadata.json``, which was read before the log."""

    @staticmethod
    def exists(directory: Directory) -> bool:
        """Return whether the directory holds a trajstore store (a RLinf directory does not)."""
        try:
            values = orjson.loads(directory.read(METADATA_NAME))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except (orjson.JSONDecodeError, CorruptStoreError):
            return bool(directory.names(LOG_FOLDER)) or bool(directory.names(SHARDS_FOLDER))
        return isinstance(values, dict) and values.get("layout") == LAYOUT

    @staticmethod
    def is_beginning(directory: Directory, name: str) -> bool:
        """Return whether a file is a snapshot of a store without commits."""
        if name not in (INDEX_NAME, COPY_NAME):
            return False
        try:
            value = unseal("snapshot", directory.read(name), name)
        except CorruptStoreError:
            return False
        return isinstance(value, dict) and value.get("generation") == 0 and value.get("next_id") == 0

    @classmethod
    def open(cls, directory: Directory) -> Catalog:
        """Load the newest state of a directory.

        Raises:
            StoreNotFoundError: there is no store.
            UnsupportedVersionError: it has another layout version.
            CorruptStoreError: snapshot or log is damaged; names the file.
        """
        for _ in range(_ATTEMPTS):
            catalog = cls(directory)
            catalog._load_snapshot()
            # Load again if a snapshot was taken and older segments deleted between the two reads.
            if catalog._read_log() and catalog.metadata()["generation"] <= catalog.generation:
                for check in catalog.end_checks():
                    check()
                return catalog
        raise CorruptStoreError(f"{directory.url}: records are missing between {INDEX_NAME} and {LOG_FOLDER}/")

    @classmethod
    def create(cls, directory: Directory) -> Catalog:
        """Return the state of a directory without commits (writes nothing)."""
        catalog = cls(directory)
        catalog.store_id = str(uuid.uuid4())
        return catalog

    def refresh(self) -> bool:
        """Apply new commits; return whether there were any.

        After a snapshot by the writer the arrays are reloaded, which invalidates positions.
        """
        before = self.generation
        if not self._read_log() or self.metadata()["generation"] > self.generation:
            fresh = Catalog.open(self.directory)
            self.__dict__.update(fresh.__dict__)
        return self.generation != before

    def behind(self, listed: Mapping[str, str] | None = None) -> bool:
        """Return whether there are new commits; changes nothing, so other threads may keep reading.

        A commit is appended to the segment that was read or begins the next one, and a snapshot replaces
        ``metadata.json``, before it removes segments.

        Args:
            listed: versions of the directory's files, as of :meth:`Directory.listed`; None: it is asked.
        """
        files, after = (self.segment, segment_name(self.generation + 1), METADATA_NAME), segment_name(self.generation)
        version = self.directory.version(files, after) if listed is None else version_in(listed, files, after)
        if version is not None and version == self._seen:
            return False
        behind = self._is_behind()
        self._seen = None if behind else version
        return behind

    def _is_behind(self) -> bool:
        segments = self._segments()  # a writer removes them after it has renewed the metadata
        if self.metadata()["generation"] > self.generation:
            return True
        if not segments or segments[-1][1] == self.segment:
            try:
                return bool(segments) and self.directory.size(self.segment) != self.segment_end + self.segment_torn
            except FileNotFoundError:
                return True
        return True

    def metadata(self) -> dict[str, Any]:
        """Return the directory's validated ``metadata.json``."""
        source = f"{self.directory.url}/{METADATA_NAME}"
        values = parse_metadata(self.directory.read(METADATA_NAME), source)
        try:
            natural(values["generation"])
        except (KeyError, ValueError) as error:
            raise CorruptStoreError(f"{source}: generation: {error}") from error
        if not isinstance(values.get("trajectory_format", ""), str):
            raise CorruptStoreError(f"{source}: trajectory_format: {values['trajectory_format']!r}, not a text")
        return values

    @property
    def ranks(self) -> int | None:
        """Number of ranks that saved this checkpoint of a share, or the newest point, together; None if unknown."""
        points = self.points()
        return self.shares or (points[-1].ranks if points else None)

    # -- whether the log ends where it ended --------------------------------------------------------

    def end_checks(self) -> tuple[Callable[[], None], ...]:
        """Return checks that detect a log truncated between two records, which looks like an earlier store.

        Pins record the generation of their commit, and ``metadata.json``, read before the log, the next id at its last
        update; both describe durable commits only. Each check raises :class:`CorruptStoreError`.
        """
        return self._check_pins, self._check_ids

    def _note_told(self, metadata: Mapping[str, Any]) -> None:
        counter = metadata.get("trajectory_counter")
        self.told_ids = counter if isinstance(counter, int) else 0
        ranks = metadata.get("ranks")
        self.shares = ranks if isinstance(ranks, int) and 0 < ranks <= RANK_LIMIT else None

    def _check_pins(self) -> None:
        for head in self.pins.heads.values():
            if head.kind != "aside" and head.generation > self.generation:  # on a mirror, asides precede the index
                raise self._cut(
                    f"ends with generation {self.generation}, and {pin_name(head.name)} was made at generation "
                    f"{head.generation}"
                )

    def _check_ids(self) -> None:
        if self.told_ids > self.next_id:
            ends = f"ends with id {self.next_id - 1}" if self.next_id else "has no trajectory"
            raise self._cut(f"{ends}, and by {METADATA_NAME} all ids up to {self.told_ids - 1} were committed")

    def _cut(self, what: str) -> CorruptStoreError:
        where = f"{self.directory.url}/{LOG_FOLDER}"
        return CorruptStoreError(f"{where}: {what}: the log was cut or lost{FROM_A_COPY}{OR_WHAT_IS_WHOLE}")

    # -- loading ----------------------------------------------------------------------------------

    def _load_snapshot(self) -> None:
        source = f"{self.directory.url}/{INDEX_NAME}"
        try:
            metadata = self.metadata()
            self._note_told(metadata)
            value = self._index_value(source, metadata.get("store_id"))
        except StoreNotFoundError:
            raise  # it existed when it was opened
        except FileNotFoundError as error:
            if self.directory.exists() and self.directory.names(SHARDS_FOLDER):
                present, _ = self.directory.listing()
                absent = [name for name in (METADATA_NAME, INDEX_NAME) if name not in present]
                if not absent:  # both were just created
                    self._load_snapshot()
                    return
                lost = f"without {' and '.join(absent)}, but there are shards{FROM_A_COPY}{OR_WHAT_IS_WHOLE}"
                if METADATA_NAME in absent and LEDGER_NAME in present:
                    raise StoreNotFoundError(
                        f"{self.directory.url}: no store here yet: the first copy to this mirror is running, or "
                        f"was interrupted; open it again when it has ended. If it has: {lost}"
                    ) from error
                raise CorruptStoreError(f"{self.directory.url}: {lost}") from error
            raise StoreNotFoundError(f"{self.directory.url}: no trajectory store here (no {METADATA_NAME})") from error
        except NotADirectoryError as error:
            raise StoreNotFoundError(f"{self.directory.url}: not a directory") from error
        self._take_snapshot(value, source)

    def _index_value(self, source: str, store_id: str | None) -> Any:
        """Return the value of the index file, or of its copy.

        Args:
            source: path of the index file.
            store_id: UUID of the store, which its copy must have; None if unknown.

        Raises:
            FileNotFoundError, CorruptStoreError: neither can be read; the error is that of the index file.
        """
        try:
            return self._unsealed(INDEX_NAME)
        except (FileNotFoundError, CorruptStoreError) as error:
            with suppress(FileNotFoundError, CorruptStoreError):
                value = self._unsealed(COPY_NAME)
                check_owner(value, store_id, COPY_NAME)
                why = "missing" if isinstance(error, FileNotFoundError) else without_advice(str(error))
                self.index_damage = f"{source}: {why.removeprefix(f'{source}: ')}; its copy {COPY_NAME} is used instead"
                logger.warning("%s; the next writer writes it again", self.index_damage)
                return value
            if isinstance(error, FileNotFoundError):
                raise
            raise CorruptStoreError(f"{without_advice(str(error))}{FROM_A_COPY}{OR_WHAT_IS_WHOLE}") from error

    def _unsealed(self, name: str) -> Any:
        data = self.directory.read(name)
        self.snapshot_bytes = len(data)
        return unseal("snapshot", data, f"{self.directory.url}/{name}")

    def _take_snapshot(self, value: Any, source: str) -> None:
        """Load the index file's value.

        Raises:
            CorruptStoreError: it is inconsistent; names the file.
        """
        try:
            self.generation = self.snapshot_generation = natural(value["generation"], MAX_GENERATION)
            self.visit = natural(value.get("visit", 0), MAX_GENERATION)
            self.line = tuple(map(str, value.get("line", ())))
            self.next_id = natural(value["next_id"], MAX_ID // 2)
            self.next_shard = natural(value["next_shard"], MAX_ID // 2)
            self.store_id = str(value["store_id"])
            self.fences = [natural(generation, MAX_GENERATION) for generation in value["fences"]]
            self.restored = [natural(number, MAX_ID // 2) for number in value.get("restored", ())]
            entries = sum(declared_rows(value[name]["columns"]["shard"]) for name in ("live", "pinned"))
            entries += declared_rows(value["notes"]["columns"]["ids"])
            entries += natural(value.get("row_shards", 0), 1 << 31)  # used by pins only
            if declared_rows(value["shards"]["numbers"]) > entries:
                raise CorruptStoreError("there are more shards than trajectories, and values of them")
            self.shards = ShardTable.from_json(value.pop("shards"))
            self.pinned = index_from_json(value.pop("pinned"), len(self.shards), self._row_checks(), self._gate)
            self.notes = Notes.from_json(value.pop("notes"), len(self.shards))
        except (*NONSENSE, CorruptStoreError) as error:
            raise CorruptStoreError(f"{source}: {error}") from error
        self._schemas = list(self.shards.schemas)
        self._take_live(value.pop("live"), source)

    def _take_live(self, value: Any, source: str) -> None:
        self.index = self._live_from(value, source)

    def _live_from(
        self, value: Any, source: str, *, rows: tuple[int, int] | None = None, later: str | None = None
    ) -> TrajectoryIndex:
        """Return the live entries of the index file, with their late values; arguments as in :func:`index_from_json`.

        Raises:
            CorruptStoreError: they are inconsistent; names the file.
        """
        try:
            index = index_from_json(value, len(self.shards), self._row_checks(), self._gate, rows=rows, later=later)
        except (*NONSENSE, CorruptStoreError) as error:
            raise CorruptStoreError(f"{source}: {error}") from error
        self.notes.lay_over(index)
        self._check_given_rows(self.notes, (index,), source)
        return index

    def news(self) -> list[tuple[str, LogTail]] | None:
        """Read the new log records, by segment; None if some are missing (a newer snapshot has them)."""
        for _ in range(_ATTEMPTS):
            tails = self._following_tails()
            if tails is None:
                return None
            last = max((_generation_of(record) for _, tail in tails for record in tail.records), default=0)
            if self.metadata()["generation"] <= max(self.generation, last):
                return tails
            # A snapshot was taken after the log was read: its commits are in the log, unless segments were deleted.
            if any(tail.records for _, tail in tails):
                continue
            if not any(first <= self.generation + 1 for first, _ in self._segments()):
                return None
        return None

    def _segments(self) -> list[tuple[int, str]]:
        """Return the log segments, without fences that the snapshot includes; those are never deleted."""
        had = {generation for generation in self.fences if generation <= self.snapshot_generation}
        return [segment for segment in log_segments(self.directory) if segment[0] not in had]

    def _following_tails(self) -> list[tuple[str, LogTail]] | None:
        generation = self.generation
        tails: list[tuple[str, LogTail]] = []
        segments = self._segments()
        for place, (first, name) in enumerate(segments):
            last = place == len(segments) - 1
            if not last and segments[place + 1][0] <= generation + 1:
                continue  # all of it is applied
            if first > generation + 1:
                return None
            offset = self.segment_end if name == self.segment else 0
            try:
                data = self.directory.read(name, offset)
            except FileNotFoundError:
                return None
            tail = decode_lines(data, f"{self.directory.url}/{name}", offset)
            if tail.torn and not last:
                raise CorruptStoreError(
                    f"{self.directory.url}/{name}: the record at byte {tail.end} is damaged; "
                    "restore the file from a copy"
                )
            tails.append((name, tail))
            generation = max([generation, *(_generation_of(record) for record in tail.records[-1:])])
        return tails if segments or not self.segment else None

    def _read_log(self) -> bool:
        """Apply new records of all segments; return False if some are missing (a newer snapshot has them)."""
        self.load_pins()
        news = self._following_tails()
        for _ in self.changes(news or ()):
            pass
        return news is not None

    def changes(self, news: Iterable[tuple[str, LogTail]]) -> Iterator[Change]:
        """Apply the records returned by :meth:`news`; yield each change."""
        for name, tail in news:
            yield from self._apply_tail(tail, name)

    def _apply_tail(self, tail: LogTail, name: str) -> Iterator[Change]:
        source = f"{self.directory.url}/{name}"
        fresh: list[Mapping[str, Any]] = []
        for record in tail.records:
            generation = record.get("generation")
            if not isinstance(generation, int):
                raise CorruptStoreError(f"{source}: a record without generation")
            if generation <= self.generation:
                continue
            newest = self.generation + len(fresh)
            if generation <= newest:  # a duplicated line
                if record == fresh[generation - self.generation - 1]:
                    continue
                raise CorruptStoreError(f"{source}: two records of generation {generation}; two writers have written")
            if generation != newest + 1 or generation > MAX_GENERATION:
                raise CorruptStoreError(f"{source}: generation {generation} follows {newest}; records are missing")
            fresh.append(record)
        for begin in range(0, len(fresh), _RECORDS_AT_ONCE):
            yield from self.apply_all(fresh[begin : begin + _RECORDS_AT_ONCE], source)
        if name != self.segment:
            self.log_bytes = 0
        self.log_bytes += tail.end - (self.segment_end if name == self.segment else 0)
        self.segment, self.segment_end, self.segment_torn = name, tail.end, tail.torn

    def read_state(self, point: str | int) -> dict[str, Any]:
        """Return the state of a saved point, by name or step, even while a writer replaces it.

        Raises:
            StoreNotFoundError: there is no such point; names the existing ones.
            CorruptStoreError: its pin or the state is damaged.
        """
        return self._again(lambda: self.pins.state_of(self.snapshot(point)))

    def shown_under(self, name: str) -> tuple[Snapshot, TrajectoryIndex, Notes]:
        """Return a snapshot with its trajectories and late values, even while a writer replaces it.

        Raises:
            StoreNotFoundError: there is none of this name; names the existing ones.
            CorruptStoreError: some of it is missing or damaged.
        """

        def read() -> tuple[Snapshot, TrajectoryIndex, Notes]:
            head = self.snapshot(name)
            return head, *self.shown_in(head)

        return self._again(read)

    def _again(self, read: Callable[[], T]) -> T:
        """Read again if a file was replaced meanwhile."""
        for attempt in range(_ATTEMPTS):
            try:
                return read()
            except CorruptStoreError as error:
                if attempt == _ATTEMPTS - 1 or not isinstance(error.__cause__, FileNotFoundError):
                    raise
            self.load_pins()
        raise AssertionError("unreachable")

    _damaged_pin: Callable[[CorruptStoreError], None] | None = None
    """Called with the error of a damaged pin; None refuses damaged pins."""

    def load_pins(self) -> None:
        """Read the ids that pins name; drop evicted entries that no pin names any more."""
        self.pins.load(self._damaged_pin)
        self.drop_unnamed()  # also right after loading: the snapshot may be older than the removal of a pin

    def drop_unnamed(self) -> None:
        """Drop evicted entries that no pin names any more."""
        unpinned = np.flatnonzero(~self.pins.named(self.pinned["trajectory_id"]))
        if len(unpinned):
            self.pinned.drop(self.pinned.first + unpinned)
            # A reader of the pin shows this generation, so they are unneeded only from the next one on.
            self.shards.need(self.needed_shards(), self.generation + 1)


class ReadersCatalog(Catalog):
    """Catalog for readers: entries are decoded on first use, and columns that few calls need on their own first use.

    Invalid values behind a valid checksum are detected at that time; :class:`CorruptStoreError` names the file.
    """

    _live: TrajectoryIndex | None
    _unread: Any = None
    """Live entries as in the index file, until they are decoded."""

    @property
    def index(self) -> TrajectoryIndex:
        """The live trajectories, oldest first."""
        if self._live is None:
            self._live = self._unread_rows()
            self._unread = None
        return self._live

    @index.setter
    def index(self, index: TrajectoryIndex) -> None:
        self._live = index

    @index.deleter
    def index(self) -> None:
        self._live = self._unread = None

    def _take_live(self, value: Any, source: str) -> None:
        self._live, self._unread = None, value

    def part(self, first: int, end: int) -> TrajectoryIndex:
        """Return the live trajectories ``first <= i < end``, counted from the oldest.

        Raises:
            CorruptStoreError: any of them is damaged; names the file.
        """
        if self._live is None and not len(self.notes):
            return self._unread_rows((first, end))
        return self.index.slice(first, end)

    def _unread_rows(self, rows: tuple[int, int] | None = None) -> TrajectoryIndex:
        source = f"{self.directory.url}/{INDEX_NAME}"
        return self._live_from(self._unread, source, rows=rows, later=source)

    def changes(self, news: Iterable[tuple[str, LogTail]]) -> Iterator[Change]:
        news = list(news)
        if any(tail.records for _, tail in news):
            self._live = self.index  # as of the index file, before they change
        return super().changes(news)

    def count(self) -> int:
        """Return the number of live trajectories, without decoding the entries."""
        return declared_rows(self._unread["columns"]["shard"]) if self._live is None else len(self._live)

    def uuids(self) -> npt.NDArray[Any]:
        """Return the UUID of each live trajectory, ``[n]`` of 16 bytes, without decoding other columns.

        Raises:
            CorruptStoreError: the index file has none, or another number.
        """
        if self._live is not None:
            return self._live["uuid"]
        try:
            uuids = array_from_json(self._unread["columns"]["uuid"], COLUMNS["uuid"])
            if len(uuids) != self.count():
                raise ValueError(f"{len(uuids)} UUIDs, must be {self.count()}")
        except (*NONSENSE, CorruptStoreError) as error:
            raise CorruptStoreError(f"{self.directory.url}/{INDEX_NAME}: {error}") from error
        return uuids


def oldest_generation(directory: Directory) -> int:
    """Return the snapshot's generation, a lower bound for all later readers.

    0 if unknown: there is no store, or its metadata is damaged.
    """
    try:
        return int(Catalog(directory).metadata()["generation"])
    except (StoreError, OSError):
        return 0


def _generation_of(record: Mapping[str, Any]) -> int:
    """Return a record's generation; 0 if it has none (and is refused when applied)."""
    value = record.get("generation")
    return value if isinstance(value, int) else 0
