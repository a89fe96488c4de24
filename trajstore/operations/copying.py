"""Copy stores, including live ones, and repair damaged ones."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from trajstore._core.buffer.checkpoint import CheckpointState, check_target, renumbered, save_checkpoint
from trajstore._core.buffer.loading import LoadRequest, left_out_in_words
from trajstore._core.buffer.reader import Reader, load_reader
from trajstore._core.buffer.replay_buffer import TrajectoryReplayBuffer
from trajstore._core.files.base import Directory, EncodedFile
from trajstore._core.files.folders import claimed
from trajstore._core.files.holder import LOCK_NAME
from trajstore._core.files.local import TEMPORARY_SUFFIX, LocalDirectory
from trajstore._core.files.opening import directories_above, nested, open_directory
from trajstore._core.formats import get_format
from trajstore._core.formats.base import SHARDS_FOLDER
from trajstore._core.reading.places import Place, find_place, is_of_rank, mixed_sentence
from trajstore._core.reading.read_snapshot import ReadSnapshot
from trajstore._core.reading.rlinf_source import RLinfSource
from trajstore._core.reading.sources import StoreSource
from trajstore._core.sessions.records import CALLS_FOLDER
from trajstore._core.sessions.sessions import named, open_sessions
from trajstore._core.store.log_records import id_ranges
from trajstore._core.store.lost_records import lost_in_words
from trajstore._core.store.run_ids import ALONE
from trajstore._core.store.salvage import SalvagedCatalog
from trajstore._core.store.saved_points import PINS_FOLDER
from trajstore._core.store.sealed import COPYING_NAME, INDEX_NAME, METADATA_NAME, without_advice
from trajstore._core.store.shard_table import shard_number
from trajstore.errors import (
    ConfigurationError,
    CorruptStoreError,
    StoreError,
    StoreNotFoundError,
    UnsupportedVersionError,
    counted,
    listed,
    trajectories,
    written,
)
from trajstore.ledger import LEDGER_FOLDER
from trajstore.operations.points import numbers_absent
from trajstore.operations.verification import Problem, Progress, Verification
from trajstore.operations.verify import verify, verify_place

logger = logging.getLogger(__name__)

WRITTEN_ALREADY = "an earlier call has written everything already"


@dataclass
class Copied:
    """The result of a copy.

    Attributes:
        source: path or URL of the source.
        target: path or URL of the copy.
        trajectories: number of trajectories in the copy.
        nbytes: bytes of the copy; files that are hard links to the source's take no space of their own.
        lost: ids of the trajectories that could not be copied, ascending.
        problems: one sentence per piece of damage in the source.
        parts: one result per store of a run.
        left_out: number of unreadable trajectories, and of unreadable stores of a run, that were skipped.
        uncounted: whether more may be lost than ``lost`` lists.
        notes: remarks other than damage; after a repair, the notes of ``verify`` on the source.
    """

    source: str
    target: str
    trajectories: int = 0
    nbytes: int = 0
    lost: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    parts: list[Copied] = field(default_factory=list)
    left_out: int = 0
    uncounted: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def lost_in_words(self) -> str:
        """The losses in words; empty if there are none."""
        return lost_in_words(id_ranges(np.array(self.lost, np.int64)).tolist(), self.uncounted)

    @property
    def is_whole(self) -> bool:
        """Whether the copy has every trajectory of the source, as far as known."""
        here = not self.lost and not self.left_out and not self.uncounted
        return here and all(part.is_whole for part in self.parts)

    def take(self, found: Verification, url: str) -> None:
        """Record the losses, damage and notes found by verifying a source."""
        self.lost = sorted(
            {at for problem in found.problems for low, high in problem.lost for at in range(low, high + 1)}
        )
        self.problems = [located(problem, url) for problem in found.problems]
        self.uncounted = any(problem.uncounted for problem in found.problems)
        self.notes = [*found.notes]


def copy_store(source: str | Path, target: str | Path, progress: Progress | None = None) -> Copied:
    """Copy a store, checkpoint or run in its present state, even while it is being written.

    The copy is a verified checkpoint: every committed trajectory with its id and UUID, without the pins. Files are
    hard-linked where the file system allows it, else copied. A directory of RLinf becomes a store.

    Args:
        source: path or URL.
        target: path or URL; absent, empty, or the result of an earlier call with the same trajectories.
        progress: called with (done, total) verified shards.

    Raises:
        StoreNotFoundError: there is no store.
        ConfigurationError: the source is not a store, or the target has other contents.
        CorruptStoreError: the source or the copy is damaged. ``repair_store`` copies the intact part.
        StoreLockedError: another process makes the same local target; names it.
        StoreWriteError: the target cannot be written.
    """
    return _each(find_place(source), str(target), partial(_copy, progress=progress), lenient=False)


def repair_store(source: str | Path, target: str | Path, progress: Progress | None = None) -> Copied:
    """Copy the intact part of a damaged store or run; the source is not changed.

    Every checksum is compared. A damaged shard is left out as a whole, because its intact rows cannot be identified.
    Damaged metadata and indexes are rebuilt where possible. Ids, UUIDs, pins and saved points are kept. An unreadable
    rank is replaced by an empty store, so that the run can be opened. A store beside ``rank_*`` goes to ``own``. A
    directory of RLinf becomes a store.

    Arguments and errors are those of :func:`copy_store`, except:

    Raises:
        CorruptStoreError: neither the index nor the log can be read.
    """

    def repair(place: Place, to: str) -> Copied:
        found = verify_place(place, progress)  # of a store beside ranks, without them
        try:
            return _copy(place, to, progress, found)
        except CorruptStoreError as error:  # a writer that has begun since deletes what no commit names
            logger.warning("%s: changed during the repair, which begins anew: %s", place.url, error)
            return _copy(place, to, progress, verify_place(place, progress))

    return _each(find_place(source), str(target), repair, lenient=True)


def points_note(url: str) -> list[str]:
    """Return a remark if a store has saved points or pins."""
    points = [name for name in open_directory(url).listing(PINS_FOLDER)[0] if name.endswith(".json")]
    note = (
        f"{PINS_FOLDER}/: {len(points):,} saved points and pins are not copied, and the copy cannot go back to them; a "
        "mirror keeps them, and so does `cp -r` of a store that no process writes"
    )
    return [note] if points else []


def _links_note(url: str, copy: str) -> list[str]:
    """Return a remark if a copy shares files with its source."""
    shared = sum(file.stat().st_nlink > 1 for file in Path(copy).rglob("*") if file.is_file())
    note = (
        f"{copy} shares {counted(shared, 'file')} with {url} by hard links: damage to one is damage to both; for a "
        "backup, copy to another disk"
    )
    return [note] if shared else []


def left_out_notes(url: str) -> list[str]:
    """Return remarks on the training ledger in a store's directory, and on its open sessions."""
    notes = []
    if open_directory(url).listing(LEDGER_FOLDER)[0]:
        notes.append(f"{LEDGER_FOLDER}/: the training ledger is not copied; copy this folder with any tool")
    if sessions := open_sessions(url):
        notes.append(f"{CALLS_FOLDER}/: {named(sessions)}, not copied: finish them and flush before")
    return notes


def _each(place: Place, target: str, copy: Callable[[Place, str], Copied], *, lenient: bool) -> Copied:
    """Copy a store, or each store of a run into a folder of the same name; ``lenient`` skips unreadable parts."""
    directory = open_directory(target)
    if nested(open_directory(place.url), directory):
        raise ConfigurationError(f"{target}: is within {place.url}, or contains it; copy to another directory")
    if place.kind != "run":
        return copy(place, target)
    files, folders = directory.listing()
    begun = {name for name in folders if not name.startswith(".")}  # hidden ones are left by killed copies
    known = {"own" if part.url == place.url else part.name for part in place.parts}
    if not {*files} <= _MARKS or not {"own", *place.rank_names, *known} >= begun:
        raise ConfigurationError(f"{target}: is not empty, and not such a copy; copy to an empty directory")
    ranks = [part.name for part in place.parts[1:]] if place.mixed else []
    if ranks and not lenient:
        raise StoreError(mixed_sentence(place.url, ranks))
    above = numbers_absent(place)
    absent = [f"rank_{rank} is absent: {counted(above.stop, 'rank')} saved together" for rank in above]
    result = Copied(place.url, target, left_out=len(place.lacking) + len(absent))
    if ranks:
        result.problems.append(f"the store of its own beside {listed(ranks)} is copied to own")
    with nullcontext() if begun >= known and COPYING_NAME not in files else _marked(directory, place.url):
        _copy_parts(place, result, copy, lenient=lenient)
        for text in (*place.lacking, *absent):
            result.uncounted = True
            _put_empty(text.split()[0], text, result)
    return result


_MARKS = {COPYING_NAME, COPYING_NAME + TEMPORARY_SUFFIX, LOCK_NAME}


@contextmanager
def _marked(target: Directory, source: str) -> Iterator[None]:
    """Mark a folder as an unfinished copy until the block has ended; a local one is held, too."""
    with claimed(target, target.path) if isinstance(target, LocalDirectory) else nullcontext():
        with written(f": {target.url} was not written"):
            target.publish([EncodedFile(COPYING_NAME, [json.dumps({"source": source}).encode()])])
        yield
        target.remove([COPYING_NAME], durable=True)


def _copy_parts(place: Place, result: Copied, copy: Callable[[Place, str], Copied], *, lenient: bool) -> None:
    target, damaged = result.target, list[CorruptStoreError]()
    for part in reversed(place.parts):  # rank_0 last
        name = "own" if part.url == place.url else part.name
        to = f"{target}/{name}"
        try:
            copied = _each(part, to, copy, lenient=lenient)
        except StoreError as error:
            if not lenient and isinstance(error, CorruptStoreError):  # the others may be damaged, too
                damaged.insert(0, error)
                continue
            if not lenient or isinstance(error, UnsupportedVersionError):  # a newer trajstore reads all of it
                raise
            result.left_out += 1
            result.uncounted = True
            why = f"{name}: {left_out_in_words(part.directory, error)}"
            if part.kind in ("store", "rlinf") and is_of_rank(name):
                _put_empty(name, why, result)
            else:
                result.problems.append(why)
            continue
        result.parts.insert(0, copied)
        result.trajectories += copied.trajectories
        result.nbytes += copied.nbytes
    if damaged:
        raise damaged[0] if len(damaged) == 1 else CorruptStoreError("; ".join(map(str, damaged)))


def _holds(target: Directory, snapshot: ReadSnapshot, trajectory_format: str | None = None) -> bool:
    """Return whether a directory has exactly a snapshot's trajectories and late values, in this format if one is given.

    Trajectories are compared by UUID.
    """
    try:
        with Reader.open(target.url) as reader:
            there, their_format = reader._live.locked(lambda contents: contents.snapshot()), reader._trajectory_format
    except (CorruptStoreError, StoreNotFoundError):
        return False
    if trajectory_format not in (None, their_format) or not np.array_equal(there.index["uuid"], snapshot.index["uuid"]):
        return False
    return renumbered(there)[1].equals(renumbered(snapshot)[1])


def _is_unfinished(target: Directory) -> bool:
    """Return whether a directory of an object store has only what an interrupted copy leaves there."""
    files, folders = target.listing()
    return not isinstance(target, LocalDirectory) and {*files, *folders} <= {INDEX_NAME, SHARDS_FOLDER}


def _put_empty(rank: str, why: str, result: Copied) -> None:
    """Replace a lost rank by an empty store: readers refuse a run with a gap."""
    seed = int(rank.removeprefix("rank_"))  # no two empty stores draw alike
    with TrajectoryReplayBuffer(seed=seed) as nothing:
        nothing.save_checkpoint(f"{result.target}/{rank}")
    result.problems.append(f"{why}; an empty store takes its place")


def forget_rows(reader: Reader, damaged: Mapping[str, Iterable[str]]) -> None:
    """Leave the values by row of damaged shards out of a reader's copies.

    Args:
        reader: of one or several stores.
        damaged: damaged files by URL of their directory.
    """
    for source in reader._live.contents.sources:
        if isinstance(source, StoreSource):
            numbers = {shard_number(file) for file in damaged.get(source.directory.url, ())}
            source.lost_rows = frozenset(number for number in numbers if number is not None)


def located(problem: Problem, url: str) -> str:
    """Return a sentence on damage that names its file once and omits the store's path."""
    text = without_advice(problem.message).removeprefix(f"{url}/").removeprefix(f"{url}: ")
    return text if not problem.file or problem.file in text else f"{problem.file}: {text}"


def _verified(target: Directory, result: Copied, progress: Progress | None, what: str = "the copy") -> None:
    """Verify a written copy, at a URL also one without metadata so far, and add its counts to a result.

    Raises:
        CorruptStoreError: the copy is damaged; ``what`` names it in the message.
    """
    begun = _is_unfinished(target)
    if begun and not target.names(SHARDS_FOLDER):
        return  # the index of a store without trajectories
    verification = verify(target.url, progress)
    problems = [problem for problem in verification.problems if not (begun and problem.file == METADATA_NAME)]
    if problems:
        text = "; ".join(f"{problem.file}: {problem.message}" for problem in problems)
        raise CorruptStoreError(f"{target.url}: {what} is damaged: {text}")
    result.trajectories += verification.trajectories
    result.nbytes += verification.nbytes


def _copy(place: Place, target: str, progress: Progress | None, found: Verification | None = None) -> Copied:
    """Copy one store or directory of RLinf: whole, or its intact part if ``found`` lists its damage."""
    directory = open_directory(place.url)  # without the ranks beside it: they are copied separately
    copied, files = Copied(place.url, target), list[str]()
    source = None if place.kind == "store" else RLinfSource.open(directory, strict=None if found is None else False)
    unwritten = 0 if source is None else len(source.unwritten)  # RLinf lists them, but never draws them
    strict = False if found is not None else None if source is not None else True
    if found is not None:
        copied.take(found, place.url)
        files = [problem.file for problem in found.problems]
    lenient = strict is False
    request = LoadRequest(
        directory, None, strict, united={ALONE: directory}, quiet=lenient, pending=True, uncommitted=lenient
    )
    with load_reader(request, verify_shards=True, cache=False) as reader:
        before = reader._left_out
        reader._live.forget(copied.lost)
        forget_rows(reader, {directory.url: files})
        points_of = None
        for part in reader._live.contents.sources if found is not None else ():
            if isinstance(part, StoreSource):
                points_of, pinned = part, part.catalog.pinned
                gone = np.isin(pinned["trajectory_id"], copied.lost)
                pinned.drop(pinned.first + np.flatnonzero(gone))
                if isinstance(part.catalog, SalvagedCatalog) and len(ids := part.catalog.uncommitted):
                    held = lost_in_words(id_ranges(ids).tolist(), uncounted=False)
                    copied.notes.append(f"brought back from shards that no commit names: {held}")
        try:
            write_store(copied, reader._snapshot(), reader._state(), progress, points_of)
        except CorruptStoreError:
            if found is None:
                _verified(directory, copied, None, "nothing was copied (`trajstore repair` copies the intact part): it")
            raise
    if before > unwritten and not copied.lost:
        copied.left_out = before - unwritten
        copied.problems.append(f"{trajectories(copied.left_out, 'was', 'were')} left out")
    if found is None:
        copied.notes += points_note(place.url) if source is None else [source.unwritten_in_words()] * bool(unwritten)
    copied.notes += left_out_notes(place.url) + _links_note(place.url, target)
    return copied


def write_store(
    result: Copied,
    snapshot: ReadSnapshot,
    state: CheckpointState,
    progress: Progress | None,
    points_of: StoreSource | None = None,
    *,
    converted: bool = False,
    once: bool = False,
) -> Copied:
    """Write a store to the target of a result; it appears once it is verified. Add its counts to the result.

    Args:
        result: names the target.
        snapshot: the trajectories.
        state: of the store.
        progress: called with (done, total) verified shards.
        points_of: as for ``save_checkpoint``.
        converted: as for ``save_checkpoint``; an earlier result must have this format.
        once: as for ``save_checkpoint``.

    Raises:
        ConfigurationError: the target has other contents.
        CorruptStoreError: the written store is damaged; it does not appear.
        StoreWriteError: the target cannot be written.
    """
    target = open_directory(result.target)
    if _holds(target, snapshot, state.trajectory_format if converted else None):
        result.notes.append(WRITTEN_ALREADY)
        _verified(target, result, progress)
        return result
    if target.exists() and any(target.listing()) and not _is_unfinished(target):
        raise ConfigurationError(
            f"{target.url}: is not empty, and holds other trajectories or values than those to be written; give "
            "another directory, or delete this one"
        )
    check_target(target, directories_above(target))
    form, check = get_format(state.trajectory_format), partial(_verified, result=result, progress=progress)
    with written(f": {target.url} was not written"):
        if not isinstance(target, LocalDirectory):
            target.remove([METADATA_NAME])  # of an interrupted call
        save_checkpoint(
            target,
            snapshot,
            state,
            form,
            "trajstore",
            converted=converted,
            once=once,
            replace=False,
            check=check,
            points_of=points_of,
        )
    return result
