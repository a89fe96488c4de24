"""Trouble that must not stop training: counted by kind, logged when it begins and when it ends."""

from __future__ import annotations

import logging
from collections import Counter

from trajstore import locks
from trajstore.guidance.maker import MakerError

logger = logging.getLogger(__name__)


class Trouble:
    """Counts failures of one thing that is done again and again. Thread-safe.

    Args:
        what: what fails, as logs say it.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._counts: Counter[str] = Counter()
        self._since: dict[str, int] = {}
        self._lock = locks.lock("Trouble._lock")

    def failed(self, error: MakerError) -> None:
        """Count a failure; log its cause unless the same kind of trouble is going on already."""
        with self._lock:
            self._counts[error.kind] += 1
            first = not self._since
            self._since[error.kind] = self._since.get(error.kind, 0) + 1
        if first:
            logger.warning("guidance: %s failed (%s), training goes on without: %s", self._what, error.kind, error)

    def succeeded(self) -> None:
        """Log the end of trouble that was going on."""
        with self._lock:
            kinds, self._since = self._since, {}
        if kinds:
            told = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
            logger.warning("guidance: %s works again, after failures: %s", self._what, told)

    def counts(self) -> dict[str, int]:
        """Return how many failures there were, by kind."""
        with self._lock:
            return dict(self._counts)
