"""Metrics against plain Python over the tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_hooks.figures import warnings_of
from trainer_hooks.losses import het_compute_token_on_off_policy_loss
from trainer_hooks.metrics import (
    StepTimes,
    batch_metrics,
    clip_fraction_by,
    effective_sample_size,
    loss_metrics,
    named,
    record_metrics,
    refused_metrics,
    starving_buckets,
)
from trajstore.errors import ConfigurationError


def kish(weights: list[float]) -> float:
    return sum(weights) ** 2 / (len(weights) * sum(weight**2 for weight in weights))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), rows=st.integers(0, 3), tokens=st.integers(0, 4))
def test_loss_metrics_equal_plain_python(seed: int, rows: int, tokens: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    old, new, advantages = (torch.randn(rows, tokens, generator=generator, dtype=torch.float64) for _ in range(3))
    response_mask, exp_mask = torch.randint(2, (2, rows, tokens), generator=generator)
    loss = het_compute_token_on_off_policy_loss(old, new, advantages, response_mask, exp_mask, 0.2)
    found = loss_metrics(loss, response_mask, exp_mask)
    ratios: dict[str, list[float]] = {"on": [], "off": []}
    for row in range(rows):
        for column in range(tokens):
            if response_mask[row, column]:
                side = "off" if exp_mask[row, column] else "on"
                ratios[side].append(math.exp(float(new[row, column] - old[row, column])))
    expected = {"pg_loss": float(loss["pg_loss"]), "ppo_kl": float(loss["ppo_kl"])}
    if ratios["on"] or ratios["off"]:
        expected["off_policy_share"] = len(ratios["off"]) / (len(ratios["on"]) + len(ratios["off"]))
    for side, values in ratios.items():
        if values:
            expected |= {f"{side}_{key}": float(loss[f"{side}_{key}"]) for key in ("pg_loss", "pg_clipfrac")}
            expected[f"{side}_pg_clipfrac_lower"] = float(loss[f"{side}_pg_clipfrac_lower"])
            expected[f"{side}_ratio_mean"] = sum(values) / len(values)
            expected[f"{side}_ratio_max"], expected[f"{side}_ratio_min"] = max(values), min(values)
    if ratios["off"]:
        expected["off_effective_sample_size"] = kish(ratios["off"])
    assert found == pytest.approx({f"experience_replay/{name}": value for name, value in expected.items()})
    assert all(type(value) is float for value in found.values())


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"off_policy_share": 0.51, "off_ratio_max": 9.0}, ["off-policy: lower exp_ratio"]),
        ({"off_policy_share": 0.5, "off_ratio_max": 10.5}, ["importance ratio 10.5"]),
        ({"off_policy_share": 0.9, "off_ratio_max": math.inf}, ["off-policy: lower exp_ratio", "importance ratio inf"]),
        ({"off_policy_share": 0.5, "off_ratio_max": 10.0}, []),
        ({"off_policy_share": 0.012}, ["only 1.2% of the tokens are replayed, where exp_ratio and"]),
        ({"off_policy_share": 0.049}, []),  # what the defaults ask for, with histories that are somewhat shorter
        ({"off_policy_share": 0.0}, []),
        ({"off_ratio_near_zero_share": 0.6}, ["60% of the replayed tokens have importance ratios below 0.1"]),
        ({"off_pg_loss": math.nan}, ["is NaN"]),
        ({}, []),
    ],
)
def test_warnings(metrics: dict[str, float], words: list[str]) -> None:
    figures = {f"experience_replay/{name}": value for name, value in metrics.items()}
    messages = list(warnings_of(figures, asked=0.5 * 1 / 8).values())
    assert len(messages) == len(words)
    assert all(word in message for word, message in zip(words, messages, strict=True))


def test_record_metrics() -> None:
    current = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]])
    recorded = torch.tensor([[-1.5, -2.0, 0.0], [math.nan, -5.0, -9.0]])
    recorded_mask = torch.tensor([[True, True, False], [False, True, True]])
    off_policy = torch.tensor([[1, 1, 1], [0, 0, 1]])
    assert record_metrics(current, recorded, recorded_mask, off_policy) == pytest.approx(
        {
            "experience_replay/recorded_share": 3 / 4,
            "experience_replay/recorded_difference_mean": (0.5 + 0.0 + 3.0) / 3,
            "experience_replay/recorded_difference_max": 3.0,
        }
    )
    assert record_metrics(current, recorded, recorded_mask, torch.zeros(2, 3)) == {}
    nothing_recorded = record_metrics(current, recorded, torch.zeros(2, 3, dtype=torch.bool), off_policy)
    assert nothing_recorded == {"experience_replay/recorded_share": 0.0}


def test_batch_metrics() -> None:
    found = batch_metrics(["a", "a", "b", "c", "c"], [True, False, False, True, True], [3, 10, 10, None, 7], 10)
    assert found == {
        "experience_replay/experience_tasks": 2.0,
        "experience_replay/tasks": 3.0,
        "experience_replay/replayed_rows": 3.0,
        "experience_replay/rows": 5.0,
        "experience_replay/age_mean": 5.0,
        "experience_replay/age_max": 7.0,
        "experience_replay/age_min": 3.0,
        "experience_replay/age_unknown_rows": 1.0,
    }
    assert "experience_replay/age_mean" not in batch_metrics(["a"], [False], [9], 10)
    mixed = batch_metrics(["a", "b", "c"], [True] * 3, [None, None, 11], 10, demonstrations=1)
    assert mixed["experience_replay/age_unknown_rows"] == 2.0


def test_refused_share() -> None:
    assert refused_metrics(1, 4) == {"experience_replay/refused_share": 0.25}
    assert refused_metrics(0, 0) == {}


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20))
def test_effective_sample_size(weights: list[float]) -> None:
    ratio = torch.tensor([*weights, math.inf])
    mask = torch.tensor([1] * len(weights) + [0])
    found = effective_sample_size(ratio, mask)
    assert found == pytest.approx(kish(ratio[:-1].tolist()), rel=1e-6)


def test_effective_sample_size_at_the_edges() -> None:
    ones = torch.ones(4)
    assert effective_sample_size(ones, ones) == 1.0
    assert effective_sample_size(ones, torch.zeros(4)) is None
    assert effective_sample_size(torch.tensor([math.inf, 1.0, 1.0, 1.0]), ones) == pytest.approx(0.25)
    assert effective_sample_size(torch.full((4,), 1e300, dtype=torch.float64), ones) == pytest.approx(1.0)


def test_clip_fraction_by_age() -> None:
    ratio = torch.tensor([[1.0, 2.5, 0.5], [2.5, 2.5, 0.5], [1.0, 1.0, 1.0], [9.0, 9.0, 9.0]])
    advantages = torch.tensor([[1.0, 1.0, 1.0], [-1.0, 0.0, -1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [0, 0, 0], [1, 1, 1]])
    found = clip_fraction_by([3, 3, 5, None], ratio, advantages, mask, 0.2, 1.0)
    assert found == {3: pytest.approx(2 / 6)}
    assert named("clip_fraction_by_age", found) == {"experience_replay/clip_fraction_by_age/3": pytest.approx(2 / 6)}
    with pytest.raises(ConfigurationError, match="labels"):
        clip_fraction_by([3], ratio, advantages, mask, 0.2, 1.0)


def test_clip_fraction_agrees_with_the_loss() -> None:
    generator = torch.Generator().manual_seed(1)
    old, new, advantages = (torch.randn(6, 20, generator=generator) for _ in range(3))
    mask = torch.randint(2, (6, 20), generator=generator)
    loss = het_compute_token_on_off_policy_loss(old, new, advantages, mask, mask, 0.2, off_cliprange_high=0.7)
    by_label = clip_fraction_by(["all"] * 6, loss["importance_ratio"], advantages, mask, 0.2, 0.7)
    assert by_label["all"] == pytest.approx(float(loss["off_pg_clipfrac"]))


def test_starving_buckets() -> None:
    assert starving_buckets({3: 2, 1: 5, 2: 0, 4: 1}, {1: 7, 4: 0}) == [3, 4]


def test_step_times_add_up_and_begin_anew() -> None:
    ticks = iter([0.0, 1.0, 5.0, 7.5, 10.0, 11.0])
    times = StepTimes(clock=lambda: next(ticks))
    with times.measure("mix"):
        pass
    with times.measure("mix"):
        pass
    with pytest.raises(KeyError), times.measure("batch"):
        raise KeyError("inside")
    assert times.take() == {"experience_replay/seconds/mix": 3.5, "experience_replay/seconds/batch": 1.0}
    assert times.take() == {}
