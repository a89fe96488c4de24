"""A store as a Ray Data source.

Reads are planned by shard: each task gets neighbouring shards of one store, opens the store once per process, and
reads only the wanted columns. No data passes through an actor.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from inspect import signature
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from trajstore._core.buffer.loading import LoadRequest, load_sources
from trajstore._core.buffer.reader import Reader
from trajstore._core.columns.fields import VALID, unnest
from trajstore._core.files.opening import open_directory
from trajstore._core.reading.sources import StoreSource
from trajstore._core.sampling.base import Drawn
from trajstore._core.store.run_ids import own_id, shown_id
from trajstore.distributed.actors import away, first_line, ray
from trajstore.distributed.handle import DistributedReplayBuffer
from trajstore.distributed.rows import DOCUMENT, ID, SAMPLE, array_of, row_of
from trajstore.distributed.server import MOST_STORES
from trajstore.errors import (
    ConfigurationError,
    MissingDependencyError,
    StoreNotFoundError,
    StoreUnreachableError,
    TrajectoryUnavailableError,
    listed,
    trajectories,
)

try:
    from ray.data import Datasource
    from ray.data.block import Block, BlockAccessor, BlockMetadata
    from ray.data.datasource import ReadTask
except ImportError as error:
    raise MissingDependencyError("ray", "ray") from error

Unit = Literal["sample", "trajectory"]

_BLOCK_BYTES = 32 << 20  # maximum of an output block, unless one row is larger


@dataclass(frozen=True)
class Share:
    """The input of one task.

    Attributes:
        path: path of the store.
        store_id: UUID of the store.
        ids: trajectory ids in the run, ``[n]``, in the order of the store's shards.
        samples: valid transitions of each trajectory, ``[n]``.
        nbytes: bytes of each trajectory in all columns, ``[n]``.
        schemas: schema number of each trajectory, ``[n]``.
        columns: column names by schema number.
    """

    path: str
    store_id: str
    ids: npt.NDArray[np.int64]
    samples: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    schemas: npt.NDArray[np.int64]
    columns: Mapping[int, frozenset[str]]

    def part(self, chosen: slice | npt.NDArray[np.intp]) -> Share:
        """Return a share of the chosen trajectories."""
        arrays = {name: getattr(self, name)[chosen] for name in ("ids", "samples", "nbytes", "schemas")}
        return replace(self, **arrays)


class StoreDatasource(Datasource):
    """A store, or a run of several, for ``ray.data.read_datasource``. :func:`read_store` is the shorter way.

    Rows are transitions (``unit="sample"``) or whole trajectories. A transition has each column by dotted name,
    ``trajectory_id`` and ``sample`` (``t * B + b``); invalid steps are no rows. A trajectory has arrays ``[T, B, ...]``
    or ``[L]``, ``trajectory_id``, and ``document`` (all other values as JSON). dtypes that numpy lacks become float32.
    ``trajectory_id`` equals that of ``TrajectoryReplayBuffer.open(path)``.

    Reads the trajectories present when the datasource is made, with the late values present when a task runs. If a
    writer evicts a trajectory before its task runs, the task fails. A pin prevents both.

    Args:
        path: path or URL of a store or a run directory, the same on every node.
        unit: unit of the rows; None: transitions for step trajectories, else trajectories.
        columns: names of the columns to read; None = all. ``Dataset.select_columns`` directly after the read has the
            same effect.
        pin: name of a pin of the store.
        storage_options: passed to the fsspec file system.

    Raises:
        StoreNotFoundError: no such store or pin.
        IncompleteCheckpointError: a rank of the run is absent.
        ConfigurationError: no trajectory has one of the columns, or agent trajectories are read as transitions.
        CorruptStoreError: the store is damaged.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        unit: Unit | None = None,
        columns: Sequence[str] | None = None,
        pin: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._projection_map: dict[str, str] | None = None
        self._pin = pin
        self._options = dict(storage_options or {})
        self._shares, kinds = _planned(path, pin, self._options)
        self.unit: Unit = unit or ("sample" if kinds <= {"step"} else "trajectory")
        if self.unit not in ("sample", "trajectory"):
            raise ConfigurationError(f"unit: {unit!r}, must be 'sample' or 'trajectory'")
        if self.unit == "sample" and not kinds <= {"step"}:
            raise ConfigurationError(
                f"{path}: has agent trajectories, which have no transitions; use unit='trajectory'"
            )
        self._path = str(path)
        self._columns = None if columns is None else tuple(columns)
        self._check_known(columns or ())

    def without(self, ids: npt.NDArray[np.int64]) -> Self:
        """Return this datasource without the trajectories of these ids."""
        self._shares = [share.part(np.flatnonzero(~np.isin(own_id(share.ids), ids))) for share in self._shares]
        return self

    # -- Ray's interface --------------------------------------------------------------------------

    def supports_projection_pushdown(self) -> bool:
        """Return True: unselected columns are not read."""
        return True

    def estimate_inmemory_data_size(self) -> int:
        """Return the bytes of all rows with all columns."""
        return int(sum(int(share.nbytes.sum()) for share in self._shares))

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[Any]:
        """Return about ``parallelism`` tasks, each for neighbouring shards of one store."""
        wanted = self._wanted()
        tasks = []
        for share in _divided(self._shares, max(1, parallelism)):
            rows = int(share.samples.sum()) if self.unit == "sample" else len(share.ids)
            size = int(share.nbytes.sum())
            about = BlockMetadata(num_rows=rows, size_bytes=size, exec_stats=None, input_files=(share.path,))
            read = partial(_read, share, self.unit, wanted, self._pin, self._options)
            tasks.append(ReadTask(read, about, per_task_row_limit=per_task_row_limit))
        return tasks

    def _check_known(self, names: Iterable[str]) -> None:
        known = {name for share in self._shares for columns in share.columns.values() for name in columns}
        if self.unit == "sample":
            known.discard(VALID)  # invalid steps are no rows
        unknown = sorted({*names} - known - {DOCUMENT, ID, SAMPLE})
        if unknown and known:  # the columns of an empty store are unknown
            raise ConfigurationError(
                f"{self._path}: no column {listed(unknown)}; there are {listed(sorted(known), 30)}"
            )

    def _wanted(self) -> frozenset[str] | None:
        """Return the columns to read; None = all."""
        self._check_known(self._projection_map or ())
        asked = [names for names in (self._columns, self._projection_map) if names is not None]
        return frozenset.intersection(*map(frozenset, asked)) if asked else None


def _planned(path: str | Path, pin: str | None, options: dict[str, Any]) -> tuple[list[Share], set[str]]:
    """Return a share per store, in shard order, and the kinds of trajectories."""
    loaded = load_sources(LoadRequest(open_directory(path, **options), pin=pin))
    for lease in loaded.leases:
        lease.release()
    shares, kinds = [], set()
    for source, index in loaded.parts:
        if not isinstance(source, StoreSource):
            raise ConfigurationError(
                f"{path}: holds a directory of RLinf; load it into a buffer, and save a checkpoint"
            )
        table = source.catalog.shards
        ids, shards = (np.array(index[name], np.int64) for name in ("trajectory_id", "shard"))
        schemas = table.schema_numbers()[shards].astype(np.int64) if len(ids) else shards
        used = {int(number): table.schemas[number] for number in np.unique(schemas)}
        kinds |= {schema.kind for schema in used.values()}
        columns = {number: frozenset(column.name for column in schema.columns) for number, schema in used.items()}
        samples, nbytes = (index[name].astype(np.int64) for name in ("num_samples", "nbytes"))
        whole = Share(source.directory.url, source.catalog.store_id, ids, samples, nbytes, schemas, columns)
        shares.append(whole.part(np.lexsort((ids, shards, schemas))))
    return shares, kinds


def _divided(shares: Sequence[Share], count: int) -> Iterator[Share]:
    """Yield at most about ``count`` shares of roughly equal bytes, each from one store."""
    limit = max(1, -(-sum(int(share.nbytes.sum()) for share in shares) // count))
    for share in shares:
        before = np.cumsum(share.nbytes) - share.nbytes
        for number in np.unique(before // limit):
            yield share.part(np.flatnonzero(before // limit == number))


@lru_cache(maxsize=2)
def _opened(path: str, store_id: str, pin: str | None, options: tuple[tuple[str, Any], ...]) -> Reader:
    """Return a reader, cached for later tasks of this process.

    Raises:
        StoreNotFoundError: another store is at the path now.
    """
    reader = Reader.open(path, pin=pin, storage_options=dict(options))
    if reader._store_ids != [store_id]:
        raise StoreNotFoundError(
            f"{path}: the planned store {store_id} was replaced by {listed(reader._store_ids)}; call read_store again"
        )
    return reader


def _reader(share: Share, pin: str | None, options: dict[str, Any]) -> Reader:
    """Return a reader of the store's present state, or of the pin's."""
    given = share.path, share.store_id, pin, tuple(options.items())
    try:
        reader = _opened(*given)
    except TypeError:  # unhashable options (nested dicts)
        return _opened.__wrapped__(*given)
    reader.refresh()
    return reader


def _read(
    share: Share, unit: Unit, columns: frozenset[str] | None, pin: str | None, options: dict[str, Any]
) -> Iterator[Block]:
    """Yield the rows of a share, in a Ray worker process.

    Raises:
        TrajectoryUnavailableError: trajectories were evicted after planning.
        StoreNotFoundError: the store was replaced after planning, or the pin was removed.
    """
    reader = _reader(share, pin, options)
    gone = share.ids[~reader._sampling.readable(own_id(share.ids))]
    if len(gone):
        raise TrajectoryUnavailableError(
            f"{share.path}: {trajectories(len(gone), 'was', 'were')} evicted after the read was planned "
            f"({listed(map(shown_id, gone.tolist()))}); pin the store and read the pin"
        )
    for number in np.unique(share.schemas):
        yield from _blocks(reader, share.part(np.flatnonzero(share.schemas == number)), unit, columns)


def _blocks(reader: Reader, share: Share, unit: Unit, columns: frozenset[str] | None) -> Iterator[Block]:
    """Yield blocks of trajectories of one schema."""
    before = np.cumsum(share.nbytes) - share.nbytes
    for number in np.unique(before // _BLOCK_BYTES):
        part = share.part(np.flatnonzero(before // _BLOCK_BYTES == number))
        batch = _samples(reader, part, columns) if unit == "sample" else _trajectories(reader, part, columns)
        block = BlockAccessor.batch_to_block(batch)
        yield block if columns is None else block.select([name for name in batch if name in columns])


def _samples(reader: Reader, share: Share, columns: frozenset[str] | None) -> dict[str, Any]:
    ids = np.repeat(share.ids, share.samples)
    samples = np.arange(len(ids)) - np.repeat(np.cumsum(share.samples) - share.samples, share.samples)
    drawn = Drawn(own_id(ids), samples)
    batch: dict[str, Any] = {ID: ids, SAMPLE: reader._sampling.origins(drawn)[0]}
    (known,) = {share.columns[int(number)] for number in np.unique(share.schemas)}
    wanted = None if columns is None else sorted(columns & known)
    if wanted is None or wanted:
        rows = reader.read(drawn, columns=wanted)
        batch |= {name: array_of(value) for name, value in unnest(rows).items()}
    return batch


def _trajectories(reader: Reader, share: Share, columns: frozenset[str] | None) -> dict[str, Any]:
    rows = [{ID: number, **row_of(reader.get(own_id(number)), columns)} for number in share.ids.tolist()]
    batch: dict[str, Any] = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if isinstance(values[0], np.ndarray):
            batch[name] = np.empty(len(values), object)  # shapes differ from row to row
            batch[name][:] = values
        else:
            batch[name] = np.array(values)
    return batch


def read_store(
    source: str | Path | DistributedReplayBuffer,
    *,
    unit: Unit | None = None,
    columns: Sequence[str] | None = None,
    pin: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **ray_options: Any,
) -> Any:
    """Return a store, a run, or the stores of a handle as a ``ray.data.Dataset``; see :class:`StoreDatasource`.

    The stores of a handle are read on their own nodes, with their directories memory-mapped. A trajectory that two of
    them have is read once.

    Args:
        source: path or URL, or a handle.
        unit: unit of the rows: ``"sample"`` or ``"trajectory"``.
        columns: names of the columns to read; None = all.
        pin: name of a pin of each store.
        storage_options: passed to the fsspec file system.
        ray_options: options of ``ray.data.read_datasource``: ``override_num_blocks``, ``concurrency``, ...

    Raises:
        StoreNotFoundError, ConfigurationError, CorruptStoreError: as by :class:`StoreDatasource`.
        StoreUnreachableError: a store of the handle does not answer.
    """
    ray()
    from ray.data import read_datasource

    make = partial(StoreDatasource, unit=unit, columns=columns, pin=pin, storage_options=storage_options)
    if not isinstance(source, DistributedReplayBuffer):
        return read_datasource(make(source), **ray_options)
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if "label_selector" not in signature(read_datasource).parameters:
        raise ConfigurationError(
            "read_store of a handle needs Ray 2.60 or later, which reads on the nodes that have the data"
        )
    module, served = ray(), source.served()
    source.refresh()
    hidden = source._sampling.hidden
    plan = module.remote(
        lambda path, rank: make(path).without(hidden[hidden % MOST_STORES == rank])
    )  # runs on the store's node: this machine may lack the directory
    planned = []
    for about in served:
        there = NodeAffinitySchedulingStrategy(about.node, soft=True)
        path = os.path.join(about.path, f"rank_{about.rank}")
        planned.append(plan.options(num_cpus=0, scheduling_strategy=there).remote(path, about.rank))
    datasets = []
    for about, answer in zip(served, planned, strict=True):
        try:
            datasource = module.get(answer)
        except away() as error:
            raise StoreUnreachableError(f"store rank_{about.rank} cannot be read: {first_line(error)}") from error
        # Read on the store's node; if that node is gone, any node, which works only for a shared directory.
        given = {"label_selector": {"ray.io/node-id": about.node}, "fallback_strategy": [{"label_selector": {}}]}
        datasets.append(read_datasource(datasource, **{**given, **ray_options}))
    return datasets[0].union(*datasets[1:]) if len(datasets) > 1 else datasets[0]
