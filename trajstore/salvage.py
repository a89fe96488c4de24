"""Opening a damaged directory: what can be worked out again from what is whole, with a sentence on the rest.

``Catalog.open`` refuses a directory at the first damage. This reads on: ``metadata.json`` is worked out again from
the index, a damaged index from the log if that still has every commit, and single records and entries that make no
sense are left out. Nothing is written.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.catalog import INDEX_NAME, METADATA_NAME, Catalog
from trajstore.commits import LOG_FOLDER, decode_each, entries_from_json, ids_in_words, natural, segment_generation
from trajstore.errors import CorruptStoreError, StoreNotFoundError, UnsafeContentError
from trajstore.formats.base import ShardManifest
from trajstore.index import COLUMNS, TrajectoryIndex, check_columns, check_epochs
from trajstore.packing import StringTable, unpack
from trajstore.schema import Schema
from trajstore.sealed import LAYOUT, LAYOUT_VERSION, unseal
from trajstore.shards import ShardTable
from trajstore.storage import Directory

_LOST = Schema("step", ())
"""Stands for a schema that a damaged record told; no shard fits it."""

_BAD_VALUES = (KeyError, TypeError, ValueError, OverflowError, IndexError, AttributeError, CorruptStoreError)

Columns = dict[str, npt.NDArray[Any]]


class SalvagedCatalog(Catalog):
    """The committed state of a damaged directory, as far as it can be told. For reading only.

    Attributes:
        warnings: a sentence on each file that is damaged, and on what was left out or worked out again.
    """

    def __init__(self, directory: Directory) -> None:
        super().__init__(directory)
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
            self._warn(f"{error}: {_WORKED_OUT}")
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
            segments = self._segments()
            if isinstance(error, FileNotFoundError) and not segments and not self.directory.names("shards"):
                raise StoreNotFoundError(f"{self.directory.url}: no trajectory store here") from error
            if not segments or segments[0][0] != 1:
                reason = f"{source} is missing" if isinstance(error, FileNotFoundError) else f"{source}: {error}"
                raise CorruptStoreError(
                    f"{reason.replace(f'{source}: {source}', source)}; the log cannot replace it, it does not begin "
                    "with the first commit; restore it from a copy"
                ) from error
            self.__dict__.update(Catalog(self.directory).__dict__)
            self.store_id = str(self.metadata().get("store_id") or uuid.uuid4())
            self._warn(f"{error}: worked out again from the log, which has every commit")
        self._schemas = list(self.shards.schemas)

    def _take_snapshot(self, value: Any, source: str) -> None:
        self.generation = self.snapshot_generation = natural(value["generation"])
        self.next_id = natural(value["next_id"])
        self.next_shard = natural(value["next_shard"])
        self.store_id = str(value["store_id"])
        self.shards = ShardTable.from_json(value["shards"])
        for name in ("live", "pinned"):
            packed = value[name]["columns"]
            columns = {column: unpack(packed[column], dtype) for column, dtype in COLUMNS.items()}
            weights = StringTable.from_json(value[name]["weights"])
            sound = self._sound(columns, len(weights), source)
            if len(sound) < len(columns["trajectory_id"]):
                lost = np.setdiff1d(np.arange(len(columns["trajectory_id"])), sound)
                self._warn(
                    f"{source}: {len(lost):,} entries hold values out of range and are left out: "
                    f"ids {ids_in_words(columns['trajectory_id'][lost])}"
                )
            index = TrajectoryIndex()
            index.weights = weights
            index.append({column: array[sound] for column, array in columns.items()})
            setattr(self, "index" if name == "live" else "pinned", index)

    def _sound(self, columns: Columns, weights: int, source: str) -> npt.NDArray[np.intp]:
        """Return the entries that opening would not refuse, found by halving."""

        def check(positions: npt.NDArray[np.intp]) -> None:
            chosen = {name: array[positions] for name, array in columns.items()}
            check_columns(chosen, len(self.shards), weights)
            index = TrajectoryIndex()
            index.append(chosen)
            self._check_rows(index, source)

        return _passing(np.arange(len(columns["trajectory_id"])), check)

    # -- the log ----------------------------------------------------------------------------------

    def _segments(self) -> list[tuple[int, str]]:
        names = self.directory.names(LOG_FOLDER)
        return sorted((first, name) for name in names if (first := segment_generation(name)) is not None)

    def _read_whole_log(self) -> None:
        segments = self._segments()
        for place, (_, name) in enumerate(segments):
            source = f"{self.directory.url}/{name}"
            try:
                data = self.directory.read(name)
            except FileNotFoundError:  # a writer took a snapshot meanwhile, and needs it no longer
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
                number = natural(record["shard"]["schema"])  # a record tells no schema but its own
                self._schemas += [_LOST] * (number - len(self._schemas))
                del self._schemas[number:]
            self.apply(record)
        except (*_BAD_VALUES, UnsafeContentError) as error:
            self._warn(f"{source}: generation {record.get('generation')}: {error}; what it committed is left out")
            if isinstance(record.get("generation"), int):
                self.generation = max(self.generation, record["generation"])

    def _entries(self, value: Any, manifest: ShardManifest) -> dict[str, Any]:
        columns: Columns = entries_from_json(value, manifest, self.index.weights, len(self.shards))
        of_steps = manifest.schema.kind == "step"

        def check(positions: npt.NDArray[np.intp]) -> None:
            chosen = {name: array[positions] for name, array in columns.items()}
            check_columns(chosen, len(self.shards) + 1, len(self.index.weights))
            check_epochs(chosen, of_steps)
            if np.any(chosen["trajectory_id"] < self.next_id):
                raise CorruptStoreError("a trajectory id was given before")

        sound = _passing(np.arange(len(columns["trajectory_id"])), check)
        if not len(sound):
            raise CorruptStoreError("no entry makes sense")
        if len(sound) < len(columns["trajectory_id"]):
            lost = np.delete(columns["trajectory_id"], sound)
            self._warn(
                f"{self.directory.url}/{LOG_FOLDER}: {len(lost):,} entries hold values out of range and are left out: "
                f"ids {ids_in_words(lost)}"
            )
        return {name: array[sound] for name, array in columns.items()}


_WORKED_OUT = "worked out again from the index; seed and generator state are lost"


def _passing(positions: npt.NDArray[np.intp], check: Any) -> npt.NDArray[np.intp]:
    """Return those of the positions that pass a check which can only refuse many at once."""
    if not len(positions):
        return positions
    try:
        check(positions)
    except _BAD_VALUES:
        if len(positions) == 1:
            return positions[:0]
        half = len(positions) // 2
        return np.concatenate([_passing(positions[:half], check), _passing(positions[half:], check)])
    return positions


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
