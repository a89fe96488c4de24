"""Why a rollout is refused: each case lacks one thing, and every way into a pool names that thing."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.experience.conftest import build
from trajstore import TrajectoryReplayBuffer
from trajstore.experience import BufferStore, ExperienceManager, PoolRules, Refusal, persistence
from trajstore.experience.entry import DEMONSTRATION
from trajstore.experience.exchange import import_pool
from trajstore.trajectory import AgentTrajectory

RULES = PoolRules(n_rollout=4)
LOG_PROBS = torch.tensor([-0.5, -9.0, -0.25, -1.0])
NOBODY = torch.zeros(6, dtype=torch.int64)
DEMONSTRATED: dict[str, Any] = {"metadata": {DEMONSTRATION: True}, "old_log_probs": None, "entropys": None}

ENTERS: dict[str, dict[str, Any]] = {
    "whole": {},
    "without entropys": {"entropys": None},
    "entropys not finite": {"entropys": torch.full((4,), math.nan)},
    "ids unknown": {"input_ids": None},
    "log-prob of the environment's token not finite": {"old_log_probs": torch.tensor([-0.5, math.nan, -0.25, -1.0])},
}
REFUSED: dict[str, tuple[dict[str, Any], Refusal]] = {
    "no mask": ({"loss_mask": None, "response_mask": None}, Refusal.NO_RESPONSE_MASK),
    "no mask, no entropys": ({"loss_mask": None, "response_mask": None, "entropys": None}, Refusal.NO_RESPONSE_MASK),
    "loss_mask without its place": ({"response_mask": None, "response_start": None}, Refusal.NO_RESPONSE_MASK),
    "nobody's tokens": ({"loss_mask": NOBODY, "response_mask": NOBODY[2:]}, Refusal.NO_LLM_TOKEN),
    "nobody's, no entropys": ({"loss_mask": NOBODY, "entropys": None}, Refusal.NO_LLM_TOKEN),
    "no log-probs": ({"old_log_probs": None}, Refusal.LOG_PROBS_MISMATCH),
    "log-probs not finite": ({"old_log_probs": LOG_PROBS * math.nan}, Refusal.LOG_PROBS_MISMATCH),
    "the same, no entropys": ({"old_log_probs": LOG_PROBS * math.nan, "entropys": None}, Refusal.LOG_PROBS_MISMATCH),
    "an impossible token": ({"old_log_probs": torch.tensor([-0.5, -1, -math.inf, -1])}, Refusal.LOG_PROBS_MISMATCH),
    "log-probs above 0": ({"old_log_probs": -LOG_PROBS}, Refusal.LOG_PROBS_ABOVE_ZERO),
    "the same without entropys": ({"old_log_probs": -LOG_PROBS, "entropys": None}, Refusal.LOG_PROBS_ABOVE_ZERO),
    "neither": ({"old_log_probs": None, "entropys": None}, Refusal.NO_ENTROPY),
    "neither, entropys not finite": (
        {"old_log_probs": None, "entropys": torch.full((4,), math.nan)},
        Refusal.NO_ENTROPY,
    ),
    "demonstration without ids": ({**DEMONSTRATED, "input_ids": None}, Refusal.NO_TOKENS),
    "demonstration without mask": (
        {**DEMONSTRATED, "loss_mask": None, "response_mask": None},
        Refusal.NO_RESPONSE_MASK,
    ),
    "demonstration, nobody's tokens": ({**DEMONSTRATED, "loss_mask": NOBODY}, Refusal.NO_LLM_TOKEN),
}
NOT_STORABLE: dict[str, tuple[dict[str, Any], Refusal]] = {
    "too few log-probs": ({"old_log_probs": LOG_PROBS[:3]}, Refusal.LOG_PROBS_MISMATCH),
    "the same, without entropys": ({"old_log_probs": LOG_PROBS[:3], "entropys": None}, Refusal.LOG_PROBS_MISMATCH),
    "mask of another length": ({"response_mask": torch.ones(5, dtype=torch.int64)}, Refusal.LOG_PROBS_MISMATCH),
    "too few ids": ({"input_ids": torch.arange(3)}, Refusal.LOG_PROBS_MISMATCH),
}
"""What a store of rollouts does not take, so that it comes by no import from one."""


def rollout(**fields: Any) -> AgentTrajectory:
    return build("a", 1, **{"entropys": torch.tensor([1.0, 2.0, 3.0, 4.0]), "entropy": None, **fields})


def with_a_failure(one: AgentTrajectory) -> list[AgentTrajectory]:
    """Return a rollout in a step that does not solve its task."""
    return [one, build("a", 99, 0.0)]


def in_memory(manager: ExperienceManager) -> dict[str, int]:
    assert len(manager) + manager.refused.total() == 1
    return dict(manager.refused)


def by_admit(one: AgentTrajectory, folder: Path) -> dict[str, int]:
    manager = ExperienceManager(RULES)
    offered, refused = manager.admit(with_a_failure(one))
    assert (offered, refused) == (1, manager.refused.total())
    return in_memory(manager)


def by_admit_of_the_best(one: AgentTrajectory, folder: Path) -> dict[str, int]:
    manager = ExperienceManager(PoolRules(n_rollout=4, save_filter="best"))
    manager.admit(with_a_failure(one))
    return in_memory(manager)


def by_admit_to_a_store(one: AgentTrajectory, folder: Path) -> dict[str, int]:
    store = BufferStore.open(folder / "pool")
    try:
        manager = ExperienceManager(RULES, store=store)
        manager.admit(with_a_failure(one))
        return in_memory(manager)
    finally:
        store.close()


def by_saving(one: AgentTrajectory, folder: Path) -> dict[str, int]:
    manager = ExperienceManager(RULES)
    manager.save_trajectories_to_memory([one])
    return in_memory(manager)


def by_seed(one: AgentTrajectory, folder: Path) -> dict[str, int]:
    manager = ExperienceManager(RULES)
    assert manager.seed([one]) == manager.refused
    return in_memory(manager)


def by_import_of_files(one: AgentTrajectory, folder: Path) -> dict[str, int]:
    persistence.write_pool(folder / "files", persistence.PoolContents({1: ["a"]}, [], {"a": [one]}))
    done = import_pool(folder / "pool", folder / "files", RULES)
    assert done.entered + done.refused.total() == 1
    return dict(done.refused)


def by_import_of_rollouts(one: AgentTrajectory, folder: Path) -> dict[str, int]:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(folder / "rollouts")) as buffer:
        buffer.add_trajectories(with_a_failure(one))
    done = import_pool(folder / "pool", folder / "rollouts", RULES)
    assert done.entered + done.refused.total() == 1
    return dict(done.refused)


WAYS: dict[str, Callable[[AgentTrajectory, Path], dict[str, int]]] = {
    "admit": by_admit,
    "admit, the best": by_admit_of_the_best,
    "admit to a store": by_admit_to_a_store,
    "save": by_saving,
    "seed": by_seed,
    "import of files": by_import_of_files,
    "import of rollouts": by_import_of_rollouts,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", [*REFUSED, *NOT_STORABLE])
def test_every_way_in_names_what_is_lacking(case: str, way: str, tmp_path: Path) -> None:
    if case in NOT_STORABLE and way == "import of rollouts":
        return
    fields, reason = (REFUSED | NOT_STORABLE)[case]
    assert WAYS[way](rollout(**fields), tmp_path) == {reason.value: 1}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ENTERS)
def test_what_lacks_nothing_that_is_needed_enters_by_every_way(case: str, way: str, tmp_path: Path) -> None:
    assert WAYS[way](rollout(**ENTERS[case]), tmp_path) == {}


@pytest.mark.parametrize("way", WAYS)
def test_a_demonstration_is_no_rollout_of_a_step(way: str, tmp_path: Path) -> None:
    by_itself = way in ("save", "seed", "import of files")
    assert WAYS[way](rollout(**DEMONSTRATED), tmp_path) == ({} if by_itself else {"no_entropy": 1})


@pytest.mark.parametrize(
    ("outcome", "reason"), [(None, "no_outcome"), (math.nan, "outcome_not_finite"), (math.inf, "outcome_not_finite")]
)
@pytest.mark.parametrize("way", ["admit", "admit, the best", "admit to a store", "seed"])
def test_an_outcome_that_says_nothing_is_named(way: str, outcome: float | None, reason: str, tmp_path: Path) -> None:
    assert WAYS[way](rollout(outcome=outcome), tmp_path) == {reason: 1}
    assert WAYS[way](rollout(outcome=outcome, loss_mask=NOBODY), tmp_path / "nobody") == {reason: 1}


def test_no_outcome_is_named_by_an_import(tmp_path: Path) -> None:
    assert by_import_of_rollouts(rollout(outcome=None), tmp_path) == {"no_outcome": 1}


def test_what_the_pool_holds_already_is_named_last() -> None:
    manager = ExperienceManager(PoolRules(n_rollout=4, max_trajectories_per_task=1))
    manager.admit(with_a_failure(rollout()))
    manager.admit(with_a_failure(rollout()))
    assert manager.refused == {"duplicate": 1}
    manager.admit(with_a_failure(rollout(loss_mask=NOBODY)))
    manager.admit(with_a_failure(build("a", 2, entropy=9.0)))
    assert manager.refused == {"duplicate": 1, "no_llm_token": 1, "not_better": 1}
    assert manager.seed([build("a", 3, 0.0)]) == {"not_worth_keeping": 1}


def test_the_best_is_the_best_of_those_that_can_be_replayed() -> None:
    manager = ExperienceManager(PoolRules(n_rollout=4, save_filter="best"))
    broken = build("a", 1, entropy=0.1, old_log_probs=-LOG_PROBS)
    offered = manager.admit([broken, build("a", 2, entropy=0.5), build("a", 3, entropy=0.9), build("a", 4, 0.0)])
    assert offered == (2, 1)
    assert manager.refused == {"log_probs_above_zero": 1}
    assert [one.rollout_id for one in manager.task2trajectories["a"]] == ["a/2"]


def test_the_entropy_that_an_entry_was_given_is_stored_with_it(tmp_path: Path) -> None:
    store = BufferStore.open(tmp_path / "pool")
    try:
        manager = ExperienceManager(RULES, store=store)
        given = rollout()
        manager.save_trajectories_to_memory([given, build("a", 2, entropy=math.nan)])
        manager.flush()
        assert given.entropy is None, "what was handed in stays as it is"
    finally:
        store.close()
    again = BufferStore.open(tmp_path / "pool")
    try:
        held = ExperienceManager(RULES, store=again).task2trajectories["a"]
        assert [one.entropy for one in held] == [pytest.approx(8 / 3), pytest.approx(1.75 / 3)]
    finally:
        again.close()
