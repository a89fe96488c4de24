"""T31: bytes on disk of rollouts and of agents' sessions over their distinct tokens.

*group*: 16 tasks of 8 rollouts, 1,500 tokens of prompt and 1,600 of response. *session*: 8 sessions of 30 calls that
repeat their history, one row a call: 1,200 tokens of system and task, 150 sampled and 350 observed a call. Tokens of a
vocabulary of 151,000, drawn at random, with ``attention_mask``, ``response_mask`` and log-probs of what was sampled.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log
from pathlib import Path

import torch

from tools.bench.report import Figure, Options
from tools.bench.workloads import opened
from trajstore import AgentTrajectory

_FIRST, _SAMPLED, _OBSERVED = 1_200, 150, 350


def figures(options: Options) -> Iterator[Figure]:
    """Yield bytes per token as added, after ``compact``, and compressed; and how they grow with the calls."""
    rollouts = [rollout for task in range(16) for rollout in _group(task)]
    with opened(options.folder / "group") as buffer:
        buffer.add_trajectories(rollouts)
        buffer.flush()
        tokens = 3_100 * len(rollouts)
        yield Figure("T31", "bytes on disk over tokens, group", _disk(options.folder / "group") / tokens, 4.0)
        buffer.compact(compress=True)
    yield Figure("T31", "the same compressed, closed", _disk(options.folder / "group") / tokens, 3.0)
    sizes: dict[str, int] = {}
    for calls, folder in ((30, "session"), (10, "few"), (200, "many")):
        tokens = 8 * (_FIRST + calls * (_SAMPLED + _OBSERVED) - _OBSERVED)
        with opened(options.folder / folder) as buffer:
            for call in _calls(8, calls):
                buffer.add_trajectories([call])
            buffer.flush()
            added = _disk(options.folder / folder) / tokens
            buffer.compact()
            sizes[folder] = _disk(options.folder / folder)
            if folder == "session":
                yield Figure("T31", "bytes on disk over distinct tokens, session, a row for each call", added, None)
                yield Figure("T31", "the same after compact", sizes[folder] / tokens, 5.0)
                buffer.compact(compress=True)
        if folder == "session":
            yield Figure("T31", "the same compressed, closed", _disk(options.folder / folder) / tokens, 4.4)
    exponent = log(sizes["many"] / sizes["few"]) / log(20)
    yield Figure("T31", "exponent of space over calls, 10 to 200, a row for each call, compacted", exponent, 1.0)


def _disk(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _tokens(count: int) -> torch.Tensor:
    return torch.randint(0, 151_000, (count,))


def _group(task: int) -> Iterator[AgentTrajectory]:
    prompt = _tokens(1_500)
    for number in range(8):
        yield _rollout(prompt, _tokens(1_600), task_id=f"task {task}", rollout_id=f"{number}")


def _calls(sessions: int, calls: int) -> Iterator[AgentTrajectory]:
    histories = [_tokens(_FIRST) for _ in range(sessions)]
    for call in range(calls):
        for number in range(sessions):
            sampled = _tokens(_SAMPLED)
            yield _rollout(histories[number], sampled, task_id="task", rollout_id=f"{number}.{call}")
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
