"""Stores on many machines: Ray actors that own them, a handle for producers and learners, a channel.

Needs the extra ``ray``, which is imported only when it is used.
"""

from trajstore.distributed.channel import Channel, receive
from trajstore.distributed.handle import DistributedReplayBuffer
from trajstore.distributed.receipts import Receipt
from trajstore.distributed.sessions import RemoteSession

__all__ = ["Channel", "DistributedReplayBuffer", "Receipt", "RemoteSession", "receive"]
