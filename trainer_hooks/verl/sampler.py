"""The sampler of a replay trainer: verl's or the user's, with replayed rows added to its batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from trainer_hooks.verl.histories import TRAINING
from trainer_hooks.wrapper import Wrapper

VALIDATION = "val"
"""Partition of the data plane that is never changed."""

JoinFinished = Callable[[set[str], dict[str, dict[str, Any]], str], None]
"""Called with finished prompts, the rows of the training partition with tags, and the metric of group filtering."""


class ReplaySampler(Wrapper, wraps="_sampler"):
    """Wraps a sampler and passes its training batches through ``join``.

    A wrapper rather than a subclass, so that any sampler of ``trainer.v1.sampler.custom_sampler`` works with replay.
    All other attributes are the sampler's. Two methods of a ``ReplayBuffer`` of verl are patched on the instance, for
    its lifetime: ``finished`` is called after it reads the data plane and before it filters groups, ``dropped`` before
    it drops groups. Both run in the trainer's thread.

    Args:
        sampler: has ``sample(global_steps, partition_id, batch_size)``.
        join: adds rows to a training batch.
        finished: adds histories to the rollouts of finished prompts.
        dropped: called with the rows of prompts that are dropped from training.
        validated: called with the batches of a validation.
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
            return  # how a custom sampler filters and drops is unknown
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
