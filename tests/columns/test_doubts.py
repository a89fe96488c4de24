"""What is doubted of a rollout, against a twin that asks the same of whole masks, each made of truth values first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from trajstore import AgentTrajectory
from trajstore.columns.conversion import flatten
from trajstore.columns.doubts import doubts, sound
from trajstore.columns.schema import dtypes

_WHOLE = [dtype for dtype in dtypes().values() if not dtype.is_floating_point and not dtype.is_complex]
_EDGES = (0.0, -1.0, 1e-3, 0.1, 0.5, float("inf"), float("-inf"), float("nan"))
_NEAR = [
    (dtype, value)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    for edge in _EDGES
    for base in (torch.tensor([edge], dtype=torch.float64).to(dtype),)
    for value in (base, *(torch.nextafter(base, torch.tensor([to], dtype=dtype)) for to in (-9.0, 9.0)))
]
"""Values beside each limit, as each dtype has them."""


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
    prompt, response = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 3))

    def numbers(size: int, low: int = 0) -> list[int]:
        return data.draw(st.lists(st.integers(low, 2), min_size=size, max_size=size))

    def log_probs() -> torch.Tensor:
        dtype = data.draw(st.sampled_from(sorted({dtype for dtype, _ in _NEAR}, key=str)))
        fitting = [value for kind, value in _NEAR if kind is dtype]
        return torch.cat([torch.empty(0, dtype=dtype), *(data.draw(st.sampled_from(fitting)) for _ in range(response))])

    in_response = numbers(response)
    same = data.draw(st.booleans())
    rollout = AgentTrajectory(
        input_ids=torch.tensor(numbers(prompt + response, -1), dtype=torch.int64),
        loss_mask=data.draw(
            st.none()
            | st.sampled_from(_WHOLE).map(
                lambda dtype: _mask(dtype, [0] * prompt + (in_response if same else numbers(response)))
            )
        ),
        response_mask=data.draw(st.none() | st.sampled_from(_WHOLE).map(lambda dtype: _mask(dtype, in_response))),
        response_start=data.draw(st.none() | st.just(prompt)),
        old_log_probs=data.draw(st.none() | st.builds(log_probs)),
        rollout_log_probs=data.draw(st.none() | st.builds(log_probs)),
    )
    flat, wrong = flatten(rollout), list(_twin(rollout))
    assert list(doubts(flat, rollout.response_start)) == wrong
    assert not (sound([flat])[0] and wrong)


def test_rollouts_of_the_usual_dtypes_are_told_apart_at_once() -> None:
    def rollout(token: int = 1, wrote: int = 1, log_prob: float = -0.5, **fields: Any) -> AgentTrajectory:
        mask = torch.tensor([0, 1, wrote])
        return AgentTrajectory(
            input_ids=torch.tensor([2, 1, token]),
            loss_mask=mask,
            response_start=1,
            **{"response_mask": torch.tensor([1, 1]), "old_log_probs": torch.tensor([-1.0, log_prob]), **fields},
        )

    fine = [rollout(), rollout(response_mask=None), rollout(log_prob=1e-3), rollout(old_log_probs=None)]
    wrong = [rollout(token=-1), rollout(wrote=0), rollout(log_prob=0.5), rollout(log_prob=float("nan"))]
    wrong += [rollout(rollout_log_probs=torch.tensor([-float("inf"), 0]))]
    mixed = [one for pair in zip(fine, wrong, strict=False) for one in pair] + wrong[4:]
    assert sound([flatten(one) for one in mixed]) == [any(one is other for other in fine) for one in mixed]
