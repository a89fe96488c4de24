"""Stores on many machines: Ray actors that own them, a handle for producers and learners, a channel, Ray Data.

Needs the extra ``ray``. Names are imported lazily, so that Ray is imported only when it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trajstore.distributed.channel import Channel, receive
    from trajstore.distributed.dataset import StoreDatasource, read_store
    from trajstore.distributed.handle import DistributedReplayBuffer
    from trajstore.distributed.receipts import Receipt
    from trajstore.distributed.rows import trajectory_of
    from trajstore.distributed.sessions import RemoteSession

__all__ = [
    "Channel",
    "DistributedReplayBuffer",
    "Receipt",
    "RemoteSession",
    "StoreDatasource",
    "read_store",
    "receive",
    "trajectory_of",
]

_MODULES = {
    "Channel": "channel",
    "DistributedReplayBuffer": "handle",
    "Receipt": "receipts",
    "RemoteSession": "sessions",
    "StoreDatasource": "dataset",
    "read_store": "dataset",
    "receive": "channel",
    "trajectory_of": "rows",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"trajstore.distributed.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'trajstore.distributed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
