"""Every token, mask and log-prob of the padded batch is compared with its row."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_hooks.batch import Batch, BatchRow, assign_group_ids, build_batch, to_tensordict
from trainer_hooks.masks import build_exp_mask, compute_response_mask, replace_recorded_old_log_probs
from trajstore.errors import ConfigurationError, InvalidTrajectoryError, MissingDependencyError
from trajstore.trajectory import AgentTrajectory

PAD = 99
FULL = ("input_ids", "attention_mask", "position_ids", "loss_mask", "exp_mask")
RESPONSE = ("responses", "response_mask", "recorded_old_log_probs", "recorded_mask", "step_ids")


def make_row(prompt: int, response: int, *, seed: int = 0, recorded: int | None = None, **more: Any) -> BatchRow:
    """Return a row with random model turns and log-probs; ``recorded``: number of its log-probs."""
    generator = torch.Generator().manual_seed(seed)
    length = prompt + response
    loss_mask = torch.randint(2, (length,), generator=generator)
    loss_mask[:prompt] = 0
    count = response if recorded is None else recorded
    trajectory = AgentTrajectory(
        input_ids=torch.randint(1, 90, (length,), generator=generator),
        attention_mask=torch.ones(length, dtype=torch.int64),
        loss_mask=loss_mask,
        response_start=prompt,
        old_log_probs=-torch.rand(count, generator=generator),
        task_id=f"task-{seed}",
        rollout_id=f"rollout-{seed}",
        policy_version=seed,
    )
    return BatchRow(trajectory=trajectory, **{"group_id": seed, **more})


def tokens_of(row: BatchRow) -> tuple[int, torch.Tensor]:
    """Return the response's start and the token ids."""
    start, ids = row.trajectory.response_start, row.trajectory.input_ids
    return start, ids


def expected_row(row: BatchRow) -> dict[str, list[Any]]:
    """Return a row's part of every padded tensor, without the padding, in plain Python."""
    trajectory = row.trajectory
    start, ids = tokens_of(row)
    loss_mask, size = trajectory.loss_mask.tolist(), len(ids) - start
    if row.is_experience_replay:
        exp_mask = [0] * start + loss_mask[start:]
    else:
        exp_mask = [int(row.add_exp and row.train_mode == "discard")] * len(ids)
    recorded = [] if row.is_discarded else trajectory.old_log_probs.tolist()[:size]
    turn, steps = -1, []
    for position in range(start, len(ids)):
        if loss_mask[position] and (position == start or not loss_mask[position - 1]):
            turn += 1
        steps.append(turn)
    return {
        "prompts": ids[:start].tolist(),
        "responses": ids[start:].tolist(),
        "input_ids": ids.tolist(),
        "attention_mask": [1] * len(ids),
        "position_ids": list(range(len(ids))),
        "loss_mask": loss_mask,
        "exp_mask": exp_mask,
        "response_mask": loss_mask[start:],
        "recorded_old_log_probs": recorded + [0.0] * (size - len(recorded)),
        "recorded_mask": [True] * len(recorded) + [False] * (size - len(recorded)),
        "step_ids": steps,
    }


def check_row(batch: Batch, number: int, row: BatchRow) -> None:
    start, ids = tokens_of(row)
    prompts, responses = batch.tensors["prompts"].shape[1], batch.tensors["responses"].shape[1]
    left, right = [PAD] * (prompts - start), [PAD] * (responses - len(ids) + start)
    zeros_left, zeros_right = [0] * len(left), [0] * len(right)
    padding: dict[str, tuple[list[Any], list[Any]]] = {
        "prompts": (left, []),
        "responses": ([], right),
        "input_ids": (left, right),
        "position_ids": (zeros_left, [max(len(ids) - 1, 0)] * len(right)),
        "step_ids": ([], [-1] * len(right)),
        "recorded_mask": ([], [False] * len(right)),
        "recorded_old_log_probs": ([], [0.0] * len(right)),
        "response_mask": ([], zeros_right),
    }
    for name, values in expected_row(row).items():
        before, after = padding.get(name, (zeros_left, zeros_right))
        assert batch.tensors[name][number].tolist() == before + values + after, name


rows_strategy = st.lists(
    st.builds(
        make_row,
        st.integers(0, 5),
        st.integers(0, 6),
        seed=st.integers(0, 999),
        recorded=st.none() | st.integers(0, 8),
        is_experience_replay=st.booleans(),
        add_exp=st.booleans(),
        train_mode=st.sampled_from(["keep", "discard"]),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=30, deadline=None)
@given(rows=rows_strategy, more=st.none() | st.integers(0, 3))
def test_every_row_is_in_its_place(rows: list[BatchRow], more: int | None) -> None:
    longest_prompt = max(tokens_of(row)[0] for row in rows)
    longest_response = max(len(tokens_of(row)[1]) - tokens_of(row)[0] for row in rows)
    lengths = (
        {} if more is None else {"prompt_length": longest_prompt + more, "response_length": longest_response + more}
    )
    batch = build_batch(rows, PAD, **lengths)
    assert batch.tensors["prompts"].shape == (len(rows), longest_prompt + (more or 0))
    assert batch.tensors["responses"].shape == (len(rows), longest_response + (more or 0))
    for number, row in enumerate(rows):
        check_row(batch, number, row)


def test_keys_and_dtypes() -> None:
    batch = build_batch([make_row(2, 3)], PAD)
    dtypes = {name: tensor.dtype for name, tensor in batch.tensors.items()}
    special = {"recorded_old_log_probs": torch.float32, "recorded_mask": torch.bool}
    names = ("prompts", *FULL, *RESPONSE, "group_ids")
    assert dtypes == {name: special.get(name, torch.int64) for name in names}
    assert set(batch.non_tensors) == {"task_ids", "rollout_ids", "uid", "extras"}
    assert all(array.dtype == object and array.shape == (1,) for array in batch.non_tensors.values())
    assert all(tensor.is_contiguous() for tensor in batch.tensors.values())


def test_what_is_not_a_tensor() -> None:
    rows = [
        make_row(2, 3, seed=5, group_id=0),
        make_row(2, 3, seed=6, group_id=1, is_experience_replay=True, extras={"experience_list": ["try the door"]}),
    ]
    batch = build_batch(rows, PAD)
    assert batch.tensors["group_ids"].tolist() == [0, 1]
    assert batch.non_tensors["uid"].tolist() == ["0", "1"]
    assert batch.non_tensors["task_ids"].tolist() == ["task-5", "task-6"]
    assert batch.non_tensors["rollout_ids"].tolist() == ["rollout-5", "rollout-6"]
    assert batch.non_tensors["extras"][1] == {
        "is_experience_replay": True,
        "add_exp": False,
        "task_train_expmode": "keep",
        "policy_version": 6,
        "experience_list": ["try the door"],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_log_probs_keep_their_value_and_those_that_are_no_numbers_are_not_recorded(dtype: torch.dtype) -> None:
    row = make_row(1, 4)
    given = row.trajectory.old_log_probs.to(dtype)
    given[1:3] = torch.tensor([math.nan, -math.inf])
    row.trajectory.old_log_probs = given
    tensors = build_batch([row], PAD).tensors
    assert tensors["recorded_mask"].tolist() == [[True, False, False, True]]
    assert tensors["recorded_old_log_probs"].tolist() == [[float(given[0]), 0.0, 0.0, pytest.approx(float(given[3]))]]
    row.trajectory.old_log_probs = None
    assert not build_batch([row], PAD).tensors["recorded_mask"].any()


def test_attention_mask_is_all_ones_unless_given() -> None:
    row, other = make_row(2, 3, seed=1), make_row(2, 3, seed=1)
    row.trajectory.attention_mask = None
    assert torch.equal(
        build_batch([row], PAD).tensors["attention_mask"], build_batch([other], PAD).tensors["attention_mask"]
    )
    other.trajectory.attention_mask = torch.tensor([1, 0, 1, 1, 1])
    tensors = build_batch([other], PAD).tensors
    assert tensors["attention_mask"].tolist() == [[1, 0, 1, 1, 1]]
    assert tensors["position_ids"].tolist() == [[0, 0, 1, 2, 3]]
    discarded = dataclasses.replace(other, add_exp=True, train_mode="discard")
    assert build_batch([discarded], PAD).tensors["exp_mask"].tolist() == [[1, 0, 1, 1, 1]]


# -- groups ------------------------------------------------------------------------------------------


def test_groups_shared_and_separate() -> None:
    positions, replayed = [0, 0, 1, 1], [True, False, False, True]
    assert assign_group_ids(positions, replayed) == [0, 0, 1, 1]
    assert assign_group_ids(positions, replayed, "separate") == [2, 0, 1, 3]
    assert assign_group_ids([], []) == []


# -- refused rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"input_ids": None}, "input_ids"),
        ({"loss_mask": None}, "loss_mask"),
        ({"response_start": None}, "response_start"),
        ({"response_start": 9}, "response_start 9"),
        ({"loss_mask": torch.ones(3)}, "loss_mask"),
        ({"attention_mask": torch.ones(6)}, "attention_mask"),
        ({"input_ids": torch.ones(1, 5)}, "input_ids"),
        ({"old_log_probs": torch.ones(1, 3)}, "old_log_probs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rows_that_do_not_fit_are_named(change: dict[str, Any], named: str) -> None:
    row = make_row(2, 3, seed=1)
    for name, value in change.items():
        setattr(row.trajectory, name, value)
    with pytest.raises(InvalidTrajectoryError, match=rf"row 1.*{named}"):
        build_batch([make_row(2, 3), row], PAD)


def test_too_long_rows_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"response_length: 2, but row 1 has 3 tokens"):
        build_batch([make_row(1, 1), make_row(1, 3)], PAD, response_length=2)
    with pytest.raises(ConfigurationError, match=r"prompt_length: 0"):
        build_batch([make_row(1, 1)], PAD, prompt_length=0)


# -- other containers --------------------------------------------------------------------------------


@pytest.mark.parametrize("jagged", [False, True])
def test_tensordict_holds_the_same(jagged: bool) -> None:
    pytest.importorskip("tensordict")
    rows = [make_row(2, 3, seed=1, is_experience_replay=True), make_row(4, 1, seed=2), make_row(1, 6, seed=3)]
    batch = build_batch(rows, PAD, prompt_length=5)
    result = to_tensordict(batch, jagged=jagged)
    assert result.batch_size == torch.Size([3])
    for number, row in enumerate(rows):
        for name, expected in expected_row(row).items():
            value = result[name].unbind()[number] if jagged else batch.tensors[name][number]
            assert value.tolist() == (expected if jagged else result[name][number].tolist()), name
    assert result["group_ids"].tolist() == [1, 2, 3]
    assert list(result["uid"]) == ["1", "2", "3"]
    assert result["extras"][0]["is_experience_replay"] is True


def test_without_tensordict_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensordict", None)
    with pytest.raises(MissingDependencyError, match=r"tensordict.*trajstore\[verl\]"):
        to_tensordict(build_batch([make_row(1, 1)], PAD))


# -- Masks against the rules, token by token --


def test_response_mask_is_the_end_of_a_mask() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 1]])
    assert compute_response_mask(mask, 3).tolist() == [[1, 1, 0], [1, 0, 1]]
    assert compute_response_mask(mask, 0).shape == (2, 0)
    with pytest.raises(ConfigurationError, match="R = 5"):
        compute_response_mask(mask, 5)


@settings(max_examples=30, deadline=None)
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
