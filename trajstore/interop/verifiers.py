"""Traces of verifiers 1.0 (``verifiers``): a rollout for each branch, and back. Does not import ``verifiers``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate, chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch

from trajstore.errors import ConfigurationError, TrajstoreError
from trajstore.interop.formats import Format, Item, Row, Source, damaged, read_lines, unreadable
from trajstore.trajectory import AgentTrajectory, Reward

_OURS = "verifiers"
"""Key of ``metadata`` with what the fields of rollouts have no place for."""

_VALUES = ("message", "token_ids", "mask", "is_content", "logprobs")
"""Fields of a node that are the rollout's, or are written shorter."""


@unreadable("is no trace", kind=ConfigurationError)
def rollouts_of(trace: Mapping[str, Any], episode: Mapping[str, Any] | None = None) -> list[AgentTrajectory]:
    """Return a rollout for each branch of a trace, as rows of one session.

    Each sampled token is trained in the first branch that has it, and nowhere if the agent is not trainable. The
    task is ``task.key``, followed by the agent's name unless it is ``agent``: groups compare the same agent.

    Args:
        trace: ``Trace.to_record()``.
        episode: ``Episode.to_record()`` of its episode.

    Raises:
        ConfigurationError: it is not a trace; names the node.
    """
    rest = dict(trace)
    nodes = [_checked(number, node) for number, node in enumerate(rest.pop("nodes"))]
    about: Row = {"trace": rest}
    version = None
    if episode is not None:
        about["episode"] = {name: value for name, value in episode.items() if name != "traces"}
        span = ((episode.get("run") or {}).get("work") or {}).get("policy")
        version = span and span["start"]  # the oldest that may have sampled
    task, agent = trace["task"], trace.get("agent") or {}
    name = agent.get("name", "agent")
    key = task.get("key") or task.get("hash") or blake2b(orjson.dumps(task["data"]), digest_size=16).hexdigest()
    rewards = [reward for reward in trace.get("rewards", {}).values() if reward is not None]
    parents = {node.get("parent") for node in nodes}
    leaves = [number for number in range(len(nodes)) if number not in parents]
    known: set[int] = set()
    rollouts = []
    for path, leaf in enumerate(leaves or [-1]):  # a trace that failed at once has no node
        line = _line(nodes, leaf)
        begins = [0, *accumulate(len(nodes[number]["token_ids"]) for number in line)]
        calls = [
            {"id": str(number), "start": begin + start, "stop": begin + stop}
            for number, begin in zip(line, begins, strict=False)
            for start, stop in _spans(nodes[number]["mask"])
        ]
        fresh = [number for number in line if number not in known]
        columns, has_log_probs = _columns(nodes, line, known if agent.get("trainable", True) else set(line))
        known.update(line)
        about["path"] = line
        about["nodes"] = [_short(nodes[number], has_log_probs) for number in fresh]
        rollouts.append(
            AgentTrajectory(
                messages=[nodes[number]["message"] for number in line],
                **columns,
                reward=Reward(outcome=sum(r["score"] * r.get("weight", 1.0) for r in rewards)) if rewards else None,
                task_id=key if name == "agent" else f"{key}/{name}",
                rollout_id=trace["id"],
                is_terminated=trace.get("stop_condition") not in _TRUNCATED if trace.get("is_completed") else None,
                policy_version=version,
                metadata={
                    "session": {"id": trace["id"], "path": path, "paths": max(1, len(leaves)), "calls": calls},
                    _OURS: about,
                },
            )
        )
        about = {}
    return rollouts


_TRUNCATED = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "context_length")


def trace_of(rollouts: Sequence[AgentTrajectory]) -> Row:
    """Return the trace of all rollouts that were made of it; the inverse of :func:`rollouts_of`.

    ``verifiers.v1.trace.WireTrace.model_validate`` takes it.

    Args:
        rollouts: of one trace, in any order.

    Raises:
        ConfigurationError: they are not all the rollouts of one trace.
    """
    rows = sorted(rollouts, key=lambda rollout: rollout.metadata.get("session", {}).get("path", 0))
    sessions = [rollout.metadata.get("session", {}) for rollout in rows]
    ids = {session.get("id") for session in sessions}
    found = [session.get("path") for session in sessions]
    if len(ids) != 1 or found != list(range(sessions[0].get("paths", -1))) or _OURS not in rows[0].metadata:
        raise ConfigurationError(f"rollouts: are paths {found} of {len(ids)} traces, must be all paths of one trace")
    nodes: dict[int, Row] = {}
    for rollout in rows:
        about = rollout.metadata[_OURS]
        shorts = iter(about["nodes"])
        at = 0
        for number, message in zip(about["path"], rollout.messages, strict=True):
            if number not in nodes:
                nodes[number] = _whole(next(shorts), message, rollout, at)
            at += len(nodes[number].get("token_ids", ()))
    return {**rows[0].metadata[_OURS]["trace"], "nodes": [nodes[number] for number in sorted(nodes)]}


def _checked(number: int, node: Mapping[str, Any]) -> Row:
    """Return a node with all its lists.

    Raises:
        ConfigurationError: its lists or its parent are wrong.
    """
    whole = {"token_ids": [], "mask": [], **node, "keys": node.keys()}
    parent, size = node.get("parent"), len(whole["token_ids"])
    if parent is not None and not 0 <= parent < number:
        raise ConfigurationError(f"nodes[{number}].parent: {parent}, must be a node before")
    for name in ("mask", "is_content") if node.get("is_content") else ("mask",):
        if len(whole[name]) != size:
            raise ConfigurationError(f"nodes[{number}].{name}: has {len(whole[name])} values for {size} tokens")
    return whole


def _line(nodes: Sequence[Row], leaf: int) -> list[int]:
    line: list[int] = []
    at: int | None = leaf if leaf >= 0 else None
    while at is not None:
        line.append(at)
        at = nodes[at].get("parent")
    return line[::-1]


def _columns(nodes: Sequence[Row], line: Sequence[int], trained: set[int]) -> tuple[dict[str, Any], bool]:
    """Return the columns of tokens of a path, and whether they have its log-probs."""

    def joined(name: str) -> list[Any]:
        return list(chain.from_iterable(nodes[number].get(name) or [] for number in line))

    tokens = joined("token_ids")
    if not tokens:
        return {}, False
    sampled = np.array(joined("mask"), bool)
    fresh = np.repeat([number not in trained for number in line], [len(nodes[number]["token_ids"]) for number in line])
    mask = torch.from_numpy((sampled & fresh).astype(np.int64))
    columns: dict[str, Any] = {"input_ids": torch.tensor(tokens), "loss_mask": mask}
    if not sampled.any():
        return columns, False
    start = int(sampled.argmax())
    columns |= {"response_start": start, "response_mask": mask[start:].clone()}
    has_log_probs = all(len(nodes[number].get("logprobs") or []) == sum(nodes[number]["mask"]) for number in line)
    if has_log_probs:
        log_probs = np.zeros(len(tokens), np.float32)
        log_probs[sampled] = joined("logprobs")
        columns["rollout_log_probs"] = torch.from_numpy(log_probs[start:])
    return columns, has_log_probs


def _short(node: Row, has_log_probs: bool) -> Row:
    """Return what the columns of its rollout do not have of a node: flags as lengths of runs, of False first."""
    short = {name: node[name] for name in node["keys"] if name not in _VALUES}
    if "token_ids" in node["keys"]:
        short["tokens"] = len(node["token_ids"])
    for name in ("mask", "is_content"):
        if name in node["keys"]:
            short[name] = _runs(node[name])
    if "logprobs" in node["keys"]:
        values = node["logprobs"]
        is_there = has_log_probs and bool(values) and np.array_equal(np.float32(values), values)
        short["logprobs"] = is_there or values
    return short


def _whole(short: Mapping[str, Any], message: Any, rollout: AgentTrajectory, begin: int) -> Row:
    """Return the node of what :func:`_short` returned, whose tokens begin at ``begin`` in its rollout."""
    node = {name: value for name, value in short.items() if name != "tokens"} | {"message": message}
    if "tokens" in short:
        ids = () if rollout.input_ids is None else rollout.input_ids[begin : begin + short["tokens"]].tolist()
        node["token_ids"] = list(ids)
    for name in ("mask", "is_content"):
        if name in short:
            node[name] = [bool(at % 2) for at, count in enumerate(short[name]) for _ in range(count)]
    if short.get("logprobs") is True and rollout.rollout_log_probs is not None:
        first = begin - (rollout.response_start or 0)
        spans = [rollout.rollout_log_probs[first + start : first + stop] for start, stop in _spans(node["mask"])]
        node["logprobs"] = torch.cat(spans).tolist()
    return node


def _runs(flags: Sequence[bool]) -> list[int]:
    runs = [len(list(group)) for _, group in groupby(flags)]
    return [0, *runs] if flags and flags[0] else runs


def _spans(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """Return where flags are True."""
    ends = [0, *accumulate(_runs(flags))]
    return [*zip(ends[1::2], ends[2::2], strict=False)]


def _read(path: Path) -> Source:
    """Return the rollouts of a file of episodes or traces, or of the folder of a run."""
    lines = read_lines(path / "traces.jsonl" if path.is_dir() else path, _parsed)

    def items() -> Iterator[Item]:
        for line in lines.items:
            try:
                row: Row = line.load().metadata
            except TrajstoreError as error:
                yield damaged(line.key, str(error), line.done)
                continue
            is_episode = "traces" in row
            for number, trace in enumerate(row["traces"] if is_episode else [row]):
                key = f"{line.key}, trace {number}" if is_episode else line.key
                try:
                    rollouts = rollouts_of(trace, row if is_episode else None)
                except TrajstoreError as error:
                    yield damaged(key, str(error), line.done)
                else:
                    for path, rollout in enumerate(rollouts):
                        yield Item(f"{key}, branch {path}", lambda rollout=rollout: rollout, line.done)  # type: ignore[misc]

    return Source(items(), lines.total)


def _parsed(row: Row) -> AgentTrajectory:
    if not isinstance(row.get("traces", row.get("nodes")), list):
        raise ConfigurationError("is no episode or trace of verifiers 1.0: has neither 'traces' nor 'nodes'")
    return AgentTrajectory(metadata=row)


FORMATS = (Format("verifiers", "rollouts", (), (), _read),)
