"""The backend ``trajstore`` of TransferQueue: its own transport, and a copy of each rollout for the recorder."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from torch import Tensor
from transfer_queue.metadata import BatchMeta
from transfer_queue.storage.bootstrap import StorageBootstrapProvider
from transfer_queue.storage.managers.base import StorageManager, StorageManagerFactory

from trainer_hooks.transfer_queue.recorder import Recorder, RolloutFormat, Status, StoreOptions, Wanted
from trainer_hooks.transfer_queue.rows import pack_columns
from trajstore._core.base.closing import Closing
from trajstore.errors import ConfigurationError, StoreError, StoreWriteError, TrajstoreError
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

BACKEND = "trajstore"
"""Value of ``backend.storage_backend``."""

_ACTOR, _NAMESPACE = "trajstore_recorder", "transfer_queue"
_THREADS = 16
"""Calls that the recorder serves at once; those that wait for room or for the disk need their own thread."""
_SHUTDOWN_SECONDS = 15
"""Time limit for ending storage units, as in TransferQueue."""
_WARN_EVERY = 100
_ROWS = "trajstore_rows.pkl"
"""File of a checkpoint with the recorder's rows."""

_started: dict[str, Any] = {}
"""The actors that this process started, by transport, and the recorder under :data:`BACKEND`."""


class RecorderHandle:
    """The recorder of the running TransferQueue, from any process. Calls raise the recorder's exceptions.

    Args:
        actor: the recorder; ``None`` = look it up.

    Raises:
        ConfigurationError: TransferQueue runs without the backend ``trajstore``.
    """

    def __init__(self, actor: Any = None) -> None:
        try:
            self.actor = ray.get_actor(_ACTOR, namespace=_NAMESPACE) if actor is None else actor
        except ValueError:
            raise ConfigurationError(
                f"transfer_queue.backend.storage_backend: must be {BACKEND}, as rollouts are recorded where they arrive"
            ) from None

    def open(self, options: StoreOptions, rollouts: RolloutFormat) -> None:
        """Open the store and record from now on.

        Raises:
            ConfigurationError: this TransferQueue records already.
            StoreLockedError: another process writes to the store.
            StoreWriteError, CorruptStoreError: the store cannot be continued.
        """
        _answer(self.actor.open.remote(options, rollouts))

    def set_values(self, names: Sequence[str], values: Mapping[str, Sequence[Any]]) -> None:
        """Queue late values of rollouts, by ``rollout_id``; see :meth:`Recorder.set_values`."""
        _answer(self.actor.set_values.remote(list(names), {name: list(given) for name, given in values.items()}))

    async def recall(self, trajectory_id: int) -> AgentTrajectory | None:
        """Return a stored rollout to put again; see :meth:`Recorder.recall`."""
        rollout: AgentTrajectory | None = await self.actor.recall.remote(trajectory_id)
        return rollout

    def find(self, names: Sequence[str]) -> list[int | None]:
        """Return the trajectory ids of rollouts in the store, by ``rollout_id``; see :meth:`Recorder.find`."""
        found: list[int | None] = _answer(self.actor.find.remote(list(names)))
        return found

    def rollouts(self, names: Sequence[str]) -> list[AgentTrajectory]:
        """Return stored rollouts by ``rollout_id``; see :meth:`Recorder.rollouts`."""
        made: list[AgentTrajectory] = _answer(self.actor.rollouts.remote(list(names)))
        return made

    def status(self) -> Status:
        """Return the recorder's counters, and its first failure since the last status."""
        status: Status = _answer(self.actor.status.remote())
        return status

    def flush(self) -> Status:
        """Wait until everything that arrived is durable; return the status."""
        _answer(self.actor.flush.remote())
        return self.status()

    def close(self) -> None:
        """Write everything and close the store; later rollouts are not recorded. Idempotent.

        Raises:
            StoreError, InvalidTrajectoryError: something could not be written.
        """
        _answer(self.actor.close.remote())


class RecordedPool(Closing):
    """The store of a pool that chooses among the recorder's rollouts: a ``BufferStore`` that the recorder runs.

    Args:
        recorder: with an open store.
    """

    is_recording = True

    def __init__(self, recorder: RecorderHandle) -> None:
        self._recorder = recorder
        self.store_id = recorder.status().store_id
        self.before_close: Callable[[], object] | None = None

    def query(self, relation: str) -> Any:
        """Refuse: a query reads the store's files.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(f"query: {relation}: the rollouts are in another process; query their store by path")

    def close(self) -> None:
        """Save the pool; the recorder closes the store. Idempotent."""
        save, self.before_close = self.before_close, None
        if save is not None:
            save()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # accessed before __init__, or by copy
            raise AttributeError(name)
        return lambda *arguments: _answer(self._recorder.actor.pool.remote(name, *arguments))


def _answer(reference: Any) -> Any:
    """Return the recorder's answer.

    Raises:
        TrajstoreError: raised in the recorder.
        StoreWriteError: the recorder's process ended.
    """
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, TrajstoreError):
            raise error.cause from None
        raise
    except ray.exceptions.RayActorError as error:
        raise StoreWriteError(f"the recorder has ended, rollouts are no longer recorded: {error}") from error


@StorageManagerFactory.register(BACKEND)
class RecordingStorage(StorageManager):  # type: ignore[misc]  # TransferQueue has no types
    """Delegates transport, and passes columns of rollouts on to the recorder.

    A put ends when its rows can be read and the recorder has them in memory, so whoever is informed of a row and writes
    more of its columns comes after it.

    Args:
        controller_info: address of the controller.
        config: ``backend.trajstore``, completed by :func:`start_backend`.
        zmq_context: of the client.
    """

    def __init__(self, controller_info: Any, config: DictConfig, zmq_context: Any = None) -> None:
        # Not super().__init__: the sockets are the transport's.
        self._transport = StorageManagerFactory.create(
            config.transport, controller_info, config.transport_config, zmq_context=zmq_context
        )
        self.storage_manager_id = self._transport.storage_manager_id
        self._recorder = config.recorder.actor
        self._wanted: Wanted | None = None
        self._failures: Counter[str] = Counter()
        self._warned: set[str] = set()
        """Names of columns that are not recorded, each logged once."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Return the transport's class: TransferQueue saves rows that are in memory in each checkpoint by its class."""
        return type(self._transport)

    async def put_data(self, data: TensorDict, metadata: BatchMeta, data_parser: Any = None) -> None:
        """Store rows for readers; then hand over what is recorded of them."""
        await self._transport.put_data(data, metadata, data_parser=data_parser)
        try:
            await self._record(data, metadata, parsed=data_parser is not None)
        except (ray.exceptions.RayError, StoreError, RuntimeError) as error:
            # The row is in the plane: its reader must not fail because the recorder did. The trainer asks for status.
            if self._failures["put"] % _WARN_EVERY == 0:
                logger.error("trajstore: rows %s are not recorded: %s", metadata.global_indexes[:4], error)
            self._failures["put"] += 1

    async def _record(self, data: TensorDict, metadata: BatchMeta, *, parsed: bool) -> None:
        if not metadata.global_indexes:
            return
        wanted = self._wanted = self._wanted or await self._recorder.wanted.remote()
        if wanted is None or metadata.partition_ids[0] not in wanted.partitions:
            return
        begins = wanted.begins in data.keys()  # noqa: SIM118 - no dict
        names = sorted(set(data.keys()) - (wanted.left_out if begins else wanted.left_out_late))
        if not begins:
            if any(wanted.prompt_tag in tag for tag in metadata.custom_meta or ()):
                return
            names = self._per_token(data, names)
        if not names:
            return
        if parsed:
            raise StoreError("they were put with a data_parser, and have their values only in the storage unit")
        message = pack_columns(data, names)
        if begins:
            await self._recorder.accept.remote(metadata.global_indexes, metadata.custom_meta, message)
        else:
            await self._recorder.accept_late.remote(metadata.global_indexes, message)

    def _per_token(self, data: TensorDict, names: Sequence[str]) -> list[str]:
        """Return the columns with a list of numbers for each row; warns of others, once for each name."""
        columns = {name: data.get(name) for name in names}
        chosen = [name for name, column in columns.items() if isinstance(column, Tensor) and column.dim() == 2]
        for name in columns.keys() - {*chosen, *self._warned}:
            self._warned.add(name)
            logger.warning("trajstore: later column %s does not have a number per token and is not recorded", name)
        return chosen

    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        """Return rows."""
        return await self._transport.get_data(metadata)

    async def clear_data(self, metadata: BatchMeta) -> None:
        """Remove rows from the data plane; recorded rollouts stay."""
        await self._transport.clear_data(metadata)

    async def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Save the transport's rows, and which rollouts they are.

        Raises:
            NotImplementedError: the transport saves no rows, which TransferQueue logs.
        """
        await self._transport.save_checkpoint(checkpoint_dir)
        try:
            state = await self._recorder.save_rows.remote()
        except ray.exceptions.RayError as error:
            logger.error("trajstore: %s: saved without the recorder's rows: %s", checkpoint_dir, error)
        else:
            (Path(checkpoint_dir) / _ROWS).write_bytes(state)

    async def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Load the transport's rows, and which rollouts they are; late fields of others are not recorded."""
        await self._transport.load_checkpoint(checkpoint_dir)
        rows = Path(checkpoint_dir) / _ROWS
        try:
            await self._recorder.load_rows.remote(checkpoint_dir, rows.read_bytes() if rows.exists() else None)
        except ray.exceptions.RayError as error:
            logger.error("trajstore: %s: loaded without the recorder's rows: %s", checkpoint_dir, error)

    def close(self) -> None:
        """Close the connections; in the process that started the backend, also the recorder and the storage units."""
        if hasattr(self, "_transport"):
            self._transport.close()
        if hasattr(self, "_recorder") and _started.get(BACKEND) == self._recorder:  # not one that was started later
            _stop_backend()

    def can_destroy_zmq_context(self) -> bool:
        """Return whether the transport no longer uses the client's context."""
        can: bool = self._transport.can_destroy_zmq_context()
        return can

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # accessed before __init__, or by copy
            raise AttributeError(name)
        return getattr(self._transport, name)


@StorageBootstrapProvider.register_provider(BACKEND)  # type: ignore[untyped-decorator]
def start_backend(conf: DictConfig) -> dict[str, Any]:
    """Start the transport and the recorder; called by ``transfer_queue.init``.

    Raises:
        ConfigurationError: the transport is unknown.
    """
    options = conf.backend.get(BACKEND) or {}
    transport = options.get("transport", "SimpleStorage")
    start = StorageBootstrapProvider.get_provider(transport)
    if start is None or transport == BACKEND:
        raise ConfigurationError(f"transfer_queue.backend.{BACKEND}.transport: {transport}: not a backend")
    conf.backend.storage_backend = transport
    try:
        _started[transport] = start(conf)
    finally:
        conf.backend.storage_backend = BACKEND
    # On this node, where a path on a local disk is the user's.
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    actor = ray.remote(Recorder).options(
        name=_ACTOR, namespace=_NAMESPACE, num_cpus=0, max_concurrency=_THREADS, scheduling_strategy=here
    )
    _started[BACKEND] = actor.remote()
    if conf.metrics.enabled:
        logger.warning(
            "transfer_queue.metrics: without the figures of storage units, which this backend does not export"
        )
    # Other processes get this configuration from the controller. Unpickling the handle imports this module there, which
    # registers the storage manager.
    with open_dict(conf.backend):
        conf.backend[BACKEND] = {
            **options,
            "transport": transport,
            "transport_config": conf.backend[transport],
            "recorder": RecorderHandle(_started[BACKEND]),
        }
    return {transport: _started[transport]}


def _stop_backend() -> None:
    """End the actors that this process started; ``transfer_queue.close`` ends only those of its own backends."""
    started = dict(_started)
    _started.clear()
    recorder = started.pop(BACKEND, None)
    if recorder is None or not ray.is_initialized():
        return
    try:
        _answer(recorder.close.remote())
    finally:
        ray.kill(recorder)
        units = list((started.get("SimpleStorage") or {}).values())
        ray.wait([unit.shutdown.remote() for unit in units], num_returns=max(len(units), 1), timeout=_SHUTDOWN_SECONDS)
        for unit in units:
            ray.kill(unit)
