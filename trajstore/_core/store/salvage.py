"""Opens a damaged directory and recovers its intact data.

``Catalog.open`` refuses a directory at the first damage. This module continues: it rebuilds ``metadata.json`` from the
index, skips invalid records and entries, and takes the trajectories that index and log do not name from the labels of
their shards. Nothing is written.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore._core.columns.schema import Schema
from trajstore._core.files.base import Directory
from trajstore._core.formats.base import SHARDS_FOLDER
from trajstore._core.store.additions import AddedShard, added_in, entries_from_json
from trajstore._core.store.catalog import Catalog, log_segments
from trajstore._core.store.entry_checks import EntryGate, check_lengths, range_faults, shape_faults
from trajstore._core.store.labelled_shards import read_shard
from trajstore._core.store.log_records import decode_each, lie_in, natural, record_without_end
from trajstore._core.store.lost_records import Damage, LostRecords
from trajstore._core.store.sealed import (
    INDEX_NAME,
    LAYOUT,
    LAYOUT_VERSION,
    METADATA_NAME,
    is_of_rlinf,
    parse_metadata,
    without_advice,
)
from trajstore._core.store.shard_table import shard_number
from trajstore.errors import CorruptStoreError, StoreNotFoundError, UnsafeContentError, counted, listed, trajectories

_LOST = Schema("step", ())
"""Placeholder for a schema of a damaged record; it matches no shard."""

_BAD_VALUES = (KeyError, TypeError, ValueError, OverflowError, IndexError, AttributeError, CorruptStoreError)


class SalvagedCatalog(Catalog):
    """The readable part of a damaged directory. Read-only.

    Attributes:
        damage: each damaged file, with the parts omitted or rebuilt.
    """

    def __init__(self, directory: Directory) -> None:
        super().__init__(directory)
        self._gate = EntryGate(lenient=True)
        self.damage: list[Damage] = []
        self._lost = LostRecords()
        self._index_lost = False
        self._first_unnamed = 0
        """Lowest id of the trajectories that the index cannot name."""
        self._last_refused: _Refused | None = None
        self.uncommitted = np.zeros(0, np.int64)
        """Ids of the trajectories that :meth:`with_uncommitted` added, ascending."""

    @property
    def warnings(self) -> list[str]:
        """One sentence per damage."""
        return [str(damage) for damage in self.damage]

    @property
    def lost(self) -> int:
        """Number of lost trajectories, as far as known."""
        return sum(damage.count for damage in self.damage)

    @classmethod
    def open(cls, directory: Directory) -> SalvagedCatalog:
        """Load the intact part of a directory.

        Raises:
            StoreNotFoundError: there is no store.
            UnsupportedVersionError: it has another layout version.
            CorruptStoreError: RLinf has written into the store.
        """
        catalog = cls(directory)
        catalog.metadata()  # first: refuses another layout
        catalog._load_snapshot()
        catalog.load_pins()  # first: pinned entries survive eviction
        if catalog._index_lost:
            catalog._rebuild_index()
        catalog._lost.begins(catalog.next_id)
        catalog._read_whole_log()
        catalog.load_pins()
        if catalog.left_out:
            left_out = listed(f"trajectory {number} ({reason})" for number, reason in catalog.left_out.items())
            catalog._warn(f"{directory.url}: entries that cannot be served are left out: {left_out}")
        metadata = catalog.metadata()
        newest = metadata["generation"] - catalog.generation
        if newest > 0:
            catalog._lost.missing(
                catalog._warn(f"{directory.url}: {counted(newest, 'newest commit', 'is', 'are')} missing")
            )
        catalog._note_told(metadata)
        for check in catalog.end_checks():
            try:
                check()
            except CorruptStoreError as error:
                if not catalog.damage:  # else a consequence of that damage
                    catalog._lost.missing(catalog._warn(without_advice(str(error))))
        if catalog._index_lost:
            catalog._note_count(metadata)
        elif catalog._lost.any:
            catalog._take_shards()
        catalog._settle()
        return catalog

    def _settle(self) -> None:
        """Determine the lost ids; metadata and pins bound those at the end of the log."""
        present = [index["trajectory_id"] for index in (self.index, self.pinned)]
        named = [int(head.ids.max()) + 1 for head in self.pins.heads.values() if len(head.ids)]
        self._lost.settle(np.concatenate(present), max([self.told_ids, *named]))

    def _settle_line(self) -> None:
        """Determine the visit and its line from the snapshots; the log does not record them."""
        heads = self.pins.heads
        left = {head.visit + 1: head for head in heads.values() if head.left_for and head.generation < self.generation}
        self.visit = max([self.visit, *left, *(head.visit for head in heads.values())])
        if self.visit in left and (target := heads.get(str(left[self.visit].left_for))) is not None:
            self.line = self.present_line(target)

    def _warn(self, text: str) -> Damage:
        for damage in self.damage:
            if damage.message == text:
                return damage
        self.damage.append(Damage(text))
        return self.damage[-1]

    def metadata(self) -> dict[str, Any]:
        """Return ``metadata.json``, or values rebuilt from the index and the shards if it is damaged."""
        try:
            return super().metadata()
        except FileNotFoundError as error:
            if not self.directory.exists():
                raise StoreNotFoundError(f"{self.directory.url}: no such directory") from error
            self._warn(f"{self.directory.url}/{METADATA_NAME}: missing ({_WORKED_OUT})")
        except CorruptStoreError as error:
            self._warn(f"{without_advice(str(error))} ({_WORKED_OUT})")
        return {
            "layout": LAYOUT,
            "layout_version": LAYOUT_VERSION,
            "store_id": self.store_id,
            "generation": self.generation,
            "trajectory_format": self.shards.manifest(len(self.shards) - 1).format if len(self.shards) else None,
        }

    def _damaged_pin(self, error: CorruptStoreError) -> None:
        damage = self._warn(f"{without_advice(str(error))}; what only this pin named is left out")
        damage.uncounted = True

    # -- shards that nothing names ----------------------------------------------------------------

    @classmethod
    def with_uncommitted(cls, catalog: Catalog) -> SalvagedCatalog:
        """Add the trajectories whose shards were written, but whose record was not, or was cut off.

        Only shards with later numbers than all commits' and only new ids are taken: others were evicted, set aside or
        moved. A live writer's shards are its own. Incomplete shards are skipped, as a killed writer leaves them.
        """
        whole = cls(catalog.directory)
        whole.__dict__.update(catalog.__dict__)
        if whole.directory.is_written():
            return whole
        first = whole._first_unnamed = whole.next_id
        for number, files in sorted(whole._unnamed_shards().items()):
            if number >= catalog.next_shard:
                with contextlib.suppress(*_BAD_VALUES, UnsafeContentError, FileNotFoundError):  # a writer may begin now
                    whole._take_shard(number, files)
        if whole.next_id > first:
            whole._sort()
        whole.uncommitted = whole.index["trajectory_id"][whole.index["trajectory_id"] >= first]
        return whole

    def _unnamed_shards(self) -> dict[int, list[str]]:
        """Return the files of each shard that no live or pinned trajectory needs, by its number."""
        known = [names for _, names, _ in self.shards.file_sizes(np.flatnonzero(self.needed_shards()))]
        unnamed: dict[int, list[str]] = {}
        for name in sorted(set(self.directory.names(SHARDS_FOLDER)).difference(*known)):
            if (number := shard_number(name)) is not None:
                unnamed.setdefault(number, []).append(name)
        return unnamed

    def _take_shards(self) -> None:
        """Add the trajectories of shards that neither the index nor a readable record names, by their labels.

        Which of them were evicted is known from the index, the readable records and the heads that were left.
        """
        for number, files in sorted(self._unnamed_shards().items()):
            try:
                self._take_shard(number, files)
            except (*_BAD_VALUES, UnsafeContentError) as error:
                detail = str(error).removeprefix(f"{self.directory.url}/")
                self._warn(f"{self.directory.url}/{detail}; no readable commit names it").uncounted = True
        self._sort()

    def _sort(self) -> None:
        """Order the entries by id, each once, with their late values."""
        for index in (self.index, self.pinned):
            _, order = np.unique(index["trajectory_id"], return_index=True)
            index.adopt(index.take(index.first + order))
        self.notes.lay_over(self.index)

    def _take_shard(self, number: int, files: Sequence[str]) -> None:
        manifest, entries = read_shard(self.directory, number, files)
        row, schema = len(self.shards), manifest.schema
        columns: Mapping[str, Any] = {}
        if entries:
            columns = entries_from_json([AddedShard(0, number, row, manifest, entries, 0)], self.index.texts)
            columns = {**columns, "committed": entries["times"]}
            check_lengths(columns)
            columns = self._gate.admit(columns, range_faults(columns, row + 1, len(self.index.texts)))
            columns = self._gate.admit(columns, shape_faults(columns, schema.kind == "step", schema.has_valid))
        self._add_shard(number, manifest, self.generation)
        if not entries:
            return
        ids = columns["trajectory_id"]
        new = ids >= self._first_unnamed
        left = lie_in(ids, self._lost.evicted) | self._left(ids)
        for index, chosen in ((self.index, new & ~left), (self.pinned, new & left & self.pins.named(ids))):
            chosen &= index.find_many(ids) < 0
            index.append(index.translated({name: column[chosen] for name, column in columns.items()}, self.index.texts))
        self.next_id = max(self.next_id, int(ids.max()) + 1)

    def _left(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which ids the store left when it last went to a snapshot, if it kept the head that it left."""
        heads = [head for head in self.pins.heads.values() if head.left_for and head.visit + 1 == self.visit]
        if not self._index_lost or not heads or (target := self.pins.heads.get(str(heads[0].left_for))) is None:
            return np.zeros(len(ids), np.bool_)
        return lie_in(ids, heads[0].ids) & ~lie_in(ids, target.ids)

    # -- the index --------------------------------------------------------------------------------

    def _load_snapshot(self) -> None:
        source = f"{self.directory.url}/{INDEX_NAME}"
        try:
            self._take_snapshot(self._index_value(source, self._told_id()), source)
            if self.index_damage:
                self._warn(self.index_damage)
        except (FileNotFoundError, *_BAD_VALUES) as error:
            missing = isinstance(error, FileNotFoundError)
            if missing and not log_segments(self.directory) and not self.directory.names(SHARDS_FOLDER):
                raise StoreNotFoundError(f"{self.directory.url}: no trajectory store here") from error
            self._check_not_overwritten()
            detail = "missing" if missing else without_advice(str(error)).removeprefix(f"{source}: ")
            fresh = SalvagedCatalog(self.directory)
            fresh.damage = self.damage
            self.__dict__.update(fresh.__dict__)
            self.store_id = str(self.metadata().get("store_id") or uuid.uuid4())
            self._index_lost = True
            self._warn(f"{source}: {detail}; {_FROM_SHARDS}")
        self._first_unnamed = self.next_id

    def _told_id(self) -> str | None:
        """Return the store's UUID in ``metadata.json``; None if it cannot be read."""
        with contextlib.suppress(FileNotFoundError, CorruptStoreError):
            return super().metadata().get("store_id")
        return None

    def _check_not_overwritten(self) -> None:
        """Raise if RLinf overwrote the index and the metadata."""
        with contextlib.suppress(FileNotFoundError):
            data = self.directory.read(METADATA_NAME)
            if is_of_rlinf(data):
                parse_metadata(data, f"{self.directory.url}/{METADATA_NAME}")

    def _rebuild_index(self) -> None:
        """Rebuild the index from shards and pins; the log's evictions and late values follow."""
        heads = self.pins.heads.values()
        newest = max(heads, key=lambda head: head.generation, default=None)
        self.generation = max(self.metadata()["generation"], newest.generation if newest else 0)
        self._settle_line()
        self._take_shards()
        times = self.index["committed"]  # they never decrease, and those of labels may
        later = np.where(times < 0, times, np.maximum.accumulate(times)) if len(times) else times
        self.index.fill(slice(self.index.first, self.index.end), committed=later)
        if newest is not None:
            try:
                self.notes = self.values_of(newest)
            except CorruptStoreError as error:
                self._warn(without_advice(str(error)))
            self.notes.lay_over(self.index)
        segments = log_segments(self.directory)
        self.generation = min([self.generation, *(first - 1 for first, _ in segments)])

    def _note_count(self, metadata: Mapping[str, Any]) -> None:
        """Compare the rebuilt index with the counts in ``metadata.json``, which evictions since have made too high."""
        self.generation = max(
            [self.generation, metadata["generation"], *(h.generation for h in self.pins.heads.values())]
        )
        if isinstance(size := metadata.get("size"), int) and size != len(self.index):
            counted_there = f"counts {trajectories(size)}, and {len(self.index):,} are there now"
            damage = self._warn(f"{self.directory.url}/{METADATA_NAME}: {counted_there}")
            damage.uncounted = size > len(self.index)

    # -- the log ----------------------------------------------------------------------------------

    def _read_whole_log(self) -> None:
        segments = log_segments(self.directory)
        for place, (_, name) in enumerate(segments):
            source = f"{self.directory.url}/{name}"
            try:
                data = self.directory.read(name)
            except FileNotFoundError:  # a concurrent writer took a snapshot and deleted it
                continue
            except CorruptStoreError as error:
                self._lost.missing(self._warn(str(error)))
                continue
            bad = last = 0
            self.segment, self.segment_end, self.segment_torn = name, 0, 0
            for record, end in decode_each(data):
                if record is not None:
                    self._apply_if_whole(record, source)
                    self.segment_end = end
                    last = bad
                elif end < len(data) or data.endswith(b"\n") or place < len(segments) - 1:
                    bad += 1
                elif (whole := record_without_end(data)) is not None:
                    self._warn(f"{source}: the line feed of its last record is damaged")
                    self._apply_if_whole(whole, source)
                    self.segment_end = end
                else:
                    self.segment_torn = len(data) - self.segment_end  # left by a crash
            if bad:
                damage = self._warn(f"{source}: {counted(bad, 'record', 'is', 'are')} damaged")
                if bad > last and place == len(segments) - 1:  # no later record bounds their ids
                    self._lost.missing(damage)

    def _apply_if_whole(self, record: Mapping[str, Any], source: str) -> None:
        adds: tuple[tuple[int, int], ...] = ()
        try:
            generation = natural(record.get("generation"))
            if generation <= self.generation:
                return
            if generation > self.generation + 1:
                first, last = self.generation + 1, generation - 1
                missing = f"record of generation {first} is" if first == last else f"records {first} to {last} are"
                self._lost.missing(self._warn(f"{source}: the {missing} missing"))
            if self._index_lost and record["operation"] in ("add", "rewrite"):  # the shards say it
                self.generation = generation
                return
            adds = self._lost.read(record)
            source_record = record.get("rows", record) if record["operation"] == "annotate" else record
            if source_record.get("schemas") and record["operation"] in ("add", "annotate"):
                # A record's new schemas belong to its own shards and have the highest numbers.
                shards = [source_record] if "rows" in record else added_in(source_record)
                last = max(natural(shard["shard"]["schema"]) for shard in shards)
                number = max(last + 1 - len(source_record["schemas"]), 0)
                self._schemas += [_LOST] * (number - len(self._schemas))
                del self._schemas[number:]
            self.apply([record])
        except (*_BAD_VALUES, UnsafeContentError) as error:
            self._lost.refused(self._refused(source, record.get("generation"), str(error)), adds)
            if isinstance(record.get("generation"), int):
                self.generation = max(self.generation, record["generation"])

    def _refused(self, source: str, generation: Any, reason: str) -> Damage:
        """Return the damage of an invalid record; consecutive records with the same reason share one."""
        last = self._last_refused
        if last is not None and last.continued_by(source, generation, reason):
            last.damage.message = f"{source}: generations {last.first} to {generation}: {reason}"
            last.generation = generation
            return last.damage
        damage = self._warn(f"{source}: generation {generation}: {reason}")
        self._last_refused = _Refused(damage, source, reason, generation, generation)
        return damage


@dataclass
class _Refused:
    """Consecutive invalid records with the same reason."""

    damage: Damage
    source: str
    reason: str
    first: Any
    generation: Any

    def continued_by(self, source: str, generation: Any, reason: str) -> bool:
        """Return whether a record directly follows, with the same reason."""
        following = isinstance(generation, int) and generation - 1 == self.generation
        return following and (source, reason) == (self.source, self.reason)


_FROM_SHARDS = (
    "worked out again from the labels of the shards, the log and the pins. What these do not say is not known: "
    "evictions (such trajectories may be shown again), and late values since the newest pin or saved point"
)

_WORKED_OUT = "worked out again from the index; seed and generator state are lost"


def open_leniently(directory: Directory, *, uncommitted: bool = False) -> tuple[Catalog, list[Damage]]:
    """Return the catalog of a directory and its damage; an undamaged directory is opened normally.

    Args:
        directory: directory of the store.
        uncommitted: add what :meth:`SalvagedCatalog.with_uncommitted` finds.

    Raises:
        StoreNotFoundError: there is no store.
        UnsupportedVersionError: it has another layout version.
        CorruptStoreError: RLinf has written into the store.
    """
    try:
        catalog = Catalog.open(directory)
        damage = [Damage(catalog.index_damage)] if catalog.index_damage else []
    except (CorruptStoreError, StoreNotFoundError):
        catalog = salvaged = SalvagedCatalog.open(directory)
        damage = salvaged.damage
    return SalvagedCatalog.with_uncommitted(catalog) if uncommitted else catalog, damage
