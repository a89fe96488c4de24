"""Checking a directory: every checksum, every name, every entry. Nothing is written but a reader's lease.

``inspect`` looks at names and sizes; this reads every byte.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trajstore.core.files.base import Directory
from trajstore.core.reading.places import Place, find_place, mixed_sentence
from trajstore.core.reading.rlinf_source import OR_WITHOUT_IT, RLinfSource
from trajstore.core.store.lost_records import Damage
from trajstore.core.store.sealed import METADATA_NAME
from trajstore.errors import CorruptStoreError, TrajstoreError, UnsafeContentError, listed
from trajstore.operations.foreign import MISSING, iterate_rlinf
from trajstore.operations.points import absent_ranks, incomplete_points
from trajstore.operations.pools import pool_support_for
from trajstore.operations.store_damage import check_state, check_store
from trajstore.operations.verification import Problem, Progress, Verification, problem_of


def verify(path: str | Path, progress: Progress | None = None) -> Verification:
    """Check a store, a checkpoint, a directory of RLinf, an experience pool, or a folder of these.

    Of a store: snapshot, log, metadata and pins; that every named file is there with the size and checksum it
    was written with; that columns which are not mapped can be decoded; that ids and UUIDs are unique and every
    JSON document parses. The formats of others are loaded, and compared with their index; checksums
    they have within ``.pt`` files only, so that a changed value anywhere else stays unseen.

    A writer may go on: what it evicts meanwhile is no damage. While a writer has the store open, a lease in
    ``readers/`` keeps evicted files until they are checked; nothing else is written. Where no lease can be written, a
    file that is gone is looked for in the newest commits before it is called missing.

    Args:
        path: local path or URL.
        progress: told (done, total) shards or files.

    Raises:
        StoreNotFoundError: nothing there.
        UnsupportedVersionError: it has another layout version.
    """
    return verify_place(find_place(path), progress)


def verify_place(place: Place, progress: Progress | None) -> Verification:
    """Check what lies at a place, see :func:`verify`; of a run it is the place that says which stores are its parts."""
    result = Verification(place.url, place.kind)
    if place.kind == "run":
        if place.mixed:
            result.problems.append(Problem("", mixed_sentence(place.url, [part.name for part in place.parts[1:]])))
        absent = (*place.lacking, *absent_ranks(place))
        result.problems += [Problem(text.split()[0], text, uncounted=True) for text in absent]
        result.parts = [verify_place(part, progress) for part in place.parts]
        for part, found in zip(place.parts, result.parts, strict=True):
            name = "" if part.url == place.url else part.name + "/"
            result.problems += [replace(problem, file=f"{name}{problem.file}") for problem in found.problems]
        result.notes += incomplete_points(place)
        if place.beside:
            result.notes.append(
                f"{listed(place.beside)} are checked and counted too; opening the run shows rank_* only"
            )
        result.trajectories, result.pinned, result.files, result.nbytes = (
            sum(getattr(part, name) for part in result.parts) for name in ("trajectories", "pinned", "files", "nbytes")
        )
        return result
    check = {"store": check_store, "rlinf": _verify_rlinf, "experience_pool": _verify_pool}[place.kind]
    try:
        check(place.directory, result, progress)
    except (CorruptStoreError, UnsafeContentError, OSError) as error:  # damage after which nothing else can be checked
        result.problems.append(problem_of(Damage(str(error), uncounted=True), place.directory))
    return result


# -- directories of others ----------------------------------------------------------------------------


def _verify_rlinf(directory: Directory, result: Verification, progress: Progress | None) -> None:
    found = RLinfSource.open(directory, strict=False)
    result.problems += [problem_of(damage, directory) for damage in found.damaged]
    check_state(METADATA_NAME, found.metadata, result)
    sizes = directory.sizes()
    for entry in found.gone:
        number = entry.trajectory_id
        result.problems.append(Problem(entry.file_name(found.suffix), MISSING, ((number, number),)))
    if found.unwritten:
        result.notes.append(found.unwritten_in_words())
    for done, (name, found_one) in enumerate(iterate_rlinf(found)):
        number = found.entries[done].trajectory_id
        lost, messages = ((number, number),), [str(found_one).removesuffix(OR_WITHOUT_IT)]
        if not isinstance(found_one, TrajstoreError):
            messages = found.damage(done)
            result.notes += [f"{name}: {message}" for message in found.unrepresented(done)]
        result.problems += [Problem(name, message, lost) for message in messages]
        result.trajectories += not messages
        result.files += 1
        result.nbytes += sizes.pop(name, 0)
        if progress is not None:
            progress(done + 1, len(found.entries))
    result.problems += _wrong_totals(found)
    unnamed = [name for name in sizes if name.startswith("trajectory_") and not name.endswith(".json")]
    if unnamed and not found.damaged:
        result.notes.append(f"{len(unnamed):,} trajectory files are not in the index")


def _wrong_totals(found: RLinfSource) -> list[Problem]:
    """Return what ``metadata.json`` counts otherwise than the index."""
    entries = [*found.entries, *found.missing]
    lost = sum(damage.count for damage in found.damaged)
    said = found.metadata.get("size")
    if not found.damaged:
        totals = {"size": len(entries), "total_samples": sum(entry.num_samples for entry in entries)}
        return [
            Problem(METADATA_NAME, f"{name} is {found.metadata[name]}, the index adds up to {value}")
            for name, value in totals.items()
            if found.metadata.get(name, value) != value
        ]
    if isinstance(said, int) and said > len(entries) + lost:
        text = (
            f"counts {said:,} trajectories, and {len(entries) + lost:,} have a file: the others were deleted, or never "
        )
        return [
            Problem(METADATA_NAME, f"{text}written, as by RLinf's checkpoints of a buffer in memory", uncounted=True)
        ]
    return []


def _verify_pool(directory: Directory, result: Verification, progress: Progress | None) -> None:
    pool_support_for(directory.url).verify_files(directory, result, progress)
