"""T6: durable adds, one producer thread, lists of 16, flush at the end.

Agent workload: bytes per second over a plain sequential write of as many bytes with an fdatasync every 8 MiB; in lists,
and as the joined tensors of 256 rollouts a call, in turn. 1 KB
per trajectory: trajectories per second over 1 / (time of a 4 KiB append and its fdatasync). Bytes are those of the
columns.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tools.bench.report import Figure, Options
from tools.bench.timing import Times, ratio
from tools.bench.workloads import LIST, add_all, agents, nbytes, opened, smalls
from trajstore import AgentTrajectory
from trajstore.trajectory import RESPONSE_COLUMNS, TOKEN_COLUMNS

SYNC_EVERY = 8 << 20
SYNCS = 16


def figures(options: Options) -> Iterator[Figure]:
    """Yield both figures."""
    pool, total = agents(), options.count(4096, LIST)
    written = sum(nbytes([pool[number % len(pool)]]) for number in range(total))
    adds = [partial(add_all, pool=pool, total=total), partial(_add_steps, step=_joined(pool), total=total)]
    *both, plain = _measured(adds, partial(_write_plain, written, SYNC_EVERY), options)
    for name, ours in zip(("", " as tensors"), both, strict=True):
        yield Figure(
            "T6",
            f"durable adds{name}, agent workload, bytes/s over plain writing",
            ratio(plain, ours),
            0.6,
            at_least=True,
            details={"mb_per_s": written / ours.seconds / 1e6, "written_mb": written / 1e6},
        )
    pool, total = smalls(), options.count(16384, LIST)
    ours, syncs = _measured(
        [partial(add_all, pool=pool, total=total)], partial(_write_plain, 4096 * SYNCS, 4096), options
    )
    sync = syncs.seconds / SYNCS
    yield Figure(
        "T6",
        "durable adds, 1 KB, trajectories/s over 1 / fdatasync",
        total / ours.seconds * sync,
        5.0,
        at_least=True,
        details={
            "per_second": total / ours.seconds,
            "fdatasync_ms": sync * 1e3,
            "bytes_each": nbytes(pool) / len(pool),
        },
    )


def _measured(adds: Sequence[Callable[[Any], None]], plain: Callable[[Path], None], options: Options) -> list[Times]:
    """Return the times of adding in each way, in turn, and of plain writing."""
    times = [Times(warmup=1) for _ in (*adds, plain)]
    store, file = options.folder / "store", options.folder / "plain"
    for _ in range(options.repeats + 1):
        for ours, add in zip(times, adds, strict=False):
            with opened(store) as buffer:
                ours.take(partial(add, buffer))
            shutil.rmtree(store)
        times[-1].take(partial(plain, file))
        file.unlink()
    return times


def _joined(pool: Sequence[AgentTrajectory]) -> dict[str, Any]:
    """Return rollouts of equal lengths as arguments of ``add_rollouts``."""
    values = [vars(rollout) for rollout in pool]
    names = [name for name in (*TOKEN_COLUMNS, *RESPONSE_COLUMNS) if values[0][name] is not None]
    fields = ("messages", "task_id", "rollout_id", "policy_version")
    return {
        "columns": {name: torch.stack([value[name] for value in values]) for name in names},
        "lengths": [len(value["input_ids"]) for value in values],
        "documents": [{name: value[name] for name in fields} for value in values],
        "prompts": [value["response_start"] for value in values],
    }


def _add_steps(buffer: Any, step: Mapping[str, Any], total: int) -> None:
    """Add this number of rollouts, one call per step, and flush."""
    count = len(step["lengths"])
    for start in range(0, total, count):
        stop = min(count, total - start)
        columns = {name: column[:stop] for name, column in step["columns"].items()}
        lengths, documents, prompts = (step[name][:stop] for name in ("lengths", "documents", "prompts"))
        buffer.add_rollouts(columns, lengths, documents, prompts=prompts)
    buffer.flush()


def _write_plain(total: int, each: int, path: Path) -> None:
    """Write this many bytes, with an fdatasync after each block of a given size."""
    block = bytes(range(256)) * (each // 256)
    with open(path, "wb", buffering=0) as file:
        while total > 0:
            total -= file.write(block[:total])
            os.fdatasync(file.fileno())
