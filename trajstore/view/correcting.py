"""Values entered in the page: turns a request into a call of :func:`trajstore.annotate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from trajstore._core.buffer.annotating import annotate
from trajstore._core.columns.limits import shown
from trajstore.errors import ConfigurationError

MOST_BYTES = 1 << 19
"""Maximum size of a request; enough for the ids of 10,000 trajectories and the longest text."""


class Correcting:
    """Annotates the trajectories of a store or run.

    Args:
        path: directory or URL.
        who: author of the values, for the history; None records no author.

    Raises:
        StoreNotFoundError: there is no store to annotate.
        ConfigurationError: ``who`` is not a text.
    """

    def __init__(self, path: str | Path, who: str | None) -> None:
        annotate(path, [], {}, who=who)
        self._path = path
        self.who = who

    def give(self, body: bytes) -> None:
        """Apply a request ``{"ids", "name", "kind", "value"}``; all are texts, ``ids`` a list of them.

        The kind is ``number``, ``text`` or ``nothing``, which removes the value. A number is sent as entered, because
        a browser would round it.

        Raises:
            ConfigurationError: the request is invalid; nothing was changed.
            TrajectoryUnavailableError, StoreNotFoundError, StoreWriteError, CorruptStoreError: as for ``annotate``.
        """
        asked = _asked(body)
        name, kind, value = asked["name"], asked["kind"], asked["value"]
        if kind not in ("number", "text", "nothing"):
            raise ConfigurationError(f"annotate: kind {kind!r}, must be number, text or nothing")
        given = _number(name, value) if kind == "number" else value if kind == "text" else None
        annotate(self._path, asked["ids"], {name: given}, who=self.who)


def _asked(body: bytes) -> dict[str, Any]:
    try:
        asked: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ConfigurationError(f"annotate: the request is not JSON: {error}") from error
    names = ("name", "kind", "value")
    if not isinstance(asked, dict) or not all(isinstance(asked.get(name), str) for name in names):
        raise ConfigurationError(f"annotate: the request must have {', '.join(names)}, each a text")
    ids = asked.get("ids")
    if not isinstance(ids, list) or not ids or not all(isinstance(number, str) for number in ids):
        raise ConfigurationError("annotate: the request must have ids, a list of one text or more")
    return {name: asked[name] for name in ("ids", *names)}


def _number(name: str, text: str) -> float:
    """Return the number in a text; whole numbers are exact.

    Raises:
        ConfigurationError: the text is not a number.
    """
    try:
        if not text.isascii() or "_" in text:
            raise ValueError(text)
        return int(text) if text.strip().lstrip("+-").isdigit() else float(text)
    except ValueError as error:
        raise ConfigurationError(
            f"annotate: {name}: {shown(text)} must be a number, such as 0.5; for other values choose type text"
        ) from error
