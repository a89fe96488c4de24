"""Index entries of new trajectories. Pure; no I/O."""

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
from trajstore.core.store.facts import fact_columns, facts_to_json, joined
from trajstore.core.store.index import COLUMNS, renumbered
from trajstore.core.store.packing import StringTable
from trajstore.core.store.row_location import STARTS

_NUMBERS = (
    *("num_samples", "steps", "batch", "extra", "document", "nbytes"),
    *("max_episode_length", "version_low", "version_high"),
)
_EXTENT = _NUMBERS[1:5]


@dataclass(slots=True, eq=False)
class NewEntries:
    """Index columns of new trajectories, shared by the view, the log and the catalog. Immutable.

    Attributes:
        columns: by name, except row locations; texts are numbers of ``texts``.
        texts: the string table.
        weights: ``model_weights_id`` of each.
        facts: of each rollout; None for step trajectories.
    """

    columns: Mapping[str, npt.NDArray[Any]]
    texts: StringTable
    weights: Sequence[str]
    facts: Sequence[Mapping[str, Any] | None]

    @staticmethod
    def of(
        flats: Sequence[FlatTrajectory],
        ids: Sequence[int],
        uuids: bytes,
        texts: StringTable,
        committed: int = UNKNOWN_TIME,
    ) -> NewEntries:
        """Return the entries of trajectories.

        Args:
            flats: the trajectories.
            ids: their ids.
            uuids: 16 bytes for each.
            texts: string table that receives their texts.
            committed: time in µs since 1970; for trajectories in memory, when they were added.
        """
        unknown = (UNKNOWN_VERSION, UNKNOWN_VERSION)
        numbers = [
            (flat.num_samples, *flat.extent, flat.nbytes, flat.max_episode_length, *(flat.versions or unknown))
            for flat in flats
        ]
        weights, facts = [flat.model_weights_id for flat in flats], [flat.facts for flat in flats]
        columns = columns_of(np.array(numbers, np.int64), weights, ids, uuids, texts, committed)
        return NewEntries(columns | fact_columns(list(_facts_of(facts)), texts), texts, weights, facts)

    @staticmethod
    def joined(parts: Sequence[NewEntries]) -> NewEntries:
        """Return the concatenated entries of all parts."""
        if len(parts) == 1:
            return parts[0]
        texts = parts[0].texts
        return NewEntries(
            joined([renumbered(part.columns, part.texts, texts) for part in parts]),
            texts,
            [text for part in parts for text in part.weights],
            [facts for part in parts for facts in part.facts],
        )

    def __len__(self) -> int:
        return len(self.weights)

    def __getitem__(self, part: slice) -> NewEntries:
        columns = {name: column[part] for name, column in self.columns.items()}
        return NewEntries(columns, self.texts, self.weights[part], self.facts[part])

    @property
    def ids(self) -> list[int]:
        """Trajectory id of each."""
        ids: list[int] = self.columns["trajectory_id"].tolist()
        return ids

    @property
    def nbytes(self) -> list[int]:
        """Bytes of the columns of each."""
        nbytes: list[int] = self.columns["nbytes"].tolist()
        return nbytes

    @property
    def extents(self) -> npt.NDArray[np.int64]:
        """Steps, batch, extra rows and bytes of the document, ``[trajectories, 4]``."""
        return np.stack([self.columns[name] for name in _EXTENT], axis=1).astype(np.int64)


def starts_of(extents: Sequence[Extent] | npt.NDArray[np.int64], kind: Kind) -> dict[str, npt.NDArray[np.int64]]:
    """Return the first rows of consecutive trajectories within their shard or block."""
    steps, batch, extra, document = np.array(extents, np.int64).T
    rows = np.array((steps * batch, (steps + extra) * batch if kind == "step" else extra, document))
    return dict(zip(STARTS, np.cumsum(rows, axis=1) - rows, strict=True))


def columns_of(
    numbers: npt.NDArray[np.int64],
    weights: Sequence[str],
    ids: Sequence[int],
    uuids: bytes,
    texts: StringTable,
    committed: int = UNKNOWN_TIME,
) -> dict[str, npt.NDArray[Any]]:
    """Return index columns of trajectories, without facts and row locations.

    Args:
        numbers: samples, steps, batch, extra rows, document bytes, bytes, longest episode, lowest and highest version
            of each, ``[trajectories, 9]``.
        weights: ``model_weights_id`` of each.
        ids: their ids.
        uuids: 16 bytes for each.
        texts: string table that receives ``weights``.
        committed: time in µs since 1970.
    """
    return {
        "trajectory_id": np.array(ids, np.int64),
        **{name: numbers[:, at].astype(COLUMNS[name]) for at, name in enumerate(_NUMBERS)},
        "committed": np.full(len(numbers), committed, np.int64),
        "weights": np.array([texts.add(text) for text in weights], np.int32),
        "uuid": np.frombuffer(uuids, "V16"),
    }


def _facts_of(every: Sequence[Mapping[str, Any] | None]) -> Iterator[tuple[Any, int]]:
    """Yield the facts (None for step trajectories) and the length of each run of one kind."""
    for facts, run in groupby(every, key=lambda facts: facts is not None):
        items = list(run)
        yield (facts_to_json([item for item in items if item is not None]) if facts else None), len(items)
