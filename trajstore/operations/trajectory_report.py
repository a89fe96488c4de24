"""Reports on one trajectory. JSON values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trajstore._core.columns.conversion import with_notes
from trajstore._core.columns.facts import GIVEN, RECORDED, SESSION, session_of
from trajstore._core.columns.fields import join_name, walk
from trajstore._core.files.base import Directory
from trajstore._core.reading.places import Place, find_place, is_of_rank, rank_of
from trajstore._core.reading.shard_access import ShardAccess, damage_of
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.run_ids import ALONE, id_from, no_rank, own_id, rank_of_id, shown_id, written_id
from trajstore._core.store.salvage import open_leniently
from trajstore.errors import (
    ConfigurationError,
    CorruptStoreError,
    MissingDependencyError,
    TrajectoryUnavailableError,
    listed,
)
from trajstore.operations.opening import announced, needed_now
from trajstore.operations.statistics import sampled_rows, tensor_report
from trajstore.operations.tokenizers import tokenizer_at
from trajstore.trajectory import RESPONSE_COLUMNS, TOKEN_COLUMNS, AgentTrajectory, AnyTrajectory, Trajectory

_ENDS = {"dones": "done", "truncations": "truncated", "terminations": "terminated"}
"""How episodes end, by the field that says so; the last one counts."""

Report = dict[str, Any]
Decode = Callable[[Sequence[int]], str]

TOKENIZER_KEY = "tokenizer"
"""Key of an agent trajectory's ``metadata`` that names the folder of its tokenizer."""

WORDS = ("task_id", "data_id", "rollout_id", "query", "policy_version", "is_terminated", "entropy")
"""Fields of a rollout that the report includes unchanged."""


def inspect_trajectory(path: str | Path, trajectory_id: int | str, tokenizer: str | Path | None = None) -> Report:
    """Return a report on one trajectory of a store or a run directory.

    The ``reward`` of a rollout is the one in force. ``recorded`` has the recorded values that late ``outcome``,
    ``success_rate`` and ``reward_NAME`` replace.

    Args:
        path: local path or URL.
        trajectory_id: its id as displayed: 17, or ``"3/17"`` in a run directory.
        tokenizer: folder or name of the tokenizer that decodes tokens of an agent trajectory. None: the folder named by
            ``metadata["tokenizer"]``, if it is on this machine.

    Raises:
        TrajectoryUnavailableError: no trajectory has this id.
        ConfigurationError: the path is not a store, or the tokenizer cannot be loaded.
        MissingDependencyError: a tokenizer was given, and ``transformers`` is not installed.
        CorruptStoreError: the trajectory or the index is damaged.
    """
    number = id_from("trajectory_id", trajectory_id)
    run, store = _places_of(path, number)
    catalog, position, trajectory, shard_damage = _read(store.directory, own_id(number), number)
    if isinstance(trajectory, AgentTrajectory):
        trajectory = with_notes(trajectory, catalog.index.given(position))
    entry, manifest = catalog.index.entry(position), catalog.shards.manifest(catalog.index.at("shard", position))
    tensors = columns_of(trajectory)
    report: Report = {
        "path": run.url,
        "trajectory_id": written_id(number),
        "uuid": catalog.index.uuid(position),
        "kind": manifest.schema.kind,
        "shard": manifest.files[0].name,
        "model_weights_id": entry.model_weights_id or None,
        "versions": list(entry.versions) if entry.versions is not None else None,
        "notes": [
            {name: getattr(note, name) for name in ("name", "value", "who", "time", "in_force")}
            for note in catalog.notes.history(own_id(number))
        ],
        "integrity": {"problems": [f"{text}; the rows of this one may be intact" for text in shard_damage]},
    }
    if isinstance(trajectory, AgentTrajectory):
        report |= _agent_report(trajectory, decoder(tokenizer_of(trajectory), tokenizer))
    else:
        steps, batch = entry.extent.steps, entry.extent.batch
        report |= {
            "samples": entry.num_samples,
            "invalid_steps": steps * batch - entry.num_samples,
            "steps": steps,
            "batch": batch,
            "max_episode_length": entry.max_episode_length or None,
            "texts": block_texts(trajectory),
        }
        report["episodes"] = _episodes(tensors, steps, batch)
    return report | {"columns": [tensor_report(*item) for item in tensors.items()]}


def _places_of(path: str | Path, number: int) -> tuple[Place, Place]:
    """Return the place of a path, and the store in it that has the trajectory of this id."""
    run = find_place(path)
    ranks = {rank_of(part.directory): part for part in run.parts if is_of_rank(part.name)} or {ALONE: run}
    place = ranks.get(rank_of_id(number))
    if place is None:
        raise no_rank(path, number, ranks)
    if place.kind != "store":
        folder = "a run directory" if place.rank_names else "a folder"
        is_of_rlinf = place.kind == "rlinf"
        kind = "a directory of RLinf" if is_of_rlinf else f"{folder} with {listed(part.name for part in place.parts)}"
        raise ConfigurationError(f"{path}: single trajectories can only be shown of a store; this is {kind}")
    return run, place


def _read(directory: Directory, trajectory_id: int, number: int) -> tuple[Catalog, int, AnyTrajectory, list[str]]:
    """Return the catalog, the position in its index, the trajectory as recorded, and the damage of its shard.

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
            access, manifest = ShardAccess(catalog), catalog.shards.manifest(int(catalog.index.at("shard", position)))
            try:
                trajectory = access.trajectory(catalog.index, position)
                return catalog, position, trajectory, damage_of(directory, manifest)
            except CorruptStoreError:  # evicted or moved meanwhile, unless a file still needed is missing
                if {file.name for file in manifest.files} & needed_now(directory)[1]:
                    raise
            finally:
                access.close()


def columns_of(trajectory: AnyTrajectory) -> dict[str, torch.Tensor]:
    """Return a trajectory's tensors by dotted name: ``[T (+ E), B, ...]`` (step) or ``[rows, ...]`` (agent)."""
    if isinstance(trajectory, AgentTrajectory):
        columns = {name: getattr(trajectory, name) for name in (*TOKEN_COLUMNS, *RESPONSE_COLUMNS)}
        columns |= {f"notes.{name}": rows for name, rows in trajectory.notes.items()}
        return {name: tensor for name, tensor in columns.items() if tensor is not None}
    return {name: leaf for name, leaf in _leaves(trajectory).items() if isinstance(leaf, torch.Tensor)}


def block_texts(trajectory: Trajectory) -> dict[str, Any]:
    """Return the leaves of a block that are no tensors, such as texts, by dotted name; batches do not have them."""
    own = ("max_episode_length", "model_weights_id", "notes")
    leaves = {name: leaf for name, leaf in _leaves(trajectory).items() if name.split(".")[0] not in own}
    return {name: leaf for name, leaf in leaves.items() if not isinstance(leaf, torch.Tensor | dict | None)}


def _leaves(trajectory: Trajectory) -> dict[str, Any]:
    fields = {name: getattr(trajectory, name) for name in type(trajectory).__dataclass_fields__}
    return {join_name(path): leaf for path, leaf in walk(fields)}


def _episodes(tensors: dict[str, torch.Tensor], steps: int, batch: int) -> list[Report]:
    """Return the parts of episodes in a block: ``{"environment", "first", "last", "return_in_block", "end"}``.

    ``first`` and ``last`` are valid steps. ``return_in_block`` is the sum of the rewards of these steps, None without
    rewards, and ``end`` how the episode ends: None if it goes on after the block, or if ends are not recorded.

    Args:
        tensors: columns of the block.
        steps: T.
        batch: B.
    """
    ends = np.full((steps, batch), None, object)
    for name, end in _ENDS.items():
        if name in tensors:
            flags = sampled_rows(tensors[name], steps, name).reshape(steps, batch, -1)
            ends[flags.bool().any(-1).numpy()] = end
    rewards, valid = tensors.get("rewards"), tensors.get("valid", torch.ones(steps, batch)).reshape(steps, batch)
    sums = None if rewards is None else rewards.double().reshape(steps, batch, -1).sum(-1).numpy()
    episodes: list[Report] = []
    for environment in range(batch):
        rows = np.flatnonzero(valid[:, environment].numpy())
        for part in np.split(rows, np.flatnonzero(ends[rows, environment]) + 1):
            if len(part):
                total = None if sums is None else float(sums[part, environment].sum())
                report = {"environment": environment, "first": int(part[0]), "last": int(part[-1])}
                episodes.append(report | {"return_in_block": total, "end": ends[part[-1], environment]})
    return episodes


# -- agent trajectories ------------------------------------------------------------------------------


def _agent_report(trajectory: AgentTrajectory, decode: Decode | None) -> Report:
    parts = token_parts(trajectory)
    for part in parts:
        part["text"] = None if decode is None else decode(_ids(trajectory, part["first"], part["last"] + 1))
    metadata = {name: value for name, value in trajectory.metadata.items() if name not in (GIVEN, RECORDED)}
    session, _ = path_of(trajectory, 0 if trajectory.input_ids is None else len(trajectory.input_ids))
    return {
        **{name: None if (value := getattr(trajectory, name)) == "" else value for name in WORDS},
        "reward": None if trajectory.reward is None else asdict(trajectory.reward),
        "recorded": trajectory.metadata.get(RECORDED, {}),
        "tokens": None if trajectory.input_ids is None else len(trajectory.input_ids),
        "turns": _turns(trajectory),
        "token_parts": parts,
        "tokenizer_fingerprint": trajectory.tokenizer_fingerprint or None,
        "session": session,
        "messages": trajectory.messages,
        "metadata": metadata,
    }


def _turns(trajectory: AgentTrajectory) -> int | None:
    """Return the number of the model's turns, by messages or else by runs of its tokens; None if unknown."""
    if trajectory.messages:
        return len([m for m in trajectory.messages if isinstance(m, dict) and m.get("role") == "assistant"])
    mask = trajectory.response_mask
    if mask is None or mask.is_complex():
        return None
    ones = np.concatenate([[False], mask.ne(0).numpy()])
    return int(np.count_nonzero(ones[1:] & ~ones[:-1]))


def token_parts(trajectory: AgentTrajectory) -> list[Report]:
    """Return the runs of tokens of one kind: the prompt, then the model's own tokens and observations.

    Each is ``{"part", "first", "last", "tokens"}``. ``part`` is ``"prompt"``, ``"model"``, ``"observation"`` (tokens of
    tools and users within the response), or ``"tokens"`` if the kinds are unknown.
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
    session, _ = path_of(trajectory, count)
    for call in session["calls"] if session else ():  # also those that another row trains
        written[call["start"] : call["stop"]] = True
    kinds = np.where(written.numpy(), "model", "observation")
    if start is not None:
        kinds[:start] = "prompt"
    edges = [0, *(np.flatnonzero(kinds[1:] != kinds[:-1]) + 1).tolist(), count]
    return [_part(str(kinds[a]), a, b) for a, b in pairwise(edges) if a < b]


def _part(kind: str, first: int, end: int) -> Report:
    return {"part": kind, "first": first, "last": end - 1, "tokens": end - first}


def _ids(trajectory: AgentTrajectory, first: int, end: int) -> list[int]:
    return [] if trajectory.input_ids is None else trajectory.input_ids[first:end].tolist()


def tokenizer_of(trajectory: AgentTrajectory) -> str | None:
    """Return the tokenizer folder that a trajectory names, if it is on this machine.

    A name taken from a store is only looked up locally, never fetched.
    """
    recorded = trajectory.metadata.get(TOKENIZER_KEY)
    return recorded if isinstance(recorded, str) and Path(recorded).is_dir() else None


def decoder(named: str | None, tokenizer: str | Path | None) -> Decode | None:
    """Return a function that decodes a trajectory's tokens; None if its tokenizer is unknown.

    Args:
        named: the tokenizer that the trajectory names.
        tokenizer: folder or name of another tokenizer.

    Raises:
        ConfigurationError: the given tokenizer cannot be loaded.
        MissingDependencyError: a tokenizer was given, and ``transformers`` is not installed.
    """
    name = named if tokenizer is None else str(tokenizer)
    if name is None:
        return None
    try:
        loaded = tokenizer_at(name)
    except (ConfigurationError, MissingDependencyError):
        if tokenizer is None:
            return None
        raise
    return lambda ids: str(loaded.decode(ids, skip_special_tokens=False))


# -- calls of sessions --------------------------------------------------------------------------------


def first_token(length: int, total: int, response_start: int | None) -> int:
    """Return the position among ``total`` tokens of the first of ``length`` values; response values start there."""
    if length == total:
        return 0
    return total - length if response_start is None or response_start + length > total else response_start


def path_of(trajectory: AgentTrajectory, total: int) -> tuple[Report | None, list[str]]:
    """Return the session that a rollout is a row of, and the calls and gaps that cannot be shown, as text.

    The session is ``{"id", "path", "paths", "calls", "incomplete"}``, None of another rollout. Calls are in the order
    of the row: sampled tokens are ``[start, stop)``, and ``trained`` says whether the loss mask has any of them (None
    without masks). The other keys of a call are as recorded, None where they are unknown: ``id``, ``number`` among the
    calls of the session, ``version``, ``messages`` (first, and one past the last, that it added), ``base`` (id of the
    call with which it shares ``shared`` tokens, if it does not continue it), ``retried`` (why an attempt before was
    incomplete), ``finish``.

    Args:
        trajectory: a rollout.
        total: number of its tokens.
    """
    found = session_of(trajectory.metadata)
    if found is None:
        return None, []
    recorded = trajectory.metadata[SESSION]
    mask = trajectory.response_mask if trajectory.loss_mask is None else trajectory.loss_mask
    calls, unplaced = [], []
    for number, call in enumerate(_listed(recorded, "calls")):
        match call:
            case {"start": int(start), "stop": int(stop)} if 0 <= start <= stop <= total:
                known = {"id": str(call.get("id", number)), "start": start, "stop": stop}
                sampled = None if mask is None else values_of(mask, known, total, trajectory.response_start)
                known["trained"] = None if sampled is None else bool(sampled.any())
                calls.append(known | _described(call))
            case _:
                unplaced.append(
                    f"metadata.{SESSION}.calls[{number}]: not shown, because its start and stop are not among the "
                    f"{total:,} tokens of the row"
                )
    gaps = []
    for number, gap in enumerate(_listed(recorded, "incomplete")):
        if isinstance(gap, Mapping):
            gaps.append(gap_of(gap))
        else:
            unplaced.append(f"metadata.{SESSION}.incomplete[{number}]: not shown, because it is no object")
    return dict(zip(("id", "path", "paths"), found, strict=True)) | {"calls": calls, "incomplete": gaps}, unplaced


def _described(call: Mapping[str, Any]) -> Report:
    """Return the other values of a call in a row's metadata; None where one is absent."""
    match messages := call.get("messages"):
        case [int(first), int(end)] if 0 <= first <= end:
            pass
        case _:
            messages = None
    texts = {"version": "policy_version", "base": "base", "retried": "retried", "finish": "finish_reason"}
    return {
        **{name: _number(call.get(name)) for name in ("number", "shared")},
        **{name: _text(call.get(recorded)) for name, recorded in texts.items()},
        "messages": messages,
    }


def gap_of(gap: Mapping[str, Any]) -> Report:
    """Return an incomplete call of a row's metadata: ``{"id", "reason", "number"}``, None where unknown."""
    return {"id": str(gap.get("id")), "reason": _text(gap.get("reason")), "number": _number(gap.get("number"))}


def _listed(recorded: Mapping[str, Any], name: str) -> Sequence[Any]:
    values = recorded.get(name)
    return values if isinstance(values, list | tuple) else ()


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 <= value < 2**53 else None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def values_of(values: torch.Tensor, call: Report, total: int, response_start: int | None) -> torch.Tensor:
    """Return those of the values of all tokens, or of the response, that belong to the sampled tokens of a call."""
    first = first_token(len(values), total, response_start)
    return values[max(0, call["start"] - first) : max(0, call["stop"] - first)]
