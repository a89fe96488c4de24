"""Reports on directories: totals, columns, policy versions, gaps, integrity.

Needs no writer. Writes nothing except a reader's lease while a writer has the store open. All reports are JSON values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore._core.base.clock import microseconds
from trajstore._core.columns.fields import Axis
from trajstore._core.columns.limits import UNKNOWN_TIME, UNKNOWN_VERSION
from trajstore._core.columns.schema import rows_on
from trajstore._core.files.base import Directory, Reader
from trajstore._core.files.holder import state_of
from trajstore._core.files.leases import READERS_FOLDER
from trajstore._core.formats.base import SHARDS_FOLDER
from trajstore._core.reading.places import Place, absent_above, find_place, is_of_rank, mixed_sentence
from trajstore._core.reading.rlinf_source import RLinfSource
from trajstore._core.sessions.sessions import open_sessions
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.lost_records import Damage
from trajstore._core.store.run_ids import ID_LIMIT
from trajstore._core.store.salvage import open_leniently
from trajstore._core.store.shard_table import shard_number
from trajstore._core.writing.opening import mirror_record
from trajstore.errors import CorruptStoreError, StoreError, counted
from trajstore.ledger import LEDGER_FOLDER
from trajstore.ledger.contents import read_directory
from trajstore.operations.late_values import waiting_values
from trajstore.operations.opening import announced, needed_now
from trajstore.operations.points import points_report, run_points_report
from trajstore.operations.pools import pool_support
from trajstore.operations.statistics import Facts, figures, ids_report

Report = dict[str, Any]

_STATES = ("step_", "global_step_")
"""Names, with a number, of the states of one store that trainers save beside each other."""


def inspect(path: str | Path, *, ranks: int | None = None) -> Report:
    """Return a report on a store, checkpoint, directory of RLinf, or a folder of these.

    Args:
        path: local path or URL.
        ranks: number of ranks of the run; another one is a problem.

    Returns:
        ``kind``, ``path``, ``trajectories``, ``samples``, ``files``, ``size_on_disk`` (bytes) and, where known:
        ``invalid_steps`` (steps that ``samples`` leaves out, see :class:`~trajstore.Trajectory`),
        ``live_bytes`` (of the trajectories' columns), ``shard_bytes`` (of the shard files that these and
        the snapshots need), ``kept_on_disk`` (``bytes`` of shard files that snapshots keep for evicted trajectories, by
        ``names``; without names, what open ``readers`` keep, or what is left of ended ones if ``readers`` is empty),
        ``compressed`` (``shards``, their ``bytes`` and those ``uncompressed``),
        ``mirror`` (state of the mirror, or None), ``writer`` (``pid``, ``host``, ``since``, ``version`` of the
        lock's process, and its ``state``: ``"running"``, ``"stopped"``, ``"gone"``, or None if unknown; None without a
        writer),
        ``last_addition`` (``at``, Unix time at which the newest trajectory that is still on disk was committed, and
        ``age`` in seconds; other commits have no time), ``ledger`` (``steps``, the ``first`` and ``last``,
        ``rows``, ``bytes`` of the training ledger), ``readers`` (open readers and their generations), ``waiting`` (late
        values not applied yet: numbers of waiting ``files`` and ``values``, a sentence per ``refused`` file, and
        whether the store is being ``written``;
        or None), ``saved_by`` (number of ranks that saved the newest point, or shares, together), ``saved_points``,
        ``aside`` (heads set aside by rollbacks), ``pins`` (names),
        ``stores`` (``"shared"``: one store from which all ranks draw; ``"per_rank"``: one of a run's ``rank_*``
        stores), ``format``, ``columns``, ``steps`` (T), ``batch`` (B), ``tokens`` (L) and ``response_tokens`` (R) of
        agent trajectories, ``response_tokens_known`` (number of trajectories with known R), ``pool`` (of a store with
        an experience pool; the other figures cover its trajectories, or all of a trainer's rollouts),
        ``agents``, ``open_sessions`` (number of agent sessions that are not rollouts yet), ``policy``,
        ``ids``, ``integrity``. Unknown values are None or absent, never 0.

        A folder has ``parts`` (one report each), the figures of all stores together, and ``run_points`` (saved points
        by step, with the ranks that lack each). Of checkpoints named ``step_N`` or ``global_step_N``, only
        the newest counts;
        ``earlier_states`` is the number of the others. A folder with ``rank_*`` also has ``ranks`` (their number),
        ``opened`` (trajectories shown when it is opened) and ``beside`` (folders with stores that are not shown then).
        A part of the kind ``"unreadable"`` has only its files counted.

    Raises:
        StoreNotFoundError: the path has no store.
        CorruptStoreError: too damaged for a report; ``trajstore.operations.verify`` gives details.
        UnsafeContentError: a name leaves the directory, or a pickle would run code; none of it was run.
        UnsupportedVersionError: the store has another layout version.
    """
    place = find_place(path)
    report, _ = _inspect_place(place)
    report["integrity"]["problems"][:0] = place.other_than(ranks)
    return report


def _inspect_place(place: Place) -> tuple[Report, list[Facts]]:
    if place.kind == "store":
        return _inspect_store(place.directory)
    if place.kind == "rlinf":
        report, facts = _inspect_rlinf(place.directory)
        return report | figures([facts]), [facts]
    return _inspect_run(place)


def _inspect_run(place: Place) -> tuple[Report, list[Facts]]:
    inspected = [_inspect_part(part) for part in place.parts]
    parts = [report for report, _ in inspected]
    absent = absent_above(place.rank_names, [part.get("saved_by") for part in parts])
    problems = [f"{place.url}: {text}" for text in (*place.lacking, *absent)]
    if place.mixed:
        problems.append(mixed_sentence(place.url, [part.name for part in place.parts[1:]]))
    for part, report in zip(place.parts, parts, strict=True):
        problems += [f"{part.name}: {text}" for text in report["integrity"]["problems"]]
    current = _current(place, parts)
    totals = {key: sum(part[key] for part in current) for key in ("trajectories", "samples")}
    totals |= {key: sum(part[key] for part in parts) for key in ("files", "size_on_disk")}
    facts = [one for report, own in inspected if any(report is part for part in current) for one in own]
    formats = {part["format"] for part in parts if part.get("format")}
    return {
        "kind": "run",
        "path": place.url,
        "stores": "per_rank" if any(is_of_rank(part.name) for part in place.parts) else None,
        **_shown(place, parts),
        **totals,
        "earlier_states": len(parts) - len(current),
        "last_addition": min(
            (part["last_addition"] for part in parts if part.get("last_addition")), key=_age, default=None
        ),
        "invalid_steps": sum(part.get("invalid_steps", 0) for part in current),
        "format": ", ".join(sorted(formats)) or None,
        **figures(facts),
        "waiting": _waiting(place, parts),
        "open_sessions": sum(part.get("open_sessions", 0) for part in parts),
        "run_points": run_points_report(parts),
        "integrity": {"problems": problems},
        "parts": parts,
    }, facts


def _age(addition: Report) -> float:
    return float(addition["age"])


def _current(place: Place, parts: Sequence[Report]) -> list[Report]:
    """Return the parts without earlier states: of a kind's readable ``step_N``, the newest counts."""
    pairs = [pair for pair in zip(place.parts, parts, strict=True) if pair[1]["kind"] != "unreadable"]
    states = [part for at, part in pairs if at.name.rstrip("0123456789") in _STATES]
    newest = {part["kind"]: part for part in states}
    return [part for part in parts if newest.get(part["kind"]) is part or all(part is not state for state in states)]


def _waiting(place: Place, parts: Sequence[Report]) -> Report | None:
    """Return the sums over the inboxes of all parts; ``written`` if every store with waiting files has a writer."""
    waiting = {at.name: part["waiting"] for at, part in zip(place.parts, parts, strict=True) if part.get("waiting")}
    if not waiting:
        return None
    counts: Report = {name: sum(values[name] for values in waiting.values()) for name in ("files", "values")}
    refused = [f"{name}/{text}" for name, values in waiting.items() for text in values["refused"]]
    return counts | {
        "refused": refused,
        "written": all(values["written"] for values in waiting.values() if values["files"]),
    }


def _shown(place: Place, parts: Sequence[Report]) -> Report:
    """Return a run's number of ranks, the trajectories shown when it is opened, and the folders not shown."""
    ranks = [part["trajectories"] for part, at in zip(parts, place.parts, strict=True) if is_of_rank(at.name)]
    if not ranks or place.mixed:
        return {}
    return {"ranks": len(ranks), "opened": sum(ranks), "beside": place.beside}


def _inspect_part(place: Place) -> tuple[Report, list[Facts]]:
    """Return the report on a part of a run; an unreadable part does not hide the others."""
    try:
        return _inspect_place(place)
    except (StoreError, OSError) as error:
        return {
            "kind": "unreadable",
            "path": place.url,
            **dict.fromkeys(("trajectories", "samples"), 0),
            "files": len(sizes := _sizes(place.directory)),
            "size_on_disk": sum(sizes.values()),
            "integrity": {"problems": [f"cannot be read: {error}"]},
        }, []


def _inspect_store(directory: Directory) -> tuple[Report, list[Facts]]:
    readers = _readers(directory)  # before this one
    with announced(directory) as lease:
        catalog, damage = open_leniently(directory)
        lease.settle(catalog.generation)
        sizes = _sizes(directory)
        pool, counted = _pool(catalog, damage)
        facts = _facts(catalog, counted)
        report = _report(catalog, damage, readers, sizes)
        return report | figures([facts]) | {"pool": pool}, [facts]


def _pool(catalog: Catalog, damage: list[Damage]) -> tuple[Report | None, npt.NDArray[np.bool_]]:
    """Return the report on a store's pool, and a mask of the index entries that the figures cover.

    For a pool's store, the mask selects the pool's trajectories. Damage to its state is added to ``damage``.
    """
    support = pool_support()
    try:
        pool = None if support is None else support.report(catalog)
    except CorruptStoreError as error:
        damage.append(Damage(str(error)))
        pool = None
    return (None, np.ones(len(catalog.index), np.bool_)) if pool is None else pool


def _readers(directory: Directory) -> list[Reader] | None:
    """Return a store's readers; None if another user's leases are not readable."""
    try:
        return directory.readers()
    except PermissionError:
        return None


def _sizes(directory: Directory) -> dict[str, int]:
    """Return the sizes of all files except leases, which are short-lived and may belong to another user."""
    above = f"{READERS_FOLDER}/"
    try:
        return {name: size for name, size in directory.sizes().items() if not name.startswith(above)}
    except PermissionError:
        files, folders = directory.listing()
        sizes = directory.sizes_of(files, "").tolist()
        by_name = {name: size for name, size in zip(files, sizes, strict=True) if size >= 0}
        for folder in folders:
            if folder != READERS_FOLDER:
                by_name |= directory.sizes(folder)
        return by_name


def _report(
    catalog: Catalog, damage: Sequence[Damage], readers: Sequence[Reader] | None, sizes: dict[str, int]
) -> Report:
    """Return the report derived from the index and the file sizes."""
    directory, index = catalog.directory, catalog.index
    metadata = catalog.metadata()
    of_steps = _of_steps(catalog)
    integrity, unnamed = _integrity(catalog, sizes)
    points = points_report(catalog)
    points["kept_on_disk"] += _held(catalog, readers, {name: sizes[name] for name in unnamed})
    integrity["problems"][:0] = [str(problem).removeprefix(f"{directory.url}/") for problem in damage]
    late = waiting_values(catalog)
    writer = _writer(directory)  # before the record that it renews: that of a closed one is its last
    mirror, ledger = _mirror(catalog, writer), _ledger(directory, sizes, integrity["problems"])
    integrity["problems"] += [f"{name}: {text}" for name, text in late.damaged]
    integrity["problems"] += _mirror_problems(mirror, catalog.generation)
    return {
        "kind": "store",
        "path": directory.url,
        "writer": writer,
        "last_addition": _last_addition(catalog),
        "trajectories": len(index),
        "samples": index.total_samples,
        "invalid_steps": int((rows_on(index.extents(), Axis.SAMPLES) - index["num_samples"])[of_steps].sum()),
        "files": len(sizes),
        "size_on_disk": sum(sizes.values()),
        "live_bytes": int(index["nbytes"].sum()),
        "shard_bytes": int(catalog.shards.nbytes()[catalog.needed_shards()].sum()),
        "mirror": mirror,
        "ledger": ledger,
        "readers": None
        if readers is None
        else [{"holder": reader.holder, "generation": reader.generation} for reader in readers],
        "format": metadata.get("trajectory_format"),
        "layout_version": metadata["layout_version"],
        "generation": catalog.generation,
        "stores": "per_rank" if is_of_rank(directory.url.rstrip("/").rsplit("/", 1)[-1]) else "shared",
        "shards": int(catalog.needed_shards().sum()),
        "compressed": _compressed(catalog),
        **points,
        "saved_by": catalog.ranks,
        "waiting": late.to_json(),
        "open_sessions": len(open_sessions(directory.url)),
        "next_id": catalog.next_id,
        "ids_left": max(0, ID_LIMIT - catalog.next_id),
        "columns": _columns(catalog),
        "ids": ids_report(index["trajectory_id"]),
        "integrity": integrity,
    }


def _compressed(catalog: Catalog) -> dict[str, int]:
    """Return the number of compressed shards, the bytes of their files, and the bytes without compression."""
    chosen = catalog.needed_shards() & catalog.shards.compressed()
    sizes = {"bytes": catalog.shards.nbytes(), "uncompressed": catalog.shards.stored_bytes()}
    return {"shards": int(chosen.sum()), **{name: int(each[chosen].sum()) for name, each in sizes.items()}}


def _columns(catalog: Catalog) -> list[Report]:
    """Return the columns of the live trajectories with the bytes of their rows; one entry per name and type."""
    index = catalog.index
    extents = index.extents()
    schema_of = catalog.shards.schema_numbers()[index["shard"]] if len(index) else np.zeros(0, np.int32)
    totals: dict[tuple[str, str, tuple[int, ...]], int] = {}
    for number in np.unique(schema_of).tolist():
        of_schema = schema_of == number
        for column in catalog.shards.schemas[number].columns:
            key = (column.name, column.dtype, column.row_shape)
            nbytes = int(rows_on(extents[of_schema], column.axis).sum()) * column.row_nbytes
            totals[key] = totals.get(key, 0) + nbytes
    return [
        {"name": name, "dtype": dtype, "row_shape": list(shape), "bytes": nbytes}
        for (name, dtype, shape), nbytes in totals.items()
    ]


def _of_steps(catalog: Catalog) -> npt.NDArray[np.bool_]:
    """Return a mask of the index entries that are step trajectories."""
    return catalog.shards.of_steps()[catalog.index["shard"]] if len(catalog.index) else np.zeros(0, np.bool_)


def _facts(catalog: Catalog, counted: npt.NDArray[np.bool_]) -> Facts:
    """Return the facts of the counted entries of the index."""
    index, of_steps = catalog.index, _of_steps(catalog)
    agents = counted & ~of_steps
    tokens, response = (
        agents & catalog.shards.with_axis(axis)[index["shard"]] if len(index) else agents
        for axis in (Axis.SAMPLES, Axis.RESPONSE)
    )
    start = index.fact("response_start")
    lengths = np.where(response, index["extra"], np.where(tokens & (start >= 0), index["steps"] - start, -1))
    tasks, outcome, versioned = index.fact("task"), index.fact("outcome"), index["version_low"] != UNKNOWN_VERSION
    values = {
        "steps": index["steps"][of_steps],
        "batch": index["batch"][of_steps],
        "tokens": index["steps"][tokens],
        "response_tokens": lengths[agents & (lengths >= 0)],
        "max_episode_length": index["max_episode_length"][index["max_episode_length"] > 0],
        "outcome": outcome[agents & ~np.isnan(outcome)],
        **{name: fact[agents & (fact >= 0)] for name in ("turns", "messages") for fact in [index.fact(name)]},
        **{name: index[name][counted & versioned] for name in ("version_low", "version_high")},
    }
    masks = {"rollouts": agents, "without_task": agents & (tasks < 0), "without_version": counted & ~versioned}
    texts = {"tasks": tasks[agents], "sessions": index.fact("session")[agents], "weights": index["weights"]}
    names = {
        name: {index.texts[number] for number in np.unique(numbers).tolist() if number >= 0}
        for name, numbers in texts.items()
    }
    return Facts(values, Counter({name: int(mask.sum()) for name, mask in masks.items()}), names)


def _held(catalog: Catalog, readers: Sequence[Reader] | None, unneeded: Mapping[str, int]) -> list[Report]:
    """Return the bytes of committed shards that only readers need, as a row of ``kept_on_disk``.

    Args:
        catalog: of the store.
        readers: open readers; None if unknown.
        unneeded: sizes of the shard files that no trajectory needs.
    """
    committed = [size for name, size in unneeded.items() if (shard_number(name) or 0) < catalog.next_shard]
    if not committed:
        return []  # what a killed writer left is deleted by the next one
    older = [reader for reader in readers or () if reader.generation < catalog.generation]
    holders = None if readers is None else sorted({reader.holder for reader in older or readers})
    return [{"names": [], "trajectories": None, "readers": holders, "bytes": sum(committed)}]


def _integrity(catalog: Catalog, sizes: dict[str, int]) -> tuple[Report, list[str]]:
    """Compare the names and sizes of files; ``verify`` compares checksums. Also return the unneeded shard files."""
    problems: list[str] = []
    missing: list[str] = []
    needed = np.flatnonzero(catalog.needed_shards())
    expected: set[str] = set()
    for _, names, wanted in catalog.shards.file_sizes(needed):
        expected.update(names)
        for name, size in zip(names, wanted.tolist(), strict=True):
            if name not in sizes:
                missing.append(name)
            elif sizes[name] != size:
                problems.append(f"{name}: has {sizes[name]:,} bytes, must have {size:,}")
    if missing:  # without a lease, files evicted since are missing too
        _, still = needed_now(catalog.directory)
        problems += [f"{name}: missing" for name in missing if name in still]
    unnamed = [name for name in sizes if name.startswith(SHARDS_FOLDER + "/") and name not in expected]
    return {"problems": problems, "unnamed_files": len(unnamed), "torn_log_bytes": catalog.segment_torn}, unnamed


def _mirror(catalog: Catalog, writer: Report | None) -> Report | None:
    """Return the last record on the mirror of a store; None if there is none or it is unreadable.

    Args:
        catalog: of the store.
        writer: of the store, as :func:`_writer` returned it just before.

    Returns:
        ``url``, ``generation`` and ``newest_id`` of the mirror (None: nothing was copied yet), ``behind`` (number of
        live trajectories missing there), ``at`` (Unix time of the last publication, or None), ``error`` (of the last
        attempt, or that the store has changed since and no running writer copies it, or None).
    """
    if (record := mirror_record(catalog.directory)) is None:
        return None
    since, generation = record.pop("since"), record["generation"]
    del record["mount"]
    behind = int((catalog.index["trajectory_id"] > record["newest_id"]).sum())
    state = "gone" if writer is None or writer["since"] != since else writer["state"]
    if record["error"] is None and 0 <= generation < catalog.generation and state in ("gone", "stopped"):
        changes = counted(catalog.generation - generation, "commit")
        why = "no running writer has opened it with mirror=...; the next one that does copies them"
        record["error"] = f"the store has {changes} more, and {'its writer is stopped' if state == 'stopped' else why}"
    record |= {name: None for name in ("generation", "newest_id") if record[name] < 0}
    return record | {"behind": behind}


def _mirror_problems(mirror: Report | None, generation: int) -> list[str]:
    """Return a sentence if a mirror cannot be written, or has no copy of a store with commits."""
    if mirror is None:
        return []
    if mirror["error"] is not None:
        return [f"{mirror['url']}: the mirror is not written: {mirror['error']}"]
    return [f"{mirror['url']}: the mirror has no copy yet"] * (mirror["generation"] is None and generation > 0)


def _writer(directory: Directory) -> Report | None:
    """Return the process that the lock names; None if it was released."""
    fields = directory.writer()
    if not fields:
        return None
    state = state_of(fields) or (None if directory.is_written() else "gone")
    return {**{name: fields.get(name) for name in ("pid", "host", "since", "version")}, "state": state}


def _last_addition(catalog: Catalog) -> Report | None:
    times = [index["committed"].max(initial=UNKNOWN_TIME) for index in (catalog.index, catalog.pinned)]
    newest = int(max(times))
    return None if newest < 0 else {"at": newest / 1e6, "age": max(0, microseconds() - newest) / 1e6}


def _ledger(directory: Directory, sizes: Mapping[str, int], problems: list[str]) -> Report | None:
    """Return the figures of a store's training ledger; damage is added to ``problems``."""
    nbytes = sum(size for name, size in sizes.items() if name.startswith(f"{LEDGER_FOLDER}/"))
    if not nbytes:
        return None
    try:
        found = read_directory(directory.inner(LEDGER_FOLDER), strict=False)
    except StoreError as error:
        problems.append(str(error).removeprefix(f"{directory.url}/"))
        return None
    problems += [text.removeprefix(f"{directory.url}/") for text in found.damaged]
    rows = sum(len(step.rows) for step in found.steps.values())
    return {
        "steps": len(found.steps),
        "first": next(iter(found.steps), None),
        "last": found.last,
        "rows": rows,
        "bytes": nbytes,
    }


# -- directories of RLinf -----------------------------------------------------------------------------

MISSING = "named by the index, but missing"


def _inspect_rlinf(directory: Directory) -> tuple[Report, Facts]:
    """Return the report of :func:`inspect` on a directory of RLinf, and its facts."""
    source = RLinfSource.open(directory, strict=False)
    missing = source.missing
    entries = sorted([*source.entries, *missing], key=lambda entry: entry.trajectory_id)
    sizes = directory.sizes()
    ids = np.array([entry.trajectory_id for entry in entries], np.int64)
    problems = [
        *(str(damage).removeprefix(f"{directory.url}/") for damage in source.damaged),
        *(f"{e.file_name(source.suffix)}: {MISSING}" for e in source.gone),
    ]
    facts = Facts(
        {
            **{
                name: np.array([entry.shape[axis] for entry in entries if len(entry.shape) > 1])
                for name, axis in (("steps", 0), ("batch", 1))
            },
            "max_episode_length": np.array([e.max_episode_length for e in entries if e.max_episode_length > 0]),
        },
        counts=Counter(without_version=len(entries)),  # only the files have versions
        names={"weights": {entry.model_weights_id for entry in source.entries}},
    )
    return {
        "kind": "rlinf",
        "path": directory.url,
        "trajectories": len(entries),
        "samples": sum(entry.num_samples for entry in entries),
        "files": len(sizes),
        "size_on_disk": sum(sizes.values()),
        "format": source.metadata.get("trajectory_format"),
        "next_id": source.metadata.get("trajectory_counter"),
        "ids": ids_report(ids, without_file=len(missing)),
        "integrity": {"problems": problems},
    }, facts
