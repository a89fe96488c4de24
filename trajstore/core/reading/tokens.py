"""Token columns of whole agent trajectories, copied to wherever a batch wants each of them to begin."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.core.base.machine_code import kernels
from trajstore.core.columns.document import decode_document
from trajstore.core.columns.fields import Axis
from trajstore.core.columns.schema import DOCUMENT, ColumnSpec
from trajstore.core.files.partial import fetched
from trajstore.core.reading.address_table import AddressTable, HeldRows
from trajstore.core.reading.contents import Contents
from trajstore.core.reading.late import COLUMNS, LateValues, late_columns, outcomes_given, without_notes
from trajstore.core.reading.late_rows import GivenRows, given_rows, split_late
from trajstore.core.store.index import TrajectoryIndex
from trajstore.core.store.row_location import START_OF
from trajstore.core.store.run_ids import shown_id
from trajstore.errors import CorruptStoreError, SchemaMismatchError, listed

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of n trajectories: the dtype of its rows and the address of the first one in each."""

    axis: Axis
    dtypes: list[torch.dtype]
    sources: IntArray
    keep: torch.Tensor | None = None
    """Memory in which some of them lie."""


class TokenRows:
    """Columns of n agent trajectories that only have to be copied: :meth:`copy` as often as wanted, then :meth:`end`.

    Attributes:
        ids: trajectory ids, ``[n]``.
        lengths: L, tokens of each, ``[n]``.
        responses: R, entries of each column of the response, ``[n]``; 0 where there are no such columns.
        versions: policy version of each, ``[n]``; ``limits.UNKNOWN_VERSION`` where it is not known.
        corrected: outcome that each was given late, ``[n]``; NaN for none.
        late: values that came late, ``[n]`` by name, NaN for none; of those that were asked for.
        of_response: names of the columns that have entries for the response alone.
    """

    def __init__(
        self,
        index: TrajectoryIndex,
        positions: IntArray,
        columns: Mapping[str, _Column],
        documents: IntArray,
        held: HeldRows,
        late: list[LateValues],
    ) -> None:
        of = {
            name: index.at(name, positions).astype(np.int64) for name in ("trajectory_id", "steps", "extra", "document")
        }
        self.ids, self.lengths, self.responses = of["trajectory_id"], of["steps"], of["extra"]
        self.versions: IntArray = index.at("version_high", positions).astype(np.int64)
        self.corrected = outcomes_given(index, positions)
        self.late = {one.spec.name.removeprefix(COLUMNS): one.values for one in late}
        self.of_response = {name for name, column in columns.items() if column.axis is Axis.RESPONSE}
        self._columns = columns
        self._documents = documents
        self._document_sizes = of["document"]
        self._held = held

    def end(self) -> None:
        """Let go of the rows."""
        self._columns, self._document_sizes = {}, np.zeros_like(self._document_sizes)  # nothing is read any more
        self._held.let_go()

    def copy(self, starts: IntArray, total: int) -> dict[str, torch.Tensor]:
        """Return every column as one tensor ``[total]``, by name, zero where no trajectory has a value for it.

        Args:
            starts: where the first token of each trajectory goes, ``[n]``. A column of the response begins where the
                response does.
            total: places of the batch.

        Raises:
            OSError, CorruptStoreError: rows could not be fetched; names the file.
        """
        with fetched(self._held.partial, self._pieces):
            return self._copied(starts, total)

    def _pieces(self) -> tuple[IntArray, IntArray]:
        """Return address and size in bytes of the rows of each trajectory in each column."""
        addresses, sizes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for column in self._columns.values():
            counts = self.responses if column.axis is Axis.RESPONSE else self.lengths
            addresses.append(column.sources)
            sizes.append(counts * np.array([dtype.itemsize for dtype in column.dtypes], np.int64))
        return np.concatenate(addresses), np.concatenate(sizes)

    def _copied(self, starts: IntArray, total: int) -> dict[str, torch.Tensor]:
        result = {}
        for name, column in self._columns.items():
            counts = self.responses if column.axis is Axis.RESPONSE else self.lengths
            begins = starts + self.lengths - counts
            if len(begins) and (begins.min() < 0 or (begins + counts).max() > total):
                raise ValueError(f"starts: a trajectory lies outside the {total} places")
            wanted = column.dtypes[0]
            for dtype in column.dtypes[1:]:
                wanted = torch.promote_types(wanted, dtype)
            target = torch.zeros(total, dtype=wanted)
            same = np.array([dtype == wanted for dtype in column.dtypes], np.bool_)
            width = wanted.itemsize
            kernels().copy_blocks(target.data_ptr() + begins[same] * width, column.sources[same], counts[same] * width)
            for at in np.flatnonzero(~same).tolist():  # of another dtype than the widest
                converted = torch.empty(int(counts[at]), dtype=column.dtypes[at])
                ctypes.memmove(converted.data_ptr(), int(column.sources[at]), converted.nbytes)
                target[int(begins[at]) : int(begins[at] + counts[at])] = converted
            result[name] = target
        return result

    def documents(self) -> list[dict[str, Any]]:
        """Return the fields of each trajectory that are no tensors; an empty dict for one without.

        Raises:
            CorruptStoreError: one is damaged; names its trajectory.
        """
        with fetched(self._held.partial, lambda: (self._documents, self._document_sizes)):
            return self._decoded_documents()

    def _decoded_documents(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        rows = zip(self.ids.tolist(), self._documents.tolist(), self._document_sizes.tolist(), strict=True)
        for number, address, size in rows:
            try:
                found.append(decode_document(ctypes.string_at(address, size)) if size and address else {})
            except CorruptStoreError as error:
                raise CorruptStoreError(f"trajectory {shown_id(number)}: column {DOCUMENT}: {error}") from error
        return found


def token_rows(contents: Contents, positions: IntArray, names: Sequence[str] | None) -> TokenRows:
    """Find the rows of agent trajectories, with ``contents.lock`` held; they stay where they are until ``end``.

    Args:
        contents: what the buffer shows.
        positions: of the trajectories, ``[n]``, none twice in vain: each is copied.
        names: columns wanted, also of values that came late; None = all that are stored, which all must have then.

    Raises:
        SchemaMismatchError: a trajectory has no tokens, or lacks a column; or no trajectory was given such a value.
        TrajectoryUnavailableError, CorruptStoreError: one cannot be read.
    """
    names, of_late = without_notes(names)
    slots = contents.make_resident(positions)
    addresses, index = contents.addresses, contents.index
    of_each_one, by_row = split_late(index, of_late)
    given, needed = given_rows(addresses, contents.sources, index, positions, by_row, slots)
    starts = {
        axis: index.at(START_OF[axis], positions).astype(np.int64)
        for axis in (Axis.SAMPLES, Axis.RESPONSE, Axis.DOCUMENT)
    }
    ids = index.at("trajectory_id", positions)
    held = HeldRows(addresses, needed)
    by_slot = {slot: _columns_of(addresses, held, slot, ids[slots == slot]) for slot in np.unique(slots).tolist()}
    of_each = [by_slot[slot] for slot in slots.tolist()]
    taken = list(dict.fromkeys(name for columns in by_slot.values() for name in columns)) if names is None else names
    there = sorted({name for columns in by_slot.values() for name in columns} - {DOCUMENT})
    nowhere = [name for name in taken if name not in there and name != DOCUMENT]
    if nowhere and of_each:
        raise SchemaMismatchError(f"columns: no trajectory has {listed(nowhere)}; there are {listed(there, 30)}")
    wrong = []
    for name in taken:
        lacking = [int(ids[at]) for at, columns in enumerate(of_each) if name not in columns]
        if lacking and name != DOCUMENT:
            wrong.append(f"{name} (absent from trajectory {shown_id(lacking[0])})")
    if wrong:
        raise SchemaMismatchError(f"trajectories differ in {'; '.join(wrong)}; name the columns to read")
    short = np.flatnonzero(index.at("extra", positions) > index.at("steps", positions))
    if len(short):
        raise SchemaMismatchError(
            f"trajectory {shown_id(int(ids[short[0]]))}: has more entries for its response than tokens"
        )
    columns = {}
    for name in taken:
        if name == DOCUMENT or not of_each:
            continue
        specs = [columns[name] for columns in of_each]
        axis = specs[0][0].axis
        widths = np.array([spec.row_nbytes for spec, _ in specs], np.int64)
        bases = np.array([address for _, address in specs], np.int64)
        columns[name] = _Column(axis, [spec.torch_dtype for spec, _ in specs], bases + starts[axis] * widths)
    bases = np.array([columns[DOCUMENT][1] if DOCUMENT in columns else 0 for columns in of_each], np.int64)
    documents = np.where(bases > 0, bases + starts[Axis.DOCUMENT], 0)
    late = late_columns(index, positions, of_each_one)
    for one in given:
        columns[one.name] = _given_column(index, held, positions, one)
    rows = TokenRows(index, positions, columns, documents, held, late)
    contents.forget_decoded()
    return rows


def _given_column(index: TrajectoryIndex, held: HeldRows, positions: IntArray, given: GivenRows) -> _Column:
    """Return a column of values by row that came late; NaN stands for those of a trajectory that has none."""
    column, slots = given.column, given.slots
    lacking = slots < 0
    sources = np.zeros(len(slots), np.int64)
    for slot in np.unique(slots[~lacking]).tolist():
        here = slots == slot
        sources[here] = held.address_of(slot, column) + given.starts[here] * column.row_nbytes
    keep = None
    if lacking.any():
        keep = torch.full((int(index.at("steps", positions[lacking]).max()),), float("nan"), dtype=column.torch_dtype)
        sources[lacking] = keep.data_ptr()
    return _Column(column.axis, [column.torch_dtype] * len(slots), sources, keep)


def _columns_of(
    addresses: AddressTable, held: HeldRows, slot: int, ids: npt.NDArray[Any]
) -> dict[str, tuple[ColumnSpec, int]]:
    """Return the columns of a resident slot by name, each with the address of its first row."""
    schema = addresses.schema(slot)
    if schema.kind != "agent":
        raise SchemaMismatchError(
            f"trajectory {shown_id(int(ids[0]))} is a block of steps; batches of tokens are made of agent trajectories"
        )
    for column in schema.columns:
        if column.row_shape:
            raise CorruptStoreError(
                f"trajectory {shown_id(int(ids[0]))}: column {column.name} has rows of {column.row_shape}"
            )
    return {
        column.name: (column, address) for column, address in zip(schema.columns, held.addresses_of(slot), strict=True)
    }
