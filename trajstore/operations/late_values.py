"""Values in a store's inbox: given by other processes, and not taken in by a writer yet, or refused by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trajstore.core.store.catalog import Catalog
from trajstore.core.store.given import Said
from trajstore.core.store.salvage import open_leniently
from trajstore.core.writing.inbox import refused_in_words, said_in, waiting_or_refused
from trajstore.errors import CorruptStoreError


@dataclass(frozen=True, slots=True)
class WaitingValues:
    """What an inbox has.

    Attributes:
        files: whose values are not in the store yet.
        values: in them.
        refused: files whose values contradict the store, which no writer takes in; each with what is in it, and why.
        damaged: files that cannot be read, and why.
        written: whether a writer has the store open now.
    """

    files: int
    values: int
    refused: tuple[tuple[str, str], ...]
    damaged: tuple[tuple[str, str], ...]
    written: bool

    def to_json(self) -> dict[str, Any] | None:
        """Return the numbers as JSON values; None if there are no values."""
        if not self.files and not self.refused:
            return None
        refused = [f"{name}: {text}" for name, text in self.notes()]
        return {"files": self.files, "values": self.values, "refused": refused, "written": self.written}

    def notes(self) -> list[tuple[str, str]]:
        """Return the files whose values are refused, each with a sentence."""
        remedy = "the file has them, and may be deleted"
        return [(name, f"{text}; {remedy}") for name, text in self.refused]

    def problems(self) -> list[tuple[str, str]]:
        """Return the damaged files, each with what is wrong and what helps."""
        remedy = "give its values anew with `trajstore annotate`, then delete the file"
        return [(name, f"{reason}; its values reach no trajectory: {remedy}") for name, reason in self.damaged]


def waiting_values(catalog: Catalog) -> WaitingValues:
    """Return what the inbox of a store has that is not in the catalog; what is taken in meanwhile does not count.

    Raises:
        OSError: the inbox cannot be listed.
    """
    directory = catalog.directory
    found: list[Said] = []
    damaged: list[tuple[str, str]] = []
    for name in waiting_or_refused(directory):
        if name in catalog.notes.sources:
            continue  # taken in, and only not deleted yet
        try:
            found.append(said_in(directory, name, catalog.store_id))
        except FileNotFoundError:
            continue
        except (CorruptStoreError, OSError) as error:
            damaged.append((name, str(error).removeprefix(f"{directory.url}/{name}: ")))
    refused = _refused(catalog, found)
    if any(not said.refused for said in refused):  # by names that came since the catalog was read, perhaps
        catalog, _ = open_leniently(directory)
        found = [said for said in found if said.source not in catalog.notes.sources]
        refused = _refused(catalog, found)
    names = {said.source for said in refused}
    waits = [said for said in found if said.source not in names]
    values = sum(len(said.ids) * len(said.values) for said in waits)
    told = tuple((said.source, refused_in_words(said)) for said in refused)
    return WaitingValues(len(waits), values, told, tuple(damaged), directory.is_written())


def _refused(catalog: Catalog, found: list[Said]) -> list[Said]:
    """Return what contradicts the store, and why, of what waits or is set aside."""
    left = [said.without(catalog.unknown(said.ids)) for said in found if not said.refused]
    _, why = catalog.notes.foreseen(said for said in left if said.ids)
    told = [replace(said, refused=said.refused or why.get(said.source, "")) for said in found]
    return [said for said in told if said.refused]


def waiting_in_words(told: Mapping[str, Any]) -> str:
    """Return how much waits, and who takes it in.

    Args:
        told: what :meth:`WaitingValues.to_json` returns.
    """
    files, values = told["files"], told["values"]
    many = f"{values:,} value{'s' * (values != 1)} in {files:,} file{'s' * (files != 1)} of inbox/"
    if told["written"]:
        return f"{many}; the writer takes them in within seconds"
    return f"{many}; the next writer takes them in, or the next `trajstore annotate`"
