"""What a record of the log says of the shards that a commit adds, and the index columns that it means. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.core.columns.fields import Axis
from trajstore.core.columns.limits import RANGES, UNKNOWN_VERSION
from trajstore.core.formats.base import ShardManifest
from trajstore.core.store.facts import fact_columns, facts_to_json, joined
from trajstore.core.store.log_records import integers, parse_ranges, ranges_of
from trajstore.core.store.new_entries import NewEntries
from trajstore.core.store.packing import StringTable
from trajstore.errors import CorruptStoreError


def entries_to_json(entries: NewEntries) -> dict[str, Any]:
    """Return the part of a log record on the trajectories of a shard, whose ids ascend, as JSON values."""
    columns = entries.columns
    bounds = zip(columns["version_low"].tolist(), columns["version_high"].tolist(), strict=True)
    return {
        "ids": ranges_of(entries.ids),
        "extents": entries.extents.tolist(),
        "max_episode_length": columns["max_episode_length"].tolist(),
        "versions": [None if low == UNKNOWN_VERSION else [low, high] for low, high in bounds],
        "weights": entries.weights,
        "uuids": columns["uuid"].tobytes().hex(),
        **({"facts": facts_to_json([facts or {} for facts in entries.facts])} if entries.facts[0] is not None else {}),
    }


def added_in(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return number, manifest and entries of each shard that a record adds.

    Raises:
        CorruptStoreError: it adds none.
    """
    shards = record.get("shards")
    if not isinstance(shards, list) or not shards:
        raise CorruptStoreError("a commit without shards")
    return shards


@dataclass(frozen=True, slots=True)
class AddedShard:
    """What a record says that was added.

    Attributes:
        generation: of the record; several shards may come with one.
        number: of the shard.
        row: in the shard table.
        manifest: the shard's.
        entries: the record's, of its trajectories.
        committed: when, in µs since 1970.
    """

    generation: int
    number: int
    row: int
    manifest: ShardManifest
    entries: Mapping[str, Any]
    committed: int


def entries_from_json(added: Sequence[AddedShard], texts: StringTable) -> dict[str, npt.NDArray[Any]]:
    """Return the index columns of the trajectories of some records, those of each by id; ranges are not checked.

    Args:
        added: what the records say, in their order; one shard or more.
        texts: table that takes their texts.

    Raises:
        CorruptStoreError: the trajectories do not add up to a shard's rows, or their ids are no ranges.
        KeyError, TypeError, ValueError, OverflowError: values are absent or of the wrong kind.
    """
    entries = [one.entries for one in added]
    for name in ("extents", "versions", "weights", "max_episode_length"):
        if not all(type(one[name]) is list for one in entries):
            raise TypeError(f"{name} must be a list")
    extents = integers([item for one in entries for item in one["extents"]], 4)
    counts = np.array([len(one["extents"]) for one in entries], np.int64)
    versions = [_UNKNOWN if pair is None else pair for one in entries for pair in one["versions"]]
    bounds = integers(versions, 2)
    weights = [text for one in entries for text in one["weights"]]
    if not all(isinstance(text, str) for text in weights):
        raise TypeError("weights must be strings")
    if any(("facts" in one.entries) == (one.manifest.schema.kind == "step") for one in added):
        raise CorruptStoreError("facts are told of rollouts, and of nothing else")
    of_steps = np.repeat(np.array([one.manifest.schema.kind == "step" for one in added], np.bool_), counts)
    rows = _rows_of(extents)
    starts, nbytes = _lay_out(added, counts, rows)
    columns: dict[str, npt.NDArray[Any]] = {
        "trajectory_id": _expand(entries, counts),
        "num_samples": np.where(of_steps, rows[Axis.SAMPLES], 1).astype(np.int64),
        **{name: extents[:, at] for at, name in enumerate(("steps", "batch", "extra", "document"))},
        "nbytes": nbytes.astype(np.int64),
        "max_episode_length": integers([number for one in entries for number in one["max_episode_length"]]),
        "version_low": bounds[:, 0],
        "version_high": bounds[:, 1],
        "committed": np.repeat(np.array([one.committed for one in added], np.int64), counts),
        "weights": np.array([texts.add(text) for text in weights], np.int32),
        "uuid": np.frombuffer(bytes.fromhex("".join([one["uuids"] for one in entries])), "V16"),
        "shard": np.repeat(np.array([one.row for one in added], np.int32), counts),
        "start_samples": starts[Axis.SAMPLES],
        "start_extra": np.where(of_steps, starts[Axis.FIRST_EXTRA], starts[Axis.RESPONSE]),
        "start_document": starts[Axis.DOCUMENT],
        **fact_columns([(one.get("facts"), count) for one, count in zip(entries, counts.tolist(), strict=True)], texts),
    }
    generations = [one.generation for one in added]
    if len(set(generations)) == len(added):
        return columns
    ends = np.cumsum(counts).tolist()
    shards = [
        {name: column[end - count : end] for name, column in columns.items()}
        for end, count in zip(ends, counts.tolist(), strict=True)
    ]
    commits = groupby(zip(generations, shards, strict=True), key=itemgetter(0))
    return joined([by_id([shard for _, shard in commit]) for _, commit in commits])


def by_id(shards: Sequence[Mapping[str, npt.NDArray[Any]]]) -> dict[str, npt.NDArray[Any]]:
    """Return the index columns of the trajectories of one commit, by ascending id.

    Args:
        shards: columns of the trajectories in each of its shards, by ascending id.

    Raises:
        CorruptStoreError: the ids within a shard do not ascend.
    """
    if len(shards) == 1:
        return dict(shards[0])
    for shard in shards:
        if np.any(np.diff(shard["trajectory_id"]) <= 0):
            raise CorruptStoreError("the ids within a shard do not ascend")
    columns = joined(shards)
    order = np.argsort(columns["trajectory_id"], kind="stable")
    return {name: column[order] for name, column in columns.items()}


_UNKNOWN = (UNKNOWN_VERSION, UNKNOWN_VERSION)


def _rows_of(extents: npt.NDArray[np.int64]) -> list[npt.NDArray[Any]]:
    """Return, per axis, the rows of each trajectory; as exact Python numbers where 64 bits might not do."""
    exact: npt.NDArray[Any] = extents
    if len(extents) and (extents.min() < 0 or extents.max() > RANGES["steps"][1]):
        exact = extents.astype(object)
    return rows_by_axis(*exact.T)


def rows_by_axis(
    steps: npt.NDArray[Any], batch: npt.NDArray[Any], extra: npt.NDArray[Any], document: npt.NDArray[Any]
) -> list[npt.NDArray[Any]]:
    """Return, per axis, the rows of trajectories of these extents, each ``[n]``."""
    more = (steps + extra) * batch
    return [steps * batch, more, more, extra, document]


def _lay_out(
    added: Sequence[AddedShard], counts: npt.NDArray[np.int64], rows: Sequence[npt.NDArray[Any]]
) -> tuple[list[npt.NDArray[np.int64]], npt.NDArray[Any]]:
    """Return, per axis, where the rows of each trajectory begin in its shard; and its bytes.

    Raises:
        CorruptStoreError: they do not add up to the rows of a shard.
    """
    if counts.min() == 0:
        raise CorruptStoreError("a shard without trajectories")
    begins = np.cumsum(counts) - counts
    totals = np.stack([np.add.reduceat(each, begins) for each in rows], axis=1).tolist()
    for one, total in zip(added, totals, strict=True):
        for column, count in zip(one.manifest.schema.columns, one.manifest.rows, strict=True):
            if total[column.axis] != count:
                raise CorruptStoreError(f"column {column.name}: trajectories do not add up to the shard's {count} rows")
    widths = np.repeat(np.array([one.manifest.schema.axis_nbytes for one in added]), counts, axis=0)
    starts = []
    nbytes = np.zeros(len(rows[0]), np.int64)
    for axis, each in enumerate(rows):
        ends = np.cumsum(each)
        starts.append((ends - each - np.repeat(ends[begins] - each[begins], counts)).astype(np.int64))
        nbytes = nbytes + each * widths[:, axis]
    return starts, nbytes


def _expand(entries: Sequence[Mapping[str, Any]], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the ids of all trajectories.

    Raises:
        CorruptStoreError: a record names more or fewer than it has trajectories.
    """
    told = [one["ids"] for one in entries]
    if not all(type(ranges) is list for ranges in told):
        raise CorruptStoreError("not a list of id ranges")
    joined = parse_ranges([pair for ranges in told for pair in ranges])  # of all records at once
    for ranges, count in zip(told, counts.tolist(), strict=True):
        if sum([last - first + 1 for first, last in ranges]) != count:  # exact: a hostile sum of numpy's wraps around
            raise CorruptStoreError(f"{count} trajectories, but the ids {ranges}")
    lengths = joined[:, 1] - joined[:, 0] + 1
    before = np.cumsum(lengths) - lengths
    return np.repeat(joined[:, 0] - before, lengths) + np.arange(lengths.sum())
