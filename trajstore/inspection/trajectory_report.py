"""Reports on one trajectory, or on one of its samples or tokens. JSON values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trajstore.columns.schema import DOCUMENT
from trajstore.errors import ConfigurationError, CorruptStoreError, MissingDependencyError, listed
from trajstore.experience.tokenizers import tokenizer_at
from trajstore.files.base import Directory
from trajstore.inspection.live import announced, needed_now
from trajstore.inspection.measure import turns_of
from trajstore.inspection.statistics import sampled_rows, tensor_report
from trajstore.reading.places import find_place
from trajstore.reading.shard_access import ShardAccess
from trajstore.store.catalog import Catalog
from trajstore.store.salvage import open_leniently
from trajstore.trajectory import AgentTrajectory, AnyTrajectory

Report = dict[str, Any]
Decode = Callable[[Sequence[int]], str]

TOKENIZER_KEY = "tokenizer"
"""Key of an agent trajectory's ``metadata`` that names the folder of the tokenizer its tokens are of."""

_WORDS = ("task_id", "data_id", "rollout_id", "query", "policy_version", "is_terminated", "entropy")


def inspect_trajectory(
    path: str | Path, trajectory_id: int, sample: int | None = None, tokenizer: str | Path | None = None
) -> Report:
    """Return a report on one trajectory of a store, or on one of its samples.

    Args:
        path: local path or URL of a store.
        trajectory_id: its id.
        sample: number of a transition, ``t * B + b`` (step), or of a token (agent).
        tokenizer: folder or name of the tokenizer with which tokens of an agent trajectory are told as text. None: the
            folder that ``metadata["tokenizer"]`` names, if it is on this machine.

    Raises:
        TrajectoryUnavailableError: no trajectory has this id.
        ConfigurationError: it has fewer samples, the path is no store, or the tokenizer cannot be loaded.
        MissingDependencyError: a tokenizer was given, and ``transformers`` is not installed.
        CorruptStoreError: the trajectory, or the index, is damaged.
    """
    place = find_place(path)
    if place.kind != "store":
        what = {"rlinf": "a directory of RLinf", "experience_pool": "the files of a pool"}
        folder = "a run directory" if place.rank_names else "a folder"
        found = what.get(place.kind) or f"{folder} with {listed(part.name for part in place.parts)}"
        raise ConfigurationError(f"{path}: single trajectories can be shown of a store, this is {found}")
    catalog, position, trajectory, columns = _read(place.directory, trajectory_id)
    entry = catalog.index.entry(position)
    shard = catalog.index.at("shard", position)
    tensors = {name: tensor for name, tensor in columns.items() if name != DOCUMENT}
    report: Report = {
        "path": place.url,
        "trajectory_id": trajectory_id,
        "uuid": entry.uuid,
        "kind": catalog.shards.schema(int(shard)).kind,
        "shard": catalog.shards.manifest(shard).files[0].name,
        "model_weights_id": entry.model_weights_id or None,
        "versions": list(entry.versions) if entry.versions is not None else None,
    }
    if isinstance(trajectory, AgentTrajectory):
        decode = _decoder(trajectory, tokenizer)
        if sample is not None:
            return report | _token(trajectory, trajectory_id, tensors, sample, decode)
        report |= _agent_report(trajectory, decode)
    else:
        steps, batch = entry.extent.steps, entry.extent.batch
        report |= {
            "samples": entry.num_samples,
            "steps": steps,
            "batch": batch,
            "max_episode_length": entry.max_episode_length or None,
        }
        if sample is not None:
            return report | _sample(trajectory_id, tensors, steps, batch, sample)
    return report | {"columns": [tensor_report(*item) for item in tensors.items()]}


def _read(directory: Directory, trajectory_id: int) -> tuple[Catalog, int, AnyTrajectory, dict[str, torch.Tensor]]:
    """Return a trajectory of a store that may be written, its columns, and where in which catalog it was found.

    Raises:
        TrajectoryUnavailableError: no trajectory has this id, or none any more.
        CorruptStoreError: it is damaged.
    """
    with announced(directory) as lease:
        while True:
            catalog, _ = open_leniently(directory)
            lease.settle(catalog.generation)
            position = catalog.index.position_of(trajectory_id)
            access = ShardAccess(catalog)
            try:
                trajectory = access.trajectory(catalog.index, position)
                return catalog, position, trajectory, access.columns(catalog.index, position)
            except CorruptStoreError:  # evicted or moved since, if no file that is needed now is missing
                files = {file.name for file in catalog.shards.manifest(catalog.index.at("shard", position)).files}
                _, needed = needed_now(directory)
                if files & needed:
                    raise
            finally:
                access.close()


def _sample(trajectory_id: int, tensors: dict[str, torch.Tensor], steps: int, batch: int, sample: int) -> Report:
    if not 0 <= sample < steps * batch:
        last = steps * batch - 1
        raise ConfigurationError(f"sample {sample}: trajectory {trajectory_id} has the samples 0 to {last}")
    step, environment = divmod(sample, batch)
    values = {name: _value(sampled_rows(tensor, steps, name)[step, environment]) for name, tensor in tensors.items()}
    return {"sample": sample, "step": step, "environment": environment, "values": values}


def _value(row: torch.Tensor) -> Any:
    return (row.float() if row.is_floating_point() else row).tolist()


# -- agent trajectories ------------------------------------------------------------------------------


def _agent_report(trajectory: AgentTrajectory, decode: Decode | None) -> Report:
    parts = token_parts(trajectory)
    for part in parts:
        part["text"] = None if decode is None else decode(_ids(trajectory, part["first"], part["last"] + 1))
    return {
        **{name: _known(getattr(trajectory, name)) for name in _WORDS},
        "reward": None if trajectory.reward is None else asdict(trajectory.reward),
        "tokens": None if trajectory.input_ids is None else len(trajectory.input_ids),
        "turns": turns_of(trajectory),
        "token_parts": parts,
        "tokenizer_fingerprint": trajectory.tokenizer_fingerprint or None,
        "messages": trajectory.messages,
        "metadata": trajectory.metadata,
    }


def _known(value: Any) -> Any:
    return None if value == "" else value


def token_parts(trajectory: AgentTrajectory) -> list[Report]:
    """Return the runs of tokens that belong together: the prompt, and what the model wrote or was told in turn.

    Each is ``{"part", "first", "last", "tokens"}``, ``part`` being ``"prompt"``, ``"model"`` or ``"told"``.
    """
    if trajectory.input_ids is None:
        return []
    count, start = len(trajectory.input_ids), trajectory.response_start
    written = torch.zeros(count, dtype=torch.bool)
    if trajectory.loss_mask is not None:
        written = trajectory.loss_mask.ne(0)
    elif start is not None and trajectory.response_mask is not None:
        written[start : start + len(trajectory.response_mask)] = trajectory.response_mask.ne(0)
    elif start is None:
        return [_part("tokens", 0, count)] if count else []
    kinds = np.where(written.numpy(), "model", "told").astype("U6")
    if start is not None:
        kinds[:start] = "prompt"
    edges = [0, *(np.flatnonzero(kinds[1:] != kinds[:-1]) + 1).tolist(), count]
    return [_part(str(kinds[a]), a, b) for a, b in pairwise(edges) if a < b]


def _part(kind: str, first: int, end: int) -> Report:
    return {"part": kind, "first": first, "last": end - 1, "tokens": end - first}


def _token(
    trajectory: AgentTrajectory, number: int, tensors: dict[str, torch.Tensor], token: int, decode: Decode | None
) -> Report:
    count = 0 if trajectory.input_ids is None else len(trajectory.input_ids)
    if not 0 <= token < count:
        raise ConfigurationError(
            f"sample {token}: trajectory {number} has {f'the tokens 0 to {count - 1}' if count else 'no tokens'}"
        )
    start = trajectory.response_start
    values = {}
    for name, tensor in tensors.items():
        at = token if len(tensor) == count else token - (count if start is None else start)
        if 0 <= at < len(tensor):  # those of the response have no entry for the prompt
            values[name] = _value(tensor[at])
    part = next(part for part in token_parts(trajectory) if part["first"] <= token <= part["last"])
    text = None if decode is None else decode(_ids(trajectory, token, token + 1))
    return {"token": token, "tokens": count, "part": part["part"], "text": text, "values": values}


def _ids(trajectory: AgentTrajectory, first: int, end: int) -> list[int]:
    ids: list[int] = [] if trajectory.input_ids is None else trajectory.input_ids[first:end].tolist()
    return ids


def _decoder(trajectory: AgentTrajectory, tokenizer: str | Path | None) -> Decode | None:
    """Return what makes text of tokens; None if no tokenizer is known."""
    recorded = trajectory.metadata.get(TOKENIZER_KEY)
    name = str(tokenizer) if tokenizer is not None else recorded
    if not isinstance(name, str) or (tokenizer is None and not Path(name).is_dir()):
        return None  # what a store names is looked up on this machine alone, never fetched
    try:
        loaded = tokenizer_at(name)
    except (ConfigurationError, MissingDependencyError):
        if tokenizer is None:
            return None
        raise
    return lambda ids: str(loaded.decode(ids, skip_special_tokens=False))
