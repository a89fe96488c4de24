from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore.errors import ConfigurationError
from trajstore.experience import ExperienceManager
from trajstore.experience.entry import Refusal, entry_of, mean_entropy, token_digest
from trajstore.experience.outcomes import TaskOutcome
from trajstore.experience.rules import PoolRules
from trajstore.experience.selection import choose_to_save, in_bounds
from trajstore.trajectory import AgentTrajectory

Make = Callable[..., AgentTrajectory]


def rules(**values: object) -> PoolRules:
    return PoolRules(**({"n_rollout": 8} | values))  # type: ignore[arg-type]


def test_mean_entropy_is_over_the_models_tokens_only() -> None:
    values = torch.tensor([1.0, math.nan, 3.0, 100.0])
    assert mean_entropy(values, torch.tensor([1, 0, 1, 0])) == 2.0
    assert mean_entropy(values.bfloat16(), torch.tensor([True, False, True, False])) == 2.0


def test_mean_entropy_of_nothing_is_unknown_and_not_zero() -> None:
    assert mean_entropy(torch.ones(3), torch.zeros(3)) is None
    assert mean_entropy(torch.ones(0), torch.ones(0)) is None
    assert mean_entropy(torch.tensor([math.nan]), torch.ones(1)) is None


def test_messages_tell_apart_what_has_no_tokens(make: Make) -> None:
    bare = {"input_ids": None, "loss_mask": None, "attention_mask": None, "response_start": None}
    assert entry_of(make(**bare), 0) is Refusal.NO_TOKENS
    assert token_digest(make(tokens=1, **bare)) != token_digest(make(tokens=2, **bare))
    assert token_digest(make(tokens=1, **bare)) == token_digest(make(tokens=1, **bare, rollout_id="other"))
    assert token_digest(make(tokens=1, **bare)) != token_digest(make(tokens=1, **bare, old_log_probs=torch.zeros(4)))


@pytest.mark.parametrize(
    ("low", "high", "allowed"), [(0, 8, range(1, 8)), (None, 8, range(8)), (2, None, range(3, 9)), (3, 5, [4])]
)
def test_bounds_are_exclusive(low: int | None, high: int | None, allowed: list[int]) -> None:
    checked = rules(n_rollout=9, experience_lbound=low, experience_rbound=high)
    assert [n for n in range(9) if in_bounds(TaskOutcome(9, 9, n), checked)] == list(allowed)


def test_save_filter(make: Make) -> None:
    outcomes_entropies = [(0.0, 0.1), (0.5, 0.9), (1.0, 0.4), (None, 0.0)]
    rollouts = [make(tokens=i, outcome=o, entropy=e) for i, (o, e) in enumerate(outcomes_entropies)]
    rng = np.random.default_rng(0)

    def kept(**values: object) -> list[int]:
        return [int(one.rollout_id[2:]) for one in choose_to_save(rollouts, rules(**values), rng)]

    assert kept() == [2]
    assert kept(success_threshold=0.5) == [1, 2]
    assert kept(save_filter="positive") == [1, 2], "on request failures with partial rewards are replayed"
    half = {"success_threshold": 0.5, "save_filter": "best"}
    assert kept(**half) == [2]
    assert kept(**half, exp_select_mode="argmax") == [1]
    assert {kept(**half, exp_select_mode="random")[0] for _ in range(40)} == {1, 2}
    assert choose_to_save(rollouts[:1], rules(save_filter="best"), rng) == []


def reference(entropies: list[tuple[int, float]], mode: str, most: int) -> list[int]:
    """The full-task policy spelled out on (tokens, entropy) pairs; returns the places of those kept."""
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


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.sampled_from([0.5, 1.0, 1.5, 2.0])), max_size=12),
    st.sampled_from(["argmin", "argmax", "random"]),
    st.integers(1, 4),
    st.integers(0, 12),
)
def test_a_full_task_keeps_what_the_plain_reference_keeps(
    make: Make, arrivals: list[tuple[int, float]], mode: str, most: int, cut: int
) -> None:
    manager = ExperienceManager(rules(exp_select_mode=mode, max_trajectories_per_task=most))
    rollouts = [make(tokens=t, entropy=e, rollout_id=str(place)) for place, (t, e) in enumerate(arrivals)]
    for part in (rollouts[:cut], rollouts[cut:]):
        manager.save_trajectories_to_memory(part)
    places = [int(one.rollout_id) for one in manager.task2trajectories.get("a", ())]
    assert places == reference(arrivals, mode, most)
    assert manager.refused.total() + manager.left.total() + len(places) == len(arrivals)


def test_rules_report_every_problem() -> None:
    with pytest.raises(ConfigurationError) as caught:
        rules(n_rollout=0, experience_lbound="8", save_filter="all", seed=-1, max_policy_age=True)
    for key in ("n_rollout", "experience_lbound", "save_filter", "seed", "max_policy_age"):
        assert f"{key}: " in str(caught.value)
    with pytest.raises(ConfigurationError, match="experience_lbound: 8, must be below experience_rbound = 8"):
        rules(experience_lbound=8, experience_rbound=8)
