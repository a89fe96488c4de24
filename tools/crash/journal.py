"""A child's promises, written where its death cannot undo them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson


class Journal:
    """An append-only file of JSON lines; each is durable before the writer continues."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(self, event: str, **values: Any) -> None:
        """Write one line durably."""
        os.write(self._descriptor, orjson.dumps({"event": event, **values}) + b"\n")
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def entries(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a journal, none before it exists; a last line without its end was no promise."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else ()
    return [orjson.loads(line) for line in lines]
