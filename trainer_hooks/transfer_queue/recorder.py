"""The recorder: a Ray actor that writes rows to a store as rollouts, and finds them again for late fields.

One thread does the work, in order of arrival; the actor's other threads only queue it.
"""

from __future__ import annotations

import logging
import pickle
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from trainer_hooks.replay.rows import join_responses, lengths_of_rows
from trainer_hooks.replay.store import BufferStore, ids_by_name
from trainer_hooks.transfer_queue.rows import Row, unpack_columns
from trajstore import TrajectoryReplayBuffer, annotate
from trajstore._core.base import exits
from trajstore._core.base.background import Background
from trajstore.errors import (
    ConfigurationError,
    InvalidTrajectoryError,
    StoreClosedError,
    StoreError,
    StoreWriteError,
    TrajectoryUnavailableError,
    counted,
)
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

AUTHOR = "trainer"
"""Author of late values."""

_WAITING_BYTES = 1 << 30
"""Limit on the memory of rows that the thread has not processed; puts of further rows wait."""

_REMEMBERED = 1 << 17
"""Number of newest rollouts that late fields can reach."""

_WARN_EVERY = 100


class RolloutFormat(Protocol):
    """Converts rows of one trainer; pickled to the recorder."""

    partitions: Sequence[str]
    """Partitions whose rows are recorded."""
    begins: str
    """Column that only a rollout's first put has."""
    left_out: Collection[str]
    """Columns of the first put that are not recorded; all others are."""
    left_out_late: Collection[str]
    """Columns of later puts that are not recorded."""
    prompt_tag: str
    """Name of a tag that rows of prompts have; their columns are not recorded."""
    late: Mapping[str, str]
    """Names of late values by column, with a value per response token; those of other lengths are skipped.

    Other columns keep their name, and may have a value per token.
    """

    def keys(self, columns: Mapping[str, Sequence[Any]]) -> list[str]:
        """Return the keys of the rows of a put, from their columns."""

    def rollouts(self, rows: Sequence[Row]) -> list[tuple[AgentTrajectory, list[int]]]:
        """Return the rollouts among the rows of a put, and the positions of each one's rows."""

    def finish(self, rollouts: Sequence[AgentTrajectory]) -> None:
        """Add what takes long, such as text, in place."""

    @property
    def problems(self) -> Mapping[str, int]:
        """Counts by figure, reported with the recorder's status."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """The store of a recorder."""

    path: str
    """Directory or URL; an existing store is continued."""
    format: str = "pt"
    capacity: int | None = None
    """Number of trajectories to keep beside those that a pool needs, deleting the oldest; ``None`` = all."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What storage managers pass on, of which puts; see :class:`RolloutFormat`."""

    partitions: frozenset[str]
    begins: str
    left_out: frozenset[str]
    left_out_late: frozenset[str]
    prompt_tag: str


@dataclass(frozen=True, slots=True)
class Status:
    """Counters of a recorder."""

    recorded: int
    """Rollouts added to the store."""
    waiting: int
    """Rollouts that arrived and are not on disk."""
    lost: int
    """Rollouts that could not be written."""
    store_id: str
    problems: Mapping[str, int]
    """Of the format."""
    error: Exception | None
    """The first failure since the last status, if any."""


@dataclass(slots=True)
class _Known:
    """A recorded rollout that late fields may reach."""

    number: int
    """Trajectory id."""
    has_reward: bool
    rows: list[tuple[int, int]]
    """Length and prompt length of each row."""
    partial: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    """Late values of some of its rows, until all have arrived: by name and row."""


class Recorder:
    """Writes rollouts to a store in the background. Thread-safe; runs as a Ray actor."""

    def __init__(self) -> None:
        self._path = ""
        self._buffer: TrajectoryReplayBuffer | None = None
        self._pool: BufferStore | None = None
        self._rollouts: RolloutFormat | None = None
        self._background: Background | None = None
        self._by_index: dict[int, tuple[_Known, int]] = {}
        """Rollout and row of TransferQueue's global indexes; an index is used again after its row was cleared."""
        self._by_name: OrderedDict[str, _Known] = OrderedDict()
        self._recalled: dict[str, _Known] = {}
        """Stored rollouts that are put again, by ``rollout_id``."""
        self._older: dict[str, int] | None = None
        """Ids of other rollouts in the store, by ``rollout_id``; ``None`` until one is searched."""
        self._unset: list[tuple[tuple[int, ...], dict[str, list[Any]]]] = []
        """Ids and late values that are not in the store yet."""
        self._loaded: tuple[str, bytes | None] | None = None
        """A checkpoint that was loaded before :meth:`open`."""
        self._queued = self._recorded = self._lost = self._failures = 0
        self._error: Exception | None = None
        self._warned: set[str] = set()
        """Names of late values that are not recorded, each logged once."""

    def open(self, options: StoreOptions, rollouts: RolloutFormat) -> None:
        """Open the store and record from now on.

        Raises:
            ConfigurationError: a store is open already.
            StoreLockedError: another process writes to the store.
            StoreWriteError, CorruptStoreError: the store cannot be continued.
        """
        if self._buffer is not None:
            raise ConfigurationError(f"{options.path}: this TransferQueue records already, to {self._path}")
        buffer = TrajectoryReplayBuffer(
            auto_save=True, auto_save_path=options.path, trajectory_format=options.format, enable_cache=False
        )
        self._path = options.path
        self._pool = BufferStore(
            buffer, lambda rollouts: self.find([rollout.rollout_id for rollout in rollouts]), capacity=options.capacity
        )
        self._by_index, self._by_name, self._recalled, self._unset = {}, OrderedDict(), {}, []
        self._older = None
        self._queued = self._recorded = self._lost = self._failures = 0
        self._error = None
        self._background = Background(f"recording to {options.path}", _WAITING_BYTES)
        self._background.submit(partial(rollouts.finish, []))  # loads what it needs before the first rollout arrives
        self._rollouts, self._buffer = rollouts, buffer
        if (loaded := self._loaded) is not None:
            self._loaded = None
            self.load_rows(*loaded)
        exits.remember(self)

    @property
    def closed(self) -> bool:
        """True before :meth:`open`, and once closed."""
        return self._buffer is None

    def wanted(self) -> Wanted | None:
        """Return what to pass on; ``None`` while nothing is recorded."""
        made = self._rollouts
        if made is None:
            return None
        left_out = frozenset(made.left_out), frozenset(made.left_out_late)
        return Wanted(frozenset(made.partitions), made.begins, *left_out, made.prompt_tag)

    def accept(self, indexes: Sequence[int], tags: Sequence[Mapping[str, Any]], message: bytes) -> None:
        """Queue rows that begin rollouts. Waits only if too much is queued.

        Args:
            indexes: TransferQueue's global indexes of the rows.
            tags: their tags.
            message: their columns, packed.
        """
        self._queued += 1
        self._submit(partial(self._begin, indexes, tags, message), len(message))

    def accept_late(self, indexes: Sequence[int], message: bytes) -> None:
        """Queue later columns of rows; rows that are no recorded rollouts are skipped."""
        self._submit(partial(self._add_late, indexes, message), len(message))

    def recall(self, trajectory_id: int) -> AgentTrajectory | None:
        """Return a stored rollout to put again: the put with its ``rollout_id`` is not recorded, late fields reach it.

        Returns:
            ``None`` if it is no longer in the store.
        """
        try:
            rollout = None if self._buffer is None else self._buffer.get(trajectory_id)
        except TrajectoryUnavailableError:
            return None
        if not isinstance(rollout, AgentTrajectory):
            return None
        known = _Known(trajectory_id, rollout.reward is not None, lengths_of_rows(rollout))
        self._submit(partial(self._expect, rollout.rollout_id, known), 0)
        return rollout

    def set_values(self, names: Sequence[str], values: Mapping[str, Sequence[Any]]) -> None:
        """Queue late values of rollouts, by ``rollout_id``.

        ``outcome`` and ``reward_score`` are set only for rollouts that arrived without a reward.

        Args:
            names: the rollouts.
            values: by name, one per rollout; ``None`` = no value.
        """
        self._submit(partial(self._set_values, names, values), 0)

    def find(self, names: Sequence[str]) -> list[int | None]:
        """Return the trajectory ids of rollouts in the store, by ``rollout_id``; waits for those that arrived."""
        found: list[int | None] = []
        self._wait_for(partial(self._find, names, found))
        return found or [None] * len(names)

    def rollouts(self, names: Sequence[str]) -> list[AgentTrajectory]:
        """Return rollouts with the late values that arrived, by ``rollout_id``, without those that are not stored."""
        made = []
        for number in self.find(names):
            if number is None:
                continue
            try:
                made.append(self.pool("get", number))
            except (StoreError, TrajectoryUnavailableError) as error:  # damaged, or evicted by the capacity
                self._failed(StoreError(f"rollout {number} cannot be read: {error}"), 0)
        return made

    def pool(self, call: str, *arguments: Any) -> Any:
        """Return the result of a method of the pool's store, whose pool chooses among the rollouts.

        Raises:
            StoreClosedError: nothing is recorded.
        """
        if self._pool is None:
            raise StoreClosedError("the recorder has no open store")
        return getattr(self._pool, call)(*arguments)

    def save_rows(self) -> bytes:
        """Return which rollout each row is, for :meth:`load_rows`; waits until these are durable."""
        state: list[bytes] = []
        self.flush()
        self._wait_for(partial(self._save_rows, state))
        return state[0] if state else b""

    def load_rows(self, checkpoint: str, state: bytes | None) -> None:
        """Replace the rows by those of a checkpoint; without these, late fields find no rollout, as the log says.

        Args:
            checkpoint: its path, for the log.
            state: of :meth:`save_rows`; empty if nothing was recorded then, ``None`` if the checkpoint lacks it.
        """
        if self._buffer is None:
            self._loaded = checkpoint, state
        else:
            self._submit(partial(self._load_rows, checkpoint, state), 0)

    def status(self) -> Status:
        """Return the counters, and the first failure since the last call.

        Raises:
            StoreClosedError: nothing is recorded.
        """
        buffer, rollouts = self._buffer, self._rollouts
        if buffer is None or rollouts is None:
            raise StoreClosedError("the recorder has no open store")
        unwritten = buffer._trajectory_counter - 1 - int(buffer.get_stats()["committed"])
        error, self._error = self._error, None
        return Status(
            self._recorded,
            self._queued + max(unwritten, 0),
            self._lost,
            str(buffer.store_id),
            dict(rollouts.problems),
            error,
        )

    def flush(self) -> None:
        """Wait until everything that arrived is durable. :meth:`status` has the error otherwise."""
        self._wait_for(self._set_late)
        if self._buffer is not None:
            try:
                self._buffer.flush()
            except StoreWriteError as error:
                self._failed(error, 0)

    def close(self) -> None:
        """Write everything and close the store. Idempotent.

        Raises:
            StoreError, InvalidTrajectoryError: something could not be written.
        """
        buffer, background = self._buffer, self._background
        if buffer is None or background is None:
            return
        try:
            background.submit(self._set_late)
            background.close()
            if self._unset:
                lost = counted(sum(len(ids) for ids, _ in self._unset), "rollout")
                self._failed(StoreWriteError(f"{self._path}: late values of {lost} were not written"), 0)
        finally:
            try:
                buffer.close()
            finally:
                self._rollouts = self._buffer = self._pool = self._background = None
                exits.forget(self)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _submit(self, call: Callable[[], None], nbytes: int) -> None:
        if (background := self._background) is not None:
            background.submit(call, nbytes + 1)

    def _wait_for(self, call: Callable[[], None]) -> None:
        """Run a call after those that were submitted, and wait for it; nothing runs without a store."""
        if (background := self._background) is not None:
            background.submit(call)
            background.wait()

    # ---- in the thread ----

    def _save_rows(self, state: list[bytes]) -> None:
        if self._buffer is not None:
            state.append(pickle.dumps((str(self._buffer.store_id), self._by_index, self._by_name)))

    def _load_rows(self, checkpoint: str, state: bytes | None) -> None:
        by_index: dict[int, tuple[_Known, int]] = {}
        by_name: dict[str, _Known] = {}
        reason = "it has none"
        if state:
            try:
                store, by_index, by_name = pickle.loads(state)
                here = "" if self._buffer is None else str(self._buffer.store_id)
                reason = "" if store == here else f"they are in store {store}, not in {self._path}"
            except Exception as error:  # any, of a damaged pickle
                reason = repr(error)
        # Without an entry, a row of the checkpoint would be taken for a later one with the same index.
        self._by_index = {} if reason else by_index
        self._by_name.update({} if reason else by_name)
        if reason and state != b"":
            logger.warning("%s: late values of its rollouts are not recorded: %s", checkpoint, reason)

    def _expect(self, name: str, known: _Known) -> None:
        self._recalled[name] = known

    def _begin(self, indexes: Sequence[int], tags: Sequence[Mapping[str, Any]], message: bytes) -> None:
        made = self._rollouts
        keys: Sequence[str] = [f"of index {index}" for index in indexes]
        try:
            for index in indexes:
                self._by_index.pop(index, None)
            if made is None:
                return
            unpacked = unpack_columns(message)
            keys = made.keys(unpacked)
            rows = [
                Row(key, tag, {name: values[place] for name, values in unpacked.items()})
                for place, (key, tag) in enumerate(zip(keys, tags, strict=True))
            ]
            rollouts = made.rollouts(rows)
            made.finish([rollout for rollout, _ in rollouts if rollout.rollout_id not in self._recalled])
            for rollout, places in rollouts:
                recalled = self._recalled.pop(rollout.rollout_id, None)
                if recalled is None:
                    self._add(rollout, [indexes[place] for place in places])
                else:
                    self._remember(rollout.rollout_id, recalled, [indexes[place] for place in places])
        except Exception as error:  # of the format: a row that it cannot convert must not stop the recording
            self._failed(InvalidTrajectoryError(f"rows {', '.join(map(str, keys[:4]))}: {error!r}"), len(keys))
        finally:
            self._queued -= 1

    def _add(self, rollout: AgentTrajectory, indexes: Sequence[int]) -> None:
        buffer = self._buffer
        if buffer is None:
            return
        before = buffer._trajectory_counter
        for lost in (0, 1):  # the first error may be of an earlier write, reported once, and retried by the store
            try:
                (number,) = buffer.add_trajectories([rollout])
            except StoreWriteError as error:
                is_added = buffer._trajectory_counter > before
                self._failed(error, 0 if is_added else lost)
                if not is_added:
                    continue
                number = before
            except (StoreError, InvalidTrajectoryError) as error:
                self._failed(error, 1)
                return
            self._recorded += 1
            known = _Known(number, rollout.reward is not None, lengths_of_rows(rollout))
            self._remember(rollout.rollout_id, known, indexes)
            return

    def _remember(self, name: str, known: _Known, indexes: Sequence[int]) -> None:
        self._by_name[name] = known
        self._by_index |= {index: (known, row) for row, index in enumerate(indexes)}
        while len(self._by_name) > _REMEMBERED:
            oldest, known = self._by_name.popitem(last=False)
            if self._older is not None:
                self._older[oldest] = known.number

    def _find(self, names: Sequence[str], found: list[int | None]) -> None:
        if self._older is None and self._buffer is not None and any(name not in self._by_name for name in names):
            self._older = {name: number for (_, name), number in self._buffer._live.locked(ids_by_name).items()}
        older = self._older or {}
        found += [older.get(name) if (known := self._by_name.get(name)) is None else known.number for name in names]

    def _add_late(self, indexes: Sequence[int], message: bytes) -> None:
        made = self._rollouts
        if made is None:
            return
        late: dict[str, dict[int, Any]] = {}
        for column, values in unpack_columns(message).items():
            name = made.late.get(column, column)
            ready = late.setdefault(name, {})
            for index, value in zip(indexes, values, strict=True):
                if (found := self._by_index.get(index)) is None or not isinstance(value, Tensor):
                    continue
                known, row = found
                length, prompt = known.rows[row]
                whole = column not in made.late and len(value) == length
                if not whole and len(value) != length - prompt:
                    if column not in made.late and name not in self._warned:
                        self._warned.add(name)
                        logger.warning(
                            "late values %s are not recorded: %d for %d tokens, %d of them of the prompt",
                            *(name, len(value), length, prompt),
                        )
                    continue
                rows = known.partial.setdefault(name, {})
                rows[row] = value
                if len(rows) == len(known.rows):
                    del known.partial[name]
                    parts = [rows[number] for number in range(len(rows))]
                    prompts = [0 if whole else prompt for _, prompt in known.rows]
                    ready[known.number] = join_responses(parts, prompts)
        self._annotate(late)

    def _set_values(self, names: Sequence[str], values: Mapping[str, Sequence[Any]]) -> None:
        late: dict[str, dict[int, Any]] = {}
        for name, given in values.items():
            late[name] = {
                known.number: value
                for rollout, value in zip(names, given, strict=True)
                if value is not None and (known := self._by_name.get(rollout)) is not None
                if not (known.has_reward and name in ("outcome", "reward_score"))
            }
        self._annotate(late)

    def _annotate(self, late: Mapping[str, Mapping[int, Any]]) -> None:
        """Set late values, by name and trajectory id; names of the same trajectories with one commit."""
        groups: dict[tuple[int, ...], list[str]] = {}
        for name, values in late.items():
            groups.setdefault(tuple(values), []).append(name)
        self._unset += [
            (ids, {name: list(late[name].values()) for name in names}) for ids, names in groups.items() if ids
        ]
        self._set_late()

    def _set_late(self) -> None:
        """Set queued late values, in order; a full disk leaves them queued."""
        buffer = self._buffer
        while buffer is not None and self._unset:
            ids, values = self._unset[0]
            try:
                annotate(buffer, ids, values, who=AUTHOR)
            except TrajectoryUnavailableError:  # evicted by the capacity: the others still get theirs
                live = set(buffer.trajectory_ids.tolist())
                places = [place for place, number in enumerate(ids) if number in live]
                if 0 < len(places) < len(ids):
                    kept = {name: [given[place] for place in places] for name, given in values.items()}
                    self._unset.insert(1, (tuple(ids[place] for place in places), kept))
            except StoreWriteError as error:
                self._failed(error, 0)
                return
            except (StoreError, ConfigurationError) as error:
                of = counted(len(ids), "rollout")
                self._failed(StoreError(f"late values {', '.join(values)} of {of}: {error}"), 0)
            del self._unset[0]

    def _failed(self, error: Exception, rollouts: int) -> None:
        self._lost += rollouts
        if self._failures % _WARN_EVERY == 0:
            logger.error("rollouts are not recorded: %s", error)
        self._failures += 1
        if self._error is None:
            self._error = error
