"""Recorded sessions: a store in all its uses, killed and continued; pools that replace each other."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.crash.child import FORMATS, Child
from tools.mutate.pristine import RULES, agent_witness
from tools.powerloss.filesystem import Op, tree_of
from tools.powerloss.recorder import Recorder
from trainer_hooks.replay import ExperienceManager

POOL = Path("pool") / "step_1"
_STEPS = tuple(6 if name == "zarr" else 30 for name in FORMATS)
"""A zarr shard has about forty files."""


Kill = Callable[[Sequence[Op], random.Random], int]


def at_random(ops: Sequence[Op], chance: random.Random) -> int:
    """Kill at any moment of the last two thirds."""
    return chance.randrange(len(ops) // 3, len(ops))


def record_store(folder: Path, number: int, seed: int, steps: int = 0, kill: Kill = at_random) -> list[Op]:
    """Use a store, kill its process (the machine stays on), and continue.

    Args:
        folder: an empty folder to work in.
        number: of the session; decides the format.
        seed: of the steps.
        steps: number of steps before the kill, and again after it; 0 = the default of the format.
        kill: selects the operation of the first process after which it is killed.

    Returns:
        The operations on files, and the promises.
    """
    chance = random.Random(f"{seed}/{number}")
    ops: list[Op] = []
    for life in range(2):
        place = folder / f"{number}_{life}"
        write_tree(place, tree_of(ops).listing())
        recorder = Recorder(place, ops)
        with recorder.recording():
            child = Child(place, 4 * life + number, chance, recorder)
            child.open()
            for _ in range(steps or _STEPS[number % len(FORMATS)]):
                child.step()
            child.flush()
            child.buffer.close()
        if life == 0:
            del ops[kill(ops, chance) :]
    return ops


def record_pools(folder: Path) -> list[Op]:
    """Save three pools to the same path, one after the other."""
    ops: list[Op] = []
    folder.mkdir(parents=True)
    recorder = Recorder(folder, ops)
    with recorder.recording():
        for number in range(3):
            recorder.note("pooling", number=number)
            pool_of(number).save_experience_pool_to_disk(folder / POOL)
            recorder.note("pooled", number=number)
    return ops


def pool_of(number: int) -> ExperienceManager:
    """Return a pool whose contents identify its number."""
    pool = ExperienceManager(RULES)
    trajectories = [agent_witness(key) for key in range(9 * number, 9 * number + 9)]
    pool.update_difficulty2task_dict(trajectories)
    pool.save_trajectories_to_memory([one for one in trajectories if one.reward.outcome == 1.0])
    return pool


def contents_of(pool: ExperienceManager) -> set[str]:
    """Return the rollouts in a pool."""
    return {str(one.rollout_id) for held in pool.task2trajectories.values() for one in held}


def write_tree(folder: Path, files: dict[str, bytes | None]) -> None:
    """Create the files and folders of a listing."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)
