"""Loaders: batches for a learner, made while it computes."""

from __future__ import annotations

import os
import pickle
import weakref
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, Self, TypeVar, Unpack

from torch.utils.data import IterableDataset, get_worker_info

from trajstore.core.base.arguments import truth
from trajstore.core.base.closing import Closing
from trajstore.core.buffer.reader import Reader
from trajstore.core.buffer.sampling import Batch
from trajstore.core.feeding.belonging import tell
from trajstore.core.feeding.memory import Memory, Ready, memory_for, nbytes_of
from trajstore.core.feeding.options import BatchOptions, LoaderOptions, Replay, TokenOptions, device_of
from trajstore.core.feeding.prefetch import Prefetcher
from trajstore.core.feeding.source import BatchSource, DrawnBatch, Source
from trajstore.core.feeding.tokens import TokenSource
from trajstore.core.sampling.base import Drawn
from trajstore.core.sampling.states import check_state
from trajstore.core.sampling.weighted import WeightedSampler
from trajstore.errors import ConfigurationError, EpochsEndedError, StoreClosedError

D = TypeVar("D")
T = TypeVar("T")


class Loader(IterableDataset[T], Closing, Generic[D, T]):
    """An iterator of batches that a thread draws and reads ahead; it ends only where its sampler's epochs do.

    The sequence of batches is that of the draws alone: prefetching, reused memory and ranks change when and where a
    batch is read, never what is in it. Iterate it in the process that trains; it needs no DataLoader. Inside one with
    ``batch_size=None`` and n workers, each reads every n-th batch of the same sequence.
    """

    def __init__(self, source: Source[D], options: LoaderOptions, *, reuse: bool, even: bool) -> None:
        self._prefetch = options.get("prefetch", 4)
        self._prefetch_bytes = options.get("prefetch_bytes")
        sampler = options.get("sampler")
        stores, rank = options.get("stores", "shared"), options.get("rank", (0, 1))
        self._ranks = {"stores": stores, "rank": list(rank) if stores == "per_rank" else None}
        """What the sequence of batches depends on: of ranks on one store, on nothing but the store."""
        if isinstance(sampler, WeightedSampler) and sampler.priorities and rank[1] > 1 and stores == "shared":
            raise ConfigurationError(
                "rank: ranks draw the same batches each by itself, and priorities that training changes would differ "
                "between them; use a sampler without priorities, or let each rank draw from a store of its own"
            )
        self._source = source
        self._device = device_of(options.get("device"))
        self._reuse, self._even = reuse, even
        self._timeout = options.get("timeout")
        self._memory()  # refuses now what could not work later
        self._running: Prefetcher[D, Ready | None] | None = None
        self._dropped: weakref.finalize[..., Any] | None = None
        """Ends the thread where nobody holds this loader any more."""
        self._pid = 0
        self._state: Mapping[str, Any] | None = None
        self._closed = False

    def _memory(self) -> Memory:
        return memory_for(self._device, self._prefetch, reuse=self._reuse, even=self._even)

    @abstractmethod
    def _batch(self, values: Any, drawn: D) -> T:
        """Return a batch that was read as users get it."""

    def __iter__(self) -> Self:
        """Return the iterator; all iterators of a loader share one sequence of batches."""
        return self

    def __next__(self) -> T:
        """Return the next batch.

        Raises:
            StopIteration: all epochs of the sampler have been drawn.
            TimeoutError: none was ready in time; says what is waited for.
            EmptyBufferError: the sampler has nothing left to draw, and no trajectories can come: of a saved point that
                was opened to read, and in a worker of a DataLoader. Elsewhere they are waited for.
            StoreClosedError: the loader, or a buffer, was closed; batches that were ready are not given any more.
            StoreError: reading failed; every further call raises the same.
        """
        running = self._start()
        try:
            while True:
                drawn, ready = running.next(self._timeout)
                if ready is not None:  # else it is another worker's
                    return self._batch(ready.take(), drawn)
        except EpochsEndedError:
            raise StopIteration from None

    def _start(self) -> Prefetcher[D, Ready | None]:
        if self._closed:
            raise StoreClosedError("the loader was closed")
        running = self._mine()
        if running is None:
            running = self._prefetcher()
            if self._state is not None:
                running.load_state_dict(self._state)
                self._state = None
            self._pid = os.getpid()
            self._running = running
            self._dropped = weakref.finalize(self, running.stop)
            self._dropped.atexit = False
            running.start()
        return running

    def _mine(self) -> Prefetcher[D, Ready | None] | None:
        """Return what makes batches in this process; None before that.

        Raises:
            ConfigurationError: the process that forked this one makes them, and no state has been loaded since.
        """
        if self._running is None or self._pid == os.getpid():
            return self._running
        if self._state is None:
            raise ConfigurationError(
                "this loader has begun in the process that forked this one, which has the batches that were made "
                "ahead; call loader.load_state_dict(loader.state_dict()) before the workers are made, or spawn them"
            )
        return None

    def _end(self) -> None:
        if self._running is not None and self._dropped is not None and self._pid == os.getpid():
            self._running.close()
            self._dropped.detach()  # else it would keep the batches that were ready until this loader goes

    def _prefetcher(self) -> Prefetcher[D, Ready | None]:
        memory, source = self._memory(), self._source  # not this loader: the thread must not keep it
        worker = get_worker_info()

        def make(drawn: D, number: int) -> tuple[Ready | None, int]:
            if worker is not None and number % worker.num_workers != worker.id:
                return None, 0
            ready = memory.read(lambda out: source.read(drawn, out), source.rows(drawn))
            return ready, nbytes_of(ready.values)

        waits = source.grows and worker is None  # nobody adds or refreshes in a worker
        return Prefetcher(source, make, self._prefetch, self._prefetch_bytes, waits=waits)

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the batch that ``next`` gave last: generators, samplers, rows of batches under way.

        Plain containers, numbers and tensors: ``torch.load`` reads it with ``weights_only=True``.

        Raises:
            ConfigurationError: it has begun in the process that forked this one.
        """
        running = self._mine()
        if running is not None:
            state = {**running.state_dict(), "ranks": self._ranks}
            # Workers alone count, each from where all began: the first worker has the first batch.
            return state if get_worker_info() is not None else {**state, "handed_out": 0}
        if self._state is not None:
            return dict(self._state)
        begun = {"source": self._source.state_dict(), "under_way": [], "handed_out": 0, "redrawn": 0}
        return {**begun, "ranks": self._ranks}

    def load_state_dict(self, state: Mapping[str, Any], *, changed: bool = False) -> None:
        """Go on after the batch at which a state was taken, with any number of ranks.

        The buffers must show the trajectories that they showed then: the same store, or a copy of it. Where some have
        come or gone since, batches go on, and a warning says that they are not those of a run without a break. A loader
        that has begun begins anew.

        Args:
            state: what :meth:`state_dict` returned.
            changed: go on although the loader was made for other batches (of another size, say). Batches that were
                under way come as they were drawn.

        Raises:
            ConfigurationError: it is no state of such a loader; it is of other trajectories, other batches, or another
                sampler (the last may also be said by ``next``); it is of ranks with stores of another kind, or, of
                ranks with a store each, of another rank. Nothing was changed.
        """
        check_state(state, ("source", "under_way", "handed_out", "redrawn", "ranks"))
        if state["ranks"] != self._ranks:
            raise ConfigurationError(
                f"the state is of a loader with {state['ranks']}, this one has {self._ranks}: ranks on one shared "
                "store take up each other's state, a rank with a store of its own that of the same rank of as many"
            )
        check_state(state["source"], ())
        if truth("changed", changed):
            state = {**state, "source": self._source.changed(state["source"])}
        told = self._source.check(state["source"])
        for rows in state["under_way"]:
            self._source.check_rows(rows)
        tell(told)
        self._end()
        self._running = None
        self._state = state

    def figures(self) -> dict[str, float]:
        """Return flat numbers for metrics.

        ``batches_ready``: made and not handed out. ``batches_redrawn``: drawn anew because a trajectory of theirs was
        evicted before it was read; the log tells of the first only. Further ones are the source's.
        """
        running = self._running
        return {
            "batches_ready": 0.0 if running is None else float(running.ready),
            "batches_redrawn": 0.0 if running is None else float(running.redrawn),
            **self._source.figures(),
        }

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """End the thread; the buffers stay open. Closing again does nothing."""
        self._closed = True
        self._end()

    def __getstate__(self) -> dict[str, Any]:
        # As bytes: torch would send a tensor as an open file, of which there are few.
        state = pickle.dumps(self.state_dict())
        return {**self.__dict__, "_running": None, "_dropped": None, "_pid": 0, "_state": state}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update({**values, "_state": pickle.loads(values["_state"])})


class ReplayLoader(Loader[DrawnBatch, Batch]):
    """An iterator of batches of transitions from a replay buffer, or from one and a buffer of demonstrations.

    A batch is a nested dict of tensors ``[n, ...]``; ``batch.drawn`` says which rows of ``replay`` it holds (they come
    before the demonstrations), and ``batch.weights`` how much each of these counts, where the sampler says so.

    Args:
        replay: buffer of rollouts.
        batch_size: transitions of a global batch.
        options: see :class:`~trajstore.core.feeding.options.BatchOptions` and
            :class:`~trajstore.core.feeding.options.LoaderOptions`.

    Raises:
        ConfigurationError: an argument is unknown or out of range.
    """

    def __init__(self, replay: Replay, batch_size: int, **options: Unpack[BatchOptions]) -> None:
        self._batches = BatchSource(replay, batch_size, **options)
        super().__init__(self._batches, options, reuse=options.get("reuse", False), even=True)

    def _batch(self, values: Any, drawn: DrawnBatch) -> Batch:
        return Batch(values, self._batches.part(drawn).replay)


class TokenLoader(Loader[tuple[Drawn, ...], list[dict[str, Any]]]):
    """An iterator of batches of whole agent trajectories, packed or padded to a budget of tokens.

    A batch is a list of packs: this rank's share of ``batch_size`` of them, each a micro-batch of at most ``tokens``
    tokens. What a pack holds says :func:`~trajstore.core.feeding.packing.lay_out`. Nothing is ever cut.

    Args:
        buffer: of agent trajectories.
        tokens: most tokens of a pack; of a padded one, with what it is filled up with.
        options: see :class:`~trajstore.core.feeding.options.TokenOptions` and
            :class:`~trajstore.core.feeding.options.LoaderOptions`.

    Raises:
        ConfigurationError: an argument is unknown or out of range.
    """

    def __init__(self, buffer: Reader, tokens: int, **options: Unpack[TokenOptions]) -> None:
        super().__init__(TokenSource(buffer, tokens, **options), options, reuse=False, even=False)

    def _batch(self, values: Any, drawn: tuple[Drawn, ...]) -> list[dict[str, Any]]:
        packs: list[dict[str, Any]] = values
        return packs
