"""The checkpoint callback of a replay trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.trainer.ppo.checkpoint_callback import CheckpointCallback


class ReplayCheckpointCallback(CheckpointCallback):  # type: ignore[misc]  # verl has no types
    """Calls the callback that the user configured, then lets the pool give up what no checkpoint needs any more.

    Args:
        inner: the configured callback.
        complete: called when a checkpoint is complete.
    """

    def __init__(self, inner: CheckpointCallback, complete: Callable[[], None]) -> None:
        super().__init__(config=inner.config)
        self._inner = inner
        self._complete = complete

    def on_save(
        self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **kwargs: Any
    ) -> None:
        """Called by verl when a checkpoint is complete (or, with ``async_save``, under way)."""
        self._inner.on_save(trainer, global_step, checkpoint_dir, async_save, **kwargs)
        self._complete()
