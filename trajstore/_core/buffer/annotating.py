"""Late values: a judge's score, a correction, a tag. From the writer, or from any other process."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from trajstore._core.base.arguments import path_or_url, text
from trajstore._core.base.clock import microseconds
from trajstore._core.base.types import FloatArray
from trajstore._core.columns.facts import OVER_FACTS
from trajstore._core.columns.limits import shown
from trajstore._core.columns.values import as_tensor
from trajstore._core.files.base import Directory
from trajstore._core.files.opening import check_options, open_directory
from trajstore._core.reading.places import kind_of, nothing_at, rank_of, ranks_of
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.late_values import LateValues, Value, check_given, check_late_values, check_same_kinds
from trajstore._core.store.notes import Note
from trajstore._core.store.row_notes import Rows
from trajstore._core.store.run_ids import ALONE, id_from, ids_from, no_rank, own_id, rank_of_id
from trajstore._core.writing.inbox import Inbox, kinds_to_come, put, waiting
from trajstore._core.writing.opening import check_not_mirror
from trajstore._core.writing.unattended import held_log
from trajstore.errors import (
    ConfigurationError,
    InvalidTrajectoryError,
    StoreError,
    StoreLockedError,
    trajectories,
    written,
)

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any] | torch.Tensor


class ValueSink(Protocol):
    """Sets and returns the late values of one or several stores."""

    def annotate(self, update: LateValues, rows: Rows) -> None:
        """Set late values, and values by row, one tensor per trajectory."""

    def history(self, trajectory_id: int) -> list[Note]:
        """Return the late values of a trajectory, the earliest first."""


@runtime_checkable
class Served(Protocol):
    """A buffer that writes a store, or a handle of stores elsewhere (:mod:`trajstore.distributed`)."""

    @property
    def _sink(self) -> ValueSink:
        """Where its late values go."""


Values = Value | Sequence[Value] | Array | Sequence[Array]
"""One value for all trajectories, or one per trajectory; or, as a list of arrays, the rows of each."""


def annotate(
    store: str | Path | Served,
    ids: int | str | Sequence[int | str],
    values: Mapping[str, Values],
    *,
    who: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Set late values of trajectories, durably: numbers, texts such as tags, rows.

    The latest value of a name counts, and is a column of queries (``query()``); earlier ones stay in the history
    (:func:`notes_of`). A number called ``outcome``, ``success_rate`` or ``reward_NAME`` overrides the rollout's own
    value. A rollback to an earlier point removes later values.

    Any process may call this with the path of a store or of a run, even while another writes there: the values wait in
    the store's inbox until its writer applies them, a second later, or are applied at once if there is no writer.

    Args:
        store: path or URL of a store or run directory; the buffer that writes the store; or a handle of stores in Ray.
        ids: of the trajectories.
        values: by name: a finite number, a bool, a text of up to 4,096 characters, or None, which removes the value;
            one for all trajectories or one for each. Or a list of the rows of each, tensors or arrays of one dtype:
            ``[T, B, ...]`` of a block of steps, ``[L]`` or ``[R]`` of a rollout with L tokens, R of them its response.
            Rows require the buffer that writes the store, or a handle, as ``store``.
        who: author of the values, for the history; None: unknown.
        storage_options: passed on to the fsspec file system.

    Raises:
        ConfigurationError: a name or value cannot be stored, or contradicts the kind that a name has in the store or,
            if it is new there, in another rank of the run; or the store is a mirror. Nothing was set.
        TrajectoryUnavailableError: an id is not live: never given, or evicted, even if a snapshot names it; nothing
            was set.
        StoreNotFoundError: there is no store.
        StoreError: the buffer has no store.
        StoreWriteError: writing failed; nothing was set (of an object store, unless only its answer was lost).
    """
    if not isinstance(store, Served):
        annotate_files(store, ids, values, who, storage_options)
        return
    update, rows = _checked_values(ids, values, who)
    if len(update.ids) and (update.values or rows):
        store._sink.annotate(update, rows)


def annotate_files(
    store: str | Path, ids: Any, values: Any, who: str | None, storage_options: Mapping[str, Any] | None = None
) -> list[str]:
    """Set late values of a store or run directory, see :func:`annotate`; return the names that it did not have."""
    update, rows = _checked_values(ids, values, who)
    if rows:
        raise ConfigurationError(
            f"annotate: {', '.join(rows)}: only the store's writer can add values by row: pass its "
            "buffer, TrajectoryReplayBuffer(auto_save=True, auto_save_path=...), or a handle of stores in Ray, instead "
            "of the path"
        )
    stores = _stores(store, storage_options or {})
    parts: list[tuple[Directory, str, LateValues]] = []
    there: set[str] = {*OVER_FACTS}
    known: dict[int, Mapping[str, str]] = {}
    ranks = rank_of_id(update.ids)
    for rank in np.unique(ranks).tolist():
        if rank not in stores:
            raise no_rank(store, int(update.ids[ranks == rank][0]), stores)
        part = update.without(update.ids[ranks != rank])
        check_not_mirror(stores[rank])
        part = replace(part, ids=own_id(part.ids))
        catalog = Catalog.open(stores[rank])
        catalog.check_known(part.ids)
        there.update(catalog.index.facts)
        known[rank] = kinds_to_come(catalog, part.values.keys())
        check_late_values(part, known[rank])
        parts.append((stores[rank], catalog.store_id, part))
    new = {name: some for name, some in update.values.items() if not all(name in kinds for kinds in known.values())}
    if new:
        _check_ranks(replace(update, values=new), stores, known)
    for directory, store_id, part in parts if update.values else ():
        with written(f": nothing was given to the trajectories of {directory.url}"):
            put(directory, store_id, part)
        _take_in(directory)
    return [name for name in update.values if name not in there.union(*known.values())]


def _check_ranks(update: LateValues, stores: Mapping[int, Directory], known: dict[int, Mapping[str, str]]) -> None:
    """Refuse new names whose values have another kind in some rank of the run; add the kinds of all ranks to ``known``.

    Args:
        update: the values of these names.
        stores: of the run.
        known: kinds of names, by rank, as far as known already.

    Raises:
        ConfigurationError: names the rank.
    """
    for rank, directory in stores.items():
        kinds = known.get(rank)
        if kinds is None:
            try:
                kinds = known[rank] = kinds_to_come(Catalog.open(directory), update.values.keys())
            except StoreError as error:  # the other ranks still get their values
                logger.warning(
                    "annotate: rank %d cannot be read, so the names of its values are not checked: %s", rank, error
                )
                continue
        check_same_kinds(
            update.kinds, kinds, f"in rank {rank} of the run: a name stands for one kind of values in all ranks"
        )


def notes_of(
    store: str | Path | Served, trajectory_id: int | str, *, storage_options: Mapping[str, Any] | None = None
) -> list[Note]:
    """Return every late value of a trajectory, the earliest first, with author and time.

    Args:
        store: path or URL of a store or run directory; the buffer that writes the store; or a handle of stores in Ray.
        trajectory_id: of the trajectory.
        storage_options: passed on to the fsspec file system.

    Raises:
        TrajectoryUnavailableError: the id is not in the store.
        StoreNotFoundError: there is no store.
        StoreError: the buffer has no store.
        CorruptStoreError: it is damaged.
    """
    number = id_from("trajectory_id", trajectory_id)
    if isinstance(store, Served):
        return store._sink.history(number)
    stores = _stores(store, storage_options or {})
    if rank_of_id(number) not in stores:
        raise no_rank(store, number, stores)
    catalog = Catalog.open(stores[rank_of_id(number)])
    catalog.check_known([own_id(number)])
    asked = trajectory_id if isinstance(trajectory_id, str) and "/" in trajectory_id else number
    return [replace(note, trajectory_id=asked) for note in catalog.notes.history(own_id(number))]


def _take_in(directory: Directory) -> None:
    """Apply the late values in a store's inbox, unless it has a writer, which does so.

    The inbox is read again once the lock is free: processes that found it held meanwhile left their values to us.
    """
    before: list[str] = []
    while (there := waiting(directory)) != before:
        try:
            with held_log(directory, wait=False) as log:
                Inbox(log).look()
        except StoreLockedError:
            return
        before = [name for name in there if name in waiting(directory)]


def _checked_values(ids: Any, values: Any, who: str | None) -> tuple[LateValues, Rows]:
    """Check late values, except against existing ones; return them, and the values by row.

    Raises:
        ConfigurationError: a value cannot be stored.
    """
    wanted = ids_from("ids", [ids] if isinstance(ids, int | str) else ids)
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise ConfigurationError("values: must be a dict of values by name")
    rows = {name: _rows(name, some, len(wanted)) for name, some in values.items() if _is_rows(some)}
    listed = {name: _listed(some, len(wanted)) for name, some in values.items() if name not in rows}
    update = LateValues(wanted.copy(), listed, "" if who is None else text("who", who), microseconds())
    check_given(update, rows)
    return update, rows


def _is_rows(values: Any) -> bool:
    """Return whether values are rows: a list of arrays with dimensions, or one such array."""
    if isinstance(values, torch.Tensor | np.ndarray):
        return values.ndim > 1
    return isinstance(values, list | tuple) and any(
        isinstance(item, torch.Tensor | np.ndarray) and item.ndim for item in values
    )


def _rows(name: str, values: Sequence[Any], count: int) -> list[torch.Tensor]:
    """Return the rows of each trajectory, contiguous and on the CPU.

    Raises:
        ConfigurationError: their number is wrong, or one is not an array.
    """
    if len(values) != count:
        raise ConfigurationError(
            f"annotate: {name}: rows of {trajectories(len(values))} for {count}, must be as many: a list of arrays"
        )
    tensors = []
    for at, item in enumerate(values):
        if not isinstance(item, torch.Tensor | np.ndarray):
            raise ConfigurationError(
                f"annotate: {name}: value {at} is {shown(item)}, others are arrays of rows; to remove rows, pass "
                "None for all trajectories of a call"
            )
        try:
            tensors.append(as_tensor(name, item))
        except InvalidTrajectoryError as error:
            raise ConfigurationError(f"annotate: {error}") from error
    return tensors


def _listed(value: Any, count: int) -> list[Any] | FloatArray:
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype in (np.float32, np.float64):
        return value.astype(np.float64)  # a copy: the caller may change its array
    plain = _plain(value)
    if plain is value and isinstance(value, list | tuple):
        return list(map(_plain, value))
    return plain if isinstance(plain, list) else [plain] * count


def _plain(value: Any) -> Any:
    """Return numbers of torch and numpy as Python's."""
    return value.tolist() if isinstance(value, torch.Tensor | np.ndarray | np.generic) else value


def _stores(path: str | Path, storage_options: Mapping[str, Any]) -> dict[int, Directory]:
    """Return the store at a path (by ``ALONE``), or those of a run, by rank.

    Raises:
        StoreNotFoundError: there is no store.
    """
    check_options(path, storage_options)
    directory = open_directory(path_or_url("store", path), **storage_options)
    if kind_of(directory) == "store":
        return {ALONE: directory}
    stores = {rank_of(place): place for place in ranks_of(directory).directories if kind_of(place) == "store"}
    if not stores:
        raise nothing_at(path, directory)
    return stores
