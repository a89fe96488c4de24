"""T8: opening 1,000,000 and 10,000,000 trajectories, in a process of its own; the same for one rank of eight.

The store is in the state that a writer leaves, once with 100 trajectories per shard (the result of group commits of a
fast producer) and once with one per shard, with shard files that are one hole: nothing is sampled. Time runs from the
call to the return of ``load_checkpoint``, modules being loaded; memory is the growth of the process's RSS.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from tools.bench.report import Figure, Options
from tools.bench.timing import in_child, status_bytes
from tools.bench.workloads import smalls
from trajstore import TrajectoryReplayBuffer
from trajstore._core.base.machine_code import kernels
from trajstore._core.columns.conversion import flatten
from trajstore._core.columns.flat import FlatTrajectories
from trajstore._core.files.opening import open_directory
from trajstore._core.formats import get_format
from trajstore._core.formats.base import ShardContent, ShardManifest
from trajstore._core.formats.checksums import manifest_of
from trajstore._core.store.additions import NewEntries, starts_of
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.json_arrays import StringTable
from trajstore._core.store.shard_table import shard_name
from trajstore._core.writing.groups import random_uuids

RANKS = 8
CASES = ((1_000_000, 100, 2.0, 0.5), (1_000_000, 1, 2.0, 0.5), (10_000_000, 100, 2.0, 0.5))
"""Trajectories, how many of them are in a shard, and the most seconds that opening may take, and a rank's."""

Facts = Callable[[int, StringTable], dict[str, npt.NDArray[Any]]]


def figures(options: Options) -> Iterator[Figure]:
    """Yield the figures of all stores."""
    write_store(options.folder / "one", 1, 1)
    kernels_held = in_child(cost, load, options.folder / "one")["held"]
    for whole, packed, most, most_of_rank in CASES:
        total = options.count(whole, 800)
        name = f"{total:,} trajectories, {packed} per shard"
        folder = options.folder / f"packed_{packed}_{whole}"
        write_store(folder, total, packed)
        everything, rank = (_median(work, folder, options) for work in (load, partial(load, rank=3, ranks=RANKS)))
        yield Figure("T8", f"open {name}", everything["seconds"], most, "s")
        yield Figure("T8", f"open {name}, rank 3 of 8", rank["seconds"], most_of_rank, "s")
        yield Figure(
            "T8",
            f"open {name}, memory of a trajectory without the kernels",
            (everything["held"] - kernels_held) / total,
            150.0,
            "bytes",
            details={"kernels_mb": kernels_held / 1e6, "held_mb": everything["held"] / 1e6},
        )
        shutil.rmtree(folder)


def _median(work: Callable[[Path], object], path: Path, options: Options) -> dict[str, float]:
    """Return what opening costs, each time in a process of its own: the median of each number."""
    found = [in_child(cost, work, path) for _ in range(-(-options.repeats * 5 // 7))]
    return {name: median(run[name] for run in found) for name in found[0]}


def write_store(folder: Path, total: int, packed: int, facts: Facts | None = None) -> None:
    """Write index and metadata of a store, and empty files for its shards.

    Args:
        folder: where to.
        total: trajectories.
        packed: of them in a shard.
        facts: returns columns of the index that differ from trajectory to trajectory, given their number and the texts.
    """
    directory = open_directory(folder)
    directory.create()
    (folder / "shards").mkdir()
    catalog = Catalog.create(directory)
    flat = flatten(smalls(1)[0])
    flats = [flat] * packed
    content = ShardContent.of(flats)
    encoded = get_format("pt").encode(shard_name(0), content)
    manifest = manifest_of(encoded, "pt", shard_name(0), content)
    shards = -(-total // packed)
    for number in range(shards):
        name = shard_name(number)
        catalog.shards.add(number, _renamed(manifest, name))
        with open(folder / "shards" / f"{name}.pt", "wb") as file:
            file.truncate(manifest.files[0].size)  # nothing is stored of it
    entries = NewEntries.of(FlatTrajectories.runs(flats), range(packed), random_uuids(packed), catalog.index.texts)
    columns = dict(entries.columns)
    columns |= starts_of(np.array([flat.extent for flat in flats]), "agent")
    repeated = {name: np.tile(column, shards)[:total] for name, column in columns.items()}
    repeated["trajectory_id"] = np.arange(total)
    repeated["shard"] = (np.arange(total) // packed).astype(np.int32)
    repeated |= {} if facts is None else facts(total, catalog.index.texts)
    repeated["uuid"] = np.frombuffer(random_uuids(total), "V16")
    catalog.index.append(repeated)
    catalog.next_id, catalog.next_shard = total, shards
    directory.publish([catalog.snapshot_file()])
    directory.publish([catalog.metadata_file(trajectory_format="pt", seed=1)])


def _renamed(manifest: ShardManifest, name: str) -> ShardManifest:
    files = tuple(replace(file, name=f"shards/{name}.pt") for file in manifest.files)
    return replace(manifest, name=name, files=files)


def load(path: Path, rank: int = 0, ranks: int = 1) -> object:
    """Return a buffer that shows a store or run, or a rank's share of it."""
    buffer = TrajectoryReplayBuffer(sample_window_size=0)
    buffer.load_checkpoint(path, True, rank, ranks)
    return buffer


def cost(work: Callable[[Path], object], path: Path) -> dict[str, float]:
    """Return the seconds of opening, and the bytes that this process holds more afterwards."""
    before = status_bytes("VmRSS")
    start = time.perf_counter()
    kept = work(path)
    took = time.perf_counter() - start
    _ = kernels.copy_rows  # which a thread may still load
    found = {"seconds": took, "held": status_bytes("VmRSS") - before}
    del kept
    return found
