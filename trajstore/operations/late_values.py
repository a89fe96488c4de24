"""Late values in a store's inbox that a writer has not applied yet or has refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trajstore._core.store.catalog import Catalog
from trajstore._core.store.late_values import LateValues
from trajstore._core.store.salvage import open_leniently
from trajstore._core.writing.inbox import GIVE_ANEW, late_values_in, refused_in_words, waiting_or_refused
from trajstore.errors import CorruptStoreError


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
    entries: list[LateValues] = []
    damaged: list[tuple[str, str]] = []
    for name in waiting_or_refused(directory):
        if name in catalog.notes.sources:
            continue  # applied, but not deleted yet
        try:
            entries.append(late_values_in(directory, name, catalog.store_id))
        except FileNotFoundError:
            continue
        except (CorruptStoreError, OSError) as error:
            reason = str(error).removeprefix(f"{directory.url}/{name}: ")
            damaged.append((name, f"{reason}; its values reach no trajectory: {GIVE_ANEW}"))
    refused = _refused(catalog, entries)
    if any(not entry.refused for entry in refused):  # the contradicted ids may be newer than the catalog
        catalog, _ = open_leniently(directory)
        entries = [entry for entry in entries if entry.source not in catalog.notes.sources]
        refused = _refused(catalog, entries)
    names = {entry.source for entry in refused}
    waiting = [entry for entry in entries if entry.source not in names]
    values = sum(len(entry.ids) * len(entry.values) for entry in waiting)
    remedy = "the file has them, and may be deleted"
    reasons = tuple((entry.source, f"{refused_in_words(entry)}; {remedy}") for entry in refused)
    return WaitingValues(len(waiting), values, reasons, tuple(damaged), directory.is_written())


def _refused(catalog: Catalog, found: list[LateValues]) -> list[LateValues]:
    """Return the values that contradict the store, with the reason."""
    left = [entry.without(catalog.unknown(entry.ids)) for entry in found if not entry.refused]
    _, why = catalog.notes.foreseen(entry for entry in left if len(entry.ids))
    entries = [replace(entry, refused=entry.refused or why.get(entry.source, "")) for entry in found]
    return [entry for entry in entries if entry.refused]


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
