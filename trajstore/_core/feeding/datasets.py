"""RLinf's datasets, with its names and arguments; workers only change the import."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from trajstore._core.base.arguments import whole
from trajstore._core.buffer.replay_buffer import TrajectoryReplayBuffer
from trajstore._core.feeding.loader import ReplayLoader
from trajstore._core.feeding.options import BatchOptions
from trajstore._core.feeding.shares import Share
from trajstore._core.feeding.source import BatchSource
from trajstore._core.feeding.workers import Workers
from trajstore.errors import StoreClosedError

_LOOK_AGAIN = 0.01
"""Seconds between checks of buffers that are not ready."""
_LOOK_UP = 0.5
"""Seconds of waiting for a batch between checks of the attributes."""


@dataclass(eq=False, repr=False)
class ReplayBufferDataset(IterableDataset[dict[str, Any]]):
    """Endless batches, drawn on demand: half replay and half demonstrations, if given.

    Batches have the columns common to both buffers. Attributes may be set at any time, as RLinf's workers do; the next
    batch uses them. In a DataLoader with n workers, each worker reads every n-th batch; a second epoch needs
    ``persistent_workers=True``.

    Args:
        replay_buffer: buffer of rollouts.
        demo_buffer: buffer of demonstrations, or None.
        batch_size: transitions per batch; with demonstrations, ``batch_size // 2`` from each buffer.
        min_replay_buffer_size: minimum trajectories in ``replay_buffer`` before the first batch.
        min_demo_buffer_size: minimum trajectories in ``demo_buffer``.
        prefetch_size: ignored; RLinf's workers pass it to all their datasets.
        columns: names of the columns to read; None = all.
        where: draw only trajectories of ``replay_buffer`` that match this condition; None = all.

    Raises:
        ConfigurationError: an argument is out of range.
    """

    replay_buffer: TrajectoryReplayBuffer
    demo_buffer: TrajectoryReplayBuffer | None
    batch_size: int
    min_replay_buffer_size: int
    min_demo_buffer_size: int
    prefetch_size: int = 5
    columns: Sequence[str] | None = None
    where: str | None = None

    def __post_init__(self) -> None:
        self._closed = False
        self._workers = Workers()
        self._number = 0
        """Number of batches drawn, by all workers together."""
        self._made_of: tuple[Any, ...] = ()
        self._up_to_date()

    def _up_to_date(self) -> bool:
        """Rebuild the source if an attribute was set; return True if none was.

        Raises:
            ConfigurationError: an attribute is out of range.
        """
        sizes = (self.batch_size, self.min_replay_buffer_size, self.min_demo_buffer_size, self.prefetch_size)
        arguments = (self.replay_buffer, self.demo_buffer, *sizes, self.columns, self.where)
        if arguments == self._made_of:
            return True
        size = whole("batch_size", self.batch_size, 1)
        least = whole("min_replay_buffer_size", self.min_replay_buffer_size, 0)
        whole("prefetch_size", self.prefetch_size, 0)
        shares = {"replay": Share(self.replay_buffer, where=self.where, min_size=least)}
        if self.demo_buffer is not None:
            least = whole("min_demo_buffer_size", self.min_demo_buffer_size, 0)
            shares["demonstrations"] = Share(self.demo_buffer, min_size=least)
            size = 2 * (size // 2)  # RLinf draws the same number from both
        self._draws = self._begin(shares, size, {"columns": self.columns, "common_columns": len(shares) > 1})
        self._made_of = arguments
        return False

    def _begin(self, shares: Mapping[str, Share], batch_size: int, options: BatchOptions) -> BatchSource | ReplayLoader:
        """Return a new source with the current attributes."""
        self._source = BatchSource(shares, batch_size, **options)
        return self._source

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield batches once both buffers are filled, until :meth:`close`.

        Raises:
            StoreClosedError: a buffer was closed.
            ConfigurationError: DataLoader workers of an earlier epoch have read these batches.
        """
        while not self._closed:
            self._up_to_date()
            self._workers.begin()
            self._source.continue_draws()
            if self._source.closed:
                raise StoreClosedError("the buffer of this dataset was closed")
            if self._source.ready():
                drawn = self._source.draw()
                self._number += 1
                if self._workers.reads(self._number - 1):
                    yield self._source.read(drawn)
            else:
                time.sleep(_LOOK_AGAIN)

    def state_dict(self) -> dict[str, Any]:
        """Return the source's state: generators, and with a thread also the rows of prefetched batches."""
        self._up_to_date()
        return self._draws.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a :meth:`state_dict`."""
        self._up_to_date()
        self._draws.load_state_dict(state)
        self._workers.restart()

    def close(self) -> None:
        """Stop yielding; the buffers stay open."""
        self._closed = True


class PreloadReplayBufferDataset(ReplayBufferDataset):
    """As :class:`ReplayBufferDataset`, with ``prefetch_size`` batches made ahead by a thread.

    Setting an attribute does not discard batches made ahead, unless it is a buffer.
    """

    _loader: ReplayLoader

    def _begin(self, shares: Mapping[str, Share], batch_size: int, options: BatchOptions) -> ReplayLoader:
        options |= {"prefetch": self.prefetch_size, "timeout": _LOOK_UP}
        loader = ReplayLoader(shares, batch_size, **options)
        if self._made_of:
            if self._made_of[:2] == (self.replay_buffer, self.demo_buffer):
                loader.load_state_dict(self._loader.state_dict(), changed=True)
            self._loader.close()
        self._loader = loader
        return loader

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield batches, as the other dataset does."""
        while not self._closed:
            self._up_to_date()
            try:
                yield next(self._loader)
            except TimeoutError:  # check the attributes again
                continue

    def close(self) -> None:
        """Stop the thread; the buffers stay open."""
        super().close()
        self._loader.close()


def replay_buffer_collate_fn(batch: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Unwrap the batch from the one-element list that a DataLoader of these datasets makes."""
    return batch[0]
