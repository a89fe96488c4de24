"""Validates index entries, and refuses or omits invalid ones. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore._core.columns.limits import RANGES, UNKNOWN_VERSION
from trajstore._core.store.facts import AGENT, TEXTS
from trajstore.errors import CorruptStoreError

Columns = Mapping[str, npt.NDArray[Any]]
"""Columns of entries, by name, all of one length."""

Fault = tuple[str, npt.NDArray[np.bool_]]
"""Description of a fault, and a mask of the entries that have it."""


FaultsIn = Callable[[Columns], Iterator[Fault]]
"""Yields the faults of entries."""


class EntryGate:
    """Refuses or omits entries that have a fault.

    Args:
        lenient: omit invalid entries instead of refusing all.

    Attributes:
        left_out: the fault of each omitted entry, by trajectory id.
    """

    def __init__(self, *, lenient: bool = False) -> None:
        self.lenient = lenient
        self.left_out: dict[int, str] = {}

    def admit(self, columns: Columns, faults: Iterator[Fault]) -> Columns:
        """Return the columns of the valid entries.

        Raises:
            CorruptStoreError: there is a fault, and the gate is not lenient; names it and the trajectory.
        """
        wrong: npt.NDArray[np.bool_] | None = None
        for fault, entries in faults:
            ids = columns["trajectory_id"][entries].tolist()
            if not self.lenient:
                more = f" and {len(ids) - 1} more" if len(ids) > 1 else ""
                raise CorruptStoreError(
                    f"{fault}: trajectory {ids[0]}{more}; load_checkpoint(strict=False) leaves it out"
                )
            for number in ids:
                self.left_out.setdefault(number, fault)
            wrong = entries if wrong is None else wrong | entries
        return columns if wrong is None else {name: array[~wrong] for name, array in columns.items()}


def check_lengths(columns: Columns) -> None:
    """Refuse columns of different lengths.

    Raises:
        CorruptStoreError: names the column.
    """
    count = len(columns["trajectory_id"])
    for name, array in columns.items():
        if len(array) != count:
            raise CorruptStoreError(f"index column {name} has {len(array)} entries, not {count}")


def range_faults(columns: Columns, shards: int, texts: int) -> Iterator[Fault]:
    """Yield the columns with numbers out of range; columns without a range are not checked.

    Args:
        columns: of the entries, some or all of them.
        shards: number of shards in their table.
        texts: number of texts in their table.
    """
    if not len(columns["trajectory_id"]):
        return
    facts = {"terminated": (-1, 1), AGENT: (0, 1), **dict.fromkeys(TEXTS, (-1, texts - 1))}
    ranges = {**RANGES, **facts, "shard": (0, shards - 1), "weights": (0, texts - 1)}
    for name in [name for name in columns if name in ranges]:
        array, (low, high) = columns[name], ranges[name]
        if array.min() < low or array.max() > high:
            yield f"index column {name} holds a value out of range", (array < low) | (array > high)
    if "version_low" not in columns:
        return
    first, last = columns["version_low"], columns["version_high"]
    wrong = (first > last) | ((first == UNKNOWN_VERSION) != (last == UNKNOWN_VERSION))
    if wrong.any():
        yield "the lowest policy version is above the highest", wrong


def shape_faults(columns: Columns, of_steps: npt.ArrayLike, with_valid: npt.ArrayLike = False) -> Iterator[Fault]:
    """Yield entries with inconsistent sizes, for which sampling would compute rows outside the shard.

    Args:
        columns: of the entries; none is out of range.
        of_steps: per entry, or for all of them, whether they are step trajectories.
        with_valid: likewise, whether they have a field ``valid``, and so perhaps fewer samples than T·B.
    """
    kind = np.asarray(of_steps)
    steps, batch, extra = (columns[name].astype(np.int64, copy=False) for name in ("steps", "batch", "extra"))
    wrong = kind & (extra > 0) & ((steps == 0) | (steps % np.maximum(extra, 1) != 0))
    if wrong.any():
        yield "the steps of a trajectory cannot be split into its epochs", wrong
    samples, most = columns["num_samples"], np.where(kind, steps * batch, 1)
    wrong = np.where(with_valid, samples > most, samples != most)
    if wrong.any():
        yield "a trajectory has another number of samples than its steps say", wrong
    wrong = ~kind & (batch != 1)
    if wrong.any():
        yield "an agent trajectory has more than one environment", wrong
