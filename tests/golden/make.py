"""Writes golden directories. Run once per released layout: ``python tests/golden/make.py tests/golden N``."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

from trajstore import AgentTrajectory, Reward, TrajectoryReplayBuffer, annotate
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
        first.points.pin("start")
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


def make_rollouts(target: Path) -> None:
    """Write a store of three rollouts, the last of which is in the log only."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        for at, (task, outcome) in enumerate((("first", 1.0), ("second", None), ("third", 0.0))):
            with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, trajectory_format="pkl") as buffer:
                buffer.add_trajectories(
                    [
                        AgentTrajectory(
                            input_ids=torch.arange(6),
                            loss_mask=torch.tensor([0, 0, 1, 1, 1, 1]),
                            messages=[{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}],
                            reward=Reward(outcome=outcome, metadata={"judge": 0.25 * at}),
                            task_id=task,
                            rollout_id=f"r{at}",
                            policy_version=at,
                            response_start=2,
                            is_terminated=at == 0,
                        )
                    ]
                )
                buffer.flush()
                if at == 2:
                    copy_live(path, target, "readers", "writer.lock")


def rows(key: int) -> torch.Tensor:
    """Return values by row of a witness."""
    steps, batch = witness(key % 3).rewards.shape[:2]
    return torch.arange(steps * batch, dtype=torch.float32).reshape(steps, batch) + 100 * key


def make_values(target: Path) -> None:
    """Write a store with values that came late: in the snapshot, in the log, rolled back, and in the inbox."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, trajectory_format="pkl") as buffer:
            buffer.add_trajectories([witness(key) for key in range(3)])
            annotate(buffer, [0, 1], {"score": [0.5, 2], "tag": ["é", "x"]}, who="anna")
            buffer.points.save(1)
            annotate(buffer, [0], {"score": 9, "label": [rows(9)]}, who="bob")
            buffer.points.rollback(1)
            annotate(buffer, [1], {"label": [rows(1)]})
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, trajectory_format="pkl") as buffer:
            annotate(buffer, [1, 2], {"tag": [None, "late"]})
            annotate(buffer, [0, 2], {"label": [rows(0), rows(2)]}, who="anna")
            annotate(path, 2, {"score": 4}, who="other")
            copy_live(path, target, "readers", "writer.lock")


if __name__ == "__main__":
    make_values(Path(sys.argv[1]) / f"values_{sys.argv[2]}")
    make(Path(sys.argv[1]) / f"layout_{sys.argv[2]}")
    make_rollouts(Path(sys.argv[1]) / f"rollouts_{sys.argv[2]}")
