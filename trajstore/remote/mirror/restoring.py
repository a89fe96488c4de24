"""Restores a store from its mirror, after the loss of its machine.

Everything on the mirror is copied: trajectories with their ids and UUIDs, pins, saved points, the store's own UUID. So
the new store continues from the mirror's state, and may use the same mirror.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from secrets import randbelow
from typing import Any

import numpy as np
import orjson

from trajstore._core.files.base import Buffer, Directory, EncodedFile
from trajstore._core.files.folders import claimed
from trajstore._core.files.local import TEMPORARY_SUFFIX, LocalDirectory
from trajstore._core.files.opening import nested, open_directory
from trajstore._core.formats.base import SHARDS_FOLDER, ShardManifest
from trajstore._core.formats.checksums import check_file
from trajstore._core.reading.places import kind_of, mixed_sentence, nothing_at, ranks_of
from trajstore._core.store.catalog import Catalog, oldest_generation
from trajstore._core.store.log_records import LOG_FOLDER
from trajstore._core.store.saved_points import PINS_FOLDER, Snapshot, pin_name
from trajstore._core.store.sealed import LEDGER_NAME, METADATA_NAME, RESTORE_NAME
from trajstore._core.writing.fencing import SHARDS_OF_A_WRITER
from trajstore.errors import ConfigurationError, CorruptStoreError, StoreNotFoundError, StoreWriteError, listed, written

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (done, total) bytes."""

IDS_LEFT_OUT = 1 << 20
"""Least number of ids that a restored store skips: the lost store had given out some, which may be recorded."""

_MOST_LEFT_OUT = 1 << 32
"""Most ids that it skips: a store of a run has 2^42, which is enough for a thousand restores."""

_BLOCKS = 1 << 16
"""Blocks of shard numbers; a restored store starts at a random one, and at a random id. So two stores restored from one
mirror, or a restored one and the one wrongly believed lost, share neither ids nor shard names."""

_ATTEMPTS = 20  # a mirror in use changes meanwhile
_WHOLE_AT_MOST = 256 << 20  # read into memory at once; larger files are mapped
_KEPT_METADATA = ("trajectory_format", "seed", "rng_state")


@dataclass
class Restored:
    """Result of a restore.

    Attributes:
        mirror: URL of the mirror.
        target: the new store.
        trajectories: number of live ones.
        newest_id: highest id that the mirror knew; -1 without any. If an earlier attempt had copied everything, the
            highest live id.
        next_id: the first id that the new store gives out.
        nbytes: bytes of the store's shards and states.
        copied: bytes of these copied now; an interrupted attempt had copied the others.
        parts: of a run, one per rank.
    """

    mirror: str
    target: str
    trajectories: int = 0
    newest_id: int = -1
    next_id: int = 0
    nbytes: int = 0
    copied: int = 0
    parts: list[Restored] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        values: dict[str, Any] = {"mirror": self.mirror, "target": self.target, "trajectories": self.trajectories}
        values |= {"bytes": self.nbytes, "copied_bytes": self.copied}
        if self.parts:
            return values | {"parts": [part.to_json() for part in self.parts]}
        return values | {"newest_id": self.newest_id, "next_id": self.next_id}


def restore(
    mirror: str | Path,
    target: str | Path,
    progress: Progress | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> Restored:
    """Restore a store from a mirror, or from each mirror of a run (``rank_*``), verifying every checksum.

    Call this again to continue an interrupted restore: copied files with correct checksums are kept.
    ``metadata.json`` is written last, so an unfinished directory is not taken for a store.

    Args:
        mirror: path or URL; the mirror may be in use.
        target: path or URL of the new store; absent, empty, or left by an interrupted restore of this mirror.
        progress: called with (done, total) bytes.
        storage_options: passed on to the fsspec file systems of URLs.

    Raises:
        StoreNotFoundError: there is no store at ``mirror``.
        ConfigurationError: it is not a mirror, or the target holds other files.
        CorruptStoreError: the mirror is damaged; names the file.
        StoreLockedError: another process restores to a local target; names it.
        StoreWriteError: the target cannot be written; call again to continue.
    """
    options = dict(storage_options or {})
    source = open_directory(mirror, **(options if "://" in str(mirror) else {}))
    into = open_directory(target, **(options if "://" in str(target) else {}))
    if nested(source, into):
        raise ConfigurationError(f"{into.url}: is within {source.url}, or contains it; restore to another place")
    kind, ranks = kind_of(source), ranks_of(source)
    for directory in [source] if kind == "store" else ranks.directories:
        _check_mirror(directory)
    if kind == "store" and ranks.directories:
        raise ConfigurationError(mixed_sentence(source.url, ranks.names))
    if kind == "store":
        return _completed(_restore(source, into, progress), [into])
    if not ranks.directories:
        raise nothing_at(mirror, source)
    if ranks.lacking:
        raise CorruptStoreError(
            f"{source.url}: {listed(ranks.lacking)}; restore each rank that is there by its own path"
        )
    result = Restored(source.url, into.url)
    targets = [into.inner(name) for name in ranks.names]
    for rank, part in reversed(list(zip(ranks.directories, targets, strict=True))):  # rank_0 makes it a run
        result.parts.insert(0, _restore(rank, part, progress))
    for count in ("trajectories", "nbytes", "copied"):
        setattr(result, count, sum(getattr(part, count) for part in result.parts))
    return _completed(result, targets)


def _completed(result: Restored, targets: Sequence[Directory]) -> Restored:
    """Remove the marks of an unfinished restore, once all stores are complete."""
    with written(f": {result.target} is complete; call restore again to remove its {RESTORE_NAME}"):
        for target in targets:
            target.remove([RESTORE_NAME], durable=True)
    return result


def _check_mirror(source: Directory) -> None:
    """Refuse a directory that is not a mirror: a restored store skips ids, and copies only files that a mirror shows.

    Raises:
        ConfigurationError: it is not a mirror.
    """
    if not source.exists() or LEDGER_NAME in source.listing()[0]:
        return
    raise ConfigurationError(
        f"{source.url}: is not a mirror (it has no {LEDGER_NAME}) but a store or a copy of one: open it at this "
        "path, or `trajstore copy` it to another place"
    )


def _restore(source: Directory, target: Directory, progress: Progress | None) -> Restored:
    copied = dict[str, int]()
    for attempt in range(_ATTEMPTS):
        lease = source.announce_reader(oldest_generation(source))
        try:
            catalog = Catalog.open(source)
            lease.settle(catalog.generation)
            if _begin(catalog, target):
                with claimed(target, target.path) if isinstance(target, LocalDirectory) else nullcontext():
                    if _begin(catalog, target):  # another process may have completed it meanwhile
                        return _Copy(catalog, target, progress, copied).run()
            return _ended(source, target)
        except OSError as error:
            if isinstance(error, StoreNotFoundError | StoreWriteError):
                raise
            if not isinstance(error, FileNotFoundError) or Path(str(error.filename)).is_relative_to(target.url):
                raise StoreWriteError(
                    f"{error}: {target.url} is not complete; call restore again to continue"
                ) from error
            if attempt + 1 == _ATTEMPTS or not Catalog.open(source).generation > catalog.generation:
                raise CorruptStoreError(
                    f"{error}: the mirror lacks it; `trajstore repair` makes a store of the intact part"
                ) from error
        finally:
            lease.release()
    raise CorruptStoreError(f"{source.url}: changes faster than it can be copied")


def _begin(catalog: Catalog, target: Directory) -> bool:
    """Record which mirror the target is restored from; return whether there is anything to do.

    Raises:
        ConfigurationError: the target holds other files.
    """
    files, folders = target.listing()
    marker = orjson.dumps({"mirror": catalog.directory.url, "store_id": catalog.store_id})
    if RESTORE_NAME in files:
        if target.read(RESTORE_NAME) != marker:
            raise ConfigurationError(
                f"{target.url}: a restore of another mirror was begun here ({RESTORE_NAME} says which); restore to an "
                "empty directory"
            )
        return METADATA_NAME not in files
    others = [name for name in files if name != RESTORE_NAME + TEMPORARY_SUFFIX]  # of a restore killed as it began
    if others or folders:
        raise ConfigurationError(
            f"{target.url}: is not empty ({listed([*others, *folders])}); restore to an empty directory"
        )
    target.create()
    target.publish([EncodedFile(RESTORE_NAME, [marker])])
    return True


def _ended(source: Directory, target: Directory) -> Restored:
    """Return the result of an attempt that was interrupted after its last file."""
    made = Catalog.open(target)
    return Restored(
        source.url,
        target.url,
        trajectories=len(made.index),
        newest_id=int(made.index["trajectory_id"].max(initial=-1)),
        next_id=made.next_id,
        nbytes=int(made.shards.nbytes()[made.needed_shards()].sum()),
    )


class _Copy:
    """One attempt to copy a catalog's files; ``copied`` has the sizes of files by name, those of earlier ones too."""

    def __init__(self, catalog: Catalog, target: Directory, progress: Progress | None, copied: dict[str, int]) -> None:
        self._catalog = catalog
        self._source = catalog.directory
        self._target = target
        self._progress = progress
        self._done, self._copied = 0, copied
        self._there = target.sizes()

    def run(self) -> Restored:
        catalog, target = self._catalog, self._target
        target.create((SHARDS_FOLDER, LOG_FOLDER))
        rows = np.flatnonzero(catalog.needed_shards())
        heads = self._heads()
        states = [file for head in heads.values() for file in head.files]
        total = int(catalog.shards.nbytes()[rows].sum()) + sum(state.size for state in states)
        kept = {file.name for file in states}
        for row in rows.tolist():
            manifest = catalog.shards.manifest(row)
            for number in range(len(manifest.files)):
                kept.add(manifest.files[number].name)
                self._bring_shard_file(manifest, number, total)
        for state in states:
            self._bring(state.name, state.size, partial(_has_crc, crc32=state.crc32), total)
        pins = {pin_name(name): self._source.read(pin_name(name)) for name in heads}
        left = [name for name in self._there if name.split("/")[0] in (SHARDS_FOLDER, PINS_FOLDER)]
        target.remove([name for name in left if name not in kept and name not in pins], durable=True)
        target.publish([EncodedFile(name, [data]) for name, data in pins.items()])
        metadata = catalog.metadata()
        newest, block = catalog.next_id - 1, 1 + randbelow(_BLOCKS)
        catalog.next_id += IDS_LEFT_OUT + randbelow(_MOST_LEFT_OUT - IDS_LEFT_OUT)
        catalog.restored = [catalog.generation, catalog.next_id]
        catalog.next_shard = (catalog.next_shard // SHARDS_OF_A_WRITER + block) * SHARDS_OF_A_WRITER
        index = catalog.snapshot_file()
        target.publish(catalog.with_copy(index) if target.can_append else [index])
        target.publish([catalog.metadata_file(**{name: metadata[name] for name in _KEPT_METADATA if name in metadata})])
        return Restored(
            self._source.url,
            target.url,
            trajectories=len(catalog.index),
            newest_id=newest,
            next_id=catalog.next_id,
            nbytes=total,
            copied=sum(size for name, size in self._copied.items() if name in kept),
        )

    def _heads(self) -> dict[str, Snapshot]:
        """Return the new store's pins, without unfinished rollbacks and pins that lack trajectories."""
        unfinished = {head.name: head.left_for for head in self._catalog.unfinished_asides()}
        for name, left_for in unfinished.items():
            logger.warning(
                "%s: going to the snapshot %s had not reached the mirror when its store was lost, so it did not "
                "happen; the head that it would have left (%s) is live",
                self._source.url,
                left_for,
                name,
            )
        heads = {name: head for name, head in self._catalog.pins.heads.items() if name not in unfinished}
        lacking = {name: count for name, head in heads.items() if (count := self._catalog.lacking(head)) > 0}
        for name, count in lacking.items():
            logger.warning(
                "%s: the pin %r is left out: %d of its trajectories are not in the mirror. The store had removed the "
                "pin, and the mirror not yet",
                self._source.url,
                name,
                count,
            )
        return {name: head for name, head in heads.items() if name not in lacking}

    def _bring_shard_file(self, manifest: ShardManifest, number: int, total: int) -> None:
        file = manifest.files[number]
        self._bring(file.name, file.size, lambda data: not check_file(data, manifest, number), total)

    def _bring(self, name: str, size: int, fits: Callable[[Any], bool], total: int) -> None:
        """Copy a file and check its checksum, unless it is already there with the right one."""
        if self._there.get(name) != size or not fits(self._target.map(name, size, sequential=True).view):
            whole = size <= _WHOLE_AT_MOST
            data = self._source.read(name) if whole else self._source.map(name, size, sequential=True).view
            if not fits(data):
                raise CorruptStoreError(
                    f"{self._source.url}/{name}: its checksum does not fit the content; the mirror is damaged: "
                    "`trajstore repair` makes a store of the intact part"
                )
            self._target.publish([EncodedFile(name, [data])])
            self._copied[name] = size
        self._done += size
        if self._progress is not None:
            self._progress(self._done, total)


def _has_crc(data: Buffer, crc32: int) -> bool:
    return zlib.crc32(data) == crc32
