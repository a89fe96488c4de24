"""A replay buffer on many machines, for producers and learners: found by name, used like a buffer."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Self

import torch

from trajstore import locks
from trajstore.arguments import check_kind
from trajstore.buffer.choices import Batch
from trajstore.buffer.intake import flatten_all
from trajstore.closing import Closing
from trajstore.columns.fields import nest
from trajstore.distributed.actors import NAMESPACE, Stores, ray
from trajstore.distributed.census import Census
from trajstore.distributed.options import HandleOptions, handle_options
from trajstore.distributed.reads import Reads
from trajstore.distributed.receipts import Outbox, Receipt
from trajstore.distributed.routes import Routes
from trajstore.distributed.server import MOST_STORES, ServedStore
from trajstore.distributed.starting import start_stores, strategies
from trajstore.distributed.survey import Survey
from trajstore.errors import ConfigurationError, StoreNotFoundError, StoreUnreachableError
from trajstore.sampling.base import Drawn, Sampler
from trajstore.sampling.draws import Draws
from trajstore.trajectory import AnyTrajectory

logger = logging.getLogger(__name__)


class DistributedReplayBuffer(Closing):
    """Handle of a buffer whose stores are actors of Ray. Make one with :meth:`create` or :meth:`connect`.

    Every process has its own handle; one that is sent to another process connects there. Safe to call from several
    threads.

    Args:
        stores: the actors.
        near: ranks of the stores on this node.
        options: of this handle.
    """

    def __init__(self, stores: Stores, near: Sequence[int], options: HandleOptions) -> None:
        self._stores = stores
        self._options = options
        first = int(ray().get_runtime_context().get_worker_id()[-8:], 16)
        routes = Routes(near, stores.ranks, options.patience, first)
        self._lock = locks.rlock("DistributedReplayBuffer._lock")
        self._outbox = Outbox(stores, routes, options)
        self._draws = Draws(options.seed)
        self._survey = Survey(stores, routes, options.refresh_interval)
        self._reads = Reads(stores)
        self._closed = False

    # -- making and finding -----------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        name: str,
        path: str | Path,
        *,
        stores: int | Literal["per_node"] = 1,
        options: Mapping[str, Any] | None = None,
        actor_options: Mapping[str, Any] | None = None,
        scheduling_strategy: Any = None,
        shared_path: bool = False,
        namespace: str = NAMESPACE,
        **handle: Any,
    ) -> Self:
        """Start the stores that are not there yet, and return a handle.

        Calling it again after nodes have joined starts a store on each of them; after a loss, on a node that has the
        directories again, it starts the lost ones.

        Args:
            name: of the buffer, by which :meth:`connect` finds it.
            path: folder of the stores, ``rank_0``, ``rank_1``, ...; the same on every node, on its own disk or not.
            stores: how many, or one on each node.
            options: how each makes its :class:`~trajstore.TrajectoryReplayBuffer` (``retention``, ``writer``, ...).
            actor_options: for Ray's actors (``num_cpus``, ``resources``, ``memory``).
            scheduling_strategy: Ray's, for all stores; None = spread over the nodes.
            shared_path: all nodes reach the same directories, so that a lost node's store may be started elsewhere.
            namespace: of the actors.
            handle: options of the handle, see :meth:`connect`.

        Raises:
            ConfigurationError: an argument is out of range; or the stores are there, with another path or options.
            StoreUnreachableError: a store does not start; says why.
        """
        check_kind("path", path, str | Path, "a path")
        checked = handle_options(handle)
        placed = strategies(stores, scheduling_strategy, shared_path)
        known = Stores(name, namespace, checked.deadline)
        per_node = stores == "per_node"
        found = start_stores(known, str(path), placed, options or {}, actor_options or {}, per_node=per_node)
        return cls._of(found, checked)

    @classmethod
    def connect(cls, name: str, *, namespace: str = NAMESPACE, **handle: Any) -> Self:
        """Return a handle of a buffer that :meth:`create` has started, in this or another process.

        Args:
            name: of the buffer.
            namespace: of its actors.
            handle: see :class:`~trajstore.distributed.options.HandleOptions`.

        Raises:
            StoreNotFoundError: no such buffer.
            ConfigurationError: an option is unknown or out of range.
        """
        checked = handle_options(handle)
        stores = Stores(name, namespace, checked.deadline)
        if not stores.ranks:
            raise StoreNotFoundError(f"no stores named {name!r} in Ray's namespace {namespace!r}; create() starts them")
        return cls._of(stores, checked)

    @classmethod
    def _of(cls, stores: Stores, options: HandleOptions) -> Self:
        node = ray().get_runtime_context().get_node_id()
        near = []
        for rank in stores.ranks:
            try:
                if stores.describe(rank).node == node:
                    near.append(rank)
            except StoreUnreachableError as error:
                logger.warning("%s; its trajectories are left out until it answers", error)
        return cls(stores, near, options)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _connected, (self._stores.name, self._stores.namespace, asdict(self._options))

    # -- adding -----------------------------------------------------------------------------------

    def add_trajectories(self, trajectories: Iterable[AnyTrajectory]) -> Receipt:
        """Send trajectories to a store, without waiting for it; return a receipt.

        The tensors are copied before this returns. However often they must be sent again, because an actor or a node
        was killed, a store keeps them once. Waits while ``max_pending_bytes`` are under way.

        Raises:
            InvalidTrajectoryError: one cannot be stored; nothing was sent.
            StoreUnreachableError, StoreWriteError: trajectories sent before cannot be stored at present.
        """
        flats = flatten_all(trajectories)
        self._check_open()
        return self._outbox.send(flats)

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything that this handle has added survives the kill of any process.

        Raises:
            TimeoutError: ``timeout`` seconds passed.
            StoreUnreachableError, StoreWriteError: see :meth:`Receipt.committed`.
        """
        self._outbox.flush(timeout)

    # -- drawing ----------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Learn what the stores have added and evicted since.

        Stores that do not answer are left out of draws, which is told once; they come back when they answer.
        """
        self._check_open()
        with self._lock:
            self._survey.refresh(True)

    def draw(self, count: int, *, sampler: Sampler | None = None) -> Drawn:
        """Choose transitions among all stores that answer, uniformly with replacement or by a sampler.

        Raises:
            EmptyBufferError: there is nothing to draw from.
        """
        with self._lock:
            census = self._look(sampler)
            if sampler is None:
                return census.samples(count, self._draws.generator)
            return sampler.draw(count, self._draws.generator)

    def _look(self, sampler: Sampler | None) -> Census:
        self._check_open()
        return self._survey.look(sampler)

    def read(
        self, drawn: Drawn, *, columns: Sequence[str] | None = None, out: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, Any]:
        """Return transitions that :meth:`draw` chose, as :meth:`sample` returns them.

        Stores whose directory this machine has are read from it, mapped; the others are asked.

        Raises:
            TrajectoryUnavailableError: one of their trajectories has been evicted since.
            SchemaMismatchError: their trajectories differ in their columns.
            StoreUnreachableError: a store has not answered for the handle's deadline.
        """
        return nest(self._reads.rows(drawn, columns, out))

    def sample(
        self,
        num_chunks: int,
        *,
        columns: Sequence[str] | None = None,
        out: Mapping[str, torch.Tensor] | None = None,
        sampler: Sampler | None = None,
    ) -> dict[str, Any]:
        """Draw transitions and return them; see :meth:`TrajectoryReplayBuffer.sample`.

        Raises:
            EmptyBufferError: there is nothing to draw from.
            TrajectoryUnavailableError, SchemaMismatchError, StoreUnreachableError: see :meth:`read`.
        """
        if num_chunks <= 0:
            raise ConfigurationError(f"num_chunks: {num_chunks}, must be positive")
        drawn = self.draw(num_chunks, sampler=sampler)
        found = self.read(drawn, columns=columns, out=out)
        return found if sampler is None else Batch(found, drawn)

    def sample_trajectories(self, count: int, *, sampler: Sampler | None = None) -> list[AnyTrajectory]:
        """Draw whole trajectories, none twice unless the sampler says so; all if ``count`` is larger.

        Raises:
            EmptyBufferError: there is nothing to draw from.
        """
        with self._lock:
            census = self._look(sampler)
            if sampler is None:
                ids = census.trajectories(count, self._draws.generator)
            else:
                if sampler.unit != "trajectory":
                    raise ConfigurationError("this sampler draws transitions; make it with unit='trajectory'")
                ids = sampler.draw(count, self._draws.generator).ids
        return self._reads.trajectories(ids.tolist())

    def follow(self, sampler: Sampler) -> None:
        """Tell a sampler of the trajectories that are there now; before its state is loaded."""
        with self._lock:
            self._look(sampler)

    def get(self, trajectory_id: int) -> AnyTrajectory:
        """Return a trajectory by id.

        Raises:
            TrajectoryUnavailableError: there is none.
            StoreUnreachableError: its store does not answer.
        """
        return self._reads.trajectories([trajectory_id])[0]

    # -- looking ----------------------------------------------------------------------------------

    @property
    def stores(self) -> list[int]:
        """Ranks of the stores."""
        return self._stores.ranks

    def nodes(self) -> dict[int, str]:
        """Return the node of each store, as Ray calls it, by rank.

        Raises:
            StoreUnreachableError: a store does not answer.
        """
        return {rank: self._stores.describe(rank).node for rank in self._stores.look()}

    def served(self) -> list[ServedStore]:
        """Return what each store says of itself: its rank, the run's path, host and node.

        Raises:
            StoreUnreachableError: one does not answer.
        """
        return [self._stores.describe(rank) for rank in self._stores.look()]

    @property
    def size(self) -> int:
        """Number of trajectories in the stores that answered last; as of the last :meth:`refresh`."""
        with self._lock:
            return len(self._survey.census)

    def __len__(self) -> int:
        return self.size

    @property
    def total_samples(self) -> int:
        """Number of their samples, T·B summed."""
        with self._lock:
            return self._survey.census.total_samples

    def is_ready(self, min_size: int) -> bool:
        """Return whether there are at least ``min_size`` trajectories; asks the stores."""
        with self._lock:
            self._survey.refresh(self.size < min_size)
            return self.size >= min_size

    def get_stats(self) -> dict[str, float]:
        """Return flat numbers: those of the stores that answer, added up; and of this handle.

        ``stores`` and ``absent_stores``; ``pending_parcels`` sent by this handle and not known to be committed.
        """
        total: dict[str, float] = {}
        with self._lock:
            self._survey.refresh(True)
            absent = self._survey.census.absent
            for rank in self._stores.ranks:
                if rank not in absent:
                    for name, value in self._stores.call(rank, "stats").items():
                        total[name] = total.get(name, 0) + value
            total["stores"] = len(self._stores.ranks)
            total["absent_stores"] = len(absent)
            total["pending_parcels"] = self._outbox.parcels
        return total

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`load_state_dict` needs to draw on as if nothing had happened."""
        return self._draws.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the draws where :meth:`state_dict` left them."""
        self._draws.load_state_dict(state)

    # -- changing ---------------------------------------------------------------------------------

    def evict(self, ids: Sequence[int]) -> None:
        """Delete trajectories, durably, in the stores that have them; ids that are evicted already are passed over.

        Raises:
            StoreUnreachableError: a store has not answered; those of the others are deleted.
        """
        for rank in sorted({number % MOST_STORES for number in ids}):
            self._stores.call(rank, "evict", [number for number in ids if number % MOST_STORES == rank])
        self.refresh()

    def save_checkpoint(self, path: str | Path) -> None:
        """Save every store to ``path/rank_<r>``, on its own machine; what this handle has added is in it.

        Raises:
            StoreUnreachableError: a store has not answered: those saved before are there, the checkpoint is not whole.
        """
        self.flush()
        for rank in self._stores.look():
            self._stores.call(rank, "save_checkpoint", str(path))

    def pin(self, name: str) -> dict[int, int]:
        """Pin every store: keep its present state readable under a name; return the generations by rank."""
        self.flush()
        return {rank: self._stores.call(rank, "pin", name) for rank in self._stores.look()}

    def unpin(self, name: str) -> None:
        """Let go of the checkpoints inside the stores."""
        for rank in self._stores.look():
            self._stores.call(rank, "unpin", name)

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Flush what this handle has added. The stores go on; :meth:`stop` ends them.

        Raises:
            StoreUnreachableError, StoreWriteError: something is not committed; says how much.
        """
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self._closed = True
            self._reads.close()

    def stop(self) -> None:
        """Close the stores and end their actors. Their directories stay; :meth:`create` goes on with them."""
        self.close()
        for rank in self._stores.look():
            self._stores.stop(rank)

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigurationError(f"the handle of {self._stores.name!r} is closed; connect again")

    def __del__(self) -> None:
        waiting = 0 if getattr(self, "_closed", True) else self._outbox.trajectories
        if waiting:
            warnings.warn(
                f"a handle of {self._stores.name!r} was let go while {waiting} trajectories were not known to be "
                "committed; close() it, or keep it",
                ResourceWarning,
                stacklevel=1,
            )


def _connected(name: str, namespace: str, options: Mapping[str, Any]) -> DistributedReplayBuffer:
    return DistributedReplayBuffer.connect(name, namespace=namespace, **options)
