"""The loader: batches for a learner, made while it computes."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils.data import IterableDataset, get_worker_info

from trajstore.buffer.replay_buffer import TrajectoryReplayBuffer
from trajstore.errors import ConfigurationError, StoreClosedError
from trajstore.feeding.memory import Ready, memory_for, nbytes_of
from trajstore.feeding.prefetch import Prefetcher
from trajstore.feeding.source import BatchSource, DrawnBatch
from trajstore.sampling.base import Sampler


class ReplayLoader(IterableDataset[dict[str, Any]]):
    """An endless iterator of batches from a replay buffer, or from one and a buffer of demonstrations.

    A thread draws and reads batches ahead. The sequence of batches is that of the draws alone: prefetching, reused
    memory and ranks change when and where a batch is read, never what is in it. Iterate it in the process that trains;
    it needs no DataLoader. Inside one with ``batch_size=None`` and n workers, each reads every n-th batch of the same
    sequence.

    Args:
        replay: buffer of rollouts.
        batch_size: transitions of a global batch.
        demos: buffer of demonstrations that are mixed into each batch.
        demo_share: which part of a batch they are.
        min_size: trajectories that ``replay`` must hold before the first batch.
        min_demo_size: the same for ``demos``.
        sampler: chooses from ``replay`` instead of its uniform draws.
        demo_sampler: the same for ``demos``.
        columns: dotted names of the columns to read; None = all.
        prefetch: batches that are kept ready.
        prefetch_bytes: bytes of batches that are kept ready; None = no bound.
        device: where batches go; a CUDA device gets them through pinned memory, on a stream of its own.
        reuse: batches on the CPU take turns in the same memory; each is valid until the next one is asked for.
        rank: (r, W): this is rank r of W, and gets its part of every global batch.
        timeout: seconds after which ``next`` raises TimeoutError; None waits for as long as it takes.

    Raises:
        ConfigurationError: an argument is out of range.
    """

    def __init__(
        self,
        replay: TrajectoryReplayBuffer,
        batch_size: int,
        *,
        demos: TrajectoryReplayBuffer | None = None,
        demo_share: float = 0.5,
        min_size: int = 1,
        min_demo_size: int = 1,
        sampler: Sampler | None = None,
        demo_sampler: Sampler | None = None,
        columns: Sequence[str] | None = None,
        prefetch: int = 2,
        prefetch_bytes: int | None = None,
        device: torch.device | str | None = None,
        reuse: bool = False,
        rank: tuple[int, int] = (0, 1),
        timeout: float | None = None,
    ) -> None:
        if prefetch < 1 or (prefetch_bytes is not None and prefetch_bytes < 1):
            raise ConfigurationError(f"prefetch {prefetch} and prefetch_bytes {prefetch_bytes} must be at least 1")
        self._source = BatchSource(
            replay,
            batch_size,
            demos=demos,
            demo_share=demo_share,
            min_size=min_size,
            min_demo_size=min_demo_size,
            sampler=sampler,
            demo_sampler=demo_sampler,
            columns=columns,
            rank=rank,
        )
        self._prefetch, self._prefetch_bytes = prefetch, prefetch_bytes
        self._device = None if device is None else torch.device(device)
        self._reuse = reuse
        self._timeout = timeout
        memory_for(self._device, reuse, prefetch)  # refuses now what could not work later
        self._running: Prefetcher[Ready | None] | None = None
        self._pid = 0
        self._state: Mapping[str, Any] | None = None
        self._closed = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Return the iterator; all iterators of a loader share one sequence of batches."""
        return self

    def __next__(self) -> dict[str, Any]:
        """Return the next batch.

        Raises:
            TimeoutError: none was ready in time.
            StoreClosedError: the loader, or a buffer, was closed.
            StoreError: reading failed; every further call raises the same.
        """
        running = self._start()
        while (ready := running.next(self._timeout)) is None:  # another worker's
            pass
        return ready.take()

    def _start(self) -> Prefetcher[Ready | None]:
        if self._closed:
            raise StoreClosedError("the loader was closed")
        if self._running is None or self._pid != os.getpid():  # a forked worker has no thread of its parent's
            self._pid = os.getpid()
            self._running = self._prefetcher()
            if self._state is not None:
                self._running.load_state_dict(self._state)
                self._state = None
            self._running.start()
        return self._running

    def _prefetcher(self) -> Prefetcher[Ready | None]:
        memory = memory_for(self._device, self._reuse, self._prefetch)
        worker = get_worker_info()

        def make(drawn: DrawnBatch, number: int) -> tuple[Ready | None, int]:
            if worker is not None and number % worker.num_workers != worker.id:
                return None, 0
            part = self._source.part(drawn)
            ready = memory.read(lambda out: self._source.read(part, out), len(part))
            return ready, nbytes_of(ready.values)

        return Prefetcher(self._source, make, self._prefetch, self._prefetch_bytes)

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the batch that ``next`` gave last: generators, samplers, rows of batches under way."""
        if self._running is not None and self._pid == os.getpid():
            return self._running.state_dict()
        if self._state is not None:
            return dict(self._state)
        return {"source": self._source.state_dict(), "under_way": [], "handed_out": 0}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the batch at which a state was taken, with any number of ranks.

        The buffers must hold what they held then. A loader that has begun begins anew.
        """
        if self._running is not None:
            self._running.close()
            self._running = None
        self._state = state

    def figures(self) -> dict[str, float]:
        """Return flat numbers for metrics: batches ready, batches drawn anew."""
        running = self._running
        return {
            "batches_ready": 0.0 if running is None else float(running.ready),
            "batches_redrawn": 0.0 if running is None else float(running.redrawn),
        }

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """End the thread; the buffers stay open. Closing again does nothing."""
        self._closed = True
        if self._running is not None and self._pid == os.getpid():
            self._running.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        # As bytes: torch would send a tensor as an open file, of which there are few.
        state = pickle.dumps(self.state_dict())
        return {**self.__dict__, "_running": None, "_pid": 0, "_state": state}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update({**values, "_state": pickle.loads(values["_state"])})
