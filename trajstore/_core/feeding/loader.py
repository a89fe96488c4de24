"""Loaders: batches for a learner, prepared while it computes."""

from __future__ import annotations

import os
import pickle
import weakref
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Generic, Self, TypeVar, Unpack

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from trajstore._core.base.arguments import rank_of_ranks, truth
from trajstore._core.base.closing import Closing
from trajstore._core.base.types import IntArray
from trajstore._core.buffer.reader import Reader
from trajstore._core.buffer.sampling import Batch
from trajstore._core.feeding.belonging import warn_of
from trajstore._core.feeding.memory import Memory, Ready, memory_for
from trajstore._core.feeding.options import BatchOptions, LoaderOptions, Replay, TokenOptions, device_of
from trajstore._core.feeding.prefetch import Prefetcher
from trajstore._core.feeding.shares import Share
from trajstore._core.feeding.source import BatchSource, Parts, Source, together
from trajstore._core.feeding.tokens import TokenSource
from trajstore._core.feeding.workers import Workers
from trajstore._core.sampling.base import Drawn
from trajstore._core.sampling.states import check_state, whole_in
from trajstore._core.sampling.weighted import WeightedSampler
from trajstore.errors import ConfigurationError, EpochsEndedError, StoreClosedError

T = TypeVar("T")


class Loader(IterableDataset[T], Closing, Generic[T]):
    """An iterator of batches that a thread draws and reads ahead; endless unless its sampler has epochs.

    The sequence of batches depends on the draws alone: prefetching, reused memory and ranks change when and where a
    batch is read, never its content. Iterate it in the training process; a DataLoader is unnecessary. In a DataLoader
    with ``batch_size=None`` and n workers, each worker reads every n-th batch of the same sequence. A second epoch
    needs ``persistent_workers=True``, or is refused, since new workers would repeat the first.
    """

    def __init__(self, source: Source, options: LoaderOptions, *, reuse: bool) -> None:
        self._prefetch = options.get("prefetch", 4)
        stores, rank = options.get("stores", "shared"), rank_of_ranks("rank", options.get("rank", (0, 1)))
        self._ranks = {"stores": stores, "rank": list(rank) if stores == "per_rank" else None}
        """Values that determine the sequence of batches; for ranks on one store, the store alone."""
        have_priorities = any(
            isinstance(sampler, WeightedSampler) and sampler.priorities for sampler in source.samplers
        )
        if have_priorities and rank[1] > 1 and stores == "shared":
            raise ConfigurationError(
                "rank: each rank draws the same batches by itself, but training would change its priorities "
                "differently; use a sampler without priorities, or a store for each rank (stores='per_rank')"
            )
        self._source = source
        self._records = any(ledger is not None for ledger in source.ledgers)
        self.policy_version: int | None = None
        """Version of the policy that trains on the next batch, for the ledger, which so knows the age of its rows."""
        self._device = device_of(options.get("device"))
        self._reuse = reuse
        self._timeout = options.get("timeout")
        self._memory()  # raises early on invalid options
        self._running: Prefetcher[Ready | None] | None = None
        self._dropped: weakref.finalize[..., Any] | None = None
        """Stops the thread once this loader is unreferenced."""
        self._pid = 0
        self._state: Mapping[str, Any] | None = None
        self._workers = Workers()
        self._closed = False

    def _memory(self) -> Memory:
        return memory_for(self._device, self._prefetch, reuse=self._reuse)

    @abstractmethod
    def _batch(self, values: Any, drawn: Parts) -> T:
        """Convert a batch that was read to the form that users get."""

    def __iter__(self) -> Self:
        """Return the iterator; all iterators of a loader share one sequence of batches."""
        return self

    def __next__(self) -> T:
        """Return the next batch.

        Raises:
            StopIteration: all epochs of the sampler are over.
            TimeoutError: no batch was ready in time; gives the reason.
            EmptyBufferError: a buffer has too few trajectories, or its sampler is exhausted, and none can arrive: for
                saved points opened read-only, and in DataLoader workers. Otherwise the loader waits.
            StoreClosedError: the loader or a buffer was closed; ready batches are discarded.
            StoreError: reading failed; every further call raises the same error.
            ConfigurationError: DataLoader workers of an earlier epoch have read these batches; or the ledger ends
                before the preceding batch.
            OSError: the ledger could not be written; the next call returns the same batch.
        """
        running = self._start()
        try:
            while True:
                drawn, ready = running.next(self._timeout, self._record if self._records else None)
                if ready is not None:  # else another worker's batch
                    return self._batch(ready.take(), drawn)
        except EpochsEndedError:
            raise StopIteration from None

    def _record(self, number: int, ready: Ready | None) -> None:
        columns_of_each = [] if ready is None else ready.columns
        for ledger, columns in zip(self._source.ledgers, columns_of_each, strict=False):
            if ledger is not None and columns is not None:
                ledger.record_batch(number, columns, self.policy_version)

    def _start(self) -> Prefetcher[Ready | None]:
        if self._closed:
            raise StoreClosedError("the loader was closed")
        running = self._mine()
        self._workers.begin()
        if running is None:
            self._source.continue_draws()
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

    def _mine(self) -> Prefetcher[Ready | None] | None:
        """Return this process's prefetcher, or None if not started.

        Raises:
            ConfigurationError: started in the parent process, and no state was loaded since the fork.
        """
        if self._running is None or self._pid == os.getpid():
            return self._running
        if self._state is None:
            raise ConfigurationError(
                "this loader was started in the parent process, which has its prefetched batches; "
                "call loader.load_state_dict(loader.state_dict()) before the workers are made, or spawn them"
            )
        return None

    def _end(self) -> None:
        if self._running is not None and self._dropped is not None and self._pid == os.getpid():
            self._running.stop_and_wait()
            self._dropped.detach()  # else it would keep ready batches until this loader is released

    def _prefetcher(self) -> Prefetcher[Ready | None]:
        memory, source = self._memory(), self._source  # not ``self``: the thread must not keep it alive
        records = self._records
        worker, reads = get_worker_info(), self._workers.reads

        def make(drawn: Parts, number: int) -> Ready | None:
            if not reads(number):
                return None
            ready = memory.read(lambda out: source.read(drawn, out), source.rows(drawn))
            return replace(ready, columns=source.columns(drawn)) if records else ready

        if records and worker is not None:
            raise ConfigurationError(
                "ledger: a DataLoader worker does not know which of its batches the learner gets; iterate the loader in"
                " the training process"
            )
        waits = source.grows and worker is None  # nothing adds or refreshes in a worker
        return Prefetcher(source, make, self._prefetch, waits=waits)

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch returned: generators, samplers, rows of batches under way.

        Plain containers, numbers and tensors, readable by ``torch.load`` with ``weights_only=True``.

        Raises:
            ConfigurationError: the loader was started in the parent process.
        """
        running = self._mine()
        if running is not None:
            state = {**running.state_dict(), "ranks": self._ranks}
            # Only workers count, each from the start: the first worker has the first batch.
            return state if get_worker_info() is not None else {**state, "handed_out": 0}
        if self._state is not None:
            return dict(self._state)
        begun = {"source": self._source.state_dict(), "under_way": [], "handed_out": 0, "batches": 0, "redrawn": 0}
        return {**begun, "ranks": self._ranks}

    def load_state_dict(self, state: Mapping[str, Any], *, changed: bool = False) -> None:
        """Continue after the batch at which a state was saved, with any number of ranks.

        The buffers must show the same trajectories: those of the same store, or of a copy. If some were added or
        evicted since, batches continue, with a warning that they differ from those of an uninterrupted run. A started
        loader restarts.

        Args:
            state: result of :meth:`state_dict`.
            changed: continue although the loader is configured for other batches (e.g. of another size). Batches under
                way are returned as drawn.

        Raises:
            ConfigurationError: the state is invalid, or of other trajectories, batches or samplers (the last may only
                be raised by ``next``); or it is of ranks with another kind of stores or, with a store per rank, of
                another rank. Nothing was changed.
        """
        counts = ("handed_out", "batches", "redrawn")
        if isinstance(state, Mapping) and state.get("limiter", ...) is None:  # an earlier state
            state = {name: value for name, value in state.items() if name != "limiter"}
        check_state(state, ("source", "under_way", *counts, "ranks"), only=True)
        for name in counts:
            whole_in(state, name)
        if state["ranks"] != self._ranks:
            raise ConfigurationError(
                f"the state is of a loader with {state['ranks']}, this one has {self._ranks}: ranks of a shared "
                "store can load each other's state; with a store per rank, only the same rank of as many"
            )
        check_state(state["source"], ())
        if truth("changed", changed):
            state = {**state, "source": self._source.changed(state["source"])}
        differences = self._source.check(state["source"])
        for rows in state["under_way"]:
            self._source.check_rows(rows)
        warn_of(differences)
        self._end()
        self._running = None
        self._state = state
        self._workers.restart()

    def figures(self) -> dict[str, float]:
        """Return flat numbers for metrics.

        ``batches_ready``: number of prefetched batches. ``batches_redrawn``: number of batches redrawn because a
        trajectory was evicted before it was read; only the first is logged. The source adds more.
        """
        running = self._running
        return {
            "batches_ready": 0.0 if running is None else float(running.ready),
            "batches_redrawn": 0.0 if running is None else float(running.redrawn),
            **self._source.figures(),
        }

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the thread; the buffers stay open. Idempotent."""
        self._closed = True
        self._end()

    def __getstate__(self) -> dict[str, Any]:
        if self._records:
            raise ConfigurationError(
                "ledger: cannot be sent to another process; iterate the loader in the training process"
            )
        # As bytes: torch would send a tensor as an open file, and file descriptors are scarce.
        state = pickle.dumps(self.state_dict())
        return {**self.__dict__, "_running": None, "_dropped": None, "_pid": 0, "_state": state}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update({**values, "_state": pickle.loads(values["_state"])})


class LoadedBatch(Batch):
    """A batch of a :class:`ReplayLoader`, with the rows of each buffer.

    Attributes:
        parts: rows drawn from each buffer, by name, in the order of the batch; ``"replay"`` is an only buffer.
    """

    def __init__(self, values: Mapping[str, Any], drawn: Drawn, parts: Mapping[str, Drawn]) -> None:
        super().__init__(values, drawn)
        self.parts = parts

    @property
    def sources(self) -> IntArray:
        """The buffer of each row, ``[n]``, as its place in :attr:`parts`."""
        return np.repeat(np.arange(len(self.parts)), [len(part) for part in self.parts.values()])


class ReplayLoader(Loader[LoadedBatch]):
    """An iterator of transition batches from a buffer, or from several in given shares.

    A batch is a nested dict of tensors ``[n, ...]``: rows of the first buffer, of the second one, and so on.
    ``batch.drawn`` and ``batch.weights`` have an element for each row. Rows of other buffers than the first have the id
    -1, which ``update_priorities`` ignores, and weight 1 if their sampler gives none; ``weights`` is None if no sampler
    gives any. ``batch.parts["demos"]`` has the ids of that buffer's rows, ``batch.sources`` the buffer of each row.

    Args:
        replay: buffer, or ``{"online": Share(buffer, weight=0.5), "demos": Share(other, weight=0.5)}``.
        batch_size: transitions per global batch.
        options: see :class:`~trajstore._core.feeding.options.BatchOptions` and
            :class:`~trajstore._core.feeding.options.LoaderOptions`.

    Raises:
        ConfigurationError: an argument is unknown or out of range.
    """

    def __init__(self, replay: Replay | Mapping[str, Share], batch_size: int, **options: Unpack[BatchOptions]) -> None:
        self._batches = BatchSource(replay, batch_size, **options)
        super().__init__(self._batches, options, reuse=options.get("reuse", False))

    def _batch(self, values: Any, drawn: Parts) -> LoadedBatch:
        part = self._batches.part(drawn)
        return LoadedBatch(values, together(part), dict(zip(self._batches.names, part, strict=True)))


class TokenLoader(Loader[list[dict[str, Any]]]):
    """An iterator of batches of whole agent trajectories, packed or padded to a token budget.

    A batch is a list of packs: this rank's share of ``batch_size`` packs, each a micro-batch of at most ``tokens``
    tokens. See :func:`~trajstore._core.feeding.packing.lay_out` for their content. Trajectories are never cut.

    Args:
        buffer: buffer of agent trajectories.
        tokens: maximum tokens per pack; with padding included.
        options: see :class:`~trajstore._core.feeding.options.TokenOptions` and
            :class:`~trajstore._core.feeding.options.LoaderOptions`.

    Raises:
        ConfigurationError: an argument is unknown or out of range.
    """

    def __init__(self, buffer: Reader, tokens: int, **options: Unpack[TokenOptions]) -> None:
        super().__init__(TokenSource(buffer, tokens, **options), options, reuse=False)

    def _batch(self, values: Any, drawn: Parts) -> list[dict[str, Any]]:
        packs: list[dict[str, Any]] = values
        return packs
