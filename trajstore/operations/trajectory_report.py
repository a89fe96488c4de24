"""Reports on one trajectory, or on one of its samples or tokens. JSON values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trajstore._core.store.notes import Note
from trajstore._core.store.run_ids import shown_id, written_id
from trajstore.errors import ConfigurationError, MissingDependencyError
from trajstore.operations.measure import turns_of
from trajstore.operations.single import read_single
from trajstore.operations.statistics import sampled_rows, tensor_report
from trajstore.operations.tokenizers import tokenizer_at
from trajstore.trajectory import AgentTrajectory

Report = dict[str, Any]
Decode = Callable[[Sequence[int]], str]

TOKENIZER_KEY = "tokenizer"
"""Key of an agent trajectory's ``metadata`` that names the folder of its tokenizer."""

WORDS = ("task_id", "data_id", "rollout_id", "query", "policy_version", "is_terminated", "entropy")
"""Fields of a rollout that the report includes unchanged."""


def inspect_trajectory(
    path: str | Path,
    trajectory_id: int | str,
    sample: int | None = None,
    tokenizer: str | Path | None = None,
    *,
    tokens: bool = False,
) -> Report:
    """Return a report on one trajectory of a store or a run directory, or on one of its samples.

    The ``reward`` of a rollout is the one in force. ``recorded`` has the recorded values that late ``outcome``,
    ``success_rate`` and ``reward_NAME`` replace.

    Args:
        path: local path or URL.
        trajectory_id: its id as displayed: 17, or ``"3/17"`` in a run directory.
        sample: number of a transition, ``t * B + b`` (step), or of a token (agent).
        tokenizer: folder or name of the tokenizer that decodes tokens of an agent trajectory. None: the folder named by
            ``metadata["tokenizer"]``, if it is on this machine.
        tokens: also return every token of a rollout with its values, by column: ``{"tokens_by_column": ...}``.

    Raises:
        TrajectoryUnavailableError: no trajectory has this id.
        ConfigurationError: it has fewer samples, the path is not a store, or the tokenizer cannot be loaded.
        MissingDependencyError: a tokenizer was given, and ``transformers`` is not installed.
        CorruptStoreError: the trajectory or the index is damaged.
    """
    single = read_single(path, trajectory_id)
    number, entry, trajectory, tensors = single.trajectory_id, single.entry, single.trajectory, single.tensors
    report: Report = {
        "path": single.url,
        "trajectory_id": written_id(number),
        "uuid": single.uuid,
        "kind": single.kind,
        "shard": single.shard,
        "model_weights_id": entry.model_weights_id or None,
        "versions": list(entry.versions) if entry.versions is not None else None,
        "notes": [note_report(note) for note in single.notes],
        "integrity": {"problems": single.problems},
    }
    if isinstance(trajectory, AgentTrajectory):
        decode = decoder(trajectory, tokenizer)
        if sample is not None:
            return report | _token(trajectory, number, tensors, sample, decode)
        report |= _agent_report(trajectory, decode)
        reward, recorded = single.reward_in_force()
        report |= {"reward": None if reward is None else asdict(reward), "recorded": recorded}
        if tokens:
            report["tokens_by_column"] = _tokens_by_column(trajectory, tensors, decode)
    elif tokens:
        raise ConfigurationError(f"{path}: trajectory {shown_id(number)} is not a rollout and has no tokens")
    else:
        steps, batch = entry.extent.steps, entry.extent.batch
        report |= {
            "samples": entry.num_samples,
            "invalid_steps": steps * batch - entry.num_samples,
            "steps": steps,
            "batch": batch,
            "max_episode_length": entry.max_episode_length or None,
        }
        if sample is not None:
            return report | _sample(number, tensors, steps, batch, sample)
    return report | {"columns": [tensor_report(*item) for item in tensors.items()]}


def _sample(trajectory_id: int, tensors: dict[str, torch.Tensor], steps: int, batch: int, sample: int) -> Report:
    if not 0 <= sample < steps * batch:
        last = steps * batch - 1
        raise ConfigurationError(f"sample {sample}: trajectory {shown_id(trajectory_id)} has the samples 0 to {last}")
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
        **{name: _known(getattr(trajectory, name)) for name in WORDS},
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
    kinds = np.where(written.numpy(), "model", "observation")
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
        there = f"the tokens 0 to {count - 1}" if count else "no tokens"
        raise ConfigurationError(f"sample {token}: trajectory {shown_id(number)} has {there}")
    start = trajectory.response_start
    values = {}
    for name, tensor in tensors.items():
        at = token if len(tensor) == count else token - (count if start is None else start)
        if 0 <= at < len(tensor):  # response columns have no entry for the prompt
            values[name] = _value(tensor[at])
    part = next(part for part in token_parts(trajectory) if part["first"] <= token <= part["last"])
    text = None if decode is None else decode(_ids(trajectory, token, token + 1))
    return {"token": token, "tokens": count, "part": part["part"], "text": text, "values": values}


def _tokens_by_column(
    trajectory: AgentTrajectory, tensors: dict[str, torch.Tensor], decode: Decode | None
) -> dict[str, list[Any]]:
    """Return the part, text and values of each token by column; None where a token lacks a value."""
    count = 0 if trajectory.input_ids is None else len(trajectory.input_ids)
    start = count if trajectory.response_start is None else trajectory.response_start
    columns: dict[str, list[Any]] = {"part": []}
    for part in token_parts(trajectory):
        columns["part"] += [part["part"]] * part["tokens"]
    if decode is not None:
        columns["text"] = [decode(_ids(trajectory, at, at + 1)) for at in range(count)]
    for name, tensor in tensors.items():
        before = 0 if len(tensor) == count else start
        if tensor.ndim == 1 and before + len(tensor) <= count:
            columns[name] = [None] * before + _value(tensor) + [None] * (count - before - len(tensor))
    return columns


def note_report(note: Note) -> Report:
    """Return a late value as JSON values."""
    return {name: getattr(note, name) for name in ("name", "value", "who", "time", "in_force")}


def _ids(trajectory: AgentTrajectory, first: int, end: int) -> list[int]:
    ids: list[int] = [] if trajectory.input_ids is None else trajectory.input_ids[first:end].tolist()
    return ids


def tokenizer_of(trajectory: AgentTrajectory) -> str | None:
    """Return the tokenizer folder that a trajectory names, if it is on this machine.

    A name taken from a store is only looked up locally, never fetched.
    """
    recorded = trajectory.metadata.get(TOKENIZER_KEY)
    return recorded if isinstance(recorded, str) and Path(recorded).is_dir() else None


def decoder(trajectory: AgentTrajectory, tokenizer: str | Path | None) -> Decode | None:
    """Return a function that decodes a trajectory's tokens; None if its tokenizer is unknown.

    Args:
        trajectory: may name a tokenizer.
        tokenizer: folder or name of another tokenizer.

    Raises:
        ConfigurationError: the given tokenizer cannot be loaded.
        MissingDependencyError: a tokenizer was given, and ``transformers`` is not installed.
    """
    name = str(tokenizer) if tokenizer is not None else tokenizer_of(trajectory)
    if name is None:
        return None
    try:
        loaded = tokenizer_at(name)
    except (ConfigurationError, MissingDependencyError):
        if tokenizer is None:
            return None
        raise
    return lambda ids: str(loaded.decode(ids, skip_special_tokens=False))
