"""What a store's directory says of its mirror."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from trajstore.core.files.base import Directory
from trajstore.errors import CorruptStoreError
from trajstore.remote.mirror.options import MIRRORED_NAME


def mirror_report(directory: Directory, ids: npt.NDArray[np.int64]) -> dict[str, Any] | None:
    """Return what the writer last wrote down of the mirror; None if the store has none, or it cannot be read.

    Args:
        directory: the store's.
        ids: of its live trajectories, ascending.

    Returns:
        ``url``, ``generation`` and ``newest_id`` of what is there, ``behind`` (live trajectories that are not), ``at``
        (Unix time of the last publication, or None), ``error`` (of the last attempt, or None).
    """
    try:
        said = orjson.loads(directory.read(MIRRORED_NAME))
        newest = int(said["newest_id"])
        values = {name: said[name] for name in ("url", "generation", "newest_id", "at", "error")}
    except (OSError, CorruptStoreError, orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return None
    return values | {"behind": int((ids > newest).sum())}
