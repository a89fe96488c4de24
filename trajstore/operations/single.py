"""Read one trajectory of a store or run directory, even while it is being written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trajstore._core.columns.facts import RECORDED, SCORE
from trajstore._core.columns.schema import DOCUMENT
from trajstore._core.files.base import Directory
from trajstore._core.reading.late import with_notes
from trajstore._core.reading.places import find_place, is_of_rank, rank_of
from trajstore._core.reading.shard_access import ShardAccess, damage_of
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.index import TrajectoryEntry
from trajstore._core.store.late_values import OVER_FACTS
from trajstore._core.store.notes import Note
from trajstore._core.store.run_ids import ALONE, id_from, no_rank, own_id, rank_of_id, shown_id
from trajstore._core.store.salvage import open_leniently
from trajstore.errors import ConfigurationError, CorruptStoreError, TrajectoryUnavailableError, listed
from trajstore.operations.live import announced, needed_now
from trajstore.trajectory import AgentTrajectory, AnyTrajectory, Reward


@dataclass(frozen=True, slots=True)
class Single:
    """A trajectory with its store's records on it.

    Attributes:
        url: URL of the store or run.
        trajectory_id: its id there.
        uuid: its UUID, which copies keep.
        kind: ``"agent"`` or ``"step"``.
        shard: the first file of its shard.
        entry: its entry in the index.
        trajectory: the trajectory as recorded.
        tensors: its columns except the document, ``[T (+ E), B, ...]`` (step) or ``[rows, ...]`` (agent).
        notes: its late values, earliest first.
        given: the late values in force, by name.
        problems: damage of its shard; its own rows may be intact.
    """

    url: str
    trajectory_id: int
    uuid: str
    kind: str
    shard: str
    entry: TrajectoryEntry
    trajectory: AnyTrajectory
    tensors: dict[str, torch.Tensor]
    notes: list[Note]
    given: dict[str, float | str]
    problems: list[str]

    def reward_in_force(self) -> tuple[Reward | None, dict[str, Any]]:
        """Return a rollout's reward with late values applied, and the recorded values they replace."""
        if not isinstance(self.trajectory, AgentTrajectory):
            return None, {}
        replaced = {n: value for n, value in self.given.items() if n in OVER_FACTS or n.startswith(SCORE)}
        corrected = with_notes(self.trajectory, replaced)
        return corrected.reward, corrected.metadata[RECORDED] if replaced else {}


def read_single(path: str | Path, trajectory_id: int | str) -> Single:
    """Return one trajectory of a store or a run directory.

    Args:
        path: local path or URL.
        trajectory_id: its id as displayed: 17, or ``"3/17"`` in a run directory.

    Raises:
        TrajectoryUnavailableError: no trajectory has this id.
        ConfigurationError: the id is malformed, or the path is not a store.
        CorruptStoreError: the trajectory or the index is damaged.
    """
    number = id_from("trajectory_id", trajectory_id)
    run = find_place(path)
    ranks = {rank_of(part.directory): part for part in run.parts if is_of_rank(part.name)} or {ALONE: run}
    place = ranks.get(rank_of_id(number))
    if place is None:
        raise no_rank(path, number, ranks)
    if place.kind != "store":
        descriptions = {"rlinf": "a directory of RLinf", "experience_pool": "the files of a pool"}
        folder = "a run directory" if place.rank_names else "a folder"
        kind = descriptions.get(place.kind) or f"{folder} with {listed(part.name for part in place.parts)}"
        raise ConfigurationError(f"{path}: single trajectories can only be shown of a store; this is {kind}")
    catalog, position, trajectory, columns, damage = _read(place.directory, own_id(number), number)
    entry, row = catalog.index.entry(position), int(catalog.index.at("shard", position))
    return Single(
        url=run.url,
        trajectory_id=number,
        uuid=catalog.index.uuid(position),
        kind=catalog.shards.schema(row).kind,
        shard=catalog.shards.manifest(row).files[0].name,
        entry=entry,
        trajectory=trajectory,
        tensors={name: tensor for name, tensor in columns.items() if name != DOCUMENT},
        notes=catalog.notes.history(entry.trajectory_id),
        given=catalog.index.given(position),
        problems=[f"{text}; the rows of this one may be intact" for text in damage],
    )


def _read(
    directory: Directory, trajectory_id: int, number: int
) -> tuple[Catalog, int, AnyTrajectory, dict[str, torch.Tensor], list[str]]:
    """Return the catalog, the position in its index, the trajectory, its columns, and the damage of its shard.

    Args:
        directory: directory of the store, which may have a writer.
        trajectory_id: id of the trajectory in the store.
        number: the requested id, including the rank in a run.

    Raises:
        TrajectoryUnavailableError: no trajectory has this id, or it was evicted.
        CorruptStoreError: the trajectory is damaged.
    """
    with announced(directory) as lease:
        while True:
            catalog, problems = open_leniently(directory)
            lease.settle(catalog.generation)
            position = catalog.index.find(trajectory_id)
            if position is None and problems:
                raise CorruptStoreError(
                    f"trajectory {shown_id(number)}: not in the readable part: {listed(map(str, problems), 3)}"
                )
            if position is None:
                raise TrajectoryUnavailableError(f"no trajectory has the id {shown_id(number)}")
            access = ShardAccess(catalog)
            try:
                trajectory = access.trajectory(catalog.index, position)
                damage = damage_of(directory, catalog.shards.manifest(int(catalog.index.at("shard", position))))
                return catalog, position, trajectory, access.columns(catalog.index, position), damage
            except CorruptStoreError:  # evicted or moved meanwhile, unless a file still needed is missing
                files = {file.name for file in catalog.shards.manifest(catalog.index.at("shard", position)).files}
                _, needed = needed_now(directory)
                if files & needed:
                    raise
            finally:
                access.close()
