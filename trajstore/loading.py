"""Loading: what a path names, be it a store, a checkpoint, RLinf's, or a folder of ranks, as sources to show."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from trajstore.catalog import METADATA_NAME, Catalog
from trajstore.checkpoint import CheckpointState
from trajstore.errors import (
    IncompleteCheckpointError,
    StoreNotFoundError,
    listed,
)
from trajstore.index import TrajectoryIndex
from trajstore.partition import share_of
from trajstore.rlinf.source import RLinfSource
from trajstore.sources import Source, StoreSource
from trajstore.storage import Directory, ReaderLease, open_directory

_RANK = re.compile(r"rank_(\d+)")


@dataclass
class Loaded:
    """What ``load_sources`` found.

    Attributes:
        parts: every source with the entries to show of it, none perhaps, oldest first.
        leases: announcements that keep the writer from deleting what is read.
        state: of the buffer that saved it; ``rng_state`` is None where the draws cannot go on.
        counter: one more than the highest id of the share.
        next_id: one more than the highest id of all shares.
        skipped: trajectories left out because their files are absent.
    """

    parts: list[tuple[Source, TrajectoryIndex]]
    leases: list[ReaderLease]
    state: CheckpointState
    counter: int = 0
    next_id: int = 0
    skipped: int = 0
    seen: set[bytes] = field(default_factory=set)


def load_sources(
    path: str | Path,
    *,
    storage_options: Mapping[str, Any],
    share: tuple[int, int] | None,
    strict: bool | None,
    pin: str | None,
) -> Loaded:
    """Open a store, a checkpoint, a directory of RLinf, or a folder of ``rank_*`` ones; see ``load_checkpoint``."""
    if share is not None:
        share_of(0, *share)
    directories = _directories(path, storage_options)
    leases = [directory.announce_reader() for directory in directories]
    try:
        found = [_open(directory, strict, pin) for directory in directories]
        for (source, _, _, _), lease in zip(found, leases, strict=True):
            lease.settle(source.generation)
        own = share[0] if share is not None and len(found) == share[1] and len(found) > 1 else 0
        state = found[own][2]
        if share is not None and len(found) > 1 and len(found) != share[1]:
            state = replace(state, rng_state=None)  # no rank of now is a rank of then
        loaded = Loaded([], leases, state, skipped=sum(skipped for *_, skipped in found))
        _unite(loaded, [(source, index) for source, index, _, _ in found], share)
        if strict is not False:
            for source, part in loaded.parts:
                _check_present(source, part)
        counters = [item.trajectory_counter for _, _, item, _ in found]
        loaded.next_id = max([loaded.next_id, *counters])
        if share is None:
            loaded.counter = loaded.next_id
        return loaded
    except BaseException:
        for lease in leases:
            lease.release()
        raise


def _directories(path: str | Path, options: Mapping[str, Any]) -> list[Directory]:
    directory = open_directory(path, **options)
    if Catalog.exists(directory) or RLinfSource.exists(directory):
        return [directory]
    ranks: dict[int, str] = {}
    for name in directory.names():
        match = _RANK.fullmatch(name.split("/", 1)[0])
        if match:
            ranks[int(match[1])] = match[0]
    if ranks:
        return [open_directory(f"{str(path).rstrip('/')}/{ranks[rank]}", **options) for rank in sorted(ranks)]
    raise StoreNotFoundError(f"{path}: no replay buffer here (no {METADATA_NAME}, and no rank_* directories)")


def _open(
    directory: Directory, strict: bool | None, pin: str | None
) -> tuple[Source, TrajectoryIndex, CheckpointState, int]:
    """Return a directory's source, the entries that it shows, the buffer's state, and how many entries were skipped."""
    if not Catalog.exists(directory):
        if pin is not None:
            raise StoreNotFoundError(f"{directory.url}: a directory of RLinf has no pins")
        rlinf = RLinfSource.open(directory, strict is True)
        if rlinf.missing:
            rlinf.tell_missing()
        return rlinf, rlinf.index, CheckpointState.from_json(rlinf.metadata), len(rlinf.missing)
    catalog = Catalog.open(directory)
    values = catalog.metadata()
    index = catalog.index
    if pin is not None:
        index = catalog.pinned_index(pin)
        values |= catalog.pins.state(pin)
    state = CheckpointState.from_json({**values, "trajectory_counter": catalog.next_id})
    source = StoreSource(catalog)
    if strict is not False:
        return source, index, state, 0  # only what a rank takes needs to be there
    missing = source.missing(index)
    if missing:
        index = index.slice(0, len(index))
        index.drop(np.array([position for position, _ in missing], np.intp))
    return source, index, state, len(missing)


def _check_present(source: Source, part: TrajectoryIndex) -> None:
    """Refuse a share of a store some of whose files are absent."""
    missing = source.missing(part) if isinstance(source, StoreSource) else []
    if missing:
        files = sorted({f"{source.directory.url}/{name}" for _, name in missing})
        raise IncompleteCheckpointError(
            f"{len(missing)} trajectories of {source.directory.url} are not there: {listed(files)}; "
            "copy the files back, or load with strict=False to leave them out"
        )


def _unite(loaded: Loaded, found: Sequence[tuple[Source, TrajectoryIndex]], share: tuple[int, int] | None) -> None:
    """Choose the entries of each source: all, or one rank's share of the union; nothing twice, no id twice."""
    alone = len(found) == 1 and share is None
    distinct = [index if alone else _distinct(_readable(index), loaded.seen) for _, index in found]
    total = sum(len(index) for index in distinct)
    start, stop = (0, total) if share is None else share_of(total, *share)
    ids = np.concatenate([index["trajectory_id"] for index in distinct])
    renumber = len(found) > 1 and len(np.unique(ids)) < len(ids)
    loaded.next_id = total if renumber else int(ids.max(initial=-1)) + 1
    before = 0
    for (source, _), index in zip(found, distinct, strict=True):
        low, high = (min(max(edge - before, 0), len(index)) for edge in (start, stop))
        part = index.slice(low, high)
        if renumber:
            part.arrays["trajectory_id"] = np.arange(before + low, before + high, dtype=np.int64)
        loaded.parts.append((source, part))  # also without an entry: a later commit may change that
        loaded.counter = max(loaded.counter, int(part["trajectory_id"].max(initial=-1)) + 1)
        before += len(index)


def _readable(index: TrajectoryIndex) -> TrajectoryIndex:
    """Return the entries that have a shard: what RLinf counts but never wrote is not shared out."""
    lost = np.flatnonzero(index["shard"] < 0)
    if len(lost):
        index = index.slice(0, len(index))
        index.drop(index.first + lost)
    return index


def _distinct(index: TrajectoryIndex, seen: set[bytes]) -> TrajectoryIndex:
    """Return the entries whose UUIDs were not seen in an earlier source."""
    fresh = []
    for at, raw in enumerate(index["uuid"].tolist()):
        if raw not in seen:
            seen.add(raw)
            fresh.append(at)
    if len(fresh) == len(index):
        return index
    part = index.slice(0, len(index))
    part.replace(index.take(index.first + np.array(fresh, np.intp)))
    return part
