from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.replay.conftest import build
from trainer_hooks.replay.buckets import TASK_SAMPLING, bucket_probabilities, draw_tasks
from trainer_hooks.replay.outcomes import TaskOutcome, count_outcomes, is_success

N_ROLLOUT = 8


def test_only_fresh_rollouts_count_and_those_without_an_outcome_are_unknown() -> None:
    rollouts = [
        build("a", outcome=1.0),
        build("a", outcome=0.9),
        build("a", outcome=None),
        build("a", reward=None),
        build("a", outcome=1.0, metadata={"is_experience_replay": True}),
        build("b", outcome=1.0),
    ]
    assert count_outcomes(rollouts) == {"a": TaskOutcome(4, 2, 1), "b": TaskOutcome(1, 1, 1)}
    assert count_outcomes(rollouts, 0.9, {"a": 3, "b": 4}) == {"a": TaskOutcome(4, 2, 2), "b": TaskOutcome(4, 1, 1)}


@pytest.mark.parametrize(
    ("outcome", "n_rollout", "solved", "difficulty"),
    [
        (TaskOutcome(5, 5, 5), 8, True, 8),  # a replay task makes fewer than n_rollout
        (TaskOutcome(5, 5, 4), 8, False, 6),
        (TaskOutcome(8, 8, 3), 8, False, 3),
        (TaskOutcome(4, 1, 1), 4, False, 3),  # three siblings raised
        (TaskOutcome(8, 7, 7), 8, False, 7),
        (TaskOutcome(8, 1, 0), 8, False, 0),
        (TaskOutcome(1, 1, 1), 2, False, 1),  # n = 2, k = 1: one success says little
        (TaskOutcome(2, 2, 2), 4, True, 4),
        (TaskOutcome(2, 2, 2), 8, False, 7),
        (TaskOutcome(4, 0, 0), 4, False, None),
        (TaskOutcome(7, 7, 1), 64, False, 9),
        (TaskOutcome(300, 300, 1), 8, False, 1),
        (TaskOutcome(1, 1, 1), 1, True, 1),
    ],
)
def test_a_task_is_solved_on_full_evidence_only_and_its_difficulty_is_out_of_n(
    outcome: TaskOutcome, n_rollout: int, solved: bool, difficulty: int | None
) -> None:
    assert outcome.solved(n_rollout) is solved
    assert outcome.difficulty(n_rollout) == difficulty


@pytest.mark.parametrize(
    ("strategy", "weight"),
    [
        ("by_task", lambda d, m: m),
        ("by_difficulty", lambda d, m: 1),
        ("normal", lambda d, m: math.exp(-((d - 4) ** 2) / 2)),
        ("linear", lambda d, m: d / 8),
        ("sqrt", lambda d, m: math.sqrt(d / 8)),
        ("linear_clip", lambda d, m: min(d / 8, 0.5)),
    ],
)
def test_bucket_probabilities_follow_their_formula(strategy: str, weight: Callable[[int, int], float]) -> None:
    sizes = {0: 3, 1: 7, 4: 2, 5: 1, 7: 4}
    weights = np.array([weight(d, m) for d, m in sizes.items()], dtype=float)
    probabilities = bucket_probabilities(sizes, strategy, N_ROLLOUT)  # type: ignore[arg-type]
    np.testing.assert_allclose(probabilities, weights / weights.sum(), rtol=1e-12)
    of_many = bucket_probabilities({1: 5, 2: 5}, strategy, 200)  # type: ignore[arg-type]
    assert of_many.sum() == pytest.approx(1.0), "weights that are all small are no zeros"


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.dictionaries(st.integers(0, 8), st.integers(0, 5), max_size=5),
    n=st.integers(0, 30),
    strategy=st.sampled_from([strategy_name for strategy_name in TASK_SAMPLING if strategy_name != "similar"]),
    seed=st.integers(0, 5),
)
def test_draws_are_distinct_valid_complete_and_repeatable(
    sizes: dict[int, int], n: int, strategy: str, seed: int
) -> None:
    buckets = {d: [f"{d}/{i}" for i in range(m)] for d, m in sizes.items()}
    before = {d: list(tasks) for d, tasks in buckets.items()}
    excluded = {"1/0", "2/1"}

    def draw() -> list[str]:
        return draw_tasks(buckets, n, strategy, N_ROLLOUT, np.random.default_rng(seed), excluded)  # type: ignore[arg-type]

    drawn = draw()
    weightless = {"linear", "sqrt", "linear_clip"}
    reachable = {
        task
        for d, tasks in buckets.items()
        for task in tasks
        if task not in excluded and not (d == 0 and strategy in weightless)
    }
    assert len(set(drawn)) == len(drawn) == min(n, len(reachable))
    assert set(drawn) <= reachable
    assert draw() == drawn
    assert buckets == before


@pytest.mark.parametrize("threshold", [0.7, 0.9, 0.95, 1.3, 0.1, 1.0, 2.0, 1e300])
def test_an_outcome_given_as_the_threshold_reaches_it_in_either_precision(threshold: float) -> None:
    below = float(np.nextafter(np.float32(min(threshold, 1e38)), np.float32(0)))
    assert is_success(threshold, threshold)
    if threshold < 1e38:
        assert is_success(float(np.float32(threshold)), threshold)
    assert is_success(sum([threshold / 3] * 3), threshold)
    assert not is_success(below, threshold)
    for unknown in (None, math.nan, math.inf, -math.inf):
        assert not is_success(unknown, threshold)
