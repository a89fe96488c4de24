"""The server of one store, for remote producers and learners. Independent of Ray."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore._core.base import locks
from trajstore._core.base.arguments import whole
from trajstore._core.base.types import IntArray
from trajstore._core.buffer.replay_buffer import TrajectoryReplayBuffer
from trajstore._core.columns.fields import unnest
from trajstore._core.columns.limits import MAX_ID
from trajstore._core.sampling.base import Additions, Drawn
from trajstore._core.sessions.records import encode_call, frames
from trajstore._core.sessions.session import Session
from trajstore._core.store.late_values import LateValues
from trajstore._core.store.notes import Note
from trajstore._core.store.rollback import SnapshotChanges
from trajstore._core.store.row_notes import Rows
from trajstore._core.store.run_ids import ALONE
from trajstore._core.store.saved_points import SavedPoint
from trajstore.distributed.add_request import AddRequest, unpack, uuids_of
from trajstore.distributed.change_log import ChangeLog, Changes
from trajstore.distributed.hold import Hold
from trajstore.distributed.read_request import pack
from trajstore.distributed.row_server import RowAddress, RowServer
from trajstore.errors import ConfigurationError, SessionFinishedError, TrajectoryUnavailableError
from trajstore.query.engine import pl
from trajstore.query.relations import Asked, Found, late_columns, read_rows
from trajstore.remote.mirror.options import MirrorState, as_mirror
from trajstore.trajectory import AnyTrajectory

MOST_STORES = 1024
"""Store r assigns ids that equal r modulo this number, so an id identifies its store."""

_ANSWERS_WITHIN = 5.0  # seconds for which an answer waits for a commit

_MOST_PATHS = 1 << 12
"""Most rollouts of a session whose ids are looked up after a restart."""

_MOST_SESSIONS = 1_000
"""Sessions in memory beyond which those that are over are forgotten."""

REMEMBERED = 1_000_000
"""Trajectories whose UUIDs are remembered."""

_GIVEN = frozenset({"auto_save", "auto_save_path", "sample_window_size", "seed", "on_commit"})


@dataclass(frozen=True, slots=True)
class ServedStore:
    """Description of a store.

    Attributes:
        rank: rank of the store.
        path: path of the run, the folder with the stores ``rank_*``.
        options: options of its buffer.
        host: host name of its machine.
        node: Ray's id of its node.
        began: unique per start of the process, so that callers notice a restart.
        store_id: UUID of the store.
    """

    rank: int
    path: str
    options: Mapping[str, Any]
    host: str
    node: str
    began: str
    store_id: str = ""


class Known:
    """Ids of the newest trajectories of a store, by UUID, so that a resent request is stored once.

    Guarded by ``StoreServer._adding``.

    Args:
        limit: number of trajectories remembered. A request resent after more than ``limit`` others would be stored
            twice; resends happen within minutes.
    """

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._ids: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ids)

    def note(self, uuids: bytes, ids: Sequence[int]) -> None:
        """Remember trajectories.

        Args:
            uuids: 16 bytes for each.
            ids: their ids.
        """
        for place, number in enumerate(ids):
            self._ids[uuids[16 * place : 16 * place + 16]] = number
        while len(self._ids) > self._limit:
            self._ids.popitem(last=False)

    def ids(self, uuids: bytes) -> list[int | None]:
        """Return the id of each trajectory; None if unknown."""
        return [self._ids.get(uuids[at : at + 16]) for at in range(0, len(uuids), 16)]


class StoreServer:
    """Owns the store ``rank_<rank>`` of a run. Every method is thread-safe and may be retried.

    Args:
        path: path of the run, accessible to this process.
        rank: rank of the store.
        options: options of its :class:`TrajectoryReplayBuffer`, except those that the server sets.
        about: host, node and start, for :meth:`describe`.
        ip: address of this node, for :meth:`rows_at`.

    Raises:
        ConfigurationError: an option is set by the server.
        StoreLockedError: another process owns the store.
    """

    def __init__(
        self, path: str, rank: int, options: Mapping[str, Any], about: tuple[str, str, str], ip: str = "127.0.0.1"
    ) -> None:
        decided = sorted(_GIVEN & options.keys())
        if decided:
            raise ConfigurationError(f"{', '.join(decided)}: set by the handle or the server, not by an option")
        if not 0 <= rank < MOST_STORES:
            raise ConfigurationError(f"rank: {rank}, must be in [0, {MOST_STORES})")
        self._about = ServedStore(rank, path, dict(options), *about)
        self._buffer = TrajectoryReplayBuffer(
            seed=None,
            sample_window_size=0,
            auto_save=True,
            auto_save_path=_of_run(path, rank),
            **_of_rank(options, rank),
        )
        self._points = self._buffer._own_store
        self._buffer._sink.share_ids(rank, MOST_STORES)
        self._about = replace(self._about, store_id=self._buffer.store_id or "")
        self._known = Known()
        self._disowned: set[bytes] = set()
        """Keys of requests that another store has instead; few, as it takes a store that was silent."""
        self._era = 0
        """Number of rollbacks in this process; ids of an earlier one may name other trajectories."""
        self._sessions: dict[str, Session] = {}
        self._hold = Hold()
        self._adding = locks.lock("StoreServer._adding")
        self._changes = ChangeLog(self._about.began)
        self._following = locks.lock("StoreServer._following")
        self._rows = RowServer(self.read, ip)
        self._recall()

    def _recall(self) -> None:
        """Load the UUIDs and ids of the newest trajectories from the store."""
        uuids, ids = self._buffer._uuids, self._buffer.trajectory_ids
        self._known.note(uuids[-REMEMBERED:].tobytes(), ids[-REMEMBERED:].tolist())

    def describe(self) -> ServedStore:
        """Return the description of the store."""
        return self._about

    # -- adding -----------------------------------------------------------------------------------

    def tick(self, clock: int) -> int:
        """Assign only ids of at least ``clock`` from now on; return the next id.

        Raises:
            ConfigurationError: the clock, sent by another process, is out of range.
        """
        whole("clock", clock, 0, MAX_ID // 2)
        return self._buffer._sink.share_ids(self._about.rank, MOST_STORES, at_least=clock)

    def add(self, request: AddRequest, count: int, clock: int = 0) -> list[int] | None:
        """Add the trajectories of a request that are missing; return the ids of all once they survive a crash.

        None: not yet, after a few seconds, or a rollback has set them aside. The producer sends the request again.

        Args:
            request: the request.
            count: number of its trajectories.
            clock: lower bound of the new ids, above all ids known to the producer.

        Raises:
            StoreWriteError: see :meth:`TrajectoryReplayBuffer.add_trajectories`.
            ConfigurationError: the request was packed by another version of trajstore.
        """
        uuids = uuids_of(request.key, count)
        with self._hold.changing(), self._adding:  # a retry waits for the first attempt and then finds its trajectories
            known = self._known.ids(uuids)
            if request.key in self._disowned:
                return None
            absent = [place for place, number in enumerate(known) if number is None]
            if absent:
                self.tick(clock)
                runs = unpack(request)
                if len(absent) < count:
                    each = [run[at : at + 1] for run in runs for at in range(len(run))]
                    runs = [each[place] for place in absent]
                wanted = b"".join([uuids[16 * place : 16 * place + 16] for place in absent])
                try:
                    self._known.note(wanted, self._buffer._sink.add_flattened(runs, wanted))
                except BaseException:
                    self._recall()  # the request may be partly added
                    raise
                known = self._known.ids(uuids)
            era = self._era
        ids = [number for number in known if number is not None]
        if max(ids, default=-1) > self._buffer._sink.committed:
            try:
                if not self._buffer.wait(ids, _ANSWERS_WITHIN):
                    return None
            except TrajectoryUnavailableError:  # set aside
                return None
        return ids if era == self._era else None

    def disown(self, key: bytes, count: int) -> None:
        """Delete the trajectories of a request that another store has committed; refuse it if it arrives late.

        Raises:
            StoreWriteError: they cannot be deleted at present.
        """
        with self._hold.changing(), self._adding:
            self._disowned.add(key)
            ids = {number for number in self._known.ids(uuids_of(key, count)) if number is not None}
            here = self._buffer.trajectory_ids
            self._buffer.evict(here[np.isin(here, list(ids))].tolist())

    def session(
        self,
        fields: Mapping[str, Any],
        session_id: str | None,
        method: str,
        arguments: Sequence[Any],
        options: Mapping[str, Any],
    ) -> Any:
        """Call a method of a session, which this opens or continues.

        Args:
            fields: arguments of :meth:`TrajectoryReplayBuffer.session`.
            session_id: its UUID; None for the first call.
            method: its name.
            arguments: its arguments.
            options: its keyword arguments.

        Raises:
            SessionFinishedError: an earlier process of this store finished or discarded it.
        """
        with self._hold.changing():
            session = self._sessions.get(session_id or "")
            if session is None:
                if session_id is not None and not self._has_open(session_id):
                    return self._after_the_end(session_id, method)
                session = self._buffer.session(**fields)
                if len(self._sessions) >= _MOST_SESSIONS:  # those that are over are answered as after a restart
                    kept = {name: each for name, each in self._sessions.items() if each.state in ("open", "frozen")}
                    self._sessions = kept
                self._sessions[session.id] = session
            if method in ("id", "state"):
                return getattr(session, method)
            result = getattr(session, method)(*arguments, **options)
        if method == "calls":
            return b"".join(frames(encode_call(call, 0) for call in result))
        if method == "finish":
            self._buffer.wait(result)
            return result
        return None  # a call refers to all before it

    def _has_open(self, session_id: str) -> bool:
        states = {session.id: session.state for session in self._buffer._sink.sessions.listed()}
        return states.get(session_id) in ("open", "frozen")

    def _after_the_end(self, session_id: str, method: str) -> Any:
        """Answer for a session that ended before this process began; its first attempt may have ended it."""
        self._buffer.flush()
        ids = self._buffer._sink.sessions.row_ids(session_id, _MOST_PATHS)
        if method == "state":
            return "finished" if ids else "discarded"
        if (method == "finish") == bool(ids) and method in ("finish", "discard"):
            return ids or None
        raise SessionFinishedError(f"session {session_id}: was finished or discarded; open a new one")

    def flush(self) -> None:
        """Wait until everything added before survives a crash."""
        self._buffer.flush()

    # -- drawing ----------------------------------------------------------------------------------

    def changes(self, began: str, cursor: int, clock: int = 0) -> Changes:
        """Return additions and evictions since the last request; see :class:`ChangeLog`.

        Args:
            began: ``began`` of the last answer.
            cursor: ``cursor`` of the last answer.
            clock: lower bound of future ids.
        """
        with self._following:
            next_id = self.tick(clock)
            self._changes.follow(self._buffer)
            return replace(self._changes.since(began, cursor), next_id=next_id)

    def described(self, ids: IntArray, tasks: bool) -> Additions:
        """Return lengths, versions and names of those of these trajectories that are present.

        Args:
            ids: of the trajectories.
            tasks: also read their tasks and sessions.
        """
        return self._buffer._sampling.described(ids, tasks)

    def rows_at(self) -> RowAddress:
        """Return the address at which :meth:`read` is called over TCP, by requests of :mod:`.read_request`."""
        return self._rows.address()

    def read(self, drawn: Drawn, columns: Sequence[str] | None) -> npt.NDArray[np.uint8]:
        """Return drawn rows as a block of :mod:`.read_request`. Rows of evicted trajectories are absent.

        Raises:
            TrajectoryUnavailableError: the id of a trajectory now names a shorter one.
        """
        places: npt.NDArray[np.intp] | None = None
        while True:
            try:
                rows = self._buffer.read(drawn if places is None else drawn.at(places), columns=columns)
                return pack(unnest(rows), places)
            except TrajectoryUnavailableError:
                left = np.flatnonzero(self._buffer._sampling.readable(drawn))
                if len(left) == len(drawn if places is None else places):  # not because of an eviction
                    raise
                places = left
            if not len(places):
                return pack({}, places)

    def trajectories(self, ids: Sequence[int]) -> list[AnyTrajectory | None]:
        """Return whole trajectories; None for absent ones."""
        return [self._get(number) for number in ids]

    def _get(self, number: int) -> AnyTrajectory | None:
        try:
            return self._buffer.get(number)
        except TrajectoryUnavailableError:
            return None

    def facts(self) -> pl.DataFrame:
        """Return the facts of this store's trajectories; see :meth:`TrajectoryReplayBuffer.query`.

        Raises:
            MissingDependencyError: Polars is not installed on this node.
        """
        rank = pl.lit(self._about.rank, pl.Int64).alias("rank")
        return self._buffer.query().table().with_columns(rank)

    def commits(self) -> tuple[str, int, int]:
        """Return the store's UUID, an id above all committed ones, and the number of its rollbacks."""
        return self._buffer._sink.commits()

    def rows(self, asked: Asked) -> Found:
        """Return messages, tokens or steps of the requested trajectories."""
        return read_rows(self._buffer._live.locked, asked)

    def late_rows(self, relation: str) -> dict[str, bool]:
        """Return the per-row values that are columns of a relation; see :data:`trajstore.query.relations.Late`."""
        return late_columns(self._buffer._live.locked, relation)

    def extents(self, ids: IntArray) -> tuple[IntArray, IntArray]:
        """Return T and B of trajectories; see :meth:`Sampling.extents`."""
        return self._buffer._sampling.extents(ids)

    # -- changing ---------------------------------------------------------------------------------

    def evict(self, ids: Sequence[int]) -> None:
        """Delete trajectories durably; those already evicted are ignored, so that the call may be retried."""
        with self._hold.changing():
            here = set(self._buffer.trajectory_ids.tolist())
            self._buffer.evict([number for number in ids if number in here])

    def clear(self) -> None:
        """Delete all trajectories durably."""
        with self._hold.changing():
            self._buffer.clear()

    def check_values(self, ids: Sequence[int], update: LateValues) -> None:
        """Refuse late values that this store cannot set.

        Args:
            ids: of this store's trajectories among those of the values.
            update: values of trajectories of several stores.

        Raises:
            ConfigurationError: a name stands for another kind of values here.
            TrajectoryUnavailableError: a trajectory is absent.
        """
        self._buffer._sink.check_values(ids, update)

    def annotate(self, update: LateValues, rows: Rows) -> None:
        """Set late values, durably, and values by row, unless an earlier attempt has; see :func:`trajstore.annotate`.

        A request is identified by the time and the author of its values, which are stored with each value.

        Raises:
            ConfigurationError, TrajectoryUnavailableError, StoreWriteError: no value was set.
        """
        with self._hold.changing(), self._adding:  # a retry waits for the first attempt
            notes = self.history(int(update.ids[0]))
            if {*update.values, *rows} - {
                note.name for note in notes if (note.time, note.who) == (update.time, update.who)
            }:
                self._buffer._sink.annotate(update, rows)

    def history(self, trajectory_id: int) -> list[Note]:
        """Return the late values of a trajectory, the earliest first; see :func:`trajstore.notes_of`."""
        return self._buffer._sink.history(trajectory_id)

    def compact(self, compress: bool) -> None:
        """Free the disk space of evicted trajectories; see :meth:`TrajectoryReplayBuffer.compact`."""
        self._buffer.compact(compress=compress)

    # -- saving -----------------------------------------------------------------------------------

    def hold(self, by: str, seconds: float) -> None:
        """Block additions and evictions until :meth:`release`, and flush.

        Raises:
            StoreWriteError: see :meth:`Hold.begin`; or the flush failed.
        """
        self._buffer.flush()  # shortens the flush below, during which producers wait
        self._hold.begin(by, seconds)
        with self._hold.keeping(by):
            self._buffer.flush()

    def release(self, by: str) -> None:
        """Allow additions and evictions again."""
        self._hold.end(by)

    def snapshots(self) -> list[SavedPoint]:
        """Return all snapshots of the store."""
        return list(self._points.snapshots()[ALONE])

    def state_at(self, name: str | int) -> dict[str, Any]:
        """Return the state saved with a point."""
        return self._points.state(name)

    def changes_to(self, name: str | int, aside: bool) -> list[SnapshotChanges]:
        """Return the changes that going to a snapshot would make."""
        return self._points.changes(name, aside)

    def pin(self, by: str, name: str) -> list[SavedPoint]:
        """Pin the store; return its snapshots then.

        Raises:
            StoreWriteError: the hold has expired.
        """
        with self._hold.keeping(by):
            return list(self._points.pin(name)[ALONE])

    def remove_snapshot(self, name: str | int) -> str | None:
        """Remove a snapshot of the store; return None, or a sentence if there is none."""
        (reason,) = self._points.remove(name)
        return reason

    def save_point(self, by: str, step: int, state: Mapping[str, Any], ranks: int) -> list[SavedPoint]:
        """Save this store's part of a point of ``ranks`` stores; return its snapshots then. Earlier points stay.

        Raises:
            StoreWriteError: the point could not be written, or the hold has expired.
        """
        with self._hold.keeping(by):
            return list(self._points.save(step, state, ranks)[ALONE])

    def go_to(self, by: str, name: str | int, aside: bool) -> dict[str, Any]:
        """Restore a snapshot; return the state saved with it.

        Raises:
            StoreWriteError: the change could not be written, or the hold has expired.
        """
        with self._hold.keeping(by), self._adding:
            state = self._points.go_to(name, aside)
            self._known = Known()  # trajectories set aside are unknown: a resend adds them again
            self._recall()
            self._era += 1
        return state

    # -- the rest ---------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Return the statistics that can be summed, see :meth:`TrajectoryReplayBuffer.get_stats`."""
        return {name: value for name, value in self._buffer.get_stats().items() if name != "committed"}

    def mirror_state(self) -> MirrorState | None:
        """Return the state of the store's mirror; None without a mirror."""
        return self._buffer.mirror.state

    def wait_mirrored(self, ids: Sequence[int], timeout: float) -> bool:
        """Wait until trajectories are on the mirror, or ``timeout`` passes; return whether all are.

        Raises:
            StoreError: the store has no mirror.
        """
        return self._buffer.mirror.wait(ids, timeout)

    def close(self) -> None:
        """Flush and release the directory; rows are answered no more."""
        self._rows.close()
        self._buffer.close()


def _of_run(path: str, rank: int) -> str:
    """Return the path or URL of a store in a run."""
    return f"{path.rstrip('/')}/rank_{rank}"


def _of_rank(options: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return the options of one store; its mirror is a subfolder of the run's mirror."""
    mirror = None if options.get("mirror") is None else as_mirror(options["mirror"])
    if mirror is None:
        return dict(options)
    return {**options, "mirror": replace(mirror, url=f"{str(mirror.url).rstrip('/')}/rank_{rank}")}
