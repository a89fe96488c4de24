"""Calls a user's function for each commit: in order, without locks, in a thread that may call the buffer."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from trajstore._core.base import locks
from trajstore._core.base.interrupts import WaitList, start_thread

logger = logging.getLogger(__name__)

_LAST_WORDS = 30.0
"""Seconds that :meth:`CommitCallbacks.close` waits for a running callback."""


class CommitCallbacks:
    """Calls a function with the ids of each commit, one at a time, without blocking writers.

    Args:
        call: the user's function; its errors are logged.
        url: the store's name in messages.
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
        """Queue a call with these ids; returns at once."""
        with self._lock:
            self._commits.append(ids)
            self._wait_list.wake()

    def is_own_thread(self) -> bool:
        """Return whether the current thread is the one that calls the user's function."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Wait for all calls; gives up with a warning if the function does not return."""
        with self._lock:
            self._closing = True
            self._wait_list.wake()
        if not self.is_own_thread():
            self._thread.join(_LAST_WORDS)
            if self._thread.is_alive():
                logger.warning(
                    "%s: on_commit has not returned for %g s; %d commits were not reported to it",
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
                except Exception:  # a user's error does not affect the commit
                    logger.exception("on_commit raised")
