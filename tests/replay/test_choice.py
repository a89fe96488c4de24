"""Sampling of a task's histories through the pool, for each sampler."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.replay.conftest import build
from tests.sampling.chance import fits
from trainer_hooks.replay import BufferStore, ExperienceManager, PoolRules
from trainer_hooks.replay.entry import Refusal, entry_of, token_digest
from trainer_hooks.replay.selection import choose_to_save
from trajstore.errors import TrajectoryUnavailableError
from trajstore.trajectory import AgentTrajectory


def pool(**values: Any) -> ExperienceManager:
    return ExperienceManager(PoolRules(**({"n_rollout": 8} | values)))


def drawn(manager: ExperienceManager, n: int = 1) -> list[int]:
    return [
        int(history.input_ids[-1]) // 1000
        for history in manager.get_offpolicy_batch(["a"], n)
        if history.input_ids is not None
    ]


def test_at_random_every_order_is_as_likely_and_the_seed_decides() -> None:
    def orders(seed: int, times: int) -> list[tuple[int, ...]]:
        manager = pool(exp_select_mode="random", seed=seed)
        manager.seed([build(tokens=t) for t in range(3)])
        return [tuple(drawn(manager, 3)) for _ in range(times)]

    counts = Counter(orders(1, 300))
    assert len(counts) == 6
    assert fits(list(counts.values()), [1] * 6)
    assert orders(7, 20) == orders(7, 20)


def test_by_reward_the_highest_outcome_comes_first_and_stays_in_a_full_task() -> None:
    manager = pool(exp_select_mode="reward", max_trajectories_per_task=3, save_filter="positive")
    outcomes = [1.5, 0.2, 1.0, 2.0, 1.0, 0.5]
    manager.seed([build(tokens=t, outcome=outcome) for t, outcome in enumerate(outcomes)])
    assert manager.refused == {"not_better": 1}
    assert drawn(manager, 3) == [3, 0, 4], "of equal outcomes the newer one stayed"
    assert drawn(manager, 1) == [3]
    again = pool(exp_select_mode="reward", max_trajectories_per_task=3)
    kept = manager.task2trajectories["a"]
    again.seed(kept)
    assert [history.rollout_id for history in again.task2trajectories["a"]] == [history.rollout_id for history in kept]


def test_policy_versions_spread_over_the_batch() -> None:
    manager = pool(policy_versions="spread")
    versions = {"a": [1, 1, 2, 3], "b": [1, 2, 2, None], "c": [1, 1, 1, 1]}
    for task, held in versions.items():
        rollouts = [build(task, tokens=t, policy_version=version) for t, version in enumerate(held)]
        manager.seed(rollouts)
    assert Counter(history.policy_version for history in manager.get_offpolicy_batch(["a"], 3)) == {1: 1, 2: 1, 3: 1}
    again = pool(policy_versions="spread")
    again.load_state_dict(manager.state_dict())
    one_each = again.get_offpolicy_batch(["c", "b", "a"], 1)
    assert one_each[0].policy_version == 1
    assert len({history.policy_version for history in one_each}) == 3, "one history of each task, and no version twice"
    two_each = again.get_offpolicy_batch(["a", "b"], 2)
    assert len({history.policy_version for history in two_each}) >= 3


def test_a_history_that_left_the_pool_and_came_again_begins_anew(tmp_path: Path) -> None:
    """Use counts end with the entry: in a running, a rolled-back and a crashed pool."""
    store = BufferStore.open(tmp_path)
    manager = ExperienceManager(PoolRules(n_rollout=8, in_turns=True), store=store)
    partly, solved = ([build(tokens=t, outcome=float(t < most)) for t in range(8)] for most in (2, 8))
    manager.admit(partly)
    assert [drawn(manager), drawn(manager), drawn(manager)] == [[0], [1], [0]]
    manager.admit(solved)
    cut = manager.state_dict()
    manager.flush()
    crashed = ExperienceManager(manager.rules, store=store)
    manager.admit(partly)
    resumed = ExperienceManager(manager.rules)
    resumed.load_state_dict(cut)
    for other in (resumed, crashed):
        other.admit(partly)
    for pool in (manager, resumed, crashed):
        assert [drawn(pool), drawn(pool), drawn(pool)] == [[0], [1], [0]]
    store.close()


def test_what_does_not_come_out_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unreadable record leaves the pool and is replaced by the next best."""
    with closing(BufferStore.open(tmp_path / "pool")) as store:
        manager = ExperienceManager(PoolRules(n_rollout=8, max_trajectories_per_task=9), store=store)
        rollouts = [build(task, at, 1.0, entropy=float(at)) for task in "ab" for at in range(6)]
        manager.seed(rollouts)
        manager.judge([build(task, at, float(at % 2)) for task in "ab" for at in range(4)])
        honest, read = BufferStore.get, list[str]()

        def get(self: BufferStore, number: int) -> AgentTrajectory:
            history = honest(self, number)
            read.append(history.rollout_id)
            if history.rollout_id == "a/1":
                raise TrajectoryUnavailableError("gone")
            return history

        monkeypatch.setattr(BufferStore, "get", get)
        came = [rollout.rollout_id for rollout in manager.get_offpolicy_batch(["a", "b"], 2)]
        assert came == ["a/0", "a/2", "b/0", "b/1"]
        assert len(read) <= 6
        assert len(manager.get_offpolicy_batch(["a"], 9)) == 5


# -- Selection of histories that enter a pool --


def rules(**values: object) -> PoolRules:
    return PoolRules(**({"n_rollout": 8} | values))  # type: ignore[arg-type]


def test_messages_tell_apart_what_has_no_tokens() -> None:
    bare = {"input_ids": None, "loss_mask": None, "attention_mask": None, "response_start": None}
    assert entry_of(build(**bare), 0) is Refusal.NO_TOKENS
    assert token_digest(build(tokens=1, **bare)) != token_digest(build(tokens=2, **bare))
    assert token_digest(build(tokens=1, **bare)) == token_digest(build(tokens=1, **bare, rollout_id="other"))
    assert token_digest(build(tokens=1, **bare)) != token_digest(build(tokens=1, **bare, old_log_probs=torch.zeros(4)))


def test_save_filter() -> None:
    outcomes_entropies = [(0.0, 0.1), (0.5, 0.9), (1.0, 0.4), (None, 0.0)]
    rollouts = [build(tokens=i, outcome=o, entropy=e) for i, (o, e) in enumerate(outcomes_entropies)]
    rng = np.random.default_rng(0)

    def kept(**values: object) -> list[int]:
        return [int(history.rollout_id[2:]) for history in choose_to_save(rollouts, rules(**values), rng)]

    assert kept() == [2]
    assert kept(success_threshold=0.5) == [1, 2]
    assert kept(save_filter="positive") == [1, 2], "on request failures with partial rewards are replayed"
    half = {"success_threshold": 0.5, "save_filter": "best"}
    assert kept(**half) == [2]
    assert kept(**half, exp_select_mode="argmax") == [1]
    assert {kept(**half, exp_select_mode="random")[0] for _ in range(40)} == {1, 2}
    assert choose_to_save(rollouts[:1], rules(save_filter="best"), rng) == []


def reference(entropies: list[tuple[int, float]], mode: str, most: int) -> list[int]:
    """Apply the full-task policy to (tokens, entropy) pairs; return the kept positions."""
    kept: list[tuple[int, int, float]] = []
    for place, (tokens, entropy) in enumerate(entropies):
        if any(tokens == other for _, other, _ in kept):
            continue
        if len(kept) == most:
            if mode == "random":
                kept.pop(0)
            else:
                values = [e for _, _, e in kept]
                extreme = max(values) if mode == "argmin" else min(values)
                better = entropy < extreme if mode == "argmin" else entropy > extreme
                if not better:
                    continue
                kept.pop(values.index(extreme))
        kept.append((place, tokens, entropy))
    return [place for place, _, _ in kept]


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.sampled_from([0.5, 1.0, 1.5, 2.0])), max_size=12),
    st.sampled_from(["argmin", "argmax", "random"]),
    st.integers(1, 4),
    st.integers(0, 12),
)
def test_a_full_task_keeps_what_the_plain_reference_keeps(
    arrivals: list[tuple[int, float]], mode: str, most: int, cut: int
) -> None:
    manager = ExperienceManager(rules(exp_select_mode=mode, max_trajectories_per_task=most))
    rollouts = [build(tokens=t, entropy=e, rollout_id=str(place)) for place, (t, e) in enumerate(arrivals)]
    for part in (rollouts[:cut], rollouts[cut:]):
        manager.seed(part)
    places = [int(history.rollout_id) for history in manager.task2trajectories.get("a", ())]
    assert places == reference(arrivals, mode, most)
    assert manager.refused.total() + manager.left.total() + len(places) == len(arrivals)
