"""Values that somebody enters into the page: from a request to :func:`trajstore.annotate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from trajstore.core.buffer.annotating import annotate
from trajstore.core.columns.limits import shown
from trajstore.errors import ConfigurationError

MOST_BYTES = 1 << 19
"""Of a request: more than the ids of 10,000 trajectories and the longest text need."""


class Correcting:
    """Gives trajectories of a store or run values.

    Args:
        path: directory or URL.
        who: gives the values, for the history; None: nobody says.

    Raises:
        StoreNotFoundError: no store is there, to which values could be given.
        ConfigurationError: ``who`` is no text.
    """

    def __init__(self, path: str | Path, who: str | None) -> None:
        annotate(path, [], {}, who=who)
        self._path = path
        self.who = who

    def give(self, body: bytes) -> None:
        """Do what a request asks for: ``{"ids", "name", "kind", "value"}``, all of them texts, the ids a list.

        The kind is ``number``, ``text`` or ``nothing``, which takes back what there is. A number comes as it was
        entered: a browser would round it.

        Raises:
            ConfigurationError: it cannot be given; nothing was.
            TrajectoryUnavailableError, StoreNotFoundError, StoreWriteError, CorruptStoreError: as by ``annotate``.
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
        raise ConfigurationError(f"annotate: the request is no JSON: {error}") from error
    names = ("name", "kind", "value")
    if not isinstance(asked, dict) or not all(isinstance(asked.get(name), str) for name in names):
        raise ConfigurationError(f"annotate: the request must have {', '.join(names)}, each a text")
    ids = asked.get("ids")
    if not isinstance(ids, list) or not ids or not all(isinstance(one, str) for one in ids):
        raise ConfigurationError("annotate: the request must have ids, a list of one text or more")
    return {name: asked[name] for name in ("ids", *names)}


def _number(name: str, text: str) -> float:
    """Return the number that a text is, whole ones exactly.

    Raises:
        ConfigurationError: it is none.
    """
    try:
        if not text.isascii() or "_" in text:
            raise ValueError(text)
        return int(text) if text.strip().lstrip("+-").isdigit() else float(text)
    except ValueError as error:
        raise ConfigurationError(
            f"annotate: {name}: {shown(text)} is no number, such as 0.5; give it as a text"
        ) from error
