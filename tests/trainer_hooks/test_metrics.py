"""Metrics against plain Python, and what is warned of."""

from __future__ import annotations

import math

import pytest
import torch

from trainer_hooks.figures import warnings_of
from trainer_hooks.metrics import (
    StepTimes,
    batch_metrics,
    record_metrics,
    refused_metrics,
    starving_buckets,
)


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"off_policy_share": 0.51, "off_ratio_mean": 9.0}, ["off-policy: lower exp_ratio"]),
        ({"off_policy_share": 0.5, "off_ratio_mean": 10.5}, ["mean 10.5 and effective sample size 100.0%"]),
        ({"off_policy_share": 0.9, "off_ratio_mean": math.inf}, ["off-policy: lower exp_ratio", "have mean inf"]),
        ({"off_ratio_mean": 1.1, "off_effective_sample_size": 0.05}, ["mean 1.1 and effective sample size 5.0%"]),
        ({"off_ratio_mean": 1.1, "off_ratio_max": 30.0, "off_effective_sample_size": 0.6}, []),  # it learns
        ({"off_policy_share": 0.5, "off_ratio_mean": 10.0}, []),
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
