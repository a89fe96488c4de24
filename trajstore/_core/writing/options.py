"""Options of a writer: threads, memory and files."""

from __future__ import annotations

from dataclasses import dataclass

from trajstore._core.base.settings import Count, Seconds, Settings


@dataclass(frozen=True)
class WriterOptions(Settings):
    """Options of a writer: threads, memory and files.

    Attributes:
        threads: pool threads that encode and write shards.
        max_pending_bytes: memory for trajectories that are not committed yet; adding waits until there is room.
        shard_bytes: a shard is closed when it holds this many bytes.
        commit_interval: seconds that a trajectory may wait for others to share its shard; ``flush`` does not wait.

    Raises:
        ConfigurationError: a value is out of range.
    """

    threads: Count = 2
    max_pending_bytes: Count = 256 << 20
    shard_bytes: Count = 16 << 20
    commit_interval: Seconds = 0.05
