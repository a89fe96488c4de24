"""Identifies the content of a path: a store, an RLinf directory, or a folder of these."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, tee
from pathlib import Path
from typing import Literal

from trajstore._core.files.base import Directory, is_safe_name
from trajstore._core.files.local import LocalDirectory
from trajstore._core.files.opening import open_directory
from trajstore._core.files.parallel import at_once
from trajstore._core.formats.base import SHARDS_FOLDER
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.log_records import LOG_FOLDER
from trajstore._core.store.rlinf_layout import INDEX_NAMES
from trajstore._core.store.run_ids import RANK_LIMIT
from trajstore._core.store.sealed import (
    COPYING_NAME,
    INDEX_NAME,
    METADATA_NAME,
    RESTORE_NAME,
    begins_sealed,
    is_of_rlinf,
    parse_metadata,
)
from trajstore.errors import ConfigurationError, CorruptStoreError, StoreError, StoreNotFoundError, counted, listed

PlaceKind = Literal["store", "rlinf", "run"]

POOL_FILES = ("task2trajectories.pkl", "difficulty2task_dict.json", "skip_uid_set.json")
"""The files that AgentEvolver keeps of an experience pool."""

_RLINF_FILE = re.compile(r"trajectory_\d+_.*\.(pt|pkl)$")
RANKS = "rank_"
"""Beginning of the names of a run's folders."""

_RANK = re.compile(rf"{RANKS}(\d+)")

logger = logging.getLogger(__name__)

_MAX_DEPTH = 3  # a run directory holds e.g. replay_buffer/rank_3


@dataclass(frozen=True)
class Place:
    """A store, RLinf directory or run directory.

    Attributes:
        kind: ``"run"`` is a folder whose ``parts`` are the places below it, including a store in the folder itself.
        directory: its files.
        parts: parts of a run, sorted by name (``rank_2`` before ``rank_10``).
        lacking: a sentence for each missing rank of a run.
        mixed: whether the run directory itself has a store beside its ranks.
    """

    kind: PlaceKind
    directory: Directory
    parts: tuple[Place, ...] = ()
    lacking: tuple[str, ...] = ()
    mixed: bool = False

    @property
    def url(self) -> str:
        """Path or URL for display."""
        return self.directory.url

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.url.rstrip("/").rsplit("/", 1)[-1]

    @property
    def rank_names(self) -> list[str]:
        """Names of the ranks of a run, including missing ones."""
        names = [part.name for part in self.parts if is_of_rank(part.name)]
        return names + [text.split()[0] for text in self.lacking]

    def other_than(self, ranks: int | None) -> list[str]:
        """Return a sentence if a run has not this number of ranks, missing ones that are known included."""
        count = len(self.rank_names)
        above = ranks_above(self.rank_names, [ranks])
        absent = f": {_are_absent(above)}" if above else ""
        return [] if ranks in (None, count) else [f"{self.url}: has {counted(count, 'rank')}, not {ranks}{absent}"]

    @property
    def beside(self) -> list[str]:
        """Folders with stores beside the ranks of a run; opening the run ignores them."""
        others = [part.name for part in self.parts if not is_of_rank(part.name) and part.url != self.url]
        return others if len(others) < len(self.parts) else []


@dataclass(frozen=True)
class Ranks:
    """The ``rank_*`` folders of a run directory.

    Attributes:
        directories: those with a store or RLinf directory, by rank.
        lacking: a sentence on each rank below the highest whose folder is absent, empty or unreadable.
    """

    directories: tuple[Directory, ...]
    lacking: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """Names of the folders with content."""
        return [name_of(directory) for directory in self.directories]

    def among(self, names: Collection[str]) -> Ranks:
        """Return those of these names."""
        directories = tuple(directory for directory in self.directories if name_of(directory) in names)
        return Ranks(directories, tuple(text for text in self.lacking if text.split()[0] in names))


def find_place(path: str | Path) -> Place:
    """Identify the place at a local path or URL.

    Raises:
        StoreNotFoundError: no known format is there.
    """
    directory = open_directory(path)
    place = place_in(directory)
    if place is not None:
        return place
    raise nothing_at(path, directory)


def place_in(directory: Directory) -> Place | None:
    """Identify the place in a directory or its subfolders; None if the format is unknown."""
    return _place_at(directory, _MAX_DEPTH)


def loadable_in(place: Place) -> list[str]:
    """Return the paths at or below a place that can be loaded as a replay buffer."""
    if place.kind in ("store", "rlinf") or any(is_of_rank(part.name) for part in place.parts):
        return [place.url]
    return [url for part in place.parts for url in loadable_in(part)]


def nothing_at(path: str | Path, directory: Directory) -> StoreNotFoundError:
    """Return an error that describes the path instead of a store."""
    if directory.exists():
        kind = kind_of(directory)
        if kind is not None:
            return StoreNotFoundError(f"{path}: is of the kind {kind!r}, which is refused here")
        files, folders = directory.listing()
        if POOL_FILES[0] in files or any(POOL_FILES[0] in directory.inner(name).listing()[0] for name in folders):
            return StoreNotFoundError(
                f"{path}: has the files of an experience pool and no store; `trajstore pool seed STORE {path}` makes a"
                " store of them"
            )
        return StoreNotFoundError(
            f"{path}: no trajectory store or RLinf directory here or in its folders (none has {METADATA_NAME} or "
            f"{INDEX_NAME})"
        )
    if "://" not in str(path) and Path(path).is_file():
        return StoreNotFoundError(f"{path}: is a file; give the directory that the store is in")
    return StoreNotFoundError(f"{path}: no such directory")


def kind_of(directory: Directory) -> PlaceKind | None:
    """Return the kind of the directory itself, ignoring subfolders; also for damaged JSON files.

    Raises:
        StoreNotFoundError: it is an unfinished restore, or an unfinished copy of several stores.
    """
    files, folders = directory.listing()
    return _kind_of(directory, files, folders)


def _kind_of(directory: Directory, files: Collection[str], folders: Collection[str]) -> PlaceKind | None:
    if METADATA_NAME in files and Catalog.exists(directory):
        return "store"
    if RESTORE_NAME in files and METADATA_NAME not in files:
        raise StoreNotFoundError(
            f"{directory.url}: an unfinished restore of the mirror that {RESTORE_NAME} names; run `trajstore restore "
            f"MIRROR {directory.url}` again to complete it"
        )
    if COPYING_NAME in files:
        raise StoreNotFoundError(
            f"{directory.url}: an unfinished copy of the folder that {COPYING_NAME} names; copy it here again to "
            "complete it"
        )
    # A store with a lost or foreign metadata.json still counts: a run must not look complete without it.
    if INDEX_NAME in files and begins_sealed("snapshot", directory.read(INDEX_NAME)):
        return "store"
    if LOG_FOLDER in folders or SHARDS_FOLDER in folders:
        names = [*directory.names(LOG_FOLDER), *directory.names(SHARDS_FOLDER)]
        if any(re.match(rf"{LOG_FOLDER}/\d{{16}}\.log|{SHARDS_FOLDER}/shard_", name) for name in names):
            return "store"
    if any(name in (METADATA_NAME, *INDEX_NAMES) or _RLINF_FILE.match(name) for name in files):
        return "rlinf"
    return None


def ranks_of(directory: Directory) -> Ranks:
    """Return the ``rank_*`` folders of a directory."""
    return _ranks_among(directory, directory.listing()[1])


def _ranks_among(run: Directory, folders: Collection[str]) -> Ranks:
    numbers = {name: int(match[1]) for name in folders if (match := _RANK.fullmatch(name))}
    directories = []
    lacking = [
        f"rank_{rank} is absent" for rank in range(max(numbers.values(), default=0)) if rank not in numbers.values()
    ]
    seen: dict[int, str] = {}
    denied: PermissionError | None = None
    names = sorted(numbers, key=by_number)
    lacking += [
        f"{name} has the number of {seen[numbers[name]]} and is left out"
        for name in names
        if seen.setdefault(numbers[name], name) != name
    ]
    inner = {name: run.inner(name) for name in seen.values()}
    kinds = at_once(_kind_or_denied, [*inner.values()], waits=run.copies_files)
    for (name, directory), kind in zip(inner.items(), kinds, strict=True):
        if isinstance(kind, PermissionError):
            denied = kind
            lacking.append(f"{name} may not be read: {kind}")
        elif kind in ("store", "rlinf"):
            directories.append(directory)
        else:
            lacking.append(f"{name} holds no store")
    if denied is not None and not directories:
        raise denied  # else the error would be lost
    return Ranks(tuple(directories), tuple(lacking) if directories else ())


def _kind_or_denied(directory: Directory) -> PlaceKind | PermissionError | None:
    try:
        return kind_of(directory)
    except PermissionError as error:
        return error


def absent_above(names: Iterable[str], ranks: Iterable[int | None]) -> list[str]:
    """Return a sentence on the highest ranks of a run if they are absent.

    Args:
        names: names of existing folders and of those known to be absent.
        ranks: number of ranks that saved each store's newest point, or shares, together; None if unknown.
    """
    above = ranks_above(names, ranks)
    return [f"{_are_absent(above)}: {counted(above.stop, 'rank')} saved together"] if above else []


def _are_absent(above: range) -> str:
    return f"rank_{above[0]} is absent" if len(above) == 1 else f"rank_{above[0]} to rank_{above[-1]} are absent"


def ranks_above(names: Iterable[str], ranks: Iterable[int | None]) -> range:
    """Return the ranks absent above the highest folder, see :func:`absent_above`."""
    above = max((int(match[1]) + 1 for name in names if (match := _RANK.fullmatch(name))), default=0)
    saved_ranks = max((number for number in ranks if number is not None), default=0)
    return range(above, max(saved_ranks, above) if above else 0)


def rank_of(directory: Directory) -> int:
    """Return the rank of the store in a folder ``rank_<r>``."""
    return int(directory.url.rstrip("/").rpartition("rank_")[2])


def rank_number(directory: Directory, run: Directory) -> int:
    """Return the rank in a run's ids: that of the folder, or the last one for a store in the run itself."""
    match = _RANK.fullmatch(name_of(directory))
    return RANK_LIMIT - 1 if directory is run or match is None else int(match[1])


def name_of(directory: Directory) -> str:
    """Return the last part of a directory's path."""
    return directory.url.rstrip("/").rsplit("/", 1)[-1]


def is_of_rank(place_name: str) -> bool:
    """Return whether a directory name is that of a rank, which has a store of its own."""
    return _RANK.fullmatch(place_name) is not None


def is_file_of_rlinf(name: str) -> bool:
    """Return whether a file name is that of an RLinf trajectory."""
    return _RLINF_FILE.match(name) is not None


def store_above(directories: Iterable[Directory]) -> Directory | None:
    """Return the first directory that is a store, or None."""
    for directory in directories:
        with suppress(OSError, StoreError):  # an unreadable folder, or a bucket's root
            if Catalog.exists(directory):
                return directory
    return None


def _unfinished_copy_above(directory: Directory, above: Iterable[Directory]) -> str | None:
    """Return the unfinished copy that a store is part of: a run, or a run in a folder of stores."""
    if isinstance(directory, LocalDirectory):
        parents = Path(os.path.realpath(directory.path)).parents[:2]
        return next((str(parent) for parent in parents if os.path.exists(parent / COPYING_NAME)), None)
    for parent in islice(above, 2):
        with suppress(OSError, StoreError):  # absent, or a bucket's root
            parent.size(COPYING_NAME)
            return parent.url
    return None


def check_no_store_above(directory: Directory, above: Iterable[Directory]) -> None:
    """Refuse to write into an unfinished copy, and to create a store inside another one, where it could not be opened.

    Args:
        directory: directory of the new store; an existing store is continued.
        above: its parent directories, the nearest first.

    Raises:
        ConfigurationError: one of the parents is an unfinished copy of several stores, or a store.
    """
    above, again = tee(above)
    if unfinished := _unfinished_copy_above(directory, again):
        raise ConfigurationError(
            f"auto_save_path {directory.url}: is part of an unfinished copy ({unfinished} has {COPYING_NAME}), which "
            "could not be completed any more; copy there again first, or write elsewhere"
        )
    if Catalog.exists(directory):
        return
    store = store_above(above)
    if store is not None:
        raise ConfigurationError(
            f"auto_save_path {directory.url}: lies within the store {store.url}; give the new store a directory "
            "of its own. For several writers, move the store there into a folder rank_0 below it first: then the "
            "others are rank_1, rank_2, ..., and all are read as one"
        )


def check_no_ranks(directory: Directory) -> None:
    """Refuse to write a store into a run directory, because it would hide the ranks.

    Raises:
        ConfigurationError: ``rank_*`` folders with trajectories exist.
    """
    ranks = ranks_of(directory).names
    if ranks:
        raise ConfigurationError(
            f"auto_save_path {directory.url}: is a run directory with the stores {listed(ranks)}, which a store in it "
            f"would hide; continue one of them (auto_save_path={directory.url}/{ranks[0]}), or write elsewhere and "
            "read all of them with load_checkpoint"
        )


def check_not_rlinf(directory: Directory) -> None:
    """Refuse to write into an RLinf directory.

    Raises:
        ConfigurationError: it is an RLinf directory.
        CorruptStoreError: it is a store that RLinf has written into.
    """
    try:
        data = directory.read(METADATA_NAME)
    except OSError:  # absent or unreadable: the next open reports it
        return
    if not is_of_rlinf(data):
        return
    if kind_of(directory) == "rlinf":
        raise ConfigurationError(
            f"auto_save_path {directory.url}: holds a replay buffer of RLinf, which trajstore reads and never "
            "writes to. Give another directory, then load_checkpoint this one: the next save_checkpoint holds both"
        )
    parse_metadata(data, f"{directory.url}/{METADATA_NAME}")
    raise CorruptStoreError(f"{directory.url}: RLinf has written into it")


def mixed_sentence(url: str, ranks: Collection[str]) -> str:
    """Return the message for a directory with both a store and ranks."""
    return (
        f"{url}: holds a store of its own beside {listed(ranks)}; load one of them by its path, or move the store's "
        f"files ({METADATA_NAME}, {INDEX_NAME}, {LOG_FOLDER}, {SHARDS_FOLDER}, pins) to a folder of their own"
    )


def _place_at(directory: Directory, depth: int) -> Place | None:
    files, folders = directory.listing()
    kind = _kind_of(directory, files, folders)
    if kind == "store":
        folders = [name for name in folders if _RANK.fullmatch(name)]
    elif kind is not None:
        return Place(kind, directory)
    if not depth:
        return Place(kind, directory) if kind else None
    shown = [name for name in folders if not name.startswith(".")]  # hidden folders belong to unfinished work
    for name in [name for name in shown if not is_safe_name(name)]:
        logger.warning("%s: the folder %r is skipped: its name has control characters", directory.url, name)
        shown.remove(name)
    below = (_part_at(directory, name, depth - 1) for name in sorted(shown, key=by_number))
    parts = tuple(place for place in below if place is not None)
    lacking = _ranks_among(directory, folders).lacking
    if kind == "store":
        own = Place(kind, directory)
        return Place("run", directory, (own, *parts), lacking, True) if parts else own
    return Place("run", directory, parts, lacking) if parts else None


def _part_at(directory: Directory, name: str, depth: int) -> Place | None:
    try:
        return _place_at(directory.inner(name), depth)
    except PermissionError:
        if _RANK.fullmatch(name) is None:
            raise
        return None  # reported with the missing ranks


def by_number(name: str) -> tuple[str, int, str]:
    """Return a key that sorts ``rank_2`` before ``rank_10``."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or -1), name
