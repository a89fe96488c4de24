"""A storage of TorchRL's replay buffers whose rows are in a store. Written for TorchRL 0.14 and 0.10."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore import Trajectory, TrajectoryReplayBuffer
from trajstore._core.base.arguments import whole
from trajstore._core.sampling.base import Drawn
from trajstore.errors import ConfigurationError, InvalidTrajectoryError

try:
    from torchrl.data.replay_buffers.storages import Storage
except ImportError:  # the reference is made without TorchRL
    Storage = object

if TYPE_CHECKING:
    from tensordict import TensorDict, TensorDictBase

_LARGEST = (1 << 31) - 1
"""Largest cursor of TorchRL's writers."""

_NEXT = {"reward": "rewards", "done": "dones", "terminated": "terminations", "truncated": "truncations"}
"""Entries of ``next`` that are fields of trajectories."""

_STATE = "trajstore.json"


class StoreStorage(Storage):  # type: ignore[misc]
    """Transitions of a store as the storage of a TorchRL replay buffer.

    New rows are appended to the store, as one trajectory for each ``extend`` or ``add``. Rows cannot be set in place.
    :func:`replay_buffer` makes a replay buffer of it.

    Args:
        buffer: the store, with step trajectories only. Its rows are in the order in which they were added.
        max_size: number of rows shown. Once there are more, each new row takes the index of the oldest one shown, as in
            TorchRL's storages; the store keeps both.
    """

    def __init__(self, buffer: TrajectoryReplayBuffer, max_size: int = _LARGEST) -> None:
        super().__init__(whole("max_size", max_size, 1))
        self.buffer = buffer
        self._ids: list[int] = []
        self._ends: list[int] = []
        self._look()

    def _look(self) -> None:
        """Number the rows of the store."""
        with self.buffer._live.contents.lock:
            index = self.buffer._live.contents.index
            counts = np.diff(index.before[index.first : index.end + 1])
            self._ids = index["trajectory_id"].tolist()
        self._ends = np.cumsum(counts).tolist()

    @property
    def rows(self) -> int:
        """Number of rows added, also those that are no longer shown."""
        return self._ends[-1] if self._ends else 0

    def __len__(self) -> int:
        shown: int = min(self.rows, self.max_size)
        return shown

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Append rows.

        Args:
            cursor: their indexes, which must be those that follow the newest row.
            data: a TensorDict, or a list of TensorDicts; without a batch dimension if the cursor is a number.
            set_cursor: False sets rows in place, which a store cannot.

        Raises:
            ConfigurationError: the indexes are others, or the data are no TensorDicts.
            InvalidTrajectoryError: the store cannot have this row; names the field.
        """
        from tensordict import TensorDictBase

        if isinstance(data, list) and all(isinstance(row, TensorDictBase) for row in data):
            data = torch.stack(data)
        if not isinstance(data, TensorDictBase):
            raise ConfigurationError(f"data: {type(data).__name__}, must be a TensorDict")
        if np.ndim(cursor) == 0 and not isinstance(cursor, slice):
            data = data.unsqueeze(0)
        wanted = (self.rows + np.arange(len(data))) % self.max_size
        indexes = self._indexes(cursor, self.max_size)
        if not set_cursor or not np.array_equal(indexes, wanted):
            raise ConfigurationError(
                f"cursor: begins at {indexes[:1].tolist()}, must be {wanted[:1].tolist()}: rows of a store are "
                "appended and never replaced; replay_buffer() makes a replay buffer that continues after them"
            )
        (number,) = self.buffer.add_trajectories([trajectory_of(data)])
        self._ids.append(number)
        self._ends.append(self.rows + len(data))
        noted = getattr(self, "_set_last_cursor", None) or partial(setattr, self, "_last_cursor")  # the latter: 0.10
        noted(torch.from_numpy(indexes))  # samplers of slices cut here

    def get(self, index: Any) -> TensorDict:
        """Return rows as a TensorDict; without a batch dimension if the index is a number.

        Raises:
            IndexError: an index is out of range.
            TrajectoryUnavailableError: a row was evicted.
            SchemaMismatchError: the rows differ in their entries.
        """
        places = self._indexes(index, len(self))
        if len(places) and (places.min() < 0 or places.max() >= len(self)):
            raise IndexError(f"index: {places.min()} to {places.max()}, but there are {len(self)} rows")
        numbers = places + (self.rows - 1 - places) // self.max_size * self.max_size
        positions = [bisect_right(self._ends, number) for number in numbers.tolist()]
        before = [self._ends[at - 1] if at else 0 for at in positions]
        drawn = Drawn(np.array([self._ids[at] for at in positions], np.int64), numbers - np.array(before, np.int64))
        rows = rows_of(self.buffer.read(drawn), len(places))
        return rows[0] if np.ndim(index) == 0 and not isinstance(index, slice | tuple) else rows

    def _indexes(self, index: Any, size: int) -> npt.NDArray[np.int64]:
        if isinstance(index, tuple):
            (index,) = index
        if isinstance(index, slice):
            index = range(*index.indices(size))
        indexes = np.atleast_1d(np.asarray(index, np.int64))
        return np.where(indexes < 0, indexes + size, indexes)

    def contains(self, item: Any) -> Any:
        """Return whether indexes have rows: a bool, or a tensor of them."""
        indexes = torch.as_tensor(item)
        there = (indexes >= -len(self)) & (indexes < len(self))
        return there if there.dim() else bool(there)

    def _empty(self) -> None:
        self.buffer.clear()
        self._look()

    def state_dict(self) -> dict[str, Any]:
        """Return which rows there are, once all are durable; they stay in the store."""
        self.buffer.flush()
        return {"store": self.buffer.store_id, "rows": self.rows}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Compare a state with the store.

        Raises:
            ConfigurationError: the store is another one, or has other rows; roll it back to its saved point first.
        """
        self._look()
        if dict(state_dict) != (mine := self.state_dict()):
            raise ConfigurationError(
                f"state: {dict(state_dict)}, but the store is at {mine}: roll it back to the point that was saved with "
                "this state (points.rollback)"
            )

    def dumps(self, path: str | Path) -> None:
        """Write the state to a folder."""
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / _STATE).write_text(json.dumps(self.state_dict()))

    def loads(self, path: str | Path) -> None:
        """Compare the state in a folder with the store, as :meth:`load_state_dict`."""
        self.load_state_dict(json.loads((Path(path) / _STATE).read_text()))


def replay_buffer(buffer: TrajectoryReplayBuffer, *, max_size: int = _LARGEST, kind: Any = None, **options: Any) -> Any:
    """Return a replay buffer of TorchRL that continues after the rows of a store.

    Args:
        buffer: the store.
        max_size: as for :class:`StoreStorage`.
        kind: class of the replay buffer; None = ``TensorDictReplayBuffer``.
        options: its other arguments, such as ``batch_size``, ``sampler``, ``transform`` and ``prefetch``.
    """
    from torchrl.data import TensorDictReplayBuffer

    storage = StoreStorage(buffer, max_size)
    made = (kind or TensorDictReplayBuffer)(storage=storage, collate_fn=_unchanged, **options)
    made.writer.load_state_dict({"_cursor": storage.rows % storage.max_size})
    return made


def _unchanged(rows: TensorDict) -> TensorDict:
    return rows


def trajectory_of(rows: TensorDictBase) -> Trajectory:
    """Return transitions ``[n]`` of TorchRL as a trajectory of one environment.

    Entries that ``next`` has too are observations; entries without a field of trajectories are in ``forward_inputs``.

    Raises:
        InvalidTrajectoryError: an entry is no tensor; names it.
    """
    entries = _with_environment(rows.detach().cpu().to_dict(), "")
    after = entries.pop("next", {})
    found = {
        name: after.pop(key)
        for key, name in _NEXT.items()
        if isinstance(value := after.get(key), torch.Tensor) and value.dim() == 3
    }
    if isinstance(entries.get("action"), torch.Tensor):
        found["actions"] = entries.pop("action")
    return Trajectory(
        **{"rewards": torch.empty(len(rows), 1, 0)} | found,  # without channels: absent
        curr_obs={key: entries.pop(key) for key in [*entries] if key in after},
        next_obs=after,
        forward_inputs=entries,
    )


def _with_environment(entries: Mapping[str, Any], path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in entries.items():
        if isinstance(value, Mapping):
            found[key] = _with_environment(value, f"{path}{key}.")
        elif isinstance(value, torch.Tensor):
            found[key] = value[:, None]
        else:
            raise InvalidTrajectoryError(f"{path}{key}: {type(value).__name__}, must be a tensor")
    return found


def rows_of(batch: Mapping[str, Any], count: int) -> TensorDict:
    """Return transitions of a store as TorchRL has them; the inverse of :func:`trajectory_of`.

    Args:
        batch: as a reader samples it.
        count: number of rows.
    """
    from tensordict import TensorDict

    entries = dict(batch)
    after = {key: entries.pop(name) for key, name in _NEXT.items() if name in entries}
    if "reward" in after and not after["reward"].numel() and count:
        del after["reward"]
    after |= entries.pop("next_obs", {})
    for name in ("forward_inputs", "curr_obs"):
        entries |= entries.pop(name, {})
    if "actions" in entries:
        entries["action"] = entries.pop("actions")
    return TensorDict(entries | ({"next": after} if after else {}), batch_size=[count])
