"""Storage of the pool's records: a buffer on disk or in memory.

Takes no lock: only the training loop that owns the pool calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import orjson
import torch

from trainer_hooks.replay.entry import PoolEntry, Refusal, entry_of
from trainer_hooks.replay.late_values import with_training
from trajstore._core.base.arguments import one_of, path_or_url, whole_or_none
from trajstore._core.base.closing import Closing
from trajstore._core.base.settings import unknown
from trajstore._core.columns.facts import GIVEN
from trajstore._core.columns.facts import RECORDED as RECORDED_VALUES
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
    """Agent trajectories under ascending ids, read-only, for reading a pool."""

    def entry(self, trajectory_id: int, /) -> tuple[PoolEntry | Refusal, str]:
        """Return the entry of a trajectory, or why it cannot be replayed; and its tokenizer's fingerprint.

        Raises:
            TrajectoryUnavailableError: no such id, or no longer kept.
            CorruptStoreError: it is damaged.
        """

    def kept(self, ids: Collection[int], /) -> set[int]:
        """Return those of these ids whose trajectories are still kept."""

    def newest_id(self) -> int:
        """Return the highest id; -1 if there is none."""

    def newest_point(self) -> PoolPoint | None:
        """Return the newest saved point; ``None`` if there is none."""


Recorded = Callable[[Sequence[AgentTrajectory]], Sequence[int | None]]
"""Returns the ids of rollouts that a trainer recorded, by their names; ``None`` = not recorded."""


class BufferStore(Closing):
    """The pool's trajectories in a trajectory buffer, on disk or in memory.

    The buffer belongs to the pool. With a capacity, the pool's oldest trajectories are evicted first. A crash preserves
    a prefix of the additions: never a later one without the earlier ones.

    If the buffer has all rollouts of a trainer (``recorded``, now or before), the pool only chooses among them: nothing
    is copied or evicted, going to a point changes the choice, not the buffer's contents, and the buffer's retention
    keeps what the pool and its points name.

    Args:
        buffer: a buffer with ``auto_save=True``; ``None`` = one in memory, for this process only.
        recorded: finds the trainer's rollouts in it. The trainer closes the buffer.
        capacity: number of rollouts that a recording keeps beside those that the pool and its points name; ``None`` =
            as the buffer's retention says. The buffer has no retention then, which would evict those on opening.

    Raises:
        ConfigurationError: the buffer is in memory only.
    """

    is_recording = False
    """Whether the buffer has all rollouts of a trainer."""
    before_close: Callable[[], object] | None = None
    """Called by :meth:`close`: saves the pool."""
    _is_on_disk = True
    _recorded: Recorded | None = None
    _current: PoolPoint | None = None
    """The point that was gone to in a recording, or the newest one in memory; ``None`` = the newest on disk."""
    _is_kept = True
    """Whether the newest point stays when another is saved."""

    def __init__(
        self,
        buffer: TrajectoryReplayBuffer | None = None,
        recorded: Recorded | None = None,
        *,
        capacity: int | None = None,
    ) -> None:
        from trajstore._core.buffer.replay_buffer import TrajectoryReplayBuffer
        from trajstore._core.buffer.retention import Retention

        self._is_on_disk = buffer is not None
        if buffer is None:
            buffer = TrajectoryReplayBuffer(sample_window_size=0)
        elif not isinstance(buffer, TrajectoryReplayBuffer):
            raise ConfigurationError(f"buffer: a {type(buffer).__name__}, must be a TrajectoryReplayBuffer")
        elif buffer.store_id is None:
            raise ConfigurationError("auto_save: the buffer of a pool must write; leave it out for a pool in memory")
        self._buffer = buffer
        self._recorded, self.is_recording = recorded, recorded is not None
        self.store_id = str(buffer.store_id) if self._is_on_disk else ""
        self._needed: dict[str, list[int]] = {}
        """Ids that each point of a recording names."""
        if capacity is not None:
            self.newest_point()
            buffer._live.retention = Retention(max_trajectories=capacity)

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        format: str = "pt",  # noqa: A002
        capacity: int | None = None,
    ) -> Self:
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
                auto_save=True, auto_save_path=path, trajectory_format=format, enable_cache=False, retention=retention
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
            if self._recorded is None and self._is_on_disk:
                self._buffer.close()

    def add_trajectories(self, trajectories: list[AgentTrajectory], /) -> list[int]:
        """Store private copies and return their ids. All or none.

        Recorded ones have their ids, and only others are added: with ids above all earlier ones.
        """
        found = [None] * len(trajectories) if self._recorded is None else self._recorded(trajectories)
        same = [
            number if number is not None and self._is_same(number, trajectory) else None
            for number, trajectory in zip(found, trajectories, strict=True)
        ]
        new = [
            _as_recorded(trajectory) for trajectory, number in zip(trajectories, same, strict=True) if number is None
        ]
        added = iter(self._buffer.add_trajectories(new) if new else ())
        return [next(added) if number is None else number for number in same]

    def _is_same(self, number: int, trajectory: AgentTrajectory) -> bool:
        """Return whether a recorded trajectory has the same tokens and log-probs."""
        try:
            record = self.get(number)
        except (StoreError, TrajectoryUnavailableError):  # damaged, or evicted
            return False
        names = ("input_ids", "old_log_probs")
        pairs = [(getattr(trajectory, name), getattr(record, name, None)) for name in names]
        return all(one is other is None or _equal(one, other) for one, other in pairs)

    def get(self, trajectory_id: int, /) -> AgentTrajectory:
        """Return a trajectory; the caller must not change it.

        A recorded one has the log-probs and entropies of the step that trained on it.

        Raises:
            TrajectoryUnavailableError: no such id, or no longer kept.
        """
        trajectory = self._buffer.get(trajectory_id)
        if not isinstance(trajectory, AgentTrajectory):
            raise InvalidTrajectoryError(
                f"trajectory {trajectory_id} is a step trajectory; give the experience pool a directory of its own"
            )
        result = with_training(trajectory)
        if result is not trajectory and RECORDED_VALUES in trajectory.metadata:
            result.metadata[RECORDED_VALUES] = trajectory.metadata[RECORDED_VALUES]
        return result

    def entry(self, trajectory_id: int, /) -> tuple[PoolEntry | Refusal, str]:
        """Return the entry of a trajectory, or why it cannot be replayed; and its tokenizer's fingerprint."""
        record = self.get(trajectory_id)
        return entry_of(record, trajectory_id), record.tokenizer_fingerprint

    def ids(self) -> list[int]:
        """Return the ids of all trajectories, ascending."""
        ids: list[int] = self._buffer.trajectory_ids.tolist()
        return ids

    def kept(self, ids: Collection[int], /) -> set[int]:
        """Return those of these ids whose trajectories are still kept."""
        asked = np.fromiter(ids, np.int64, len(ids))
        return set(asked[np.isin(asked, self._buffer.trajectory_ids)].tolist())

    def newest_id(self) -> int:
        """Return the highest id; -1 if there is none."""
        ids = self._buffer.trajectory_ids
        return int(ids[-1]) if len(ids) else -1

    def outcomes_given(self, ids: Collection[int], /) -> Mapping[int, float]:
        """Return which of these had their outcome corrected after addition, by id; :meth:`get` has it too."""
        from trajstore._core.reading.late import outcomes_given

        def look(contents: Contents) -> dict[int, float]:
            positions = contents.index.find_many(list(ids))
            positions = positions[positions >= 0]
            given = outcomes_given(contents.index, positions)
            numbers = contents.index.at("trajectory_id", positions)
            there = ~np.isnan(given)
            return dict(zip(numbers[there].tolist(), given[there].tolist(), strict=True))

        return self._buffer._live.locked(look)

    def query(self, relation: str, /) -> Query:
        """Return a query over all records, including trajectories that left the pool."""
        return self._buffer.query(relation)

    def flush(self) -> None:
        """Block until every addition is as durable as the store can make it."""
        self._buffer.flush()

    def evict(self, ids: Sequence[int], /) -> None:
        """Evict trajectories; unknown ids are ignored, and a trainer's rollouts stay recorded."""
        if not self.is_recording and (known := self.kept(ids)):
            self._buffer.evict(sorted(known))

    def newest_point(self) -> PoolPoint | None:
        """Return the newest saved point; ``None`` if there is none."""
        if self._current is not None or not self._is_on_disk:
            return self._current
        catalog = self._catalog()
        point = newest_point(catalog)
        self._is_kept = point is None or point.document["kept"]
        self.is_recording |= point is not None and bool(point.document.get(RECORDED))
        if self.is_recording and self._is_on_disk:
            points = [_point_of(catalog, snapshot.name) for snapshot in catalog.snapshots() if snapshot.kind == "point"]
            self._protect({one.name: _ids_of(one.document) for one in points if one is not None})
        return point

    def _catalog(self) -> Catalog:
        from trajstore._core.files.opening import open_directory
        from trajstore._core.store.catalog import Catalog

        return Catalog.open(open_directory(str(self._buffer._path)))

    def _protect(self, needed: Mapping[str, list[int]]) -> None:
        """Let the retention keep what the points that are there name; ``needed``: ids of new points."""
        there = {snapshot.name for snapshot in self._buffer.points.snapshots}
        self._needed = {name: ids for name, ids in {**self._needed, **needed}.items() if name in there}
        ids = [np.array(ids, np.int64) for ids in self._needed.values()]
        self._buffer._live.protected = np.unique(np.concatenate(ids)) if ids else np.zeros(0, np.int64)

    def save(self, document: Mapping[str, Any], keep: bool, /) -> str:
        """Save a point with this document and all trajectories; return its name.

        Points have their own numbers, because training steps may begin again in the same pool.

        Args:
            document: JSON values.
            keep: whether the point stays until :meth:`hold` removes it; otherwise the next point replaces it.
        """
        if not self._is_on_disk:
            self._current = PoolPoint("", dict(document))
            return ""
        points = self._buffer.points
        saved = points.saved
        pinned = max((snapshot.generation for snapshot in points.snapshots if snapshot.kind == "pin"), default=-1)
        # A pin is shown with the newest point that led to it.
        number = saved[-1].step + (self._is_kept or pinned >= saved[-1].generation) if saved else 0
        state = {**document, "kept": keep} | ({RECORDED: True} if self.is_recording else {})
        text = orjson.dumps(state, option=orjson.OPT_NON_STR_KEYS).decode()
        name = points.save(number, {POOL_KEY: text}, keep=None).name
        self._is_kept, self._current = keep, None
        if self.is_recording:
            self._protect({name: _ids_of(document)})
        return name

    def go_to(self, name: str, /) -> None:
        """Show the trajectories of a point again, and continue from it.

        The state before stays, as a snapshot, until :meth:`hold` removes it.

        A trainer's rollouts stay as they are, with late values, and the pool chooses as at the point.

        Raises:
            StoreNotFoundError: there is no such point.
        """
        if not self._is_on_disk:
            raise StoreNotFoundError(
                f"{name}: a pool in memory keeps no points; its checkpoints contain the trajectories"
            )
        if not self.is_recording:
            self._buffer.points.go_to(name)
        elif (point := _point_of(self._catalog(), name)) is not None:
            self._current = point
        else:
            raise StoreNotFoundError(f"{name}: a saved point without an experience pool; resume from another")

    def hold(self, names: Collection[str], /) -> None:
        """Remove all points but these and the newest one. Unknown names are ignored.

        Pins of users stay, each with the newest point that led to it.
        """
        if not self._is_on_disk:
            return
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
        if self.is_recording:
            self._protect({})


def _as_recorded(trajectory: AgentTrajectory) -> AgentTrajectory:
    """Return a trajectory without the values that late ones replaced, where it has those no longer."""
    metadata = trajectory.metadata
    if RECORDED_VALUES not in metadata or GIVEN in metadata:
        return trajectory
    return replace(trajectory, metadata={name: value for name, value in metadata.items() if name != RECORDED_VALUES})


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one.to(other.dtype), other)


def _ids_of(document: Mapping[str, Any]) -> list[int]:
    return [number for numbers in entries_of(document).values() for number in numbers]


def entries_of(document: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the ids of the pool's trajectories by task, from the document of a point.

    Raises:
        CorruptStoreError: the document is damaged.
    """
    try:
        return {str(task): list(map(int, numbers)) for task, numbers in document["entries"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptStoreError(f"not the state of an experience pool: {error!r}") from error


def ids_by_name(contents: Contents) -> dict[tuple[str, str], int]:
    """Return the ids of a store's rollouts by task and ``rollout_id``; the newest one of those with the same."""
    index = contents.index
    texts = index.texts.texts()
    names = zip(index.fact("task").tolist(), index.fact("rollout_id").tolist(), strict=True)
    return {
        (texts[int(task)] if task >= 0 else "", texts[int(rollout)]): number
        for (task, rollout), number in zip(names, index["trajectory_id"].tolist(), strict=True)
        if rollout >= 0
    }


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
