"""Draws without replacement."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from tests.sampling.chance import fits
from tests.sampling.told import told
from trajstore.errors import EmptyBufferError, EpochsEndedError
from trajstore.sampling import EpochSampler
from trajstore.sampling.permutation import permuted


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 63, 64, 65, 1000, 4097])
def test_a_permutation_has_everything_once(count: int) -> None:
    assert sorted(permuted(np.arange(count), count, key=7).tolist()) == list(range(count))


def test_permutations_are_uniform() -> None:
    """Where the first of six things lands, and which of its 720 orders comes, over many keys."""
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
    """States of epochs have the key alone."""
    assert permuted(np.array([0, count - 1]), count, key).tolist() == found


def test_long_permutations_are_uniform() -> None:
    """What stands first, what follows what, and whether neighbours stay neighbours."""
    firsts = np.array([permuted(np.array([0, 1, 4999]), 5000, key) for key in range(2000)])
    for column in firsts.T:
        assert fits(np.bincount(column // 500, minlength=10).tolist(), [1] * 10)
    assert fits(np.bincount((firsts[:, 1] - firsts[:, 0]) % 5000 // 500, minlength=10).tolist(), [1] * 10)


def test_what_is_added_waits_for_the_next_epoch_and_what_is_evicted_is_passed_over() -> None:
    sampler, generator = EpochSampler(unit="trajectory", epochs=2), torch.Generator().manual_seed(0)
    sampler.added(told(dict.fromkeys(range(10), 3)))
    first = [number for number, _ in _rows(sampler, 4, generator)]
    evicted = next(number for number in range(10) if number not in first)
    sampler.evicted([evicted])
    sampler.added(told({10: 3}))
    rest = [number for number, _ in _rows(sampler, 5, generator)]
    assert sorted(first + rest) == [number for number in range(10) if number != evicted]
    second = [number for number, _ in _rows(sampler, 100, generator)]
    assert sorted(second) == sorted({*range(11)} - {evicted})
    assert sampler.figures()["passed_over_rows"] == 1
    with pytest.raises(EmptyBufferError, match="all 2 epochs"):
        sampler.draw(1, generator)


def test_epochs_whose_rest_was_evicted_have_ended() -> None:
    sampler, generator = EpochSampler(epochs=1), torch.Generator().manual_seed(0)
    sampler.added(told({0: 3, 1: 3}))
    assert len(sampler.draw(1, generator)) == 1
    sampler.evicted([0, 1])
    with pytest.raises(EpochsEndedError):
        sampler.draw(2, generator)


def _rows(sampler: EpochSampler, count: int, generator: torch.Generator) -> list[tuple[int, int]]:
    drawn = sampler.draw(count, generator)
    return list(zip(drawn.ids.tolist(), drawn.samples.tolist(), strict=True))
