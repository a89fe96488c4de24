"""What an entry of the index must be so that it can be served, and what becomes of one that is not. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.core.columns.limits import RANGES, UNKNOWN_VERSION
from trajstore.core.store.facts import AGENT, TEXTS
from trajstore.errors import CorruptStoreError

Columns = Mapping[str, npt.NDArray[Any]]
"""Columns of entries, by name, all of one length."""

Fault = tuple[str, npt.NDArray[np.bool_]]
"""What is wrong, and per entry whether it is."""


_BLOCK = 1 << 16
"""Entries whose columns stay in a processor's cache together."""


class EntryGate:
    """Refuses entries that have a fault, or leaves them out.

    Args:
        lenient: leave out what cannot be served instead of refusing all.

    Attributes:
        left_out: by trajectory id, what is wrong with an entry that was left out.
    """

    def __init__(self, *, lenient: bool = False) -> None:
        self.lenient = lenient
        self.left_out: dict[int, str] = {}

    def admit(self, columns: Columns, faults: Iterator[Fault]) -> Columns:
        """Return the columns of the entries without fault.

        Raises:
            CorruptStoreError: there is a fault, and the gate is not lenient; names it and the trajectory.
        """
        wrong: npt.NDArray[np.bool_] | None = None
        for what, entries in faults:
            ids = columns["trajectory_id"][entries].tolist()
            if not self.lenient:
                more = f" and {len(ids) - 1} more" if len(ids) > 1 else ""
                raise CorruptStoreError(
                    f"{what}: trajectory {ids[0]}{more}; load_checkpoint(strict=False) leaves it out"
                )
            for number in ids:
                self.left_out.setdefault(number, what)
            wrong = entries if wrong is None else wrong | entries
        return columns if wrong is None else {name: array[~wrong] for name, array in columns.items()}


def in_blocks(columns: Columns, faults: Callable[[Columns], Iterator[Fault]]) -> Iterator[Fault]:
    """Yield faults of entries that are looked at block by block, which takes memory for one block only."""
    count = len(columns["trajectory_id"])
    found: dict[str, npt.NDArray[np.bool_]] = {}
    for start in range(0, count, _BLOCK):
        block = slice(start, start + _BLOCK)
        for what, wrong in faults({name: array[block] for name, array in columns.items()}):
            found.setdefault(what, np.zeros(count, np.bool_))[block] |= wrong
    yield from found.items()


def check_lengths(columns: Columns) -> None:
    """Refuse columns of different lengths, and more samples than can be counted.

    Raises:
        CorruptStoreError: these are such.
    """
    count = len(columns["trajectory_id"])
    for name, array in columns.items():
        if len(array) != count:
            raise CorruptStoreError(f"index column {name} has {len(array)} entries, not {count}")


def range_faults(columns: Columns, shards: int, texts: int) -> Iterator[Fault]:
    """Yield which numbers are out of range.

    Args:
        columns: of the entries.
        shards: number of shards that they may name.
        texts: number of texts that they may name.
    """
    if not len(columns["trajectory_id"]):
        return
    ranges = {**RANGES, **fact_ranges(texts), "shard": (0, shards - 1), "weights": (0, texts - 1)}
    yield from out_of_range(columns, ranges)
    first, last = columns["version_low"], columns["version_high"]
    wrong = (first > last) | ((first == UNKNOWN_VERSION) != (last == UNKNOWN_VERSION))
    if wrong.any():
        yield "the lowest policy version is above the highest", wrong


def fact_ranges(texts: int) -> dict[str, tuple[int, int]]:
    """Return lowest and highest value of the facts that are numbered, where there are so many texts."""
    return {"terminated": (-1, 1), AGENT: (0, 1), **dict.fromkeys(TEXTS, (-1, texts - 1))}


def out_of_range(columns: Columns, ranges: Mapping[str, tuple[int, int]]) -> Iterator[Fault]:
    """Yield which columns hold a value that is too low or too high; one without a range may hold any."""
    for name, array in columns.items():
        if name not in ranges or not len(array):
            continue
        low, high = ranges[name]
        if array.min() < low or array.max() > high:
            yield f"index column {name} holds a value out of range", (array < low) | (array > high)


def shape_faults(columns: Columns, of_steps: npt.ArrayLike) -> Iterator[Fault]:
    """Yield which entries have numbers that do not go together: sampling would compute rows outside of the shard.

    Args:
        columns: of the entries; none is out of range.
        of_steps: per entry, or for all of them, whether they are step trajectories.
    """
    kind = np.asarray(of_steps)
    steps, batch, extra = (columns[name].astype(np.int64) for name in ("steps", "batch", "extra"))
    wrong = kind & (extra > 0) & ((steps == 0) | (steps % np.maximum(extra, 1) != 0))
    if wrong.any():
        yield "the steps of a trajectory cannot be split into its epochs", wrong
    wrong = columns["num_samples"] != np.where(kind, steps * batch, 1)
    if wrong.any():
        yield "a trajectory has another number of samples than its steps say", wrong
    wrong = ~kind & (batch != 1)
    if wrong.any():
        yield "an agent trajectory has more than one environment", wrong
