"""The calls of an agent session that a rollout's metadata has. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trajstore._core.columns.facts import SESSION, session_of
from trajstore.trajectory import AgentTrajectory

Report = dict[str, Any]


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
    """Return what else a row's metadata has of a call, None for what it lacks."""
    version, base, messages = call.get("policy_version"), call.get("base"), call.get("messages")
    match messages:
        case [int(first), int(end)] if 0 <= first <= end:
            pass
        case _:
            messages = None
    return {
        "number": _number(call.get("number")),
        "version": None if version is None else str(version),
        "messages": messages,
        "base": None if base is None else str(base),
        "shared": _number(call.get("shared")),
        "retried": _text(call.get("retried")),
        "finish": _text(call.get("finish_reason")),
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
