"""A replay buffer on many machines, for producers and learners: found by name, used like a buffer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from trajstore.core.base.arguments import check_kind, one_of
from trajstore.core.base.closing import Closing
from trajstore.core.buffer.content_watch import ContentWatch
from trajstore.distributed.actors import NAMESPACE, Stores, ray
from trajstore.distributed.options import HandleOptions, handle_options
from trajstore.distributed.receipts import Outbox, Receipt
from trajstore.distributed.routes import Routes
from trajstore.distributed.saving import RestorableHandle
from trajstore.distributed.server import MOST_STORES
from trajstore.distributed.starting import everywhere, start_stores
from trajstore.errors import StoreNotFoundError, StoreUnreachableError
from trajstore.query import RELATIONS, Query
from trajstore.query.engine import polars
from trajstore.query.relations import TRAJECTORIES, Asked, Found, scan
from trajstore.remote.mirror.options import MirrorState
from trajstore.trajectory import AnyTrajectory

if TYPE_CHECKING:
    from polars import DataFrame

_PLACE = "place among the facts"
"""A column of tables that are put together, called as no fact can be."""


class DistributedReplayBuffer(RestorableHandle, Closing):
    """Handle of a buffer whose stores are actors of Ray. Make one with :meth:`create` or :meth:`connect`.

    Every process has its own handle; one that is sent to another process connects there. Safe to call from several
    threads.

    Args:
        stores: the actors.
        near: ranks of the stores on this node.
        options: of this handle.
    """

    def __init__(self, stores: Stores, near: Sequence[int], options: HandleOptions) -> None:
        first = int(ray().get_runtime_context().get_worker_id()[-8:], 16)
        routes = Routes(near, stores.all_ranks, options.patience, first)
        super().__init__(stores, routes, options)
        self._outbox = Outbox(stores, routes, options)
        self._content = ContentWatch()

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
        directories again, it starts the lost ones. A warning names every directory of the run that no store serves, and
        every node that gets no store.

        Args:
            name: of the buffer, by which :meth:`connect` finds it.
            path: folder of the stores, ``rank_0``, ``rank_1``, ...; the same on every node, on its own disk or not. A
                relative one is that of this process.
            stores: how many, or one on each node.
            options: how each makes its :class:`~trajstore.TrajectoryReplayBuffer` (``retention``, ``writer``, ...).
            actor_options: for Ray's actors: what each reserves on its node (``num_cpus``, 1 unless given;
                ``resources``, ``memory``), and other options of Ray's.
            scheduling_strategy: Ray's, for all stores; None = spread over the nodes.
            shared_path: all nodes reach the same directories, so that a lost node's store may be started elsewhere.
            namespace: of the actors.
            handle: options of the handle, see :meth:`connect`.

        Raises:
            ConfigurationError: an argument is out of range; or the stores are there, with another path or options.
            StoreUnreachableError: a store has not begun for ``deadline`` seconds, as where Ray has no room for it; says
                what it reserves and what is free.
        """
        check_kind("path", path, str | Path, "a path")
        checked, where = handle_options(handle), everywhere(path)
        known = Stores(name, namespace, checked.deadline)
        found = start_stores(known, where, stores, options or {}, actor_options or {}, scheduling_strategy, shared_path)
        return cls._of(found, checked)

    @classmethod
    def connect(cls, name: str, *, namespace: str = NAMESPACE, **handle: Any) -> Self:
        """Return a handle of a buffer that :meth:`create` has started, in this or another process.

        Stores that are lost, or do not answer for ``deadline`` seconds, are named in a warning.

        Args:
            name: of the buffer.
            namespace: of its actors.
            handle: see :class:`~trajstore.distributed.options.HandleOptions`.

        Raises:
            StoreNotFoundError: no such buffer.
            StoreUnreachableError: all its stores are lost.
            ConfigurationError: an option is unknown or out of range.
        """
        checked = handle_options(handle)
        stores = Stores(name, namespace, checked.deadline)
        if not stores.all_ranks:
            raise StoreNotFoundError(f"no stores named {name!r} in Ray's namespace {namespace!r}; create() starts them")
        if not stores.ranks:
            raise StoreUnreachableError(stores.loss())
        return cls._of(stores, checked)

    @classmethod
    def _of(cls, stores: Stores, options: HandleOptions) -> Self:
        node = ray().get_runtime_context().get_node_id()
        near = [rank for rank, about in stores.described().items() if about.node == node]
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
        flats = self._content.flatten(trajectories)
        self._check_open()
        return self._outbox.send(flats)

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything that this handle has added survives the kill of any process.

        Raises:
            TimeoutError: ``timeout`` seconds passed.
            StoreUnreachableError, StoreWriteError: see :meth:`Receipt.committed`.
        """
        self._outbox.flush(timeout)

    # -- asking -----------------------------------------------------------------------------------

    def query(self, relation: str = "trajectories") -> Query:
        """Ask about the trajectories of all stores; see :meth:`TrajectoryReplayBuffer.query`.

        Each answer takes the facts of all trajectories, some 126 bytes each, from the stores. Messages, tokens and
        steps are read by the stores that have them, which send the rows of which all conditions hold. Needs Polars
        (extra ``query``), here and there.

        Args:
            relation: what a row is: ``"trajectories"``, ``"messages"``, ``"tokens"`` or ``"steps"``.

        Raises:
            ConfigurationError: there is no such relation.
            StoreUnreachableError: of the answer; a store does not answer.
        """
        return Query(
            self._facts,
            partial(scan, self._rows, self._late_rows),
            one_of("relation", relation, (TRAJECTORIES, *RELATIONS)),
        )

    def _facts(self) -> DataFrame:
        """Return the facts of all trajectories, the oldest first; of one that lies in two stores, those of one.

        Raises:
            StoreUnreachableError: a store does not answer.
        """
        self.refresh()
        with self._lock:
            copies = self._survey.census.copies_of(self._survey.census.ids).tolist()
        found = self._stores.call_all(dict.fromkeys(self._all_ranks(), ()), "facts")
        tables = [found[rank] for rank in sorted(found)]
        pl = polars()
        facts: DataFrame = pl.concat(tables, how="diagonal_relaxed").sort("committed", maintain_order=True)
        return facts.filter(~pl.col("trajectory_id").is_in(copies)) if copies else facts

    def _late_rows(self, relation: str) -> dict[str, bool]:
        """Return which values by row are columns of a relation; see :data:`trajstore.query.relations.Late`.

        Raises:
            StoreUnreachableError: a store does not answer.
        """
        found: dict[str, bool] = {}
        for told in self._stores.call_all(dict.fromkeys(self._all_ranks(), (relation,)), "late_rows").values():
            found |= {name: several or found.get(name, False) for name, several in told.items()}
        return found

    def _rows(self, asked: Asked) -> Found:
        """Return messages, tokens or steps of some trajectories.

        Raises:
            StoreUnreachableError: a store does not answer.
        """
        self._check_open()
        pl = polars()
        placed = asked.facts.with_row_index(_PLACE)
        parts = placed.group_by(pl.col("trajectory_id") % MOST_STORES)
        wanted = [*asked.wanted, _PLACE]
        of_ranks = {rank: (replace(asked, facts=part, wanted=wanted),) for (rank,), part in parts}
        answers = self._stores.call_all(of_ranks, "rows").values()
        tables = [table for some, _ in answers for table in some]
        whole = [pl.concat(tables).sort(_PLACE, maintain_order=True).drop(_PLACE)] if tables else []
        return whole, [fault for _, faults in answers for fault in faults]

    # -- changing ---------------------------------------------------------------------------------

    def evict(self, ids: Sequence[int]) -> None:
        """Delete trajectories, durably, in the stores that have them; ids that are evicted already are passed over.

        Raises:
            StoreUnreachableError: a store has not answered; those of the others are deleted.
        """
        with self._lock:
            copies = self._survey.census.copies_of(np.asarray(ids, np.int64)).tolist()
        wanted = [*map(int, ids), *copies]
        ranks = sorted({number % MOST_STORES for number in wanted})
        mine = {rank: ([number for number in wanted if number % MOST_STORES == rank],) for rank in ranks}
        self._stores.call_all(mine, "evict")
        self.refresh()

    def clear(self) -> None:
        """Delete all trajectories of all stores. Ids go on; they are never given twice.

        Raises:
            StoreUnreachableError: a store has not answered; those of the others are deleted.
        """
        self.flush()
        self._stores.call_all(dict.fromkeys(self._all_ranks(), ()), "clear")
        self.refresh()

    def compact(self) -> None:
        """Give back the disk space of evicted trajectories, see :meth:`TrajectoryReplayBuffer.compact`.

        Raises:
            StoreUnreachableError, StoreWriteError: a store has not; the others have.
        """
        self._stores.call_all(dict.fromkeys(self._all_ranks(), ()), "compact")

    @property
    def mirror(self) -> MirrorsOfHandle:
        """The mirrors of the stores: how far they are, and waiting for them."""
        return MirrorsOfHandle(self._stores)

    def get_stats(self) -> dict[str, float]:
        """Return flat numbers: those of the stores that answer, added up; and of this handle.

        ``stores``, and how many of them do not answer (``absent_stores``); ``pending_parcels`` sent by this handle and
        not known to be committed.
        """
        return {**super().get_stats(), "pending_parcels": self._outbox.parcels}

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
        for rank in self._all_ranks():
            self._stores.stop(rank)

    def __del__(self) -> None:
        waiting = 0 if getattr(self, "_closed", True) else self._outbox.trajectories
        if waiting:
            warnings.warn(
                f"a handle of {self._stores.name!r} was let go while {waiting} trajectories were not known to be "
                "committed; close() it, or keep it",
                ResourceWarning,
                stacklevel=1,
            )


@dataclass(frozen=True, slots=True)
class MirrorsOfHandle:
    """``handle.mirror``: how far the mirrors of the stores are, and waiting for them.

    Args:
        _stores: of the handle.
    """

    _stores: Stores

    def states(self) -> dict[int, MirrorState | None]:
        """Return what is on the mirror of each store, by rank; None without one.

        Raises:
            StoreUnreachableError: a store does not answer.
        """
        return self._stores.call_all(dict.fromkeys(self._stores.look_whole(), ()), "mirror_state")

    def wait(self, ids: Sequence[int], timeout: float) -> bool:
        """Wait until trajectories are on the mirrors of their stores; return whether all are after ``timeout`` seconds.

        Raises:
            StoreError: the stores have no mirrors.
            StoreUnreachableError: a store does not answer.
        """
        ranks = sorted({number % MOST_STORES for number in ids})
        mine = {rank: ([number for number in ids if number % MOST_STORES == rank], timeout) for rank in ranks}
        return all(self._stores.call_all(mine, "wait_mirrored").values())


def _connected(name: str, namespace: str, options: Mapping[str, Any]) -> DistributedReplayBuffer:
    return DistributedReplayBuffer.connect(name, namespace=namespace, **options)
