"""Verify a directory: every checksum, name and entry. Writes nothing except a reader's lease.

``inspect`` checks names and sizes only; this reads every byte.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trajstore._core.files.base import Directory
from trajstore._core.reading.places import Place, find_place, mixed_sentence
from trajstore._core.reading.rlinf_source import OR_WITHOUT_IT, RLinfSource
from trajstore._core.store.lost_records import Damage
from trajstore._core.store.sealed import METADATA_NAME
from trajstore.errors import CorruptStoreError, UnsafeContentError, counted, listed, trajectories
from trajstore.operations.foreign import MISSING
from trajstore.operations.points import absent_ranks, incomplete_points
from trajstore.operations.store_damage import check_state, check_store
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
    result.problems[:0] = [Problem("", text) for text in place.other_than(ranks)]
    return result


def verify_place(place: Place, progress: Progress | None) -> Verification:
    """Verify a place, see :func:`verify`; a run's place lists the stores that are its parts."""
    result = Verification(place.url, place.kind)
    if place.kind == "run":
        if place.mixed:
            result.problems.append(Problem("", mixed_sentence(place.url, [part.name for part in place.parts[1:]])))
        absent = (*place.lacking, *absent_ranks(place))
        result.problems += [Problem(text.split()[0], text, uncounted=True) for text in absent]
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
