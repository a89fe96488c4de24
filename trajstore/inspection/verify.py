"""Checking a directory: every checksum, every name, every entry. Nothing is written.

``inspect`` looks at names and sizes; this reads every byte.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from trajstore.buffer.checkpoint import CheckpointState
from trajstore.columns.schema import Schema
from trajstore.errors import CorruptStoreError, StoreError, TrajstoreError, UnsafeContentError
from trajstore.files.base import SEE_VERIFY, Directory
from trajstore.formats.base import SHARDS_FOLDER
from trajstore.inspection.foreign import iterate_rlinf
from trajstore.inspection.points import incomplete_points
from trajstore.inspection.shard_damage import damage_in
from trajstore.reading.places import Place, find_place, mixed_sentence
from trajstore.reading.rlinf_source import RLinfSource
from trajstore.reading.shard_access import ShardAccess
from trajstore.store.catalog import Catalog
from trajstore.store.index import TrajectoryIndex
from trajstore.store.log_records import decode_lines, ranges_of
from trajstore.store.salvage import SalvagedCatalog
from trajstore.store.saved_points import pin_name
from trajstore.store.sealed import INDEX_NAME, METADATA_NAME

Progress = Callable[[int, int], None]
"""Told (done, total) shards or files."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One piece of damage.

    Attributes:
        file: the file or directory; within a run, below the run directory.
        message: what is wrong with it.
        lost: ids of the trajectories that cannot be read any more because of it, as inclusive ranges. Empty
            where none is lost, or nobody can tell which.
    """

    file: str
    message: str
    lost: tuple[tuple[int, int], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the problem as JSON values."""
        return {"file": self.file, "message": self.message, "lost": [list(pair) for pair in self.lost]}


@dataclass
class Verification:
    """What checking found.

    Attributes:
        path: what was checked.
        kind: ``"store"``, ``"rlinf"``, ``"experience_pool"`` or ``"run"``.
        problems: damage; of a run, also that of its parts.
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
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        result: dict[str, Any] = {
            "path": self.path,
            "kind": self.kind,
            "sound": self.sound,
            "trajectories": self.trajectories,
            "files": self.files,
            "bytes": self.nbytes,
            "problems": [problem.to_json() for problem in self.problems],
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
        if place.mixed:
            result.problems.append(Problem("", mixed_sentence(place.url, [part.name for part in place.parts[1:]])))
        result.problems += [Problem(text.split()[0], text) for text in place.lacking]
        result.parts = [_verify_place(part, progress) for part in place.parts]
        for part, found in zip(place.parts, result.parts, strict=True):
            name = "" if part.url == place.url else part.name + "/"
            result.problems += [replace(problem, file=f"{name}{problem.file}") for problem in found.problems]
        result.notes += incomplete_points(place)
        result.trajectories, result.files, result.nbytes = (
            sum(getattr(part, name) for part in result.parts) for name in ("trajectories", "files", "nbytes")
        )
        return result
    check = {"store": _verify_store, "rlinf": _verify_rlinf, "experience_pool": _verify_pool}[place.kind]
    try:
        check(place.directory, result, progress)
    except (CorruptStoreError, UnsafeContentError, OSError) as error:  # damage after which nothing else can be checked
        result.problems.append(Problem(place.name, str(error)))
    return result


# -- stores -------------------------------------------------------------------------------------------


def _verify_store(directory: Directory, result: Verification, progress: Progress | None) -> None:
    catalog = _open(directory, result)
    metadata = catalog.metadata()
    _check_state(METADATA_NAME, metadata, result)
    if metadata.get("store_id") != catalog.store_id:
        result.problems.append(Problem(METADATA_NAME, f"belongs to another store than {INDEX_NAME}"))
    for name in catalog.pins.names:
        _check_state(pin_name(name), catalog.pins.state(name), result)
        _check_named(catalog, name, result)
    _check_saved_states(catalog, result)
    _check_entries(catalog, result)
    ids_in = _ids_by_shard(catalog)
    needed = np.flatnonzero(catalog.needed_shards()).tolist()
    whole = np.zeros(len(catalog.shards), np.bool_)
    named: set[str] = set()
    for done, row in enumerate(needed):
        manifest = catalog.shards.manifest(row)
        named.update(file.name for file in manifest.files)
        damage = damage_in(directory, manifest)
        whole[row] = not damage
        if damage:
            lost = tuple((low, high) for low, high in ranges_of(ids_in(row)))
            result.problems.extend(Problem(file, message.removesuffix(SEE_VERIFY), lost) for file, message in damage)
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


def _open(directory: Directory, result: Verification) -> Catalog:
    """Open a store; of a damaged one, say what is damaged and go on with what can be told."""
    try:
        return Catalog.open(directory)
    except CorruptStoreError as error:
        try:
            catalog = SalvagedCatalog.open(directory)
        except StoreError:
            raise error from None  # what cannot be read at all is best said by the first error
        said = [text.removeprefix(f"{directory.url}/") for text in catalog.warnings] or [str(error)]
        for text in said:
            file = text.split(":")[0].split()[0]
            result.problems.append(Problem(file, text.removeprefix(f"{file}: ")))
        return catalog


_BEGINNING = re.compile(rb"[0-9a-f]{0,8}\Z|[0-9a-f]{8} (\{|\Z)")
_SECTOR = 512


def _ids_by_shard(catalog: Catalog) -> Callable[[int], list[int]]:
    """Return a function that tells the ids of the trajectories in a shard, live and pinned, ascending."""
    both = (catalog.index, catalog.pinned)
    ids = np.concatenate([index["trajectory_id"] for index in both])
    shards = np.concatenate([index["shard"] for index in both])
    return lambda row: np.sort(ids[shards == row]).tolist()


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
    elif not _is_cut_short(data, catalog.segment_end):
        message = f"what lies from byte {catalog.segment_end} on is no part of a log; what it committed is not there"
        result.problems.append(Problem(catalog.segment, message))
    else:
        result.notes.append(f"{catalog.segment}: {catalog.segment_torn:,} bytes of an interrupted commit at its end")


def _is_cut_short(data: bytes, offset: int) -> bool:
    """Return whether these are the first bytes of a record, or sectors that never reached the disk (zeros)."""
    zeros = len(data) - len(data.lstrip(b"\0"))
    if zeros:
        return zeros == len(data) or (offset + zeros) % _SECTOR == 0
    return _BEGINNING.match(data) is not None


def _check_state(file: str, values: Mapping[str, Any], result: Verification) -> None:
    """Check what a buffer takes up besides trajectories: seed, generator, counter, format."""
    try:
        CheckpointState.from_json(values)
    except CorruptStoreError as error:
        result.problems.append(Problem(file, str(error)))


def _check_named(catalog: Catalog, name: str, result: Verification) -> None:
    """Check that all trajectories are there which a pin names."""
    if (lacking := catalog.lacking(name)) > 0:
        text = f"names {lacking:,} trajectories that are missing"
        if name in {head.name for head in catalog.unfinished_asides()}:
            result.notes.append(f"the pin {name!r} is of a rollback that did not happen; the next writer removes it")
        else:
            result.problems.append(Problem(pin_name(name), text))


def _check_saved_states(catalog: Catalog, result: Verification) -> None:
    """Check the states of saved points: that each is there, as it was written."""
    for head in catalog.pins.heads.values():
        if head.state is None:
            continue
        result.files += 1
        result.nbytes += head.state.size
        try:
            catalog.pins.read_state(head.state)
        except CorruptStoreError as error:
            result.problems.append(Problem(head.state.name, str(error)))
    unnamed = catalog.pins.unnamed_states()
    if unnamed:
        result.notes.append(
            f"{len(unnamed):,} states in pins/ are named by no saved point; the next writer removes them"
        )


def _check_entries(catalog: Catalog, result: Verification) -> None:
    ids = np.concatenate([catalog.index["trajectory_id"], catalog.pinned["trajectory_id"]])
    uuids = np.concatenate([catalog.index["uuid"], catalog.pinned["uuid"]])
    for name, values in (("trajectory id", ids), ("UUID", uuids.view(np.dtype("2i8")) if len(uuids) else uuids)):
        if len(np.unique(values, axis=0)) != len(values):
            result.problems.append(Problem(INDEX_NAME, f"a {name} occurs twice"))
    if len(ids) and int(ids.max()) >= catalog.next_id:
        result.problems.append(
            Problem(
                INDEX_NAME,
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
            if schema in made and not index.at("document", position):
                continue
            made.add(schema)
            try:
                access.trajectory(index, position)
            except TrajstoreError as error:
                number = int(index.at("trajectory_id", position))
                result.problems.append(Problem(f"trajectory {number}", str(error), ((number, number),)))
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
    sizes = directory.sizes()
    for entry in found.missing:
        lost = entry.trajectory_id
        usual = "; RLinf's checkpoint of a buffer in memory lists such too" if entry in found.before else ""
        message = f"named by the index, but missing{usual}"
        result.problems.append(Problem(entry.file_name(found.suffix), message, ((lost, lost),)))
    for done, (name, found_one) in enumerate(iterate_rlinf(found)):
        if isinstance(found_one, TrajstoreError):
            lost = found.entries[done].trajectory_id
            result.problems.append(Problem(name, str(found_one), ((lost, lost),)))
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
            result.problems.append(Problem(METADATA_NAME, message))
    unnamed = [name for name in sizes if name.startswith("trajectory_") and not name.endswith(".json")]
    if unnamed:
        result.notes.append(f"{len(unnamed):,} trajectory files are not in the index")


def _verify_pool(directory: Directory, result: Verification, progress: Progress | None) -> None:
    from trajstore.experience.persistence import (
        BUCKETS_FILE,
        read_pool,
    )  # loads the experience package, needed only here

    contents = read_pool(Path(directory.url))
    sizes = directory.sizes()
    result.files, result.nbytes = len(sizes), sum(sizes.values())
    result.trajectories = sum(map(len, contents.task2trajectories.values()))
    bucket_of: dict[str, str] = {}
    for difficulty, tasks in orjson.loads(directory.read(BUCKETS_FILE)).items():  # read_pool has seen that it is one
        for task in tasks:
            if task in bucket_of:
                told = f"task {task} is in the buckets {bucket_of[task]} and {difficulty}; the later one counts"
                result.notes.append(f"{BUCKETS_FILE}: {told}")
            bucket_of[task] = difficulty
    if progress is not None:
        progress(1, 1)
