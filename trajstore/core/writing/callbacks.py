"""Calling a user's function of commits: in order, without locks, in a thread that may call the buffer back."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from trajstore.core.base import locks
from trajstore.core.base.interrupts import WaitList, start_thread

logger = logging.getLogger(__name__)

_LAST_WORDS = 30.0
"""Seconds that :meth:`CommitCallbacks.close` waits for a callback that does not return."""


class CommitCallbacks:
    """Calls a function with the ids of each commit, one after the other. Nobody who writes waits for it.

    Args:
        call: the user's function; what it raises is logged.
        url: what messages call the store.
    """

    def __init__(self, call: Callable[[Sequence[int]], None], url: str) -> None:
        self._call = call
        self._url = url
        self._lock = locks.rlock("CommitCallbacks._lock")
        self._wait_list = WaitList()
        self._commits: deque[Sequence[int]] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="trajstore-on-commit", daemon=True)
        start_thread(self._thread)

    def put(self, ids: Sequence[int]) -> None:
        """Let the function be called with these ids; returns at once."""
        with self._lock:
            self._commits.append(ids)
            self._wait_list.wake()

    def is_own_thread(self) -> bool:
        """Return whether the caller is the user's function."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Wait until the function was called of everything; gives up, with a warning, if it does not return."""
        with self._lock:
            self._closing = True
            self._wait_list.wake()
        if not self.is_own_thread():
            self._thread.join(_LAST_WORDS)
            if self._thread.is_alive():
                logger.warning(
                    "%s: on_commit has not returned for %g s; it was not called of %d commits",
                    *(self._url, _LAST_WORDS, len(self._commits)),
                )

    def _work(self) -> None:
        while True:
            with self._lock:
                ids = self._commits.popleft() if self._commits else None
                if ids is None and self._closing:
                    return
                gate = self._wait_list.gate() if ids is None else None
            if gate is not None:
                self._wait_list.wait(gate)
            elif ids is not None:
                try:
                    self._call(ids)
                except Exception:  # the user's; a commit stands whatever becomes of it
                    logger.exception("on_commit raised")
