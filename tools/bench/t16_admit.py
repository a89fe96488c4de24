"""T16: time to admit a step's rollouts to the pool, beside a copy of their tensors.

1,024 rollouts of 4,096 tokens, 1,024 of them the prompt, of which half are successes, into an empty pool in memory, as
:meth:`ExperienceManager.admit` takes them. One thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tools.bench.report import Figure, Options
from tools.bench.timing import in_turn, processor_ratio, torch_threads
from tools.bench.workloads import rollout
from trainer_hooks.replay import ExperienceManager, PoolRules
from trajstore.trajectory import AgentTrajectory, Reward

ROLLOUTS, GROUP = 1024, 8
PROMPT, RESPONSE = 1024, 3072


def figures(options: Options) -> Iterator[Figure]:
    """Yield the processor's time for one step, as a ratio."""
    rollouts = _rollouts(max(GROUP, options.count(ROLLOUTS) // GROUP * GROUP))

    def admit() -> None:
        ExperienceManager(PoolRules(n_rollout=GROUP)).admit(rollouts)

    def copy() -> list[torch.Tensor]:
        successes = rollouts[1::2]
        return [value.clone() for each in successes for value in vars(each).values() if isinstance(value, torch.Tensor)]

    with torch_threads(1):
        ours, copies = in_turn([admit, copy], options.repeats, warmup=1)
    yield Figure(
        "T16",
        f"{len(rollouts):,} rollouts of {PROMPT + RESPONSE:,} tokens into a pool ÷ copy of the successes",
        processor_ratio(ours, copies),
        None,
        details={"processor_s": ours.processor_ms / 1e3, "copy_processor_s": copies.processor_ms / 1e3},
    )


def _rollouts(count: int) -> list[AgentTrajectory]:
    random = torch.Generator().manual_seed(0)
    mask = torch.ones(RESPONSE, dtype=torch.int64)
    mask[RESPONSE // 4 : RESPONSE // 3] = 0  # a tool's answer
    rollouts = []
    for number in range(count):
        reward, entropys = Reward(outcome=float(number % 2)), torch.rand(RESPONSE, generator=random)
        names = {"rollout_id": str(number), "policy_version": 0}
        one: Any = rollout(random, number // GROUP, PROMPT, mask, reward=reward, entropys=entropys, **names)
        if number % GROUP == 0:
            prompt = one.input_ids[:PROMPT]
        one.input_ids[:PROMPT] = prompt
        rollouts.append(one)
    return rollouts
