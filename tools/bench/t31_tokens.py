"""T31: bytes on disk of rollouts and of agents' sessions over their distinct tokens.

*group*: 16 tasks of 8 rollouts, 1,500 tokens of prompt and 1,600 of response. *session*: 8 sessions of 30 calls that
repeat their history, 1,200 tokens of system and task, 150 sampled and 350 observed a call: as calls of a session, and
as one row a call. Tokens of a vocabulary of 151,000, drawn at random, with log-probs of the sampled tokens; rows also
have ``attention_mask`` and ``response_mask``.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log
from pathlib import Path

import torch

from tools.bench.report import Figure, Options
from tools.bench.workloads import opened
from trajstore import AgentTrajectory
from trajstore.stores import compact

_FIRST, _SAMPLED, _OBSERVED = 1_200, 150, 350


def figures(options: Options) -> Iterator[Figure]:
    """Yield bytes per token as added, compacted and compressed, and how they grow with the calls."""
    folder, tokens = options.folder / "group", 16 * 8 * 3_100
    with opened(folder) as buffer:
        buffer.add_trajectories([rollout for task in range(16) for rollout in _group(task)])
        buffer.flush()
        yield Figure("T31", "bytes on disk over tokens, group", _disk(folder) / tokens, 4.0)
    compact(folder, compress=True)
    yield Figure("T31", "the same compressed", _disk(folder) / tokens, 3.0)
    for name, add, target in (("session", _add_calls, 6.0), ("session, a row for each call", _add_rows, None)):
        sizes = {}
        for calls in (10, 200, 30):
            folder, tokens = (
                options.folder / f"{name} {calls}",
                8 * (_FIRST + calls * (_SAMPLED + _OBSERVED) - _OBSERVED),
            )
            arrived = add(folder, calls)
            compact(folder)
            sizes[calls] = _disk(folder)
        yield Figure("T31", f"bytes on disk over distinct tokens, {name}", arrived / tokens, target)
        yield Figure("T31", "the same compacted", sizes[30] / tokens, 5.0)
        compact(folder, compress=True)
        yield Figure("T31", "the same compressed", _disk(folder) / tokens, 4.4)
        exponent = log(sizes[200] / sizes[10]) / log(20)
        yield Figure("T31", "exponent of the compacted space from 10 to 200 calls", exponent, target and 1.0)


def _add_calls(folder: Path, calls: int) -> int:
    """Record sessions call by call; return the bytes on disk before their end."""
    with opened(folder) as buffer:
        sessions = [buffer.session("task", str(number)) for number in range(8)]
        for number, prompt, sampled in _calls(calls):
            sessions[number].add_call(prompt, sampled, -torch.rand(len(sampled)))
        nbytes = _disk(folder)
        for session in sessions:
            session.finish()
    return nbytes


def _add_rows(folder: Path, calls: int) -> int:
    with opened(folder) as buffer:
        for at, (number, prompt, sampled) in enumerate(_calls(calls)):
            buffer.add_trajectories([_rollout(prompt, sampled, task_id="task", rollout_id=f"{number}.{at}")])
        buffer.flush()
        return _disk(folder)


def _disk(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _tokens(count: int) -> torch.Tensor:
    return torch.randint(0, 151_000, (count,))


def _group(task: int) -> Iterator[AgentTrajectory]:
    prompt = _tokens(1_500)
    for number in range(8):
        yield _rollout(prompt, _tokens(1_600), task_id=f"task {task}", rollout_id=f"{number}")


def _calls(calls: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield session, prompt and sampled tokens of each call."""
    histories = [_tokens(_FIRST) for _ in range(8)]
    for _ in range(calls):
        for number in range(8):
            sampled = _tokens(_SAMPLED)
            yield number, histories[number], sampled
            histories[number] = torch.cat([histories[number], sampled, _tokens(_OBSERVED)])


def _rollout(prompt: torch.Tensor, response: torch.Tensor, task_id: str, rollout_id: str) -> AgentTrajectory:
    ids = torch.cat([prompt, response])
    return AgentTrajectory(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        response_start=len(prompt),
        response_mask=torch.ones_like(response),
        rollout_log_probs=-torch.rand(len(response)),
        task_id=task_id,
        rollout_id=rollout_id,
    )
