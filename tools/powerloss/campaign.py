"""Record a session, cut the power, check the disk, continue."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.witness import witness
from tools.campaigns import Result
from tools.crash.journal import Promises
from tools.crash.look import look, read, verify_at
from tools.powerloss.filesystem import Op, Promise
from tools.powerloss.sessions import POOL, contents_of, pool_of, record_pools, record_store, write_tree
from tools.powerloss.states import Case, build, digest, plan
from trajstore import TrajectoryReplayBuffer
from trajstore.errors import StoreNotFoundError, TrajstoreError

_NEW_KEY = 1 << 39
Tell = Callable[[str], None]


def run_campaign(
    folder: Path,
    states: int,
    sessions: Sequence[int],
    seed: int,
    *,
    steps: int = 0,
    progress: Callable[[Result], None] | None = None,
) -> Result:
    """Check ``states`` disk states, from sessions with a store and one with pools.

    Args:
        folder: an empty folder to work in.
        states: number of disk states in all sessions; a tenth are of pools.
        sessions: numbers of the sessions with a store; each number selects a format.
        seed: of sessions and crashes.
        steps: see :func:`~tools.powerloss.sessions.record_store`.
        progress: called after each state.
    """
    result = Result()
    tell = progress or (lambda _: None)
    pools = max(states // 10, 1)
    check(folder / "pools", record_pools(folder / "record_pools"), pools, seed, look_at_pool, "pools", result, tell)
    for at, number in enumerate(sessions):
        ops = record_store(folder / "record", number, seed, steps)
        share = (states - result.counts["states"]) // (len(sessions) - at)
        check(folder / "store", ops, share, seed, look_at_store, f"session {number}", result, tell)
    return result


Look = Callable[[Path, Promises, Tell], int]


def check(
    folder: Path, ops: Sequence[Op], states: int, seed: int, examine: Look, name: str, result: Result,
    tell: Callable[[Result], None] = lambda _: None,
) -> None:  # fmt: skip
    """Check a number of different disk states after the recorded operations."""
    cases = plan(ops, states, seed)
    result.counts["crashes to choose from"] += len(cases)
    result.counts["operations recorded"] += len(ops)
    seen: set[tuple[bytes, int]] = set()
    for case in cases:
        if len(seen) >= states:
            break
        files = build(ops, case)
        key = digest(files), case.promises
        if key in seen:
            continue
        seen.add(key)
        write_tree(folder, files)
        found: list[str] = []
        result.counts["trajectories compared"] += examine(folder, _promises(ops, case), found.append)
        result.problems += [f"seed {seed}, {name}, {_described(ops, case)}: {text}" for text in found]
        shutil.rmtree(folder)
        result.counts["states"] += 1
        tell(result)


def _described(ops: Sequence[Op], case: Case) -> str:
    told = [op.event for op in ops[: case.moment] if isinstance(op, Promise)]
    last = told[-1] if told else "begun"
    return f"after operation {case.moment} ({last}), {len(case.lost)} lost, {len(case.parts)} torn"


def _promises(ops: Sequence[Op], case: Case) -> Promises:
    promises = Promises()
    for op in ops[: case.moment]:
        if isinstance(op, Promise):
            promises.take(op.event, op.values)
    return promises


def look_at_store(folder: Path, promises: Promises, problem: Tell) -> int:
    """Compare the store with its promises, before and after a writer continues; return the number compared."""
    present = look(folder, promises, problem) or {}
    store = folder / "store"
    try:
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=store, sample_window_size=0) as buffer:
            (new,) = buffer.add_trajectories([witness(_NEW_KEY)])
            buffer.flush()
    except TrajstoreError as error:
        problem(f"no writer can continue: {type(error).__name__}: {error}")
        return len(present)
    after = read(store, None, problem)
    if after != {**present, new: _NEW_KEY}:
        problem(f"the next writer shows {after} of {present}")
    verify_at(store, problem)
    return 2 * len(present)


def look_at_pool(folder: Path, promises: Promises, problem: Tell) -> int:
    """Compare the pool with its promises; return the number of trajectories compared."""
    from tools.mutate.pristine import RULES
    from trainer_hooks.replay import ExperienceManager

    expected = [number for number in (promises.pool, *promises.pooling) if number is not None]
    pool = ExperienceManager(RULES)
    try:
        pool.load_experience_pool_from_disk(folder / POOL)
    except StoreNotFoundError:
        if promises.pool is not None:
            problem("the pool is gone")
        return 0
    except TrajstoreError as error:
        problem(f"the pool cannot be read: {type(error).__name__}: {error}")
        return 0
    found = contents_of(pool)
    if found not in [contents_of(pool_of(number)) for number in expected]:
        problem(f"the pool holds {sorted(found)}, not one of {expected}")
    return len(found)
