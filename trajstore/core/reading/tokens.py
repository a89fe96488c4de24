"""Token columns of whole agent trajectories, copied to wherever a batch wants each of them to begin."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.core.columns.document import decode_document
from trajstore.core.columns.fields import Axis
from trajstore.core.columns.schema import DOCUMENT
from trajstore.core.reading.address_table import AddressTable
from trajstore.core.reading.contents import Contents
from trajstore.core.reading.late import COLUMNS, LateValues, late_columns, outcomes_given, without_notes
from trajstore.core.reading.late_rows import given_rows, split_late
from trajstore.core.reading.runs import RunPlan, plan_runs
from trajstore.core.store.index import TrajectoryIndex
from trajstore.core.store.run_ids import shown_id
from trajstore.errors import CorruptStoreError, SchemaMismatchError

IntArray = npt.NDArray[np.int64]


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

    def __init__(self, index: TrajectoryIndex, positions: IntArray, plan: RunPlan, late: Sequence[LateValues]) -> None:
        of = {
            name: index.at(name, positions).astype(np.int64)
            for name in ("trajectory_id", "steps", "extra", "version_high")
        }
        self.ids, self.lengths, self.responses = of["trajectory_id"], of["steps"], of["extra"]
        self.versions: IntArray = of["version_high"]
        self.corrected = outcomes_given(index, positions)
        self.late = {one.spec.name.removeprefix(COLUMNS): one.values for one in late}
        self.of_response = {
            name for name, run in plan.columns.items() if any(spec.axis is Axis.RESPONSE for spec in run.specs)
        }
        self._documents = plan.columns.pop(DOCUMENT, None)
        self._plan = plan

    def end(self) -> None:
        """Let go of the rows."""
        self._plan.columns, self._documents = {}, None  # nothing is read any more
        self._plan.end()

    def copy(self, starts: IntArray, total: int) -> dict[str, torch.Tensor]:
        """Return every column as one tensor ``[total]``, by name, zero where no trajectory has a value for it.

        Args:
            starts: where the first token of each trajectory goes, ``[n]``. A column of the response begins where the
                response does.
            total: places of the batch.

        Raises:
            OSError, CorruptStoreError: rows could not be fetched; names the file.
        """
        columns, ends = self._plan.columns, starts + self.lengths
        with self._plan.fetched(self._plan.pieces):
            return {name: run.copy(ends - run.counts, total) for name, run in columns.items()}

    def documents(self) -> list[dict[str, Any]]:
        """Return the fields of each trajectory that are no tensors; an empty dict for one without.

        Raises:
            CorruptStoreError: one is damaged; names its trajectory.
        """
        found: list[dict[str, Any]] = [{} for _ in self.ids]
        run = self._documents
        if run is None:
            return found
        with self._plan.fetched(lambda: (run.sources, run.sizes)):
            for at, (address, size) in enumerate(zip(run.sources.tolist(), run.counts.tolist(), strict=True)):
                try:
                    found[at] = decode_document(ctypes.string_at(address, size)) if size else {}
                except CorruptStoreError as error:
                    number = shown_id(int(self.ids[at]))
                    raise CorruptStoreError(f"trajectory {number}: column {DOCUMENT}: {error}") from error
        return found


def token_rows(contents: Contents, positions: IntArray, names: Sequence[str] | None) -> TokenRows:
    """Find the rows of agent trajectories, with ``contents.lock`` held; they stay where they are until ``end``.

    Args:
        contents: what the buffer shows.
        positions: of the trajectories, ``[n]``; duplicates are copied again.
        names: columns wanted, also of values that came late; None = all that are stored, which all must have then.

    Raises:
        SchemaMismatchError: a trajectory has no tokens, or lacks a column; or no trajectory was given such a value.
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
    given = given_rows(table, index, positions, by_row, slots)
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
