"""What a buffer shows stands still while the process forks.

A lock that another thread holds at that moment would stay locked in the child for ever. So the locks of all contents,
and then those of their running copies, are taken before and given back after.
"""

from __future__ import annotations

import os
import weakref
from functools import partial
from typing import Protocol

from trajstore.core.base.locks import Lock
from trajstore.core.reading.address_table import AddressTable


class Standing(Protocol):
    """Contents, as far as a fork is concerned; ``lock`` may be held by their own thread already."""

    @property
    def lock(self) -> Lock:
        """Guards the addresses too, all but its running copies."""

    @property
    def addresses(self) -> AddressTable:
        """Where rows are, and which copies are running."""


_living: weakref.WeakSet[Standing] = weakref.WeakSet()
_locked: list[Standing] = []
_still: list[Standing] = []
"""Whose copies stand still too. Each is noted when it was done, so that what went wrong half-way can be undone."""


def stop_at_forks(contents: Standing) -> None:
    """Let contents stand still whenever the process forks, for as long as they live."""
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
        except RuntimeError:  # another thread has made contents just now, which only it knows
            continue


def _after_fork(*, in_child: bool = False) -> None:
    while _still:
        _still.pop().addresses.copies.go_on(in_child=in_child)
    while _locked:
        _locked.pop().lock.release()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=partial(_after_fork, in_child=True)
)
