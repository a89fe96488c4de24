"""Stores on many machines: Ray actors that own them, a handle for producers and learners.

Needs the extra ``ray``, which is imported only when it is used.
"""

from trajstore.distributed.handle import DistributedReplayBuffer
from trajstore.distributed.receipts import Receipt
from trajstore.distributed.sessions import RemoteSession

__all__ = ["DistributedReplayBuffer", "Receipt", "RemoteSession"]
