"""A process that reads stores of an S3 server by ranges while others write them, and compares every row."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from tests.support.witness import WitnessError, check_batch, check_trajectory
from tools.campaigns import PATIENCE, Asked, NoAnswerError, Result, heard
from trajstore import TrajectoryReplayBuffer
from trajstore.errors import StoreNotFoundError, TrajstoreError

_PAUSE = 0.2  # between two batches: the server is busy with those whom the campaign is about
_ROWS = 16
_MOST = 3  # of what was wrong is told


class Seen(NamedTuple):
    """A trajectory as a reader saw it: key of the witness, and the values of rows that came late by their name."""

    key: int
    late: dict[str, list[float]]


def read_all(reader: TrajectoryReplayBuffer) -> dict[int, Seen]:
    """Return every trajectory by its id, each compared row by row with what its key says.

    Raises:
        WitnessError: a row is not what was written.
        TrajstoreError, OSError: it cannot be read.
    """
    found = {}
    for number in reader.trajectory_ids.tolist():
        trajectory = reader.get(number)
        late = {name: sorted(set(rows.reshape(-1).tolist())) for name, rows in trajectory.notes.items()}
        found[number] = Seen(check_trajectory(trajectory), late)
    return found


@dataclass
class RangeRows:
    """What reads by ranges in its process.

    Attributes:
        options: storage options that lead to the server.
        troubles: what was wrong since :meth:`all_of`.
        batches: how many were compared since.
    """

    options: dict[str, Any]
    troubles: list[str] = field(default_factory=list)
    batches: int = 0
    _url: str = ""
    _reader: TrajectoryReplayBuffer | None = None
    _keys: dict[int, int] = field(default_factory=dict)

    def some_of(self, url: str) -> None:
        """Compare some rows of a store as it is now, if there is one by now."""
        try:
            self._read(url)
        except StoreNotFoundError:
            return
        except (TrajstoreError, WitnessError, OSError) as error:
            self.troubles.append(f"{type(error).__name__}: {error}")
            self.close()  # the next one begins anew

    def _read(self, url: str) -> TrajectoryReplayBuffer:
        if url != self._url:  # nobody looked at the store before it
            self.close()
            self._url, self._keys = url, {}
        if self._reader is None:
            options = {**self.options, "range_reads": True}
            self._reader = TrajectoryReplayBuffer.open(url, storage_options=options, sample_window_size=0)
        else:
            self._reader.refresh()
        if len(self._reader):
            drawn = self._reader.draw(_ROWS)
            batch = self._reader.read(drawn)
            keys, tags = check_batch(batch).tolist(), batch["curr_obs"]["tag"]
            if (tags - (tags >> 20 << 20)).tolist() != drawn.samples.tolist():
                raise WitnessError(f"rows {tags.tolist()} came for the samples {drawn.samples.tolist()}")
            for number, key in zip(drawn.ids.tolist(), keys, strict=True):
                if self._keys.setdefault(number, key) != key:
                    raise WitnessError(f"trajectory {number} has the key {key}, and had {self._keys[number]}")
            self.batches += 1
        return self._reader

    def all_of(self, url: str) -> dict[int, Seen]:
        """Return every trajectory of a store as it is now, and let go of the store."""
        seen: dict[int, Seen] = {}
        try:
            seen = read_all(self._read(url))
        except (TrajstoreError, WitnessError, OSError) as error:
            self.troubles.append(f"{type(error).__name__}: {error}")
        self.troubles += [
            f"trajectory {number} has the key {seen[number].key}, rows of it had {key}"
            for number, key in self._keys.items()
            if number in seen and seen[number].key != key
        ]
        self.close()
        return seen

    def close(self) -> None:
        """Let go of the store."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()


def detours_told(rows: RangeRows) -> AbstractContextManager[None]:
    """Count a warning that ranges do not come by obstore among the troubles: something else would be compared."""
    return heard("trajstore.remote.object_store", rows.troubles)


def _serve(options: dict[str, Any], orders: Connection) -> None:
    torch.set_num_threads(1)
    logging.getLogger("trajstore._core.sampling").setLevel(
        logging.ERROR
    )  # stores with fewer rows than a batch are in order
    logging.getLogger("trajstore._core.reading").setLevel(logging.ERROR)  # as are formats without ranges
    rows = RangeRows(options)
    with detours_told(rows):
        _obey(rows, orders)


def _obey(rows: RangeRows, orders: Connection) -> None:
    followed: str | None = None
    while True:
        if not orders.poll(None if followed is None else _PAUSE):
            if followed is not None:
                rows.some_of(followed)
            continue
        order, url = orders.recv()
        if order == "follow":
            followed = url
            continue
        seen, followed = rows.all_of(url), None
        orders.send((seen, rows.troubles[:_MOST], rows.batches))
        rows.troubles.clear()
        rows.batches = 0


class RangeReader(Asked):
    """A process that reads by ranges; one that hangs is replaced. To be closed.

    Args:
        options: storage options that lead to the server.
        result: is told how much was compared.
        patience: seconds after which a reader hangs.
    """

    def __init__(self, options: dict[str, Any], result: Result, patience: float = PATIENCE) -> None:
        super().__init__(_serve, options, patience=patience)
        self._result = result

    def follow(self, url: str) -> None:
        """Let rows be read again and again until :meth:`look`, beside whatever is done to the store meanwhile."""
        self.tell(("follow", url))

    def look(self, url: str) -> tuple[dict[int, Seen], list[str]]:
        """Return every trajectory of a store as it is now, and what was wrong since the last look."""
        try:
            seen, troubles, batches = self.ask(("look", url))
        except NoAnswerError as error:
            return {}, [f"the reader by ranges {error}"]
        self._result.counts["batches by ranges"] += batches
        self._result.counts["trajectories by ranges"] += len(seen)
        return seen, [f"by ranges: {trouble}" for trouble in troubles]
