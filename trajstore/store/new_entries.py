"""What an index says of trajectories that are new. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.columns.fields import Axis
from trajstore.columns.flat import FlatTrajectory
from trajstore.columns.limits import UNKNOWN_TIME, UNKNOWN_VERSION
from trajstore.columns.schema import Extent, Kind
from trajstore.store.facts import fact_columns, facts_to_json
from trajstore.store.home import STARTS
from trajstore.store.index import COLUMNS
from trajstore.store.packing import StringTable

_NUMBERS = (
    *("num_samples", "steps", "batch", "extra", "document", "nbytes"),
    *("max_episode_length", "version_low", "version_high"),
)


def starts_of(extents: Sequence[Extent], kind: Kind) -> dict[str, npt.NDArray[np.int64]]:
    """Return the first rows, within their shard, of all its trajectories in order."""
    more = Axis.FIRST_EXTRA if kind == "step" else Axis.RESPONSE
    rows = np.array([(e.rows(Axis.SAMPLES), e.rows(more), e.document) for e in extents], np.int64)
    starts = np.cumsum(rows, axis=0) - rows
    return {name: starts[:, at] for at, name in enumerate(STARTS)}


def columns_of(
    flats: Sequence[FlatTrajectory],
    ids: Sequence[int],
    uuids: bytes,
    texts: StringTable,
    committed: int = UNKNOWN_TIME,
) -> dict[str, npt.NDArray[Any]]:
    """Return the index columns of new trajectories; where their rows are is the caller's to add.

    Args:
        flats: the trajectories.
        ids: their trajectory ids.
        uuids: 16 bytes for each.
        texts: table that takes their texts.
        committed: when, in µs since 1970; of what is in memory, when it was added.
    """
    unknown = (UNKNOWN_VERSION, UNKNOWN_VERSION)
    numbers = np.array(
        [
            (flat.num_samples, *flat.extent, flat.nbytes, flat.max_episode_length, *(flat.versions or unknown))
            for flat in flats
        ],
        np.int64,
    )
    return {
        "trajectory_id": np.array(ids, np.int64),
        **{name: numbers[:, at].astype(COLUMNS[name]) for at, name in enumerate(_NUMBERS)},
        "committed": np.full(len(flats), committed, np.int64),
        "weights": np.array([texts.add(flat.model_weights_id) for flat in flats], np.int32),
        "uuid": np.frombuffer(uuids, "V16"),
        **fact_columns(list(_facts_of(flats)), texts),
    }


def _facts_of(flats: Sequence[FlatTrajectory]) -> Iterator[tuple[Any, int]]:
    """Yield the facts of each run of rollouts, None of each run of step trajectories; and how many they are."""
    for facts, run in groupby((flat.facts for flat in flats), key=lambda facts: facts is not None):
        some = list(run)
        yield (facts_to_json([one for one in some if one is not None]) if facts else None), len(some)
