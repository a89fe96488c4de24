"""A rollout of several rows is one trajectory in the pool and several rows in a batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.replay.conftest import row
from trainer_hooks.replay.rows import ROWS, pack_rows, response_length, row_count, rows_of
from trajstore.errors import InvalidTrajectoryError
from trajstore.trajectory import AgentTrajectory, Reward

COLUMNS = ("input_ids", "loss_mask", "old_log_probs", "entropys", "response_mask")


def same(one: AgentTrajectory, other: AgentTrajectory) -> bool:
    return one.response_start == other.response_start and all(
        torch.equal(getattr(one, name), getattr(other, name)) for name in COLUMNS
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=5))
def test_rows_come_back_as_they_were(shapes: list[tuple[int, int]]) -> None:
    rows = [row(prompt, response, seed) for seed, (prompt, response) in enumerate(shapes)]
    packed = pack_rows(rows, per_row=("score",))
    packed.notes = {"advantages": packed.old_log_probs}
    back = rows_of(packed)
    assert row_count(packed) == len(back) == len(rows)
    assert response_length(packed) == sum(response for _, response in shapes)
    assert len(packed.response_mask) == len(packed.input_ids) - packed.response_start, "a store takes it"
    for before, other in zip(rows, back, strict=True):
        assert same(before, other)
        assert other.notes["advantages"].equal(before.old_log_probs)
        assert other.metadata == before.metadata
        assert (other.task_id, other.rollout_id, other.reward) == ("a", "r", Reward(outcome=1.0))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"tokens": 3}], "not the rows of a rollout"),
        ("ab", "not the rows of a rollout"),
        ([], "does not fit its 5 tokens"),
        ([{"tokens": 9, "prompt": 2}], "does not fit its 5 tokens"),
        ([{"tokens": 5, "prompt": 6}], "does not fit its 5 tokens"),
    ],
)
def test_rows_that_do_not_fit_are_told(rows: object, message: str) -> None:
    turn = row(2, 3)
    turn.metadata[ROWS] = rows
    with pytest.raises(InvalidTrajectoryError, match=message):
        rows_of(turn)


def test_what_is_no_row_is_told() -> None:
    with pytest.raises(InvalidTrajectoryError, match="none"):
        pack_rows([])
    with pytest.raises(InvalidTrajectoryError, match="lacks input_ids"):
        pack_rows([row(2, 3), AgentTrajectory()])
    lost = AgentTrajectory(metadata={ROWS: [{"tokens": 1, "prompt": 0}]})
    with pytest.raises(InvalidTrajectoryError, match="lacks input_ids"):
        rows_of(lost)
