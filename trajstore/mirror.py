"""A copy that follows a store to another place, and stores restored from it."""

from trajstore._core.buffer.mirroring import MirrorOfBuffer
from trajstore.remote.mirror.options import Mirror, MirrorState
from trajstore.remote.mirror.restoring import Restored, restore

__all__ = ["Mirror", "MirrorOfBuffer", "MirrorState", "Restored", "restore"]
