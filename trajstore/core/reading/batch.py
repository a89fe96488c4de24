"""A batch of rows: which columns it has where its trajectories do not all have the same, and the copy of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trajstore.core.base.machine_code import kernels
from trajstore.core.columns.schema import ColumnSpec
from trajstore.core.files.partial import fetched
from trajstore.core.reading.address_table import AddressTable, HeldRows
from trajstore.core.reading.agreement import Agreement, agree
from trajstore.core.reading.gather import Located, allocate, gather
from trajstore.core.reading.late import Late
from trajstore.core.reading.slots import UNAVAILABLE
from trajstore.core.reading.sources import Source
from trajstore.core.store.index import TrajectoryIndex
from trajstore.core.store.run_ids import shown_id
from trajstore.errors import SchemaMismatchError, listed

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a batch whose trajectories have the same columns, and the numbers of these."""

    rows: npt.NDArray[np.intp]
    numbers: list[int]


@dataclass(frozen=True, slots=True)
class RowPlan:
    """A batch that only has to be copied, with :meth:`read`."""

    located: Located
    numbers: npt.NDArray[np.int64]
    specs: list[ColumnSpec]
    held: HeldRows
    parts: list[tuple[Part, list[ColumnSpec]]]
    """Where dtypes differ: rows of one kind each, with their converted columns in the order of ``specs``."""
    late: Sequence[Late]
    """Columns of values that came late, which lie in no shard, or in another one."""

    def read(self, out: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        """Return the rows, by dotted column name; once, and without ``Contents.lock``.

        Raises:
            ConfigurationError: a tensor of ``out`` does not fit.
            OSError, CorruptStoreError: rows could not be fetched; names the file.
        """
        every = [*self.specs, *(one.spec for one in self.late)]
        targets = allocate(every, len(self.located.slot), out)
        stored = targets[: len(self.specs)]
        with fetched(self.held.partial, self._pieces) if self.held.partial else nullcontext():
            self._copy(stored)
        self.held.let_go()  # after an error or interrupt it is dropped instead: threads may still be copying
        for target, one in zip(targets[len(stored) :], self.late, strict=True):
            one.fill(target)
        return {spec.name: target for spec, target in zip(every, targets, strict=True)}

    def _copy(self, targets: list[torch.Tensor]) -> None:
        if not self.parts:
            gather(self.located, self.held, self.numbers, self.specs, targets)
        for part, specs in self.parts:
            converted = allocate(specs, len(part.rows), None)
            numbers = np.array(part.numbers, np.int64)
            gather(self.located.of(part.rows), self.held, numbers, specs, converted)
            for target, tensor in zip(targets, converted, strict=True):
                target[torch.from_numpy(part.rows)] = tensor.to(target.dtype)

    def _pieces(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return address and size in bytes of every row that is to be copied."""
        everything = [(self.located, self.numbers.tolist(), self.specs)]
        parts = [(self.located.of(part.rows), part.numbers, specs) for part, specs in self.parts]
        addresses, sizes = [], []
        for located, numbers, specs in parts or everything:
            columns, widths = np.array(numbers, np.int64), np.array([spec.row_nbytes for spec in specs], np.int64)
            sources = np.empty((len(columns), len(located.slot)), np.int64)
            kernels().row_addresses(
                located.slot, located.rows, self.held.first, self.held.axes, columns, widths, sources
            )
            addresses.append(sources.reshape(-1))
            sizes.append(np.repeat(widths, len(located.slot)))
        return np.concatenate(addresses), np.concatenate(sizes)


class BatchColumns:
    """Chooses the columns of batches. ``Contents.lock`` guards it.

    Args:
        addresses: knows the columns of resident slots.
        sources: know the columns of those that cannot be read in place.
    """

    def __init__(self, addresses: AddressTable, sources: Sequence[Source]) -> None:
        self._addresses = addresses
        self._sources = sources
        self._undecoded: tuple[int, int | None] = (UNAVAILABLE, None)
        self._told: set[tuple[int, int]] = set()

    def choose(
        self, index: TrajectoryIndex, located: Located, first: int, names: Sequence[str] | None
    ) -> tuple[list[int], list[Part]]:
        """Return the columns of the batch, and which rows have them otherwise; no parts if none has.

        Args:
            index: of the trajectories.
            located: the rows; their slots are resident.
            first: position of the window's oldest trajectory, whose dtypes the batch has.
            names: the columns to take; None takes all, which must then be the same.

        Raises:
            SchemaMismatchError: the trajectories differ in their columns, or are agent trajectories.
        """
        of_each = self._addresses.table.signature[located.slot]
        signatures = np.unique(of_each).tolist()
        if any(self._addresses.columns.kind(signature) == "agent" for signature in signatures):
            raise SchemaMismatchError(
                "sample() draws steps, and this window holds agent trajectories, of which a single token says nothing: "
                "draw whole ones with sample_trajectories(count), or read one with get(trajectory_id)"
            )
        kinds = [self._addresses.columns.sampled(signature) for signature in signatures]
        oldest = self._signature_of(index, first, located.slot)
        if names is None and len(kinds) == 1 and oldest in (None, signatures[0]):
            return list(kinds[0]), []
        like = () if oldest is None else self._addresses.columns.sampled(oldest)

        def who(at: Sequence[int]) -> str:
            theirs = np.isin(of_each, [signatures[number] for number in at])
            ids = np.unique(index.at("trajectory_id", located.position[theirs])).tolist()
            return (
                f"trajectory {shown_id(ids[0])}" if len(ids) == 1 else f"trajectories {listed(map(shown_id, ids), 5)}"
            )

        agreed = agree(kinds, like, names, self._addresses.columns.specs, who)
        if all(found == agreed.wanted for found in agreed.found):
            return agreed.wanted, []
        self._tell_casts(agreed)
        parts = [
            Part(np.flatnonzero(of_each == signature), found)
            for signature, found in zip(signatures, agreed.found, strict=True)
        ]
        return agreed.wanted, parts

    def _signature_of(self, index: TrajectoryIndex, position: int, needed: npt.NDArray[np.int64]) -> int | None:
        """Return the signature of the trajectory at a position; None if it cannot be read. Needed slots stay."""
        if not index.first <= position < index.end:
            return None
        slot = int(index.at("slot", position))
        if slot == UNAVAILABLE:
            return None
        known = int(self._addresses.table.signature[slot])
        if known >= 0 or self._undecoded[0] == slot:
            return known if known >= 0 else self._undecoded[1]
        # The needed ones are resident, so that only this one can be found to have extra rows.
        if self._addresses.ensure(np.append(needed, slot), lambda _, extent: index.note_extent(position, extent)):
            source, row = self._addresses.shard_of(slot)
            schema = self._sources[source].manifest(row).schema
            self._undecoded = slot, self._addresses.columns.of(schema)[1]
            return self._undecoded[1]
        return int(self._addresses.table.signature[slot])

    def _tell_casts(self, agreed: Agreement) -> None:
        specs = self._addresses.columns.specs
        for found in agreed.found:
            for number, wanted in zip(found, agreed.wanted, strict=True):
                if number != wanted and (number, wanted) not in self._told:
                    self._told.add((number, wanted))
                    logger.warning(
                        "column %s: %s rows are cast to %s, the dtype of the window's oldest trajectory",
                        specs[number].name,
                        specs[number].dtype,
                        specs[wanted].dtype,
                    )
