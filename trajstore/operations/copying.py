"""Copies of stores: of a live one as it is now, and of a damaged one as far as it can be read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trajstore.core.buffer.loading import LoadRequest, left_out_in_words
from trajstore.core.buffer.reader import load_reader
from trajstore.core.buffer.replay_buffer import TrajectoryReplayBuffer
from trajstore.core.files.base import Directory
from trajstore.core.files.opening import nested, open_directory
from trajstore.core.reading.places import Place, find_place, is_of_rank, mixed_sentence
from trajstore.core.reading.rlinf_source import RLinfSource
from trajstore.core.store.log_records import ranges_of
from trajstore.core.store.lost_records import lost_in_words
from trajstore.core.store.run_ids import ALONE
from trajstore.core.store.saved_points import PINS_FOLDER
from trajstore.core.store.sealed import without_advice
from trajstore.core.store.shard_table import shard_name, shard_number
from trajstore.errors import ConfigurationError, CorruptStoreError, StoreError, listed
from trajstore.operations.points import numbers_absent
from trajstore.operations.verification import Problem, Progress, Verification
from trajstore.operations.verify import verify, verify_place


@dataclass
class Copied:
    """What was copied.

    Attributes:
        source: what was copied.
        target: where to.
        trajectories: how many are in the copy.
        nbytes: bytes of the copy; files that are hard links to the source's take no space of their own.
        lost: ids of the trajectories that could not be copied, ascending.
        problems: a sentence on each piece of damage of the source.
        parts: of a run, one each.
        left_out: trajectories, and stores of a run, that were passed over because they cannot be read.
        uncounted: whether more may be lost than ``lost`` says.
        notes: what is to be told besides damage; of a repair, what ``verify`` notes of the source.
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
        """What was lost, in words; empty if nothing was."""
        return lost_in_words(ranges_of(self.lost), self.uncounted)

    @property
    def is_whole(self) -> bool:
        """Whether every trajectory of the source is in the copy, as far as can be known."""
        here = not self.lost and not self.left_out and not self.uncounted
        return here and all(part.is_whole for part in self.parts)

    def take(self, found: Verification, url: str) -> None:
        """Note what checking a source found, which is not copied or may not be."""
        self.lost = sorted(
            {at for problem in found.problems for low, high in problem.lost for at in range(low, high + 1)}
        )
        self.problems = [told(problem, url) for problem in found.problems]
        self.uncounted = any(problem.uncounted for problem in found.problems)
        self.notes = found.notes

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        told = ("source", "target", "trajectories", "problems", "lost", "uncounted", "notes")
        values = {name: getattr(self, name) for name in told}
        parts = {"parts": [part.to_json() for part in self.parts]} if self.parts else {}
        return {**values, "bytes": self.nbytes, **parts}


def copy_store(source: str | Path, target: str | Path, progress: Progress | None = None) -> Copied:
    """Copy a store or checkpoint, or a run of several, as it is at this moment; a writer may go on meanwhile.

    The copy is a checkpoint: it holds every committed trajectory with its id and UUID, without the pins. Files are
    hard-linked where both sides are on one file system that can, else copied. It is verified before this returns.
    A directory of RLinf becomes a store.

    Args:
        source: path or URL.
        target: path or URL; must be absent or empty.
        progress: told (done, total) shards that were verified.

    Raises:
        StoreNotFoundError: there is no store.
        ConfigurationError: the source is no store, or the target is not empty.
        CorruptStoreError: the source, or the copy, is damaged. ``repair_store`` copies what is whole.
        StoreWriteError: it could not be written.
    """

    def copy(place: Place, to: str) -> Copied:
        if place.kind == "store":
            return _copy(place.url, to, [], progress)
        found = RLinfSource.open(place.directory, strict=None)
        copied = _copy(place.url, to, [], progress, strict=None, unwritten=len(found.unwritten))
        if found.unwritten:
            copied.notes.append(found.unwritten_in_words())
        return copied

    return _each(find_place(source), str(target), copy, lenient=False)


def repair_store(source: str | Path, target: str | Path, progress: Progress | None = None) -> Copied:
    """Copy what is whole of a damaged store, or of a run of several; nothing of the source is changed.

    Every checksum is compared. What lies in a damaged shard is left out, for nothing tells which of its rows are
    right; damaged metadata and indexes are worked out again where they can be. The rest keeps its ids and UUIDs.
    In place of a rank of which nothing can be read there is an empty store, so that the run can be opened. A store
    beside ``rank_*`` goes to ``own``. A directory of RLinf becomes a store.

    Arguments and errors are those of :func:`copy_store`, but of damage only this is left:

    Raises:
        CorruptStoreError: neither index nor log can be read.
    """

    def repair(place: Place, to: str) -> Copied:
        found = verify_place(place, progress)  # of a store beside ranks, without them
        noted = Copied(place.url, to)
        noted.take(found, place.url)
        unwritten = 0 if place.kind == "store" else len(RLinfSource.open(place.directory, strict=False).unwritten)
        files = [problem.file for problem in found.problems]
        copied = _copy(place.url, to, noted.lost, progress, strict=False, unwritten=unwritten, damaged=files)
        copied.take(found, place.url)
        points = [name for name in open_directory(place.url).listing(PINS_FOLDER)[0] if name.endswith(".json")]
        if points:
            copied.problems.append(
                f"{PINS_FOLDER}/: {len(points):,} saved points and pins are not copied; the copy cannot go back to them"
            )
        return copied

    return _each(find_place(source), str(target), repair, lenient=True)


def _each(place: Place, target: str, copy: Callable[[Place, str], Copied], *, lenient: bool) -> Copied:
    """Copy a store, or every store of a run into a folder of the same name; ``lenient`` passes over what it cannot."""
    if place.kind == "experience_pool":
        raise ConfigurationError(f"{place.url}: is an experience pool; copy its files with any tool")
    directory = open_directory(target)
    if directory.exists() and directory.names():
        raise ConfigurationError(f"{target}: is not empty; give the copy a directory of its own")
    if nested(open_directory(place.url), directory):
        raise ConfigurationError(f"{target}: lies in {place.url}, or the other way round; copy to another directory")
    if place.kind != "run":
        return copy(place, target)
    ranks = [part.name for part in place.parts[1:]] if place.mixed else []
    if ranks and not lenient:
        raise StoreError(mixed_sentence(place.url, ranks))
    above = numbers_absent(place)
    absent = [f"rank_{rank} is absent: the newest saved point is of {above.stop:,} ranks" for rank in above]
    result = Copied(place.url, target, left_out=len(place.lacking) + len(absent))
    if ranks:
        result.problems.append(f"the store of its own beside {listed(ranks)} is copied to own")
    for text in (*place.lacking, *absent):
        result.uncounted = True
        _put_empty(text.split()[0], text, result)
    for part in place.parts:
        name = "own" if part.url == place.url else part.name
        to = f"{target}/{name}"
        try:
            copied = _each(part, to, copy, lenient=lenient)
        except StoreError as error:
            if not lenient:
                raise
            result.left_out += 1
            result.uncounted = True
            why = f"{name}: {left_out_in_words(part.directory, error)}"
            if part.kind in ("store", "rlinf") and is_of_rank(name):
                _put_empty(name, why, result)
            else:
                result.problems.append(why)
            continue
        result.parts.append(copied)
        result.trajectories += copied.trajectories
        result.nbytes += copied.nbytes
    return result


def _put_empty(rank: str, why: str, result: Copied) -> None:
    """Put an empty store in place of a rank of which nothing is left: readers refuse a run that has a gap."""
    seed = int(rank.removeprefix("rank_"))  # no two empty ones draw alike
    with TrajectoryReplayBuffer(seed=seed) as nothing:
        nothing.save_checkpoint(f"{result.target}/{rank}")
    result.problems.append(f"{why}; an empty store takes its place")


def damaged_shards(directory: Directory, files: Iterable[str]) -> set[tuple[str, str]]:
    """Return URL of the directory and name of the shard, of each of these files that is of a shard."""
    numbers = (shard_number(file) for file in files)
    return {(directory.url, shard_name(number)) for number in numbers if number is not None}


def told(problem: Problem, url: str) -> str:
    """Return a sentence on damage that names its file once; the store's own path is written before it."""
    text = without_advice(problem.message).removeprefix(f"{url}/").removeprefix(f"{url}: ")
    return text if not problem.file or problem.file in text else f"{problem.file}: {text}"


def verified(target: str, what: str, progress: Progress | None) -> Verification:
    """Check what was written to a place.

    Raises:
        CorruptStoreError: it is damaged; calls it ``what``.
    """
    found = verify(target, progress)
    if not found.sound:
        said = "; ".join(f"{problem.file}: {problem.message}" for problem in found.problems)
        raise CorruptStoreError(f"{target}: {what} is damaged: {said}")
    return found


def _copy(
    source: str,
    target: str,
    lost: list[int],
    progress: Progress | None,
    *,
    strict: bool | None = True,
    unwritten: int = 0,
    damaged: Sequence[str] = (),
) -> Copied:
    """Copy one store, without values by row that lie in ``damaged`` files.

    ``unwritten`` trajectories are left out of it without a loss: RLinf lists them, but draws none either.
    """
    directory = open_directory(source)  # without ranks beside it: they are copied one by one
    request = LoadRequest(directory, None, strict, None, united={ALONE: directory}, quiet=strict is False)
    with load_reader(request, verify_shards=True, cache=False) as reader:
        before = reader.left_out
        reader.live.forget(lost)
        shards = damaged_shards(directory, damaged)
        reader.live.locked(lambda contents: contents.forget_rows(shards))
        reader.save_checkpoint(target)
    found = verified(target, f"the copy of {source}", progress)
    copied = Copied(source, target, found.trajectories, found.nbytes, lost)
    if before > unwritten and not lost:
        copied.left_out = before - unwritten
        copied.problems.append(f"{copied.left_out:,} trajectories were left out")
    return copied
