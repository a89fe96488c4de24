"""Shared by the gateways: their rollouts as sessions of a store, and their records as calls."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from trajstore import Call, Reward, Session, Sessions, TrajectoryReplayBuffer
from trajstore.errors import SessionFinishedError, StoreClosedError, TrajectoryUnavailableError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_THREADS = 64
"""Sessions that may be opened, and records other than calls that may wait for the disk, at once."""

_COPY = "$"
"""Key of an object that stands for a value of the call."""


def task_of(rollout_id: str) -> str:
    """Return the task of ids such as ``task-3``, ``task-3-a1`` (an attempt) and ``task:3``; others are tasks alone."""
    match = re.fullmatch(r"(.+)[-:]\d+(-a\d+)?", rollout_id, re.DOTALL)
    return match[1] if match else rollout_id


class Gateway:
    """The sessions of a gateway, by its own ids. Thread-safe.

    Args:
        store: path of the store, or the buffer that writes it, if that is in this process.
        task_of: returns the task of a rollout's id; rollouts of one task are a group.
    """

    def __init__(self, store: str | Path | TrajectoryReplayBuffer, *, task_of: Callable[[str], str] = task_of) -> None:
        self._sessions = store._sink.sessions if isinstance(store, TrajectoryReplayBuffer) else Sessions(store)
        self._is_own = not isinstance(store, TrajectoryReplayBuffer)
        self._is_closed = False
        self._task_of = task_of
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="trajstore-gateway")
        self._recording: set[asyncio.Future[None]] = set()

    def session(self, rollout_id: str) -> Session:
        """Return the session of an id; opened, if there is none."""
        if not rollout_id:
            raise ValueError("rollout id: empty, must be a text")
        return self._sessions.session(self._task_of(rollout_id), rollout_id)

    async def opened(self, rollout_id: str) -> Session:
        """:meth:`session`, in a thread if it is not open yet.

        Raises:
            StoreClosedError: after :meth:`close`.
        """
        known = self._sessions._known.get((self._task_of(rollout_id), rollout_id))
        if self._is_closed or known is None or known.state not in ("open", "frozen"):
            return await self.waited(self.session, rollout_id)
        return known

    def calls(self, rollout_id: str) -> list[Call]:
        """Return the calls of an id, of any process; none if there is no session, or its rollouts were added."""
        try:
            return self._sessions.read(self._task_of(rollout_id), rollout_id)
        except TrajectoryUnavailableError:
            return []

    def finish(
        self,
        rollout_id: str,
        reward: float | Reward | None = None,
        *,
        is_terminated: bool | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Finish the session of an id, in the process that added its calls: its paths become rollouts.

        Args:
            rollout_id: of the gateway.
            reward: of all its rollouts; a number is its outcome.
            is_terminated: whether the run ended by itself; None if unknown.
            metadata: any JSON, for the rollouts.

        Returns:
            The ids of the rollouts; empty in a process that does not write the store.

        Raises:
            TrajstoreError: see :meth:`trajstore.Session.finish`.
        """
        given = Reward(outcome=float(reward)) if isinstance(reward, int | float) else reward
        return self.session(rollout_id).finish(given, is_terminated=is_terminated, metadata=metadata)

    def discard(self, rollout_id: str) -> int:
        """Discard the session of an id, without rollouts; return the number of its calls."""
        calls = self.calls(rollout_id)
        if calls:
            try:
                self.session(rollout_id).discard()
            except SessionFinishedError:  # its rollouts are the store's
                return 0
        return len(calls)

    async def waited(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Return what a function returns, called in a thread.

        Raises:
            StoreClosedError: after :meth:`close`.
        """
        if self._is_closed:
            raise StoreClosedError("the gateway's store was closed; make another")
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def recorded(self, recording: Coroutine[Any, Any, None]) -> None:
        """Run the recording of a call, which :meth:`flush` waits for, to its end also if the caller is cancelled."""
        task = asyncio.ensure_future(recording)
        self._recording.add(task)
        task.add_done_callback(self._recording.discard)
        await asyncio.shield(task)

    async def flush(self) -> None:
        """Return when the calls that this event loop is recording are durable, or were refused."""
        here = asyncio.get_running_loop()
        if recording := [each for each in self._recording if each.get_loop() is here]:
            await asyncio.wait(recording)

    async def close(self) -> None:
        """Wait for running calls, and release the store; open sessions stay in it."""
        self._is_closed = True
        await self.flush()
        await asyncio.to_thread(self._pool.shutdown)
        if self._is_own:
            self._sessions.close()


def is_exact(log_probs: Sequence[float]) -> bool:
    """Return whether float32 holds the values."""
    return bool(np.array_equal(np.array(log_probs, np.float32), np.array(log_probs, np.float64)))


def shortened(value: Any, copies: Mapping[str, Any]) -> Any:
    """Return JSON with the names of values of the call in place of their copies; :func:`restored` undoes it.

    Args:
        value: any JSON.
        copies: values by name, lists and dicts; the empty ones are ignored.
    """
    if isinstance(value, list | dict) and value:
        for name, copy in copies.items():
            if copy is value or (type(copy) is type(value) and len(copy) == len(value) and copy == value):
                return {_COPY: name}
    if isinstance(value, list):
        # The longest lists are numbers, and have no copies inside.
        return value if value and isinstance(value[0], int | float) else [shortened(item, copies) for item in value]
    if isinstance(value, Mapping):
        short = {name: shortened(item, copies) for name, item in value.items()}
        return {_COPY: None, "value": short} if _COPY in short else short
    return value


def restored(value: Any, copies: Mapping[str, Any]) -> Any:
    """Return what :func:`shortened` was given."""
    if isinstance(value, list):
        return value if value and isinstance(value[0], int | float) else [restored(item, copies) for item in value]
    if not isinstance(value, Mapping):
        return value
    if value.get(_COPY) is not None:
        return copies[value[_COPY]]
    return {name: restored(item, copies) for name, item in (value["value"] if _COPY in value else value).items()}
