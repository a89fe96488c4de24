"""Values entered in the page: turns a request into a call of :func:`trajstore.annotate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from trajstore._core.buffer.annotating import annotate
from trajstore._core.columns.limits import shown
from trajstore.errors import ConfigurationError

MOST_BYTES = 1 << 19
"""Maximum size of a request; enough for the ids of 10,000 trajectories and the longest text."""


class _Request(msgspec.Struct):
    """A value for trajectories; a number is sent as entered, because a browser would round it."""

    ids: Annotated[list[str], msgspec.Meta(min_length=1)]
    name: str
    kind: Literal["number", "text", "nothing"]
    value: str


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
        """Apply a request ``{"ids", "name", "kind", "value"}``; the kind ``nothing`` removes the value.

        Raises:
            ConfigurationError: the request is invalid; nothing was changed.
            TrajectoryUnavailableError, StoreNotFoundError, StoreWriteError, CorruptStoreError: as for ``annotate``.
        """
        try:
            asked = msgspec.json.decode(body, type=_Request)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigurationError(f"annotate: the request: {error}") from error
        given = None if asked.kind == "nothing" else asked.value
        value = _number(asked.name, asked.value) if asked.kind == "number" else given
        annotate(self._path, asked.ids, {asked.name: value}, who=self.who)


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
