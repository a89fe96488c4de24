"""A process that follows the store, and checks everything that it reads."""

from __future__ import annotations

import random
import time
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event, Semaphore

import torch

from tests.support.witness import check_batch, check_trajectory
from trajstore import TrajectoryReplayBuffer


def follow(path: str, scale: int, seed: int, begun: Semaphore, done: Event, results: Connection) -> None:
    """Refresh and read until ``done``; send the number of rows checked, or the error; set ``begun`` after a batch."""
    torch.set_num_threads(1)
    chance, rows = random.Random(seed), 0
    try:
        with TrajectoryReplayBuffer(sample_window_size=0) as buffer:
            buffer.load_checkpoint(path)
            while not done.is_set():
                buffer.refresh()
                if len(buffer):
                    first = not rows
                    rows += len(check_batch(buffer.sample(32)))
                    check_trajectory(buffer.get(chance.choice(buffer.trajectory_ids.tolist())), scale)
                    if first:
                        begun.release()
                time.sleep(0.05)
        results.send(rows)
    except Exception as error:  # whatever it is, the parent must hear of it
        results.send(f"a follower ended: {type(error).__name__}: {error}")
