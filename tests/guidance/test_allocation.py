"""How many rollouts are guided and how many tasks keep: exact, by seed, without touching global randomness."""

from __future__ import annotations

import random

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trajstore.guidance import allocate_add_exp, allocate_train_mode

RATIOS = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), st.floats(0, 1))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(tasks=st.integers(0, 60), ratio=RATIOS, seed=st.integers(0, 2**32))
def test_counts_of_train_modes_are_exact(tasks: int, ratio: float, seed: int) -> None:
    def allocate(mode: str) -> list[str]:
        return allocate_train_mode(tasks, mode, ratio, np.random.default_rng(seed))  # type: ignore[arg-type]

    assert allocate("allkeep") == ["keep"] * tasks
    assert allocate("alldiscard") == ["discard"] * tasks
    assert len(allocate("hybrid")) == tasks
    assert allocate("hybrid").count("keep") == int(tasks * ratio)
    assert allocate("hybrid") == allocate("hybrid")


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(rollouts=st.lists(st.integers(0, 20), max_size=12), ratio=RATIOS, seed=st.integers(0, 2**32))
def test_counts_of_guided_rollouts_are_exact_per_task(rollouts: list[int], ratio: float, seed: int) -> None:
    def allocate(mode: str) -> list[tuple[bool, ...]]:
        return allocate_add_exp(rollouts, mode, ratio, np.random.default_rng(seed))  # type: ignore[arg-type]

    assert allocate("woexp") == [(False,) * n for n in rollouts]
    assert allocate("all") == [(True,) * n for n in rollouts]
    assert [len(flags) for flags in allocate("mixed")] == rollouts
    assert [sum(flags) for flags in allocate("mixed")] == [round(n * ratio) for n in rollouts]
    assert allocate("mixed") == allocate("mixed")


def test_which_ones_are_drawn_depends_on_the_seed() -> None:
    seen = {tuple(allocate_add_exp([8], "mixed", 0.5, np.random.default_rng(seed))[0]) for seed in range(50)}
    kept = {tuple(allocate_train_mode(8, "hybrid", 0.5, np.random.default_rng(seed))) for seed in range(50)}
    assert len(seen) > 20
    assert len(kept) > 20


def test_no_global_random_state_is_touched() -> None:
    states = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state()
    allocate_add_exp([8, 8], "mixed", 0.5, np.random.default_rng(0))
    allocate_train_mode(8, "hybrid", 0.5, np.random.default_rng(0))
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tobytes() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


# -- Masks of guided rows: only where something was put in, after replay, and without log-probs of another prompt --
