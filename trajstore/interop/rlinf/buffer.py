"""The replay buffer with the private members that RLinf's workers and tools use."""

from __future__ import annotations

import logging
from bisect import insort
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from trajstore._core.base.arguments import whole
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


Priority = tuple[float, float]
"""Lowest and mean policy version, compared in this order."""


class PriorityStore:
    """Keeps the ``maxsize`` trajectories of highest priority; of equal ones, the oldest is dropped first.

    They are kept as given, not copied.

    Args:
        maxsize: maximum number of trajectories.

    Raises:
        ConfigurationError: ``maxsize`` is not positive.
    """

    def __init__(self, maxsize: int) -> None:
        self.maxsize = whole("maxsize", maxsize, 1)
        self._entries: list[tuple[Priority, int, Trajectory]] = []
        self._added = 0
        self._used: set[int] = set()
        self._discarded_unused = 0

    def __len__(self) -> int:
        """Number of trajectories."""
        return len(self._entries)

    def add(self, priority: Priority, data: Trajectory) -> bool:
        """Add a trajectory; return whether it was stored. A full store refuses those below its lowest priority."""
        if len(self._entries) == self.maxsize and priority < self._entries[0][0]:
            self._discarded_unused += 1
            return False
        insort(self._entries, (priority, self._added, data), key=lambda entry: entry[:2])
        self._added += 1
        if len(self._entries) > self.maxsize:
            self._forget(self._entries.pop(0)[1])
        return True

    def topn(self, n: int) -> list[Trajectory]:
        """Return the ``n`` trajectories of highest priority, highest first, and mark them as used."""
        chosen = self._entries[-n:] if n > 0 else []
        self._used.update(number for _, number, _ in chosen)
        return [data for _, _, data in reversed(chosen)]

    def remove_below(self, threshold: float) -> None:
        """Drop the trajectories whose lowest policy version is below a threshold."""
        for (lowest, _), number, _ in self._entries:
            if lowest < threshold:
                self._forget(number)
        self._entries = [entry for entry in self._entries if entry[0][0] >= threshold]

    def get_metric(self) -> dict[Any, Any]:
        """Return ``{"ratio": share of all steps}`` per policy version, and ``"discarded_unused"``."""
        counts: Counter[int] = Counter()
        for _, _, data in self._entries:
            if data.versions is not None:
                found, times = torch.unique(data.versions.reshape(-1).round().to(torch.int64), return_counts=True)
                counts.update(dict(zip(found.tolist(), times.tolist(), strict=True)))
        total = counts.total()
        metric: dict[Any, Any] = {version: {"ratio": count / total} for version, count in counts.items()}
        return metric | {"discarded_unused": self._discarded_unused}

    def _forget(self, number: int) -> None:
        if number in self._used:
            self._used.discard(number)
        else:
            self._discarded_unused += 1
