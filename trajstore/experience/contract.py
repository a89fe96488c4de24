"""The token contract: token ids mean something only to the tokenizer and chat template that made them."""

from __future__ import annotations

from collections.abc import Sequence

from trajstore.errors import ConfigurationError, InvalidTrajectoryError
from trajstore.trajectory import AgentTrajectory


def check_same(other: str, ours: str, name: str) -> None:
    """Refuse a fingerprint that differs from ours. An empty one is unknown and passes.

    Raises:
        ConfigurationError: they differ; the message names both, and by ``name`` what was refused.
    """
    if other and ours and other != ours:
        raise ConfigurationError(
            f"tokenizer_fingerprint: {name} was made with tokenizer {other!r}, this pool uses {ours!r};"
            " token ids of one mean nothing to the other: use the same tokenizer, or begin an empty pool"
        )


def check_trajectories(trajectories: Sequence[AgentTrajectory], ours: str) -> str:
    """Check that trajectories belong to tasks and to one tokenizer, and return that tokenizer's fingerprint.

    Args:
        trajectories: what is to enter the pool.
        ours: the pool's fingerprint; empty while unknown, then the first one that is known counts.

    Raises:
        ConfigurationError: two tokenizers.
        InvalidTrajectoryError: a trajectory has no ``task_id``.
    """
    for trajectory in trajectories:
        rollout = f"rollout {trajectory.rollout_id!r}"
        if not trajectory.task_id:
            raise InvalidTrajectoryError(f"field task_id: empty ({rollout}); the pool keeps them by task, set it")
        check_same(trajectory.tokenizer_fingerprint, ours, f"{rollout} of task {trajectory.task_id!r}")
        ours = ours or trajectory.tokenizer_fingerprint
    return ours
