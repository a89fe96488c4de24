"""Merge, split and convert stores.

All three open the intact part of the sources as one run and save snapshots of it as checkpoints. Shards are linked or
copied unchanged where possible. The target appears complete or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trajstore._core.base.arguments import one_of, truth, whole
from trajstore._core.buffer.loading import LoadRequest
from trajstore._core.buffer.reader import Reader, load_reader
from trajstore._core.files.opening import nested, open_directory
from trajstore._core.formats import FORMATS
from trajstore._core.reading.places import Place, find_place, is_of_rank, rank_of
from trajstore._core.reading.read_snapshot import ReadSnapshot
from trajstore._core.reading.sources import StoreSource
from trajstore._core.sampling.draws import Draws
from trajstore._core.store.partition import share_of
from trajstore._core.store.run_ids import ALONE, in_run
from trajstore.errors import ConfigurationError, trajectories
from trajstore.operations.copying import Copied, Part, forget_rows, left_out_notes, points_note, write_stores
from trajstore.operations.points import absent_ranks
from trajstore.operations.verification import Progress
from trajstore.operations.verify import verify_place


def merge(sources: Sequence[str | Path], target: str | Path, progress: Progress | None = None) -> Copied:
    """Merge the trajectories of several stores into one, in commit order.

    UUIDs are kept; of trajectories with the same UUID, the first committed is taken. Ids are kept if there is only one
    store, else reassigned from 0. Damaged trajectories are left out and reported.

    Args:
        sources: paths or URLs of stores, checkpoints, run directories and directories of RLinf; may have writers.
        target: path or URL; absent, empty, or the result of an earlier call with the same sources.
        progress: called with (done, total) verified shards.

    Raises:
        StoreNotFoundError: there is no store.
        ConfigurationError: a source is not a store, or the target has other contents or overlaps a source.
        CorruptStoreError: nothing in the sources is readable.
        StoreWriteError: the target cannot be written.
    """
    places, result = _begun(sources, target)
    with _shown(_stores(places, result), result, progress) as reader:
        return write_stores(result, {"": (reader._snapshot(), reader._state())}, progress)


def split(
    source: str | Path,
    target: str | Path,
    progress: Progress | None = None,
    *,
    ranks: int | None = None,
    count: int | None = None,
    where: str | None = None,
) -> Copied:
    """Split the trajectories of a store or run into several stores in folders of the target.

    UUIDs are kept, and so are ids, except for a run, where they are reassigned from 0. Damaged trajectories are left
    out and reported.

    Args:
        source: path or URL of a store, checkpoint, run directory or directory of RLinf; may have a writer.
        target: path or URL; absent, empty, or the result of an earlier call with the same trajectories.
        progress: called with (done, total) verified shards.
        ranks: split into a run of this many ranks, ``rank_0`` etc., with the shares that ``load_checkpoint`` assigns.
        count: split into ``part_0`` etc. of this many trajectories each, oldest first.
        where: split by this condition on facts into ``matching`` and ``rest``. Needs Polars (extra ``query``).

    Raises:
        ConfigurationError: not exactly one of ``ranks``, ``count`` and ``where`` is given, or its value is invalid.
            Also for the reasons listed at :func:`merge`, which applies to the other errors too.
    """

    def select(reader: Reader, snapshot: ReadSnapshot) -> Mapping[str, npt.NDArray[np.intp]]:
        entries = np.arange(len(snapshot.index))
        if where is not None:
            matching = np.isin(snapshot.index["trajectory_id"], reader.query().where(where).ids())
            return {"matching": entries[matching], "rest": entries[~matching]}
        if ranks is not None:
            edges = [share_of(len(entries), rank, ranks) for rank in range(ranks)]
            return {f"rank_{rank}": entries[start:stop] for rank, (start, stop) in enumerate(edges)}
        size = whole("count", count, 1)
        return {f"part_{at // size}": entries[at : at + size] for at in range(0, len(entries), size)}

    if sum(value is not None for value in (ranks, count, where)) != 1:
        raise ConfigurationError("split: give one of ranks, count and where")
    ranks = None if ranks is None else whole("ranks", ranks, 1)
    places, result = _begun([source], target)
    with _shown(_stores(places, result), result, progress) as reader:
        snapshot = reader._snapshot()
        parts = {
            name: (snapshot.only(entries), reader._state(Draws(number)))  # no two stores draw alike
            for number, (name, entries) in enumerate(select(reader, snapshot).items())
        }
        if not parts:
            raise ConfigurationError(f"{places[0].url}: has no trajectories to split")
        return write_stores(result, parts, progress)


def convert(
    source: str | Path,
    target: str | Path,
    trajectory_format: str,
    progress: Progress | None = None,
    *,
    store_frames_once: bool = False,
) -> Copied:
    """Copy a store or a run into another shard format.

    Ids, UUIDs and the state of the draws are kept. Shards already in the format are linked or copied. Damaged
    trajectories are left out and reported.

    Args:
        source: path or URL of a store, checkpoint, run directory or directory of RLinf; may have a writer.
        target: path or URL; absent, empty, or the result of an earlier call with the same trajectories.
        trajectory_format: ``"pt"``, ``"pkl"`` or ``"zarr"``.
        progress: called with (done, total) verified shards.
        store_frames_once: as for :class:`~trajstore.TrajectoryReplayBuffer`, in all shards.

    Raises:
        ConfigurationError: the format is unknown. Also for the reasons listed at :func:`merge`, which applies to the
            other errors too.
    """
    one_of("trajectory_format", trajectory_format, list(FORMATS))
    places, result = _begun([source], target)
    parts: dict[str, Part] = {}
    with ExitStack() as shown:
        for number, store in _stores(places, result).items():
            reader = shown.enter_context(_shown({ALONE: store}, result, progress))
            name = "" if store is places[0] else f"rank_{number}" if is_of_rank(store.name) else store.name
            parts[name] = reader._snapshot(), reader._state(trajectory_format=trajectory_format)
        return write_stores(
            result, parts, progress, trajectory_format, once=truth("store_frames_once", store_frames_once)
        )


# -- sources ------------------------------------------------------------------------------------------


def _begun(sources: Sequence[str | Path], target: str | Path) -> tuple[list[Place], Copied]:
    """Return the places of sources, and a result without trajectories so far."""
    places = [find_place(source) for source in sources]
    for place in places:
        if nested(place.directory, open_directory(target)):
            raise ConfigurationError(f"{target}: is within {place.url}, or contains it; write to another place")
    return places, Copied(", ".join(place.url for place in places), str(target))


def _stores(places: Sequence[Place], result: Copied) -> dict[int, Place]:
    """Return the stores at the places by their rank in the united run; record absent ones in ``result``."""
    stores = []
    for place in places:
        if place.kind == "run":
            absent = [*place.lacking, *absent_ranks(place)]
            result.problems += [f"{place.url}: {text}" for text in absent]
            result.uncounted = result.uncounted or bool(absent)
        stores += [(place, store) for store in _leaves(place)]
    if len(places) == len(stores) == 1 and places[0].kind != "run":
        return {ALONE: places[0]}
    if len(places) == 1 and all(is_of_rank(store.name) for _, store in stores):
        return {rank_of(store.directory): store for _, store in stores}
    return {number: store for number, (_, store) in enumerate(stores)}


def _leaves(place: Place) -> list[Place]:
    return [store for part in place.parts for store in _leaves(part)] if place.kind == "run" else [place]


@contextmanager
def _shown(stores: Mapping[int, Place], result: Copied, progress: Progress | None) -> Iterator[Reader]:
    """Yield a reader of the stores' intact part; compare every checksum and record damage in ``result``."""
    lost = []
    damaged: dict[str, list[str]] = {}
    for number, store in stores.items():
        verification = verify_place(store, progress)
        part = Copied(store.url, result.target, verification.trajectories - verification.pinned, verification.nbytes)
        part.take(verification, store.url)
        lost += in_run(number, np.array(part.lost, np.int64)).tolist()
        result.notes += [f"{store.url}: {note}" for note in points_note(store.url) + left_out_notes(store.url)]
        damaged[store.directory.url] = [problem.file for problem in verification.problems]
        result.parts.append(part)
    united = {number: store.directory for number, store in stores.items()}
    first = next(iter(united.values()))
    with load_reader(LoadRequest(first, strict=False, united=united, quiet=True, pending=True), cache=False) as reader:
        reader._live.forget(lost)
        forget_rows(reader, damaged)
        sources = [source for source in reader._live.contents.sources if isinstance(source, StoreSource)]
        doubled = sum(len(source.twins) for source in sources)
        if doubled:
            result.notes.append(
                f"{trajectories(doubled, 'is', 'are')} in more than one of the sources, and once in the result"
            )
        yield reader
