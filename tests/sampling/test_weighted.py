"""Weighted draws: their distribution, importance weights, factors, state. Draws without replacement."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import numpy as np
import pytest
import torch

from tests.sampling.additions import additions
from tests.sampling.chance import fits
from trajstore._core.columns.limits import UNKNOWN_VERSION
from trajstore._core.sampling.permutation import permuted
from trajstore._core.sampling.tree import SumTree
from trajstore.errors import ConfigurationError, EmptyBufferError, EpochsEndedError
from trajstore.samplers import (
    Drawn,
    EpochSampler,
    Priorities,
    Recency,
    Staleness,
    UseLimit,
    WeightedSampler,
    sampler_of,
)


def rows_of(drawn: Drawn) -> list[tuple[int, int]]:
    return list(zip(drawn.ids.tolist(), drawn.samples.tolist(), strict=True))


@pytest.mark.parametrize("per", ["sample", "trajectory"])
def test_priorities_are_chances_and_importance_weights_correct_them(per: str) -> None:
    """Against the formulas written out over all rows."""
    alpha, beta, eps = 0.7, 0.5, 0.01
    sizes = {1: 3, 2: 4, 7: 2}
    sampler = WeightedSampler(priorities=Priorities(alpha, beta, eps, per=per))  # type: ignore[arg-type]
    sampler.added(additions(sizes))
    every = [(number, at) for number, size in sizes.items() for at in range(size)]
    priority = {row: (row[0] if per == "trajectory" else 1 + 2.5 * at) for at, row in enumerate(every)}
    ids, samples = np.array([row[0] for row in every]), np.array([row[1] for row in every])
    sampler.update(ids, samples, [priority[row] for row in every])
    chance = {row: (priority[row] + eps) ** alpha for row in every}
    drawn = sampler.draw(30_000, torch.Generator().manual_seed(1))
    rows = rows_of(drawn)
    assert fits([rows.count(row) for row in every], [chance[row] for row in every])
    assert drawn.weights is not None
    least = min(chance.values())
    np.testing.assert_allclose(drawn.weights, [(least / chance[row]) ** beta for row in rows], rtol=1e-5)
    sampler.beta = 1.0
    annealed = sampler.draw(30_000, torch.Generator().manual_seed(1))
    assert annealed.weights is not None
    assert sampler.beta == 1.0
    np.testing.assert_allclose(annealed.weights, [least / chance[row] for row in rows_of(annealed)], rtol=1e-5)
    for name in ("alpha", "beta"):
        for bad in (-1, True, float("nan"), float("inf")):
            with pytest.raises(ConfigurationError, match=f"{name}: "):
                setattr(sampler, name, bad)
        with pytest.raises(ConfigurationError, match=f"{name}: this sampler has no priorities"):
            setattr(WeightedSampler(), name, 0.9)
    with pytest.raises(ConfigurationError, match="smaller alpha"):
        sampler.alpha = 1e4
    for step in range(100):  # 0 at times
        sampler.alpha = 0.03 * (step % 50)
        sampler.draw(3, torch.Generator())
    built = WeightedSampler(priorities=Priorities(sampler.alpha, 1.0, eps, per=per))  # type: ignore[arg-type]
    resumed = WeightedSampler(priorities=Priorities(alpha, beta, eps, per=per))  # type: ignore[arg-type]
    for other in (built, resumed):
        other.added(additions(sizes))
    built.update(ids, samples, [priority[row] for row in every])
    resumed.load_state_dict(sampler.state_dict())
    assert (resumed.alpha, resumed.beta) == (0.03 * 49, 1.0)
    draws = [each.draw(1000, torch.Generator().manual_seed(2)) for each in (sampler, built, resumed)]
    for later in draws[1:]:
        for name in ("ids", "samples", "probabilities", "weights"):
            assert np.array_equal(later.arrays[name], draws[0].arrays[name]), name
    with pytest.raises(ConfigurationError, match=r"priorities\.alpha 0\.7 \(here 1\.47\).*same arguments"):
        built.load_state_dict(sampler.state_dict())


def test_recency_by_version_holds_over_any_number_of_versions_and_leaves_out_unknown_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sampler = WeightedSampler([Recency(0.5, "versions")], unit="sample")
    for step in range(0, 3000, 100):
        sampler.added(additions({2 * step: 1, 2 * step + 1: 1}, [step, UNKNOWN_VERSION]))
    sampler.added(additions({9000: 1, 9001: 1}, [2900, 2901]))
    drawn = sampler.draw(10_000, torch.Generator().manual_seed(0))
    assert fits([int(np.sum(drawn.ids == number)) for number in (5800, 9000, 9001, 5801)], [1, 1, 4, 0])
    assert sum("has no policy version" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("by", ["trajectories", "versions"])
@pytest.mark.parametrize("before", [0, 10])
def test_recency_holds_for_a_state_of_before_the_first_draw_and_for_much_older_ones(
    by: Literal["trajectories", "versions"], before: int
) -> None:
    numbers = range(2000)
    early, late, resumed = (WeightedSampler([Recency(1.0, by)], unit="sample") for _ in range(3))
    if before:
        early.added(additions(dict.fromkeys(numbers[:before], 1), numbers[:before]))
    for sampler in (late, resumed):
        sampler.added(additions(dict.fromkeys(numbers, 1), numbers))
    resumed.load_state_dict(early.state_dict())
    drawn = [sampler.draw(100, torch.Generator().manual_seed(0)) for sampler in (late, resumed)]
    assert np.array_equal(drawn[0].ids, drawn[1].ids)
    assert np.array_equal(drawn[0].arrays["probabilities"], drawn[1].arrays["probabilities"])


def test_ages_count_from_the_version_that_was_reached() -> None:
    sampler = WeightedSampler([Staleness(max_age=2)], unit="trajectory")
    sampler.added(additions(dict.fromkeys(range(4), 1), [1, 2, 3, 4]))
    sampler.reached(5)
    assert _all(sampler) == {2, 3}
    state = sampler.state_dict()
    sampler.evicted([3])
    other = WeightedSampler([Staleness(max_age=2)], unit="trajectory")
    other.added(additions({0: 1, 1: 1, 2: 1}, [1, 2, 3]))
    other.load_state_dict(state)
    assert _all(other) == _all(sampler) == {2}


def test_uses_that_were_counted_elsewhere_count() -> None:
    sampler = WeightedSampler([UseLimit(max_uses=2)], unit="trajectory")
    sampler.added(additions(dict.fromkeys(range(4), 1)))
    sampler.used(np.array([0, 2, 9]), np.array([2, 1, 5]))
    assert _all(sampler) == {1, 2, 3}
    assert _all(sampler) == {1, 3}


def test_of_a_window_that_is_used_up_the_error_counts_the_window() -> None:
    sampler, generator = WeightedSampler([UseLimit(max_uses=1)], unit="trajectory"), torch.Generator()
    sampler.added(additions(dict.fromkeys(range(20), 1)))
    sampler.evicted([3, 17])
    sampler.draw(5, generator, 15)
    message = r"none of 4 trajectories is left to draw from after uses; 14 older ones are not in the window"
    with pytest.raises(EmptyBufferError, match=message):
        sampler.draw(1, generator, 15)


def test_whole_trajectories_come_once_in_a_batch_with_the_chances_of_draws_one_by_one() -> None:
    sampler = WeightedSampler(priorities=Priorities(alpha=1, beta=0, eps=0, per="trajectory"), unit="trajectory")
    sampler.added(additions({0: 4, 1: 9, 2: 1}))
    sampler.update(np.arange(3), np.zeros(3, np.int64), [1.0, 2.0, 3.0])
    generator = torch.Generator().manual_seed(0)
    pairs = [tuple(sampler.draw(2, generator).ids.tolist()) for _ in range(6000)]
    expected = {(a, b): (a + 1) / 6 * (b + 1) / (6 - a - 1) for a in range(3) for b in range(3) if a != b}
    assert set(pairs) == set(expected)
    assert fits([pairs.count(pair) for pair in expected], list(expected.values()))
    assert sorted(sampler.draw(10, generator).ids.tolist()) == [0, 1, 2]


def test_samplers_from_configuration() -> None:
    sampler = sampler_of(
        {"name": "weighted", "unit": "trajectory", "staleness": {"max_age": 3}, "priorities": {"per": "trajectory"}}
    )
    assert isinstance(sampler, WeightedSampler)
    assert [factor.name for factor in sampler.factors] == ["staleness"]
    for wrong, message in (
        ({"name": "wieghted"}, "must be one of weighted, epochs, groups"),
        ({"name": "epochs", "unti": "sample"}, "has no option 'unti'; there are unit, epochs"),
        ({"name": "weighted", "staleness": 3}, "must be a dict of options"),
        ({"name": "weighted", "recency": {}}, "half_life"),
        ({"name": "weighted", "recency": {"half_life": 0}}, "above 0"),
        ({"name": "weighted", "unit": "trajectory", "priorities": {}}, "per 'sample' needs unit 'sample'"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            sampler_of(wrong)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        *(([1.0, value], "priorities") for value in (-1.0, float("nan"), float("inf"))),
        ([1.0], "priorities"),
        *(([1.0, value], r"must be at most 1e\+100") for value in (1e308, 1e200)),
    ],
)
def test_priorities_that_are_none_or_too_large_change_nothing(bad: list[float], message: str) -> None:
    sampler = WeightedSampler(priorities=Priorities(alpha=1.0))
    sampler.added(additions({0: 2, 1: 2}))
    with pytest.raises(ConfigurationError, match=message):
        sampler.update(np.array([0, 1]), np.array([0, 0]), bad)
    sampler.added(additions({2: 2}))
    assert sampler.draw(50, torch.Generator().manual_seed(0)).weights.tolist() == [1.0] * 50  # type: ignore[union-attr]
    with pytest.raises(ConfigurationError, match="smaller alpha"):
        Priorities(alpha=1000.0, eps=10.0)


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_a_weight_that_is_none_is_refused_and_nothing_is_set(bad: float) -> None:
    tree = SumTree(4)
    with pytest.raises(ConfigurationError, match="at least 0"):
        tree.set(np.array([0, 1]), np.array([1.0, bad]))
    assert tree.total == 0


def test_a_window_of_tiny_weights_after_huge_ones_is_drawn_from() -> None:
    sampler = WeightedSampler(priorities=Priorities(alpha=1.0, eps=0.0))
    sampler.added(additions({0: 1, 1: 1, 2: 1}))
    sampler.update(np.arange(3), np.zeros(3, np.int64), [1e30, 1e-10, 3e-10])
    ids = sampler.draw(400, torch.Generator().manual_seed(0), first=1).ids.tolist()
    assert fits([ids.count(0), ids.count(1), ids.count(2)], [0, 1, 3])


def test_where_all_that_is_left_rests_the_shortest_rest_ends() -> None:
    sampler = WeightedSampler([UseLimit(cooldown=3)], unit="trajectory")
    sampler.added(additions({0: 1, 1: 1, 2: 1}))
    generator = torch.Generator().manual_seed(0)
    drawn = [sampler.draw(1, generator).ids.tolist()[0] for _ in range(12)]
    assert all(drawn[at : at + 3] == drawn[:3] for at in range(0, 12, 3))
    assert sorted(drawn[:3]) == [0, 1, 2]


def _all(sampler: WeightedSampler) -> set[int]:
    return set(sampler.draw(100, torch.Generator()).ids.tolist())


# -- Draws without replacement --


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 63, 64, 65, 1000, 4097])
def test_a_permutation_has_everything_once(count: int) -> None:
    assert sorted(permuted(np.arange(count), count, key=7).tolist()) == list(range(count))


def test_permutations_are_uniform() -> None:
    """Uniformity of the first of six items' place, and of the 720 orders, over many keys."""
    orders = [tuple(permuted(np.arange(6), 6, key).tolist()) for key in range(14_400)]
    places = Counter(order[0] for order in orders)
    assert fits(list(places.values()), [1] * 6)
    assert len(set(orders)) == 720
    assert fits(list(Counter(orders).values()), [1] * 720)


@pytest.mark.parametrize(
    ("count", "key", "found"),
    [
        (4_097, 0, [1088, 2239]),
        (20_000_000, 2**62 + 12345, [11408821, 13697752]),
        (2**40 + 3, 99, [274328727690, 673421006873]),
        (2**61, 2**63 - 1, [1568382844824654366, 2061801922306091447]),
    ],
)
def test_an_order_is_the_same_for_ever(count: int, key: int, found: list[int]) -> None:
    """Epoch states contain only the key."""
    assert permuted(np.array([0, count - 1]), count, key).tolist() == found


def test_what_is_added_waits_for_the_next_epoch_and_what_is_evicted_is_passed_over() -> None:
    sampler, generator = EpochSampler(unit="trajectory", epochs=2), torch.Generator().manual_seed(0)
    sampler.added(additions(dict.fromkeys(range(10), 3)))
    first = [number for number, _ in rows_of(sampler.draw(4, generator))]
    evicted = next(number for number in range(10) if number not in first)
    sampler.evicted([evicted])
    sampler.added(additions({10: 3}))
    rest = [number for number, _ in rows_of(sampler.draw(5, generator))]
    assert sorted(first + rest) == [number for number in range(10) if number != evicted]
    second = [number for number, _ in rows_of(sampler.draw(100, generator))]
    assert sorted(second) == sorted({*range(11)} - {evicted})
    assert sampler.figures()["passed_over_rows"] == 1
    with pytest.raises(EmptyBufferError, match="all 2 epochs"):
        sampler.draw(1, generator)


def test_epochs_whose_rest_was_evicted_have_ended() -> None:
    sampler, generator = EpochSampler(epochs=1), torch.Generator().manual_seed(0)
    sampler.added(additions({0: 3, 1: 3}))
    assert len(sampler.draw(1, generator)) == 1
    sampler.evicted([0, 1])
    with pytest.raises(EpochsEndedError):
        sampler.draw(2, generator)
