"""Token columns of whole agent trajectories, copied to given offsets of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trajstore._core.base.types import IntArray
from trajstore._core.columns.document import decode_document
from trajstore._core.columns.fields import Axis
from trajstore._core.columns.schema import DOCUMENT
from trajstore._core.reading.address_table import AddressTable
from trajstore._core.reading.contents import Contents
from trajstore._core.reading.late import COLUMNS, LateValues, late_columns, outcomes_given, without_notes
from trajstore._core.reading.late_rows import late_rows_of, split_late
from trajstore._core.reading.runs import RunPlan, plan_runs
from trajstore._core.store.index import TrajectoryIndex
from trajstore._core.store.run_ids import shown_id
from trajstore.errors import CorruptStoreError, SchemaMismatchError


class TokenRows:
    """Columns of n agent trajectories, ready to copy: call :meth:`copy` any number of times, then :meth:`end`.

    Attributes:
        ids: trajectory ids, ``[n]``.
        lengths: token count L of each, ``[n]``.
        responses: response entry count R of each, ``[n]``; 0 without response columns.
        versions: policy version of each, ``[n]``; ``limits.UNKNOWN_VERSION`` if unknown.
        corrected: late outcome of each, ``[n]``; NaN for none.
        late: requested late values by name, ``[n]`` each; NaN for none.
        of_response: names of the columns that cover only the response.
    """

    def __init__(self, index: TrajectoryIndex, positions: IntArray, plan: RunPlan, late: Sequence[LateValues]) -> None:
        of = {
            name: index.at(name, positions).astype(np.int64)
            for name in ("trajectory_id", "steps", "extra", "version_high")
        }
        self.ids, self.lengths, self.responses = of["trajectory_id"], of["steps"], of["extra"]
        self.versions: IntArray = of["version_high"]
        self.corrected = outcomes_given(index, positions)
        self.late = {column.spec.name.removeprefix(COLUMNS): column.values for column in late}
        self.of_response = {
            name for name, run in plan.columns.items() if any(spec.axis is Axis.RESPONSE for spec in run.specs)
        }
        self._documents = plan.columns.pop(DOCUMENT, None)
        self._plan = plan

    def end(self) -> None:
        """Release the rows."""
        self._plan.columns, self._documents = {}, None
        self._plan.end()

    def copy(self, starts: IntArray, total: int) -> dict[str, torch.Tensor]:
        """Return every column as a tensor ``[total]`` by name, zero where no trajectory has a value.

        Args:
            starts: target offset of each trajectory's first token, ``[n]``. Response columns begin at the response.
            total: length of the tensors.

        Raises:
            OSError, CorruptStoreError: rows could not be fetched; names the file.
        """
        columns, ends = self._plan.columns, starts + self.lengths
        with self._plan.fetched(self._plan.pieces):
            return {name: run.copy(ends - run.counts, total) for name, run in columns.items()}

    def documents(self) -> list[dict[str, Any]]:
        """Return each trajectory's non-tensor fields; an empty dict without a document.

        Raises:
            CorruptStoreError: a document is damaged; names its trajectory.
        """
        documents: list[dict[str, Any]] = [{} for _ in self.ids]
        run = self._documents
        if run is None:
            return documents
        with self._plan.fetched(run.pieces):
            ends = np.cumsum(run.counts)
            texts = run.copy(ends - run.counts, int(ends[-1]) if len(ends) else 0).numpy().data
            for at, (end, size) in enumerate(zip(ends.tolist(), run.counts.tolist(), strict=True)):
                try:
                    documents[at] = decode_document(bytes(texts[end - size : end])) if size else {}
                except CorruptStoreError as error:
                    number = shown_id(int(self.ids[at]))
                    raise CorruptStoreError(f"trajectory {number}: column {DOCUMENT}: {error}") from error
        return documents


def token_rows(contents: Contents, positions: IntArray, names: Sequence[str] | None) -> TokenRows:
    """Locate rows of agent trajectories, with ``contents.lock`` held; they stay in place until ``end``.

    Args:
        contents: contents of the buffer.
        positions: positions of the trajectories, ``[n]``; duplicates are copied again.
        names: columns to copy, including late values; None = all stored ones, which all trajectories must then have.

    Raises:
        SchemaMismatchError: a trajectory has no tokens or lacks a column, or a late value does not exist.
        TrajectoryUnavailableError, CorruptStoreError: one cannot be read.
    """
    table, index = contents.addresses, contents.index
    stored, late = without_notes(names)
    slots = contents.make_resident(positions)
    _check_tokens(table, index, positions, slots)
    short = np.flatnonzero(index.at("extra", positions) > index.at("steps", positions))
    if len(short):
        number = shown_id(int(index.at("trajectory_id", positions[short[0]])))
        raise SchemaMismatchError(f"trajectory {number}: has more entries for its response than tokens")
    of_each, by_row = split_late(index, late)
    given = late_rows_of(table, index, positions, by_row, slots)
    plan = plan_runs(table, index, positions, slots, None if stored is None else [*stored, DOCUMENT], given)
    rows = TokenRows(index, positions, plan, late_columns(index, positions, of_each))
    contents.forget_decoded()
    return rows


def _check_tokens(table: AddressTable, index: TrajectoryIndex, positions: IntArray, slots: IntArray) -> None:
    own, first = np.unique(slots, return_index=True)
    for slot, at in zip(own.tolist(), first.tolist(), strict=True):
        schema = table.schema(slot)
        wrong = [column for column in schema.columns if column.row_shape]
        if schema.kind == "agent" and not wrong:
            continue
        number = shown_id(int(index.at("trajectory_id", positions[at])))
        if schema.kind != "agent":
            raise SchemaMismatchError(
                f"trajectory {number} is a block of steps; batches of tokens are made of agent trajectories"
            )
        raise CorruptStoreError(f"trajectory {number}: column {wrong[0].name} has rows of {wrong[0].row_shape}")
