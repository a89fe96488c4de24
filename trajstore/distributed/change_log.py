"""A store's log of additions and evictions, for handles that draw from it. Pure; no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from trajstore._core.base.types import IntArray
from trajstore._core.sampling.base import Additions, Drawn, Fits, Sampler
from trajstore.errors import EmptyBufferError

_KEPT = 10_000


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes since the last request.

    Attributes:
        began: identifies the start of the store's process; pass it with the next request.
        cursor: position in the log; pass it with the next request.
        whole: True if the changes replace everything known before.
        changes: additions, and ids of evicted trajectories, in order.
        next_id: lower bound of future ids; all ids below it have been reported.
    """

    began: str
    cursor: int
    whole: bool
    changes: list[Additions | IntArray] = field(default_factory=list)
    next_id: int = 0


class ChangeLog(Sampler):
    """Keeps a bounded log of additions and evictions, received through the sampler interface.

    Guarded by ``Contents.lock`` of its store's buffer, like every sampler.

    Args:
        began: unique per start of the process; a handle with another value gets everything.
    """

    def __init__(self, began: str) -> None:
        self._began = began
        self._parts: list[Additions] = []
        self._changes: deque[Additions | IntArray] = deque(maxlen=_KEPT)
        self._end = 0

    @property
    def ids(self) -> IntArray:
        self._join()
        return self._parts[0].ids if self._parts else np.empty(0, np.int64)

    def added(self, additions: Additions) -> None:
        self._parts.append(additions)
        self._note(additions)

    def evicted(self, ids: Sequence[int] | IntArray) -> None:
        evicted = np.asarray(ids, np.int64)
        if not len(evicted):
            return
        self._join()
        if self._parts:
            self._parts = [without(self._parts[0], evicted)]
        self._note(evicted)

    def since(self, began: str, cursor: int) -> Changes:
        """Return the changes since a cursor; everything if it is too old or of an earlier process."""
        missed = self._end - cursor
        if began != self._began or not 0 <= missed <= len(self._changes):
            self._join()
            return Changes(self._began, self._end, True, list(self._parts))
        return Changes(self._began, self._end, False, list(self._changes)[len(self._changes) - missed :])

    def draw(self, count: int, generator: torch.Generator, first: int | None = None, fits: Fits | None = None) -> Drawn:
        raise EmptyBufferError("a log of changes is not drawn from")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the additions are reported again."""

    def _note(self, change: Additions | IntArray) -> None:
        self._changes.append(change)
        self._end += 1

    def _join(self) -> None:
        if len(self._parts) > 1:
            self._parts = [Additions.joined(self._parts)]


def without(part: Additions, evicted: IntArray) -> Additions:
    """Return additions without some of their trajectories."""
    return part.at(np.flatnonzero(~np.isin(part.ids, evicted)))
