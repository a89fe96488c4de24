"""Checkpoints: one consistent snapshot, linked or copied, published with one rename."""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.buffer.rlinf_checkpoint import write_rlinf
from trajstore._core.columns.fields import Axis
from trajstore._core.columns.flat import Block, FlatTrajectory, raw_bytes
from trajstore._core.columns.portions import portions
from trajstore._core.columns.schema import Extent, Schema
from trajstore._core.columns.steps import versions_of
from trajstore._core.files.base import Directory, EncodedFile
from trajstore._core.files.folders import publish_folder
from trajstore._core.files.holder import LOCK_NAME
from trajstore._core.files.leases import READERS_FOLDER
from trajstore._core.files.local import LocalDirectory
from trajstore._core.files.parallel import in_order
from trajstore._core.formats import FORMATS
from trajstore._core.formats.base import (
    SHARDS_FOLDER,
    ShardContent,
    ShardManifest,
    ShardReader,
    StoredFile,
    TrajectoryFormat,
)
from trajstore._core.formats.checksums import encoded_shard
from trajstore._core.formats.frames import could_be_stored_once
from trajstore._core.reading.address_table import UNAVAILABLE
from trajstore._core.reading.places import is_file_of_rlinf, store_above
from trajstore._core.reading.read_snapshot import ReadSnapshot
from trajstore._core.reading.shard_access import flat_of
from trajstore._core.reading.sources import Source, StoreSource
from trajstore._core.sampling.draws import rng_json
from trajstore._core.store.additions import label_at, starts_of
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.index import TrajectoryIndex
from trajstore._core.store.log_records import LOG_FOLDER, id_ranges, lie_in
from trajstore._core.store.notes import Notes
from trajstore._core.store.rlinf_layout import INDEX_NAMES
from trajstore._core.store.row_location import STARTS
from trajstore._core.store.run_ids import ID_LIMIT, own_id, rank_of_id
from trajstore._core.store.saved_points import STATE, Snapshot, pin_file, side_file, values_file
from trajstore._core.store.sealed import COPY_NAME, METADATA_NAME
from trajstore._core.store.shard_table import shard_name
from trajstore.errors import ConfigurationError, CorruptStoreError, StoreNotFoundError, written

logger = logging.getLogger(__name__)

Layout = Literal["trajstore", "rlinf"]
Loose = list[tuple[int, FlatTrajectory]]
"""Trajectories without a shard to link, each with its position in the snapshot."""

_SHARD_BYTES = 16 << 20


@dataclass(frozen=True)
class CheckpointState:
    """The buffer's own state: the fields of ``metadata.json`` besides the trajectories.

    Attributes:
        ranks: number of ranks that divide the trajectories, of which the buffer shows the share of one; None if it
            shows all.
    """

    trajectory_format: str
    trajectory_counter: int
    seed: int | None
    rng_state: torch.Tensor | None
    ranks: int | None = None

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> CheckpointState:
        """Parse the state in a ``metadata.json`` or a pin; absent fields are None.

        Raises:
            CorruptStoreError: a value is of the wrong kind.
        """
        try:
            seed, rng, counter = values.get("seed"), values.get("rng_state"), values.get("trajectory_counter", 0)
            state = None
            if seed is not None:
                torch.Generator().manual_seed(int(seed))
            if rng is not None:
                state = torch.frombuffer(bytearray(base64.b64decode(rng, validate=True)), dtype=torch.uint8)
                torch.Generator().set_state(state)
            form = values.get("trajectory_format") or "pt"
            if form not in FORMATS:
                raise ValueError(f"trajectory_format {form!r}: must be one of {', '.join(FORMATS)}")
            return CheckpointState(form, int(counter), None if seed is None else int(seed), state)
        except (TypeError, ValueError, RuntimeError, binascii.Error) as error:
            raise CorruptStoreError(f"{METADATA_NAME}: {error}") from error


def save_checkpoint(
    target: Directory,
    snapshot: ReadSnapshot,
    state: CheckpointState,
    trajectory_format: TrajectoryFormat,
    layout: Layout,
    *,
    converted: bool = False,
    once: bool = False,
    replace: bool = True,
    check: Callable[[Directory], object] | None = None,
    points_of: StoreSource | None = None,
) -> None:
    """Write a snapshot of a buffer to its own directory; ids of a run's ranks are renumbered.

    Args:
        target: the directory.
        snapshot: the trajectories.
        state: of the buffer.
        trajectory_format: of new shards.
        layout: of the directory.
        converted: link only shards that are in this format.
        once: store equal rows of ``next_obs`` and ``curr_obs`` once; shards that could have such rows are not linked.
        replace: replace an earlier checkpoint.
        check: called with the written directory before it appears; of a URL, before it has metadata.
        points_of: the snapshot's only source, whose pins and saved points are written too; None writes none.

    Raises:
        ConfigurationError: the layout is unknown, or the directory holds other files, which may have come meanwhile.
        StoreWriteError: it could not be written; the earlier content is unchanged.
    """
    if layout not in ("trajstore", "rlinf"):
        raise ConfigurationError(f"layout {layout!r}: must be 'trajstore' or 'rlinf'")
    ids, notes, values = renumbered(snapshot)
    snapshot.index.renumber(ids)
    store = partial(_write_store, converted=converted, once=once, check=check, points_of=points_of)
    write = store if layout == "trajstore" else _write_rlinf
    folder = publish_folder(target.path, replace=replace) if isinstance(target, LocalDirectory) else nullcontext(target)
    with written(f": the checkpoint {target.url} was not written"), folder as staged:
        write(staged, snapshot, notes, values, state, trajectory_format)
        if isinstance(target, LocalDirectory) and replace:
            check_target(target, ())  # again: a store that was begun there meanwhile must not be deleted


def renumbered(snapshot: ReadSnapshot) -> tuple[npt.NDArray[np.int64], Notes, list[tuple[int, int]]]:
    """Return the ids of a snapshot's trajectories in a checkpoint, and their late values by these ids.

    Ids of a run are unique in that run only: those of one rank become its own, others are assigned from 0.

    Returns:
        The ids, the values, and the (source, row) of the shards with values by row.
    """
    ids = new_ids = snapshot.index["trajectory_id"]
    if len(ids) and ids.max() >= ID_LIMIT:
        one_rank = (rank_of_id(ids) == rank_of_id(ids[:1])).all()
        new_ids = own_id(ids) if one_rank else np.arange(len(ids))
    notes, values = Notes.combined(snapshot.late)
    return new_ids, notes.kept(ids, new_ids), values


def check_target(target: Directory, above: Iterable[Directory]) -> None:
    """Refuse a directory that holds anything but an earlier checkpoint, or is inside a store.

    Args:
        target: of the checkpoint.
        above: its parent directories.

    Raises:
        ConfigurationError: names the other files or the store.
    """
    files, folders = target.listing()
    own = "give the checkpoint its own directory"
    if LOG_FOLDER in folders or LOCK_NAME in files:
        live = "that is being written" if LOCK_NAME in files and target.size(LOCK_NAME) else "of its own"
        raise ConfigurationError(f"{target.url}: is a store {live}; {own}")
    if isinstance(target, LocalDirectory):  # elsewhere nothing is deleted, and an incomplete checkpoint is rewritten
        known = {METADATA_NAME, COPY_NAME, *INDEX_NAMES, SHARDS_FOLDER, READERS_FOLDER}
        others = [name for name in (*files, *folders) if name not in known and not is_file_of_rlinf(name)]
        if others or ((files or folders) and METADATA_NAME not in files):
            first = min(others or [*files, *folders])
            raise ConfigurationError(f"{target.url}: holds other files ({first}, ...); {own}")
    store = store_above(above)
    if store is not None:
        raise ConfigurationError(
            f"{target.url}: lies within the store {store.url}, and their files would be mixed; "
            f"{own}, or save the state inside the store with points.pin() or points.save()"
        )


def _write_store(
    target: Directory,
    snapshot: ReadSnapshot,
    notes: Notes,
    values: Sequence[tuple[int, int]],
    state: CheckpointState,
    trajectory_format: TrajectoryFormat,
    *,
    converted: bool,
    once: bool,
    check: Callable[[Directory], object] | None,
    points_of: StoreSource | None,
) -> None:
    catalog = Catalog.create(target)
    files: dict[Source, list[tuple[str, str, int]]] = {}

    @cache
    def linked(place: tuple[int, int]) -> int | None:
        """Return the row of a shard that was linked; None if it must be converted or written."""
        if place[0] == UNAVAILABLE or not (source := snapshot.sources[place[0]]).linkable:
            return None
        old = source.manifest(place[1])
        if converted and old.format != trajectory_format.name:
            return None
        if once and could_be_stored_once(old.schema):
            return None
        manifest = _renamed(old, shard_name(len(catalog.shards)))
        files.setdefault(source, []).extend(
            (there.name, here.name, here.size) for there, here in zip(old.files, manifest.files, strict=True)
        )
        return catalog.shards.add(len(catalog.shards), manifest)

    keys = (snapshot.places[:, 0].astype(np.int64) << 32) | snapshot.places[:, 1]
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    linked_rows = np.full(len(first), UNAVAILABLE, np.int32)
    for at in np.argsort(first).tolist():  # shards in the order of their first trajectories
        source, shard = snapshot.places[first[at]].tolist()
        if (row := linked((source, shard))) is not None:
            linked_rows[at] = row
    rows = linked_rows[which]
    loose = np.flatnonzero(rows == UNAVAILABLE).tolist()
    taken = np.full(len(values), UNAVAILABLE, np.int32)
    decoded: list[int] = []
    for at in notes.shards(notes.rows_needed(notes.ids())).tolist():
        row = linked(values[at])
        if row is None:
            decoded.append(at)
        else:
            taken[at] = row
    points: list[EncodedFile] = []
    if points_of is not None:
        at, old = snapshot.sources.index(points_of), points_of.catalog
        pinned = old.pinned.take(np.arange(old.pinned.first, old.pinned.end))
        pinned["shard"] = np.array([linked((at, row)) for row in pinned["shard"].tolist()], np.int32)
        catalog.pinned.append(catalog.pinned.translated(pinned, old.pinned.texts))
        ids = np.union1d(snapshot.index["trajectory_id"], pinned["trajectory_id"])
        numbers = old.shards.numbers()
        lost = np.isin(numbers, list(points_of.lost_rows))
        homes = {row: linked((at, row)) for row in np.flatnonzero(np.isin(numbers, old.pins.shards()) & ~lost).tolist()}
        for head in old.snapshots():
            points += _point_files(old, head, ids, homes)
    for source, names in files.items():
        target.bring(source.directory, names)

    def write(number: int, content: ShardContent, entries: Mapping[str, Any]) -> ShardManifest:
        encoded, manifest = encoded_shard(trajectory_format, shard_name(number), content, entries=entries, search=once)
        target.publish(encoded)
        return manifest

    def write_group(task: tuple[int, tuple[Loose, Mapping[str, Any]]]) -> tuple[ShardManifest, Loose]:
        number, (group, entries) = task
        return write(number, ShardContent.of([flat for _, flat in group]), entries), group

    for at in decoded:
        number = len(catalog.shards)
        taken[at] = catalog.shards.add(number, write(number, _values_at(snapshot, *values[at]), {}))
    for manifest, group in in_order(write_group, enumerate(_loose_groups(snapshot, loose), start=len(catalog.shards))):
        row = catalog.shards.add(len(catalog.shards), manifest)
        _set_locations(snapshot.index, row, [at for at, _ in group], [flat for _, flat in group])
        rows[[at for at, _ in group]] = row
    columns = snapshot.index.take(np.arange(snapshot.index.first, snapshot.index.end))
    columns["shard"] = rows
    catalog.index.texts = snapshot.index.texts
    catalog.index.append(columns)
    catalog.notes, catalog.generation = notes.in_table(taken), notes.newest_generation
    if points_of is not None:
        catalog.visit, catalog.line = points_of.catalog.visit, points_of.catalog.line
        heads = points_of.catalog.pins.heads.values()  # their commits may be lost
        generations = [points_of.catalog.generation, *(head.generation for head in heads)]
        catalog.generation = max(catalog.generation, *generations)
    catalog.next_id = max(state.trajectory_counter, int(columns["trajectory_id"].max(initial=-1)) + 1)
    target.publish(points)
    catalog.load_pins()
    catalog.next_shard = len(catalog.shards)
    extra = {} if state.rng_state is None else rng_json(state.seed, state.rng_state)
    extra |= {} if state.ranks is None else {"ranks": state.ranks}
    local, index = isinstance(target, LocalDirectory), catalog.snapshot_file()
    metadata = catalog.metadata_file(trajectory_format=state.trajectory_format, **extra)
    # A local directory is renamed into place as a whole; elsewhere, a reader that sees the metadata finds all else.
    target.publish([*catalog.with_copy(index), metadata] if local else [index])
    if check is not None:
        check(target)
    if not local:
        target.publish([metadata])


def _point_files(
    catalog: Catalog, head: Snapshot, ids: npt.NDArray[np.int64], homes: Mapping[int, int | None]
) -> list[EncodedFile]:
    """Return the files of a snapshot for another directory; damaged ones are left out.

    Args:
        catalog: of its directory.
        head: the snapshot.
        ids: of the trajectories that the other directory has.
        homes: numbers there of the intact shards with late values by row, by row of the shard table here.
    """
    pins, files = catalog.pins, list[EncodedFile]()
    try:
        details = {name: value for name, value in pins.details(head.name).items() if name not in _SIDE_FILES}
        details |= {"ids": id_ranges(ids[lie_in(ids, head.ids)]).tolist(), "shards": []}
        with suppress(CorruptStoreError):  # verify names it
            if head.state is not None:
                file, details["state"] = side_file(head.name, STATE, [pins.read(head.state)])
                files.append(file)
        with suppress(CorruptStoreError):
            if head.values is not None:
                notes = catalog.values_of(head)
                values, rows = catalog.shards_of_values(notes, notes.ids(), homes)
                file, details["values"] = values_file(head.name, values or {})
                details["shards"] = [homes[row] for row in rows]
                files.append(file)
        files.append(pin_file(head.name, details))
    except TypeError as error:  # nested more deeply than any that was written
        why = str(error)
    except StoreNotFoundError:
        why = _REMOVED
    else:
        if pins.is_unchanged(head):
            return files
        why = _REMOVED
    logger.warning("%s: the snapshot %r is left out: %s", catalog.directory.url, head.name, why)
    return []


_REMOVED = "it was removed or saved again meanwhile"
_SIDE_FILES = ("values", "state", "fence")


def _values_at(snapshot: ReadSnapshot, number: int, row: int) -> ShardContent:
    """Return the values by row of a whole shard of a source, decoded."""
    source = snapshot.sources[number]
    manifest, reader = source.manifest(row), source.reader(row)
    pieces = [[raw_bytes(reader.rows(number, 0, rows))] for number, rows in enumerate(manifest.rows)]
    rows_on = {column.axis: rows for column, rows in zip(manifest.schema.columns, manifest.rows, strict=True)}
    extent = Extent(rows_on.get(Axis.SAMPLES, 0), 1, rows_on.get(Axis.RESPONSE, 0))
    return ShardContent(manifest.schema, np.array([extent], np.int64), pieces)


def _set_locations(index: TrajectoryIndex, row: int, entries: Sequence[int], flats: Sequence[FlatTrajectory]) -> None:
    """Set the trajectories' locations in their new shard."""
    starts = starts_of(np.array([flat.extent for flat in flats], np.int64), flats[0].schema.kind)
    locations = np.stack([np.full(len(flats), row), *(starts[name] for name in STARTS)], axis=1)
    index.point(np.array(entries, np.int64), locations)


def _renamed(manifest: ShardManifest, name: str) -> ShardManifest:
    files = tuple(StoredFile(f.name.replace(manifest.name, name), f.size, f.crc32) for f in manifest.files)
    return replace(manifest, name=name, files=files)


def _loose_groups(snapshot: ReadSnapshot, loose: Sequence[int]) -> Iterator[tuple[Loose, Mapping[str, Any]]]:
    """Yield trajectories without a shard to link, by schema, in groups of a shard's size, and what their label says."""
    index, flats = snapshot.index, ((at, _flat_at(snapshot, at)) for at in loose)
    for portion, _ in portions(flats, _SHARD_BYTES, lambda item: item[1].nbytes):
        groups: dict[Schema, Loose] = {}
        for at, flat in portion:
            groups.setdefault(flat.schema, []).append((at, flat))
            index.fill_extent(at, flat.extent)
            index.fill(at, nbytes=flat.nbytes)
            if flat.versions is None and flat.schema.kind == "step" and (versions := versions_of(flat)) is not None:
                index.fill(at, version_low=versions[0], version_high=versions[1])
        for group in groups.values():
            yield group, label_at(index, np.array([at for at, _ in group]))


def _flat_at(snapshot: ReadSnapshot, at: int) -> FlatTrajectory:
    """Return a trajectory as columns, from memory or decoded from its shard."""
    entry, (number, row) = snapshot.index.entry(at), snapshot.places[at].tolist()
    reader: Block | ShardReader
    if number == UNAVAILABLE:
        reader = snapshot.memory[at]
        schema, extent = reader.schema, entry.extent
    else:
        source = snapshot.sources[number]
        reader = source.reader(row)
        schema, extent = source.manifest(row).schema, source.extent(row) or entry.extent
    return flat_of(reader, schema, extent, snapshot.index.location(at), entry)


def _write_rlinf(
    target: Directory,
    snapshot: ReadSnapshot,
    notes: Notes,
    values: Sequence[tuple[int, int]],
    state: CheckpointState,
    trajectory_format: TrajectoryFormat,
) -> None:
    if names := notes.names_by_row():
        logger.warning(
            "%s: RLinf's layout has no place for values by row (%s); they are not in the checkpoint",
            target.url,
            ", ".join(names),
        )
    flats = ((snapshot.index.entry(at), _flat_at(snapshot, at)) for at in range(len(snapshot.index)))
    write_rlinf(target, flats, state.trajectory_counter, state.seed, trajectory_format.name)
