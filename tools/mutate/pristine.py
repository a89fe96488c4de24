"""The undamaged directories, one of every kind, and their contents.

The bytes are the same in every run, so seed and number identify a mutation.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch

from tests.support.copies import copy_live
from tests.support.witness import witness
from trainer_hooks.replay import ExperienceManager, PoolRules
from trainer_hooks.replay.store import BufferStore
from trajstore import TrajectoryReplayBuffer, annotate
from trajstore.trajectory import AgentTrajectory, Reward

Content = Literal["step", "agent", "pool"]
"""Contents of a directory: witnesses, a pool's journal of agent trajectories, or a pool as three files."""

RULES = PoolRules(n_rollout=4, experience_rbound=4, max_trajectories_per_task=3)


@dataclass(frozen=True)
class Kind:
    """A kind of directory.

    Attributes:
        name: name on the command line.
        build: creates one at a path that does not exist yet.
        content: its contents.
        checksums: whether checksums cover everything that a reader needs.
        writable: whether a writer can continue it as a store.
        pins: its pins.
    """

    name: str
    build: Callable[[Path], None]
    content: Content = "step"
    checksums: bool = True
    writable: bool = False
    pins: tuple[str, ...] = ()


def agent_witness(key: int) -> AgentTrajectory:
    """Return the agent trajectory with this key, for one of three tasks."""
    length, start = 5 + key % 3, 2
    ids = torch.arange(length) + 1000 * key
    response = length - start
    return AgentTrajectory(
        messages=[{"role": "user", "content": "go"}, {"role": "assistant", "content": str(key), "author": "llm"}],
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        loss_mask=(torch.arange(length) >= start).long(),
        response_start=start,
        old_log_probs=-(torch.arange(response) + 1.0) / (8 + key),
        entropys=(torch.arange(response) + key).float() / 4,
        response_mask=torch.ones(response, dtype=torch.int64),
        reward=Reward(outcome=1.0 if key % 2 else 0.0, metadata={"judge": key}),
        task_id=f"task_{key % 3}",
        rollout_id=f"rollout_{key}",
        query=f"question {key % 3}",
        policy_version=key,
        metadata={"note": ["kept", key]},
    )


def _open(path: Path, form: str, options: Mapping[str, object]) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(
        auto_save=True,
        auto_save_path=path,
        trajectory_format=form,
        format_options=options,
        sample_window_size=0,
        enable_cache=False,
    )


def _store(path: Path, form: str, *, closed: bool = False, **options: object) -> None:
    """Snapshot, log and two pins; one trajectory is evicted in the snapshot, one in the log, both pinned."""
    with _open(path, form, options) as buffer:
        for keys in ((0, 1), (2,), (3,)):
            buffer.add_trajectories([witness(key) for key in keys])
            buffer.flush()
        buffer.points.pin("first")
        buffer.evict([0])
        annotate(buffer, [1, 2], {"score": [0.5, 2], "tag": "in the snapshot", "rows": _rows(buffer, [1, 2])})
    buffer = _open(path, form, options)
    annotate(buffer, [2, 3], {"score": 3, "rows": _rows(buffer, [2, 3])}, who="in the log")
    for key in (4, 5):
        buffer.add_trajectories([witness(key)])
        buffer.flush()
    buffer.points.pin("second")
    buffer.evict([2])
    buffer.add_trajectories([witness(key) for key in (6, 7)])
    buffer.flush()
    buffer.close() if closed else _leave_open(path, buffer.close)


def _rows(buffer: TrajectoryReplayBuffer, ids: Sequence[int]) -> list[torch.Tensor]:
    """Return a value for each row of some trajectories."""
    blocks: dict[int, Any] = {number: buffer.get(number) for number in ids}
    return [torch.full(block.rewards.shape[:2], float(number)) for number, block in blocks.items()]


def _leave_open(path: Path, close: Callable[[], None]) -> None:
    """Leave a directory like a writer that was killed: with its log, a lock and a reader's pin."""
    aside = path.with_name(path.name + ".open")
    copy_live(path, aside)
    close()
    shutil.rmtree(path)
    aside.rename(path)
    (path / "writer.lock").write_bytes(b'{"pid": 1, "host": "nowhere", "since": 0.0}')
    (path / "readers").mkdir(exist_ok=True)
    (path / "readers" / "gone.pin").write_bytes(b"3")


def _checkpoint(path: Path, keys: range = range(6), form: str = "pt") -> None:
    store = path.with_name(path.name + ".store")
    with _open(store, form, {}) as buffer:
        for key in keys:
            buffer.add_trajectories([witness(key)])
            buffer.flush()
        buffer.save_checkpoint(path)
    shutil.rmtree(store)


def _ranks(path: Path) -> None:
    for rank in range(2):
        _checkpoint(path / f"rank_{rank}", range(10 * rank, 10 * rank + 3))


def _rlinf(path: Path, form: str) -> None:
    buffer = TrajectoryReplayBuffer(trajectory_format=form)
    buffer.add_trajectories([witness(key) for key in range(6)])
    buffer.save_checkpoint(path, layout="rlinf")
    buffer.close()


def _fill(pool: ExperienceManager, keys: range) -> None:
    pool.global_steps += 1
    pool.admit([agent_witness(key) for key in keys])
    pool.flush()


def _pool_store(path: Path) -> None:
    store = BufferStore.open(path)
    pool = ExperienceManager(RULES, store=store)
    _fill(pool, range(9))
    pool.flush()
    store.close()
    store = BufferStore.open(path)
    pool = ExperienceManager(RULES, store=store)
    _fill(pool, range(9, 15))
    _fill(pool, range(15, 21))
    _leave_open(path, store.close)


def _pool_files(path: Path) -> None:
    pool = ExperienceManager(RULES)
    _fill(pool, range(9))
    _fill(pool, range(9, 15))
    pool.save_experience_pool_to_disk(path)


_PINS = ("first", "second")
KINDS = (
    Kind("store_pt", partial(_store, form="pt"), writable=True, pins=_PINS),
    Kind("store_zarr", partial(_store, form="zarr"), writable=True, pins=_PINS),
    Kind("store_zstd", partial(_store, form="zarr", codec="zstd"), writable=True, pins=_PINS),
    Kind("store_pkl", partial(_store, form="pkl"), writable=True, pins=_PINS),
    Kind("closed_pt", partial(_store, form="pt", closed=True), writable=True, pins=_PINS),
    Kind("closed_zarr", partial(_store, form="zarr", closed=True), writable=True, pins=_PINS),
    Kind("checkpoint", _checkpoint),
    Kind("ranks", _ranks),
    Kind("rlinf_pt", partial(_rlinf, form="pt"), checksums=False),
    Kind("rlinf_pkl", partial(_rlinf, form="pkl"), checksums=False),
    Kind("pool_store", _pool_store, content="agent", writable=True),
    Kind("pool_files", _pool_files, content="pool", checksums=False),
)


def kinds_of(name: str | None) -> list[Kind]:
    """Return the kinds whose name is or begins with ``name``; all without one."""
    return [kind for kind in KINDS if name is None or kind.name == name or kind.name.startswith(f"{name}_")]


@contextmanager
def _same_in_every_run() -> Iterator[None]:
    """Draw UUIDs from a seeded generator."""
    import zarr  # noqa: F401  # draws some itself when it is loaded

    with mock.patch("os.urandom", random.Random(0).randbytes):
        yield


def build(kind: Kind, path: Path) -> None:
    """Make the directory of a kind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _same_in_every_run():
        kind.build(path)


def files_of(path: Path) -> dict[str, bytes]:
    """Return every file below a directory by its relative name, in order."""
    found = sorted(file for file in path.rglob("*") if file.is_file())
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in found}
