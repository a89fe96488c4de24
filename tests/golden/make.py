"""Writes a golden directory. Run once per released layout: ``python tests/golden/make.py tests/golden/layout_N``."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from trajstore import TrajectoryReplayBuffer
from trajstore.testing.copies import copy_live
from trajstore.testing.witness import witness

KEYS = {0: 1, 1: 5, 2: 3, 3: 4, 4: 11, 5: 6, 6: 7}
"""Trajectory ids and the keys of the witnesses that they hold; 0 is evicted, but pinned."""


def make(target: Path) -> None:
    """Write a store as a crash would leave it, its last commits in the log only, and what a seed draws from it.

    From layout 2 on, one of these commits has moved trajectories to another shard; from layout 4 on, the last one has
    two shards with ids of either among the other's.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        first = TrajectoryReplayBuffer(auto_save=True, auto_save_path=path)
        first.add_trajectories([witness(KEYS[0]), witness(KEYS[1])])
        first.pin("start")
        first.close()
        second = TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, trajectory_format="pkl")
        second.add_trajectories([witness(KEYS[2])])
        second.flush()
        second.add_trajectories([witness(KEYS[3])])
        second.evict([0])
        second.compact()
        second.add_trajectories([witness(KEYS[number]) for number in (4, 5, 6)])
        second.flush()
        copy_live(path, target, "readers", "writer.lock")
        second.close()
    reader = TrajectoryReplayBuffer(seed=5, sample_window_size=0)
    reader.load_checkpoint(target)
    reader.load_state_dict({"seed": 5, "rng_state": TrajectoryReplayBuffer(seed=5).state_dict()["rng_state"]})
    drawn = reader.sample(8)["curr_obs"]["tag"].reshape(-1).tolist()
    target.with_suffix(".json").write_text(json.dumps({"drawn": drawn}) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
