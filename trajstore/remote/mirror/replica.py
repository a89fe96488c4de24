"""The mirror's directory, changed without ever being unreadable.

docs/design/many-machines.md has the order of every change, and the state that a crash leaves after each step.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import orjson

from trajstore._core.files.base import Directory, EncodedFile, WriterLock
from trajstore._core.files.filemap import FileMap
from trajstore._core.files.holder import holder_document
from trajstore._core.formats.base import SHARDS_FOLDER, ShardManifest
from trajstore._core.formats.checksums import check_file
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.log_records import LOG_FOLDER, manifest_to_json, segment_generation, segment_name
from trajstore._core.store.saved_points import PINS_FOLDER, pin_name
from trajstore._core.store.sealed import INDEX_NAME, LEDGER_NAME, METADATA_NAME
from trajstore._core.writing.commit_log import LOG_BYTES, CommitLog, too_many_segments
from trajstore.errors import ConfigurationError, CorruptStoreError, StoreError, counted, listed
from trajstore.remote.mirror.source import Line, Picture, strange_id


class Ledger:
    """The store that a mirror copies, and the copied shards that its index does not name yet.

    Written before the first copy to an empty place, and periodically during long copying.

    Args:
        target: the mirror's directory.
        source: URL of the store.
    """

    def __init__(self, target: Directory, source: str) -> None:
        self.lists_shards = False
        """Whether it lists shards, and must be rewritten once the index names them."""
        self.of_another = ""
        """The other store that it belongs to, in words; empty if none."""
        self._target = target
        self._source = source
        self._store_id = ""

    def read(self, store_id: str) -> dict[int, int] | None:
        """Return the checksums of listed shards (:func:`crc_of`), by number.

        Args:
            store_id: of the mirrored store.

        Returns:
            None if the ledger is absent, or another store's.
        """
        self._store_id = store_id
        try:
            value = orjson.loads(self._target.read(LEDGER_NAME))
            copied = {int(number): int(crc) for number, crc in value["copied"]}
        except FileNotFoundError:
            return None
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, CorruptStoreError):
            logger.warning("%s/%s: cannot be read; the shards in it are copied again", self._target.url, LEDGER_NAME)
            return {}
        self.lists_shards = bool(copied)
        if value.get("store_id") == store_id:
            return copied
        self.of_another = f"the store {value.get('store_id')} at {value.get('source')} on {value.get('host')}"
        return None

    def write(self, shards: Iterable[tuple[int, ShardManifest]]) -> None:
        """List the copied shards, by number; none if the index names them all."""
        copied = [(number, crc_of(manifest)) for number, manifest in shards]
        document = {"store_id": self._store_id, "source": as_text(self._source), **holder_document(), "copied": copied}
        self._target.publish([EncodedFile(LEDGER_NAME, [orjson.dumps(document)])])
        self.lists_shards = bool(copied)


def as_text(text: str) -> str:
    """Return a text that JSON can hold: a path may contain bytes that are not text."""
    return text.encode("utf-8", "backslashreplace").decode()


def crc_of(manifest: ShardManifest) -> int:
    """Return a checksum of a shard's manifest."""
    return zlib.crc32(orjson.dumps([manifest_to_json(manifest, 0), manifest.schema.to_json()]))


logger = logging.getLogger(__name__)

_ELSEWHERE = (
    "another copy of the store was mirrored there; continue from that one (`trajstore restore`), or mirror to an empty "
    "directory"
)

_BATCH_BYTES = 32 << 20  # copied at once, and so in memory, unless one shard has more
_BATCH_FILES = 16
_LEDGER_BYTES = 1 << 30  # copied between two renewals of the ledger
_MOST_KEPT = 100
_ATTEMPTS = 20


class Replica:
    """The directory of a mirror, as its only writer. For the mirror's thread only.

    Args:
        target: the mirror's directory.
        source: the store's directory.
    """

    def __init__(self, target: Directory, source: Directory) -> None:
        self.target = target
        self.generation = -1
        """Generation that the mirror shows; -1 if unknown or empty."""
        self.newest_id = -1
        """Highest id given out by that generation."""
        self.pins: dict[str, int] = {}
        """Checksum of each pin on the mirror."""
        self.whole_due = True
        """Whether the index must be written whole: the log cannot be continued, or has grown long."""
        self._source = source
        self._lock: WriterLock | None = None
        self._there = np.zeros(0, np.bool_)
        self._row_of: dict[int, int] = {}
        self._fence = ""
        self._kept: set[str] = set()
        """Segments of earlier writers; they block late segments of a writer that was frozen."""
        self._dead: dict[str, int] = {}
        """Files to remove, and the first generation that does not need each."""
        self._snapshot_generation = -1
        self._snapshot_bytes = 0
        self._segments = 0
        self._log_bytes = 0
        self._ledger = Ledger(target, source.url)
        self._unlisted = 0
        """Bytes copied since the ledger was written."""

    # -- opening ----------------------------------------------------------------------------------

    def open(self, log: CommitLog) -> None:
        """Take the mirror's lock and read its state.

        Args:
            log: the store's; blocked only during the comparison.

        Raises:
            StoreLockedError: another process writes there.
            ConfigurationError, StoreError: the directory is not a mirror of this store; describes it.
            OSError: it cannot be read.
        """
        self._lock = self.target.lock_writer()
        self.target.create((SHARDS_FOLDER, LOG_FOLDER))
        there = Catalog(self.target)
        begun = Catalog.exists(self.target)
        if begun:
            there = self._keep_others_out()
        sizes = self.target.sizes(SHARDS_FOLDER)
        ledger = self._ledger.read(log.catalog.store_id)
        if begun:
            self.generation, self._snapshot_generation = there.generation, there.snapshot_generation
            self.newest_id = there.next_id - 1
            self._snapshot_bytes, self._log_bytes = there.snapshot_bytes, there.log_bytes
            self.pins = {name: head.crc32 for name, head in there.pins.heads.items()}
            self._remove_pins([head.name for head in there.unfinished_asides()])
            segments = self.target.names(LOG_FOLDER)
            self._segments = len(segments)
            self._kept = set() if self.target.can_append else set(segments[-_MOST_KEPT:])
            self.whole_due = bool(there.segment_torn or self._fence)
        else:
            self._check_unused(sizes, ledger)
        with log.standing_still() as catalog:
            self._compare(catalog, there)
            self._look_for_rows(catalog)
            needed = catalog.needed_shards()
        unneeded = self._adopt(log.catalog, needed, there, ledger or {}, sizes)
        self._dead = dict.fromkeys(unneeded, max(0, there.generation))
        logger.info("%s: %s there already", self.target.url, counted(int(self._there.sum()), "shard", "is", "are"))

    def _keep_others_out(self) -> Catalog:
        """Fence off frozen former writers of the mirror, and return its catalog.

        In an object store an empty segment takes the place of such a writer's next one: segments are created only if
        absent. This mirror then starts by writing the index whole, whose version others do not know.

        Raises:
            StoreError: another process keeps writing.
        """
        for _ in range(_ATTEMPTS):
            there = Catalog.open(self.target)
            if self.target.can_append:
                return there  # the system releases its lock with the process
            self._fence = segment_name(there.generation + 1)
            try:
                self.target.append(self._fence, b"")
            except FileExistsError:
                continue  # written just now
            self.target.confirm()
            return there
        raise StoreError(f"{self.target.url}: another process keeps writing there; find and stop it")

    def _check_unused(self, sizes: Mapping[str, int], ledger: Mapping[int, int] | None) -> None:
        """Refuse to start a mirror where it would hide or overwrite other files.

        Leftovers of another store's mirror that never published are accepted: they are useless.
        """
        if ledger is not None:
            return
        files, folders = self.target.listing()
        lies = [name for name in (METADATA_NAME, INDEX_NAME) if name in files]
        lies += [name for name in folders if name.startswith("rank_") or name == PINS_FOLDER]
        if self._ledger.of_another and not lies:
            logger.warning(
                "%s: was begun as the mirror of %s, which has published nothing there; it becomes this store's, "
                "and %d copied files are deleted",
                self.target.url,
                self._ledger.of_another,
                len(sizes),
            )
            return
        lies += sorted(sizes)[:1]
        if lies:
            raise ConfigurationError(
                f"{self.target.url}: holds {listed(lies)}, and is not a mirror of this store; mirror to an empty "
                "directory"
            )

    def _compare(self, catalog: Catalog, there: Catalog) -> None:
        """Refuse a mirror of another store, or of another history of this one."""
        if self.generation < 0:
            return
        url = self.target.url
        if there.store_id != catalog.store_id:
            raise StoreError(
                f"{url}: is another store ({there.store_id}) than this one ({catalog.store_id}); mirror to an empty "
                "directory"
            )
        taken_over = there.restored == catalog.restored
        self.whole_due |= not taken_over  # the new index has `restored`
        ahead = there.generation > catalog.generation or there.next_id > catalog.next_id
        if ahead or not (taken_over or [there.generation] == catalog.restored[:1]):
            raise StoreError(
                f"{url}: is at generation {there.generation}, this store at {catalog.generation}: {_ELSEWHERE}"
            )
        strange = strange_id(there.index, catalog.index)
        if strange is not None:
            raise StoreError(f"{url}: trajectory {strange} is another one there than here: {_ELSEWHERE}")

    def _adopt(
        self,
        catalog: Catalog,
        needed: npt.NDArray[np.bool_],
        there: Catalog,
        ledger: Mapping[int, int],
        sizes: Mapping[str, int],
    ) -> list[str]:
        """Find the shards that are already on the mirror; return the files that the store does not need."""

        def is_whole(manifest: ShardManifest) -> bool:
            return all(sizes.get(file.name) == file.size for file in manifest.files)

        lost = 0
        for row in np.flatnonzero(there.needed_shards()).tolist():
            mirrored = there.shards.manifest(row)
            mine = self._row_of.get(there.shards.number(row))
            if mine is None or mine >= len(needed) or not needed[mine]:
                continue  # evicted or rewritten since
            if catalog.shards.manifest(mine) != mirrored:
                raise StoreError(f"{self.target.url}: {mirrored.name} is another shard there than here: {_ELSEWHERE}")
            self._there[mine] = is_whole(mirrored)
            lost += not self._there[mine]
        for number, crc in ledger.items():
            row = self._row_of.get(number, -1)
            if 0 <= row < len(needed) and needed[row] and not self._there[row]:
                manifest = catalog.shards.manifest(row)
                self._there[row] = crc_of(manifest) == crc and is_whole(manifest)
        if lost:
            logger.warning("%s: absent or cut, so copied again: files of %s", self.target.url, counted(lost, "shard"))
            self.whole_due = True
        wanted = {name for _, names, _ in catalog.shards.file_sizes(np.flatnonzero(needed)) for name in names}
        return [name for name in sizes if name not in wanted]

    def _look_for_rows(self, catalog: Catalog) -> None:
        """Update the rows by number with the store's new shards."""
        for row in range(len(self._row_of), len(catalog.shards)):
            self._row_of[catalog.shards.number(row)] = row
        if len(self._there) < len(catalog.shards):
            more = max(len(catalog.shards), 2 * len(self._there)) - len(self._there)
            self._there = np.concatenate([self._there, np.zeros(more, np.bool_)])

    def close(self) -> None:
        """Release the mirror's lock."""
        if self._lock is not None:
            lock, self._lock = self._lock, None
            lock.release()

    # -- copying ----------------------------------------------------------------------------------

    def lacking(self, picture: Picture, catalog: Catalog, lines: Sequence[Line] | None) -> list[int] | None:
        """Return the rows of the shards that must be copied before the next publication.

        Args:
            picture: of the store.
            catalog: the store's.
            lines: records to append to the mirror's log; None: the index is written whole.

        Returns:
            Rows of the shard table; None if a record names a shard that the store itself no longer needs: then
            the index must be written whole.
        """
        self._look_for_rows(catalog)
        count = len(picture.needed)
        if lines is None:
            return [int(row) for row in np.flatnonzero(picture.needed & ~self._there[:count])]
        rows = []
        for line in lines:
            for number in line.shards:
                row = self._row_of.get(number, count)
                if row >= count or not (picture.needed[row] or self._there[row]):
                    return None
                if not self._there[row]:
                    rows.append(row)
        return rows

    def copy(self, catalog: Catalog, rows: Sequence[int], go_on: Callable[[], bool]) -> bool:
        """Copy shards to the mirror; return False if stopped by ``go_on``.

        Raises:
            OSError: a copy failed; a ``CorruptStoreError`` or ``FileNotFoundError`` if the store has lost the shard.
        """
        batch: list[tuple[int, ShardManifest]] = []
        nbytes = files = 0
        for row in rows:
            manifest = catalog.shards.manifest(row)
            batch.append((row, manifest))
            nbytes, files = nbytes + sum(file.size for file in manifest.files), files + len(manifest.files)
            if nbytes >= _BATCH_BYTES or files >= _BATCH_FILES:
                if not go_on():
                    return False
                self._copy(catalog, batch, nbytes)
                batch, nbytes, files = [], 0, 0
        if batch:
            if not go_on():
                return False
            self._copy(catalog, batch, nbytes)
        return True

    def _copy(self, catalog: Catalog, batch: Sequence[tuple[int, ShardManifest]], nbytes: int) -> None:
        maps: list[FileMap] = []
        files = []
        for _, manifest in batch:
            for number, file in enumerate(manifest.files):
                maps.append(self._source.map(file.name, file.size, sequential=True))
                for damage in check_file(maps[-1].view, manifest, number):
                    logger.warning("%s: %s; it is mirrored as it is", self._source.url, damage)
                files.append(EncodedFile(file.name, [maps[-1].view]))
        for copied in files:  # an interrupted mirror may have left an unreferenced file of this name
            self._dead.pop(copied.name, None)
        self.target.publish(files)
        self._there[[row for row, _ in batch]] = True
        self._unlisted += nbytes
        if self._unlisted >= _LEDGER_BYTES:
            self._write_ledger(catalog)

    def copy_states(self, picture: Picture, upto: int) -> None:
        """Copy the states and late values of snapshots that the mirror lacks."""
        for name in picture.pin_files:
            head = picture.pins[name]
            if head.generation <= upto:
                for file in head.files:
                    self.target.publish([EncodedFile(file.name, [self._source.read(file.name)])])

    # -- publishing -------------------------------------------------------------------------------

    def publish_whole(self, picture: Picture) -> None:
        """Publish a picture's index; its shards and states are all there."""
        if picture.whole is None:
            raise ValueError("the picture has no index")
        index, metadata = picture.whole
        self.target.check()
        asides = [name for name in picture.pin_files if picture.pins[name].kind == "aside"]
        self._publish_pins(picture, asides)  # like a rollback: before the index that completes it
        self.target.publish([index])
        self.target.publish([metadata])
        before, self._snapshot_generation = self._snapshot_generation, picture.generation
        self.generation, self.whole_due = picture.generation, False
        self._snapshot_bytes = index.nbytes
        self._log_bytes = 0
        self._publish_pins(picture, [name for name in picture.pin_files if name not in asides])
        old = [
            name
            for name in self.target.names(LOG_FOLDER)
            if (first := segment_generation(name)) is not None and first <= before and name not in self._kept
        ]
        self.target.remove(old)
        self._segments = 0
        if self._ledger.lists_shards or before < 0:
            self._ledger.write(())
            self._unlisted = 0

    def publish_lines(self, picture: Picture, lines: Sequence[Line]) -> None:
        """Append records to the mirror's log; their shards are all there."""
        self.target.check()
        if lines:
            data = b"".join(line.data for line in lines)
            name = segment_name(self.generation + 1)
            if name == self._fence:  # exists, and is this mirror's own
                self.target.publish([EncodedFile(name, [data])])
            else:
                self.target.append(name, data)
            self.generation = lines[-1].generation
            self._segments += 1
            self._log_bytes += len(data)
        names = [name for name in picture.pin_files if picture.pins[name].generation <= self.generation]
        self._publish_pins(picture, names)
        long = self._log_bytes > max(LOG_BYTES, 2 * self._snapshot_bytes)
        self.whole_due = long or too_many_segments(self._segments, self._snapshot_bytes)

    def _publish_pins(self, picture: Picture, names: Iterable[str]) -> None:
        for name in names:
            self.target.publish([EncodedFile(pin_name(name), [picture.pin_files[name]])])
            self.pins[name] = picture.pins[name].crc32

    def tidy(self, picture: Picture, catalog: Catalog) -> None:
        """Remove files that the mirror no longer needs: pins, then their states, then shards that no reader shows."""
        released = [name for name in self.pins if name not in picture.pins]
        self._remove_pins(released)
        if released or picture.pin_files:
            files = {file.name for head in picture.pins.values() for file in head.files}
            kept = files.union(map(pin_name, self.pins))  # other files are late writes of a frozen writer
            self.target.remove([name for name in self.target.names(PINS_FOLDER) if name not in kept])
        count = len(picture.needed)
        unneeded = np.flatnonzero(self._there[:count] & ~picture.needed)
        if len(unneeded):
            self._there[unneeded] = False
            self._dead |= dict.fromkeys(catalog.shards.files(unneeded.tolist()), picture.generation)
        self.remove_dead()

    def _remove_pins(self, names: Sequence[str]) -> None:
        if names:
            self.target.remove([pin_name(name) for name in names], durable=True)
            self.pins = {name: crc for name, crc in self.pins.items() if name not in names}

    def remove_dead(self) -> None:
        """Remove files that neither the mirror nor a reader needs."""
        if not self._dead:
            return
        readers = self.target.readers(tidy=True)
        oldest = min([self.generation, *(reader.generation for reader in readers)])
        going = [name for name, generation in self._dead.items() if generation <= oldest]
        self.target.remove(going)
        for name in going:
            del self._dead[name]

    def begin(self, catalog: Catalog) -> None:
        """Record which store is mirrored, before the first copy to an empty place."""
        if self.generation < 0:
            self._write_ledger(catalog)

    def _write_ledger(self, catalog: Catalog) -> None:
        """Write the list of copied shards."""
        rows = np.flatnonzero(self._there).tolist()
        self._ledger.write((catalog.shards.number(row), catalog.shards.manifest(row)) for row in rows)
        self._unlisted = 0
