"""Verify a directory: every checksum, name and entry. Writes nothing except a reader's lease.

``inspect`` checks names and sizes only; this reads every byte.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore._core.buffer.checkpoint import CheckpointState
from trajstore._core.columns.fields import VALID
from trajstore._core.columns.schema import Schema
from trajstore._core.files.base import SEE_VERIFY, Directory
from trajstore._core.files.holder import LOCK_NAME
from trajstore._core.files.local import LocalDirectory
from trajstore._core.formats.base import SHARDS_FOLDER, ShardManifest
from trajstore._core.formats.checksums import check_file
from trajstore._core.formats.packed import is_packed
from trajstore._core.reading.places import Place, find_place, mixed_sentence
from trajstore._core.reading.rlinf_source import OR_WITHOUT_IT, RLinfSource
from trajstore._core.reading.shard_access import ShardAccess, fetch_file, reader_of
from trajstore._core.sessions.folder import CallsFolder
from trajstore._core.store.catalog import Catalog, log_segments
from trajstore._core.store.log_records import decode_lines, id_ranges, ids_in_words
from trajstore._core.store.lost_records import Damage, lost_in_words
from trajstore._core.store.salvage import SalvagedCatalog
from trajstore._core.store.saved_points import PINS_FOLDER, pin_name
from trajstore._core.store.sealed import (
    COPY_NAME,
    FROM_A_COPY,
    INDEX_NAME,
    LEDGER_NAME,
    METADATA_NAME,
    check_owner,
    unseal,
    without_advice,
)
from trajstore._core.store.shard_table import shard_number
from trajstore.errors import (
    CorruptStoreError,
    DescriptorLimitError,
    StoreError,
    StoreNotFoundError,
    TrajstoreError,
    UnsafeContentError,
    counted,
    listed,
    trajectories,
)
from trajstore.operations.inspect import MISSING
from trajstore.operations.late_values import waiting_in_words, waiting_values
from trajstore.operations.opening import announced, is_absent, needed_files, needed_now, states_now
from trajstore.operations.points import absent_ranks, incomplete_points
from trajstore.operations.verification import Problem, Progress, Verification, problem_of


def verify(path: str | Path, progress: Progress | None = None, *, ranks: int | None = None) -> Verification:
    """Verify a store, a checkpoint, a directory of RLinf, or a folder of these.

    For a store, this checks the snapshot, log, metadata and pins; the presence, size and checksum of every named file;
    that columns which are not mapped can be decoded; that ids and UUIDs are unique; and that every JSON document
    parses. Foreign formats are loaded and compared with their index. Only their ``.pt`` files have checksums, so a
    changed value elsewhere is not detected.

    The store may have a writer, whose evictions are not damage: a lease in ``readers/`` keeps evicted files until they
    are checked. Nothing else is written. Where no lease can be written, a missing file is reported only if the newest
    commits still need it.

    Args:
        path: local path or URL.
        progress: called with (done, total) shards or files.
        ranks: number of ranks of the run; another one is a problem.

    Raises:
        StoreNotFoundError: the path has no store.
        UnsupportedVersionError: the store has another layout version.
    """
    place = find_place(path)
    result = verify_place(place, progress)
    result.problems[:0] = [
        Problem("", text, kind="absent rank" if (ranks or 0) > len(place.rank_names) else "surplus rank")
        for text in place.other_than(ranks)
    ]
    return result


def verify_place(place: Place, progress: Progress | None) -> Verification:
    """Verify a place, see :func:`verify`; a run's place lists the stores that are its parts."""
    result = Verification(place.url, place.kind)
    if place.kind == "run":
        if place.mixed:
            result.problems.append(Problem("", mixed_sentence(place.url, [part.name for part in place.parts[1:]])))
        absent = (*place.lacking, *absent_ranks(place))
        result.problems += [Problem(text.split()[0], text, uncounted=True, kind="absent rank") for text in absent]
        result.parts = [verify_place(part, progress) for part in place.parts]
        for part, verification in zip(place.parts, result.parts, strict=True):
            name = "" if part.url == place.url else part.name + "/"
            result.problems += [replace(problem, file=f"{name}{problem.file}") for problem in verification.problems]
        result.notes += incomplete_points(place)
        if place.beside:
            result.notes.append(
                f"{listed(place.beside)} are checked and counted too; opening the run shows rank_* only"
            )
        result.trajectories, result.pinned, result.files, result.nbytes = (
            sum(getattr(part, name) for part in result.parts) for name in ("trajectories", "pinned", "files", "nbytes")
        )
        return result
    check = check_store if place.kind == "store" else _verify_rlinf
    try:
        check(place.directory, result, progress)
    except (CorruptStoreError, UnsafeContentError, OSError) as error:  # prevents any further check
        result.problems.append(problem_of(Damage(str(error), uncounted=True), place.directory))
    return result


# -- foreign directories ------------------------------------------------------------------------------


def _verify_rlinf(directory: Directory, result: Verification, progress: Progress | None) -> None:
    source = RLinfSource.open(directory, strict=False)
    result.problems += [problem_of(damage, directory) for damage in source.damaged]
    check_state(METADATA_NAME, source.metadata, result)
    sizes = directory.sizes()
    for entry in source.gone:
        number = entry.trajectory_id
        result.problems.append(Problem(entry.file_name(source.suffix), MISSING, ((number, number),)))
    if source.unwritten:
        result.notes.append(source.unwritten_in_words())
    for done, entry in enumerate(source.entries):
        name = entry.file_name(source.suffix)
        try:
            source.flat(done)
            messages = source.damage(done)
            result.notes += [f"{name}: {message}" for message in source.unrepresented(done)]
        except (CorruptStoreError, UnsafeContentError) as error:
            messages = [str(error).removesuffix(OR_WITHOUT_IT)]
        lost = ((entry.trajectory_id, entry.trajectory_id),)
        result.problems += [Problem(name, message, lost) for message in messages]
        result.trajectories += not messages
        result.files += 1
        result.nbytes += sizes.pop(name, 0)
        if progress is not None:
            progress(done + 1, len(source.entries))
    result.problems += _wrong_totals(source)
    unnamed = [name for name in sizes if name.startswith("trajectory_") and not name.endswith(".json")]
    if unnamed and not source.damaged:
        result.notes.append(f"{counted(len(unnamed), 'trajectory file', 'is', 'are')} not in the index")


def _wrong_totals(found: RLinfSource) -> list[Problem]:
    """Return the totals in ``metadata.json`` that differ from the index."""
    entries = [*found.entries, *found.missing]
    lost = sum(damage.count for damage in found.damaged)
    size = found.metadata.get("size")
    if not found.damaged:
        totals = {"size": len(entries), "total_samples": sum(entry.num_samples for entry in entries)}
        return [
            Problem(METADATA_NAME, f"{name} is {found.metadata[name]}, the index adds up to {value}")
            for name, value in totals.items()
            if found.metadata.get(name, value) != value
        ]
    if isinstance(size, int) and size > len(entries) + lost:
        text = f"counts {trajectories(size)}, and {len(entries) + lost:,} have a file: others were deleted, or never "
        return [
            Problem(METADATA_NAME, f"{text}written, as by RLinf's checkpoints of a buffer in memory", uncounted=True)
        ]
    return []


# -- stores -------------------------------------------------------------------------------------------

_ATTEMPTS = 20  # retries for trajectories that a writer moves to another shard during the check


def check_store(directory: Directory, result: Verification, progress: Progress | None) -> None:
    """Add a store's damage to a result. Evictions and moves by a writer are not damage.

    Args:
        directory: directory of the store.
        result: receives problems, notes and counts.
        progress: called with (done, total) shards.

    Raises:
        CorruptStoreError, OSError: the damage prevents any further check.
        UnsupportedVersionError: the store has another layout version.
    """
    with announced(directory) as lease:
        catalog = _open(directory, result)
        lease.settle(catalog.generation)
        metadata = catalog.metadata()
        check_state(METADATA_NAME, metadata, result)
        if metadata.get("store_id") != catalog.store_id:
            result.problems.append(Problem(METADATA_NAME, f"belongs to another store than {INDEX_NAME}"))
        result.pinned = len(catalog.pinned)
        _check_pins(catalog, result)
        _check_saved_states(catalog, result)
        _check_entries(catalog, result)
        _check_shards(catalog, result, progress)
        _check_unnamed(catalog, result)
        _check_torn_tail(catalog, result)
        _check_fences(catalog, result)
        _check_inbox(catalog, result)
        _check_calls(catalog, result)
        _check_copy(catalog, result)
        _check_lock(directory, result)


def _check_inbox(catalog: Catalog, result: Verification) -> None:
    """Report late values that are waiting or refused, and damaged inbox files."""
    waiting = waiting_values(catalog)
    result.problems += [Problem(name, text) for name, text in waiting.damaged]
    result.notes += [f"{name}: {text}" for name, text in waiting.refused]
    if waiting.files:
        result.notes.append(f"late values wait: {waiting_in_words(waiting.to_json() or {})}")


def _check_calls(catalog: Catalog, result: Verification) -> None:
    """Report damaged journals of calls, and sessions that are not in the store yet."""
    if not isinstance(catalog.directory, LocalDirectory):
        return
    folder = CallsFolder(catalog.directory.root, catalog.store_id)
    folder.refresh()
    for file in folder.files.values():
        result.problems += [
            Problem(file.name, f"the record at byte {begin:,} is damaged; its session lacks it, the others are intact")
            for begin in file.damaged
        ]
    sessions = folder.current().values()
    for session in sessions:
        try:
            folder.files[session.journal].calls(session)
        except CorruptStoreError as error:
            result.problems.append(Problem(session.journal, str(error)))
        except FileNotFoundError:  # taken in just now
            continue
    if sessions:
        calls = sum(session.calls for session in sessions)
        result.notes.append(
            f"{counted(len(sessions), 'session', 'is', 'are')} not in the store yet, with {counted(calls, 'call')}: "
            "`trajstore list --open` shows them"
        )


def _open(directory: Directory, result: Verification) -> Catalog:
    """Open a store; if it is damaged, record the damage and open the intact part."""
    try:
        catalog = Catalog.open(directory)
        if catalog.index_damage:
            result.problems.append(problem_of(Damage(catalog.index_damage), directory))
        return catalog
    except CorruptStoreError as error:
        salvaged = SalvagedCatalog.open(directory)
        for damage in salvaged.damage or [Damage(str(error))]:
            result.problems.append(problem_of(damage, directory))
        return salvaged


_BEGINNING = re.compile(rb"[0-9a-f]{0,8}\Z|[0-9a-f]{8} (\{|\Z)")
_SECTOR = 512


def _check_unnamed(catalog: Catalog, result: Verification) -> None:
    """Report files that no commit and no saved point names; a live writer's files come and go."""
    directory, needed = catalog.directory, needed_files(catalog)
    states = catalog.pins.unnamed_files()
    shards = [name for name in directory.names(SHARDS_FOLDER) if name not in needed]
    if not states and not shards:
        return
    _, needed = needed_now(directory)
    named = states_now(directory) or set()
    shards = [name for name in shards if name not in needed]
    states = [name for name in states if name not in named]
    if isinstance(catalog, SalvagedCatalog):
        saving = adding = " that can be read; they may hold what is lost, and stay while no writer can open the store"
    elif directory.is_written():
        saving = " now: its writer is saving one, or the next one removes them"
        adding = " now: its writer adds them or keeps them for readers, or the next one removes them"
    else:
        saving = adding = "; the next writer removes them"
        if all(shard_number(name) in range(catalog.next_shard) for name in shards):
            adding = "; what they held was evicted or is elsewhere: the next writer removes them"
        if len(ids := SalvagedCatalog.with_uncommitted(catalog).uncommitted):
            held = lost_in_words(id_ranges(ids).tolist(), uncounted=False)
            adding = f"; they hold {held}: `trajstore repair` brings them back, the next writer removes them"
    if states:
        result.notes.append(f"{counted(len(states), 'file', *_in(PINS_FOLDER))} named by no snapshot{saving}")
    if shards:
        result.notes.append(f"{counted(len(shards), 'file', *_in(SHARDS_FOLDER))} named by no commit{adding}")


def _in(folder: str) -> tuple[str, str]:
    return f"in {folder}/ is", f"in {folder}/ are"


def _check_torn_tail(catalog: Catalog, result: Verification) -> None:
    """Distinguish an interrupted commit from a damaged whole record, which ends in a line feed."""
    if not catalog.segment_torn:
        return
    source = f"{catalog.directory.url}/{catalog.segment}"
    try:
        data = catalog.directory.read(catalog.segment, catalog.segment_end)
    except FileNotFoundError:  # a live writer has taken a snapshot meanwhile
        return
    if decode_lines(data, source, catalog.segment_end).records:
        return  # a live writer was appending it
    if b"\n" in data:
        message = f"the record at byte {catalog.segment_end} is damaged; what it committed is not there"
        result.problems.append(Problem(catalog.segment, message, uncounted=True))
    elif not _is_cut_short(data, catalog.segment_end):
        message = f"the content from byte {catalog.segment_end} on is no part of a log; what it committed is not there"
        result.problems.append(Problem(catalog.segment, message, uncounted=True))
    else:
        result.notes.append(f"{catalog.segment}: {catalog.segment_torn:,} bytes of an interrupted commit at its end")


def _check_fences(catalog: Catalog, result: Verification) -> None:
    """Check log segments kept in an object store although the index includes them."""
    for first, name in log_segments(catalog.directory):
        if first in catalog.fences and first <= catalog.snapshot_generation:
            try:
                tail = decode_lines(catalog.directory.read(name), f"{catalog.directory.url}/{name}")
                whole = not tail.torn and [record.get("generation") for record in tail.records] == [first]
            except FileNotFoundError:  # a live writer has deleted the oldest
                continue
            except CorruptStoreError:
                whole = False
            if not whole:
                result.problems.append(Problem(name, "the record is damaged; nothing is lost, for the index has it"))


def _is_cut_short(data: bytes, offset: int) -> bool:
    """Return whether the data is the start of a record, or sectors that never reached the disk (zeros)."""
    zeros = len(data) - len(data.lstrip(b"\0"))
    if zeros:
        return zeros == len(data) or (offset + zeros) % _SECTOR == 0
    return _BEGINNING.match(data.rstrip(b"\0")) is not None  # a size may be on the disk before the data


def _check_copy(catalog: Catalog, result: Verification) -> None:
    """Check the copy of the index; a live writer may just have written both."""
    if catalog.index_damage or isinstance(catalog, SalvagedCatalog):
        return
    try:
        check_owner(unseal("snapshot", catalog.directory.read(COPY_NAME), COPY_NAME), catalog.store_id, COPY_NAME)
    except FileNotFoundError:
        files, _ = catalog.directory.listing()
        if catalog.directory.can_append and LOCK_NAME in files and LEDGER_NAME not in files:  # not of a mirror
            result.notes.append(f"{COPY_NAME}: absent; it is written again with {INDEX_NAME}")
    except CorruptStoreError as error:
        text = (
            f"{without_advice(str(error))}; nothing is lost, for {INDEX_NAME} is whole; both are written again with it"
        )
        result.problems.append(Problem(COPY_NAME, text))


def _check_lock(directory: Directory, result: Verification) -> None:
    """Report a folder or pipe in place of the lock file, which prevents writers from opening the store."""
    try:
        directory.size(LOCK_NAME)
    except FileNotFoundError:
        return
    except CorruptStoreError as error:
        result.problems.append(Problem(LOCK_NAME, f"{error}; no writer can open the store until it is removed"))


def check_state(file: str, values: Mapping[str, Any], result: Verification) -> None:
    """Check the buffer's state besides trajectories: seed, generator, counter, format."""
    try:
        CheckpointState.from_json(values)
    except CorruptStoreError as error:
        result.problems.append(Problem(file, str(error)))


def _check_pins(catalog: Catalog, result: Verification) -> None:
    for name in catalog.pins.heads:
        try:
            state = catalog.pins.details(name)
        except StoreNotFoundError:  # its writer has removed it meanwhile
            continue
        check_state(pin_name(name), state, result)
        _check_named(catalog, name, result)


def _check_named(catalog: Catalog, name: str, result: Verification) -> None:
    """Check that all trajectories named by a pin are present."""
    if (lacking := catalog.lacking(catalog.pins.heads[name])) > 0:
        text = f"names {trajectories(lacking, 'that is', 'that are')} missing"
        if name in {head.name for head in catalog.unfinished_asides()}:
            result.notes.append(
                f"the head {name!r} was not left after all; the next writer removes this snapshot of it"
            )
        else:
            # Ids at or above next_id: the commits that assigned them are lost, perhaps with others.
            uncounted = int(catalog.pins.heads[name].ids[:, 1].max()) >= catalog.next_id
            result.problems.append(Problem(pin_name(name), text, uncounted=uncounted))


def _check_saved_states(catalog: Catalog, result: Verification) -> None:
    """Check that the state and late-value files of snapshots are present and unchanged, and the values readable."""
    for head, file in [(snapshot, file) for snapshot in catalog.pins.heads.values() for file in snapshot.files]:
        result.files += 1
        result.nbytes += file.size
        try:
            catalog.values_of(head) if file is head.values else catalog.pins.read(file)
        except CorruptStoreError as error:
            named = states_now(catalog.directory) if is_absent(catalog.directory, file.name) else None
            if named is None or file.name in named:
                result.problems.append(Problem(file.name, str(error)))


def _check_entries(catalog: Catalog, result: Verification) -> None:
    ids, _ = _stored(catalog)
    uuids = np.concatenate([catalog.index["uuid"], catalog.pinned["uuid"]])
    for name, values in (("trajectory id", ids), ("UUID", uuids.view(np.dtype("2i8")) if len(uuids) else uuids)):
        if len(np.unique(values, axis=0)) != len(values):
            result.problems.append(Problem(INDEX_NAME, f"a {name} occurs twice"))
    if len(ids) and int(ids.max()) >= catalog.next_id:
        result.problems.append(
            Problem(INDEX_NAME, f"id {int(ids.max())} is not below next_id {catalog.next_id}; ids would be reused")
        )


# -- shards -------------------------------------------------------------------------------------------


_Found = tuple[str, Problem]
"""A damaged file, and the problem."""


def _check_shards(catalog: Catalog, result: Verification, progress: Progress | None) -> None:
    """Check all shards. Trajectories of a missing file that is no longer needed are searched in the newest catalog.

    This does not occur under a reader's lease.
    """
    directory, evicted = catalog.directory, 0
    rows: npt.NDArray[np.intp] = np.flatnonzero(catalog.needed_shards())
    only: npt.NDArray[np.int64] | None = None
    for _ in range(_ATTEMPTS):
        damage = _damage_of(catalog, rows, only, result, progress)
        absent = {file for file, _ in damage if is_absent(directory, file)}
        if absent:
            catalog, needed = needed_now(directory)
            absent -= needed
        result.problems += [problem for file, problem in damage if file not in absent]
        lost = {pair for file, problem in damage if file in absent for pair in problem.lost}
        missed = np.concatenate([np.zeros(0, np.int64), *(np.arange(low, high + 1) for low, high in lost)])
        ids, shards = _stored(catalog)
        only = missed[np.isin(missed, ids)]
        evicted += len(missed) - len(only)
        rows = np.unique(shards[np.isin(ids, only)])
        if not len(rows):
            break
    else:
        result.notes.append(f"{counted(len(rows), 'shard')} not checked: the trajectories were moved during each check")
    if evicted:
        result.notes.append(f"{trajectories(evicted, 'was', 'were')} evicted before the check")


def _damage_of(
    catalog: Catalog,
    rows: npt.NDArray[np.intp],
    only: npt.NDArray[np.int64] | None,
    result: Verification,
    progress: Progress | None,
) -> list[_Found]:
    """Return the damage of some shards; only trajectories with ids in ``only`` count, if given."""
    damaged = []
    ids, shards = _stored(catalog)
    whole = np.zeros(len(catalog.shards), np.bool_)
    for done, row in enumerate(rows.tolist()):
        manifest = catalog.shards.manifest(row)
        damage = _damage_in(catalog.directory, manifest)
        whole[row] = not damage
        if damage:
            found = np.sort(ids[shards == row])
            lost = tuple(map(tuple, id_ranges(found).tolist()))
            if not lost:
                given = f"; values by row of trajectories {ids_in_words(catalog.notes.ids_in(row))} are lost"
                damage = [(file, message + given) for file, message in damage]
            damaged += [(file, Problem(file, message, lost)) for file, message in damage]
        result.files += len(manifest.files)
        result.nbytes += sum(file.size for file in manifest.files)
        if progress is not None:
            progress(done + 1, len(rows))
    return damaged + _damaged_documents(catalog, whole, only, result)


def _stored(catalog: Catalog) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.intp]]:
    """Return ids and shards of live and pinned trajectories."""
    indexes = (catalog.index, catalog.pinned)
    ids, shards = (np.concatenate([index[name] for index in indexes]) for name in ("trajectory_id", "shard"))
    return ids, shards.astype(np.intp)


def _damaged_documents(
    catalog: Catalog, whole: npt.NDArray[np.bool_], only: npt.NDArray[np.int64] | None, result: Verification
) -> list[_Found]:
    """Decode each trajectory with a JSON document in an intact shard, and one trajectory per set of columns.

    Counts the valid steps of all that have a field ``valid``.
    """
    damaged = []
    access = ShardAccess(catalog)
    made: set[Schema] = set()
    for index in (catalog.index, catalog.pinned):
        chosen = whole[index["shard"]] if len(index) else np.zeros(0, np.bool_)
        for position in (index.first + np.flatnonzero(chosen)).tolist():
            number = int(index.at("trajectory_id", position))
            if only is not None and number not in only:
                continue
            result.trajectories += 1
            schema = access.schema(index, position)
            known = schema in made and not index.at("document", position)
            if known and not schema.has_valid:
                continue
            made.add(schema)
            try:
                if not known:
                    access.trajectory(index, position)
                if schema.has_valid:
                    valid = int(access.columns(index, position, [VALID])[VALID].sum())
                    if valid != (count := index.at("num_samples", position)):
                        raise CorruptStoreError(f"its field valid has {valid} valid steps, the index says {count}")
            except DescriptorLimitError:
                raise
            except TrajstoreError as error:
                file = catalog.shards.manifest(int(index.at("shard", position))).files[0].name
                result.trajectories -= is_absent(catalog.directory, file)
                damaged.append((file, Problem(f"trajectory {number}", str(error), ((number, number),))))
    access.close()
    return damaged


def _damage_in(directory: Directory, manifest: ShardManifest) -> list[tuple[str, str]]:
    """Return (file name, message) for each damage of a shard: sizes, checksums, columns that cannot be decoded.

    Raises:
        MissingDependencyError: the format's package is not installed; this is not damage.
    """
    damage = []
    for number, file in enumerate(manifest.files):
        try:
            data = memoryview(fetch_file(directory, manifest, file.name))
        except (StoreError, OSError) as error:
            advice = FROM_A_COPY if isinstance(error, CorruptStoreError) else ""
            damage.append((file.name, without_advice(str(error).removesuffix(SEE_VERIFY)) + advice))
            continue
        with data:
            texts = check_file(data, manifest, number)
        damage += [(file.name, text.removeprefix(f"{file.name}: ") + FROM_A_COPY) for text in texts]
    schema = manifest.schema
    if not damage and (None in manifest.places or schema.stored_once or is_packed(schema)):
        damage += _damage_in_decoded(directory, manifest)
    return damage


def _damage_in_decoded(directory: Directory, manifest: ShardManifest) -> list[tuple[str, str]]:
    """Decode the columns that are not mapped, packed, or stored once."""
    try:
        reader = reader_of(directory, manifest)
        for column, place in enumerate(manifest.places):
            if is_packed(manifest.schema):
                reader.rows(column, 0, 0)  # checks all runs
            elif place is None or column in manifest.schema.stored_once:
                reader.rows(column, 0, manifest.rows[column])
    except (StoreError, OSError) as error:
        return [(manifest.files[0].name, str(error))]
    return []
