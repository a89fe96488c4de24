"""New stores of the trajectories of others: several merged, one split, one in another format.

All three show what is whole of the sources under the ids of one run, and save snapshots of it as checkpoints. A shard
is linked or copied as it is wherever it can be, and what is written appears whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trajstore.core.base.arguments import one_of, whole
from trajstore.core.buffer.checkpoint import CheckpointState, check_target, save_checkpoint
from trajstore.core.buffer.loading import LoadRequest
from trajstore.core.buffer.reader import Reader, load_reader
from trajstore.core.files.base import Directory
from trajstore.core.files.folders import publish_folder
from trajstore.core.files.local import LocalDirectory
from trajstore.core.files.opening import directories_above, nested, open_directory
from trajstore.core.formats import FORMATS, get_format
from trajstore.core.reading.places import Place, find_place, is_of_rank, rank_of
from trajstore.core.reading.read_snapshot import ReadSnapshot
from trajstore.core.reading.sources import StoreSource
from trajstore.core.sampling.draws import Draws
from trajstore.core.store.partition import share_of
from trajstore.core.store.run_ids import ALONE, in_run
from trajstore.errors import ConfigurationError, CorruptStoreError, StoreNotFoundError, written
from trajstore.operations.copying import Copied, damaged_shards, verified
from trajstore.operations.points import absent_ranks
from trajstore.operations.verification import Progress
from trajstore.operations.verify import verify_place

_Part = tuple[ReadSnapshot, CheckpointState]


def merge(sources: Sequence[str | Path], target: str | Path, progress: Progress | None = None) -> Copied:
    """Make one store of the trajectories of several, in the order of the times of their commits.

    UUIDs stay, and of several trajectories with the same UUID the one that was committed first is taken. Ids stay
    where there is one store, else they are given anew, from 0. What is damaged is left out, and told.

    Args:
        sources: paths or URLs of stores, checkpoints, run directories and directories of RLinf; others may write there.
        target: path or URL; absent, empty, or what an earlier call with the same sources has made.
        progress: told (done, total) shards that were verified.

    Raises:
        StoreNotFoundError: there is no store.
        ConfigurationError: a source is no store, or the target holds something else, or lies in a source.
        CorruptStoreError: nothing can be read of the sources.
        StoreWriteError: it could not be written.
    """
    places = _places(sources, target)
    result = _result(places, target)
    with _shown(_stores(places, result), result, progress) as reader:
        return _write(result, {"": (_snapshot(reader), _state(reader))}, progress)


def split(
    source: str | Path,
    target: str | Path,
    progress: Progress | None = None,
    *,
    ranks: int | None = None,
    count: int | None = None,
    where: str | None = None,
) -> Copied:
    """Make several stores of the trajectories of one, or of a run, in folders of the target.

    UUIDs stay, ids too; those of a run are given anew, from 0. What is damaged is left out, and told.

    Args:
        source: path or URL of a store, a checkpoint, a run directory, or a directory of RLinf; others may write there.
        target: path or URL; absent, empty, or what an earlier call has made of the same trajectories.
        progress: told (done, total) shards that were verified.
        ranks: into a run of so many ranks, ``rank_0`` and so on, which have the shares that ``load_checkpoint`` gives.
        count: into ``part_0`` and so on, of so many trajectories each, the oldest first.
        where: into ``matching``, of which this condition on facts holds, and ``rest``. Needs Polars (extra ``query``).

    Raises:
        ConfigurationError: not one of ``ranks``, ``count`` and ``where`` is given, or it is wrong; or as by
            :func:`merge`, as are the other errors.
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
    places = _places([source], target)
    result = _result(places, target)
    with _shown(_stores(places, result), result, progress) as reader:
        snapshot = _snapshot(reader)
        parts = {
            name: (snapshot.only(entries), _state(reader, Draws(number)))  # no two draw alike
            for number, (name, entries) in enumerate(select(reader, snapshot).items())
        }
        if not parts:
            raise ConfigurationError(f"{places[0].url}: has no trajectories that could be split")
        return _write(result, parts, progress)


def convert(source: str | Path, target: str | Path, trajectory_format: str, progress: Progress | None = None) -> Copied:
    """Make a store whose shards are of another format, or a run of such stores.

    Ids and UUIDs stay, and the state of the draws. Shards that are of the format already are linked or copied. What is
    damaged is left out, and told.

    Args:
        source: path or URL of a store, a checkpoint, a run directory, or a directory of RLinf; others may write there.
        target: path or URL; absent, empty, or what an earlier call has made of the same trajectories.
        trajectory_format: ``"pt"``, ``"pkl"`` or ``"zarr"``.
        progress: told (done, total) shards that were verified.

    Raises:
        ConfigurationError: there is no such format; or as by :func:`merge`, as are the other errors.
    """
    one_of("trajectory_format", trajectory_format, list(FORMATS))
    places = _places([source], target)
    result = _result(places, target)
    parts: dict[str, _Part] = {}
    with ExitStack() as shown:
        for number, store in _stores(places, result).items():
            reader = shown.enter_context(_shown({ALONE: store}, result, progress))
            name = "" if store is places[0] else f"rank_{number}" if is_of_rank(store.name) else store.name
            parts[name] = _snapshot(reader), _state(reader, trajectory_format=trajectory_format)
        return _write(result, parts, progress, trajectory_format)


# -- what is read -------------------------------------------------------------------------------------


def _places(sources: Sequence[str | Path], target: str | Path) -> list[Place]:
    places = [find_place(source) for source in sources]
    for place in places:
        if nested(place.directory, open_directory(target)):
            raise ConfigurationError(f"{target}: lies in {place.url}, or the other way round; write to another place")
    return places


def _result(places: Sequence[Place], target: str | Path) -> Copied:
    return Copied(", ".join(place.url for place in places), str(target))


def _stores(places: Sequence[Place], result: Copied) -> dict[int, Place]:
    """Return the stores at places, by the rank under which their trajectories are united; notes what lacks."""
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
    if place.kind == "experience_pool":
        raise ConfigurationError(f"{place.url}: is an experience pool; copy its files with any tool")
    return [store for part in place.parts for store in _leaves(part)] if place.kind == "run" else [place]


@contextmanager
def _shown(stores: Mapping[int, Place], result: Copied, progress: Progress | None) -> Iterator[Reader]:
    """Yield a reader of what is whole of stores; notes in ``result`` what is not. Every checksum is compared."""
    lost = []
    damaged: set[tuple[str, str]] = set()
    for number, store in stores.items():
        found = verify_place(store, progress)
        part = Copied(store.url, result.target, found.trajectories - found.pinned, found.nbytes)
        part.take(found, store.url)
        lost += in_run(number, np.array(part.lost, np.int64)).tolist()
        damaged |= damaged_shards(store.directory, [problem.file for problem in found.problems])
        result.parts.append(part)
    united = {number: store.directory for number, store in stores.items()}
    first = next(iter(united.values()))
    with load_reader(
        LoadRequest(first, None, strict=False, pin=None, united=united, quiet=True), cache=False
    ) as reader:
        reader.live.forget(lost)
        reader.live.locked(lambda contents: contents.forget_rows(damaged))
        sources = [source for source in reader.live.contents.sources if isinstance(source, StoreSource)]
        uuids = np.concatenate([source.index["uuid"] for source in sources]) if len(sources) > 1 else np.zeros(0, "V16")
        doubled = len(uuids) - len(np.unique(uuids))
        if doubled:
            result.notes.append(f"{doubled:,} trajectories are in more than one of the sources, and once in the result")
        yield reader


def _snapshot(reader: Reader) -> ReadSnapshot:
    return reader.live.locked(lambda contents: contents.snapshot())


def _state(reader: Reader, draws: Draws | None = None, trajectory_format: str | None = None) -> CheckpointState:
    draws = draws or reader._draws
    counter = reader.trajectory_counter
    return CheckpointState(trajectory_format or reader.trajectory_format, counter, draws.seed, draws.rng_state)


# -- what is written ----------------------------------------------------------------------------------


def _write(
    result: Copied, parts: Mapping[str, _Part], progress: Progress | None, trajectory_format: str | None = None
) -> Copied:
    """Write stores into folders of the target, or one (``""``) as the target itself, and verify them.

    Raises:
        ConfigurationError: it holds something else.
        CorruptStoreError: what was written is damaged.
        StoreWriteError: it could not be written.
    """
    target = open_directory(result.target)
    if target.exists() and any(target.listing()) and isinstance(target, LocalDirectory):
        if not _holds(target, parts, trajectory_format):
            raise ConfigurationError(
                f"{target.url}: is not empty, and holds other trajectories than what is to be written; give another "
                "directory, or delete this one"
            )
        result.notes.append("an earlier call has written everything already")
    else:
        check_target(target, directories_above(target))
        with written(f": {target.url} was not written"), _at_one_stroke(target, "" in parts) as made:
            for name, (snapshot, state) in parts.items():
                form = get_format(state.trajectory_format)
                to = made.inner(name) if name else made
                save_checkpoint(to, snapshot, state, form, "trajstore", converted=trajectory_format is not None)
    found = verified(result.target, "what was written", progress)
    result.trajectories, result.nbytes = found.trajectories, found.nbytes
    return result


def _at_one_stroke(target: Directory, alone: bool) -> AbstractContextManager[Directory]:
    """Return where several stores are written that are to appear together; one appears so by itself."""
    return publish_folder(target.path) if isinstance(target, LocalDirectory) and not alone else nullcontext(target)


def _holds(target: Directory, parts: Mapping[str, _Part], trajectory_format: str | None) -> bool:
    """Return whether a directory holds just these trajectories, by their UUIDs, in stores of these names."""
    files, folders = target.listing()
    if "" not in parts and (files or sorted(folders) != sorted(parts)):
        return False
    for name, (snapshot, _) in parts.items():
        place = target.inner(name) if name else target
        try:
            with Reader.open(place.url) as reader:
                if not np.array_equal(reader.trajectory_uuids, snapshot.index["uuid"]):
                    return False
                if trajectory_format not in (None, reader.trajectory_format):
                    return False
        except (CorruptStoreError, StoreNotFoundError):
            return False
    return True
