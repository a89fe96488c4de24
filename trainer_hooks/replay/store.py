"""Storage of the pool's records: the required interface, and two implementations.

Takes no lock: only the training loop that owns the pool calls it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import numpy as np
import orjson
import torch

from trajstore._core.base.arguments import one_of, path_or_url, whole_or_none
from trajstore._core.base.closing import Closing
from trajstore._core.base.settings import unknown
from trajstore._core.columns.limits import shown
from trajstore._core.formats import FORMATS
from trajstore.errors import (
    ConfigurationError,
    CorruptStoreError,
    InvalidTrajectoryError,
    StoreError,
    StoreNotFoundError,
    TrajectoryUnavailableError,
)
from trajstore.trajectory import AgentTrajectory

if TYPE_CHECKING:
    from trajstore._core.buffer.replay_buffer import TrajectoryReplayBuffer
    from trajstore._core.reading.contents import Contents
    from trajstore._core.store.catalog import Catalog
    from trajstore.query import Query

POOL_KEY = "experience_pool"
"""Key of the pool's document in a saved point's state."""

RECORDED = "recorded"
"""Key of the pool's document, true if its store has all rollouts of the trainer."""


@dataclass(frozen=True, slots=True)
class PoolPoint:
    """A saved point of a pool's store.

    Attributes:
        name: of the point.
        document: everything but the trajectories, as JSON values.
    """

    name: str
    document: Mapping[str, Any]


def newest_point(catalog: Catalog, snapshot: str | None = None) -> PoolPoint | None:
    """Return a pool's newest saved point on the current line of its store; ``None`` if there is none.

    Args:
        catalog: of the store.
        snapshot: return the newest point that led to this snapshot instead.

    Raises:
        StoreNotFoundError: there is no such snapshot.
        CorruptStoreError: a state is damaged.
    """
    heads = catalog.points()
    if snapshot is not None:
        end = catalog.snapshot(snapshot)
        heads = [head for head in map(catalog.snapshot, catalog.present_line(end)) if head.generation <= end.generation]
    return next((point for head in reversed(heads) if (point := _point_of(catalog, head.name)) is not None), None)


def _point_of(catalog: Catalog, name: str) -> PoolPoint | None:
    """Return a saved point; ``None`` if it has no pool.

    Raises:
        StoreNotFoundError: there is no such point.
        CorruptStoreError: its state is damaged.
    """
    text = catalog.read_state(name).get(POOL_KEY)
    try:
        return None if text is None else PoolPoint(name, orjson.loads(text))
    except orjson.JSONDecodeError as error:
        raise CorruptStoreError(f"{catalog.directory.url}: point {name}: not JSON: {error}") from error


class PoolRecords(Protocol):
    """Agent trajectories under ascending ids, read-only."""

    def get(self, trajectory_id: int, /) -> AgentTrajectory:
        """Return a trajectory; the caller must not change it.

        Raises:
            TrajectoryUnavailableError: no such id, or no longer kept.
        """

    def ids(self) -> list[int]:
        """Return the ids of kept trajectories, ascending."""

    def newest_point(self) -> PoolPoint | None:
        """Return the newest saved point; ``None`` if there is none."""


@runtime_checkable
class PoolStore(PoolRecords, Protocol):
    """A store of agent trajectories under ascending ids.

    A crash preserves a prefix of the additions: never a later one without the earlier ones.
    """

    @property
    def store_id(self) -> str:
        """Identifies the store; empty if the records do not survive the process."""

    def add_trajectories(self, trajectories: list[AgentTrajectory], /) -> list[int]:
        """Store private copies and return their ids, ascending and above all earlier ones. All or none."""

    def outcomes_given(self) -> Mapping[int, float]:
        """Return outcomes that were corrected after addition, by id; :meth:`get` has them too."""

    def flush(self) -> None:
        """Block until every addition is as durable as the store can make it."""

    def evict(self, ids: Sequence[int], /) -> None:
        """Evict trajectories. Unknown ids are ignored."""

    def save(self, document: Mapping[str, Any], /, *, keep: bool) -> str:
        """Save a point with this document and all trajectories; return its name.

        Args:
            document: JSON values.
            keep: whether the point stays until :meth:`hold` removes it; otherwise the next point replaces it.
        """

    def go_to(self, name: str, /) -> None:
        """Show the trajectories of a point again, and continue from it.

        Raises:
            StoreNotFoundError: there is no such point.
        """

    def hold(self, names: Collection[str], /) -> None:
        """Remove all points but these and the newest one. Unknown names are ignored."""


class MemoryStore:
    """Keeps records in this process only."""

    store_id = ""

    def __init__(self) -> None:
        self._kept: dict[int, AgentTrajectory] = {}
        self._next = 0
        self._point: PoolPoint | None = None

    def add_trajectories(self, trajectories: list[AgentTrajectory], /) -> list[int]:
        """As :meth:`PoolStore.add_trajectories`."""
        for trajectory in trajectories:
            columns = [value for value in vars(trajectory).values() if isinstance(value, torch.Tensor)]
            # Tensors in the memo are not copied again: deepcopy would copy the whole storage of a slice.
            self._kept[self._next] = copy.deepcopy(
                trajectory, {id(column): column.detach().clone() for column in columns}
            )
            self._next += 1
        return list(range(self._next - len(trajectories), self._next))

    def get(self, trajectory_id: int, /) -> AgentTrajectory:
        """As :meth:`PoolStore.get`."""
        try:
            return self._kept[trajectory_id]
        except KeyError:
            raise TrajectoryUnavailableError(f"trajectory {trajectory_id} is not in the pool's memory") from None

    def ids(self) -> list[int]:
        """As :meth:`PoolStore.ids`."""
        return list(self._kept)

    def outcomes_given(self) -> Mapping[int, float]:
        """As :meth:`PoolStore.outcomes_given`: always empty, since trajectories in memory cannot be annotated."""
        return {}

    def flush(self) -> None:
        """Do nothing."""

    def evict(self, ids: Sequence[int], /) -> None:
        """As :meth:`PoolStore.evict`."""
        for trajectory_id in ids:
            self._kept.pop(trajectory_id, None)

    def newest_point(self) -> PoolPoint | None:
        """As :meth:`PoolStore.newest_point`."""
        return self._point

    def save(self, document: Mapping[str, Any], /, *, keep: bool) -> str:
        """As :meth:`PoolStore.save`. Only the newest point exists, for another pool that opens this store."""
        self._point = PoolPoint("", dict(document))
        return ""

    def go_to(self, name: str, /) -> None:
        """Raise an error: there is no earlier point in memory."""
        raise StoreNotFoundError(f"{name}: a pool in memory keeps no points; its checkpoints contain the trajectories")

    def hold(self, names: Collection[str], /) -> None:
        """Do nothing."""


class BufferStore(Closing):
    """The pool's trajectories in a trajectory buffer that writes to disk.

    The buffer belongs to the pool. With a capacity, the pool's oldest trajectories are evicted first.

    If the buffer has all rollouts of a trainer (``recorded``, now or before), the pool only chooses among them: nothing
    is copied or evicted, and going to a point changes the choice, not the buffer's contents.

    Args:
        buffer: a buffer with ``auto_save=True``.
        recorded: ids of the trainer's rollouts in it by task and rollout id, read at each admission. The trainer closes
            the buffer.

    Raises:
        ConfigurationError: the buffer is in memory only.
    """

    _recorded: Mapping[tuple[str, str], int] | None = None
    is_recording = False
    """Whether the buffer has all rollouts of a trainer."""
    _resumed: PoolPoint | None = None
    """The point that was gone to in such a buffer; ``None`` = the newest."""

    def __init__(self, buffer: TrajectoryReplayBuffer, recorded: Mapping[tuple[str, str], int] | None = None) -> None:
        if not hasattr(buffer, "auto_save"):
            raise ConfigurationError(f"buffer: a {type(buffer).__name__}, must be a TrajectoryReplayBuffer")
        if not buffer.auto_save:
            raise ConfigurationError("auto_save: the buffer of an experience pool must write; use MemoryStore instead")
        self._buffer = buffer
        self._recorded, self.is_recording = recorded, recorded is not None
        self.store_id = str(buffer.store_id)
        self.before_close: Callable[[], object] | None = None
        """Called by :meth:`close`: saves the pool."""
        self._is_kept = True
        """Whether the newest point stays when another is saved."""

    @classmethod
    def open(cls, path: str | Path, *, format: str = "pt", capacity: int | None = None) -> Self:  # noqa: A002
        """Open the pool's store at a directory or URL, or create it.

        Args:
            path: ``auto_save_path`` of the buffer.
            format: ``trajectory_format`` of the buffer.
            capacity: number of trajectories to keep; ``None`` = no limit.

        Raises:
            StoreLockedError: another process writes there.
            CorruptStoreError: the existing store cannot be continued.
            ConfigurationError: an argument is out of range.
        """
        from trajstore._core.buffer.replay_buffer import TrajectoryReplayBuffer
        from trajstore._core.buffer.retention import Retention

        retention = Retention(max_trajectories=capacity)
        return cls(
            TrajectoryReplayBuffer(
                auto_save=True,
                auto_save_path=path,
                trajectory_format=format,
                enable_cache=False,
                retention=retention,
            )
        )

    def close(self) -> None:
        """Save the pool, and close the buffer unless it is a trainer's. Idempotent.

        Raises:
            StoreWriteError: something did not reach the disk.
        """
        save, self.before_close = self.before_close, None
        try:
            if save is not None:
                save()
        finally:
            if self._recorded is None:
                self._buffer.close()

    def add_trajectories(self, trajectories: list[AgentTrajectory], /) -> list[int]:
        """As :meth:`PoolStore.add_trajectories`; recorded ones have their ids, and only others are added."""
        found = list(map(self._find, trajectories))
        new = [trajectory for trajectory, number in zip(trajectories, found, strict=True) if number is None]
        added = iter(self._buffer.add_trajectories(new) if new else ())
        return [next(added) if number is None else number for number in found]

    def _find(self, trajectory: AgentTrajectory) -> int | None:
        """Return the id of a recorded trajectory with the same names, tokens and log-probs."""
        number = (self._recorded or {}).get((trajectory.task_id, trajectory.rollout_id))
        try:
            record = None if number is None else self.get(number)
        except (StoreError, TrajectoryUnavailableError):  # damaged, or evicted
            return None
        names = ("input_ids", "old_log_probs")
        pairs = [(getattr(trajectory, name), getattr(record, name, None)) for name in names]
        return number if all(one is other is None or _equal(one, other) for one, other in pairs) else None

    def get(self, trajectory_id: int, /) -> AgentTrajectory:
        """As :meth:`PoolStore.get`."""
        trajectory = self._buffer.get(trajectory_id)
        if not isinstance(trajectory, AgentTrajectory):
            raise InvalidTrajectoryError(
                f"trajectory {trajectory_id} is a step trajectory; give the experience pool a directory of its own"
            )
        return trajectory

    def ids(self) -> list[int]:
        """As :meth:`PoolStore.ids`."""
        ids: list[int] = self._buffer.trajectory_ids.tolist()
        return ids

    def outcomes_given(self) -> Mapping[int, float]:
        """As :meth:`PoolStore.outcomes_given`: see :func:`trajstore.annotate`."""
        from trajstore._core.reading.late import outcomes_given  # not needed by a pool in memory

        def look(contents: Contents) -> dict[int, float]:
            index = contents.index
            given = outcomes_given(index, np.arange(index.first, index.end))
            there = np.flatnonzero(~np.isnan(given))
            return dict(zip(index["trajectory_id"][there].tolist(), given[there].tolist(), strict=True))

        return self._buffer.live.locked(look)

    def query(self, relation: str) -> Query:
        """Return a query over all records, including trajectories that left the pool."""
        return self._buffer.query(relation)

    def flush(self) -> None:
        """As :meth:`PoolStore.flush`."""
        self._buffer.flush()

    def evict(self, ids: Sequence[int], /) -> None:
        """As :meth:`PoolStore.evict`. A trainer's rollouts stay recorded."""
        kept = set() if self.is_recording else set(self.ids())
        known = [trajectory_id for trajectory_id in ids if trajectory_id in kept]
        if known:
            self._buffer.evict(known)

    def newest_point(self) -> PoolPoint | None:
        """As :meth:`PoolStore.newest_point`."""
        if self._resumed is not None:
            return self._resumed
        point = newest_point(self._catalog())
        self._is_kept = point is None or point.document["kept"]
        self.is_recording |= point is not None and bool(point.document.get(RECORDED))
        return point

    def _catalog(self) -> Catalog:
        from trajstore._core.files.opening import open_directory
        from trajstore._core.store.catalog import Catalog

        return Catalog.open(open_directory(str(self._buffer.auto_save_path)))

    def save(self, document: Mapping[str, Any], /, *, keep: bool) -> str:
        """As :meth:`PoolStore.save`.

        Points have their own numbers, because training steps may begin again in the same pool.
        """
        points = self._buffer.points
        saved = points.saved
        pinned = max((snapshot.generation for snapshot in points.snapshots if snapshot.kind == "pin"), default=-1)
        # A pin is shown with the newest point that led to it.
        number = saved[-1].step + (self._is_kept or pinned >= saved[-1].generation) if saved else 0
        state = {**document, "kept": keep} | ({RECORDED: True} if self.is_recording else {})
        text = orjson.dumps(state, option=orjson.OPT_NON_STR_KEYS).decode()
        name = points.save(number, {POOL_KEY: text}, keep=None).name
        self._is_kept, self._resumed = keep, None
        return name

    def go_to(self, name: str, /) -> None:
        """As :meth:`PoolStore.go_to`; the state before stays, as a snapshot, until :meth:`hold` removes it.

        A trainer's rollouts stay as they are, with late values, and the pool chooses as at the point.
        """
        if not self.is_recording:
            self._buffer.points.go_to(name)
        elif (point := _point_of(self._catalog(), name)) is not None:
            self._resumed = point
        else:
            raise StoreNotFoundError(f"{name}: a saved point without an experience pool; resume from another")

    def hold(self, names: Collection[str], /) -> None:
        """As :meth:`PoolStore.hold`. Pins of users stay, each with the newest point that led to it."""
        points = self._buffer.points
        current = [point.name for point in points.saved]
        kept = {*names, *current[-1:]}
        snapshots = points.snapshots
        if any(snapshot.kind == "pin" for snapshot in snapshots):
            catalog = self._catalog()
            pins = [snapshot for snapshot in catalog.snapshots() if snapshot.kind == "pin"]
            kept.update(*(catalog.present_line(pin)[-1:] for pin in pins))
        unneeded = [snapshot.name for snapshot in snapshots if snapshot.kind == "point" and snapshot.name not in kept]
        if not kept.intersection(snapshot.name for snapshot in snapshots).difference(current):
            unneeded += [snapshot.name for snapshot in snapshots if snapshot.kind == "aside"]
        for name in unneeded:
            points.remove(name)


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one.to(other.dtype), other)


def store_options(name: str, value: Any) -> Mapping[str, Any] | None:
    """Return options of :meth:`BufferStore.open`; None for a store in memory.

    Raises:
        ConfigurationError: an option is invalid; the message names the first such option.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{name}: {shown(value)}, must be a mapping with a path, or null for memory")
    for problem in unknown(value, ("path", "format", "capacity")):
        raise ConfigurationError(f"{name}.{problem}")
    path_or_url(f"{name}.path", value.get("path"))
    one_of(f"{name}.format", value.get("format", "pt"), tuple(FORMATS))
    capacity = whole_or_none(f"{name}.capacity", value.get("capacity"), 1)
    return value if capacity is None else {**value, "capacity": capacity}
