"""What the process on the node does until it is killed: it changes its store, and notes what the mirror has."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trajstore import Mirror, TrajectoryReplayBuffer
from trajstore.testing.witness import witness

FORMATS = ("pt", "zarr", "pkl")


def work(store: str, mirror: str, storage_options: dict[str, Any], journal: str, seed: int, first_key: int) -> None:
    """Change a mirrored store at random for ever.

    Args:
        store: path of the store.
        mirror: URL of its mirror.
        storage_options: of the mirror.
        journal: file on another machine, so to speak: it is not lost. One JSON line for each thing noted.
        seed: of what is done.
        first_key: of the witnesses that are added.
    """
    logging.getLogger("trajstore").setLevel(logging.ERROR)  # rollbacks warn of what they set aside
    rng = random.Random(seed)
    with Path(journal).open("a", buffering=1) as notes:

        def note(**what: Any) -> None:
            notes.write(json.dumps(what) + "\n")

        buffer = TrajectoryReplayBuffer(
            auto_save=True,
            auto_save_path=store,
            trajectory_format=FORMATS[seed % len(FORMATS)],
            sample_window_size=0,
            mirror=Mirror(mirror, storage_options=storage_options, interval=0.0, longest_pause=0.2),
        )
        note(ready=True)
        key, step = first_key, max([point.step for point in buffer.points.saved], default=0)

        def add() -> None:
            nonlocal key
            keys = list(range(key, key + rng.randrange(1, 7)))
            key = keys[-1] + 1
            note(keys=keys)
            note(added=list(zip(buffer.add_trajectories([witness(one) for one in keys]), keys, strict=True)))

        def evict() -> None:
            ids = buffer.trajectory_ids.tolist()
            chosen = rng.sample(ids, min(len(ids), rng.randrange(1, 6)))
            note(evicting=chosen)
            buffer.evict(chosen)

        def point() -> None:
            nonlocal step
            step += 1
            buffer.points.save(step, {"step": step}, keep=2)

        def back() -> None:
            points = buffer.points.saved
            if points:
                nonlocal step
                step = rng.choice(points).step
                buffer.flush()
                note(rolling_back=step, ids=buffer.trajectory_ids.tolist())
                buffer.points.rollback(step)
                note(live=buffer.trajectory_ids.tolist())

        actions: list[Callable[[], object]] = [add] * 12 + [buffer.flush] * 4 + [evict, point, back, buffer.compact]
        while True:
            rng.choice(actions)()
            state = buffer.mirror.state
            if state is not None:
                note(watermark=state.newest_id, generation=state.generation, error=state.error)
