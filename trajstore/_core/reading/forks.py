"""Keeps buffer contents consistent while the process forks.

A lock held by another thread during a fork would stay locked in the child forever. So the locks of all contents, and
then those of their running copies, are acquired before the fork and released after it.
"""

from __future__ import annotations

import os
import weakref
from functools import partial
from typing import Protocol

from trajstore._core.base.locks import Lock
from trajstore._core.reading.address_table import AddressTable


class Standing(Protocol):
    """Contents as the fork handlers see them; their own thread may already hold ``lock``."""

    @property
    def lock(self) -> Lock:
        """Guards the addresses too, except their running copies."""

    @property
    def addresses(self) -> AddressTable:
        """Addresses of rows, and the running copies."""


_living: weakref.WeakSet[Standing] = weakref.WeakSet()
_locked: list[Standing] = []
_still: list[Standing] = []
"""Contents whose copies are stopped; recorded one by one, so that a partial stop can be undone."""


def stop_at_forks(contents: Standing) -> None:
    """Lock these contents during forks, for as long as they live."""
    _living.add(contents)


def _before_fork() -> None:
    for contents in _all():
        contents.lock.acquire()
        _locked.append(contents)
    for contents in _locked:
        contents.addresses.copies.stop()
        _still.append(contents)


def _all() -> list[Standing]:
    while True:
        try:
            return list(_living)
        except RuntimeError:  # another thread just added contents; no other thread uses them yet
            continue


def _after_fork(*, in_child: bool = False) -> None:
    while _still:
        _still.pop().addresses.copies.go_on(in_child=in_child)
    while _locked:
        _locked.pop().lock.release()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=partial(_after_fork, in_child=True)
)
