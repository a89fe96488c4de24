"""The datasets of RLinf, by its names and arguments: a worker that imports them from here trains as before."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from trajstore.core.base.arguments import whole
from trajstore.core.buffer.replay_buffer import TrajectoryReplayBuffer
from trajstore.core.feeding.loader import ReplayLoader
from trajstore.core.feeding.options import BatchOptions
from trajstore.core.feeding.source import BatchSource
from trajstore.errors import StoreClosedError

_LOOK_AGAIN = 0.01
"""Seconds between two looks at buffers that are not ready."""
_LOOK_UP = 0.5
"""Seconds of waiting for a batch after which the attributes are looked at again."""


@dataclass(eq=False, repr=False)
class ReplayBufferDataset(IterableDataset[dict[str, Any]]):
    """Endless batches, drawn when asked for: half replay and half demonstrations, where there are any.

    Of both, the columns that they have in common. Attributes may be set at any time, as RLinf's workers do: the next
    batch goes by them.

    Args:
        replay_buffer: buffer of rollouts.
        demo_buffer: buffer of demonstrations, or None.
        batch_size: transitions of a batch; with demonstrations ``batch_size // 2`` from each buffer.
        min_replay_buffer_size: trajectories that ``replay_buffer`` must hold before the first batch.
        min_demo_buffer_size: the same for ``demo_buffer``.
        prefetch_size: of no effect here; RLinf's workers give it to whichever dataset they make.
        columns: names of the columns to read; None = all.

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

    def __post_init__(self) -> None:
        self._closed = False
        self._made_of: tuple[Any, ...] = ()
        self._up_to_date()

    def _up_to_date(self) -> bool:
        """Make what draws anew if an attribute was set since; return whether none was.

        Raises:
            ConfigurationError: one is out of range.
        """
        sizes = (self.batch_size, self.min_replay_buffer_size, self.min_demo_buffer_size, self.prefetch_size)
        told = (self.replay_buffer, self.demo_buffer, *sizes, self.columns)
        if told == self._made_of:
            return True
        size = whole("batch_size", self.batch_size, 1)
        options: BatchOptions = {"columns": self.columns}
        options["min_size"] = whole("min_replay_buffer_size", self.min_replay_buffer_size, 0)
        whole("prefetch_size", self.prefetch_size, 0)
        if self.demo_buffer is not None:
            least = whole("min_demo_buffer_size", self.min_demo_buffer_size, 0)
            options |= {"demos": self.demo_buffer, "min_demo_size": least, "common_columns": True}
            size = 2 * (size // 2)  # RLinf draws the same number from both
        self._draws = self._begin(size, options)
        self._made_of = told
        return False

    def _begin(self, batch_size: int, options: BatchOptions) -> BatchSource | ReplayLoader:
        """Return what draws from now on."""
        self._source = BatchSource(self.replay_buffer, batch_size, **options)
        return self._source

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield batches, from when both buffers hold as much as they must until :meth:`close`.

        Raises:
            StoreClosedError: a buffer was closed.
        """
        while not self._closed:
            self._up_to_date()
            if self._source.closed:
                raise StoreClosedError("the buffer of this dataset was closed")
            if self._source.ready():
                yield self._source.read(self._source.draw())
            else:
                time.sleep(_LOOK_AGAIN)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of what draws: generators; with a thread also the rows of batches made ahead."""
        self._up_to_date()
        return self._draws.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what :meth:`state_dict` returned."""
        self._up_to_date()
        self._draws.load_state_dict(state)

    def close(self) -> None:
        """Yield no more; the buffers stay open."""
        self._closed = True


class PreloadReplayBufferDataset(ReplayBufferDataset):
    """The same, but ``prefetch_size`` batches are made ahead by a thread.

    Batches that were made ahead when an attribute is set are given first, unless it is one of the buffers.
    """

    _loader: ReplayLoader

    def _begin(self, batch_size: int, options: BatchOptions) -> ReplayLoader:
        options |= {"prefetch": self.prefetch_size, "timeout": _LOOK_UP}
        loader = ReplayLoader(self.replay_buffer, batch_size, **options)
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
            except TimeoutError:  # an attribute may have been set meanwhile
                continue

    def close(self) -> None:
        """End the thread; the buffers stay open."""
        super().close()
        self._loader.close()


def replay_buffer_collate_fn(batch: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the one batch that a DataLoader of these datasets wraps into a list."""
    return batch[0]
