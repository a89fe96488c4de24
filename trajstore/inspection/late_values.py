"""Values that wait in a store's inbox: given by other processes, and not taken in by a writer yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trajstore.errors import ConfigurationError, CorruptStoreError
from trajstore.store.catalog import Catalog
from trajstore.store.salvage import open_leniently
from trajstore.writing.inbox import said_in, waiting


@dataclass(frozen=True, slots=True)
class WaitingValues:
    """What an inbox has.

    Attributes:
        files: whose values are not in the store yet.
        values: in those of them that can be taken in.
        refused: files that no writer takes in, and why.
        written: whether a writer has the store open now.
    """

    files: int
    values: int
    refused: tuple[tuple[str, str], ...]
    written: bool

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as JSON values."""
        return {"files": self.files, "values": self.values, "refused": len(self.refused), "written": self.written}

    def problems(self) -> list[tuple[str, str]]:
        """Return the files that no writer takes in, each with what is wrong and what helps."""
        remedy = "give its values anew with `trajstore annotate`, then delete the file"
        return [(name, f"{reason}; its values reach no trajectory: {remedy}") for name, reason in self.refused]


def waiting_values(catalog: Catalog) -> WaitingValues:
    """Return what the inbox of a store has that is not in the catalog; what is taken in meanwhile does not count.

    Raises:
        OSError: the inbox cannot be listed.
    """
    directory = catalog.directory
    files = values = 0
    refused: list[tuple[str, str]] = []
    for name in waiting(directory):
        if name in catalog.notes.sources:
            continue  # taken in, and only not deleted yet
        try:
            said = said_in(directory, name, catalog.store_id)
            try:
                catalog.notes.check(said)
            except ConfigurationError:  # of names that came since the catalog was read, perhaps
                newest, _ = open_leniently(directory)
                if name in newest.notes.sources:
                    continue
                newest.notes.check(said)
            values += len(said.ids) * len(said.values)
        except FileNotFoundError:
            continue
        except (CorruptStoreError, ConfigurationError, OSError) as error:
            refused.append((name, str(error).removeprefix(f"{directory.url}/{name}: ")))
        files += 1
    return WaitingValues(files, values, tuple(refused), directory.is_written())


def waiting_in_words(told: Mapping[str, Any]) -> str:
    """Return how much waits, and who takes it in; an empty text if nothing does.

    Args:
        told: what :meth:`WaitingValues.to_json` returns.
    """
    files, values = told["files"] - told["refused"], told["values"]
    if not files:
        return ""
    many = f"{values:,} value{'s' * (values != 1)} in {files:,} file{'s' * (files != 1)} of inbox/"
    if told["written"]:
        return f"{many}; the writer takes them in within seconds"
    return f"{many}; the next writer takes them in, or the next `trajstore annotate`"
