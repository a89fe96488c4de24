"""Things that are counted in every step, and of which only the first ones of a run are told."""

from __future__ import annotations

import logging


class FirstTold:
    """Counts what was found; the log is told once.

    Args:
        logger: of the module that finds it.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._count = 0
        self._told = False

    def add(self, count: int, message: str, *values: object) -> None:
        """Count more; of the first ones there is a warning, made of message and values as ``logging`` does."""
        self._count += count
        if count and not self._told:
            self._told = True
            self._logger.warning(message, *values)

    def take(self) -> int:
        """Return how many there were since the last call."""
        count, self._count = self._count, 0
        return count
