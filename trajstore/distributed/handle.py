"""A replay buffer on many machines, connected by name and used like a local buffer."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch

from trajstore._core.base.arguments import check_kind, one_of
from trajstore._core.base.closing import Closing
from trajstore._core.base.types import IntArray
from trajstore._core.buffer.adding_again import add_with_values, has_late_values
from trajstore._core.buffer.content_watch import as_list, flatten_all
from trajstore._core.columns.flat import FlatTrajectories
from trajstore._core.columns.rollouts import flatten_rollouts
from trajstore._core.sessions.arguments import OpensSessions
from trajstore._core.store.late_values import LateValues
from trajstore._core.store.notes import Note
from trajstore._core.store.row_notes import Rows
from trajstore._core.store.run_ids import own_id
from trajstore.distributed.actors import NAMESPACE, Stores, ray
from trajstore.distributed.options import HandleOptions, handle_options
from trajstore.distributed.receipts import Outbox, Receipt
from trajstore.distributed.routes import Routes
from trajstore.distributed.saving import RestorableHandle
from trajstore.distributed.server import MOST_STORES
from trajstore.distributed.sessions import RemoteSession
from trajstore.distributed.starting import everywhere, start_stores
from trajstore.errors import StoreNotFoundError, StoreUnreachableError, TrajectoryUnavailableError, listed, trajectories
from trajstore.query import RELATIONS, Query
from trajstore.query.engine import pl
from trajstore.query.relations import TRAJECTORIES, Asked, Found, scan
from trajstore.remote.mirror.options import MirrorState
from trajstore.trajectory import AnyTrajectory

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_PLACE = "place among the facts"
"""Name of a temporary column; no fact can have this name."""


class DistributedReplayBuffer(RestorableHandle, OpensSessions[RemoteSession], Closing):
    """Handle of a buffer whose stores are Ray actors. Make one with :meth:`create` or :meth:`connect`.

    Every process has its own handle; a pickled handle reconnects when unpickled. Thread-safe.

    Args:
        stores: the actors.
        near: ranks of the stores on this node.
        options: options of this handle.
    """

    def __init__(self, stores: Stores, near: Sequence[int], options: HandleOptions) -> None:
        first = int(ray().get_runtime_context().get_worker_id()[-8:], 16)
        routes = Routes(near, stores.all_ranks, options.patience, first)
        super().__init__(stores, routes, options)
        self._outbox = Outbox(stores, routes, options)

    # -- creating and connecting ------------------------------------------------------------------

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
        """Start the missing stores and return a handle.

        Call it again to start stores on nodes that have joined, or to restart lost stores on a node that has their
        directories again. A warning names every directory of the run that no store serves, and every node without a
        store.

        Args:
            name: name of the buffer, for :meth:`connect`.
            path: folder of the stores ``rank_0``, ``rank_1``, ...; the same on every node, on a local or shared disk. A
                relative path is resolved in this process.
            stores: number of stores, or ``"per_node"`` for one on each node.
            options: for each store's :class:`~trajstore.TrajectoryReplayBuffer` (``retention``, ``writer``, ...).
            actor_options: Ray options of the actors, such as reserved resources (``num_cpus``, 1 by default;
                ``resources``, ``memory``).
            scheduling_strategy: Ray's strategy for all stores; None = spread over the nodes.
            shared_path: all nodes share the directories, so a lost node's store may restart on another node.
            namespace: Ray namespace of the actors.
            handle: options of the handle, see :meth:`connect`.

        Raises:
            ConfigurationError: an argument is out of range, or the stores are running with another path or options.
            StoreUnreachableError: a store could not start, for example because another process writes it, or has not
                started within ``deadline`` seconds, for example because Ray lacks resources; the message says why. The
                others run, and :meth:`connect` goes on with them.
        """
        check_kind("path", path, str | Path, "a path")
        checked, where = handle_options(handle), everywhere(path)
        known = Stores(name, namespace, checked.deadline)
        served = start_stores(
            known, where, stores, options or {}, actor_options or {}, scheduling_strategy, shared_path
        )
        return cls._of(served, checked)

    @classmethod
    def connect(cls, name: str, *, namespace: str = NAMESPACE, **handle: Any) -> Self:
        """Return a handle of a buffer that :meth:`create` has started, in this or another process.

        A warning names stores that are lost or do not answer for ``deadline`` seconds.

        Args:
            name: name of the buffer.
            namespace: Ray namespace of its actors.
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
        """Send trajectories to a store asynchronously; return a receipt.

        The tensors are copied before this returns. Trajectories resent after an actor or node failure are stored once.
        Waits while ``max_pending_bytes`` are in flight; and until trajectories with late values are committed.

        Raises:
            InvalidTrajectoryError: a trajectory cannot be stored; nothing was sent.
            StoreUnreachableError, StoreWriteError: trajectories sent earlier cannot be stored at present.
        """
        trajectories = as_list(trajectories)
        if not any(map(has_late_values, trajectories)):
            return self._send(trajectories)
        receipts: list[Receipt] = []

        def add(recorded: list[AnyTrajectory]) -> list[int]:
            receipts.append(self._send(recorded))
            return receipts[0].committed(self._options.deadline)

        add_with_values(trajectories, add, self._sink)
        return receipts[0]

    def _send(self, trajectories: list[AnyTrajectory]) -> Receipt:
        return self._send_runs(flatten_all(trajectories))

    def add_rollouts(
        self,
        columns: Mapping[str, torch.Tensor],
        lengths: torch.Tensor | Sequence[int],
        documents: Sequence[Mapping[str, Any]],
        *,
        prompts: torch.Tensor | Sequence[int] | None = None,
        starts: torch.Tensor | Sequence[int] | None = None,
    ) -> Receipt:
        """Send rollouts whose columns are joined in tensors, see :meth:`TrajectoryReplayBuffer.add_rollouts`.

        Otherwise as :meth:`add_trajectories`, whose errors it raises.
        """
        return self._send_runs(flatten_rollouts(columns, lengths, documents, prompts, starts))

    def _send_runs(self, runs: Sequence[FlatTrajectories]) -> Receipt:
        self._check_open()
        return self._outbox.send(runs)

    def _open_session(self, fields: dict[str, Any]) -> RemoteSession:
        self._check_open()
        return RemoteSession(self._stores, fields)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything added by this handle survives the kill of any process.

        Raises:
            TimeoutError: ``timeout`` seconds passed.
            StoreUnreachableError, StoreWriteError: see :meth:`Receipt.committed`.
        """
        self._outbox.flush(timeout)

    # -- querying ---------------------------------------------------------------------------------

    def query(self, relation: str = "trajectories") -> Query:
        """Query the trajectories of all stores; see :meth:`TrajectoryReplayBuffer.query`.

        Each evaluation fetches the facts of all trajectories, about 126 bytes each, from the stores. Messages, tokens
        and steps are filtered in the stores, which send only matching rows. Needs Polars (extra ``query``) here and on
        the nodes of the stores.

        Each evaluation leaves out stores that do not answer for ``patience`` seconds, and warns of them; they are in
        :attr:`absent`.

        Args:
            relation: unit of the rows: ``"trajectories"``, ``"messages"``, ``"tokens"`` or ``"steps"``.

        Raises:
            ConfigurationError: no such relation.
            StoreUnreachableError: on evaluation; no store answers.
        """
        return Query(
            self._asked_facts,
            partial(scan, self._rows, self._late_rows),
            one_of("relation", relation, (TRAJECTORIES, *RELATIONS)),
        )

    def _matching(self, where: str) -> IntArray:
        return Query(self._facts, partial(scan, self._rows, self._late_rows)).where(where).ids()

    def _asked_facts(self) -> pl.DataFrame:
        """Return :meth:`_facts`; warn of stores that are left out."""
        facts = self._facts()
        if absent := self.absent:
            logger.warning(
                "query of %r: without %s, which did not answer", self.name, listed(f"rank_{rank}" for rank in absent)
            )
        return facts

    def _facts(self) -> pl.DataFrame:
        """Return the facts of all trajectories, oldest first, without duplicates in other stores.

        Raises:
            StoreUnreachableError: no store answers.
        """
        self.refresh()
        answers = self._ask_present(dict.fromkeys(self._stores.all_ranks, ()), "facts")
        if not answers:
            raise StoreUnreachableError(f"{self.name!r}: no store answers; create() restarts lost stores")
        with self._lock:
            copies = self._sync.index.hidden.ids.tolist()
        tables = [answers[rank] for rank in sorted(answers)]
        facts: pl.DataFrame = pl.concat(tables, how="diagonal_relaxed").sort("committed", maintain_order=True)
        return facts.filter(~pl.col("trajectory_id").is_in(copies)) if copies else facts

    def _late_rows(self, relation: str) -> dict[str, bool]:
        """Return the per-row values that are columns of a relation; see :data:`trajstore.query.relations.Late`."""
        late: dict[str, bool] = {}
        for columns in self._ask_present(dict.fromkeys(self._all_ranks(), (relation,)), "late_rows").values():
            late |= {name: several or late.get(name, False) for name, several in columns.items()}
        return late

    def _rows(self, asked: Asked) -> Found:
        """Return messages, tokens or steps of the requested trajectories.

        Those of a store that falls silent meanwhile are reported like unreadable ones.
        """
        self._check_open()
        placed = asked.facts.with_row_index(_PLACE)
        parts = placed.group_by(pl.col("trajectory_id") % MOST_STORES)
        wanted = [*asked.wanted, _PLACE]
        of_ranks = {rank: (replace(asked, facts=part, wanted=wanted),) for (rank,), part in parts}
        answers = self._ask_present(of_ranks, "rows")
        tables = [table for some, _ in answers.values() for table in some]
        whole = [pl.concat(tables).sort(_PLACE, maintain_order=True).drop(_PLACE)] if tables else []
        faults = [fault for _, some in answers.values() for fault in some]
        for rank in of_ranks.keys() - answers.keys():
            silent = f"store rank_{rank} of {self.name!r} does not answer"
            faults += [(number, silent) for number in of_ranks[rank][0].facts["trajectory_id"].to_list()]
        return whole, faults

    @property
    def _sink(self) -> ValuesOfHandle:
        """Late values of the stores' trajectories, for ``trajstore.annotate`` and ``trajstore.notes_of``."""
        return ValuesOfHandle(self)

    # -- changing ---------------------------------------------------------------------------------

    def evict(self, ids: Sequence[int]) -> None:
        """Delete trajectories durably, in every store that has them; ids already evicted are ignored.

        Raises:
            StoreUnreachableError: a store has not answered; the other stores have deleted theirs.
        """
        wanted, _ = self._with_copies(ids)
        ranks = sorted({number % MOST_STORES for number in wanted})
        mine = {rank: ([number for number in wanted if number % MOST_STORES == rank],) for rank in ranks}
        self._stores.call_all(mine, "evict")
        self.refresh()

    def clear(self) -> None:
        """Delete all trajectories of all stores. Ids are never reused.

        Raises:
            StoreUnreachableError: a store has not answered; the other stores have deleted theirs.
        """
        self.flush()
        self._stores.call_all(dict.fromkeys(self._all_ranks(), ()), "clear")
        self.refresh()

    def compact(self, *, compress: bool = False) -> None:
        """Free the disk space of evicted trajectories, see :meth:`TrajectoryReplayBuffer.compact`.

        Raises:
            StoreUnreachableError, StoreWriteError: a store failed; the others are compacted.
        """
        self._stores.call_all(dict.fromkeys(self._all_ranks(), (compress,)), "compact")

    @property
    def mirror(self) -> MirrorsOfHandle:
        """State of the stores' mirrors, and waiting for them."""
        return MirrorsOfHandle(self._stores)

    def get_stats(self) -> dict[str, float]:
        """Return the statistics of the responsive stores, summed, and of this handle.

        Adds ``stores``, the number of stores; ``absent_stores``, the number of unresponsive ones; and
        ``pending_requests``, sent by this handle and not known to be committed.
        """
        return {**super().get_stats(), "pending_requests": self._outbox.requests}

    # -- closing ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Flush everything added by this handle. The stores keep running; :meth:`stop` ends them.

        Raises:
            StoreUnreachableError, StoreWriteError: trajectories are not committed; the message says how many.
        """
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self._closed = True
            self._reads.close()

    def stop(self) -> None:
        """Close the stores and end their actors. :meth:`create` reopens their directories."""
        self.close()
        for rank in self._all_ranks():
            self._stores.stop(rank)

    def __del__(self) -> None:
        waiting = 0 if getattr(self, "_closed", True) else self._outbox.trajectories
        if waiting:
            warnings.warn(
                f"a handle of {self._stores.name!r} was dropped while {trajectories(waiting, 'was', 'were')} not known "
                "to be committed; close() it, or keep it",
                ResourceWarning,
                stacklevel=1,
            )


@dataclass(frozen=True, slots=True)
class MirrorsOfHandle:
    """``handle.mirror``: state of the stores' mirrors, and waiting for them.

    Args:
        _stores: stores of the handle.
    """

    _stores: Stores

    def states(self) -> dict[int, MirrorState | None]:
        """Return the state of each store's mirror, by rank; None without a mirror.

        Raises:
            StoreUnreachableError: a store does not answer.
        """
        return self._stores.call_all(dict.fromkeys(self._stores.look_whole(), ()), "mirror_state")

    def wait(self, ids: Sequence[int], timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for trajectories to be mirrored; return whether all are.

        Raises:
            StoreError: the stores have no mirrors.
            StoreUnreachableError: a store does not answer.
        """
        ranks = sorted({number % MOST_STORES for number in ids})
        mine = {rank: ([number for number in ids if number % MOST_STORES == rank], timeout) for rank in ranks}
        return all(self._stores.call_all(mine, "wait_mirrored").values())


def _connected(name: str, namespace: str, options: Mapping[str, Any]) -> DistributedReplayBuffer:
    handle = DistributedReplayBuffer.connect(name, namespace=namespace, **options)
    handle._draws.copied()
    return handle


@dataclass(frozen=True, slots=True)
class ValuesOfHandle:
    """Sets and returns late values; for :func:`trajstore.annotate` and :func:`trajstore.notes_of`.

    Args:
        _handle: the handle.
    """

    _handle: DistributedReplayBuffer

    def annotate(self, update: LateValues, rows: Rows) -> None:
        """Set late values, after all stores have agreed to them; those by row store by store.

        Both steps together wait at most ``deadline`` for a store that does not answer.

        Raises:
            ConfigurationError: a value contradicts the kind that its name has in a store; nothing was set. Or rows do
                not fit their trajectories, or another kind of rows; stores of lower ranks have set theirs.
            TrajectoryUnavailableError: an id is in no store; nothing was set.
            StoreUnreachableError, StoreWriteError: a store failed; others may have set theirs.
        """
        ids, until = own_id(update.ids).tolist(), time.monotonic() + self._handle._stores.deadline
        self._ranks(ids)
        every, places = self._handle._with_copies(ids)
        ranks = self._ranks(every)
        self.check_values(every, update, _left(until))
        parts = {rank: _part(update, every, places, rows, rank) for rank in ranks}
        self._handle._stores.call_all(parts, "annotate", _left(until))
        self._handle.refresh()

    def check_values(self, ids: Sequence[int], update: LateValues, seconds: float | None = None) -> None:
        """Refuse late values that a store cannot set; only the stores of the ids must answer.

        Args:
            ids: of the trajectories.
            update: the values.
            seconds: in which they must answer; None = ``deadline``.

        Raises:
            ConfigurationError, TrajectoryUnavailableError, StoreUnreachableError: see :meth:`annotate`.
        """
        ranks = self._ranks(ids)
        asked = {rank: ([number for number in ids if number % MOST_STORES == rank], update) for rank in ranks}
        self._handle._stores.call_all(asked, "check_values", seconds)
        others: dict[int, tuple[list[int], LateValues]] = {
            rank: ([], update) for rank in self._handle._all_ranks() if rank not in ranks
        }
        self._handle._ask_present(others, "check_values")

    def history(self, trajectory_id: int) -> list[Note]:
        """Return the late values of a trajectory, the earliest first.

        Raises:
            TrajectoryUnavailableError: the id is in no store.
            StoreUnreachableError: its store does not answer.
        """
        number = own_id(trajectory_id)
        (rank,) = self._ranks([number])
        notes: list[Note] = self._handle._stores.call(rank, "history", number)
        return notes

    def _ranks(self, ids: Sequence[int]) -> set[int]:
        """Return the ranks of the stores that gave these ids.

        Raises:
            TrajectoryUnavailableError: there is no such store.
        """
        for number in ids:
            if number % MOST_STORES not in self._handle.stores:
                raise TrajectoryUnavailableError(f"no trajectory of {self._handle.name!r} has the id {number}")
        return {number % MOST_STORES for number in ids}


def _left(until: float) -> float:
    """Return the seconds until a moment, at least one, in which a store that answers has answered."""
    return max(1.0, until - time.monotonic())


def _part(
    update: LateValues, ids: Sequence[int], places: Sequence[int], rows: Rows, rank: int
) -> tuple[LateValues, dict[str, list[torch.Tensor]]]:
    """Return the values for the trajectories of one store; ``places`` has the place of each id's values."""
    mine = [(number, place) for number, place in zip(ids, places, strict=True) if number % MOST_STORES == rank]
    at = [place for _, place in mine]
    values = {name: [given[place] for place in at] for name, given in update.values.items()}
    part = replace(update, ids=np.array([number for number, _ in mine], np.int64), values=values)
    return part, {name: [tensors[place] for place in at] for name, tensors in rows.items()}
