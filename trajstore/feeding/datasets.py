"""The datasets of RLinf, by its names and arguments: a worker that imports them from here trains as before."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset

from trajstore.arguments import whole
from trajstore.buffer.replay_buffer import TrajectoryReplayBuffer
from trajstore.errors import StoreClosedError
from trajstore.feeding.loader import ReplayLoader
from trajstore.feeding.options import BatchOptions
from trajstore.feeding.source import BatchSource

_LOOK_AGAIN = 0.01
"""Seconds between two looks at buffers that are not ready."""


class ReplayBufferDataset(IterableDataset[dict[str, Any]]):
    """Endless batches, drawn when asked for: half replay and half demonstrations, where there are any.

    Args:
        replay_buffer: buffer of rollouts.
        demo_buffer: buffer of demonstrations, or None.
        batch_size: transitions of a batch; with demonstrations ``batch_size // 2`` from each buffer.
        min_replay_buffer_size: trajectories that ``replay_buffer`` must hold before the first batch.
        min_demo_buffer_size: the same for ``demo_buffer``.
        prefetch_size: of no effect here; RLinf's workers give it to whichever dataset they make.

    Raises:
        ConfigurationError: an argument is out of range.
    """

    def __init__(
        self,
        replay_buffer: TrajectoryReplayBuffer,
        demo_buffer: TrajectoryReplayBuffer | None,
        batch_size: int,
        min_replay_buffer_size: int,
        min_demo_buffer_size: int,
        prefetch_size: int = 5,
    ) -> None:
        batch_size = whole("batch_size", batch_size, 1)
        min_replay_buffer_size = whole("min_replay_buffer_size", min_replay_buffer_size, 0)
        if demo_buffer is not None:
            min_demo_buffer_size = whole("min_demo_buffer_size", min_demo_buffer_size, 0)
        prefetch_size = whole("prefetch_size", prefetch_size, 0)
        self.replay_buffer = replay_buffer
        self.demo_buffer = demo_buffer
        self.batch_size = batch_size
        self.min_replay_buffer_size = min_replay_buffer_size
        self.min_demo_buffer_size = min_demo_buffer_size
        self.prefetch_size = prefetch_size
        # RLinf draws the same number from both, so of an odd size one transition less.
        drawn = batch_size if demo_buffer is None else 2 * (batch_size // 2)
        options: BatchOptions = {"min_size": min_replay_buffer_size}
        if demo_buffer is not None:
            options |= {"demos": demo_buffer, "min_demo_size": min_demo_buffer_size}
        self._closed = False
        self._begin(drawn, options)

    def _begin(self, batch_size: int, options: BatchOptions) -> None:
        self._source = BatchSource(self.replay_buffer, batch_size, **options)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield batches, from when both buffers hold as much as they must until :meth:`close`.

        Raises:
            StoreClosedError: a buffer was closed.
        """
        while not self._closed:
            if self._source.closed:
                raise StoreClosedError("the buffer of this dataset was closed")
            if self._source.ready():
                yield self._source.read(self._source.draw())
            else:
                time.sleep(_LOOK_AGAIN)

    def state_dict(self) -> dict[str, Any]:
        """Return the buffers' generators."""
        return self._source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the buffers' generators."""
        self._source.load_state_dict(state)

    def close(self) -> None:
        """Yield no more; the buffers stay open."""
        self._closed = True


class PreloadReplayBufferDataset(ReplayBufferDataset):
    """The same, but ``prefetch_size`` batches are made ahead by a thread."""

    def _begin(self, batch_size: int, options: BatchOptions) -> None:
        options["prefetch"] = self.prefetch_size
        self._loader = ReplayLoader(self.replay_buffer, batch_size, **options)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Return the iterator."""
        return iter(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state: generators, and the rows of batches made ahead."""
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the loader's state."""
        self._loader.load_state_dict(state)

    def close(self) -> None:
        """End the thread; the buffers stay open."""
        super().close()
        self._loader.close()


def replay_buffer_collate_fn(batch: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the one batch that a DataLoader of these datasets wraps into a list."""
    return batch[0]
