"""How a writer uses threads, memory and files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trajstore.arguments import seconds, whole
from trajstore.columns.limits import shown
from trajstore.errors import ConfigurationError


@dataclass(frozen=True)
class WriterOptions:
    """How a writer uses threads, memory and files.

    Attributes:
        threads: pool threads that encode and write shards.
        max_pending_bytes: memory for trajectories that are not committed yet.
        on_full: ``"block"`` waits until there is room, ``"raise"`` raises :class:`PendingFullError`.
        shard_bytes: a shard is closed when it holds this many bytes.
        commit_interval: seconds that a trajectory may wait for others to share its shard; ``flush`` does not wait.
        snapshot_bytes: the index is written whole when the commit log has grown by this, or by twice the index's
            size if that is more.

    Raises:
        ConfigurationError: a value is out of range.
    """

    threads: int = 2
    max_pending_bytes: int = 256 << 20
    on_full: Literal["block", "raise"] = "block"
    shard_bytes: int = 16 << 20
    commit_interval: float = 0.05
    snapshot_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        for name, least in (("threads", 1), ("max_pending_bytes", 1), ("shard_bytes", 1), ("snapshot_bytes", 0)):
            object.__setattr__(self, name, whole(name, getattr(self, name), least))
        object.__setattr__(self, "commit_interval", seconds("commit_interval", self.commit_interval))
        if self.on_full not in ("block", "raise"):
            raise ConfigurationError(f"on_full: {shown(self.on_full)}, must be 'block' or 'raise'")
