"""A rollout of several rows as one trajectory. Pure.

An agent whose context is cut, summarized or rid of earlier thoughts is trained on several rows: each is a prompt and a
response of its own. They are one rollout: one reward, stored, drawn, replaced and evicted together. So they are one
trajectory, whose tokens are those of the rows one after the other; ``metadata["rows"]`` says where they part::

    row 0: prompt, response | row 1: prompt, response | ...        input_ids, loss_mask       [L]
           response         |         prompt, response | ...       columns of the response    [L - first prompt]

Prompts of later rows are no response: their masks are 0, and so are log-probs and entropies there, which no row has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from trajstore.errors import InvalidTrajectoryError
from trajstore.trajectory import AgentTrajectory

ROWS = "rows"
"""Key of ``metadata``: ``[{"tokens": L, "prompt": P, ...}, ...]`` of each row; absent = the trajectory is one row."""

_RESPONSE = ("old_log_probs", "entropys", "rollout_log_probs", "response_mask")


def over_rows(column: torch.Tensor, masks: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Return each row's part of a column that was recorded for all rows, one after the other; ``None`` if it fits none.

    It fits with a value for each token of the responses, or with one for each token that the model wrote: then the
    others get 0.

    Args:
        column: ``[N]``.
        masks: ``[R]`` of each row, 1 on what the model wrote.
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
    """Return the rows of one rollout as one trajectory; a single row as it is.

    Args:
        rows: in the order in which they came to be; the first one gives what they share (task, reward, metadata).
            Each has ``input_ids``, ``loss_mask`` and ``response_start``; a column of the response that one of them
            lacks is left out.
        per_row: keys of ``metadata`` that each row keeps for itself.

    Raises:
        InvalidTrajectoryError: there are none, or one lacks its tokens.
    """
    if not rows:
        raise InvalidTrajectoryError("rows: none, a rollout has at least one")
    first = rows[0]
    if len(rows) == 1:
        return first
    ids, masks, prompts = zip(*map(_tokens, rows), strict=True)
    packed = dataclasses.replace(first, attention_mask=None, input_ids=torch.cat(ids), loss_mask=torch.cat(masks))
    for name in _RESPONSE:
        columns = [getattr(row, name) for row in rows]
        whole = all(column is not None for column in columns)
        setattr(packed, name, _joined(columns, prompts) if whole else None)
    said = [
        {"tokens": len(one), "prompt": prompt, **{name: row.metadata[name] for name in per_row if name in row.metadata}}
        for row, one, prompt in zip(rows, ids, prompts, strict=True)
    ]
    packed.metadata = {name: value for name, value in first.metadata.items() if name not in per_row} | {ROWS: said}
    return packed


def rows_of(trajectory: AgentTrajectory) -> list[AgentTrajectory]:
    """Return the rows of a rollout, of which most have one; tensors are shared with it.

    Raises:
        InvalidTrajectoryError: what ``metadata["rows"]`` says does not fit the tokens.
    """
    said = _said(trajectory)
    if said is None:
        return [trajectory]
    ids, mask, before = _tokens(trajectory)
    places = [(row["tokens"], row["prompt"]) for row in said]
    fits = all(0 <= prompt <= length for length, prompt in places) and sum(row["tokens"] for row in said) == len(ids)
    if not places or not fits or places[0][1] != before:
        raise InvalidTrajectoryError(
            f"rollout {trajectory.rollout_id!r}: metadata[{ROWS!r}] does not fit its {len(ids)} tokens"
        )
    shared = {name: value for name, value in trajectory.metadata.items() if name != ROWS}
    rows, start = [], 0
    for told, (length, prompt) in zip(said, places, strict=True):
        of_row = {name: value for name, value in told.items() if name not in ("tokens", "prompt")}
        row = dataclasses.replace(trajectory, metadata={**shared, **of_row}, response_start=prompt)
        row.input_ids, row.loss_mask = ids[start : start + length], mask[start : start + length]
        if trajectory.attention_mask is not None:
            row.attention_mask = trajectory.attention_mask[start : start + length]
        for name in _RESPONSE:
            if (column := getattr(trajectory, name)) is not None:
                setattr(row, name, column[start + prompt - before : start + length - before])
        rows.append(row)
        start += length
    return rows


def row_count(trajectory: AgentTrajectory) -> int:
    """Return how many rows a rollout has.

    Raises:
        InvalidTrajectoryError: what ``metadata["rows"]`` says are no rows.
    """
    said = _said(trajectory)
    return 1 if said is None else len(said)


def response_length(trajectory: AgentTrajectory) -> int | None:
    """Return the number of response tokens of all rows; ``None`` if the trajectory has neither log-probs nor a mask."""
    said = _said(trajectory)
    if said is None:
        column = trajectory.response_mask if trajectory.old_log_probs is None else trajectory.old_log_probs
        return None if column is None else column.numel()
    return sum(int(row["tokens"] - row["prompt"]) for row in said)


def _said(trajectory: AgentTrajectory) -> list[dict[str, Any]] | None:
    """Return what ``metadata["rows"]`` says; ``None`` if the rollout is one row."""
    said = trajectory.metadata.get(ROWS)
    if said is None:
        return None
    if not isinstance(said, list) or not all(
        isinstance(row, dict) and isinstance(row.get("tokens"), int) and isinstance(row.get("prompt"), int)
        for row in said
    ):
        raise InvalidTrajectoryError(
            f"rollout {trajectory.rollout_id!r}: metadata[{ROWS!r}]: not the rows of a rollout: a list with the numbers"
            " of their tokens and of those of the prompt"
        )
    return said


def turns_as_rows(trajectory: AgentTrajectory) -> AgentTrajectory:
    """Return a rollout with a row for each of the model's turns: all that was said up to there, that turn trained on.

    These are the rows of ``linear_think`` where no turn has thoughts that are left out later.

    Raises:
        InvalidTrajectoryError: it lacks its tokens.
    """
    ids, mask, before = _tokens(trajectory)
    written = (mask != 0).tolist()
    starts = [place for place, on in enumerate(written) if on and (place == 0 or not written[place - 1])]
    rows = []
    for start in starts:
        end = next((place for place in range(start, len(written)) if not written[place]), len(written))
        row = dataclasses.replace(trajectory, response_start=start, input_ids=ids[:end], attention_mask=None)
        row.loss_mask = torch.cat([torch.zeros_like(mask[:start]), mask[start:end]])
        for name in _RESPONSE:
            if (column := getattr(trajectory, name)) is not None:
                setattr(row, name, column[start - before : end - before])
        rows.append(row)
    return pack_rows(rows) if rows else trajectory


def _tokens(row: AgentTrajectory) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return ids, loss mask and start of the response."""
    ids, mask, start = row.input_ids, row.loss_mask, row.response_start
    if ids is None or mask is None or start is None:
        raise InvalidTrajectoryError(f"rollout {row.rollout_id!r}: lacks input_ids, loss_mask or response_start")
    return ids, mask, start


def _joined(columns: Sequence[torch.Tensor], prompts: Sequence[int]) -> torch.Tensor:
    parts = [columns[0]]
    for column, prompt in zip(columns[1:], prompts[1:], strict=True):
        parts += [torch.zeros(prompt, dtype=column.dtype), column]
    return torch.cat(parts)
