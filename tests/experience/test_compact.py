"""What the pool stores takes few bytes, and comes out as trainers have it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from trajstore.experience import BufferStore, ExperienceManager, MemoryStore, PoolRules
from trajstore.experience.compact import with_small_columns, with_usual_columns
from trajstore.trajectory import AgentTrajectory, Reward

MASKS = ("attention_mask", "loss_mask", "response_mask")


def rollout(length: int = 1000, start: int = 200, seed: int = 0) -> AgentTrajectory:
    random = torch.Generator().manual_seed(seed)
    mask = (torch.rand(length - start, generator=random) > 0.3).long()
    return AgentTrajectory(
        input_ids=torch.randint(0, 150_000, (length,), generator=random),
        attention_mask=torch.ones(length, dtype=torch.int64),
        loss_mask=torch.cat([torch.zeros(start, dtype=torch.int64), mask]),
        response_start=start,
        old_log_probs=-torch.rand(length - start, generator=random),
        response_mask=mask,
        entropy=0.5,
        reward=Reward(outcome=1.0),
        task_id="a",
        policy_version=1,
    )


def test_there_and_back() -> None:
    one = rollout()
    small = with_small_columns(one)
    assert small.input_ids is not None
    assert small.input_ids.dtype == torch.int32
    assert {getattr(small, name).dtype for name in MASKS} == {torch.uint8}
    back = with_usual_columns(small)
    for name in ("input_ids", *MASKS):
        assert getattr(back, name).dtype == torch.int64
        assert torch.equal(getattr(back, name), getattr(one, name))
    assert with_small_columns(AgentTrajectory()) == with_usual_columns(AgentTrajectory()) == AgentTrajectory()


def test_what_has_other_values_stays() -> None:
    ids = torch.tensor([-1, 2**40])
    small = with_small_columns(AgentTrajectory(input_ids=ids, loss_mask=torch.tensor([0, 2])))
    assert small.input_ids is ids
    assert small.loss_mask is not None
    assert small.loss_mask.tolist() == [0, 2]


def test_a_pool_in_memory_has_copies_of_its_own_and_not_the_batch_of_which_they_are_slices() -> None:
    whole = -torch.rand(8, 1000)
    one = AgentTrajectory(old_log_probs=whole[3, :5], entropys=whole[3, :5], metadata={"a": [1]})
    store = MemoryStore()
    (number,) = store.add_trajectories([one])
    expected = whole[3, :5].clone()
    whole.zero_()
    one.metadata["a"].append(2)
    kept = store.get(number)
    assert kept.metadata == {"a": [1]}
    for column in (kept.old_log_probs, kept.entropys):
        assert column is not None
        assert column.equal(expected)
        assert column.untyped_storage().nbytes() == 5 * 4


def test_a_trajectory_of_the_pool_takes_few_bytes_and_comes_out_as_it_went_in(tmp_path: Path) -> None:
    with contextlib.closing(BufferStore.open(tmp_path / "pool")) as store:
        manager = ExperienceManager(PoolRules(n_rollout=8, max_trajectories_per_task=64), store=store)
        made = [rollout(seed=seed) for seed in range(32)]
        assert manager.save_trajectories_to_memory(made) == 32
        manager.flush()
        held = manager.task2trajectories["a"]
        columns = [held[0].input_ids, *(getattr(held[0], name) for name in MASKS), held[0].old_log_probs]
        assert sum(one.numel() * one.element_size() for one in columns if one is not None) == 1000 * 6 + 800 * 5
        manager.update_difficulty2task_dict([AgentTrajectory(task_id="a", reward=Reward(outcome=x)) for x in (0, 1)])
        (history,) = manager.get_offpolicy_trajectories_from_memory("a")
        twin = made[0]
        assert history.input_ids is not None
        assert twin.input_ids is not None
        assert torch.equal(history.input_ids, twin.input_ids)
        for name in MASKS:
            assert getattr(history, name).dtype == torch.int64
            assert torch.equal(getattr(history, name), getattr(twin, name))
    size = sum(path.stat().st_size for path in (tmp_path / "pool").rglob("*") if path.is_file()) / 32
    assert size == pytest.approx(1000 * 6 + 800 * 5, rel=0.2)
