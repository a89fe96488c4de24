"""Checking a directory: every checksum, every name, every entry. Nothing is written.

``inspect`` looks at names and sizes; this reads every byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trajstore.catalog import INDEX_NAME, METADATA_NAME, Catalog
from trajstore.checkpoint import CheckpointState
from trajstore.commits import decode_lines
from trajstore.errors import CorruptStoreError, StoreError, TrajstoreError, UnsafeContentError
from trajstore.foreign import iterate_rlinf
from trajstore.formats import open_shard
from trajstore.formats.base import ShardManifest
from trajstore.index import TrajectoryIndex
from trajstore.maintenance import SHARDS_FOLDER
from trajstore.manifest import check_file
from trajstore.pins import pin_name
from trajstore.places import Place, file_sizes, find_place
from trajstore.rlinf.source import RLinfSource
from trajstore.schema import Schema
from trajstore.shard_access import ShardAccess, fetch_file
from trajstore.storage import Directory

Progress = Callable[[int, int], None]
"""Told (done, total) shards or files."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One piece of damage: the file or directory, and what is wrong with it."""

    file: str
    message: str


@dataclass
class Verification:
    """What checking found.

    Attributes:
        path: what was checked.
        kind: ``"store"``, ``"rlinf"``, ``"experience_pool"`` or ``"run"``.
        problems: damage.
        notes: things that are no damage: what an interrupted writer left, files of others.
        trajectories: trajectories whose data was checked.
        files: files read.
        nbytes: bytes read.
        parts: of a run, one each.
    """

    path: str
    kind: str
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    trajectories: int = 0
    files: int = 0
    nbytes: int = 0
    parts: list[Verification] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Whether no damage was found, here and in all parts."""
        return not self.problems and all(part.sound for part in self.parts)

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        result: dict[str, Any] = {
            "path": self.path,
            "kind": self.kind,
            "sound": self.sound,
            "trajectories": self.trajectories,
            "files": self.files,
            "bytes": self.nbytes,
            "problems": [{"file": problem.file, "message": problem.message} for problem in self.problems],
            "notes": self.notes,
        }
        return result | ({"parts": [part.to_json() for part in self.parts]} if self.parts else {})


def verify(path: str | Path, progress: Progress | None = None) -> Verification:
    """Check a store, a checkpoint, a directory of RLinf, an experience pool, or a folder of these.

    Of a store: snapshot, log, metadata and pins; that every named file is there with the size and checksum it
    was written with; that columns which are not mapped can be decoded; that ids and UUIDs are unique and every
    JSON document parses. The formats of others are loaded, and compared with their index; checksums
    they have within ``.pt`` files only, so that a changed value anywhere else stays unseen.

    A live writer may go on; what it deletes meanwhile because it was evicted is reported as missing.

    Args:
        path: local path or URL.
        progress: told (done, total) shards or files.

    Raises:
        StoreNotFoundError: nothing there.
        UnsupportedVersionError: written by a newer trajstore.
    """
    return _verify_place(find_place(path), progress)


def _verify_place(place: Place, progress: Progress | None) -> Verification:
    result = Verification(place.url, place.kind)
    if place.kind == "run":
        result.parts = [_verify_place(part, progress) for part in place.parts]
        result.trajectories, result.files, result.nbytes = (
            sum(getattr(part, name) for part in result.parts) for name in ("trajectories", "files", "nbytes")
        )
        return result
    check = {"store": _verify_store, "rlinf": _verify_rlinf, "experience_pool": _verify_pool}[place.kind]
    try:
        check(place.directory, result, progress)
    except (CorruptStoreError, UnsafeContentError, OSError) as error:  # damage after which nothing else can be checked
        result.problems.append(Problem(place.url, str(error)))
    return result


# -- stores -------------------------------------------------------------------------------------------


def _verify_store(directory: Directory, result: Verification, progress: Progress | None) -> None:
    catalog = Catalog.open(directory)
    metadata = catalog.metadata()
    _check_state(METADATA_NAME, metadata, result)
    if metadata.get("store_id") != catalog.store_id:
        result.problems.append(Problem(METADATA_NAME, f"belongs to another store than {INDEX_NAME}"))
    for name in catalog.pins.names:
        _check_state(pin_name(name), catalog.pins.state(name), result)
    _check_entries(catalog, result)
    needed = np.flatnonzero(catalog.needed_shards()).tolist()
    whole = np.zeros(len(catalog.shards), np.bool_)
    named: set[str] = set()
    for done, row in enumerate(needed):
        manifest = catalog.shards.manifest(row)
        named.update(file.name for file in manifest.files)
        problems = check_shard(directory, manifest)
        whole[row] = not problems
        result.problems.extend(problems)
        result.files += len(manifest.files)
        result.nbytes += sum(file.size for file in manifest.files)
        if progress is not None:
            progress(done + 1, len(needed))
    _check_documents(catalog, whole, result)
    unnamed = [name for name in directory.names(SHARDS_FOLDER) if name not in named]
    if unnamed:
        result.notes.append(
            f"{len(unnamed):,} files in {SHARDS_FOLDER}/ are named by no commit; the next writer removes them"
        )
    _check_torn_tail(catalog, result)


def _check_torn_tail(catalog: Catalog, result: Verification) -> None:
    """Tell what an interrupted commit left from a whole record that was changed: only that one has its line feed."""
    if not catalog.segment_torn:
        return
    source = f"{catalog.directory.url}/{catalog.segment}"
    data = catalog.directory.read(catalog.segment, catalog.segment_end)
    if decode_lines(data, source, catalog.segment_end).records:
        return  # a live writer was in the middle of it
    if b"\n" in data:
        message = f"the record at byte {catalog.segment_end} is damaged; what it committed is not there"
        result.problems.append(Problem(catalog.segment, message))
    else:
        result.notes.append(f"{catalog.segment}: {catalog.segment_torn:,} bytes of an interrupted commit at its end")


def check_shard(directory: Directory, manifest: ShardManifest) -> list[Problem]:
    """Return what is wrong with the files of one shard: sizes, checksums, columns that cannot be decoded."""
    problems = []
    for number, file in enumerate(manifest.files):
        try:
            data = memoryview(fetch_file(directory, manifest, file.name))
        except (StoreError, OSError) as error:
            problems.append(Problem(file.name, str(error)))
            continue
        try:
            for message in check_file(data, manifest, number):
                problems.append(Problem(file.name, message.removeprefix(f"{file.name}: ")))
        finally:
            data.release()
    if not problems and None in manifest.places:
        problems.extend(_check_decoding(directory, manifest))
    return problems


def _check_decoding(directory: Directory, manifest: ShardManifest) -> list[Problem]:
    """Decode the columns that are not mapped."""
    try:
        reader = open_shard(partial(fetch_file, directory, manifest), manifest)
        for column, place in enumerate(manifest.places):
            if place is None:
                reader.rows(column, 0, manifest.rows[column])
    except (StoreError, OSError) as error:  # but not a missing package: that is no damage
        return [Problem(manifest.files[0].name, str(error))]
    return []


def _check_state(file: str, values: Mapping[str, Any], result: Verification) -> None:
    """Check what a buffer takes up besides trajectories: seed, generator, counter, format."""
    try:
        CheckpointState.from_json(values)
    except CorruptStoreError as error:
        result.problems.append(Problem(file, str(error)))


def _check_entries(catalog: Catalog, result: Verification) -> None:
    ids = np.concatenate([catalog.index["trajectory_id"], catalog.pinned["trajectory_id"]])
    uuids = np.concatenate([catalog.index["uuid"], catalog.pinned["uuid"]])
    for name, values in (("trajectory id", ids), ("UUID", uuids.view(np.dtype("2i8")) if len(uuids) else uuids)):
        if len(np.unique(values, axis=0)) != len(values):
            result.problems.append(Problem("trajectory_index.json", f"a {name} occurs twice"))
    if len(ids) and int(ids.max()) >= catalog.next_id:
        result.problems.append(
            Problem(
                "trajectory_index.json",
                f"id {int(ids.max())} is not below next_id {catalog.next_id}; ids would be reused",
            )
        )


def _check_documents(catalog: Catalog, whole: np.ndarray[Any, np.dtype[np.bool_]], result: Verification) -> None:
    """Make every trajectory in a whole shard that has a JSON document, and one of each set of columns."""
    access = ShardAccess(catalog)
    made: set[Schema] = set()
    for index in (catalog.index, catalog.pinned):
        for position in _positions_in(index, whole):
            result.trajectories += 1
            schema = access.schema(index, position)
            if schema in made and not index.arrays["document"][position]:
                continue
            made.add(schema)
            try:
                access.trajectory(index, position)
            except TrajstoreError as error:
                number = int(index.arrays["trajectory_id"][position])
                result.problems.append(Problem(f"trajectory {number}", str(error)))
    access.close()


def _positions_in(index: TrajectoryIndex, whole: np.ndarray[Any, np.dtype[np.bool_]]) -> list[int]:
    if not len(index):
        return []
    positions: list[int] = (index.first + np.flatnonzero(whole[index["shard"]])).tolist()
    return positions


# -- directories of others ----------------------------------------------------------------------------


def _verify_rlinf(directory: Directory, result: Verification, progress: Progress | None) -> None:
    found = RLinfSource.open(directory, strict=False)
    _check_state(METADATA_NAME, found.metadata, result)
    sizes = file_sizes(directory)
    for entry in found.missing:
        usual = "; RLinf's checkpoint of a buffer in memory lists such too" if entry in found.before else ""
        result.problems.append(Problem(entry.file_name(found.suffix), f"named by the index, but missing{usual}"))
    for done, (name, record) in enumerate(iterate_rlinf(found)):
        if isinstance(record, TrajstoreError):
            result.problems.append(Problem(name, str(record)))
        else:
            result.problems += [Problem(name, message) for message in found.damage(done)]
            result.notes += [f"{name}: {message}" for message in found.unrepresented(done)]
            result.trajectories += 1
        result.files += 1
        result.nbytes += sizes.pop(name, 0)
        if progress is not None:
            progress(done + 1, len(found.entries))
    entries = [*found.entries, *found.missing]
    totals = {"size": len(entries), "total_samples": sum(entry.num_samples for entry in entries)}
    for name, value in totals.items():
        if name in found.metadata and found.metadata[name] != value:
            message = f"{name} is {found.metadata[name]}, the index adds up to {value}"
            result.problems.append(Problem("metadata.json", message))
    unnamed = [name for name in sizes if name.startswith("trajectory_") and not name.endswith(".json")]
    if unnamed:
        result.notes.append(f"{len(unnamed):,} trajectory files are not in the index")


def _verify_pool(directory: Directory, result: Verification, progress: Progress | None) -> None:
    from trajstore.experience.persistence import read_pool  # loads the experience package, needed only here

    contents = read_pool(Path(directory.url))
    sizes = file_sizes(directory)
    result.files, result.nbytes = len(sizes), sum(sizes.values())
    result.trajectories = sum(map(len, contents.task2trajectories.values()))
    bucket_of: dict[str, int] = {}
    for difficulty, tasks in contents.difficulty2task_dict.items():
        for task in tasks:
            if task in bucket_of:
                message = f"task {task} is in the buckets {bucket_of[task]} and {difficulty}"
                result.problems.append(Problem("difficulty2task_dict.json", message))
            bucket_of[task] = difficulty
    if progress is not None:
        progress(1, 1)
