"""Several rows of one rollout as one trajectory, and token ids and masks in small dtypes. Pure.

An agent whose context is cut, summarized or rid of earlier thoughts is trained on several rows, each with its own
prompt and response. They are one rollout with one reward, and are stored, drawn, replaced and evicted together. So they
form one trajectory whose tokens are those of the rows, concatenated; ``metadata["rows"]`` has the lengths::

    row 0: prompt, response | row 1: prompt, response | ...        input_ids, loss_mask       [L]
           response         |         prompt, response | ...       columns of the response    [L - first prompt]

Prompts of later rows are no response: masks, log-probs and entropies are 0 there.

A finished agent session is stored as one row for each path of its calls (:func:`whole_sessions`), and is one rollout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from trainer_hooks.replay.outcomes import known_outcome, member_of
from trajstore._core.columns.facts import SESSION, session_of
from trajstore._core.columns.limits import shown
from trajstore.errors import InvalidTrajectoryError
from trajstore.trajectory import RESPONSE_COLUMNS, AgentTrajectory

_MASKS = ("attention_mask", "loss_mask", "response_mask")
_LARGEST = torch.iinfo(torch.int32).max

ROWS = "rows"
"""Key of ``metadata``: ``[{"tokens": L, "prompt": P, ...}, ...]`` of each row; absent = the trajectory is one row."""

_TOLD = frozenset(("tokens", "prompt", "messages", "metadata"))
"""Keys of a row's description that are not keys of its own ``metadata``."""


def members_of(rows: Sequence[AgentTrajectory]) -> list[list[int]]:
    """Return the places of the rows of each rollout, in order of their first rows (``outcomes.member_of``)."""
    places: dict[Hashable, list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(member_of(row, place), []).append(place)
    return list(places.values())


def whole_sessions(rows: Sequence[AgentTrajectory], *, strict: bool = True) -> list[AgentTrajectory]:
    """Return rollouts with the rows of each session as one trajectory (:func:`pack_rows`), at the place of its first.

    ``policy_version`` is the oldest of the rows', unknown if one of them is.

    Args:
        rows: of rollouts, in any order.
        strict: refuse sessions with a :func:`session_problem`; False leaves their rows as they are.

    Raises:
        InvalidTrajectoryError: rows of a session lack, occur twice, or differ in their reward; names it.
    """
    result: list[AgentTrajectory] = []
    for places in members_of(rows):
        held = [rows[place] for place in places]
        problem = session_problem(held)
        if problem and strict:
            raise InvalidTrajectoryError(problem)
        result += held if problem or len(held) == 1 else [_session(held)]
    return result


def session_problem(rows: Sequence[AgentTrajectory]) -> str:
    """Return why the rows of one rollout are not those of a whole session; empty if they are, or of none."""
    session = session_of(rows[0].metadata)
    if session is None:
        return ""
    problem = ""
    paths = sorted(row.metadata[SESSION]["path"] for row in rows)
    rewards = [(known_outcome(row), None if row.reward is None else row.reward.metadata) for row in rows]
    if paths != list(range(session[2])):
        problem = f"has the paths {paths} here, must have each of its {session[2]} once; pass all rows of a session"
    elif any(reward != rewards[0] for reward in rewards):
        problem = f"its rows have different rewards (outcomes {[outcome for outcome, _ in rewards]}); correct all rows"
    return problem and f"session {session[0]} of task {shown(rows[0].task_id)}: {problem}"


def _session(rows: Sequence[AgentTrajectory]) -> AgentTrajectory:
    """Return the rows of a session as one trajectory."""
    ordered = sorted(rows, key=lambda row: int(row.metadata[SESSION]["path"]))
    names = dict.fromkeys(name for row in ordered for name in row.metadata)
    own = [name for name in names if any(row.metadata.get(name) != ordered[0].metadata.get(name) for row in ordered)]
    versions = [row.policy_version for row in ordered if row.policy_version is not None]
    oldest = min(versions) if len(versions) == len(ordered) else None
    return dataclasses.replace(pack_rows(ordered, own), policy_version=oldest, entropy=None)


def over_rows(column: torch.Tensor, masks: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Split a column that was recorded for all rows into each row's part; ``None`` if its length does not fit.

    It fits with one value for each token of the responses, or with one for each token that the model wrote; then the
    other tokens get 0.

    Args:
        column: ``[N]``.
        masks: ``[R]`` of each row, 1 on the model's tokens.
    """
    if len(column) == sum(map(len, masks)):
        return list(torch.split(column, [len(mask) for mask in masks]))
    written = [int((mask == 1).sum()) for mask in masks]
    if len(column) != sum(written):
        return None
    parts = [torch.zeros(len(mask), dtype=column.dtype) for mask in masks]
    for part, mask, values in zip(parts, masks, torch.split(column, written), strict=True):
        part[mask == 1] = values
    return parts


def pack_rows(rows: Sequence[AgentTrajectory], per_row: Sequence[str] = ()) -> AgentTrajectory:
    """Return the rows of one rollout as one trajectory; a single row unchanged.

    Args:
        rows: in order of creation; the first one provides the shared fields (task, reward, metadata). Each has
            ``input_ids``, ``loss_mask`` and ``response_start``; a column of the response, or a note, that any row lacks
            is left out. Messages that differ from the first row's are kept.
        per_row: keys of ``metadata`` that each row keeps for itself.

    Raises:
        InvalidTrajectoryError: there are no rows, or one lacks its tokens.
    """
    if not rows:
        raise InvalidTrajectoryError("rows: none, a rollout has at least one")
    first = rows[0]
    if len(rows) == 1:
        return first
    ids, masks, prompts = zip(*map(_tokens, rows), strict=True)
    packed = dataclasses.replace(first, attention_mask=None, input_ids=torch.cat(ids), loss_mask=torch.cat(masks))
    for name in RESPONSE_COLUMNS:
        columns = [getattr(row, name) for row in rows]
        whole = all(column is not None for column in columns)
        setattr(packed, name, join_responses(columns, prompts) if whole else None)
    packed.notes = {}
    for name in set(first.notes).intersection(*(row.notes for row in rows)):
        notes = [row.notes[name] for row in rows]
        of_all = len(notes[0]) == len(ids[0])
        packed.notes[name] = torch.cat(notes) if of_all else join_responses(notes, prompts)
    descriptions = []
    for row, row_ids, prompt in zip(rows, ids, prompts, strict=True):
        own = {name: row.metadata[name] for name in per_row if name in row.metadata}
        own = {"metadata": own} if own.keys() & _TOLD else own
        messages = {} if row.messages == first.messages else {"messages": row.messages}
        descriptions.append({"tokens": len(row_ids), "prompt": prompt, **messages, **own})
    packed.metadata = {name: value for name, value in first.metadata.items() if name not in per_row} | {
        ROWS: descriptions
    }
    return packed


def rows_of(trajectory: AgentTrajectory) -> list[AgentTrajectory]:
    """Return the rows of a rollout, usually one; tensors are shared with it.

    Raises:
        InvalidTrajectoryError: ``metadata["rows"]`` does not fit the tokens.
    """
    descriptions = _said(trajectory)
    if descriptions is None:
        return [trajectory]
    ids, mask, before = _tokens(trajectory)
    lengths = lengths_of_rows(trajectory)
    fits = all(0 <= prompt <= length for length, prompt in lengths)
    if not lengths or not fits or lengths[0][1] != before or sum(length for length, _ in lengths) != len(ids):
        raise InvalidTrajectoryError(
            f"rollout {trajectory.rollout_id!r}: metadata[{ROWS!r}] does not fit its {len(ids)} tokens"
        )
    shared = {name: value for name, value in trajectory.metadata.items() if name != ROWS}
    rows, start = [], 0
    for description, (length, prompt) in zip(descriptions, lengths, strict=True):
        own = {name: value for name, value in description.items() if name not in _TOLD}
        metadata = {**shared, **own, **description.get("metadata", {})}
        row = dataclasses.replace(trajectory, metadata=metadata, response_start=prompt)
        row.messages = description.get("messages", trajectory.messages)
        row.input_ids, row.loss_mask = ids[start : start + length], mask[start : start + length]
        if trajectory.attention_mask is not None:
            row.attention_mask = trajectory.attention_mask[start : start + length]
        for name in RESPONSE_COLUMNS:
            if (column := getattr(trajectory, name)) is not None:
                setattr(row, name, column[start + prompt - before : start + length - before])
        row.notes = {
            name: column[start + prompt - before : start + length - before]
            if len(column) == len(ids) - before
            else column[start : start + length]
            for name, column in trajectory.notes.items()
        }
        rows.append(row)
        start += length
    return rows


def row_count(trajectory: AgentTrajectory) -> int:
    """Return the number of rows of a rollout.

    Raises:
        InvalidTrajectoryError: ``metadata["rows"]`` is not a list of rows.
    """
    return len(lengths_of_rows(trajectory))


def response_length(trajectory: AgentTrajectory) -> int | None:
    """Return the number of response tokens of all rows; ``None`` if the trajectory has neither log-probs nor a mask."""
    if _said(trajectory) is None:
        column = trajectory.response_mask if trajectory.old_log_probs is None else trajectory.old_log_probs
        return None if column is None else column.numel()
    return sum(tokens - prompt for tokens, prompt in lengths_of_rows(trajectory))


def lengths_of_rows(trajectory: AgentTrajectory) -> list[tuple[int, int]]:
    """Return the length and the prompt's length of each row, in tokens; one row of 0 tokens without any.

    Raises:
        InvalidTrajectoryError: ``metadata["rows"]`` is not a list of rows.
    """
    tokens = 0 if trajectory.input_ids is None else len(trajectory.input_ids)
    whole = [{"tokens": tokens, "prompt": trajectory.response_start or 0}]
    descriptions = _said(trajectory)
    return [(row["tokens"], row["prompt"]) for row in (whole if descriptions is None else descriptions)]


def _said(trajectory: AgentTrajectory) -> list[dict[str, Any]] | None:
    """Return ``metadata["rows"]``; ``None`` if the rollout is one row."""
    descriptions = trajectory.metadata.get(ROWS)
    if descriptions is None:
        return None
    if not isinstance(descriptions, list) or not all(
        isinstance(row, dict) and isinstance(row.get("tokens"), int) and isinstance(row.get("prompt"), int)
        for row in descriptions
    ):
        raise InvalidTrajectoryError(
            f"rollout {trajectory.rollout_id!r}: metadata[{ROWS!r}]: not the rows of a rollout: a list with the numbers"
            " of their tokens and of those of the prompt"
        )
    return descriptions


def _tokens(row: AgentTrajectory) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return ids, loss mask and start of the response."""
    ids, mask, start = row.input_ids, row.loss_mask, row.response_start
    if ids is None or mask is None or start is None:
        raise InvalidTrajectoryError(f"rollout {row.rollout_id!r}: lacks input_ids, loss_mask or response_start")
    return ids, mask, start


def join_responses(columns: Sequence[torch.Tensor], prompts: Sequence[int]) -> torch.Tensor:
    """Return a response column of all rows, from one of each row and the lengths of the prompts."""
    parts = [columns[0]]
    for column, prompt in zip(columns[1:], prompts[1:], strict=True):
        parts += [torch.zeros(prompt, dtype=column.dtype), column]
    return torch.cat(parts)


def with_small_columns(trajectory: AgentTrajectory) -> AgentTrajectory:
    """Return a trajectory with masks of zeros and ones as ``uint8``, and 64-bit token ids as ``int32``.

    This takes 5 bytes a token instead of 16, and 1 instead of 8 for each token of the response. Columns with other
    values are kept unchanged. Other tensors are shared. The inverse is :func:`with_usual_columns`.
    """
    small = dataclasses.replace(trajectory)
    for name in _MASKS:
        if (mask := getattr(trajectory, name)) is not None:
            setattr(small, name, small_mask(mask))
    if trajectory.input_ids is not None:
        small.input_ids = small_ids(trajectory.input_ids)
    return small


def with_usual_columns(trajectory: AgentTrajectory) -> AgentTrajectory:
    """Return a trajectory with masks and token ids as ``int64``. Other tensors are shared."""
    usual = dataclasses.replace(trajectory)
    for name in ("input_ids", *_MASKS):
        if (column := getattr(trajectory, name)) is not None:
            setattr(usual, name, column.long())
    return usual


def small_mask(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask of zeros and ones as ``uint8``; a mask with other values unchanged."""
    if mask.dtype == torch.uint8:
        return mask
    if mask.dtype == torch.int64 and mask.numel():
        low, high = torch.aminmax(mask)  # a third of the time of two comparisons
        return mask.to(torch.uint8) if int(low) >= 0 and int(high) <= 1 else mask
    return mask.to(torch.uint8) if bool(((mask == 0) | (mask == 1)).all()) else mask


def small_ids(ids: torch.Tensor) -> torch.Tensor:
    """Return 64-bit token ids as ``int32`` if they fit."""
    if ids.dtype != torch.int64 or not ids.numel():
        return ids
    low, high = torch.aminmax(ids)
    return ids.to(torch.int32) if int(low) >= 0 and int(high) <= _LARGEST else ids
