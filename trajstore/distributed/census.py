"""What all stores together hold, as one handle knows it; draws are made here, without asking anybody. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trajstore.distributed.roll import News, joined, without
from trajstore.errors import EmptyBufferError
from trajstore.sampling.base import Additions, Drawn, IntArray, Sampler


class Census:
    """Trajectories by store, in the order in which each store took them.

    Draws are uniform over all samples (T·B) of the stores that answer, with replacement, like those of one buffer.
    """

    def __init__(self) -> None:
        self._parts: dict[int, list[Additions]] = {}
        self._heard: dict[int, tuple[str, int]] = {}
        self._absent: set[int] = set()
        self._table: tuple[IntArray, IntArray] | None = None
        self.revision = 0

    def heard(self, rank: int) -> tuple[str, int]:
        """Return how far a store has told, see :class:`News`."""
        return self._heard.get(rank, ("", -1))

    def take(self, rank: int, news: News) -> None:
        """Take in what a store has told."""
        parts = self._parts.setdefault(rank, [])
        if news.whole:
            parts.clear()
        for change in news.changes:
            if isinstance(change, Additions):
                parts.append(change)
            elif parts:
                parts[:] = [without(joined(parts), change)]
        if news.whole or news.changes or rank in self._absent:
            self._changed()
        self._absent.discard(rank)
        self._heard[rank] = news.began, news.cursor

    def leave_out(self, rank: int) -> int:
        """Draw no more from a store until it tells something again; return how many trajectories that leaves out."""
        if rank in self._absent:
            return 0
        self._absent.add(rank)
        self._changed()
        return self.count(rank)

    def count(self, rank: int) -> int:
        """Return the number of trajectories that a store has told of."""
        return sum(len(part) for part in self._parts.get(rank, ()))

    @property
    def absent(self) -> list[int]:
        """Ranks of the stores that are left out."""
        return sorted(self._absent)

    def __len__(self) -> int:
        """Number of trajectories that can be drawn."""
        return len(self._rows()[0])

    @property
    def ids(self) -> IntArray:
        """Their ids, store by store."""
        return self._rows()[0]

    @property
    def total_samples(self) -> int:
        """Their samples, T·B summed."""
        ends = self._rows()[1]
        return int(ends[-1]) if len(ends) else 0

    def samples(self, count: int, generator: torch.Generator) -> Drawn:
        """Draw samples, uniformly with replacement.

        Raises:
            EmptyBufferError: there is nothing to draw from.
        """
        ids, ends = self._rows()
        self._check_any(ids)
        places = torch.randint(0, int(ends[-1]), (count,), generator=generator).numpy()
        at = np.searchsorted(ends, places, side="right")
        before = np.concatenate([[0], ends[:-1]])
        return Drawn(ids[at], (places - before[at]).astype(np.int64))

    def trajectories(self, count: int, generator: torch.Generator) -> IntArray:
        """Draw trajectories, uniformly, none twice; all if ``count`` is larger. Return their ids.

        Raises:
            EmptyBufferError: there is nothing to draw from.
        """
        ids, _ = self._rows()
        self._check_any(ids)
        chosen: IntArray = ids[torch.randperm(len(ids), generator=generator)[:count].numpy()]
        return chosen

    def tell(self, sampler: Sampler) -> None:
        """Tell a sampler of what can be drawn now."""
        present, known = self._rows()[0], sampler.ids
        sampler.evicted(np.setdiff1d(known, present))
        for rank in sorted(self._parts):
            if rank in self._absent or not self._parts[rank]:
                continue
            part = joined(self._parts[rank])
            fresh = without(part, known)
            if len(fresh):
                sampler.added(fresh)

    def _rows(self) -> tuple[IntArray, IntArray]:
        if self._table is None:
            parts = [part for rank in sorted(self._parts) if rank not in self._absent for part in self._parts[rank]]
            ids = np.concatenate([np.empty(0, np.int64), *(part.ids for part in parts)])
            samples = np.concatenate([np.empty(0, np.int64), *(part.samples for part in parts)])
            self._table = ids, np.cumsum(samples)
        return self._table

    def _check_any(self, ids: Sequence[int] | IntArray) -> None:
        if not len(ids):
            left_out = f"; {len(self._absent)} stores do not answer: {self.absent}" if self._absent else ""
            raise EmptyBufferError(f"cannot sample: no store holds a trajectory{left_out}")

    def _changed(self) -> None:
        self._table = None
        self.revision += 1
