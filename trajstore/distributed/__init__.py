"""Stores on many machines: Ray actors that own them, a handle for producers and learners, a channel, Ray Data.

Needs the extra ``ray``, which is imported only when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trajstore.distributed.channel import Channel, receive
from trajstore.distributed.handle import DistributedReplayBuffer
from trajstore.distributed.receipts import Receipt
from trajstore.distributed.sessions import RemoteSession

if TYPE_CHECKING:
    from trajstore.distributed.dataset import StoreDatasource, read_store

__all__ = ["Channel", "DistributedReplayBuffer", "Receipt", "RemoteSession", "StoreDatasource", "read_store", "receive"]


def __getattr__(name: str) -> Any:
    if name in ("StoreDatasource", "read_store"):  # their module imports Ray Data, which takes seconds
        from trajstore.distributed import dataset

        return getattr(dataset, name)
    raise AttributeError(f"module 'trajstore.distributed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
