"""T16: what a step's rollouts cost until they are in the pool, beside a copy of their tensors.

1,024 rollouts of 4,096 tokens, 1,024 of them the prompt, of which half are successes, into an empty pool in memory, as
:meth:`ExperienceManager.admit` takes them. One thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch

from tools.bench.report import Figure, Options
from trajstore.experience import ExperienceManager, PoolRules
from trajstore.trajectory import AgentTrajectory, Reward

ROLLOUTS, GROUP = 1024, 8
PROMPT_TOKENS, RESPONSE_TOKENS, VOCABULARY = 1024, 3072, 150_000
WARM_UP = 1


def figures(options: Options) -> Iterator[Figure]:
    """Yield the processor's time for one step, as a ratio."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rollouts = _rollouts(max(GROUP, options.count(ROLLOUTS) // GROUP * GROUP))

        def admit() -> None:
            ExperienceManager(PoolRules(n_rollout=GROUP)).admit(rollouts)

        def copy() -> list[torch.Tensor]:
            successes = rollouts[1::2]
            return [one.clone() for each in successes for one in vars(each).values() if isinstance(one, torch.Tensor)]

        ours: list[float] = []
        copies: list[float] = []
        for repeat in range(-WARM_UP, options.repeats):
            seconds = _processor(admit), _processor(copy)
            if repeat >= 0:
                ours.append(seconds[0])
                copies.append(seconds[1])
    finally:
        torch.set_num_threads(before)
    yield Figure(
        "T16",
        f"{len(rollouts):,} rollouts of {PROMPT_TOKENS + RESPONSE_TOKENS:,} tokens into a pool ÷ copy of the successes",
        statistics.median(ours) / statistics.median(copies),
        None,
        details={"processor_s": statistics.median(ours), "copy_processor_s": statistics.median(copies)},
    )


def _processor(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def _rollouts(count: int) -> list[AgentTrajectory]:
    random = torch.Generator().manual_seed(0)
    mask = torch.ones(RESPONSE_TOKENS, dtype=torch.int64)
    mask[RESPONSE_TOKENS // 4 : RESPONSE_TOKENS // 3] = 0  # what a tool answered
    loss_mask = torch.cat([torch.zeros(PROMPT_TOKENS, dtype=torch.int64), mask])
    rollouts = []
    for number in range(count):
        if number % GROUP == 0:
            prompt = torch.randint(0, VOCABULARY, (PROMPT_TOKENS,), generator=random)
        ids = torch.cat([prompt, torch.randint(0, VOCABULARY, (RESPONSE_TOKENS,), generator=random)])
        rollouts.append(
            AgentTrajectory(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                loss_mask=loss_mask,
                response_start=PROMPT_TOKENS,
                response_mask=mask,
                old_log_probs=-torch.rand(RESPONSE_TOKENS, generator=random),
                entropys=torch.rand(RESPONSE_TOKENS, generator=random),
                reward=Reward(outcome=float(number % 2)),
                task_id=f"task-{number // GROUP}",
                rollout_id=str(number),
                policy_version=0,
            )
        )
    return rollouts
