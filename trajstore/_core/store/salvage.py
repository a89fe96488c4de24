"""Opens a damaged directory and recovers its intact data.

``Catalog.open`` refuses a directory at the first damage. This module continues: it rebuilds ``metadata.json`` from the
index, rebuilds a damaged index from the log if that has every commit, and skips invalid records and entries.
Nothing is written.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trajstore._core.columns.schema import Schema
from trajstore._core.files.base import Directory
from trajstore._core.formats.base import SHARDS_FOLDER
from trajstore._core.store.additions import added_in
from trajstore._core.store.catalog import Catalog, log_segments
from trajstore._core.store.entry_checks import EntryGate
from trajstore._core.store.log_records import decode_each, natural, record_without_end
from trajstore._core.store.lost_records import Damage, LostRecords
from trajstore._core.store.sealed import (
    FROM_A_COPY,
    INDEX_NAME,
    LAYOUT,
    LAYOUT_VERSION,
    METADATA_NAME,
    is_of_rlinf,
    parse_metadata,
    unseal,
    without_advice,
)
from trajstore.errors import CorruptStoreError, StoreNotFoundError, UnsafeContentError, counted, listed

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
        self._last_refused: _Refused | None = None

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
            CorruptStoreError: neither the index nor the log is usable.
        """
        catalog = cls(directory)
        catalog.metadata()  # first: refuses another layout
        catalog._load_snapshot()
        catalog._lost.begins(catalog.next_id)
        catalog.load_pins()  # first: pinned entries survive eviction
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
        catalog._settle()
        if catalog._index_lost:
            catalog._settle_line()
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
            detail = without_advice(str(error)).removeprefix(f"{source}: ")
            reason = f"{source}: missing" if isinstance(error, FileNotFoundError) else f"{source}: {detail}"
            if not self._has_first_commits(segments):
                self._check_not_overwritten()
                again = "if a copy to here was interrupted, run it again"
                too = f"; {METADATA_NAME} is damaged too ({again})" if self.damage else ""
                raise CorruptStoreError(
                    f"{reason}; the log cannot replace it, it does not begin with the first commit{FROM_A_COPY}. "
                    f"Without one, only the files in {SHARDS_FOLDER}/ are left, without ids{too}"
                ) from error
            fresh = SalvagedCatalog(self.directory)
            fresh.damage = self.damage
            self.__dict__.update(fresh.__dict__)
            self.store_id = str(self.metadata().get("store_id") or uuid.uuid4())
            self._index_lost = True
            self._warn(f"{reason}: worked out again from the log, which has every commit")

    def _has_first_commits(self, segments: Sequence[tuple[int, str]]) -> bool:
        """Return whether the log begins with the first commit and continues; a lone first fence does not count.

        A fence's segment is kept when the segments after it are deleted.
        """
        if not segments or segments[0][0] != 1:
            return False
        with contextlib.suppress(FileNotFoundError):
            records = [record for record, _ in decode_each(self.directory.read(segments[0][1])) if record is not None]
            only_fence = len(records) == 1 and "fence" in records[0]
            return not only_fence or len(segments) == 1 or segments[1][0] == 2
        return False

    def _check_not_overwritten(self) -> None:
        """Raise if RLinf overwrote the index and the metadata."""
        with contextlib.suppress(FileNotFoundError):
            data = self.directory.read(METADATA_NAME)
            if is_of_rlinf(data):
                parse_metadata(data, f"{self.directory.url}/{METADATA_NAME}")

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
            self._lost.refused(self._refused(source, record.get("generation"), str(error)), record, adds)
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


_WORKED_OUT = "worked out again from the index; seed and generator state are lost"


def open_leniently(directory: Directory) -> tuple[Catalog, list[Damage]]:
    """Return the catalog of a directory and its damage; an undamaged directory is opened normally.

    Raises:
        StoreNotFoundError: there is no store.
        UnsupportedVersionError: it has another layout version.
        CorruptStoreError: neither the index nor the log is usable.
    """
    try:
        return Catalog.open(directory), []
    except (CorruptStoreError, StoreNotFoundError):
        catalog = SalvagedCatalog.open(directory)
        return catalog, catalog.damage
