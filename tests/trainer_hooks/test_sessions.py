"""The rows of an agent session are one member of their GRPO group."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, get_args

import pytest
import torch

from tests.replay.conftest import build
from tests.support.sessions import Call, session_rows
from trainer_hooks.batch import BatchRow, build_batch
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.hook import ReplayHook
from trainer_hooks.integrations.rollouts import Recording
from trainer_hooks.losses import LossAggMode, aggregate_loss, het_compute_token_on_off_policy_loss
from trainer_hooks.plan import PlannedTask
from trainer_hooks.replay import BufferStore, ExperienceManager, PoolRules
from trainer_hooks.replay.exchange import seed_pool
from trainer_hooks.replay.rows import rows_of, whole_sessions
from trainer_hooks.steps import recompute, step_inputs
from trainer_hooks.trained import trained_step
from trajstore import TrajectoryReplayBuffer, annotate
from trajstore.errors import EmptyBufferError, InvalidTrajectoryError
from trajstore.ledger import Ledger
from trajstore.samplers import GroupSampler
from trajstore.trajectory import AgentTrajectory, Reward

BRANCHED: list[Call] = [(None, [7, 8], [1, 2, 3]), (0, [4], [5, 6]), (0, [9], [3]), (2, [1, 1], [2, 2])]
"""Two paths: calls 0 and 1; 0, 2 and 3."""

FORKED: list[Call] = [(None, [7, 8], [1]), (0, [4], [5]), (0, [5], [6]), (None, [7, 8, 8], [2, 3])]


def two_groups() -> list[AgentTrajectory]:
    """Return rollouts of two tasks, of which three are sessions of several rows; their rows are not neighbours."""
    one = session_rows(BRANCHED, 1.0, rollout_id="one")
    two = session_rows(FORKED, 0.0, rollout_id="two")
    other = session_rows(BRANCHED, 0.5, task_id="b", rollout_id="three")
    single = session_rows([(None, [7, 8], [4, 4])], 0.0, rollout_id="single")
    plain = [build("b", 1, 0.0), build("b", 2, 1.0), build("a", 3, 0.25)]
    return [two[2], *plain[:1], one[1], *other, two[0], *single, plain[1], one[0], plain[2], two[1]]


def same(one: AgentTrajectory, other: AgentTrajectory) -> bool:
    columns = ("input_ids", "loss_mask", "response_mask", "rollout_log_probs")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in columns) and (
        one.messages == other.messages and one.metadata == other.metadata and one.response_start == other.response_start
    )


def test_rows_of_a_session_become_one_rollout_and_come_back() -> None:
    rows = session_rows(FORKED, 1.0)
    for number, row in enumerate(rows):
        row.metadata |= {"tokens": number, "shared": [1]}  # "tokens" is also a key of the description
        row.notes = {"values": row.rollout_log_probs + 1}  # type: ignore[operator]
        row.policy_version, row.entropy = 5 - number, 0.1 * number
    (packed,) = whole_sessions([rows[2], rows[0], rows[1]])
    assert (packed.policy_version, packed.entropy, packed.metadata["shared"]) == (3, None, [1])
    assert whole_sessions([packed]) == [packed]
    back = rows_of(packed)
    assert all(map(same, back, rows))
    assert all(torch.equal(a.notes["values"], b.notes["values"]) for a, b in zip(back, rows, strict=True))
    assert all(map(same, rows_of(whole_sessions(back)[0]), rows)), "rows of a replayed session are whole again"
    plain = build("a")
    assert whole_sessions([plain]) == [plain]
    rows[1].policy_version = None
    assert whole_sessions(rows)[0].policy_version is None


@pytest.mark.parametrize("calls", [BRANCHED, FORKED])
def test_sessions_make_the_rows_that_these_tests_train_on(tmp_path: Path, calls: list[Call]) -> None:
    wanted = session_rows(calls, 1.0)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        session = buffer.session("a", "r")
        for number, (parent, prompt, sampled) in enumerate(calls):
            history = [] if parent is None else session.calls()[parent].tokens.tolist()
            log_probs = [-token / 1000 for token in sampled]
            about: dict[str, Any] = {"call_id": f"call {number}", "policy_version": 1}
            call = session.add_call([*history, *prompt], sampled, log_probs, **about)
            assert (call.parent and call.parent.number) == parent
        made = [buffer.get(number) for number in session.finish(Reward(outcome=1.0))]
    for row, other in zip(made, wanted, strict=True):
        about, by_hand = row.metadata["session"], other.metadata["session"]
        assert by_hand | {"id": session.id} == {
            **about,
            "calls": [{name: call[name] for name in by_hand["calls"][0]} for call in about["calls"]],
        }
        assert same(replace(row, messages=other.messages, metadata=other.metadata), other)  # type: ignore[type-var]
        assert (row.task_id, row.rollout_id, row.policy_version, row.reward) == ("a", "r", 1, Reward(outcome=1.0))


@pytest.mark.parametrize("foreign", ["abc", {"id": 3}, {"id": "x", "path": 2, "paths": 2}, {"id": "", "path": 0}])
def test_another_session_key_in_metadata_makes_no_session(foreign: Any) -> None:
    rollouts = [build("a", number, metadata={"session": foreign}) for number in range(2)]
    assert whole_sessions(rollouts) == rollouts


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda rows: rows[:2],
            r"session [0-9a-f]{32} of task 'a': has the paths \[0, 1\] here, must have each of its 3",
        ),
        (lambda rows: [*rows, rows[1]], r"paths \[0, 1, 1, 2\]"),
        (
            lambda rows: [*rows[:2], replace(rows[2], reward=Reward(outcome=0.0))],
            r"different rewards \(outcomes \[1.0, ",
        ),
    ],
)
def test_a_session_that_is_not_whole_is_named(damage: Any, message: str) -> None:
    rows = damage(session_rows(FORKED, 1.0))
    manager = ExperienceManager(PoolRules(n_rollout=4))
    hook: ReplayHook[str] = ReplayHook(ExperienceReplayConfig(), n_rollout=2, get_task=str)
    for call in (lambda: whole_sessions(rows), lambda: hook.batch_rows([PlannedTask("a", 1, ())], rows)):
        with pytest.raises(InvalidTrajectoryError, match=message):
            call()
    assert manager.difficulty2task_dict == {}
    neighbours = [build("a", 1), build("a", 2, 0.0)]
    worthy = [row for row in rows if row.reward == Reward(outcome=1.0)]
    assert manager.admit([*scored(rows), *neighbours]) == (len(worthy) + 1, len(worthy)), "its neighbours are kept"
    assert manager.refused == {"malformed": len(worthy)}


def advantages_by_hand(rows: Sequence[AgentTrajectory]) -> list[float]:
    """Return each row's advantage, counting sessions."""
    scores: dict[str, dict[object, float]] = {}
    for row in rows:
        assert row.reward is not None
        scores.setdefault(row.task_id, {})[row.rollout_id] = row.reward.outcome  # type: ignore[assignment]
    groups = {task: list(of_task.values()) for task, of_task in scores.items()}
    return [
        (scores[row.task_id][row.rollout_id] - mean(groups[row.task_id])) / (stdev(groups[row.task_id]) + 1e-6)
        for row in rows
    ]


RULES = PoolRules(n_rollout=4, max_trajectories_per_task=4)


def scored(rows: Sequence[AgentTrajectory]) -> list[AgentTrajectory]:
    """Return rows with the log-probs and entropies of the actor."""
    return [
        replace(row, old_log_probs=-torch.ones(len(row.response_mask)), entropys=torch.ones(len(row.response_mask)))  # type: ignore[arg-type]
        for row in rows
    ]


def test_the_pool_counts_keeps_and_draws_whole_sessions(tmp_path: Path) -> None:
    rows = scored(two_groups())
    judging = ExperienceManager(RULES)
    judging.judge(rows)
    with contextlib.closing(BufferStore.open(tmp_path / "pool")) as store:
        manager = ExperienceManager(RULES, store=store)
        assert manager.admit(rows) == (2, 0)
        counted = manager.difficulty2task_dict
        manager.flush()
    assert counted == judging.difficulty2task_dict == {1: ("a", "b")}
    with contextlib.closing(BufferStore.open(tmp_path / "pool")) as store:
        manager = ExperienceManager(RULES, store=store)
        manager.global_steps = 2
        (history,) = manager.get_offpolicy_batch(["a"], 3)
        drawn = rows_of(history)
        wanted = sorted(
            (row for row in rows if row.rollout_id == "one"), key=lambda row: row.metadata["session"]["path"]
        )
        assert len(drawn) == len(wanted) == 2
        for row, other in zip(drawn, wanted, strict=True):
            assert row.metadata["is_experience_replay"]
            assert same(replace(row, metadata=other.metadata), other)
            assert row.metadata["session"] == other.metadata["session"]
        assert history.entropy == 1.0


def test_the_rows_of_a_store_are_imported_as_sessions(tmp_path: Path) -> None:
    """Also if the calls of a session were made by several policies."""
    rows = scored(two_groups())
    for number, row in enumerate(rows):
        row.policy_version = 1 + number % 3
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store") as buffer:
        buffer.add_trajectories(rows)
    done = seed_pool(tmp_path / "pool", tmp_path / "store", RULES, same_run=True)
    assert (done.entered, dict(done.refused)) == (2, {})
    with contextlib.closing(BufferStore.open(tmp_path / "pool")) as store:
        held = ExperienceManager(RULES, store=store).task2trajectories
        assert {task: [len(rows_of(one)) for one in several] for task, several in held.items()} == {"a": [2], "b": [1]}


def test_a_step_on_rows_of_a_store_is_recomputed_by_sessions(tmp_path: Path) -> None:
    """For a trainer that draws the rows of sessions from a store, and records its steps itself."""
    rows = scored(two_groups())
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        ids = buffer.add_trajectories(rows)
    batch = build_batch([BatchRow(trajectory=row, group_id=ord(row.task_id)) for row in rows], 0)
    mask = batch.tensors["response_mask"]
    advantages = torch.tensor(advantages_by_hand(rows))[:, None] * mask
    for rollouts in (None, batch.rollouts.tolist()):
        step = trained_step(
            1 + (rollouts is not None),
            uids=[row.task_id for row in rows],
            task_ids=[row.task_id for row in rows],
            mask=mask,
            advantages=advantages,
            ratios=torch.ones(mask.shape),
            versions=[row.policy_version for row in rows],
            replayed=[False] * len(rows),
            trajectories=ids,
            rollouts=rollouts,
            options={"pad_token_id": 0, "advantages": {"estimator": "grpo"}},
        )
        assert step.rows["row"].tolist() == [0] * len(rows)
        with contextlib.closing(Ledger(tmp_path / "ledger")) as ledger:
            ledger.record(step)
        report = recompute(step_inputs(tmp_path, step.step))
        (check,) = (check for check in report.checks if check.name == "advantages")
        assert (report.problems, check.left_out, check.values) == ((), "", len(rows))


def test_samplers_of_groups_draw_whole_sessions(tmp_path: Path) -> None:
    rows = sorted(two_groups(), key=lambda row: row.task_id)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store") as buffer:
        ids = buffer.add_trajectories(rows)
        buffer.flush()
        annotate(buffer, ids[:1], {"outcome": [0.0]})
        names = [row.rollout_id for row in rows]

        def drawn(**options: Any) -> set[str]:
            found = buffer.sample_trajectories(2, sampler=GroupSampler(**options))
            counts = {name: [row.rollout_id for row in found].count(name) for name in names}
            assert all(count in (0, names.count(name)) for name, count in counts.items())
            return {name for name, count in counts.items() if count}

        assert drawn() == set(names)
        assert drawn(least=4) == {name for row, name in zip(rows, names, strict=True) if row.task_id == "a"}
        with pytest.raises(EmptyBufferError, match="5 rollouts to draw"):
            drawn(least=5)
        assert len(drawn(most=1)) == 2
        assert buffer.query().where("session_path = 0").count() == 4, "one row of each session"
        assert buffer.query().where("session_paths > 2").count() == 3
        buffer.evict([number for number, row in zip(ids, rows, strict=True) if row.rollout_id == "two"][:1])
        assert "two" not in drawn()
        with pytest.raises(EmptyBufferError, match="4 rollouts to draw"):
            drawn(least=4)
    with TrajectoryReplayBuffer.open(tmp_path / "store") as reader:
        assert "two" not in {row.rollout_id for row in reader.sample_trajectories(2, sampler=GroupSampler())}  # type: ignore[union-attr]


def test_groups_with_a_place_for_each_row_get_no_part_of_a_session(caplog: pytest.LogCaptureFixture) -> None:
    with TrajectoryReplayBuffer() as buffer:
        recording = Recording(buffer, by_task=True)
        recording.record(two_groups())
        for _ in range(2):
            drawn = recording.draw_into_groups(["a"] * 8, 2, 7)
            assert {rollout.rollout_id for rollout in drawn.values()} == {"single"}, "a session of one row is drawn"
    assert len([message for message in caplog.messages if "its place in a group one" in message]) == 1


MODES: tuple[LossAggMode, ...] = get_args(LossAggMode)


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_takes_a_session_for_one_sequence(mode: LossAggMode) -> None:
    """Of rows in any order, some without a trained token; the value and the gradient follow the formula."""
    rows = two_groups()
    for name in ("loss_mask", "response_mask"):
        setattr(rows[0], name, torch.zeros_like(getattr(rows[0], name)))
    batch = build_batch([BatchRow(trajectory=row, group_id=ord(row.task_id)) for row in rows], 0)
    mask = batch.tensors["response_mask"]
    random = torch.Generator().manual_seed(0)
    log_prob = -torch.rand(mask.shape, generator=random, dtype=torch.float64)
    advantages = torch.randn(mask.shape, generator=random, dtype=torch.float64)
    old = log_prob.clone()
    log_prob.requires_grad_()
    loss = het_compute_token_on_off_policy_loss(
        old,
        log_prob,
        advantages,
        mask,
        torch.zeros_like(mask),
        cliprange=0.2,
        loss_agg_mode=mode,
        rollouts=batch.rollouts,
    )
    loss["pg_loss"].backward()  # type: ignore[no-untyped-call]

    tokens: dict[tuple[str, str], int] = {}
    for row in rows:
        key = (row.task_id, row.rollout_id)
        tokens[key] = tokens.get(key, 0) + sum(row.response_mask.tolist())
    width = mask.shape[1]
    total = 0.0
    for number, row in enumerate(rows):
        held = tokens[row.task_id, row.rollout_id]
        weight = {
            "token-mean": 1 / sum(tokens.values()),
            "token-sum": 1.0,
            "seq-mean-token-sum": 1 / len(tokens),
            "seq-mean-token-mean": 1 / (held * len(tokens)),
            "seq-mean-token-sum-norm": 1 / (len(tokens) * width),
        }[mode]
        for at, counts in enumerate(mask[number].tolist()):
            wanted = -float(advantages[number, at]) * weight * counts
            total += wanted
            assert float(log_prob.grad[number, at]) == pytest.approx(wanted, abs=1e-12)
    assert float(loss["pg_loss"].detach()) == pytest.approx(total, abs=1e-12)

    losses = torch.where(mask.bool(), -advantages, 0.0)
    plain = aggregate_loss(losses, mask.bool(), mode)
    each = aggregate_loss(losses, mask.bool(), mode, torch.arange(len(rows)))
    torch.testing.assert_close(each, plain, msg="each row a rollout of its own: as without")
