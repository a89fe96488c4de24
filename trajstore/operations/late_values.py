"""Late values in a store's inbox that a writer has not applied yet or has refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trajstore._core.store.catalog import Catalog
from trajstore._core.store.salvage import open_leniently
from trajstore._core.writing.inbox import Pending


@dataclass(frozen=True, slots=True)
class WaitingValues:
    """The contents of an inbox.

    Attributes:
        files: number of files with values not applied yet.
        values: number of values in these files.
        refused: (file, sentence) for files whose values contradict the store; no writer applies them.
        damaged: (file, damage and remedy) for unreadable files.
        written: whether a writer has the store open now.
    """

    files: int
    values: int
    refused: tuple[tuple[str, str], ...]
    damaged: tuple[tuple[str, str], ...]
    written: bool

    def to_json(self) -> dict[str, Any] | None:
        """Return the report as JSON values; None if the inbox is empty."""
        if not self.files and not self.refused:
            return None
        refused = [f"{name}: {text}" for name, text in self.refused]
        return {"files": self.files, "values": self.values, "refused": refused, "written": self.written}


def waiting_values(catalog: Catalog) -> WaitingValues:
    """Return the inbox files of a store that the catalog does not include; skips those applied meanwhile.

    Raises:
        OSError: the inbox cannot be listed.
    """
    directory = catalog.directory
    pending = Pending(directory, set_aside=True)
    _, files = pending.foreseen(catalog.store_id, catalog.notes, catalog.unknown)
    if any(file.is_refused for file in files):  # they may name trajectories that are newer than the catalog
        catalog, _ = open_leniently(directory)
        _, files = pending.foreseen(catalog.store_id, catalog.notes, catalog.unknown)
    waiting = [file.given for file in files if file.given is not None and not file.why]
    return WaitingValues(
        files=len(waiting),
        values=sum(len(given.ids) * len(given.values) for given in waiting),
        refused=tuple(
            (file.name, f"{file}; the file has them, and may be deleted") for file in files if file.is_refused
        ),
        damaged=tuple((file.name, str(file)) for file in files if file.given is None),
        written=directory.is_written(),
    )


def waiting_in_words(waiting: Mapping[str, Any]) -> str:
    """Return a sentence on the waiting values and on who will apply them.

    Args:
        waiting: the result of :meth:`WaitingValues.to_json`.
    """
    files, values = waiting["files"], waiting["values"]
    many = f"{values:,} value{'s' * (values != 1)} in {files:,} file{'s' * (files != 1)} of inbox/"
    if waiting["written"]:
        return f"{many}; the writer takes them in within seconds"
    return f"{many}; the next writer takes them in, or the next `trajstore annotate`"
