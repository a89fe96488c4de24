"""Token columns of many rows at once are those of each row by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trainer_hooks.verl import tokens
from trainer_hooks.verl.histories import Histories, spread, surplus
from trainer_hooks.verl.tokens import Tokens, tokens_of
from trajstore.experience import mean_entropy
from trajstore.trajectory import AgentTrajectory

OPTIONAL = ("old_log_probs", "rollout_log_probs", "entropy", "rm_scores")


@st.composite
def rows(draw: st.DrawFn) -> Mapping[str, Any]:
    prompt, response = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    random = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    row: dict[str, Any] = {
        "prompts": torch.randint(0, 2**31, (prompt,), generator=random),
        "responses": torch.randint(0, 2**31, (response,), generator=random),
        "response_mask": torch.randint(0, 2, (response,), generator=random),
    }
    for name in OPTIONAL:
        if draw(st.booleans()):
            row[name] = torch.randn(response, generator=random)
            if response and draw(st.booleans()):
                row[name][draw(st.integers(0, response - 1))] = draw(st.sampled_from([0.0, math.nan, math.inf]))
    if "rm_scores" in row and draw(st.booleans()):
        row["rm_scores"][: response - 1] = 0.0
    return row


@given(st.lists(rows(), max_size=6), st.sampled_from([1, 8, 1 << 15]))
def test_rows_together_are_rows_alone(columns: list[Mapping[str, Any]], at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "_AT_ONCE", at_once)
        made = tokens_of(columns)
    assert len(made) == len(columns)
    for one, row in zip(made, columns, strict=True):
        check(one, row)
        (alone,) = tokens_of([row])
        assert alone.entropy == one.entropy, "to the last bit: rows come in any order"


def check(one: Tokens, row: Mapping[str, Any]) -> None:
    prompt, mask, scores = row["prompts"], row["response_mask"], row.get("rm_scores")
    assert one.prompt == len(prompt)
    assert torch.equal(one.input_ids.long(), torch.cat([prompt, row["responses"]]))
    assert torch.equal(one.response_mask.long(), mask)
    assert torch.equal(one.loss_mask.long(), torch.cat([torch.zeros_like(prompt), mask]))
    for found, name in (
        (one.old_log_probs, OPTIONAL[0]),
        (one.rollout_log_probs, OPTIONAL[1]),
        (one.entropys, OPTIONAL[2]),
    ):
        assert same(found, row.get(name))
        assert found is None or not found.numel() or found.data_ptr() != row[name].data_ptr()
    assert one.entropy == pytest.approx(
        None if "entropy" not in row else mean_entropy(row["entropy"], mask), nan_ok=True
    )
    if scores is None:
        assert (one.score, one.scores) == (None, [])
        return
    assert one.score == pytest.approx(float(scores.sum()), nan_ok=True)
    again = torch.zeros(len(scores))
    for place, score in one.scores:
        assert score != 0
        again[place] = score
    assert same(again, scores)


def same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one.nan_to_num(nan=-7.0), other.nan_to_num(nan=-7.0))


def test_ids_and_masks_are_small_where_they_can_be() -> None:
    def made(largest: int, mask: int) -> Tokens:
        row = {
            "prompts": torch.tensor([largest]),
            "responses": torch.tensor([5]),
            "response_mask": torch.tensor([mask]),
        }
        return tokens_of([row])[0]

    assert (made(7, 1).input_ids.dtype, made(7, 1).loss_mask.dtype) == (torch.int32, torch.uint8)
    assert (made(2**40, 2).input_ids.dtype, made(2**40, 2).loss_mask.dtype) == (torch.int64, torch.int64)


def test_scores_of_half_precision() -> None:
    row = {
        "prompts": torch.tensor([1]),
        "responses": torch.tensor([2, 3]),
        "response_mask": torch.tensor([1, 1]),
        "rm_scores": torch.tensor([0.0, 0.5], dtype=torch.bfloat16),
        "entropy": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    }
    (one,) = tokens_of([row])
    assert (one.score, one.scores, one.entropy) == (0.5, [[1, 0.5]], 1.5)


# -- Histories that are longer than the run's rows stand beside no rollouts --


def test_a_history_that_is_too_long_is_refused_and_counted() -> None:
    def history(prompt: int, response: int) -> AgentTrajectory:
        tokens = torch.arange(prompt + response)
        mask = (tokens >= prompt).long()
        return AgentTrajectory(
            input_ids=tokens, loss_mask=mask, response_start=prompt, old_log_probs=-torch.ones(response)
        )

    fitting = Histories(4, own_group=False, max_prompt_length=3, max_response_length=2)
    fits = history(3, 2)
    assert fitting.fitting([history(4, 2), fits, history(3, 3)]) == (fits,)
    assert fitting.take_refused() == {"experience_replay/histories_refused/too_long": 2.0}
    assert not any(fitting.take_refused().values())


@given(
    histories=st.lists(st.integers(1, 3), max_size=8),
    fresh=st.integers(1, 40),
    planned=st.integers(1, 40),
    multiple=st.integers(1, 24),
)
def test_histories_make_no_mini_batch_and_as_many_stay_as_fit(
    histories: list[int], fresh: int, planned: int, multiple: int
) -> None:
    without = math.ceil(max(fresh, planned) / multiple)
    kept = histories[: len(histories) - surplus(histories, fresh, planned, multiple)]
    assert math.ceil((fresh + sum(kept)) / multiple) <= without
    if kept != histories:
        assert math.ceil((fresh + sum(histories[: len(kept) + 1])) / multiple) > without


@given(ranks=st.integers(1, 4), mini_batches=st.integers(1, 5), size=st.integers(1, 4), data=st.data())
def test_every_mini_batch_has_its_share(ranks: int, mini_batches: int, size: int, data: st.DataObject) -> None:
    each = mini_batches * size
    count = ranks * each
    kinds = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    order = spread(kinds, ranks, mini_batches)
    for rank in range(ranks):
        mine = range(rank * each, (rank + 1) * each)
        assert sorted(order[place] for place in mine) == list(mine)
    parts = [
        [kinds[order[rank * each + part * size + place]] for rank in range(ranks) for place in range(size)]
        for part in range(mini_batches)
    ]
    for kind, most in ((0, 1), (1, ranks), (2, ranks)):
        counts = [part.count(kind) for part in parts]
        assert max(counts) - min(counts) <= most
