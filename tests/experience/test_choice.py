"""Which histories of a task come out, by each sampler, through the pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampling.chance import fits
from trainer_hooks.config import ExperienceReplayConfig
from trajstore.errors import ConfigurationError, TrajectoryUnavailableError
from trajstore.experience import BufferStore, ExperienceManager, PoolRules
from trajstore.experience.entry import PoolEntry
from trajstore.experience.selection import choose_histories, undecided
from trajstore.trajectory import AgentTrajectory

Make = Callable[..., AgentTrajectory]


def pool(**values: Any) -> ExperienceManager:
    return ExperienceManager(PoolRules(**({"n_rollout": 8} | values)))


def drawn(manager: ExperienceManager, n: int = 1) -> list[int]:
    return [
        int(one.input_ids[-1]) // 1000 for one in manager.get_offpolicy_batch(["a"], n) if one.input_ids is not None
    ]


@pytest.mark.parametrize(("mode", "best"), [("argmin", 9), ("argmax", 0), ("reward", 3)])
def test_the_best_comes_however_often_it_came(make: Make, mode: Any, best: int) -> None:
    """By entropies under the current policy, which are the other way round than the saved ones."""
    manager = pool(exp_select_mode=mode, save_filter="positive")
    manager.current_entropy = lambda held: [10.0 - one.entropy for one in held]  # type: ignore[operator]
    rollouts = [
        make("a", at, 2.0 if at == 3 else 1.0, entropy=float(at), entropys=None, old_log_probs=-torch.rand(4))
        for at in range(10)
    ]
    manager.save_trajectories_to_memory(rollouts)
    manager.update_difficulty2task_dict([make("a", at, float(at % 2)) for at in range(4)])
    came = Counter(int(one.rollout_id[2:]) for _ in range(100) for one in manager.get_offpolicy_batch(["a"], 1))
    assert came == {best: 100}


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([None, 1, 2])), max_size=8),
    st.randoms(use_true_random=False),
    st.sampled_from(["argmin", "argmax", "reward", "random"]),
    st.sampled_from(["any", "spread"]),
    st.booleans(),
    st.integers(0, 9),
)
def test_entropies_of_what_nothing_else_decides_choose_as_all_entropies_do(
    told: list[tuple[int, int | None]], random: Any, mode: Any, versions: Any, in_turns: bool, n: int
) -> None:
    rules = PoolRules(n_rollout=8, exp_select_mode=mode, policy_versions=versions, in_turns=in_turns)
    saved, current = ([float(one) for one in random.sample(range(100), len(told))] for _ in range(2))
    entries = [PoolEntry(at, "a", saved[at], 1.0, version, b"") for at, (_, version) in enumerate(told)]
    uses = [count for count, _ in told]
    scored = undecided(entries, n, rules, uses)
    some = [current[at] if at in scored else saved[at] for at in range(len(told))]
    by_all, by_some = (
        choose_histories(entries, n, rules, uses=uses, entropies=values, generator=np.random.default_rng(0))
        for values in (current, some)
    )
    assert set(by_all) == set(by_some)
    if mode in ("random", "reward") or n >= len(told):
        assert not scored, "outcome or chance decide, or all come out"


def test_the_policy_scores_only_histories_that_are_equal_in_uses(make: Make) -> None:
    """Two of five come: while all are new all are scored; then of the three that are left; then one is sure to come."""
    manager = pool(in_turns=True)
    manager.save_trajectories_to_memory([make(tokens=t, entropy=float(t)) for t in range(5)])
    asked: list[list[int]] = []

    def current(held: Any) -> list[float]:
        asked.append(sorted(int(one.input_ids[-1]) // 1000 for one in held))
        return [-float(one.input_ids[-1]) for one in held]

    manager.current_entropy = current
    assert [drawn(manager, 2) for _ in range(3)] == [[4, 3], [2, 1], [0, 4]]
    assert asked == [[0, 1, 2, 3, 4], [0, 1, 2], [1, 2, 3, 4]]
    assert len(drawn(manager, 5)) == 5
    assert len(asked) == 3, "all of them came"


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(0, 5)), max_size=10),
    st.sampled_from(["argmin", "argmax"]),
    st.integers(1, 10),
)
def test_in_turns_the_least_used_comes_first_then_the_best_by_entropy(
    told: list[tuple[int, float]], mode: Any, n: int
) -> None:
    entries = [PoolEntry(at, "a", entropy, 1.0, at, b"") for at, (_, entropy) in enumerate(told)]
    generator = np.random.default_rng(0)
    before = generator.bit_generator.state
    chosen = choose_histories(
        entries,
        n,
        PoolRules(n_rollout=8, exp_select_mode=mode, in_turns=True),
        uses=[uses for uses, _ in told],
        entropies=[entropy for _, entropy in told],
        generator=generator,
    )
    sign = 1 if mode == "argmin" else -1
    assert chosen == sorted(range(len(told)), key=lambda at: (told[at][0], sign * told[at][1], at))[:n]
    assert generator.bit_generator.state == before, "nothing was left to chance"


def test_at_random_every_order_is_as_likely_and_the_seed_decides(make: Make) -> None:
    def orders(seed: int, times: int) -> list[tuple[int, ...]]:
        manager = pool(exp_select_mode="random", seed=seed)
        manager.save_trajectories_to_memory([make(tokens=t) for t in range(3)])
        return [tuple(drawn(manager, 3)) for _ in range(times)]

    found = Counter(orders(1, 600))
    assert len(found) == 6
    assert fits(list(found.values()), [1] * 6)
    assert orders(7, 20) == orders(7, 20)


def test_by_reward_the_highest_outcome_comes_first_and_stays_in_a_full_task(make: Make) -> None:
    manager = pool(exp_select_mode="reward", max_trajectories_per_task=3)
    outcomes = [1.5, None, 1.0, 2.0, 1.0, 0.5]
    manager.save_trajectories_to_memory([make(tokens=t, outcome=outcome) for t, outcome in enumerate(outcomes)])
    assert manager.refused == {"not_better": 1}
    assert drawn(manager, 3) == [3, 0, 4], "of equal outcomes the newer one stayed"
    assert drawn(manager, 1) == [3]
    again = pool(exp_select_mode="reward", max_trajectories_per_task=3)
    kept = manager.task2trajectories["a"]
    again.save_trajectories_to_memory(kept)
    assert [one.rollout_id for one in again.task2trajectories["a"]] == [one.rollout_id for one in kept]


@pytest.mark.parametrize(("mode", "first"), [("argmin", 1), ("argmax", 0), ("reward", 2)])
def test_a_limit_of_uses_leaves_what_is_best_as_it_is(make: Make, mode: Any, first: int) -> None:
    manager = pool(exp_select_mode=mode, in_turns=True, max_uses=2, use_current_policy_entropy=False)
    told = [(9.0, 1.0), (1.0, 1.0), (5.0, 3.0)]
    manager.save_trajectories_to_memory(
        [make(tokens=t, entropy=entropy, outcome=outcome) for t, (entropy, outcome) in enumerate(told)]
    )
    assert drawn(manager) == [first]


def test_policy_versions_spread_over_the_batch(make: Make) -> None:
    manager = pool(policy_versions="spread")
    versions = {"a": [1, 1, 2, 3], "b": [1, 2, 2, None], "c": [1, 1, 1, 1]}
    for task, held in versions.items():
        rollouts = [make(task, tokens=t, policy_version=version) for t, version in enumerate(held)]
        manager.save_trajectories_to_memory(rollouts)
    assert Counter(one.policy_version for one in manager.get_offpolicy_batch(["a"], 3)) == {1: 1, 2: 1, 3: 1}
    again = pool(policy_versions="spread")
    again.load_state_dict(manager.state_dict())
    one_each = again.get_offpolicy_batch(["c", "b", "a"], 1)
    assert one_each[0].policy_version == 1
    assert len({one.policy_version for one in one_each}) == 3, "one history of each task, and no version twice"
    two_each = again.get_offpolicy_batch(["a", "b"], 2)
    assert len({one.policy_version for one in two_each}) >= 3


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from([None, 1, 2, 3]), min_size=1, max_size=8),
    st.integers(1, 8),
    st.sampled_from([{}, {"in_turns": True}, {"exp_select_mode": "random"}]),
)
def test_spread_counts_differ_by_one_at_most_where_there_are_enough(
    versions: list[int | None], n: int, rules: Any
) -> None:
    entries = [PoolEntry(at, "a", 1.0, 1.0, version, b"") for at, version in enumerate(versions)]
    chosen = choose_histories(
        entries,
        n,
        PoolRules(n_rollout=9, policy_versions="spread", **rules),
        uses=[0] * len(entries),
        entropies=[1.0] * len(entries),
        generator=np.random.default_rng(0),
    )
    assert len(set(chosen)) == len(chosen) == min(n, len(entries))
    counts = Counter(versions[at] for at in chosen)
    for version, there in Counter(versions).items():
        assert counts[version] >= min(there, max(counts.values()) - 1)


@pytest.mark.parametrize(
    "rules", [{"max_uses": 2}, {"in_turns": True, "max_uses": 2}, {"exp_select_mode": "random", "max_uses": 2}]
)
def test_a_task_whose_histories_are_used_up_is_no_longer_drawn(make: Make, rules: dict[str, Any]) -> None:
    manager = pool(**rules)
    rollouts = [make(tokens=t, outcome=float(t < 3)) for t in range(8)]
    manager.admit(rollouts)
    seen = Counter[int]()
    while manager.get_valid_replay_task_ids():
        seen.update(drawn(manager, 2))
    assert seen == {0: 2, 1: 2, 2: 2}
    assert drawn(manager, 2) == []
    assert "max_uses = 2" in manager.why_nothing()
    other = pool(**rules)
    other.load_state_dict(manager.state_dict())
    assert other.get_valid_replay_task_ids() == []


def test_a_history_that_left_the_pool_and_came_again_begins_anew(make: Make, tmp_path: Path) -> None:
    """Whether the run went on, went back to a cut, or crashed: uses do not outlive the entry."""
    store = BufferStore.open(tmp_path)
    manager = ExperienceManager(PoolRules(n_rollout=8, in_turns=True, max_uses=2), store=store)
    partly, solved = ([make(tokens=t, outcome=float(t < most)) for t in range(8)] for most in (1, 8))
    manager.admit(partly)
    assert [drawn(manager), drawn(manager), drawn(manager)] == [[0], [0], []]
    manager.admit(solved)
    cut = manager.state_dict()
    manager.flush()
    crashed = ExperienceManager(manager.rules, store=store)
    manager.admit(partly)
    resumed = ExperienceManager(manager.rules)
    resumed.load_state_dict(cut)
    for other in (resumed, crashed):
        other.admit(partly)
    for one in (manager, resumed, crashed):
        assert [drawn(one), drawn(one), drawn(one)] == [[0], [0], []]
    store.close()


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"max_uses": 0}, "max_uses: 0, must be at least 1"),
        ({"in_turns": "often"}, "in_turns: 'often' is a str, must be true or false"),
        ({"policy_versions": "all"}, "policy_versions: 'all', must be one of 'any', 'spread'"),
    ],
)
def test_choices_that_make_no_sense_are_refused(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PoolRules(n_rollout=4, **rules)
    with pytest.raises(ConfigurationError, match=message):
        ExperienceReplayConfig.from_mapping(rules)


def test_what_does_not_come_out_is_not_read(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that cannot be read leaves the pool, and the next best comes in its place."""
    with closing(BufferStore.open(tmp_path / "pool")) as store:
        manager = ExperienceManager(
            PoolRules(n_rollout=8, max_trajectories_per_task=9),
            store=store,
        )
        rollouts = [make(task, at, 1.0, entropy=float(at)) for task in "ab" for at in range(6)]
        manager.save_trajectories_to_memory(rollouts)
        manager.update_difficulty2task_dict([make(task, at, float(at % 2)) for task in "ab" for at in range(4)])
        honest, read = BufferStore.get, list[str]()

        def get(self: BufferStore, number: int) -> AgentTrajectory:
            found = honest(self, number)
            read.append(found.rollout_id)
            if found.rollout_id == "a/1":
                raise TrajectoryUnavailableError("gone")
            return found

        monkeypatch.setattr(BufferStore, "get", get)
        came = [one.rollout_id for one in manager.get_offpolicy_batch(["a", "b"], 2)]
        assert came == ["a/0", "a/2", "b/0", "b/1"]
        assert len(read) <= 6
        assert manager.count_offpolicy(["a"], 9) == {"a": 5}
