"""Convert a store, a run or a part of them to a store.

The intact part of the source is opened as one run, and a snapshot of it is saved as a checkpoint. Shards are linked or
copied unchanged where possible. The target appears complete or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from trajstore._core.base.arguments import one_of, truth
from trajstore._core.buffer.loading import LoadRequest
from trajstore._core.buffer.reader import Reader, load_reader
from trajstore._core.files.opening import nested, open_directory
from trajstore._core.formats import FORMATS
from trajstore._core.reading.places import Place, find_place, is_of_rank, rank_of
from trajstore._core.reading.sources import StoreSource
from trajstore._core.store.run_ids import ALONE, in_run
from trajstore.errors import ConfigurationError, trajectories
from trajstore.operations.copying import Copied, forget_rows, left_out_notes, points_note, write_store
from trajstore.operations.points import absent_ranks
from trajstore.operations.verification import Progress
from trajstore.operations.verify import verify_place


def convert(
    source: str | Path,
    target: str | Path,
    trajectory_format: str,
    progress: Progress | None = None,
    *,
    where: str | None = None,
    store_frames_once: bool = False,
) -> Copied:
    """Write the trajectories of a store, or of all stores of a run, as one store in this shard format.

    UUIDs, commit times and the state of the draws are kept, and so are the ids of one store; those of several are
    reassigned from 0, in commit order. A trajectory that several stores have is taken once. Shards already in the
    format are linked or copied. Damaged trajectories are left out and reported.

    Args:
        source: path or URL of a store, checkpoint, run directory or directory of RLinf; may have a writer. Of another
            folder, all stores in it.
        target: path or URL; absent, empty, or the result of an earlier call with the same trajectories.
        trajectory_format: ``"pt"``, ``"pkl"`` or ``"zarr"``.
        progress: called with (done, total) verified shards.
        where: take only the trajectories that match this condition on facts. Needs Polars (extra ``query``).
        store_frames_once: as for :class:`~trajstore.TrajectoryReplayBuffer`, in all shards.

    Raises:
        StoreNotFoundError: there is no store.
        ConfigurationError: the format is unknown; the source is not a store; the condition is invalid, or nothing
            matches it; or the target has other contents or overlaps the source.
        CorruptStoreError: nothing in the source is readable.
        StoreWriteError: the target cannot be written.
    """
    one_of("trajectory_format", trajectory_format, list(FORMATS))
    place = find_place(source)
    if nested(place.directory, open_directory(target)):
        raise ConfigurationError(f"{target}: is within {place.url}, or contains it; write to another place")
    result = Copied(place.url, str(target))
    with _shown(_stores(place, result), result, progress) as reader:
        snapshot = reader._snapshot()
        if where is not None:
            matching = np.isin(snapshot.index["trajectory_id"], reader.query().where(where).ids())
            if not matching.any():
                raise ConfigurationError(
                    f"convert: {place.url}: of {trajectories(len(matching))}, none match where={where!r}"
                )
            snapshot = snapshot.only(np.flatnonzero(matching))
        state, once = reader._state(trajectory_format=trajectory_format), truth("store_frames_once", store_frames_once)
        return write_store(result, snapshot, state, progress, converted=True, once=once)


def _stores(place: Place, result: Copied) -> dict[int, Place]:
    """Return the stores at a place by their rank in the united run; record absent ones in ``result``."""
    if place.kind != "run":
        return {ALONE: place}
    result.problems += [*place.lacking, *absent_ranks(place)]
    result.uncounted = bool(result.problems)
    if all(is_of_rank(part.name) and part.kind != "run" for part in place.parts):
        return {rank_of(part.directory): part for part in place.parts}
    return dict(enumerate(_leaves(place)))


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
        where = f"{store.url}: " if len(stores) > 1 else ""
        result.notes += [f"{where}{note}" for note in points_note(store.url) + left_out_notes(store.url)]
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
