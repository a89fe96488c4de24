"""The replay buffer with the private members that RLinf's workers and tools use."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from trajstore._core.buffer import replay_buffer as plain
from trajstore._core.store.index import TrajectoryIndex
from trajstore.interop.rlinf.trajectory import Trajectory, flatten_trajectory
from trajstore.trajectory import AgentTrajectory


class TrajectoryReplayBuffer(plain.TrajectoryReplayBuffer):
    """:class:`trajstore.TrajectoryReplayBuffer` for code written for RLinf's buffer, with its private members.

    RLinf's RLT workers flatten trajectories through the buffer, and its visualizer reads the index. An
    ``auto_save_path`` without ``auto_save`` is ignored, without a warning. All other behaviour is that of the base
    class, directories included.
    """

    logger = logging.getLogger("trajstore")
    _warns_of_path = False  # RLinf's workers always pass it

    @property
    def auto_save(self) -> bool:
        """Whether trajectories are written."""
        return self._path is not None

    @property
    def auto_save_path(self) -> str | None:
        """Where trajectories are written; None in memory only."""
        return self._path

    @property
    def trajectory_format(self) -> str:
        """Name of the format of new files."""
        return self._trajectory_format

    @property
    def size(self) -> int:
        """Number of trajectories."""
        return len(self)

    async def is_ready_async(self, min_size: int) -> bool:
        """Return whether there are at least ``min_size`` trajectories."""
        return self.is_ready(min_size)

    @property
    def enable_cache(self) -> bool:
        """Whether written trajectories stay in memory; always true for a buffer in memory only."""
        return self._live.contents.cache is not None

    @property
    def random_generator(self) -> torch.Generator:
        """The generator that draws samples; reseeding it changes the next draws."""
        return self._draws.generator

    def sample_chunks(self, num_chunks: int) -> dict[str, Any]:
        """Draw transitions; the same as ``sample(num_chunks)``."""
        return self.sample(num_chunks)

    def _flatten_trajectory(self, trajectory: Trajectory) -> dict[str, Any]:
        return flatten_trajectory(trajectory)

    @property
    def _trajectory_id_list(self) -> list[int]:
        return [int(number) for number in self.trajectory_ids]

    @property
    def _trajectory_index(self) -> Mapping[int, dict[str, Any]]:
        return _Index(self)

    def _load_trajectory(self, trajectory_id: int, model_weights_id: str) -> Trajectory | AgentTrajectory:
        trajectory = self.get(trajectory_id)
        return trajectory if isinstance(trajectory, AgentTrajectory) else Trajectory(**vars(trajectory))


class _Index(Mapping[int, dict[str, Any]]):
    """RLinf's index entries by trajectory id; T and B of the shape."""

    def __init__(self, buffer: TrajectoryReplayBuffer) -> None:
        self._buffer = buffer

    @property
    def _index(self) -> TrajectoryIndex:
        return self._buffer._live.contents.index

    def __getitem__(self, trajectory_id: int) -> dict[str, Any]:
        with self._buffer._live.contents.lock:
            entry = self._index.entry(self._index.position_of(trajectory_id))
        return {
            "num_samples": entry.num_samples,
            "trajectory_id": trajectory_id,
            "max_episode_length": entry.max_episode_length,
            "shape": (entry.extent.steps, entry.extent.batch),
            "model_weights_id": entry.model_weights_id,
        }

    def __iter__(self) -> Iterator[int]:
        return iter(self._buffer._trajectory_id_list)

    def __len__(self) -> int:
        return len(self._buffer)
