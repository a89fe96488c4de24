"""The sampler of a replay trainer: verl's own, or the user's, with replayed rows added to what it samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transfer_queue import KVBatchMeta

VALIDATION = "val"
"""Partition of the data plane that is never touched."""


class ReplaySampler:
    """Stands in for a sampler and hands its training batches on to ``join``.

    It wraps an object and is no subclass, so that group filtering, and any sampler configured by
    ``trainer.v1.sampler.custom_sampler``, work beside replay. All other attributes are the sampler's.

    Args:
        sampler: has ``sample(global_steps, partition_id, batch_size)``.
        join: gets a training batch and returns it with more rows.
    """

    def __init__(self, sampler: Any, join: Callable[[KVBatchMeta], KVBatchMeta]) -> None:
        object.__setattr__(self, "_sampler", sampler)
        object.__setattr__(self, "_join", join)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Return the rows of ``batch_size`` prompts, and metrics; see verl's ``ReplayBuffer``."""
        batch, metrics = self._sampler.sample(
            global_steps=global_steps, partition_id=partition_id, batch_size=batch_size
        )
        return (batch if partition_id == VALIDATION else self._join(batch)), metrics

    def __getattr__(self, name: str) -> Any:
        if name == "_sampler":  # asked for before __init__, as copying does
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._sampler, name, value)
