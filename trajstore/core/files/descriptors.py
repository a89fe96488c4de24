"""Descriptors of files and folders that are held open, and what becomes of them in a forked child."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable


class Descriptor:
    """An open file or folder, closed when nobody holds this object any more.

    Args:
        number: the descriptor, which now belongs to this object.
        of_process: for locks: a forked child closes its copy at once. The system gives a lock back when the last copy
            of its descriptor is closed, so a child that outlives its parent would hold what it does not know of.
    """

    __slots__ = ("__weakref__", "_number")

    def __init__(self, number: int, *, of_process: bool = False) -> None:
        self._number: int | None = number
        if of_process:
            _of_process.add(self)

    @property
    def number(self) -> int:
        """The descriptor, for calls to the system; only while it is open."""
        if self._number is None:
            raise ValueError("the descriptor was closed")
        return self._number

    @property
    def is_open(self) -> bool:
        """Whether it was not closed yet."""
        return self._number is not None

    def close(self, close: Callable[[int], None] = os.close) -> None:
        """Close it. Closing again does nothing."""
        number, self._number = self._number, None
        if number is not None:
            close(number)

    def __del__(self) -> None:
        self.close()


_of_process: weakref.WeakSet[Descriptor] = weakref.WeakSet()


def _close_in_child() -> None:
    for descriptor in list(_of_process):
        descriptor.close()


os.register_at_fork(after_in_child=_close_in_child)
