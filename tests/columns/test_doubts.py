"""Warnings about implausible rollouts, compared with a reference that builds whole boolean masks first."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trajstore import AgentTrajectory, Trajectory, TrajectoryReplayBuffer
from trajstore._core.columns.conversion import flatten
from trajstore._core.columns.doubts import doubts
from trajstore._core.columns.flat import FlatTrajectories, copied
from trajstore._core.columns.memory import Arena
from trajstore._core.columns.schema import dtypes

_WHOLE = [dtype for dtype in dtypes().values() if not dtype.is_floating_point and not dtype.is_complex]
_EDGES = (0.0, -1.0, 1e-3, 0.1, 0.5, float("inf"), float("-inf"), float("nan"))
_NEAR = [
    (dtype, value)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    for edge in _EDGES
    for base in (torch.tensor([edge], dtype=torch.float64).to(dtype),)
    for value in (base, *(torch.nextafter(base, torch.tensor([to], dtype=dtype)) for to in (-9.0, 9.0)))
]
"""Each limit and its neighbouring values in each dtype."""


def _twin(rollout: AgentTrajectory) -> Iterator[str]:
    ids, mask, written = rollout.input_ids, rollout.response_mask, rollout.loss_mask
    if ids is not None and len(ids) and ids.dtype.is_signed and ids.min() < 0:
        yield "negative token ids in input_ids"
    if written is not None and rollout.response_start is not None:
        written = written[rollout.response_start :].bool()
        if mask is not None and not torch.equal(written, mask.bool()):
            yield "a response_mask that is not loss_mask[response_start:]"
    on_model = written if mask is None else mask.bool()
    for name in ("old_log_probs", "rollout_log_probs"):
        values = getattr(rollout, name)
        if values is None or _twin_possible(values):
            continue
        if on_model is None or len(on_model) != len(values) or not _twin_possible(values[on_model.bool()]):
            yield f"{name} that are above 0 or not finite where the model wrote"


def _twin_possible(values: torch.Tensor) -> bool:
    most = 0.1 if values.dtype in (torch.float16, torch.bfloat16) else 1e-3
    return bool(torch.all((values <= most) & (values > -torch.inf)))


def _mask(dtype: torch.dtype, numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64).to(dtype)


@given(st.data())
def test_doubts_are_those_of_the_twin(data: st.DataObject) -> None:
    whole = st.none() | st.sampled_from(_WHOLE)
    loss, mask, knows_start = data.draw(whole), data.draw(whole), data.draw(st.booleans())
    old, new = (data.draw(st.none() | st.sampled_from(sorted({dtype for dtype, _ in _NEAR}, key=str))) for _ in "12")

    def log_probs(dtype: torch.dtype | None, count: int) -> torch.Tensor | None:
        if dtype is None:
            return None
        fitting = [value for kind, value in _NEAR if kind is dtype]
        return torch.cat([torch.empty(0, dtype=dtype), *(data.draw(st.sampled_from(fitting)) for _ in range(count))])

    def rollout() -> AgentTrajectory:
        prompt, response = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 3))

        def numbers(size: int, low: int = 0) -> list[int]:
            return data.draw(st.lists(st.integers(low, 2), min_size=size, max_size=size))

        in_response = numbers(response)
        in_loss = in_response if data.draw(st.booleans()) else numbers(response)
        return AgentTrajectory(
            input_ids=torch.tensor(numbers(prompt + response, -1), dtype=torch.int64),
            loss_mask=None if loss is None else _mask(loss, [0] * prompt + in_loss),
            response_mask=None if mask is None else _mask(mask, in_response),
            response_start=prompt if knows_start else None,
            old_log_probs=log_probs(old, response),
            rollout_log_probs=log_probs(new, response),
        )

    rollouts = [rollout() for _ in range(data.draw(st.integers(1, 3)))]
    starts = [rollout.response_start for rollout in rollouts]
    ((run, block),) = copied(FlatTrajectories.runs(map(flatten, rollouts)), Arena(0))
    problems = {at: list(_twin(rollout)) for at, rollout in enumerate(rollouts)}
    assert doubts(block, run.extents, starts) == {at: found for at, found in problems.items() if found}


# -- Rollouts that are certainly wrong are kept, with a warning when they are added --


NAN, INF = float("nan"), float("inf")


def watched(**fields: Any) -> AgentTrajectory:
    plain: dict[str, Any] = {
        "task_id": "t",
        "input_ids": torch.arange(6),
        "loss_mask": torch.tensor([0, 0, 1, 1, 0, 1], dtype=torch.uint8),
        "response_start": 2,
        "response_mask": torch.tensor([True, True, False, True]),
        "old_log_probs": torch.tensor([-0.5, 0.0, -3.0, -1e-6]),
        "policy_version": 1,
    }
    return AgentTrajectory(**plain | fields)


def warnings_of(caplog: pytest.LogCaptureFixture, *rollouts: Any) -> list[str]:
    with caplog.at_level(logging.WARNING), TrajectoryReplayBuffer(sample_window_size=0) as buffer:
        for rollout in rollouts:
            buffer.add_trajectories([rollout])
        assert len(buffer) == len(rollouts)
    return [record.message for record in caplog.records]


SOUND: list[dict[str, Any]] = [
    {"input_ids": np.arange(6), "loss_mask": None},
    {"old_log_probs": torch.tensor([-0.5, -1.0, NAN, -0.1])},  # NaN at an environment token only
    {"old_log_probs": torch.full((4,), -1.0).to(torch.float8_e5m2), "input_ids": torch.arange(6).to(torch.uint16)},
    {"old_log_probs": torch.zeros(0), "response_start": 6, "response_mask": None},
    {"input_ids": torch.zeros(0, dtype=torch.int64), "loss_mask": None, "response_start": None, "response_mask": None},
]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": np.array([0, 1, 2, 3, 4, -100])}, "negative token ids"),
    ({"response_mask": torch.tensor([1, 1, 1, 1], dtype=torch.uint8)}, "response_mask that is not loss_mask"),
    ({"old_log_probs": torch.tensor([-INF, -1.0, -3.0, -1.0])}, "old_log_probs that are above 0 or not finite"),
    ({"rollout_log_probs": torch.tensor([2.0, 0.0]), "response_start": None, "response_mask": None,
      "old_log_probs": None}, "rollout_log_probs that are above"),
]  # fmt: skip


@pytest.mark.parametrize("fields", SOUND)
def test_what_can_be_true_is_not_told(fields: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(caplog, watched(**fields)) == []


@pytest.mark.parametrize(("fields", "says"), WRONG)
def test_what_is_certainly_wrong_is_told_and_kept(
    fields: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    [text] = warnings_of(caplog, watched(), watched(rollout_id="7", **fields))
    assert says in text
    assert "rollout '7' of task 't'" in text


def test_what_goes_on_being_wrong_is_told_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    wrong = [watched(input_ids=torch.full((6,), -1), rollout_id=str(number)) for number in range(120)]
    assert [text.split(" ")[0] for text in warnings_of(caplog, *wrong)] == ["1", "10", "100"]


def test_blocks_of_steps_and_rollouts_of_agents_in_one_store_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    block = Trajectory(rewards=torch.zeros(3, 2, 1))
    [text] = warnings_of(caplog, watched(), block, watched(), block)
    assert "has agent trajectories, and step trajectories are added" in text
