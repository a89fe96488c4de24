"""T36: a week of a run of 200 ranks with 10,000,000 rollouts of 4,096 tokens a day, by measured constants.

One rank is written in groups of eight rollouts, a commit each, and a run of 4,000,000 trajectories in as many ranks and
in shards of eight is opened. The rest is arithmetic with these and rows of docs/benchmarks.md. Nothing has a target.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from tools.bench.report import Figure, Options
from tools.bench.t08_open import cost, load, write_store
from tools.bench.t31_tokens import _rollout, _tokens
from tools.bench.t33_requests import DOLLARS
from tools.bench.timing import in_child
from tools.bench.workloads import opened

ROLLOUTS, RANKS, DAYS, GROUP, LEARNERS, DAY = 10_000_000, 200, 7, 8, 8, 86_400
HANDLE, ARRIVING, SHARE, ACTOR = 9.7, 96.0, 154.0, 250.0  # bytes of a trajectory, T35 and many-machines.md
SEGMENTS = 64  # of the log between two indexes in object storage


def figures(options: Options) -> Iterator[Figure]:
    """Yield the rows of the week."""
    shard, record, entry = _rank(options.folder / "rank", options.count(256, 4))
    opening = _opened(options.folder, options.count(4_000_000, 80 * RANKS))
    kept, commits, looks = ROLLOUTS * DAYS, ROLLOUTS / GROUP, LEARNERS * DAY
    indexes = commits / max(SEGMENTS, (index := kept / RANKS * entry) / 2**20)
    rows: list[tuple[str, float, str, dict[str, float]]] = [
        ("a rollout in shards", shard, "bytes", {"in_index": entry}),
        ("a week of a rank", shard * kept / RANKS / 1e9, "GB", {"day_of_all_gb": shard * ROLLOUTS / 1e9}),
        ("commits of a rank", commits / RANKS / DAY, "a second", {"record_bytes": record}),
        ("shards of a rank", kept / RANKS / GROUP, "files", {"index_mb": index / 1e6}),
        ("indexes a day, to S3", indexes * index / 1e9, "GB", {"to_disk_gb": record * commits / 1e9}),
        ("memory of a store's actor", ACTOR * kept / RANKS / 1e6, "MB", {}),
        ("memory of a learner's handle", HANDLE * kept / 1e9, "GB", {"first_answers_gb": ARRIVING * kept / 1e9}),
        ("memory of a reader of all", opening["held"] * kept / 1e9, "GB", {"share_gb": SHARE * kept / LEARNERS / 1e9}),
        ("processor time of opening all", opening["used"] * kept, "s", {"at_a_day": opening["used"] * ROLLOUTS}),
        ("until a rank's ids end", 2**42 * RANKS / ROLLOUTS / 365, "years", {"a_day": ROLLOUTS / RANKS}),
    ]
    requests = [
        ("PutObject", "shards and log", 2 * commits),
        ("PutObject", "indexes with metadata.json", 2 * indexes),
        ("PutObject", "writers' locks and metadata.json", RANKS * (DAY / 20 + DAY / 60)),
        ("PutObject", f"leases of {LEARNERS} readers", LEARNERS * RANKS * DAY / 200),
        ("ListObjectsV2", "inboxes, readers, logs by writers", RANKS * (DAY / 10 + DAY / 60) + 2 * indexes),
        ("ListObjectsV2", f"{LEARNERS} idle readers, once a second", looks * RANKS * (1.5 * SEGMENTS + 7) / 1_000),
        ("ListObjectsV2", "the same rank by rank", looks * (RANKS + 1.0)),
    ]
    rows += [(f"{kind} of {name}", many, "a day", {"dollars": many * DOLLARS[kind]}) for kind, name, many in requests]
    yield from (Figure("T36", name, value, None, unit, details=details) for name, value, unit, details in rows)


def _rank(folder: Path, groups: int) -> tuple[float, float, float]:
    """Return bytes of a rollout in shards, of a commit in the log, and of a rollout in the index."""
    with opened(folder) as buffer:
        for task in range(groups):
            prompt = _tokens(1_496)
            buffer.add_trajectories([_rollout(prompt, _tokens(2_600), f"task {task}", str(at)) for at in range(GROUP)])
            buffer.flush()
        log, shards = (sum(file.stat().st_size for file in (folder / name).iterdir()) for name in ("log", "shards"))
    index = (folder / "trajectory_index.json").stat().st_size
    return shards / groups / GROUP, log / groups, index / groups / GROUP


def _opened(folder: Path, total: int) -> dict[str, float]:
    """Return bytes and processor seconds of a trajectory."""
    write_store(folder / "one", 1, 1)
    for rank in range(RANKS):
        write_store(folder / "run" / f"rank_{rank}", total // RANKS, GROUP)
    kernels, whole = (in_child(_cost, folder / name) for name in ("one", "run"))
    return {name: (value - kernels[name]) / total for name, value in whole.items()}


def _cost(path: Path) -> dict[str, float]:
    before = time.process_time()
    return {"held": cost(load, path)["held"], "used": time.process_time() - before}
