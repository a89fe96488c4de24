"""One store, served: what an actor does for producers and learners elsewhere. Knows nothing of Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trajstore import locks
from trajstore.buffer.replay_buffer import TrajectoryReplayBuffer
from trajstore.columns.fields import join_name, walk
from trajstore.distributed.known import REMEMBERED, Known
from trajstore.distributed.parcel import Parcel, unpack, uuids_of
from trajstore.distributed.roll import News, Roll
from trajstore.errors import ConfigurationError
from trajstore.mirroring.options import as_mirror
from trajstore.sampling.base import Drawn
from trajstore.trajectory import AnyTrajectory

MOST_STORES = 1024
"""Store r gives out ids that are r modulo this, so that ids tell whose they are, however many stores there are."""

_GIVEN = frozenset({"auto_save", "auto_save_path", "sample_window_size", "seed", "on_commit"})


@dataclass(frozen=True, slots=True)
class ServedStore:
    """What a store says of itself.

    Attributes:
        rank: its number.
        path: of its run, the folder that has the stores as ``rank_*``.
        options: how its buffer was made.
        host: of its machine.
        node: id of its node, as Ray calls it.
        began: different for each start of the process, so that callers notice one.
    """

    rank: int
    path: str
    options: Mapping[str, Any]
    host: str
    node: str
    began: str


class StoreServer:
    """Owns the store ``rank_<rank>`` of a run. Every call is safe from several threads, and may be made again.

    Args:
        path: of the run; a directory that this process reaches.
        rank: number of the store.
        options: how to make the buffer, see :class:`TrajectoryReplayBuffer`; what the server decides itself is refused.
        about: host, node and start, for :meth:`describe`.

    Raises:
        ConfigurationError: an option is the server's decided.
        StoreLockedError: another process owns the store.
    """

    def __init__(self, path: str, rank: int, options: Mapping[str, Any], about: tuple[str, str, str]) -> None:
        decided = sorted(_GIVEN & options.keys())
        if decided:
            raise ConfigurationError(f"{', '.join(decided)}: decided by the handle or the server, not by an option")
        if not 0 <= rank < MOST_STORES:
            raise ConfigurationError(f"rank: {rank}, must be in [0, {MOST_STORES})")
        self._about = ServedStore(rank, path, dict(options), *about)
        self._buffer = TrajectoryReplayBuffer(
            seed=None,
            sample_window_size=0,
            auto_save=True,
            auto_save_path=str(Path(path) / f"rank_{rank}"),
            **_of_rank(options, rank),
        )
        self._buffer.share_ids(rank, MOST_STORES)
        self._known = Known()
        self._adding = locks.lock("StoreServer._adding")
        self._rolls = {tasks: Roll(tasks, self._about.began) for tasks in (False, True)}
        self._rolling = locks.lock("StoreServer._rolling")
        self._recall()

    def _recall(self) -> None:
        """Learn from the store what it was given."""
        uuids, ids = self._buffer.trajectory_uuids, self._buffer.trajectory_ids
        self._known.note(uuids[-REMEMBERED:].tobytes(), ids[-REMEMBERED:].tolist())

    def describe(self) -> ServedStore:
        """Say who this is."""
        return self._about

    # -- adding -----------------------------------------------------------------------------------

    def add(self, parcel: Parcel, count: int) -> list[int]:
        """Add a parcel's trajectories, those that are not here yet, and return the ids of all.

        Raises:
            StoreWriteError, PendingFullError: see :meth:`TrajectoryReplayBuffer.add_trajectories`.
            ConfigurationError: the parcel is of another version of trajstore.
        """
        uuids = uuids_of(parcel.key, count)
        with self._adding:  # a second attempt waits for the first one's end, and then finds what it has added
            known = self._known.ids(uuids)
            absent = [place for place, number in enumerate(known) if number is None]
            if absent:
                flats = unpack(parcel)
                wanted = b"".join([uuids[16 * place : 16 * place + 16] for place in absent])
                try:
                    self._known.note(wanted, self._buffer.add_flattened([flats[place] for place in absent], wanted))
                except BaseException:
                    self._recall()  # a part of it may have been added
                    raise
                known = self._known.ids(uuids)
        return [number for number in known if number is not None]

    def committed(self, key: bytes, count: int, timeout: float) -> bool | None:
        """Wait until a parcel's trajectories survive a crash.

        Returns:
            Whether they do; False after ``timeout`` seconds; None if some of them are not here: send them again.

        Raises:
            StoreWriteError: they cannot be written at present.
        """
        ids = [number for number in self._known.ids(uuids_of(key, count)) if number is not None]
        if len(ids) < count:
            return None
        if max(ids) <= self._buffer.committed:
            return True
        return self._buffer.wait(ids, timeout)

    def flush(self) -> None:
        """Return when everything added before survives a crash."""
        self._buffer.flush()

    # -- drawing ----------------------------------------------------------------------------------

    def news(self, began: str, cursor: int, tasks: bool) -> News:
        """Return which trajectories were added and evicted since; see :class:`Roll`."""
        with self._rolling:
            roll = self._rolls[tasks]
            self._buffer.follow(roll)
            return roll.since(began, cursor)

    def read(self, drawn: Drawn, columns: Sequence[str] | None) -> dict[str, np.ndarray[Any, Any] | torch.Tensor]:
        """Return rows that were drawn, by dotted name; as numpy arrays where numpy has the dtype.

        Raises:
            TrajectoryUnavailableError: a trajectory has been evicted since.
        """
        found = self._buffer.read(drawn, columns=columns)
        return {join_name(path): _as_numpy(value) for path, value in walk(found)}

    def trajectories(self, ids: Sequence[int]) -> list[AnyTrajectory]:
        """Return whole trajectories.

        Raises:
            TrajectoryUnavailableError: there is no such one.
        """
        return [self._buffer.get(number) for number in ids]

    # -- the rest ---------------------------------------------------------------------------------

    def evict(self, ids: Sequence[int]) -> None:
        """Delete trajectories, durably; those that are evicted already are passed over, as this may be called again."""
        here = set(self._buffer.trajectory_ids.tolist())
        self._buffer.evict([number for number in ids if number in here])

    def save_checkpoint(self, path: str) -> None:
        """Save the store to ``path/rank_<rank>``."""
        self._buffer.save_checkpoint(Path(path) / f"rank_{self._about.rank}")

    def pin(self, name: str) -> int:
        """Make a checkpoint inside the store; return its generation."""
        return self._buffer.pin(name)

    def unpin(self, name: str) -> None:
        """Let go of a checkpoint inside the store."""
        self._buffer.unpin(name)

    def stats(self) -> dict[str, float]:
        """Return flat numbers, see :meth:`TrajectoryReplayBuffer.get_stats`."""
        return self._buffer.get_stats()

    def close(self) -> None:
        """Flush and give the directory back."""
        self._buffer.close()


def _of_rank(options: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return the options of one store: each has a mirror of its decided, a folder of the run's."""
    mirror = as_mirror(options.get("mirror"))
    if mirror is None:
        return dict(options)
    return {**options, "mirror": replace(mirror, url=f"{str(mirror.url).rstrip('/')}/rank_{rank}")}


def _as_numpy(value: torch.Tensor) -> np.ndarray[Any, Any] | torch.Tensor:
    """Return a tensor as an array, which Ray does not copy; as it is where numpy has no such dtype."""
    try:
        array: np.ndarray[Any, Any] = value.numpy()
    except TypeError:
        return value
    return array
