"""Index columns of new trajectories, and added shards in log records. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore._core.columns.fields import Axis
from trajstore._core.columns.flat import NUMBERS, FlatTrajectories
from trajstore._core.columns.limits import MAX_STEPS, RANGES, UNKNOWN_TIME, UNKNOWN_VERSION, shown
from trajstore._core.columns.schema import Kind, rows_on
from trajstore._core.formats.base import ShardManifest
from trajstore._core.store.facts import AGENT, fact_columns, joined
from trajstore._core.store.index import COLUMNS, TrajectoryIndex, renumbered
from trajstore._core.store.json_arrays import StringTable
from trajstore._core.store.log_records import id_ranges, integers, parse_ranges
from trajstore._core.store.row_location import STARTS
from trajstore.errors import CorruptStoreError, trajectories

_EXTENT = NUMBERS[1:5]


@dataclass(slots=True, eq=False)
class NewEntries:
    """Index columns of new trajectories, shared by the view, the log and the catalog. Immutable.

    Attributes:
        columns: by name, with row locations once they are committed; texts are numbers of ``texts``.
        texts: the string table.
        facts: as recorded, by name, one value per trajectory; None for step trajectories and where a rollout lacks the
            fact. Empty once they are committed.
    """

    columns: Mapping[str, npt.NDArray[Any]]
    texts: StringTable
    facts: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @staticmethod
    def of(
        runs: Sequence[FlatTrajectories],
        ids: Sequence[int],
        uuids: bytes,
        texts: StringTable,
        committed: int = UNKNOWN_TIME,
    ) -> NewEntries:
        """Return the entries of trajectories.

        Args:
            runs: the trajectories.
            ids: their ids.
            uuids: 16 bytes for each.
            texts: string table that receives their texts.
            committed: time in µs since 1970; for trajectories in memory, when they were added.
        """
        weights = [text for run in runs for text in run.weights]
        columns = columns_of(np.concatenate([run.numbers for run in runs]), weights, ids, uuids, texts, committed)
        columns |= fact_columns([(run.facts, len(run)) for run in runs], texts)
        counted = [(run.facts or {}, len(run)) for run in runs]
        return NewEntries(columns, texts, _joined_facts(counted))

    @staticmethod
    def joined(parts: Sequence[NewEntries]) -> NewEntries:
        """Return the concatenated entries of all parts."""
        if len(parts) == 1:
            return parts[0]
        texts = parts[0].texts
        return NewEntries(
            joined([renumbered(part.columns, part.texts, texts) for part in parts]),
            texts,
            _joined_facts([(part.facts, len(part)) for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.columns["trajectory_id"])

    def __getitem__(self, part: slice) -> NewEntries:
        columns = {name: column[part] for name, column in self.columns.items()}
        facts = {name: values[part] for name, values in self.facts.items()}
        return NewEntries(columns, self.texts, facts)

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
        return np.stack([*map(self.columns.__getitem__, _EXTENT)], axis=1).astype(np.int64)


def starts_of(extents: npt.NDArray[np.int64], kind: Kind) -> dict[str, npt.NDArray[np.int64]]:
    """Return the first rows of consecutive trajectories within their shard or block."""
    steps, batch, extra, document = extents.T
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
        **{name: numbers[:, at].astype(COLUMNS[name]) for at, name in enumerate(NUMBERS)},
        "committed": np.full(len(numbers), committed, np.int64),
        "weights": np.array([*map(texts.add, weights)], np.int32),
        "uuid": np.frombuffer(uuids, "V16"),
    }


def _joined_facts(parts: Sequence[tuple[Mapping[str, Sequence[Any]], int]]) -> Mapping[str, Sequence[Any]]:
    """Return the facts of several lists of trajectories, given with their lengths."""
    if len(parts) == 1:
        return parts[0][0]
    names = dict.fromkeys(name for facts, _ in parts for name in facts)
    return {name: [value for facts, count in parts for value in facts.get(name, [None] * count)] for name in names}


def entries_to_json(entries: NewEntries) -> dict[str, Any]:
    """Return a shard's trajectories as JSON values and arrays for a log record; ids ascend."""
    columns = entries.columns
    every = columns["steps"].astype(np.int64) * columns["batch"]
    of_rollouts = AGENT in columns and bool(columns[AGENT][0])
    partial = not of_rollouts and not np.array_equal(columns["num_samples"], every)
    facts = {name: values for name, values in entries.facts.items() if values.count(None) < len(values)}
    versions: Any = np.stack([columns["version_low"], columns["version_high"]], axis=1)
    unknown = columns["version_low"] == UNKNOWN_VERSION
    if unknown.any():
        known = iter(versions[~unknown].tolist())
        versions = [None if lacking else next(known) for lacking in unknown.tolist()]
    return {  # arrays, as lists of lists would set off the collection of all garbage of the process
        "ids": id_ranges(columns["trajectory_id"]),
        "extents": entries.extents,
        "max_episode_length": columns["max_episode_length"],
        "versions": versions,
        "weights": [entries.texts[number] for number in columns["weights"].tolist()],
        "uuids": columns["uuid"].tobytes().hex(),
        **({"valid": columns["num_samples"]} if partial else {}),
        **({"facts": facts} if of_rollouts else {}),
    }


_ELSEWHERE = ("extents", "facts")
"""Values of a log record that a shard has beside its label, and in its documents."""


def for_label(values: Mapping[str, Any], times: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Return what a shard's label says of its trajectories.

    Args:
        values: what a log record says of them.
        times: when each was committed, or for new ones is about to be, in µs since 1970; written as differences.
    """
    label = {name: value for name, value in values.items() if name not in _ELSEWHERE}
    return {**label, "times": np.diff(times, prepend=0)}


def label_at(index: TrajectoryIndex, positions: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Return what a shard's label says of an index's trajectories, which ascend by id; see :func:`for_label`."""
    columns = index.take(positions)
    return for_label(entries_to_json(NewEntries(columns, index.texts)), columns["committed"])


def added_in(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return number, manifest and entries of each shard that a record adds.

    Raises:
        CorruptStoreError: the record adds no shard.
    """
    shards = record.get("shards")
    if not isinstance(shards, list) or not shards:
        raise CorruptStoreError("a commit without shards")
    return shards


@dataclass(frozen=True, slots=True)
class AddedShard:
    """A shard that a log record adds.

    Attributes:
        generation: of the record; several shards may share one.
        number: of the shard.
        row: in the shard table.
        manifest: the shard's.
        entries: the record's entries for the shard's trajectories.
        committed: commit time in µs since 1970.
    """

    generation: int
    number: int
    row: int
    manifest: ShardManifest
    entries: Mapping[str, Any]
    committed: int


def entries_from_json(added: Sequence[AddedShard], texts: StringTable) -> dict[str, npt.NDArray[Any]]:
    """Return the index columns of the trajectories of several records, by id within each; ranges are not checked.

    Args:
        added: one or more shards, in the order of their records.
        texts: string table that receives the texts.

    Raises:
        CorruptStoreError: the trajectories do not add up to a shard's rows, or their ids are not ranges.
        KeyError, TypeError, ValueError, OverflowError: values are absent or of the wrong kind.
    """
    entries = [part.entries for part in added]
    for name in ("extents", "versions", "weights", "max_episode_length"):
        if not all(type(part[name]) is list for part in entries):
            raise TypeError(f"{name} must be a list")
    extents = integers([item for part in entries for item in part["extents"]], 4)
    counts = np.array([len(part["extents"]) for part in entries], np.int64)
    versions = [_UNKNOWN if pair is None else pair for part in entries for pair in part["versions"]]
    bounds = integers(versions, 2)
    weights = [text for part in entries for text in part["weights"]]
    if not all(isinstance(text, str) for text in weights):
        raise TypeError("weights must be strings")
    if any(("facts" in part.entries) == (part.manifest.schema.kind == "step") for part in added):
        raise CorruptStoreError("only rollouts can have facts")
    of_steps = np.repeat(np.array([part.manifest.schema.kind == "step" for part in added], np.bool_), counts)
    rows = _rows_of(extents)
    starts, nbytes = _lay_out(added, counts, rows)
    samples = np.where(of_steps, rows[Axis.SAMPLES], 1).astype(np.int64)
    ends = np.cumsum(counts)
    for part, end, count in zip(added, ends.tolist(), counts.tolist(), strict=True):
        if "valid" in part.entries:
            samples[end - count : end] = _valid_in(part, count)
    columns: dict[str, npt.NDArray[Any]] = {
        "trajectory_id": expanded([record["ids"] for record in entries], counts),
        "num_samples": samples,
        **{name: extents[:, at] for at, name in enumerate(("steps", "batch", "extra", "document"))},
        "nbytes": nbytes.astype(np.int64),
        "max_episode_length": integers([number for part in entries for number in part["max_episode_length"]]),
        "version_low": bounds[:, 0],
        "version_high": bounds[:, 1],
        "committed": np.repeat(np.array([part.committed for part in added], np.int64), counts),
        "weights": np.array([texts.add(text) for text in weights], np.int32),
        "uuid": np.frombuffer(bytes.fromhex("".join([part["uuids"] for part in entries])), "V16"),
        "shard": np.repeat(np.array([part.row for part in added], np.int32), counts),
        "start_samples": starts[Axis.SAMPLES],
        "start_extra": np.where(of_steps, starts[Axis.FIRST_EXTRA], starts[Axis.RESPONSE]),
        "start_document": starts[Axis.DOCUMENT],
        **fact_columns(
            [(part.get("facts"), count) for part, count in zip(entries, counts.tolist(), strict=True)], texts
        ),
    }
    generations = [part.generation for part in added]
    if len(set(generations)) == len(added):
        return columns
    shards = [
        {name: column[end - count : end] for name, column in columns.items()}
        for end, count in zip(ends.tolist(), counts.tolist(), strict=True)
    ]
    commits = groupby(zip(generations, shards, strict=True), key=itemgetter(0))
    return joined([by_id([shard for _, shard in commit]) for _, commit in commits])


def _valid_in(part: AddedShard, count: int) -> npt.NDArray[np.int64]:
    """Return the valid steps of a shard's trajectories.

    Raises:
        CorruptStoreError: the shard lacks the field ``valid``, or has another number of trajectories.
    """
    valid = part.entries["valid"]
    if type(valid) is not list or len(valid) != count or not part.manifest.schema.has_valid:
        raise CorruptStoreError(f"the valid steps of {trajectories(count)} are {shown(valid)}")
    return integers(valid)


def by_id(shards: Sequence[Mapping[str, npt.NDArray[Any]]]) -> dict[str, npt.NDArray[Any]]:
    """Return the index columns of one commit's trajectories, by ascending id.

    Args:
        shards: per shard, the columns of its trajectories, by ascending id.

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
    """Return the rows of each trajectory per axis, as Python integers where 64 bits could overflow."""
    exact: npt.NDArray[Any] = extents
    if len(extents) and (extents.min() < 0 or extents.max() > RANGES["steps"][1]):
        exact = extents.astype(object)
    return [rows_on(exact, axis) for axis in Axis if axis is not Axis.NEXT]


def _lay_out(
    added: Sequence[AddedShard], counts: npt.NDArray[np.int64], rows: Sequence[npt.NDArray[Any]]
) -> tuple[list[npt.NDArray[np.int64]], npt.NDArray[Any]]:
    """Return the first row of each trajectory in its shard, per axis, and its bytes.

    Raises:
        CorruptStoreError: the rows do not add up to those of a shard.
    """
    if counts.min() == 0:
        raise CorruptStoreError("a shard without trajectories")
    begins = np.cumsum(counts) - counts
    totals = np.stack([np.add.reduceat(each, begins) for each in rows], axis=1).tolist()
    for shard, total in zip(added, totals, strict=True):
        for column, count in zip(shard.manifest.schema.columns, shard.manifest.rows, strict=True):
            if total[Axis.SAMPLES if column.axis is Axis.NEXT else column.axis] != count:
                raise CorruptStoreError(f"column {column.name}: trajectories do not add up to the shard's {count} rows")
    widths = np.repeat(np.array([shard.manifest.schema.axis_nbytes for shard in added]), counts, axis=0)
    starts = []
    nbytes = np.zeros(len(rows[0]), np.int64)
    for axis, each in enumerate(rows):
        ends = np.cumsum(each)
        starts.append((ends - each - np.repeat(ends[begins] - each[begins], counts)).astype(np.int64))
        nbytes = nbytes + each * widths[:, axis]
    return starts, nbytes


def check_rows(extents: npt.NDArray[np.int64], manifest: ShardManifest) -> None:
    """Refuse extents ``[n, 4]`` that do not add up to the rows of a shard.

    Raises:
        CorruptStoreError: names the column.
        ValueError: an extent is out of range.
    """
    if extents.min(initial=0) < 0 or extents.max(initial=0) > MAX_STEPS:
        raise ValueError(f"extents from {extents.min()} to {extents.max()}, must be from 0 to {MAX_STEPS}")
    for column, rows in zip(manifest.schema.columns, manifest.rows, strict=True):
        if rows_on(extents, column.axis).sum(dtype=object) != rows:  # exact: 64 bits could overflow
            raise CorruptStoreError(f"column {column.name}: trajectories do not add up to the shard's {rows} rows")


def expanded(ranges_by_shard: Sequence[Any], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the ids in each shard's ranges, as parsed from records.

    Raises:
        CorruptStoreError: they are not ranges, or a shard has another number of trajectories.
    """
    if not all(type(ranges) is list for ranges in ranges_by_shard):
        raise CorruptStoreError("not a list of id ranges")
    joined = parse_ranges([pair for ranges in ranges_by_shard for pair in ranges])
    for ranges, count in zip(ranges_by_shard, counts.tolist(), strict=True):
        if sum([last - first + 1 for first, last in ranges]) != count:  # exact: numpy's sum could overflow
            raise CorruptStoreError(f"{trajectories(count)}, but the ids {ranges}")
    lengths = joined[:, 1] - joined[:, 0] + 1
    before = np.cumsum(lengths) - lengths
    return np.repeat(joined[:, 0] - before, lengths) + np.arange(lengths.sum())
