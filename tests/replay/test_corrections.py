"""Late outcomes of a pool's trajectories take effect at the next step and on opening."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.replay.conftest import build
from tests.support.waiting import wait_until
from trainer_hooks.replay import BufferStore, ExperienceManager, PoolRules
from trainer_hooks.replay.notices import why_nothing
from trajstore import annotate
from trajstore.errors import ConfigurationError

RULES = PoolRules(n_rollout=4, max_trajectories_per_task=4, seed=5, experience_lbound=0, experience_rbound=4)


def drawn(pool: ExperienceManager) -> list[str]:
    """Return the names of drawable rollouts."""
    rollout_ids = []
    for task in pool.task2trajectories:
        eligible = pool._state.eligible(task, pool.rules, pool.global_steps)
        rollout_ids += [history.rollout_id for _, history in pool._ledger.read(eligible)]
    return sorted(rollout_ids)


def ids_of(pool: ExperienceManager) -> dict[str, int]:
    return {
        history.rollout_id: entry.trajectory_id for entry, history in pool._ledger.read(list(pool._state.all_entries()))
    }


def full_pool(path: Path, rules: PoolRules = RULES) -> ExperienceManager:
    pool = ExperienceManager(rules, store=BufferStore.open(path))
    pool.global_steps = 1
    pool.admit([build("a", 0), build("a", 1), build("a", 2, outcome=0.0), build("b", 3), build("b", 4, outcome=0.0)])
    pool.flush()
    assert drawn(pool) == ["a/0", "a/1", "b/3"]
    return pool


def until_taken_in(pool: ExperienceManager, number: int, value: float | None) -> None:
    store = pool._ledger.store
    wait_until(lambda: store.outcomes_given([number]).get(number) == value)


def test_a_success_that_was_none_comes_out_no_more_from_the_next_step_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = full_pool(tmp_path)
    cheat = ids_of(pool)["b/3"]
    annotate(tmp_path, cheat, {"outcome": 0.0}, who="anna")
    until_taken_in(pool, cheat, 0.0)
    assert drawn(pool) == ["a/0", "a/1", "b/3"]  # the state is fixed within a step
    with caplog.at_level(logging.WARNING):
        pool.global_steps = 2
    assert f"a trajectory of task b (record {cheat}) has the outcome 0.0 that it was given late" in caplog.text
    assert drawn(pool) == ["a/0", "a/1"]
    assert len(pool) == 3
    caplog.clear()
    pool.global_steps = 3
    assert "given late" not in caplog.text
    pool._ledger.store.close()

    reopened = ExperienceManager(RULES, store=BufferStore.open(tmp_path))
    assert drawn(reopened) == ["a/0", "a/1"]
    annotate(tmp_path, cheat, {"outcome": None})
    until_taken_in(reopened, cheat, None)
    with caplog.at_level(logging.WARNING):
        reopened.global_steps = 4
    assert "has the outcome 1.0 that was recorded, since a later one was removed" in caplog.text
    assert drawn(reopened) == ["a/0", "a/1", "b/3"]
    reopened._ledger.store.close()


def test_nothing_that_may_come_out_is_explained(tmp_path: Path) -> None:
    pool = full_pool(tmp_path)
    annotate(tmp_path, list(ids_of(pool).values()), {"outcome": 0.0})
    for number in ids_of(pool).values():
        until_taken_in(pool, number, 0.0)
    pool.global_steps = 2
    assert drawn(pool) == []
    assert "3 outcomes given late" in why_nothing(pool._state, pool.rules, 2, pool.refused)
    pool._ledger.store.close()


def test_a_success_that_counts_less_goes_by_min_reward_and_stays(tmp_path: Path) -> None:
    pool = full_pool(tmp_path, PoolRules(n_rollout=4, seed=5, save_filter="positive", min_reward=0.5))
    numbers = ids_of(pool)
    annotate(tmp_path, [numbers["a/0"], numbers["a/1"]], {"outcome": [0.25, 0.75], "judge": 1.0})
    until_taken_in(pool, numbers["a/1"], 0.75)
    pool.global_steps = 2
    assert drawn(pool) == ["a/1", "b/3"]
    (entry,) = [candidate for candidate in pool._state.all_entries() if candidate.trajectory_id == numbers["a/1"]]
    assert (entry.outcome, entry.is_corrected) == (0.75, True)
    pool._ledger.store.close()


def test_a_pool_that_was_corrected_is_saved_and_resumed_as_any(tmp_path: Path) -> None:
    pool = full_pool(tmp_path / "store")
    annotate(tmp_path / "store", ids_of(pool)["b/3"], {"outcome": 0.0})
    until_taken_in(pool, ids_of(pool)["b/3"], 0.0)
    pool.global_steps = 2
    state = pool.state_dict()
    annotate(tmp_path / "store", ids_of(pool)["a/0"], {"outcome": 0.0})
    until_taken_in(pool, ids_of(pool)["a/0"], 0.0)
    pool.load_state_dict(state)
    assert drawn(pool) == ["a/1"], "nothing was added since, so that a later correction stays"
    pool.admit([build("b", 10), build("b", 11, outcome=0.0)])
    pool.load_state_dict(state)
    assert drawn(pool) == ["a/0", "a/1"], "the store went back to the point with its values"
    pool.save_experience_pool_to_disk(tmp_path / "files")
    other = ExperienceManager(RULES)
    other.load_experience_pool_from_disk(tmp_path / "files")
    assert drawn(other) == ["a/0", "a/1"]
    pool._ledger.store.close()


# -- New outcomes, and the tokenizer's fingerprint --


PLAIN = PoolRules(n_rollout=4)


@pytest.mark.parametrize("way", ["rollouts", "restart", "checkpoint", "files"])
def test_another_tokenizer_is_refused(tmp_path: Path, way: str) -> None:
    store = BufferStore()
    first = ExperienceManager(PLAIN, store=store)
    strangers = [build(tokens=1), build(tokens=2, tokenizer_fingerprint="qwen:1")]
    first.seed(strangers)
    first.flush()
    first.save_experience_pool_to_disk(tmp_path / "step_1")
    other = ExperienceManager(PLAIN, tokenizer_fingerprint="llama:2")
    ways = {
        "rollouts": lambda: other.seed(strangers),
        "restart": lambda: ExperienceManager(PLAIN, store=store, tokenizer_fingerprint="llama:2"),
        "checkpoint": lambda: other.load_state_dict(first.state_dict()),
        "files": lambda: other.load_experience_pool_from_disk(tmp_path / "step_1"),
    }
    with pytest.raises(ConfigurationError, match=r"'qwen:1'.*'llama:2'"):
        ways[way]()
    assert len(other) == 0
    assert first.tokenizer_fingerprint == ExperienceManager(PLAIN, store=store).tokenizer_fingerprint == "qwen:1"
