"""Traces of verifiers 1.0 (``verifiers``): a rollout for each branch, read only. Does not import ``verifiers``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch

from trajstore.errors import ConfigurationError, TrajstoreError
from trajstore.interop.formats import Format, Item, Row, Source, damaged, logger, read_lines, unreadable
from trajstore.trajectory import AgentTrajectory, Reward

_OURS = "verifiers"
"""Key of the first rollout's ``metadata`` with the other values of the trace and its episode."""


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
        columns = _columns(trace["id"], nodes, line, known if agent.get("trainable", True) else set(line))
        known.update(line)
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
                    **({_OURS: about} if about else {}),
                },
            )
        )
        about = {}
    return rollouts


_TRUNCATED = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "context_length")


def _checked(number: int, node: Mapping[str, Any]) -> Row:
    """Return a node with all its lists.

    Raises:
        ConfigurationError: its lists or its parent are wrong.
    """
    whole = {"token_ids": [], "mask": [], **node}
    parent, size = node.get("parent"), len(whole["token_ids"])
    if parent is not None and not 0 <= parent < number:
        raise ConfigurationError(f"nodes[{number}].parent: {parent}, must be a node before")
    if len(whole["mask"]) != size:
        raise ConfigurationError(f"nodes[{number}].mask: has {len(whole['mask'])} values for {size} tokens")
    return whole


def _line(nodes: Sequence[Row], leaf: int) -> list[int]:
    line: list[int] = []
    at: int | None = leaf if leaf >= 0 else None
    while at is not None:
        line.append(at)
        at = nodes[at].get("parent")
    return line[::-1]


def _columns(trace: str, nodes: Sequence[Row], line: Sequence[int], trained: set[int]) -> dict[str, Any]:
    """Return the columns of tokens of a path."""

    def joined(name: str) -> list[Any]:
        return list(chain.from_iterable(nodes[number].get(name) or [] for number in line))

    tokens = joined("token_ids")
    if not tokens:
        return {}
    sampled = np.array(joined("mask"), bool)
    fresh = np.repeat([number not in trained for number in line], [len(nodes[number]["token_ids"]) for number in line])
    mask = torch.from_numpy((sampled & fresh).astype(np.int64))
    columns: dict[str, Any] = {"input_ids": torch.tensor(tokens), "loss_mask": mask}
    if not sampled.any():
        return columns
    start = int(sampled.argmax())
    columns |= {"response_start": start, "response_mask": mask[start:].clone()}
    given = joined("logprobs")
    if all(len(nodes[number].get("logprobs") or []) == sum(nodes[number]["mask"]) for number in line):
        log_probs = np.zeros(len(tokens), np.float32)
        log_probs[sampled] = given
        columns["rollout_log_probs"] = torch.from_numpy(log_probs[start:])
    elif given:
        logger.warning("convert: trace %s: a sampled token lacks its log-prob, so all of its path are left out", trace)
    return columns


def _spans(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """Return where flags are True."""
    steps = np.diff(np.array([0, *flags, 0], np.int8))
    return [*zip(np.flatnonzero(steps > 0).tolist(), np.flatnonzero(steps < 0).tolist(), strict=True)]


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


_NOT_READ = ("values of nodes other than message, tokens, mask and log-probs",)

FORMATS = (Format("verifiers", "rollouts", (), _NOT_READ, _read),)
