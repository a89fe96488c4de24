"""What an index says of trajectories that are new. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.core.columns.flat import FlatTrajectory
from trajstore.core.columns.limits import UNKNOWN_TIME, UNKNOWN_VERSION
from trajstore.core.columns.schema import Extent, Kind
from trajstore.core.store.facts import fact_columns, facts_to_json
from trajstore.core.store.index import COLUMNS
from trajstore.core.store.packing import StringTable
from trajstore.core.store.row_location import STARTS

_NUMBERS = (
    *("num_samples", "steps", "batch", "extra", "document", "nbytes"),
    *("max_episode_length", "version_low", "version_high"),
)


@dataclass(slots=True, eq=False)
class NewEntries:
    """What an index says of new trajectories, whatever their ids, and wherever they are. Nobody changes it.

    Attributes:
        numbers: columns of the index with these names, ``[trajectories, 9]``.
        weights: ``model_weights_id`` of each.
        facts: of each rollout; None of step trajectories.
    """

    numbers: npt.NDArray[np.int64]
    weights: Sequence[str]
    facts: Sequence[Mapping[str, Any] | None]

    @staticmethod
    def of(flats: Sequence[FlatTrajectory]) -> NewEntries:
        """Return what an index says of these."""
        unknown = (UNKNOWN_VERSION, UNKNOWN_VERSION)
        numbers = [
            (flat.num_samples, *flat.extent, flat.nbytes, flat.max_episode_length, *(flat.versions or unknown))
            for flat in flats
        ]
        weights = [flat.model_weights_id for flat in flats]
        return NewEntries(np.array(numbers, np.int64), weights, [flat.facts for flat in flats])

    @staticmethod
    def joined(parts: Sequence[NewEntries]) -> NewEntries:
        """Return those of all parts, one after the other."""
        if len(parts) == 1:
            return parts[0]
        return NewEntries(
            np.concatenate([part.numbers for part in parts]),
            [text for part in parts for text in part.weights],
            [facts for part in parts for facts in part.facts],
        )

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, part: slice) -> NewEntries:
        return NewEntries(self.numbers[part], self.weights[part], self.facts[part])

    @property
    def nbytes(self) -> list[int]:
        """Bytes of the columns of each."""
        nbytes: list[int] = self.numbers[:, 5].tolist()
        return nbytes

    @property
    def max_episode_lengths(self) -> list[int]:
        """``max_episode_length`` of each."""
        lengths: list[int] = self.numbers[:, 6].tolist()
        return lengths

    @property
    def extents(self) -> npt.NDArray[np.int64]:
        """Steps, batch, extra rows and bytes of the document, ``[trajectories, 4]``."""
        return self.numbers[:, 1:5]

    @property
    def versions(self) -> list[list[int] | None]:
        """Lowest and highest policy version of each; None where it is unknown."""
        return [None if pair[0] == UNKNOWN_VERSION else pair for pair in self.numbers[:, 7:].tolist()]


def starts_of(extents: Sequence[Extent] | npt.NDArray[np.int64], kind: Kind) -> dict[str, npt.NDArray[np.int64]]:
    """Return the first rows, within their shard or block, of all its trajectories in order."""
    steps, batch, extra, document = np.array(extents, np.int64).T
    rows = np.array((steps * batch, (steps + extra) * batch if kind == "step" else extra, document))
    return dict(zip(STARTS, np.cumsum(rows, axis=1) - rows, strict=True))


def columns_of(
    entries: NewEntries,
    ids: Sequence[int],
    uuids: bytes,
    texts: StringTable,
    committed: int = UNKNOWN_TIME,
) -> dict[str, npt.NDArray[Any]]:
    """Return the index columns of new trajectories; where their rows are is the caller's to add.

    Args:
        entries: of the trajectories.
        ids: their trajectory ids.
        uuids: 16 bytes for each.
        texts: table that takes their texts.
        committed: when, in µs since 1970; of what is in memory, when it was added.
    """
    return {
        "trajectory_id": np.array(ids, np.int64),
        **{name: entries.numbers[:, at].astype(COLUMNS[name]) for at, name in enumerate(_NUMBERS)},
        "committed": np.full(len(entries), committed, np.int64),
        "weights": np.array([texts.add(text) for text in entries.weights], np.int32),
        "uuid": np.frombuffer(uuids, "V16"),
        **fact_columns(list(_facts_of(entries.facts)), texts),
    }


def _facts_of(every: Sequence[Mapping[str, Any] | None]) -> Iterator[tuple[Any, int]]:
    """Yield the facts of each run of rollouts, None of each run of step trajectories; and how many they are."""
    for facts, run in groupby(every, key=lambda facts: facts is not None):
        some = list(run)
        yield (facts_to_json([one for one in some if one is not None]) if facts else None), len(some)
