"""A rollout of several rows is one trajectory in the pool and several rows in a batch."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.replay.conftest import row
from trainer_hooks.replay import BufferStore, ExperienceManager, PoolRules
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


def test_a_pool_keeps_draws_and_gives_up_a_rollout_as_a_whole(tmp_path: Path) -> None:
    rules = PoolRules(n_rollout=4, max_trajectories_per_task=2, use_current_policy_entropy=False)
    rollouts = [pack_rows([row(2, 3, seed), row(4, 2, seed + 50)]) for seed in range(3)]
    for number, history in enumerate(rollouts):
        history.entropy = 0.5 - number / 10
    with contextlib.closing(BufferStore.open(tmp_path / "pool")) as store:
        manager = ExperienceManager(rules, store=store)
        manager.global_steps = 1
        failure = AgentTrajectory(task_id="a", reward=Reward(outcome=0.0))
        manager.update_difficulty2task_dict([*rollouts, failure])
        assert manager.difficulty2task_dict == {3: ("a",)}, "three rollouts of two rows succeeded, of four"
        assert manager.save_trajectories_to_memory(rollouts) == 2
        assert len(manager) == 2
        manager.flush()
    with contextlib.closing(BufferStore.open(tmp_path / "pool")) as store:
        manager = ExperienceManager(rules, store=store)
        manager.global_steps = 1
        histories = manager.get_offpolicy_trajectories_from_memory("a", 2)
        assert [history.entropy for history in histories] == [0.3, 0.4]
        for history, seed in zip(histories, (2, 1), strict=True):
            assert [
                same(*pair) for pair in zip(rows_of(history), [row(2, 3, seed), row(4, 2, seed + 50)], strict=True)
            ] == [
                True,
                True,
            ]
        manager.save_experience_pool_to_disk(tmp_path / "step_1")
        other = ExperienceManager(rules)
        other.load_experience_pool_from_disk(tmp_path / "step_1")
        assert [row_count(history) for history in other.task2trajectories["a"]] == [2, 2]


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
