"""Group-relative advantages against a loop over groups."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer_hooks.advantages import compute_grpo_outcome_advantage, share_by_rollout
from trajstore.errors import ConfigurationError


def reference(rewards: Tensor, mask: Tensor, groups: list[str], epsilon: float, divide: bool) -> Tensor:
    """Compute advantages group by group, in Python floats."""
    scores = [sum(row.double().tolist()) for row in rewards]
    result = torch.zeros(rewards.shape, dtype=torch.float64)
    for row, group in enumerate(groups):
        members = [score for score, other in zip(scores, groups, strict=True) if other == group]
        mean, deviation = (statistics.fmean(members), statistics.stdev(members)) if len(members) > 1 else (0.0, 1.0)
        advantage = scores[row] - mean
        if divide:
            advantage /= deviation + epsilon
        for column in range(rewards.shape[1]):
            result[row, column] = advantage * float(mask[row, column])
    return result


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    groups=st.lists(st.sampled_from("abcde"), min_size=1, max_size=12),
    tokens=st.integers(0, 5),
    divide=st.booleans(),
    epsilon=st.sampled_from([1e-6, 1e-2]),
)
def test_equals_the_loop(seed: int, groups: list[str], tokens: int, divide: bool, epsilon: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(len(groups), tokens, generator=generator, dtype=torch.float64)
    mask = torch.randint(2, (len(groups), tokens), generator=generator)
    advantages, returns = compute_grpo_outcome_advantage(rewards, mask, groups, epsilon, divide)
    expected = reference(rewards, mask, groups, epsilon, divide)
    torch.testing.assert_close(advantages, expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(returns, advantages)


@pytest.mark.parametrize(
    "index",
    [
        ["7", "3", "7", "3"],
        np.array(["7", "3", "7", "3"]),
        np.array(["7", "3", "7", "3"], dtype=object),
        np.array([7, 3, 7, 3]),
        torch.tensor([7, 3, 7, 3]),
        [7, 3, 7, 3],
    ],
    ids=["strings", "str array", "object array", "int array", "tensor", "ints"],
)
def test_groups_may_be_given_in_any_form(index: Any) -> None:
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    advantages, _ = compute_grpo_outcome_advantage(rewards, torch.ones(4, 2), index, norm_adv_by_std_in_grpo=False)
    assert advantages.tolist() == [[0.5, 0.5], [0.0, 0.0], [-0.5, -0.5], [0.0, 0.0]]


@pytest.mark.parametrize("score", [0.1, 1 / 3, 1e6 + 0.1])
@pytest.mark.parametrize("rows", [3, 7, 8])
def test_equal_scores_have_no_advantage(score: float, rows: int) -> None:
    rewards = torch.full((rows, 1), score)
    advantages, _ = compute_grpo_outcome_advantage(rewards, torch.ones(rows, 1), [0] * rows)
    assert torch.equal(advantages, torch.zeros(rows, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_keeps_the_dtype_and_the_inputs(dtype: torch.dtype) -> None:
    rewards = torch.tensor([[0.0, 1.0], [0.5, 0.0]], dtype=dtype)
    before = rewards.clone()
    advantages, _ = compute_grpo_outcome_advantage(rewards, torch.ones(2, 2, dtype=torch.bool), ["a", "a"])
    assert advantages.dtype == dtype
    assert torch.equal(rewards, before)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_no_number_is_refused(value: float) -> None:
    rewards = torch.zeros(3, 2)
    rewards[1, 0] = value
    with pytest.raises(ConfigurationError, match=r"rows \[1\]"):
        compute_grpo_outcome_advantage(rewards, torch.ones(3, 2), ["a", "a", "b"])


def test_a_group_counts_a_rollout_of_several_rows_once() -> None:
    """One success with three rows among four rollouts: 1.5 and -0.5."""
    rewards = torch.tensor([[1.0], [1.0], [1.0], [0.0], [0.0], [0.0]])
    rollouts = torch.tensor([0, 0, 0, 1, 2, 3])
    advantages, _ = compute_grpo_outcome_advantage(rewards, torch.ones(6, 1), [0] * 6, rollouts=rollouts)
    torch.testing.assert_close(advantages[:, 0], torch.tensor([1.5, 1.5, 1.5, -0.5, -0.5, -0.5]))
    shared = share_by_rollout(advantages, rollouts)
    torch.testing.assert_close(shared[:, 0], torch.tensor([0.5, 0.5, 0.5, -0.5, -0.5, -0.5]))
