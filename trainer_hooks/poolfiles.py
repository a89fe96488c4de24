"""Where a run's pool begins, and its copies as files: ``experience_pool/step_N`` every so many steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trajstore.experience import ExperienceManager, newest_pool

logger = logging.getLogger(__name__)


class PoolFiles:
    """Writes and loads a pool's files, and says what a resume did.

    Args:
        manager: the pool.
        path: the folder ``experience_pool``; ``None`` = no files.
        save_freq: steps between two copies; ``None`` = none is written.
    """

    def __init__(self, manager: ExperienceManager, path: str | None, save_freq: int | None) -> None:
        self.begun = False
        """Whether it was decided where the pool begins."""
        self._manager = manager
        self._path = None if path is None else Path(path)
        self._save_freq = save_freq

    def save_if_due(self) -> None:
        """Write ``step_N`` if the step that is going on is one of those.

        Raises:
            StoreWriteError: it did not reach the disk.
        """
        step = self._manager.global_steps
        if self._path is not None and self._save_freq is not None and step % self._save_freq == 0:
            self._manager.save_experience_pool_to_disk(self._path / f"step_{step}")

    def load_cut(self, state: Mapping[str, Any]) -> None:
        """Go back to the cut of a checkpoint."""
        before = len(self._manager)
        self._manager.load_state_dict(dict(state))
        self.begun = True
        logger.info(
            "experience pool: back at step %d of the checkpoint with %s; the store held %d, and what entered since the"
            " checkpoint is not used. Without the checkpoint's cut these %d would have been used as they are",
            self._manager.global_steps,
            self._size(),
            before,
            before,
        )

    def load_newest(self, step: int) -> None:
        """Load the newest copy that is not after a step; without one the pool stays as it lies in its store."""
        self.begun = True
        found = None if self._path is None else newest_pool(self._path, step)
        if found is not None:
            before = len(self._manager)
            self._manager.load_experience_pool_from_disk(found, global_steps=step)
            logger.info(
                "experience pool: loaded %s with %s; the store held %d, which it replaces. Without pool_path these"
                " would have been used",
                found,
                self._size(),
                before,
            )
            return
        later = None if self._path is None else newest_pool(self._path)
        if later is not None:
            logger.warning(
                "experience pool: %s is after step %d, where this run begins, and is not loaded; resume from a"
                " checkpoint of that step, give another pool_path, or import it (`trajstore pool import`)",
                later,
                step,
            )
        if len(self._manager):
            logger.info("experience pool: used as it lies in its store, with %s", self._size())

    def _size(self) -> str:
        return f"{len(self._manager)} trajectories of {len(self._manager.get_task_ids())} tasks"
