"""T8: opening a store of 1,000,000 trajectories, in a process of its own; the same for one rank of eight.

The store is made as the writer would have left it, once with 100 trajectories per shard (what the group commit makes of
a fast producer) and once with one per shard, with shard files that are one hole: nothing is sampled. Time runs from the
call to the return of ``load_checkpoint``, modules being loaded; memory is the process's peak RSS, and its increase from
before the call. The ratio is to ``json.load`` of RLinf's index of as many trajectories.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tools.bench.report import Figure, Options
from tools.bench.timing import in_child, status_bytes
from tools.bench.workloads import small_trajectory
from trajstore import TrajectoryReplayBuffer
from trajstore.columns.conversion import flatten
from trajstore.files.opening import open_directory
from trajstore.formats import get_format
from trajstore.formats.base import ShardContent, ShardManifest
from trajstore.formats.checksums import manifest_of
from trajstore.store.catalog import Catalog
from trajstore.store.new_entries import columns_of, starts_of
from trajstore.store.packing import StringTable
from trajstore.store.sealed import INDEX_NAME
from trajstore.store.shard_table import shard_name
from trajstore.writing.queue import random_uuids

RANKS = 8

Facts = Callable[[int, StringTable], dict[str, npt.NDArray[Any]]]


def figures(options: Options) -> Iterator[Figure]:
    """Yield the figures of both stores."""
    total = options.count(1_000_000, 800)
    theirs = options.folder / "rlinf.json"
    _write_rlinf_index(theirs, total)
    for packed in (100, 1):
        folder = options.folder / f"packed_{packed}"
        write_store(folder, total, packed)
        found: dict[str, list[dict[str, Any]]] = {"all": [], "rank": [], "writer": [], "json": []}
        for _ in range(-(-options.repeats * 5 // 7)):
            for what, times in found.items():
                times.append(in_child("tools.bench.t08_open", what, theirs if what == "json" else folder))
        seconds = {what: median(item["seconds"] for item in items) for what, items in found.items()}
        peak = {what: median(item["peak_mb"] for item in items) for what, items in found.items()}
        more = {what: median(item["more_mb"] for item in items) for what, items in found.items()}
        name = f"{total:,} trajectories, {packed} per shard"
        index_mb = (folder / INDEX_NAME).stat().st_size / 1e6
        yield Figure(
            "T8",
            f"open {name}, over json.load of RLinf's index",
            seconds["all"] / seconds["json"],
            0.3,
            details={"json_s": seconds["json"], "index_mb": index_mb, "json_mb": theirs.stat().st_size / 1e6},
        )
        yield Figure("T8", f"open {name}", seconds["all"], 2.0, "s", details={"to_write_s": seconds["writer"]})
        yield Figure("T8", f"open {name}, memory", more["all"], 400.0, "MB", details={"peak_rss_mb": peak["all"]})
        yield Figure("T8", f"open {name}, rank 3 of 8", seconds["rank"], 0.5, "s", details={"memory_mb": more["rank"]})


def _write_rlinf_index(path: Path, total: int) -> None:
    entries = {
        str(number): {
            "num_samples": 2560,
            "trajectory_id": number,
            "max_episode_length": 80,
            "shape": [80, 32, 28],
            "model_weights_id": "a912e446-5c23-5a59-88c3-38aa354435e2",
        }
        for number in range(total)
    }
    path.write_text(json.dumps({"trajectory_index": entries, "trajectory_id_list": list(range(total))}))


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
    flat = flatten(small_trajectory(torch.Generator().manual_seed(0), 0))
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
    columns = columns_of(flats, range(packed), random_uuids(packed), catalog.index.texts)
    columns |= starts_of([flat.extent for flat in flats], "agent")
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


def _load(path: str) -> object:
    buffer = TrajectoryReplayBuffer(sample_window_size=0)
    buffer.load_checkpoint(path)
    return buffer


def _load_rank(path: str) -> object:
    buffer = TrajectoryReplayBuffer(sample_window_size=0)
    buffer.load_checkpoint(path, True, 3, RANKS)
    return buffer


def _open_to_write(path: str) -> object:
    return TrajectoryReplayBuffer(sample_window_size=0, enable_cache=False, auto_save=True, auto_save_path=path)


def _load_json(path: str) -> object:
    with open(path) as file:
        return json.load(file)


def _child(what: str, path: str) -> None:
    works: dict[str, Callable[[str], object]] = {
        "all": _load,
        "rank": _load_rank,
        "writer": _open_to_write,
        "json": _load_json,
    }
    before = status_bytes("VmHWM")
    start = time.perf_counter()
    kept = works[what](path)
    took = time.perf_counter() - start
    peak = status_bytes("VmHWM")
    sys.stdout.write(json.dumps({"seconds": took, "peak_mb": peak / 1e6, "more_mb": (peak - before) / 1e6}))
    del kept


if __name__ == "__main__":
    _child(*sys.argv[1:])
