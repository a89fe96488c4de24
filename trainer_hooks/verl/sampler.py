"""The sampler of a replay trainer: verl's own, or the user's, with replayed rows added to what it samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from trainer_hooks.verl.histories import TRAINING

VALIDATION = "val"
"""Partition of the data plane that is never changed."""

JoinFinished = Callable[[set[str], dict[str, dict[str, Any]], str], None]
"""Gets finished prompts, the rows of the training partition with their tags, and what groups are judged by."""


class ReplaySampler:
    """Stands in for a sampler and hands its training batches on to ``join``.

    It wraps an object and is no subclass, so that any sampler configured by ``trainer.v1.sampler.custom_sampler``
    works beside replay. All other attributes are the sampler's. Two methods of verl's ``ReplayBuffer`` are wrapped on
    the object: after it has looked at the data plane, and before it judges groups, ``finished`` is called if it
    filters groups; before it drops groups, ``dropped`` is. That is in the trainer's thread, which samples, and stays so
    for the life of the object.

    Args:
        sampler: has ``sample(global_steps, partition_id, batch_size)``.
        join: gets a training batch and returns it with more rows.
        finished: puts histories beside the rollouts of finished prompts.
        dropped: gets the rows of prompts that are about to be dropped from training.
        validated: gets the batches of a validation.
    """

    def __init__(
        self,
        sampler: Any,
        join: Callable[[KVBatchMeta], KVBatchMeta],
        finished: JoinFinished | None = None,
        dropped: Callable[[KVBatchMeta], None] | None = None,
        validated: Callable[[KVBatchMeta], None] | None = None,
    ) -> None:
        object.__setattr__(self, "_sampler", sampler)
        object.__setattr__(self, "_join", join)
        object.__setattr__(self, "_validated", validated)
        if not isinstance(sampler, ReplayBuffer):
            return  # what it filters and drops, and where, only its author knows
        if finished is not None and sampler.filter_groups_metric is not None:
            _join_before_judging(sampler, finished)
        if dropped is not None:
            _tell_of_dropped(sampler, dropped)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Return the rows of ``batch_size`` prompts, and metrics; see verl's ``ReplayBuffer``."""
        batch, metrics = self._sampler.sample(
            global_steps=global_steps, partition_id=partition_id, batch_size=batch_size
        )
        if partition_id != VALIDATION:
            return self._join(batch), metrics
        if self._validated is not None:
            self._validated(batch)
        return batch, metrics

    def __getattr__(self, name: str) -> Any:
        if name == "_sampler":  # asked for before __init__, as copying does
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._sampler, name, value)


def _join_before_judging(sampler: Any, finished: JoinFinished) -> None:
    look = sampler._sync_metadata_from_transfer_queue

    def look_and_join() -> None:
        look()
        finished(set(sampler.finished_keys[TRAINING]), sampler.partitions[TRAINING], sampler.filter_groups_metric)

    sampler._sync_metadata_from_transfer_queue = look_and_join


def _tell_of_dropped(sampler: Any, dropped: Callable[[KVBatchMeta], None]) -> None:
    clear = sampler._clear_groups

    def tell_and_clear(partition_id: str, uids: set[str]) -> None:
        if partition_id == TRAINING and uids:
            rows = {key: tag for key, tag in sampler.partitions[TRAINING].items() if key.split("_")[0] in uids}
            dropped(KVBatchMeta(partition_id=TRAINING, keys=list(rows), tags=list(rows.values())))
        clear(partition_id, uids)

    sampler._clear_groups = tell_and_clear
