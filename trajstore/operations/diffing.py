"""Two trajectories compared: facts, messages by turn, tokens by turn, columns. Reports are JSON values."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict
from difflib import SequenceMatcher
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from trajstore.core.columns.fields import join_name, walk
from trajstore.core.store.run_ids import id_from, shown_id
from trajstore.errors import CorruptStoreError
from trajstore.operations.column_difference import Columns, column_difference, rows_along_tokens
from trajstore.operations.measure import turns_of
from trajstore.operations.single import Single, read_single
from trajstore.operations.trajectory_report import WORDS, Decode, decoder, token_parts
from trajstore.trajectory import AgentTrajectory

Report = dict[str, Any]

_BEFORE = 16
"""Tokens before the first that differs which are told as text."""

_ALIGNED = 2_000
"""Turns of each side that are aligned; the work grows with their product."""


def diff_trajectories(
    path: str | Path, first: int | str, second: int | str, tokenizer: str | Path | None = None
) -> Report:
    """Return in what two trajectories of a store or run directory differ.

    Args:
        path: local path or URL.
        first: id of one; of a run directory as a number, or as it is shown (``"3/17"``: 17 of rank 3).
        second: id of the other.
        tokenizer: folder or name of the tokenizer with which tokens are told as text. None: for each rollout the folder
            that its ``metadata["tokenizer"]`` names, if it is on this machine.

    Returns:
        See :func:`difference`, and ``path``.

    Raises:
        TrajectoryUnavailableError: no trajectory has one of the ids.
        ConfigurationError: one is no id, the path is no store, or the tokenizer cannot be loaded.
        MissingDependencyError: a tokenizer was given, and ``transformers`` is not installed.
        CorruptStoreError: a trajectory, or the index, is damaged.
    """
    numbers = [id_from("trajectory_id", one) for one in (first, second)]
    found = [_readable(path, number) for number in numbers]
    decoders = [
        decoder(one.trajectory, tokenizer) if isinstance(one.trajectory, AgentTrajectory) else None for one in found
    ]
    return {"path": found[0].url, **difference(found[0], found[1], decoders[0], decoders[1])}


def _readable(path: str | Path, number: int) -> Single:
    try:
        return read_single(path, number)
    except CorruptStoreError as error:
        raise CorruptStoreError(f"trajectory {shown_id(number)} cannot be compared: {error}") from error


def difference(left: Single, right: Single, decode_left: Decode | None, decode_right: Decode | None) -> Report:
    """Return in what two trajectories differ. Pure.

    Args:
        left: one.
        right: the other.
        decode_left: what makes text of the tokens of one; None if nothing does.
        decode_right: the same for the other.

    Returns:
        ``left`` and ``right`` (``trajectory_id``, ``uuid``, ``kind``, ``task``), ``same_task`` (None unless both are
        rollouts that name one), ``equal`` (whether nothing below differs), ``facts`` (those that differ: ``name``,
        ``left``, ``right``; ``reward.*`` is in force, ``recorded.*`` what a late value took the place of),
        ``messages`` and ``tokens`` (of two rollouts that have them, else None) and ``columns``
        (see :func:`trajstore.operations.column_difference.column_difference`; of two rollouts with tokens, over the
        tokens before the first that differs).

        ``messages`` and ``tokens`` have ``counts`` (of both), ``same`` (how many at the start are equal), and
        ``turns``: runs of turns, each with ``same``, and the turns of ``left`` and of ``right``. A turn of messages is
        a number; ``changed`` says of each pair of messages that differ which ``fields`` do. A turn of tokens is
        ``{"part", "first", "last", "tokens"}``; ``at`` says of both what stands where tokens diverge.
    """
    sides, rollouts = (left, right), [one.trajectory for one in (left, right)]
    report: Report = {
        name: {"trajectory_id": one.trajectory_id, "uuid": one.uuid, "kind": one.kind, "task": _task(one)}
        for name, one in zip(("left", "right"), sides, strict=True)
    }
    tasks = _task(left), _task(right)
    messages = tokens = None
    tensors: tuple[Columns, Columns] = (left.tensors, right.tensors)
    if isinstance(rollouts[0], AgentTrajectory) and isinstance(rollouts[1], AgentTrajectory):
        messages = message_difference(rollouts[0].messages, rollouts[1].messages)
        tokens = token_difference(rollouts[0], rollouts[1], decode_left, decode_right)
        if tokens is not None:
            tensors = rows_along_tokens((tensors[0], rollouts[0]), (tensors[1], rollouts[1]), tokens["same"])
    facts, columns = _facts(left, right), column_difference(*tensors)
    whole = all(one is None or one["same"] == max(one["counts"]) for one in (messages, tokens))
    return {
        **report,
        "same_task": None if None in tasks else tasks[0] == tasks[1],
        "equal": whole and not facts and not any(one["differs"] for one in columns),
        "facts": facts,
        "messages": messages,
        "tokens": tokens,
        "columns": columns,
    }


def _task(one: Single) -> str | None:
    return (one.trajectory.task_id or None) if isinstance(one.trajectory, AgentTrajectory) else None


# -- facts ---------------------------------------------------------------------------------------------


def _facts(left: Single, right: Single) -> list[Report]:
    a, b = dict(_facts_of(left)), dict(_facts_of(right))
    return [
        {"name": name, "left": a.get(name), "right": b.get(name)}
        for name in dict.fromkeys((*a, *b))
        if _plain(a.get(name)) != _plain(b.get(name))
    ]


def _facts_of(one: Single) -> Iterator[tuple[str, Any]]:
    """Yield what is known of a trajectory besides its columns and messages."""
    entry, rollout = one.entry, one.trajectory
    yield "kind", one.kind
    if isinstance(rollout, AgentTrajectory):
        for name in WORDS:
            yield name, getattr(rollout, name) if getattr(rollout, name) != "" else None
        reward, recorded = one.reward_in_force()
        for name, value in ({} if reward is None else asdict(reward)).items():
            if name == "metadata":
                yield from ((f"reward.metadata.{key}", some) for key, some in value.items())
            else:
                yield f"reward.{name}", value
        yield from ((f"recorded.{name}", value) for name, value in recorded.items())
        yield "tokens", None if rollout.input_ids is None else len(rollout.input_ids)
        yield "response_start", rollout.response_start
        yield "messages", len(rollout.messages)
        yield "turns", turns_of(rollout)
        yield "tokenizer_fingerprint", rollout.tokenizer_fingerprint or None
        yield from ((f"metadata.{key}", some) for key, some in rollout.metadata.items())
    else:
        yield "steps", entry.extent.steps
        yield "batch", entry.extent.batch
        yield "max_episode_length", entry.max_episode_length or None
        for path, value in walk({name: getattr(rollout, name) for name in ("forward_inputs", "curr_obs", "next_obs")}):
            if (name := join_name(path)) not in one.tensors:  # is no column: no row for each step
                yield name, value.tolist() if isinstance(value, torch.Tensor) else value
    yield "model_weights_id", entry.model_weights_id or None
    yield "versions", list(entry.versions) if entry.versions is not None else None
    late = {note.name: note.value for note in one.notes if note.in_force}
    yield from ((f"late.{name}", value) for name, value in late.items())


def _plain(value: Any) -> str:
    """Return a text that two values share only if they are the same: NaN is itself, and true is not 1."""
    return json.dumps(value, sort_keys=True, default=repr)


# -- turns ---------------------------------------------------------------------------------------------


def message_difference(left: Sequence[Any], right: Sequence[Any]) -> Report | None:
    """Return where two lists of messages diverge, see :func:`difference`; None if there are none."""
    if not left and not right:
        return None
    keys = [_plain(one) for one in left], [_plain(one) for one in right]
    turns, changed = [], []
    for same, of_left, of_right in runs(*keys):
        turns.append({"same": same, "left": list(of_left), "right": list(of_right)})
        if not same:
            for a, b in zip_longest(of_left, of_right):
                one, other = (None if at is None else _named(some[at]) for at, some in ((a, left), (b, right)))
                changed.append({"left": a, "right": b, "fields": _changed_fields(one, other)})
    return {"counts": [len(left), len(right)], "same": _shared(*keys), "turns": turns, "changed": changed}


def _named(message: Any) -> Mapping[str, Any]:
    return message if isinstance(message, dict) else {"content": message}


def _changed_fields(left: Mapping[str, Any] | None, right: Mapping[str, Any] | None) -> list[Report]:
    """Return the fields that differ; of two texts with ``same``, how many characters at the start are equal."""
    fields = []
    for name in dict.fromkeys((*(left or {}), *(right or {}))):
        a, b = (None if one is None else one.get(name) for one in (left, right))
        if _plain(a) != _plain(b):
            fields.append(
                {"name": name, "same": _shared(a, b) if type(a) is type(b) is str else 0, "left": a, "right": b}
            )
    return fields


def token_difference(
    left: AgentTrajectory, right: AgentTrajectory, decode_left: Decode | None, decode_right: Decode | None
) -> Report | None:
    """Return where the tokens of two rollouts diverge, see :func:`difference`; None unless both have some."""
    if left.input_ids is None or right.input_ids is None:
        return None
    ids = left.input_ids.tolist(), right.input_ids.tolist()
    same = _shared(*ids)
    parts = token_parts(left), token_parts(right)
    keys = [
        [(part["part"], *some[part["first"] : part["last"] + 1]) for part in of_side]
        for of_side, some in zip(parts, ids, strict=True)
    ]
    decoders = decode_left, decode_right
    turns = []
    for equal, of_left, of_right in runs(*keys):
        run: Report = {"same": equal}
        for name, numbers, of_side in (("left", of_left, parts[0]), ("right", of_right, parts[1])):
            run[name] = [of_side[number] for number in numbers]
        turns.append(run)
    at = [_at(*side, same) for side in zip(ids, parts, decoders, strict=True)]
    return {"counts": [len(one) for one in ids], "same": same, "turns": turns, "at": at}


def _at(ids: Sequence[int], parts: Sequence[Report], decode: Decode | None, first: int) -> Report | None:
    """Return what stands at a token, to the end of its turn; None where the rollout has ended."""
    part = next((part for part in parts if part["first"] <= first <= part["last"]), None)
    if part is None:
        return None
    told: Report = {"token": first, "id": ids[first], "part": part["part"], "last": part["last"]}
    before = text = None
    if decode is not None:
        before, text = decode(ids[max(0, first - _BEFORE) : first]), decode(ids[first : part["last"] + 1])
    return {**told, "before": before, "text": text}


def runs(left: Sequence[Hashable], right: Sequence[Hashable]) -> list[tuple[bool, range, range]]:
    """Return two lists of turns as runs that are equal, or differ: whether they are, and where in each list they lie.

    What both begin and end with are runs. Between them turns are aligned where neither side has more than 2,000, and
    are one run that differs where one has.
    """
    first = _shared(left, right)
    last = min(_shared(left[::-1], right[::-1]), len(left) - first, len(right) - first)
    of_left, of_right = left[first : len(left) - last], right[first : len(right) - last]
    codes: Sequence[tuple[str, int, int, int, int]] = [("replace", 0, len(of_left), 0, len(of_right))]
    if max(len(of_left), len(of_right)) <= _ALIGNED:
        codes = SequenceMatcher(None, of_left, of_right, autojunk=False).get_opcodes()
    found = [(True, range(first), range(first))] if first else []
    for name, a, b, c, d in codes:
        found.append((name == "equal", range(first + a, first + b), range(first + c, first + d)))
    if last:
        found.append((True, range(len(left) - last, len(left)), range(len(right) - last, len(right))))
    return found


def _shared(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Return how many items two lists have in common at their start."""
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
