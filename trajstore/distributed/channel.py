"""A named Ray queue from rollout workers to the learner, with RLinf's method names."""

from __future__ import annotations

import logging
from typing import Any, Protocol, Self

from trajstore._core.base.arguments import whole
from trajstore.distributed.actors import NAMESPACE, ray
from trajstore.errors import InvalidTrajectoryError, StoreNotFoundError
from trajstore.trajectory import AnyTrajectory

logger = logging.getLogger(__name__)


class Channel:
    """A FIFO queue shared by several processes. Make it with :meth:`create`.

    Args:
        name: name of the channel.
        queue: ``ray.util.queue.Queue``.
    """

    def __init__(self, name: str, queue: Any) -> None:
        self.name = name
        self._queue = queue

    @classmethod
    def create(cls, name: str, maxsize: int = 0, *, namespace: str = NAMESPACE) -> Self:
        """Return the channel of this name, creating it if absent.

        Args:
            name: name of the channel.
            maxsize: number of items at which :meth:`put` waits; 0 = unbounded.
            namespace: Ray namespace of its actor.
        """
        from ray.util.queue import Queue

        ray()
        options = {"name": f"{name}/channel", "namespace": namespace, "get_if_exists": True, "num_cpus": 0}
        return cls(name, Queue(whole("maxsize", maxsize, 0), actor_options=options))

    @classmethod
    def connect(cls, name: str, *, namespace: str = NAMESPACE) -> Self:
        """Return an existing channel.

        Raises:
            StoreNotFoundError: no channel has this name.
        """
        from ray.util.queue import Queue

        try:
            actor = ray().get_actor(f"{name}/channel", namespace=namespace)
        except ValueError as error:
            raise StoreNotFoundError(f"no channel named {name!r} in Ray's namespace {namespace!r}") from error
        queue = Queue.__new__(Queue)
        queue.maxsize, queue.actor = 0, actor
        return cls(name, queue)

    def put(self, item: Any, timeout: float | None = None) -> None:
        """Put an item; waits while the channel is full.

        Raises:
            TimeoutError: the channel was full for ``timeout`` seconds.
        """
        from ray.util.queue import Full

        try:
            self._queue.put(item, timeout=timeout)
        except Full as error:
            raise TimeoutError(f"channel {self.name!r} was full for {timeout} s") from error

    def get(self, timeout: float | None = None) -> Any:
        """Remove and return the oldest item; waits while the channel is empty.

        Raises:
            TimeoutError: the channel was empty for ``timeout`` seconds.
        """
        from ray.util.queue import Empty

        try:
            return self._queue.get(timeout=timeout)
        except Empty as error:
            raise TimeoutError(f"channel {self.name!r} was empty for {timeout} s") from error

    async def put_async(self, item: Any) -> None:
        """Put an item without blocking the event loop."""
        await self._queue.put_async(item)

    async def get_async(self) -> Any:
        """Remove and return the oldest item without blocking the event loop."""
        return await self._queue.get_async()

    def qsize(self) -> int:
        """Return the number of items."""
        return int(self._queue.qsize())

    def empty(self) -> bool:
        """Return whether the channel is empty."""
        return self.qsize() == 0

    def full(self) -> bool:
        """Return whether :meth:`put` would wait."""
        return bool(self._queue.full())


class Taker(Protocol):
    """A buffer or a handle."""

    def add_trajectories(self, trajectories: list[AnyTrajectory]) -> Any:
        """Add trajectories."""


def receive(channel: Channel, buffer: Taker, count: int, timeout: float | None = None) -> int:
    """Move ``count`` items, trajectories or lists of them, from a channel to a buffer; return the number added.

    A trajectory that cannot be stored is skipped with a warning; the others of its list are added.

    Raises:
        TimeoutError: the channel was empty for ``timeout`` seconds; items received before are added.
    """
    added = 0
    for _ in range(count):
        item = channel.get(timeout)
        trajectories = list(item) if isinstance(item, list | tuple) else [item]
        try:
            buffer.add_trajectories(trajectories)
            added += len(trajectories)
        except InvalidTrajectoryError:  # nothing of the list was added
            added += _add_each(trajectories, buffer, channel.name)
    return added


def _add_each(trajectories: list[AnyTrajectory], buffer: Taker, channel: str) -> int:
    refused = 0
    for place, trajectory in enumerate(trajectories):
        try:
            buffer.add_trajectories([trajectory])
        except InvalidTrajectoryError as error:
            refused += 1
            logger.warning(
                "channel %r: trajectory %d of a list of %d cannot be stored and is lost: %s",
                channel,
                place,
                len(trajectories),
                error.__cause__ or error,  # without the position in the list of one
            )
    return len(trajectories) - refused
