"""Ids and lengths of many trajectories in 9 bytes each. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from trajstore._core.base.types import IntArray
from trajstore._core.sampling.base import Drawn
from trajstore.distributed.server import MOST_STORES

_PAGE_BITS = 16
_FEW = 1 << 20
_BLOCK = 16
"""Trajectories between two sums of samples in tables of more than :data:`_FEW`, to be added up in a search."""


@dataclass(frozen=True, slots=True, eq=False)
class CompactTable:
    """Immutable table of trajectories, ordered by id; their samples are numbered in that order.

    Ids with the same upper bits form a page, and only their lower bits are stored: 2 bytes each, and 16 for each page.
    Lengths take 2 bytes where all are below 65,536.

    Attributes:
        pages: ids above the lower bits, ascending, ``[pages]``.
        starts: position of the first trajectory of each page, and the number of trajectories, ``[pages + 1]``.
        lower: lower bits of the ids, uint16, ``[n]``.
        samples: transitions of each trajectory, in the smallest dtype that holds all, ``[n]``.
        before: samples before every trajectory, or every 16th of many, and of all.
        marks: 32 bits of each UUID, ``[n]``; equal ones may be copies of one trajectory. 0 = unknown.
    """

    pages: IntArray
    starts: IntArray
    lower: npt.NDArray[np.uint16]
    samples: npt.NDArray[np.unsignedinteger]
    before: IntArray
    marks: npt.NDArray[np.uint32]

    @staticmethod
    def of(ids: IntArray, samples: npt.NDArray[np.integer], names: IntArray) -> CompactTable:
        """Return a table of trajectories, given in the order of ids.

        Args:
            ids: ascending, ``[n]``.
            samples: transitions of each, ``[n]``.
            names: first half of each UUID, ``[n]``; 0 = unknown.
        """
        upper = ids >> _PAGE_BITS
        first = np.flatnonzero(np.diff(upper, prepend=-1))
        small = samples.astype(np.min_scalar_type(max(int(samples.max(initial=0)), 1 << 15)))
        return CompactTable(
            upper[first],
            np.append(first, len(ids)).astype(np.int64),
            ids.astype(np.uint16),
            small,
            _before(small),
            marks_of(names),
        )

    def __len__(self) -> int:
        return len(self.lower)

    @property
    def _step(self) -> int:
        return _step(len(self))

    @property
    def total_samples(self) -> int:
        """Number of samples."""
        return int(self.before[-1])

    @property
    def ids(self) -> IntArray:
        """All ids, ascending; decoded for this call."""
        ids: IntArray = np.repeat(self.pages << _PAGE_BITS, np.diff(self.starts))
        ids += self.lower
        return ids

    def ids_at(self, positions: IntArray) -> IntArray:
        """Return the ids at these positions."""
        page = np.searchsorted(self.starts, positions, side="right") - 1
        ids: IntArray = (self.pages[page] << _PAGE_BITS) + self.lower[positions]
        return ids

    def find(self, ids: IntArray) -> IntArray:
        """Return the position of each id; -1 if it is absent."""
        page = np.searchsorted(self.pages, ids >> _PAGE_BITS)
        there = page < len(self.pages)
        there[there] = self.pages[page[there]] == ids[there] >> _PAGE_BITS
        low, end = self.starts[page[there]], self.starts[page[there] + 1]
        wanted, last = ids[there] & 0xFFFF, end - 1
        while len(low) and (low < end).any():  # a binary search for all ids at once
            middle = np.minimum((low + end) >> 1, last)
            less = self.lower[middle] < wanted
            open_ = low < end
            low = np.where(open_ & less, middle + 1, low)
            end = np.where(open_ & ~less, middle, end)
        positions = np.full(len(ids), -1, np.int64)
        low = np.minimum(low, last)
        positions[there] = np.where(self.lower[low] == wanted, low, -1)
        return positions

    def rows(self, places: IntArray) -> tuple[IntArray, IntArray]:
        """Return for each sample, given by its number, the position of its trajectory and its row in it."""
        block = np.searchsorted(self.before, places, side="right") - 1
        rest = places - self.before[block]
        if self._step == 1:
            return block, rest
        positions = block * _BLOCK
        inside = np.minimum(positions[:, None] + np.arange(_BLOCK), len(self) - 1)
        ends = np.cumsum(self.samples[inside], axis=1, dtype=np.int64)
        passed = np.count_nonzero(ends <= rest[:, None], axis=1)
        at = np.arange(len(places))
        rest -= np.where(passed, ends[at, passed - 1], 0)
        return positions + passed, rest

    def drawn(self, places: IntArray) -> Drawn:
        """Return the draw of samples given by their numbers."""
        positions, rows = self.rows(places)
        return Drawn(self.ids_at(positions), rows)

    def samples_before(self, position: int) -> int:
        """Return the number of samples of the trajectories before a position."""
        block = position // self._step
        return int(self.before[block] + self.samples[block * self._step : position].sum(dtype=np.int64))

    @property
    def counts(self) -> dict[int, int]:
        """Number of trajectories of each store, by rank."""
        counts = np.bincount(self.lower & (MOST_STORES - 1), minlength=1)
        return {rank: int(counts[rank]) for rank in np.flatnonzero(counts).tolist()}

    def marked(self, marks: npt.NDArray[np.uint32]) -> IntArray:
        """Return the positions of the trajectories with one of these marks."""
        if not len(self) or not len(marks):
            return np.zeros(0, np.int64)
        possible = np.zeros(1 << 16, np.bool_)  # by lower bits first: most trajectories need no more
        possible[marks.astype(np.uint16)] = True
        at = np.flatnonzero(possible[self.marks.astype(np.uint16)])
        at = at[np.isin(self.marks[at], marks)]
        positions: IntArray = at[self.marks[at] != 0].astype(np.int64)
        return positions

    def of_ranks(self, ranks: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Return a mask of the trajectories of these stores."""
        wanted = np.zeros(MOST_STORES, np.bool_)
        wanted[list(ranks)] = True
        mask: npt.NDArray[np.bool_] = wanted[self.lower & (MOST_STORES - 1)]
        return mask

    def kept(self, mask: npt.NDArray[np.bool_]) -> CompactTable:
        """Return the table without the trajectories that the mask leaves out."""
        if not len(self):
            return self
        counts = np.add.reduceat(mask, self.starts[:-1], dtype=np.int64)
        samples = self.samples[mask]
        return CompactTable(
            self.pages[counts > 0],
            np.concatenate([[0], np.cumsum(counts[counts > 0])]).astype(np.int64),
            self.lower[mask],
            samples,
            _before(samples),
            self.marks[mask],
        )

    def with_rows(self, ids: IntArray, samples: IntArray, names: IntArray) -> CompactTable:
        """Return the table with more trajectories, in the order of ids, see :meth:`of`.

        Those with ids above all others are appended, in time proportional to the table's bytes; others are merged.
        """
        fresh = CompactTable.of(ids, samples, names)
        if not len(self) or not len(fresh):
            return fresh if not len(self) else self
        all_samples = np.concatenate([self.samples, fresh.samples])
        marks = np.concatenate([self.marks, fresh.marks])
        if ids[0] > self.ids_at(np.array([len(self) - 1]))[0]:
            same = int(self.pages[-1] == fresh.pages[0])
            return CompactTable(
                np.concatenate([self.pages, fresh.pages[same:]]),
                np.concatenate([self.starts[:-1], len(self) + fresh.starts[same:]]),
                np.concatenate([self.lower, fresh.lower]),
                all_samples,
                _before(all_samples),
                marks,
            )
        every = np.concatenate([self.ids, ids])
        order = np.argsort(every, kind="stable")
        merged = CompactTable.of(every[order], all_samples[order], np.zeros(0, np.int64))
        return replace(merged, marks=marks[order])


def marks_of(names: IntArray) -> npt.NDArray[np.uint32]:
    """Return 32 bits of names; 0 for unknown ones only, except for one name in 4 billion."""
    marks: npt.NDArray[np.uint32] = (names >> 32).astype(np.uint32)
    return marks


def _step(count: int) -> int:
    return 1 if count <= _FEW else _BLOCK


def _before(samples: npt.NDArray[np.unsignedinteger]) -> IntArray:
    """Return the samples before every trajectory, or every 16th of many, and of all."""
    if not len(samples):
        return np.zeros(1, np.int64)
    sums = np.add.reduceat(samples, np.arange(0, len(samples), _step(len(samples))), dtype=np.int64)
    return np.concatenate([[0], np.cumsum(sums)]).astype(np.int64)
