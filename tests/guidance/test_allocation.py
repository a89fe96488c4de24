"""Exact, seeded numbers of guided rollouts and keeping tasks, without global randomness."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer_hooks.guidance import AllocationRules, GuidanceManager

RATIOS = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), st.floats(0, 1))


def manager(seed: int = 0, **rules: Any) -> GuidanceManager:
    return GuidanceManager(AllocationRules(**rules), seed=seed)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(tasks=st.integers(0, 60), ratio=RATIOS, seed=st.integers(0, 2**32))
def test_counts_of_train_modes_are_exact(tasks: int, ratio: float, seed: int) -> None:
    def allocate(mode: str) -> list[str]:
        made = manager(seed, train_sample_expmode=mode, train_sample_keepratio=ratio)
        return [*made.allocate_train_mode(range(tasks))]

    assert allocate("allkeep") == ["keep"] * tasks
    assert allocate("alldiscard") == ["discard"] * tasks
    assert len(allocate("hybrid")) == tasks
    assert allocate("hybrid").count("keep") == int(tasks * ratio)
    assert allocate("hybrid") == allocate("hybrid")


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(rollouts=st.lists(st.integers(0, 20), max_size=12), ratio=RATIOS, seed=st.integers(0, 2**32))
def test_counts_of_guided_rollouts_are_exact_per_task(rollouts: list[int], ratio: float, seed: int) -> None:
    def allocate(mode: str) -> list[tuple[bool, ...]]:
        made = manager(seed, train_rollout_expmode=mode, rollout_expratio=ratio)
        return made.allocate_add_exp(rollouts, "sample")

    assert allocate("woexp") == [(False,) * n for n in rollouts]
    assert allocate("all") == [(True,) * n for n in rollouts]
    assert [len(flags) for flags in allocate("mixed")] == rollouts
    assert [sum(flags) for flags in allocate("mixed")] == [round(n * ratio) for n in rollouts]
    assert allocate("mixed") == allocate("mixed")


HALF = {"rollout_expratio": 0.5, "train_sample_expmode": "hybrid", "train_sample_keepratio": 0.5}


def test_which_ones_are_drawn_depends_on_the_seed() -> None:
    seen = {manager(seed, **HALF).allocate_add_exp([8], "sample")[0] for seed in range(50)}
    kept = {tuple(manager(seed, **HALF).allocate_train_mode(range(8))) for seed in range(50)}
    assert len(seen) > 20
    assert len(kept) > 20


def test_no_global_random_state_is_touched() -> None:
    states = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state()
    manager(**HALF).allocate_train_mode(range(2))
    manager(**HALF).allocate_add_exp([8, 8], "sample")
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tobytes() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
