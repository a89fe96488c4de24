"""Masks against the rules, token by token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_hooks.masks import build_exp_mask, compute_response_mask, replace_recorded_old_log_probs
from trajstore.errors import ConfigurationError


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), rows=st.integers(0, 4), prompt=st.integers(0, 4), response=st.integers(0, 5))
def test_exp_mask_follows_the_three_rules_in_order(seed: int, rows: int, prompt: int, response: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, prompt + response)
    attention = torch.randint(2, shape, generator=generator)
    loss_mask = attention * torch.randint(2, shape, generator=generator)
    replayed = torch.rand(rows, generator=generator) < 0.5
    discarded = torch.rand(rows, generator=generator) < 0.5
    exp_mask = build_exp_mask(loss_mask, attention, prompt, replayed, discarded)
    assert exp_mask.dtype == loss_mask.dtype
    for row in range(rows):
        for column in range(prompt + response):
            if replayed[row]:
                expected = 0 if column < prompt else int(loss_mask[row, column])
            elif discarded[row]:
                expected = int(attention[row, column])
            else:
                expected = 0
            assert exp_mask[row, column] == expected


def test_response_mask_is_the_end_of_a_mask() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 1]])
    assert compute_response_mask(mask, 3).tolist() == [[1, 1, 0], [1, 0, 1]]
    assert compute_response_mask(mask, 0).shape == (2, 0)
    with pytest.raises(ConfigurationError, match="R = 5"):
        compute_response_mask(mask, 5)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), rows=st.integers(0, 4), prompt=st.integers(0, 4), response=st.integers(0, 5))
def test_recorded_log_probs_replace_only_where_off_policy_and_recorded(
    seed: int, rows: int, prompt: int, response: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    current = torch.randn(rows, response, generator=generator)
    recorded = torch.randn(rows, response, generator=generator)
    recorded_mask = torch.rand(rows, response, generator=generator) < 0.5
    recorded = recorded.masked_fill(~recorded_mask, math.nan)
    exp_mask = torch.randint(2, (rows, prompt + response), generator=generator)
    before = current.clone()
    result = replace_recorded_old_log_probs(current, recorded, recorded_mask, exp_mask)
    for row in range(rows):
        for column in range(response):
            replaced = bool(exp_mask[row, prompt + column]) and bool(recorded_mask[row, column])
            assert result[row, column] == (recorded if replaced else before)[row, column]
    assert torch.equal(current, before)


def test_more_positions_than_a_mask_has_are_refused() -> None:
    ones, flags, values = torch.ones(2, 5, dtype=torch.int64), torch.zeros(2, dtype=torch.bool), torch.zeros(2, 3)
    with pytest.raises(ConfigurationError, match="P = 6"):
        build_exp_mask(ones, ones, 6, flags, flags)
    with pytest.raises(ConfigurationError, match="R = 3"):
        replace_recorded_old_log_probs(values, values, values.bool(), ones[:, :2])
