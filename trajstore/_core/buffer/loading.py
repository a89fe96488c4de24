"""Opens the sources at a path: a store, a checkpoint, RLinf's, or a folder of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from trajstore._core.buffer.checkpoint import CheckpointState
from trajstore._core.columns.limits import UNKNOWN_TIME
from trajstore._core.files.base import Directory, ReaderLease
from trajstore._core.files.parallel import at_once
from trajstore._core.reading.places import (
    absent_above,
    kind_of,
    loadable_in,
    mixed_sentence,
    name_of,
    nothing_at,
    place_in,
    rank_number,
    ranks_of,
)
from trajstore._core.reading.rlinf_source import OR_WITHOUT_IT, RLinfSource
from trajstore._core.reading.sources import Source, StoreSource
from trajstore._core.store.catalog import ReadersCatalog, oldest_generation
from trajstore._core.store.index import TrajectoryIndex
from trajstore._core.store.partition import share_of
from trajstore._core.store.run_ids import ALONE, in_run, own_id
from trajstore._core.store.salvage import open_leniently
from trajstore._core.store.sealed import METADATA_NAME
from trajstore._core.writing.inbox import Pending
from trajstore.errors import (
    CorruptStoreError,
    IncompleteCheckpointError,
    StoreError,
    StoreNotFoundError,
    UnsafeContentError,
    UnsupportedVersionError,
    counted,
    listed,
    trajectories,
)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Arguments of ``load_checkpoint``, kept for ``refresh``.

    Attributes:
        directory: to load; held open, so that it is found again after it or the process moves.
        share: (local_rank, world_size), or None to load everything.
        strict: refuse an index that names absent files; None = unless it is RLinf's.
        pin: name of a pin of the store.
        united: load these in place of the content of ``directory``, by rank, with ids of a run; one store by ``ALONE``.
        quiet: no warnings; the caller reports all damage.
        pending: show late values that wait in the stores' inboxes; a pin never shows them.
        uncommitted: with ``strict=False``, show what interrupted commits left in shards; for a repair.
        known: names of the ranks that were shown before, if this is a refresh; a new one whose store is just being
            created joins at a later one.
    """

    directory: Directory
    share: tuple[int, int] | None = None
    strict: bool | None = None
    pin: str | None = None
    united: Mapping[int, Directory] | None = None
    quiet: bool = False
    pending: bool = False
    uncommitted: bool = False
    known: frozenset[str] | None = None

    @property
    def stride(self) -> int:
        """Distance between ids of one rank's additions, which keeps them unique over ranks."""
        return 1 if self.share is None else self.share[1]

    def first_id(self, next_id: int) -> int:
        """Return the lowest id of this rank that is at least ``next_id``."""
        return next_id if self.share is None else next_id + (self.share[0] - next_id) % self.share[1]


@dataclass
class Loaded:
    """Result of ``load_sources``.

    Attributes:
        parts: every source with its entries to show, possibly none, each oldest first.
        order: of the entries of all parts, the oldest first; None if parts follow each other.
        leases: keep writers from deleting files in use.
        state: of the buffer that saved it; with several ranks, that of the same rank, or of the first.
        new_rank: (rank, number of ranks) if the number of ranks has changed, so that each starts its draws anew.
        counter: one more than the highest id of the share.
        next_id: one more than the highest id that any of the stores has given out.
        ranks: names of a run's ``rank_*`` folders, including those left out; None for a single directory.
        skipped: trajectories left out because their files are absent or damaged.
        warnings: a sentence for each kind of damage, omission or reconstruction (``strict=False``).
    """

    parts: list[tuple[Source, TrajectoryIndex]]
    leases: list[ReaderLease]
    state: CheckpointState
    order: npt.NDArray[np.intp] | None = None
    new_rank: tuple[int, int] | None = None
    counter: int = 0
    next_id: int = 0
    skipped: int = 0
    ranks: frozenset[str] | None = None
    warnings: list[str] = field(default_factory=list)


@dataclass
class _Opened:
    """One directory: its entries, the buffer's state, the number of entries left out, and the reasons."""

    source: Source
    entries: TrajectoryIndex | ReadersCatalog
    """A catalog decodes its entries when a share has some of them."""

    state: CheckpointState
    rank: int
    skipped: int = 0
    warnings: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.entries.count() if isinstance(self.entries, ReadersCatalog) else len(self.entries)

    def uuids(self) -> npt.NDArray[Any]:
        """Return the UUID of each trajectory, ``[n]`` of 16 bytes."""
        return self.entries.uuids() if isinstance(self.entries, ReadersCatalog) else self.entries["uuid"]

    @cached_property
    def index(self) -> TrajectoryIndex:
        """The entries, with ids of the run."""
        return self._in_run(self.entries.index if isinstance(self.entries, ReadersCatalog) else self.entries)

    def part(self, first: int, end: int) -> TrajectoryIndex:
        """Return the entries ``first <= i < end``, with ids of the run."""
        if isinstance(self.entries, ReadersCatalog):
            return self._in_run(self.entries.part(first, end))
        return self.index.slice(first, end)

    def _in_run(self, index: TrajectoryIndex) -> TrajectoryIndex:
        if self.rank != ALONE and len(index):
            index = index.slice(0, len(index))
            index.renumber(in_run(self.rank, index["trajectory_id"]))
        return index

    def showing(self, index: TrajectoryIndex) -> _Opened:
        """Return the directory with these of its entries, which have ids of the run."""
        return replace(self, entries=index, rank=ALONE)


_UNREADABLE = (CorruptStoreError, StoreNotFoundError, UnsafeContentError, UnsupportedVersionError)


def load_sources(request: LoadRequest, verify_shards: bool = False) -> Loaded:
    """Open a store, a checkpoint, a directory of RLinf, or a folder of ``rank_*`` ones."""
    place, share, strict, united = request.directory, request.share, request.strict, request.united
    if share is not None:
        share_of(0, *share)
    path = place.url
    directories, lacking = _directories(place, request.known) if united is None else (list(united.values()), [])
    leases = at_once(_announce, directories, waits=place.copies_files)
    try:
        whole_place = united is None and directories != [place]
        ranks = [rank_number(directory, place) for directory in directories] if whole_place else list(united or [ALONE])
        opened, kept, errors = _open_all(directories, ranks, leases, request)
        if request.known is not None:
            directories = _without_begun(directories, errors, request.known)
        lacking += _absent_above(place, [item.source for item in opened]) if whole_place else []
        above = _above_point(opened, errors, place, request.pin)
        if (strict is not False and (lacking or errors)) or not opened:
            raise _all_of([*lacking, *errors], path)
        whole = not lacking and not errors
        same_ranks = share is not None and whole and len(opened) == share[1]
        state = opened[share[0] if share is not None and same_ranks else 0].state
        # Every rank draws the same from a single directory of RLinf, as in RLinf.
        as_rlinf = len(directories) == 1 and isinstance(opened[0].source, RLinfSource)
        new_rank = None if same_ranks or as_rlinf else share
        for item in opened:
            item.source.checked = verify_shards
        loaded = Loaded([], kept, state, new_rank=new_rank, skipped=sum(item.skipped for item in opened))
        loaded.warnings = [*above, *map(str, lacking), *(text for item in opened for text in item.warnings)]
        for error, directory in errors.items():
            loaded.skipped += count_told(directory) or 0
            loaded.warnings.append(f"{directory.url} {left_out_in_words(directory, error)}")
        if whole_place:
            loaded.ranks = frozenset(name_of(directory) for directory in directories)
        _unite(loaded, opened, share, path)
        if strict is not False:
            _check_present(loaded, path)
        return loaded
    except BaseException:
        for lease in leases:
            lease.release()
        raise


def _announce(directory: Directory) -> ReaderLease:
    return directory.announce_reader(oldest_generation(directory))


def _open_all(
    directories: Sequence[Directory], ranks: Sequence[int], leases: Sequence[ReaderLease], request: LoadRequest
) -> tuple[list[_Opened], list[ReaderLease], dict[Exception, Directory]]:
    """Open each directory; return the results with their reader leases, and the errors of the rest."""
    found: list[_Opened] = []
    kept: list[ReaderLease] = []
    errors: dict[Exception, Directory] = {}

    def attempt(asked: tuple[Directory, int]) -> _Opened | Exception:
        try:
            return _open(asked[0], request, asked[1])
        except _UNREADABLE as error:
            return error

    asked = list(zip(directories, ranks, strict=True))
    results = at_once(attempt, asked, waits=request.directory.copies_files)
    for directory, opened, lease in zip(directories, results, leases, strict=True):
        if isinstance(opened, Exception):
            errors[opened] = directory
            lease.release()
            continue
        lease.settle(opened.source.generation)
        found.append(opened)
        kept.append(lease)
    return found, kept, errors


def _all_of(errors: Sequence[Exception], path: str | Path) -> Exception:
    """Merge errors into one, of their class if they share one; several of absent files are no damage."""
    if len(errors) == 1:
        return errors[0]
    absent = all(isinstance(error, FileNotFoundError) for error in errors)
    kind = type(errors[0]) if len({type(error) for error in errors}) == 1 else CorruptStoreError
    kind = IncompleteCheckpointError if absent and kind is CorruptStoreError else kind
    return kind(
        f"{path}: {len(errors)} things are wrong: {'; '.join(str(error) for error in errors)}; "
        "load with strict=False to read the rest without them"
    )


def left_out_in_words(directory: Directory, error: Exception) -> str:
    """Describe an unreadable directory, with its number of trajectories if known."""
    count = count_told(directory)
    lost = "an unknown number of trajectories" if count is None else trajectories(count)
    return f"is left out with {lost}: {error}"


def count_told(directory: Directory) -> int | None:
    """Return the number of trajectories recorded in an unreadable directory; None if unknown."""
    try:
        size = orjson.loads(directory.read(METADATA_NAME))["size"]
    except (OSError, KeyError, TypeError, ValueError):
        return None
    return size if isinstance(size, int) and size >= 0 else None


def _directories(directory: Directory, known: frozenset[str] | None) -> tuple[list[Directory], list[StoreError]]:
    """Return the directories to open, and an error for each unexpected or missing one."""
    path, kind, ranks = directory.url, kind_of(directory), ranks_of(directory)
    if kind in ("store", "rlinf"):
        mixed = [StoreError(mixed_sentence(directory.url, ranks.names))] if ranks.directories else []
        return [directory, *ranks.directories], mixed
    if ranks.directories:
        if known and ranks.lacking:
            ranks = ranks.among(known)
        others = listed(ranks.names)
        lacking: list[StoreError] = [
            IncompleteCheckpointError(f"{path}: {text}; there are {others}") for text in ranks.lacking
        ]
        return list(ranks.directories), lacking
    place = place_in(directory)
    if place is None:
        raise nothing_at(path, directory)
    raise StoreNotFoundError(
        f"{path}: no replay buffer here (no {METADATA_NAME}, and no rank_* directories); in its folders are"
        f" {listed(loadable_in(place), 3)}: load one by its path"
    )


def _without_begun(
    directories: Sequence[Directory], errors: dict[Exception, Directory], known: frozenset[str]
) -> list[Directory]:
    """Remove the errors of new ranks without a store yet; return the other directories."""
    begun = {
        error: directory
        for error, directory in errors.items()
        if isinstance(error, StoreNotFoundError) and name_of(directory) not in known
    }
    for error in begun:
        del errors[error]
    return [directory for directory in directories if directory not in begun.values()]


def _absent_above(place: Directory, sources: Sequence[Source]) -> list[StoreError]:
    """Return an error for absent highest ranks of a run, if saved points or shares record the number of ranks."""
    rank_counts = [source.catalog.ranks for source in sources if isinstance(source, StoreSource)]
    if not any(rank_counts):
        return []
    ranks = ranks_of(place)
    texts = absent_above([*ranks.names, *(text.split()[0] for text in ranks.lacking)], rank_counts)
    return [IncompleteCheckpointError(f"{place.url}: {text}; there are {listed(ranks.names)}") for text in texts]


def _above_point(
    opened: Sequence[_Opened], errors: dict[Exception, Directory], run: Directory, pin: str | None
) -> list[str]:
    """Remove the errors of ranks above those that saved a run's point together; return a warning for each."""
    catalogs = [item.source.catalog for item in opened if isinstance(item.source, StoreSource) and pin is not None]
    ranks = max((catalog.snapshot(str(pin)).ranks or 0 for catalog in catalogs), default=0)
    above = [
        error
        for error, directory in errors.items()
        if ranks and isinstance(error, StoreNotFoundError) and rank_number(directory, run) >= ranks
    ]
    return [f"{errors.pop(error).url} is skipped: {counted(ranks, 'rank')} saved {pin} together" for error in above]


def _open(directory: Directory, request: LoadRequest, rank: int) -> _Opened:
    strict, pin = request.strict, request.pin
    if kind_of(directory) != "store":
        if pin is not None:
            raise StoreNotFoundError(f"{directory.url}: a directory of RLinf has no pins")
        rlinf = RLinfSource.open(directory, strict)
        unreadable = [] if strict is None else rlinf.leave_out_unreadable()  # by default, as in RLinf, on drawing
        if unreadable and strict:
            raise CorruptStoreError(f"{'; '.join(map(str, unreadable))}{OR_WITHOUT_IT}")
        left_out = len(rlinf.missing) + sum(item.count for item in (*rlinf.damaged, *unreadable))
        problems = (*map(str, (*rlinf.damaged, *unreadable)), *rlinf.missing_in_words())
        return _Opened(rlinf, rlinf.index, CheckpointState.from_json(rlinf.metadata), rank, left_out, problems)
    pending = Pending(directory) if request.pending and pin is None else None
    catalog, damage = (
        (ReadersCatalog.open(directory), [])
        if strict is not False
        else open_leniently(directory, uncommitted=request.uncommitted)
    )
    waiting = [] if pending is None else pending.add_to(catalog)
    unapplied = [f"{directory.url}/{file.name}: {file}" for file in waiting if file.why]
    for file in waiting:
        if file.given is None and strict is not False:
            raise CorruptStoreError(f"{directory.url}/{file.name}: {file}")
    source = StoreSource(catalog)
    source.has_pending = any(file.left is not None for file in waiting)
    warnings = [*map(str, damage), *unapplied]
    values = catalog.metadata() | {"trajectory_counter": catalog.next_id}
    if pin is None and request.share is not None and isinstance(catalog, ReadersCatalog):
        return _Opened(source, catalog, CheckpointState.from_json(values), rank, 0, tuple(warnings))
    if pin is None:
        index = catalog.index
    else:
        head, index, catalog.notes = catalog.shown_under(pin)
        values = values | catalog.pins.details(head.name) | {"trajectory_counter": catalog.next_id}
    state = CheckpointState.from_json(values)
    if strict is not False:
        return _Opened(source, index, state, rank, 0, tuple(warnings))  # only a rank's own share needs to be there
    left_out = len(catalog.left_out) + sum(item.count for item in damage)
    lost = source.lost(index)
    if lost is None:
        return _Opened(source, index, state, rank, left_out, tuple(warnings))
    index = index.without(lost.positions)
    skipped = len(lost.ids) + left_out
    return _Opened(source, index, state, rank, skipped, (*warnings, f"{directory.url}: {lost}; left out"))


def _check_present(loaded: Loaded, path: str | Path) -> None:
    """Refuse a share of stores with absent or truncated files."""
    errors = []
    stores = [(source, part) for source, part in loaded.parts if isinstance(source, StoreSource)]
    waits = any(source.directory.copies_files for source, _ in stores)
    all_lost = at_once(lambda store: store[0].lost(store[1]), stores, waits=waits)
    for (source, _), lost in zip(stores, all_lost, strict=True):
        if lost is not None:
            lost = replace(lost, ids=own_id(lost.ids))  # numbers within the named directory
            errors.append(
                IncompleteCheckpointError(
                    f"{source.directory.url}: {lost}; copy the files back, or load with strict=False to leave the "
                    "trajectories out; `trajstore repair` makes a store of the rest"
                )
            )
    if errors:
        raise _all_of(errors, path)


def _unite(loaded: Loaded, found: Sequence[_Opened], share: tuple[int, int] | None, path: str) -> None:
    """Choose the entries of each source: all, or one rank's share of the union; without duplicates."""
    if len(found) > 1 or share is not None:
        found = [
            item.showing(_readable(item.index)) if isinstance(item.source, RLinfSource) else item for item in found
        ]
    counts = [len(item) for item in found]
    start, stop = (0, sum(counts)) if share is None else share_of(sum(counts), *share)
    begins = [0, *accumulate(counts)]
    rows = [
        (min(max(start - begin, 0), count), min(max(stop - begin, 0), count))
        for begin, count in zip(begins, counts, strict=False)
    ]
    hidden = _hidden(found) if len(found) > 1 and _may_repeat(found, rows) else [np.zeros(0, np.intp)] * len(found)
    for item, (low, high), positions in zip(found, rows, hidden, strict=True):
        part = item.part(low, high) if high > low or share is None else TrajectoryIndex()
        left_out = positions[(positions >= low) & (positions < high)] - low
        part = part.without(part.first + left_out) if len(left_out) else part
        loaded.parts.append((item.source, part))  # also without entries: a later commit may add some
        loaded.counter = max(loaded.counter, int(own_id(part["trajectory_id"]).max(initial=-1)) + 1)
        loaded.next_id = max(loaded.next_id, loaded.counter, item.state.trajectory_counter)
    if share is not None:
        return
    loaded.counter = loaded.next_id
    if len(found) > 1:
        loaded.order = _by_time([part for _, part in loaded.parts])
        stores = [part for source, part in loaded.parts if isinstance(source, StoreSource)]
        unknown = [int(np.count_nonzero(part["committed"] == UNKNOWN_TIME)) for part in stores]
        if np.count_nonzero(unknown) > 1:
            loaded.warnings.append(
                f"{path}: {trajectories(sum(unknown), 'has', 'have')} no commit time, as in RLinf's directories; the "
                "order is: those first, rank after rank"
            )


def _by_time(indexes: Sequence[TrajectoryIndex]) -> npt.NDArray[np.intp]:
    """Return the order of several stores' entries by commit time, ties by rank and id.

    Each store's own order is kept, whatever its clock.
    """
    times = [np.maximum.accumulate(index["committed"]) for index in indexes]
    return np.argsort(np.concatenate(times), kind="stable")


def _readable(index: TrajectoryIndex) -> TrajectoryIndex:
    """Return the entries that have a shard; entries that RLinf counts but never wrote are not distributed."""
    lost = index.first + np.flatnonzero(index["shard"] < 0)
    return index.without(lost) if len(lost) else index


_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""2^64 divided by the golden ratio, odd: the high bits of a product depend on all bits (Knuth, TAOCP 3, 6.4)."""


def _may_repeat(found: Sequence[_Opened], rows: Sequence[tuple[int, int]]) -> bool:
    """Return whether some entries of each store may have a UUID that any other entry has.

    Usually the halves of random UUIDs differ already.
    """
    halves = [item.uuids().view(np.uint64)[::2] for item in found]
    mine = np.concatenate([half[low:high] for half, (low, high) in zip(halves, rows, strict=True)])
    mine.sort()
    if not len(mine) or np.any(mine[1:] == mine[:-1]):
        return bool(len(mine))
    others = [
        part for half, (low, high) in zip(halves, rows, strict=True) for part in (half[:low], half[high:]) if len(part)
    ]
    if not others:
        return False
    bits = len(mine).bit_length() + 3

    def hashed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        numbers: npt.NDArray[np.uint64] = (values * _FACTOR) >> np.uint64(64 - bits)
        return numbers

    taken = np.zeros(1 << bits, np.bool_)
    taken[hashed(mine)] = True
    for part in others:
        near = part[taken[hashed(part)]]  # few, so that few are searched
        if np.any(mine[np.searchsorted(mine[:-1], near)] == near):
            return True
    return False


def _hidden(found: Sequence[_Opened]) -> list[npt.NDArray[np.intp]]:
    """Return the positions of each store's entries whose UUID was committed before, by the same store or another one.

    Each store also records them as twins: their late values count as well.
    """
    indexes = [item.index for item in found]
    uuids, ids = (np.concatenate([index[name] for index in indexes]) for name in ("uuid", "trajectory_id"))
    order = _by_time(indexes)
    _, first, group = np.unique(
        uuids.view(np.uint64).reshape(-1, 2)[order], axis=0, return_index=True, return_inverse=True
    )
    shown = np.empty_like(order)
    shown[order] = order[first[group]]
    begin, hidden = 0, []
    for item in found:
        of_store = shown[begin : begin + len(item)]
        positions = np.flatnonzero(of_store != np.arange(begin, begin + len(item)))
        if isinstance(item.source, StoreSource):
            own = own_id(ids[begin + positions])
            item.source.twins = np.stack([own, ids[of_store[positions]]], axis=1)
        hidden.append(positions)
        begin += len(item)
    return hidden
