"""Refused rollouts: each case lacks one thing, and every way into a pool names it."""

from __future__ import annotations

import contextlib
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.replay.conftest import build
from trainer_hooks.replay import BufferStore, ExperienceManager, PoolRules, Refusal, persistence
from trainer_hooks.replay.entry import DEMONSTRATION
from trainer_hooks.replay.exchange import seed_pool
from trajstore import TrajectoryReplayBuffer
from trajstore.errors import ConfigurationError, InvalidTrajectoryError
from trajstore.interop.rollouts import row_of
from trajstore.trajectory import AgentTrajectory, Reward

RULES = PoolRules(n_rollout=4)
LOG_PROBS = torch.tensor([-0.5, -9.0, -0.25, -1.0])
NO_MODEL = torch.zeros(6, dtype=torch.int64)
DEMONSTRATED: dict[str, Any] = {"metadata": {DEMONSTRATION: True}, "old_log_probs": None, "entropys": None}

ENTERS: dict[str, dict[str, Any]] = {
    "whole": {},
    "without entropys": {"entropys": None},
    "entropys not finite": {"entropys": torch.full((4,), math.nan)},
    "log-prob of the environment's token not finite": {"old_log_probs": torch.tensor([-0.5, math.nan, -0.25, -1.0])},
    "rounded to above 0, the environment's far above": {"old_log_probs": torch.tensor([-0.5, 9.0, 1e-6, 0.0])},
}
DOCUMENTED: dict[str, Any] = {
    case: {
        "old_log_probs": None,
        "entropys": None,
        "policy_version": None,
        "metadata": {"old_log_probs": log_probs, "policy_version": 3, "entropy": 0.25, "note": "kept"},
    }
    for case, log_probs in {
        "in metadata": LOG_PROBS.tolist(),
        "in metadata, an array": LOG_PROBS.numpy(),
        "in metadata, of the model's tokens": LOG_PROBS[[0, 2, 3]].tolist(),
    }.items()
}
"""Where documents 001 and 002 keep log-probs, policy version and mean entropy."""
ENTERS |= DOCUMENTED
REFUSED: dict[str, tuple[dict[str, Any], Refusal]] = {
    "no mask": ({"loss_mask": None, "response_mask": None}, Refusal.NO_RESPONSE_MASK),
    "loss_mask without its place": ({"response_mask": None, "response_start": None}, Refusal.NO_RESPONSE_MASK),
    "no model tokens": ({"loss_mask": NO_MODEL, "response_mask": NO_MODEL[2:]}, Refusal.NO_LLM_TOKEN),
    "no model tokens, no entropys": ({"loss_mask": NO_MODEL, "entropys": None}, Refusal.NO_LLM_TOKEN),
    "no log-probs": ({"old_log_probs": None}, Refusal.LOG_PROBS_MISMATCH),
    "no log-probs in metadata": (
        {"old_log_probs": None, "metadata": {"old_log_probs": "?"}},
        Refusal.LOG_PROBS_MISMATCH,
    ),
    "log-probs not finite": ({"old_log_probs": LOG_PROBS * math.nan}, Refusal.LOG_PROBS_MISMATCH),
    "an impossible token": ({"old_log_probs": torch.tensor([-0.5, -1, -math.inf, -1])}, Refusal.LOG_PROBS_MISMATCH),
    "log-probs above 0": ({"old_log_probs": -LOG_PROBS}, Refusal.LOG_PROBS_ABOVE_ZERO),
    "neither": ({"old_log_probs": None, "entropys": None}, Refusal.NO_ENTROPY),
    "neither, entropys not finite": (
        {"old_log_probs": None, "entropys": torch.full((4,), math.nan)},
        Refusal.NO_ENTROPY,
    ),
    "ids unknown": ({"input_ids": None}, Refusal.NO_TOKENS),
    "demonstration without ids": ({**DEMONSTRATED, "input_ids": None}, Refusal.NO_TOKENS),
    "demonstration without mask": (
        {**DEMONSTRATED, "loss_mask": None, "response_mask": None},
        Refusal.NO_RESPONSE_MASK,
    ),
    "demonstration, no model tokens": ({**DEMONSTRATED, "loss_mask": NO_MODEL}, Refusal.NO_LLM_TOKEN),
}
NOT_STORABLE: dict[str, tuple[dict[str, Any], Refusal]] = {
    "too few log-probs": ({"old_log_probs": LOG_PROBS[:3]}, Refusal.LOG_PROBS_MISMATCH),
    "mask of another length": ({"response_mask": torch.ones(5, dtype=torch.int64)}, Refusal.LOG_PROBS_MISMATCH),
    "too few ids": ({"input_ids": torch.arange(3)}, Refusal.LOG_PROBS_MISMATCH),
}
"""Rollouts that a store refuses, so they cannot be imported from one."""
ENTROPYS = torch.tensor([1.0, 2.0, 3.0, 4.0])
NOT_STORABLE |= {
    case: (fields, Refusal.MALFORMED)
    for case, fields in {
        "too few entropys": {"entropys": ENTROPYS[:3]},
        "too many entropys": {"entropys": torch.ones(9)},
        "entropys of two dimensions": {"entropys": ENTROPYS[None]},
        "an entropy without dimension": {"entropys": torch.tensor(1.0)},
        "complex entropys": {"entropys": ENTROPYS * 1j},
        "too short an attention_mask": {"attention_mask": torch.ones(3, dtype=torch.int64)},
        "attention_mask with NaN": {"attention_mask": torch.full((6,), math.nan)},
        "too many rollout_log_probs": {"rollout_log_probs": -torch.ones(7)},
        "loss_mask of two dimensions": {"loss_mask": torch.ones(1, 6, dtype=torch.int64)},
        "ids with a fraction": {"input_ids": torch.arange(6.0) + 0.5},
        "response_start below 0": {"response_start": -2},
        "response_start beyond the tokens": {"response_start": 7},
        "policy_version of more than 64 bits": {"policy_version": 10**30},
        "entropy that no float reaches": {"entropy": 10**400},
        "metadata with NaN": {"metadata": {"score": math.nan}},
        "half a character": {"messages": [{"role": "user", "content": "\ud800"}]},
        "a message that is none": {"messages": [None]},
        "is_terminated that is a text": {"is_terminated": "yes"},
        "demonstration with too many entropys": {**DEMONSTRATED, "entropys": torch.ones(5)},
        "success_rate that is NaN": {"reward": Reward(outcome=1.0, success_rate=math.nan)},
    }.items()
}
NOT_STORABLE |= {
    "neither, entropy NaN": ({"old_log_probs": None, "entropys": None, "entropy": math.nan}, Refusal.NO_ENTROPY),
    "too many ids": ({"input_ids": torch.arange(9)}, Refusal.LOG_PROBS_MISMATCH),
    "log-probs without any": ({"old_log_probs": torch.ones(0)}, Refusal.LOG_PROBS_MISMATCH),
}
STORABLE: dict[str, tuple[dict[str, Any], Refusal]] = {
    case: (fields, Refusal.MALFORMED)
    for case, fields in {
        "whole log-probs": {"old_log_probs": -torch.ones(4, dtype=torch.int64)},
        "log-probs that are true or false": {"old_log_probs": torch.zeros(4, dtype=torch.bool)},
        "whole entropys": {"entropys": torch.ones(4, dtype=torch.int64)},
        "rollout_log_probs that are true or false": {"rollout_log_probs": torch.zeros(4, dtype=torch.bool)},
        "ids that are true or false": {"input_ids": torch.ones(6, dtype=torch.bool)},
        "rows that are none": {"metadata": {"rows": 3}},
        "rows of other tokens": {"metadata": {"rows": [{"tokens": 9, "prompt": 2}]}},
    }.items()
}
"""Rollouts that a store accepts and a pool refuses."""
ALL_REFUSED = REFUSED | NOT_STORABLE | STORABLE


def rollout(**fields: Any) -> AgentTrajectory:
    return build("a", 1, **{"entropys": torch.tensor([1.0, 2.0, 3.0, 4.0]), "entropy": None, **fields})


def with_a_failure(one: AgentTrajectory) -> list[AgentTrajectory]:
    """Return a rollout and a failed sibling, so that the task is not solved."""
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
    with contextlib.closing(BufferStore.open(folder / "pool")) as store:
        manager = ExperienceManager(RULES, store=store)
        manager.admit(with_a_failure(one))
        return in_memory(manager)


def by_seed(one: AgentTrajectory, folder: Path) -> dict[str, int]:
    manager = ExperienceManager(RULES)
    assert manager.seed([one]) == manager.refused
    return in_memory(manager)


def by_import_of_files(one: AgentTrajectory, folder: Path) -> dict[str, int]:
    beside = rollout(task_id="b")  # a pool without any tokens is refused as a whole
    persistence.write_pool(folder / "files", persistence.PoolContents({1: ["a"]}, [], {"a": [one], "b": [beside]}))
    done = seed_pool(folder / "pool", folder / "files", RULES)
    assert done.entered + done.refused.total() == 2
    return dict(done.refused)


def by_import_of_rollouts(one: AgentTrajectory, folder: Path) -> dict[str, int]:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(folder / "rollouts")) as buffer:
        buffer.add_trajectories(with_a_failure(one))
    done = seed_pool(folder / "pool", folder / "rollouts", RULES)
    assert done.entered + done.refused.total() == 1
    return dict(done.refused)


WAYS: dict[str, Callable[[AgentTrajectory, Path], dict[str, int]]] = {
    "admit": by_admit,
    "admit, the best": by_admit_of_the_best,
    "admit to a store": by_admit_to_a_store,
    "seed": by_seed,
    "import of files": by_import_of_files,
    "import of rollouts": by_import_of_rollouts,
}


EVERY_CASE = ("admit", "import of files")
CASE_OF = {reason: case for case, (_, reason) in reversed((REFUSED | STORABLE).items())}
"""A case that every way can take, by reason; the ways of ``EVERY_CASE`` take all cases."""


@pytest.mark.parametrize(
    ("case", "way"),
    [
        *((case, way) for way in EVERY_CASE for case in ALL_REFUSED),
        *((case, way) for way in WAYS if way not in EVERY_CASE for case in CASE_OF.values()),
    ],
)
def test_every_way_in_names_what_is_lacking(case: str, way: str, tmp_path: Path) -> None:
    fields, reason = ALL_REFUSED[case]
    assert WAYS[way](rollout(**fields), tmp_path) == {reason.value: 1}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ENTERS)
def test_what_lacks_nothing_that_is_needed_enters_by_every_way(case: str, way: str, tmp_path: Path) -> None:
    assert WAYS[way](rollout(**ENTERS[case]), tmp_path) == {}


@pytest.mark.parametrize("case", DOCUMENTED)
def test_what_metadata_held_is_replayed_from_the_fields(case: str) -> None:
    manager, one = ExperienceManager(RULES), rollout(**DOCUMENTED[case])
    assert manager.admit(with_a_failure(one)) == (1, 0)
    [held] = manager.task2trajectories["a"]
    assert held.old_log_probs is not None
    assert held.old_log_probs[[0, 2, 3]].equal(LOG_PROBS[[0, 2, 3]])
    assert (held.policy_version, held.entropy, held.metadata) == (3, 0.25, {"note": "kept"})
    assert "old_log_probs" in one.metadata, "the given trajectory is unchanged"


@pytest.mark.parametrize("way", WAYS)
def test_a_demonstration_is_no_rollout_of_a_step(way: str, tmp_path: Path) -> None:
    by_itself = way in ("seed", "import of files", "import of rollouts")
    assert WAYS[way](rollout(**DEMONSTRATED), tmp_path) == ({} if by_itself else {"no_entropy": 1})


@pytest.mark.parametrize(
    ("outcome", "reason"), [(None, "no_outcome"), (math.nan, "outcome_not_finite"), (math.inf, "outcome_not_finite")]
)
@pytest.mark.parametrize("way", ["admit", "admit, the best", "admit to a store", "seed"])
def test_an_outcome_that_says_nothing_is_named(way: str, outcome: float | None, reason: str, tmp_path: Path) -> None:
    assert WAYS[way](rollout(outcome=outcome), tmp_path) == {reason: 1}
    assert WAYS[way](rollout(outcome=outcome, loss_mask=NO_MODEL), tmp_path / "empty") == {reason: 1}


@pytest.mark.parametrize("outcome", [math.nan, -math.inf, 10**400])
def test_an_outcome_that_is_no_number_never_enters(outcome: float, tmp_path: Path) -> None:
    assert WAYS["import of files"](rollout(outcome=outcome), tmp_path) == {"outcome_not_finite": 1}


def test_no_outcome_is_named_by_an_import(tmp_path: Path) -> None:
    assert by_import_of_rollouts(rollout(outcome=None), tmp_path) == {"no_outcome": 1}


@contextlib.contextmanager
def managers(folder: Path, **options: Any) -> Iterator[list[ExperienceManager]]:
    """Yield a pool in memory and one on disk."""
    with contextlib.closing(BufferStore.open(folder / "pool")) as store:
        yield [ExperienceManager(RULES, **options), ExperienceManager(RULES, store=store, **options)]


MALFORMED = [case for case, (_, reason) in ALL_REFUSED.items() if reason is Refusal.MALFORMED]


def test_a_malformed_rollout_neither_hides_nor_blocks_its_neighbours(tmp_path: Path) -> None:
    broken = [rollout(**ALL_REFUSED[case][0], rollout_id=case) for case in MALFORMED]
    neighbours = [build("a", 50), build("a", 51, 0.0), build("b", 52), build("b", 53, 0.0)]
    with managers(tmp_path) as both:
        for manager in both:
            offered, refused = manager.admit([*broken, *neighbours])
            assert (offered, refused) == (len(broken) + 2, len(broken))
            assert manager.refused == {"malformed": len(broken)}
            assert {history.rollout_id for held in manager.task2trajectories.values() for history in held} == {
                "a/50",
                "b/52",
            }
            assert manager.difficulty2task_dict == {3: ("a",), 2: ("b",)}
            assert manager.seed([*broken, build("b", 55)]) == {"malformed": len(broken)}
            assert len(manager) == 3
            assert manager.refused == {"malformed": 2 * len(broken)}


UNREADABLE: dict[str, Any] = {
    "a list for metadata": {"metadata": [1]},
    "a reward that is a number": {"reward": 1},
    "an outcome that is a text": {"reward": {"outcome": "x"}},
    "rows of several lengths": {"entropys": [[1.0], [2.0, 3.0]]},
    "an unknown field": {"dtypes": {}},
    "ids that are a text": {"input_ids": "abc"},
    "ids of more than 64 bits": {"input_ids": [2**70] * 6},
    "a list for a name": {"rollout_id": [1]},
    "another task": {"task_id": "z"},
    "a number for a task": {"task_id": 3},
    "no dict": None,
}


@pytest.mark.parametrize("same_run", [True, False])
def test_a_trajectory_of_files_that_cannot_be_read_is_refused_by_itself(
    same_run: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = row_of(rollout(), {})
    persistence.write_pool(tmp_path / "files", persistence.PoolContents({1: ["a"]}, [], {}))
    several = [None if change is None else {**whole, **change} for change in UNREADABLE.values()]
    path = tmp_path / "files" / persistence.TRAJECTORIES_FILE
    path.write_bytes(pickle.dumps({"a": [*several, whole], "b": [{**whole, "task_id": "b"}]}))
    done = seed_pool(tmp_path / "pool", tmp_path / "files", RULES, same_run=same_run)
    assert (done.read, done.entered, done.tasks) == (len(several) + 2, 2, 2)
    assert done.refused == {"malformed": len(several)}
    assert f"{path}: task 'a' has a trajectory (1) that cannot be read" in caplog.text


def test_the_log_names_the_field_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with managers(tmp_path) as both:
        for manager in both:
            caplog.clear()
            several = [rollout(entropys=torch.ones(size), rollout_id=f"r{size}") for size in (2, 3, 5)]
            manager.admit(with_a_failure(several[0]) + several[1:])
            manager.admit(with_a_failure(rollout(input_ids=torch.ones(6), rollout_id="floats")))
            warnings = [record.getMessage() for record in caplog.records]
            assert len(warnings) == 2
            assert "rollout 'r2' of task 'a' is refused as malformed" in warnings[0]
            assert "field entropys: has 2 entries, but old_log_probs has 4" in warnings[0]
            assert "rollout 'floats'" in warnings[1]
            assert "field input_ids: float32, must be whole numbers" in warnings[1]


def test_a_step_of_another_tokenizer_changes_nothing(tmp_path: Path) -> None:
    with managers(tmp_path, tokenizer_fingerprint="ours") as both:
        for manager in both:
            with pytest.raises(ConfigurationError, match="tokenizer_fingerprint"):
                manager.admit([build("a", 1), *with_a_failure(rollout(tokenizer_fingerprint="other"))])
            with pytest.raises(InvalidTrajectoryError, match="task_id"):
                manager.admit([*with_a_failure(rollout()), rollout(task_id="")])
            with pytest.raises(InvalidTrajectoryError, match="task_id"):
                manager.seed([rollout(), rollout(task_id="")])
            assert (manager.difficulty2task_dict, len(manager), manager.refused) == ({}, 0, {})


def test_what_the_pool_holds_already_is_named_last() -> None:
    manager = ExperienceManager(PoolRules(n_rollout=4, max_trajectories_per_task=1))
    manager.admit(with_a_failure(rollout()))
    manager.admit(with_a_failure(rollout()))
    assert manager.refused == {"duplicate": 1}
    manager.admit(with_a_failure(rollout(loss_mask=NO_MODEL)))
    manager.admit(with_a_failure(build("a", 2, entropy=9.0)))
    assert manager.refused == {"duplicate": 1, "no_llm_token": 1, "not_better": 1}
    assert manager.seed([build("a", 3, 0.0)]) == {"not_worth_keeping": 1}


def test_the_best_is_the_best_of_those_that_can_be_replayed() -> None:
    manager = ExperienceManager(PoolRules(n_rollout=4, save_filter="best"))
    broken = build("a", 1, entropy=0.1, old_log_probs=-LOG_PROBS)
    offered = manager.admit([broken, build("a", 2, entropy=0.5), build("a", 3, entropy=0.9), build("a", 4, 0.0)])
    assert offered == (2, 1)
    assert manager.refused == {"log_probs_above_zero": 1}
    assert [history.rollout_id for history in manager.task2trajectories["a"]] == ["a/2"]


def test_the_entropy_that_an_entry_was_given_is_stored_with_it(tmp_path: Path) -> None:
    given = rollout()
    with contextlib.closing(BufferStore.open(tmp_path / "pool")) as store:
        ExperienceManager(RULES, store=store).seed([given, build("a", 2, entropy=math.nan)])
    assert given.entropy is None, "the given rollout is unchanged"
    with contextlib.closing(BufferStore.open(tmp_path / "pool")) as again:
        held = ExperienceManager(RULES, store=again).task2trajectories["a"]
        assert [history.entropy for history in held] == [pytest.approx(8 / 3), pytest.approx(1.75 / 3)]
