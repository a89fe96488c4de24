"""The buffer's contents (swapped whole on load) and the reader leases on their files."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from trajstore._core.base import locks
from trajstore._core.base.heap import return_freed
from trajstore._core.base.machine_code import kernels
from trajstore._core.base.types import Flags, IntArray
from trajstore._core.buffer.loading import Loaded, LoadRequest, load_sources
from trajstore._core.buffer.retention import Retention
from trajstore._core.columns.limits import UNKNOWN_TIME
from trajstore._core.files.base import Directory, Listed, ReaderLease
from trajstore._core.files.parallel import at_once
from trajstore._core.reading.cache import TrajectoryCache
from trajstore._core.reading.contents import Contents
from trajstore._core.reading.places import RANKS, is_of_rank, name_of, rank_number, ranks_of
from trajstore._core.reading.sources import Source, StoreSource
from trajstore._core.reading.store_news import Tails, can_follow, named_in, taken_in
from trajstore._core.sampling.states import names_of
from trajstore._core.store.additions import NewEntries
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.committed import Change, Evicted, change_in_run
from trajstore._core.store.index import TrajectoryIndex
from trajstore._core.store.log_records import lie_in
from trajstore._core.store.run_ids import ALONE, ID_LIMIT, in_run, rank_of_id
from trajstore._core.writing.commits import CommitListener
from trajstore.errors import CorruptStoreError, StoreClosedError, StoreError, trajectories

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAP_LIMIT = 16384

_UNLIMITED = Retention()

_NEVER: int = np.iinfo(np.int64).max
"""Stands for the newest commit time of a store whose later trajectories cannot be followed."""

OWN_SOURCE = 0
"""Index of the buffer's own store among the sources: it is attached first."""


class View(CommitListener):
    """The contents of a buffer: its own store, whose commits and evictions it applies, and loaded directories.

    Args:
        cache_bounds: most trajectories and most bytes in the cache; None = no cache.
        retention: limits; trajectories beyond them are evicted.
        verify_shards: compare the checksums of each shard when it is read for the first time.
    """

    def __init__(
        self, cache_bounds: tuple[int | None, int | None] | None, retention: Retention, verify_shards: bool
    ) -> None:
        self.retention = retention
        self._told_versions = self._told_protected = False
        self.protected: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        """Ids that the retention keeps beyond its limits, because they are in use."""
        self.kept_from = ID_LIMIT
        """Lowest id that the retention leaves, also beyond its limits."""
        self.own_first = 0
        """Lowest id of the buffer's own store that is shown; see :meth:`is_own`. 0 without a store."""
        self._cache_bounds = cache_bounds
        self.verify_shards = verify_shards
        self.cache_bytes = None if cache_bounds is None else cache_bounds[1]
        self._own: Catalog | None = None
        self._own_lost: frozenset[int] = frozenset()
        """Ids in the buffer's own store whose files are missing or truncated; they are not shown."""
        self._leases: list[ReaderLease] = []
        self.released = False
        """Whether the buffer was closed."""
        self._missed: Exception | None = None
        """The error of a failed update from the buffer's own store, after which the contents may be stale."""
        self._half_followed = False
        """Whether following loaded directories was interrupted."""
        self.request: LoadRequest | None = None
        """The last load; None before it."""
        self._ranks: frozenset[str] | None = None
        self._behind: set[Source] = set()
        """The loaded sources with new commits at the last look."""
        self._joined = False
        """Whether ranks had joined the loaded run at the last look."""
        self._ask_each = False
        """Whether each rank of the loaded run is asked for commits, because one listing has too many files."""
        self._told: set[str] = set()
        self.steady = locks.lock("View.steady")
        """Held while loaded directories are replaced, followed or saved, so that files to be linked stay."""
        self.contents = self._empty()

    def _empty(self) -> Contents:
        cache = None if self._cache_bounds is None else TrajectoryCache(*self._cache_bounds)
        contents = Contents(cache, _MAP_LIMIT)
        if self._own is not None:
            contents.attach(StoreSource(self._own, self.verify_shards))
        return contents

    def locked(self, call: Callable[[Contents], T]) -> T:
        """Return ``call(contents)``, called with the contents' lock held.

        Contents that were replaced during the wait for their lock are not used: their files may be gone. (A context
        manager written in Python would keep the lock if Ctrl-C came while it returns.)

        Raises:
            StoreClosedError: the buffer was closed, and a file is gone or damaged.
            StoreError: an earlier update from the buffer's own store failed.
        """
        while True:
            if self._missed is not None:
                raise StoreError(
                    f"this buffer may show other trajectories than its store has, because showing a change failed "
                    f"({self._missed!r}); the store is correct: close the buffer and open it again"
                ) from self._missed
            contents = self.contents
            try:
                with contents.lock:
                    if contents is self.contents:
                        return call(contents)
            except CorruptStoreError as error:
                if not self.released:
                    raise
                raise StoreClosedError(
                    f"the buffer was closed, so its writer may delete what it showed: {error}"
                ) from error

    def names_at(self, contents: Contents, positions: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
        """Return names of trajectories that are the same in all processes; call with the lock of ``contents`` held.

        Trajectories in memory only, and RLinf's, get new UUIDs in each process: all names are 0 then.
        """
        stored = all(isinstance(source, StoreSource) for source in contents.sources)
        if not stored or (self._own is None and contents.added):
            return np.zeros(len(positions), np.int64)
        return names_of(contents.index.at("uuid", positions))

    def givers(self, contents: Contents) -> tuple[frozenset[str], bool]:
        """Return the directories that gave the shown ids, and whether they gave all of them.

        After a replacement the same ids may name other trajectories, if one of these directories is gone.
        """
        loaded = contents.sources[0 if self._own is None else OWN_SOURCE + 1 :]
        alone = not loaded and self._own is not None
        return frozenset(source.name for source in loaded or contents.sources), alone or not contents.added

    @property
    def store_ids(self) -> list[str]:
        """UUIDs of the stores that are shown."""
        sources = self.contents.sources
        return [source.catalog.store_id for source in sources if isinstance(source, StoreSource)]

    def catalogs_by_rank(self) -> dict[int, Catalog]:
        """Return the catalogs of the loaded stores, by rank; not to be used during a refresh."""
        loaded = self._loaded_by_rank().items()
        return {rank: source.catalog for rank, source in loaded if isinstance(source, StoreSource)}

    def directories_by_rank(self) -> dict[int, Directory]:
        """Return the directories of the stores, by rank (or ``ALONE``); empty in memory."""
        directories = {rank: source.directory for rank, source in self._loaded_by_rank().items()}
        return directories or ({} if self._own is None else {ALONE: self._own.directory})

    def _loaded_by_rank(self) -> dict[int, Source]:
        request = self.request
        if request is None:
            return {}
        run = self._ranks is not None
        return {rank_number(source.directory, request.directory) if run else ALONE: source for source in self.loaded()}

    def show_own(self, catalog: Catalog) -> None:
        """Show the trajectories of the buffer's own store; called before any load."""
        self._own = catalog
        with self.contents.lock:
            self.contents.attach(StoreSource(catalog, self.verify_shards))
            self._show_own(self.contents)
        kernels.begin()

    def _show_own(self, contents: Contents) -> None:
        source = contents.sources[OWN_SOURCE]
        if self._own is None or not isinstance(source, StoreSource):
            raise AssertionError("a view without a store of its own")
        index = self._own.index.slice(0, len(self._own.index))
        lost = source.lost(index)
        if lost is not None:
            self._tell(
                f"{self._own.directory.url}: {lost}; they are not shown. Copy the files back and open it again; where "
                "there is no copy, evict them and remove the pins that name them: the rest is sound then"
            )
            self._own_lost = frozenset(lost.ids.tolist())
            index.drop(lost.positions)
        contents.show(OWN_SOURCE, index)

    def _tell(self, warning: str) -> None:
        """Log a warning, once: a follower opens the same directory again and again."""
        if warning not in self._told:
            self._told.add(warning)
            logger.warning("%s", warning)

    # -- loading ----------------------------------------------------------------------------------

    def open(self, request: LoadRequest) -> tuple[Contents, Loaded]:
        """Return the contents for a request, without showing them.

        Raises:
            StoreNotFoundError: there is nothing to load.
            IncompleteCheckpointError: files are absent (``strict``); lists them.
            CorruptStoreError, UnsafeContentError, UnsupportedVersionError: it cannot be read.
        """
        loaded = load_sources(request, self.verify_shards)
        for text in () if request.quiet else loaded.warnings:
            self._tell(text)
        contents = self._empty()
        for source, part in loaded.parts:
            contents.show(contents.attach(source), part)
        if request.share is not None or len(loaded.parts) > 1:
            contents.index.rearrange(loaded.order)  # and so free the entries of whole stores
            ascend = request.share is None and bool(np.all(np.diff(contents.index["committed"]) >= 0))
            for source, part in loaded.parts:
                if isinstance(source, StoreSource):
                    source.catalog.forget_entries()
                    source.newest = int(part["committed"].max(initial=UNKNOWN_TIME)) if ascend else _NEVER
        loaded.parts.clear()
        return contents, loaded

    def tell_hidden(self) -> None:
        """Warn of trajectories of the buffer's own store that a load has hidden."""
        hidden = 0 if self._own is None else int(np.count_nonzero(self._own.index["trajectory_id"] < self.own_first))
        if self._own is not None and hidden:
            self._tell(
                f"load_checkpoint: {trajectories(hidden)} of this buffer's own store {self._own.directory.url} on "
                "disk will not be shown beside what was loaded; to see them, load that path in another buffer"
            )

    def replace(self, request: LoadRequest, contents: Contents, loaded: Loaded) -> None:
        """Replace the contents, while nothing is being added."""
        with self.contents.lock:
            self.contents = contents
            old, self._leases = self._leases, loaded.leases
        self.request, self._ranks = request, loaded.ranks
        self._half_followed = self._ask_each = False
        self._behind = set()
        for lease in old:
            lease.release()
        return_freed()
        kernels.begin()

    def loaded(self) -> list[Source]:
        """Return the sources of the last load; empty before it."""
        return self.contents.sources[0 if self._own is None else OWN_SOURCE + 1 :] if self.request is not None else []

    def request_if_changed(self) -> LoadRequest | None:
        """Return what to load again; None without a load, or without new commits and ranks."""
        for lease in self._leases:
            lease.notice()
        listed = self._list_ranks()
        self._behind, self._joined = self._changed_ones(listed), self._has_joined(listed)
        changed = self._half_followed or self._behind or self._joined
        return replace(self.request, known=self._ranks) if changed and self.request is not None else None

    def _list_ranks(self) -> Listed | None:
        """Return one listing of all ranks of the loaded run; None where asking each of them costs no more requests."""
        if self.request is None or self._ranks is None or self._ask_each:
            return None
        run, listed = self.request.directory, None
        try:  # pages come one after another, answers of ranks several at once
            listed = run.listed(RANKS, max(1, len(self._ranks) // 4))
        except OSError as error:
            self._tell(f"{run.url}: its ranks are asked one by one, as they could not be listed at once: {error}")
        self._ask_each = listed is None
        return listed

    def _changed_ones(self, listed: Listed | None) -> set[Source]:
        """Return the loaded sources with new commits."""
        loaded, run = self.loaded(), None if self.request is None else self.request.directory

        def changed(source: Source) -> bool:
            place = source.directory
            return source.changed(None if listed is None or place is run else listed.get(name_of(place)))

        behind = at_once(changed, loaded, waits=run is not None and run.copies_files)
        return {source for source, is_behind in zip(loaded, behind, strict=True) if is_behind}

    def _has_joined(self, listed: Listed | None) -> bool:
        """Return whether the loaded run has new ranks, with none missing below them."""
        if self.request is None or self._ranks is None:
            return False
        directory = self.request.directory
        folders = directory.listing()[1] if listed is None else listed
        if self._ranks.issuperset(name for name in folders if is_of_rank(name)):
            return False
        ranks = ranks_of(directory)
        return not ranks.lacking and not self._ranks.issuperset(ranks.names)

    def follow(self) -> int | None:
        """Show the commits that :meth:`request_if_changed` found without loading again; None where that is impossible.

        Works for stores that are shown whole, a single one or a run of ranks, whose writers still keep the log. Takes
        time in proportion to the news; maps and cache stay, and others may sample meanwhile. Nothing may be added
        meanwhile.

        Returns:
            One more than the highest id that a store has given out.
        """
        contents, request, loaded = self.contents, self.request, self.loaded()
        if request is None or request.share is not None or request.pin is not None or contents.added:
            return None
        stores = [source for source in loaded if isinstance(source, StoreSource) and not source.has_pending]
        if self._half_followed or self._joined or not len(stores) == len(loaded) == max(1, len(self._ranks or ())):
            return None
        if len(stores) > 1 and request.strict is False:  # entries that were left out may be readable now
            return None
        behind = [store for store in stores if store in self._behind]
        leases = [lease for lease, store in zip(self._leases, stores, strict=True) if store in behind]
        for lease in leases:
            lease.look()  # until everything is shown: after an error, files of both states are kept
        news = at_once(_news, behind, waits=request.directory.copies_files)
        tails = [item for item in news if item is not None]
        follow = self._follow_run if len(stores) > 1 else self._follow_one
        lacks_ranks = len(stores) > 1 and any((store.catalog.ranks or 0) > len(stores) for store in behind)
        if len(tails) < len(news) or lacks_ranks or not follow(contents, behind, tails):
            return None
        for lease, store in zip(leases, behind, strict=True):
            lease.settle(store.generation)
        return max(store.catalog.next_id for store in stores)

    def _follow_one(self, contents: Contents, behind: Sequence[StoreSource], news: Sequence[Tails]) -> bool:
        """Apply the commits of a single store one by one."""
        (rank,) = self._loaded_by_rank()
        for store, tails in zip(behind, news, strict=True):
            changes, number = store.catalog.changes(tails), contents.sources.index(store)
            # Trajectories added and evicted since, or moved twice, have no files any more: show no partial state.
            together = any(record.get("operation") != "add" for _, tail in tails for record in tail.records)
            self._half_followed = True  # until the end, for interrupts
            while self._half_followed:
                with contents.lock:  # otherwise per commit, so that sampling waits only briefly
                    for change in changes:
                        contents.follow(number, change_in_run(change, rank))
                        if not together:
                            break
                    else:
                        self._half_followed = False
        return True

    def _follow_run(self, contents: Contents, behind: Sequence[StoreSource], news: Sequence[Tails]) -> bool:
        """Apply the commits of all ranks as one change; return False, and show nothing of it, if that is impossible."""
        ranks = {source: rank for rank, source in self._loaded_by_rank().items()}
        named = np.concatenate(
            [in_run(ranks[store], named_in(tails)) for store, tails in zip(behind, news, strict=True)]
        )
        twins = [
            np.concatenate([in_run(rank, store.twins[:, 0]), store.twins[:, 1]])
            for store, rank in ranks.items()
            if isinstance(store, StoreSource)
        ]
        if lie_in(np.concatenate(twins), named).any():  # their other copy may have to be shown instead
            return False
        with contents.lock:
            index = contents.index
            positions = index.positions_in(named)
            of_rank = rank_of_id(index.at("trajectory_id", positions))
            places = [positions[of_rank == ranks[store]] for store in behind]
            lent = [contents.lend(at) for at in places]
        self._half_followed = True  # until the end, for errors and interrupts
        changes = [
            taken_in(store.catalog, tails, contents.sources.index(store), ranks[store], entries, at)
            for store, tails, entries, at in zip(behind, news, lent, places, strict=True)
        ]
        newest = [store.newest for store in behind]
        if not can_follow(index, changes, newest):
            return False
        times = [change.added["committed"] for change in changes]
        contents.follow_run(changes)
        for store, time, later in zip(behind, newest, times, strict=True):
            store.newest = int(later.max(initial=time))
        self._half_followed = False
        return True

    @property
    def generations(self) -> list[int]:
        """Number of commits shown, of each directory; empty if it is unknown, as following was interrupted."""
        return [] if self._half_followed else [source.generation for source in self.contents.sources]

    def release(self) -> None:
        """Release the reader leases; writers may now delete these files."""
        self.released = True
        for lease in self._leases:
            lease.release()
        self._leases = []

    # -- changes of the buffer's own store, made with CommitLog._lock held -------------------------

    def make_room(self, index: TrajectoryIndex, ids: npt.NDArray[np.int64]) -> None:
        """Reserve memory for entries of these ids in the store's index, shared with the view's where they agree."""
        contents = self.contents
        with contents.lock:
            index.borrow(contents.index, ids)

    def changed(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if isinstance(change, NewEntries):
                try:
                    self.contents.committed(OWN_SOURCE, change.columns)
                except Exception:  # they can still be read from memory
                    logger.exception("a commit that is on disk could not be shown")
                continue
            if isinstance(change, Evicted) and self._own_lost:
                lost = np.array([*self._own_lost], np.int64)
                self._own_lost = frozenset(lost[~lie_in(lost, change.ranges)].tolist())
            contents = None
            while contents is not self.contents:  # a load may replace them meanwhile
                contents = self.contents
                contents.follow(OWN_SOURCE, change, self.own_first)

    def replaced(self) -> None:
        """Show the present state of the buffer's own store; nothing is added or loaded meanwhile."""
        contents = self.contents
        with contents.lock:
            contents.drop(np.arange(contents.index.first, contents.index.end))
            self._show_own(contents)

    def missed(self, error: Exception) -> None:
        self._missed = error

    # -- leaving ----------------------------------------------------------------------------------

    def are_own(self, ids: IntArray) -> Flags:
        """Return whether ids were given by this buffer, not loaded."""
        return (ids >= self.own_first) & (ids < ID_LIMIT)

    def _own_or_loaded(self, ids: IntArray, at: int) -> int:
        """Return the id at a position, -1 for a loaded one."""
        number = int(ids[at])
        return number if self.own_first <= number < ID_LIMIT else -1

    def newest_id(self) -> int | None:
        """Return the highest shown id; None if the buffer is empty."""
        with self.contents.lock:
            ids = self.contents.index["trajectory_id"]
            return int(ids.max()) if len(ids) else None

    def check_shown(self, ids: IntArray) -> None:
        """Refuse ids that are neither shown nor lost with a file of the buffer's own store.

        Raises:
            TrajectoryUnavailableError: names the first such id.
        """
        with self.contents.lock:
            shown = self.contents.index.shared()
        for number in ids[shown.find_many(ids) < 0].tolist():
            if number not in self._own_lost or number < self.own_first:
                shown.position_of(number)

    def forget(self, ids: Sequence[int] | IntArray) -> None:
        """Hide these trajectories; unknown ids are ignored."""
        if not len(ids):
            return
        self._own_lost -= set(ids) if self._own_lost else set()

        def drop(contents: Contents) -> None:
            positions = contents.index.find_many(ids)
            contents.drop(positions[positions >= 0])

        self.locked(drop)

    def to_evict(self, newest: int | None = None) -> IntArray:
        """Return the ids beyond the retention limits, oldest first; with a store, loaded trajectories are only hidden.

        Args:
            newest: id of the newest trajectory that counts; None: the newest committed one, so that a crash cannot lose
                the trajectories after it with the older ones evicted already.
        """
        if self.retention == _UNLIMITED:
            return np.zeros(0, np.int64)
        if newest is None:
            newest = -1 if self._own is None else self._own.next_id - 1

        def beyond_limits(contents: Contents) -> IntArray:
            index = contents.index
            shown = index["trajectory_id"]
            # Own trajectories come last, by id; loaded ones are on disk elsewhere.
            own = partial(self._own_or_loaded, shown)
            safe = bisect_right(range(len(shown)), newest, key=own)
            counted = index.slice(0, safe)
            protected = np.isin(counted["trajectory_id"], self.protected) if len(self.protected) else None
            positions = index.first + self.retention.to_evict(counted, protected)
            if protected is not None and not self._told_protected:
                beyond = int(protected[self.retention.to_evict(counted)].sum())
                self._told_protected = beyond > 0
                if beyond:
                    logger.warning(
                        "retention: %s beyond its limits stay, as they are in use: the experience pool, or that of a"
                        " checkpoint, may replay them. They do not count towards the limits",
                        trajectories(beyond),
                    )
            if not self._told_versions and (versions := self.retention.begins_again(counted)):
                self._told_versions = True
                logger.warning(
                    "retention: version %d was committed after %d: if versions began again, those of the earlier "
                    "count stay until the new one passes theirs; let the trainer continue its count",
                    *reversed(versions),
                )
            ids: IntArray = index.at("trajectory_id", positions)
            mine = self.are_own(ids)
            self.forget(ids[~mine])
            ids = ids[mine & (ids < self.kept_from)]
            return ids[~np.isin(ids, contents.pending_in(ids))]

        return self.locked(beyond_limits)


def _news(store: StoreSource) -> Tails | None:
    """Return the new log records of a store, and notice new pins; None if a newer snapshot has them."""
    store.catalog.load_pins()
    return store.catalog.news()
