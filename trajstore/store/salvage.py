"""Opening a damaged directory: what can be worked out again from what is whole, with a sentence on the rest.

``Catalog.open`` refuses a directory at the first damage. This reads on: ``metadata.json`` is worked out again from
the index, a damaged index from the log if that still has every commit, and single records and entries that make no
sense are left out. Nothing is written.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from trajstore.columns.limits import MAX_GENERATION, MAX_ID
from trajstore.columns.schema import Schema
from trajstore.errors import CorruptStoreError, StoreNotFoundError, UnsafeContentError, listed
from trajstore.files.base import Directory
from trajstore.formats.base import SHARDS_FOLDER
from trajstore.store.additions import added_in
from trajstore.store.catalog import Catalog, log_segments
from trajstore.store.entry_checks import EntryGate
from trajstore.store.index import TrajectoryIndex
from trajstore.store.log_records import decode_each, natural
from trajstore.store.sealed import (
    INDEX_NAME,
    LAYOUT,
    LAYOUT_VERSION,
    METADATA_NAME,
    is_of_rlinf,
    parse_metadata,
    unseal,
)
from trajstore.store.shard_table import ShardTable

_LOST = Schema("step", ())
"""Stands for a schema that a damaged record told; no shard fits it."""

_BAD_VALUES = (KeyError, TypeError, ValueError, OverflowError, IndexError, AttributeError, CorruptStoreError)


class SalvagedCatalog(Catalog):
    """The committed state of a damaged directory, as far as it can be told. For reading only.

    Attributes:
        warnings: a sentence on each file that is damaged, and on what was left out or worked out again.
    """

    def __init__(self, directory: Directory) -> None:
        super().__init__(directory)
        self._gate = EntryGate(lenient=True)
        self.warnings: list[str] = []

    @classmethod
    def open(cls, directory: Directory) -> SalvagedCatalog:
        """Load what can be loaded.

        Raises:
            StoreNotFoundError: there is no store.
            UnsupportedVersionError: a newer trajstore wrote it.
            CorruptStoreError: neither the index nor the log says what is in it.
        """
        catalog = cls(directory)
        catalog.metadata()  # first: a newer layout is not to be guessed at
        catalog._load_snapshot()
        catalog._read_whole_log()
        catalog.load_pins()
        if catalog.left_out:
            found = listed(f"trajectory {number} ({what})" for number, what in catalog.left_out.items())
            catalog._warn(f"{directory.url}: entries that cannot be served are left out: {found}")
        try:
            catalog.check_pins()
        except CorruptStoreError as error:
            catalog._warn(f"{directory.url}/{error}")
        told = catalog.metadata()["generation"]
        if told > catalog.generation:
            catalog._warn(f"{directory.url}: the newest {told - catalog.generation:,} commits are missing")
        return catalog

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def metadata(self) -> dict[str, Any]:
        """Return ``metadata.json``; where it is damaged, what the index and the shards tell."""
        try:
            return super().metadata()
        except FileNotFoundError as error:
            if not self.directory.exists():
                raise StoreNotFoundError(f"{self.directory.url}: no such directory") from error
            self._warn(f"{self.directory.url}/{METADATA_NAME} is missing: {_WORKED_OUT}")
        except CorruptStoreError as error:
            self._warn(f"{error} ({_WORKED_OUT})")
        return {
            "layout": LAYOUT,
            "layout_version": LAYOUT_VERSION,
            "store_id": self.store_id,
            "generation": self.generation,
            "trajectory_format": self.shards.manifest(len(self.shards) - 1).format if len(self.shards) else None,
        }

    def load_pins(self) -> None:
        try:
            super().load_pins()
        except CorruptStoreError as error:
            self._warn(f"{error}: the checkpoints inside the store cannot be told")

    # -- the index --------------------------------------------------------------------------------

    def _load_snapshot(self) -> None:
        source = f"{self.directory.url}/{INDEX_NAME}"
        try:
            value = unseal("snapshot", self.directory.read(INDEX_NAME), source)
            self._take_snapshot(value, source)
        except (FileNotFoundError, *_BAD_VALUES) as error:
            segments = log_segments(self.directory)
            if isinstance(error, FileNotFoundError) and not segments and not self.directory.names(SHARDS_FOLDER):
                raise StoreNotFoundError(f"{self.directory.url}: no trajectory store here") from error
            if not self._has_first_commits(segments):
                self._check_not_overwritten()
                reason = f"{source} is missing" if isinstance(error, FileNotFoundError) else f"{source}: {error}"
                raise CorruptStoreError(
                    f"{reason.replace(f'{source}: {source}', source)}; the log cannot replace it, it does not begin "
                    "with the first commit; restore it from a copy"
                ) from error
            self.__dict__.update(Catalog(self.directory).__dict__ | {"_gate": self._gate})
            self.store_id = str(self.metadata().get("store_id") or uuid.uuid4())
            self._warn(f"{error}: worked out again from the log, which has every commit")
        self._schemas = list(self.shards.schemas)

    def _has_first_commits(self, segments: Sequence[tuple[int, str]]) -> bool:
        """Return whether a log begins with the first commit and goes on; fences stay when what is between them goes."""
        if not segments or segments[0][0] != 1:
            return False
        with contextlib.suppress(FileNotFoundError):
            records = [record for record, _ in decode_each(self.directory.read(segments[0][1])) if record is not None]
            only_fence = len(records) == 1 and "fence" in records[0]
            return not only_fence or len(segments) == 1 or segments[1][0] == 2
        return False

    def _check_not_overwritten(self) -> None:
        """Say so, where RLinf wrote the two files that are in place of trajstore's."""
        with contextlib.suppress(FileNotFoundError):
            data = self.directory.read(METADATA_NAME)
            if is_of_rlinf(data):
                parse_metadata(data, f"{self.directory.url}/{METADATA_NAME}")

    def _take_snapshot(self, value: Any, source: str) -> None:
        self.generation = self.snapshot_generation = natural(value["generation"], MAX_GENERATION)
        self.next_id = natural(value["next_id"], MAX_ID // 2)
        self.next_shard = natural(value["next_shard"], MAX_ID // 2)
        self.store_id = str(value["store_id"])
        self.shards = ShardTable.from_json(value["shards"])
        for name in ("live", "pinned"):
            index = TrajectoryIndex.from_json(value[name], len(self.shards), self._gate)
            self._check_rows(index, source)
            setattr(self, "index" if name == "live" else "pinned", index)

    # -- the log ----------------------------------------------------------------------------------

    def _read_whole_log(self) -> None:
        segments = log_segments(self.directory)
        for place, (_, name) in enumerate(segments):
            source = f"{self.directory.url}/{name}"
            try:
                data = self.directory.read(name)
            except FileNotFoundError:  # a writer took a snapshot meanwhile, and needs it no longer
                continue
            except CorruptStoreError as error:
                self._warn(f"{error}; what it committed is left out")
                continue
            bad = 0
            self.segment, self.segment_end, self.segment_torn = name, 0, 0
            for record, end in decode_each(data):
                if record is not None:
                    self._apply_if_whole(record, source)
                    self.segment_end = end
                elif end < len(data) or data.endswith(b"\n") or place < len(segments) - 1:
                    bad += 1
                else:
                    self.segment_torn = len(data) - self.segment_end  # as a crash leaves it
            if bad:
                self._warn(f"{source}: {bad:,} records are damaged; what they committed is left out")

    def _apply_if_whole(self, record: Mapping[str, Any], source: str) -> None:
        try:
            generation = natural(record.get("generation"))
            if generation <= self.generation:
                return
            if generation > self.generation + 1:
                self._warn(
                    f"{source}: the records of generations {self.generation + 1} to {generation - 1} are missing; "
                    "what they committed is left out"
                )
            if record["operation"] == "add" and record["schemas"]:
                # The schemas that a record tells are those of its own shards, and have the highest numbers of these.
                last = max(natural(one["shard"]["schema"]) for one in added_in(record))
                number = max(last + 1 - len(record["schemas"]), 0)
                self._schemas += [_LOST] * (number - len(self._schemas))
                del self._schemas[number:]
            self.apply([record])
        except (*_BAD_VALUES, UnsafeContentError) as error:
            self._warn(f"{source}: generation {record.get('generation')}: {error}; what it committed is left out")
            if isinstance(record.get("generation"), int):
                self.generation = max(self.generation, record["generation"])


_WORKED_OUT = "worked out again from the index; seed and generator state are lost"


def open_leniently(directory: Directory) -> tuple[Catalog, list[str]]:
    """Return the catalog of a directory, and what is damaged of it; an undamaged one is opened as always.

    Raises:
        StoreNotFoundError: there is no store.
        UnsupportedVersionError: a newer trajstore wrote it.
        CorruptStoreError: neither the index nor the log says what is in it.
    """
    try:
        return Catalog.open(directory), []
    except (CorruptStoreError, StoreNotFoundError):
        catalog = SalvagedCatalog.open(directory)
        return catalog, catalog.warnings
