"""What lies at a path: a store, a directory of RLinf, an experience pool, or a folder of these."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trajstore.catalog import INDEX_NAME, METADATA_NAME, Catalog
from trajstore.errors import StoreNotFoundError
from trajstore.rlinf.layout import INDEX_NAMES
from trajstore.storage import Directory, open_directory

PlaceKind = Literal["store", "rlinf", "experience_pool", "run"]

POOL_FILES = ("task2trajectories.pkl", "difficulty2task_dict.json", "skip_uid_set.json")

_RLINF_FILE = re.compile(r"trajectory_\d+_.*\.(pt|pkl)$")

_MAX_DEPTH = 3  # a run directory holds e.g. replay_buffer/rank_3


@dataclass(frozen=True)
class Place:
    """Something that can be looked into.

    Attributes:
        kind: ``"run"`` is a folder whose ``parts`` are the places below it.
        directory: its files.
        parts: of a run, in the order of their names (``rank_2`` before ``rank_10``).
    """

    kind: PlaceKind
    directory: Directory
    parts: tuple[Place, ...] = ()

    @property
    def url(self) -> str:
        """Path or URL, as it is shown to people."""
        return self.directory.url


def find_place(path: str | Path) -> Place:
    """Return what lies at a local path or URL.

    Raises:
        StoreNotFoundError: nothing that trajstore knows.
    """
    directory = open_directory(path)
    place = _place_at(directory, str(path).rstrip("/"), _MAX_DEPTH)
    if place is not None:
        return place
    if not directory.exists():
        raise StoreNotFoundError(f"{path}: no such directory")
    raise StoreNotFoundError(
        f"{path}: no trajectory store, RLinf directory or experience pool here or in its folders "
        f"(none has {METADATA_NAME}, {INDEX_NAME} or {POOL_FILES[0]})"
    )


def _place_at(directory: Directory, url: str, depth: int) -> Place | None:
    if not directory.exists():
        return None
    names = directory.names()
    top = {name for name in names if "/" not in name}
    folders = {name.split("/", 1)[0] for name in names if "/" in name}
    # What lost both its JSON files is still looked at, to be told of: a run must not pass for whole without it.
    shards = METADATA_NAME not in top and any(name.startswith("shards/shard_") for name in names)
    if shards or Catalog.exists(directory):
        return Place("store", directory)
    if top & {METADATA_NAME, *INDEX_NAMES} or any(_RLINF_FILE.match(name) for name in top):
        return Place("rlinf", directory)
    if POOL_FILES[0] in top:
        return Place("experience_pool", directory)
    if not depth:
        return None
    below = (
        _place_at(open_directory(f"{url}/{name}"), f"{url}/{name}", depth - 1) for name in sorted(folders, key=natural)
    )
    parts = tuple(place for place in below if place is not None)
    return Place("run", directory, parts) if parts else None


def file_sizes(directory: Directory) -> dict[str, int]:
    """Return the bytes of every file; what a live writer removes meanwhile is left out."""
    sizes: dict[str, int] = {}
    for name in directory.names():
        with contextlib.suppress(FileNotFoundError):
            sizes[name] = directory.size(name)
    return sizes


def natural(name: str) -> tuple[str, int, str]:
    """Return a key that sorts ``rank_2`` before ``rank_10``."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or -1), name
