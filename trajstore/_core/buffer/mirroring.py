"""The public view of a store's mirror."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trajstore._core.base.arguments import seconds_or_none, whole_numbers
from trajstore._core.buffer.sink import Sink
from trajstore.errors import StoreError

if TYPE_CHECKING:
    from trajstore.remote.mirror.options import MirrorState


@dataclass(frozen=True, slots=True)
class MirrorOfBuffer:
    """``buffer.mirror``: state of the mirror of a buffer's store, and waiting for it.

    Args:
        _sink: of the buffer.
    """

    _sink: Sink

    @property
    def state(self) -> MirrorState | None:
        """State of the mirror, with the error of the last attempt; None without a mirror."""
        mirror = self._sink.mirror
        return None if mirror is None else mirror.state

    def wait(self, ids: Sequence[int] | None = None, timeout: float | None = None) -> bool:
        """Wait until trajectories are on the mirror; return False after ``timeout`` seconds.

        Args:
            ids: of trajectories; None: everything, including pending writes, evictions, saved
                points and rollbacks.
            timeout: in seconds; None = no limit.

        Raises:
            StoreError: the buffer has no mirror.
            StoreWriteError: with ``ids=None``, a write failed; names the file.
        """
        wanted = None if ids is None else whole_numbers("ids", ids)
        timeout, mirror = seconds_or_none("timeout", timeout), self._sink.mirror
        if mirror is None:
            raise StoreError("mirror.wait: this buffer has no mirror; give one with mirror=...")
        if wanted is None:
            done = mirror.wait_for_all(self._sink.flush, timeout)
            self._sink.warn_of_open(f"the mirror {mirror.state.url} lacks")
            return done
        return mirror.wait(int(wanted.max()), timeout) if len(wanted) else True
