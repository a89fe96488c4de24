"""Locks by name. A thread acquires them only in the order of the table in ``docs/design/store.md``: no deadlocks.

The tests check that order (``tests/support/lock_order.py``), by giving every lock that they make to :data:`checker`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol


class Lock(Protocol):
    """Interface of both kinds of lock of ``threading``."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock; return whether it was acquired."""

    def release(self) -> None:
        """Release the lock."""

    def __enter__(self) -> bool: ...

    def __exit__(self, *error: Any) -> None: ...


checker: Callable[[str, Any], Lock] | None = None
"""Wraps new locks, given their names, while tests check the order."""


def lock(name: str) -> Lock:
    """Return a non-reentrant lock.

    Args:
        name: class and attribute.
    """
    plain = threading.Lock()
    return plain if checker is None else checker(name, plain)


def rlock(name: str) -> Lock:
    """Return a reentrant lock.

    Args:
        name: class and attribute.
    """
    plain = threading.RLock()
    return plain if checker is None else checker(name, plain)


def condition(name: str) -> threading.Condition:
    """Return a condition with a reentrant lock.

    Args:
        name: class and attribute.
    """
    made: Any = rlock(name)
    return threading.Condition(made)
