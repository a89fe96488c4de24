"""Damaged sampler states: each is refused with one sentence and no changes, or is valid."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

from tests.sampling.additions import additions
from tests.sampling.makers import WITH_ALL
from trajstore._core.sampling.draws import Draws
from trajstore.errors import ConfigurationError, EmptyBufferError, EpochsEndedError
from trajstore.samplers import Sampler, WeightedSampler

WRONG: tuple[Any, ...] = (None, "text", -1, 1 << 62, 1 << 70, 0.5, float("nan"), float("inf"), [], {}, object(), True)


def plain(state: Any) -> Any:
    """Return a state with tensors as bytes, for comparison."""
    if isinstance(state, torch.Tensor):
        return str(state.dtype), state.numpy().tobytes()
    return {key: plain(value) for key, value in state.items()} if isinstance(state, dict) else state


def running(make: Callable[[], Sampler]) -> Sampler:
    """Return a sampler after a few draws."""
    sampler = make()
    sampler.added(additions({n: 1 + n % 3 for n in range(6)}, versions=range(6), tasks=list("aabbcc")))
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        drawn = sampler.draw(3, generator)
    if isinstance(sampler, WeightedSampler):
        sampler.update(drawn.ids, drawn.samples, np.arange(3.0))
    return sampler


def damaged(state: Any) -> Iterator[Any]:
    """Yield replacements for a part of a state."""
    yield from WRONG
    if isinstance(state, torch.Tensor):
        yield from (state[:-1], torch.cat([state, state[-1:]]), state[None], state.bool(), state.flip(0), state[:0])
        for value in () if state.dtype == torch.uint8 else (-1, 1 << 40, float("nan"), float("inf"), 1e300, -0.5):
            wrong = state.clone() if isinstance(value, int) or state.is_floating_point() else state.double()
            wrong[0] = value
            yield wrong
    if isinstance(state, dict):
        for key, value in state.items():
            yield {other: part for other, part in state.items() if other != key}
            for wrong in damaged(value):
                yield {**state, key: wrong}
        yield {**state, "other": 1}
    if isinstance(state, list) and state:
        yield [*state[:-1], 5]


@pytest.mark.parametrize("name", list(WITH_ALL))
def test_a_damaged_state_is_refused_or_does_no_harm(name: str) -> None:
    state = running(WITH_ALL[name]).state_dict()
    refused = 0
    for wrong in damaged(state):
        sampler = running(WITH_ALL[name])
        before = plain(sampler.state_dict())
        if message := refusal(sampler, wrong):
            refused += 1
            assert plain(sampler.state_dict()) == before, message
        for _ in range(3):
            with suppress(EmptyBufferError, EpochsEndedError):
                sampler.draw(4, torch.Generator().manual_seed(1))
        sampler.state_dict()
    assert refused > 40


def test_a_damaged_state_of_draws_is_refused() -> None:
    draws = Draws(3)
    refused = [refusal(draws, wrong) for wrong in damaged(draws.state_dict())]
    assert sum(message is not None for message in refused) > 20
    assert 0 <= float(torch.rand(1, generator=draws.generator)) < 1


def refusal(loads: Any, state: Any) -> str | None:
    """Return the sentence that refuses a state, or None."""
    try:
        loads.load_state_dict(copy.copy(state))
    except ConfigurationError as error:
        return str(error)
    return None
