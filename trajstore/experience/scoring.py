"""Entropy of stored trajectories under the current policy, asked of the trainer.

Takes no lock: the one training loop that owns the pool is the one caller.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np

from trajstore.experience.entry import PoolEntry
from trajstore.experience.journal import replayed_copy
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

CurrentEntropy = Callable[[Sequence[AgentTrajectory]], Sequence[float]]
"""Returns, for each trajectory, its mean entropy in nats under the current policy. One batched call."""

Records = list[tuple[PoolEntry, AgentTrajectory]]


class EntropyScorer:
    """Calls the trainer's function; tells of its first failure only."""

    def __init__(self) -> None:
        self._warned = False

    def __call__(
        self,
        function: CurrentEntropy | None,
        read: Callable[[Sequence[PoolEntry]], Records],
        undecided: Callable[[], Sequence[PoolEntry]],
    ) -> dict[int, float]:
        """Return entropies by trajectory id; empty where the saved ones are to be used: no function, or it failed.

        All of an answer is used or nothing, since current and saved entropies do not compare.

        Args:
            function: the trainer's.
            read: gives entries with their records; those that cannot be read leave the pool.
            undecided: says of which entries the entropy is wanted; asked again when some have left the pool.
        """
        if function is None:
            return {}
        wanted = undecided()
        while len(found := read(wanted)) < len(wanted):
            wanted = undecided()
        if not found:
            return {}
        try:
            values = [float(value) for value in function([replayed_copy(record) for _, record in found])]
            if len(values) != len(found) or not np.isfinite(values).all():
                raise ValueError(f"{len(values)} values for {len(found)} trajectories, or not finite")
        except Exception as error:  # the trainer's code may fail in any way; training goes on with saved entropies
            if not self._warned:
                self._warned = True
                logger.warning("entropy under the current policy failed (%r): using the saved entropy", error)
            return {}
        return {entry.trajectory_id: value for (entry, _), value in zip(found, values, strict=True)}
