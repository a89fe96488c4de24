"""The mirror's state as recorded in a store's directory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from trajstore._core.files.base import Directory
from trajstore.errors import CorruptStoreError
from trajstore.remote.mirror.options import MIRRORED_NAME


def mirror_report(directory: Directory, ids: npt.NDArray[np.int64]) -> dict[str, Any] | None:
    """Return the writer's last record on the mirror; None if there is none or it is unreadable.

    Args:
        directory: directory of the store.
        ids: ascending ids of its live trajectories.

    Returns:
        ``url``, ``generation`` and ``newest_id`` of the mirror, ``behind`` (number of live trajectories missing there),
        ``at`` (Unix time of the last publication, or None), ``error`` (of the last attempt, or None).
    """
    try:
        record = orjson.loads(directory.read(MIRRORED_NAME))
        newest = int(record["newest_id"])
        values = {name: record[name] for name in ("url", "generation", "newest_id", "at", "error")}
    except (OSError, CorruptStoreError, orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return None
    return values | {"behind": int((ids > newest).sum())}
