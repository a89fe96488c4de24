"""Partitions trajectories among ranks. Pure arithmetic."""

from __future__ import annotations

from trajstore.errors import ConfigurationError


def share_of(total: int, local_rank: int, world_size: int) -> tuple[int, int]:
    """Return the contiguous share ``[start, stop)`` of ``total`` items that belongs to a rank.

    The first ``total % world_size`` ranks have one more than the others.

    Raises:
        ConfigurationError: ``world_size`` is not positive, or ``local_rank`` is not in ``[0, world_size)``.
    """
    if world_size <= 0:
        raise ConfigurationError(f"world_size ({world_size}) must be > 0")
    if not 0 <= local_rank < world_size:
        raise ConfigurationError(f"local_rank ({local_rank}) must be in range [0, {world_size})")
    each, more = divmod(total, world_size)
    start = local_rank * each + min(local_rank, more)
    return start, start + each + (local_rank < more)
