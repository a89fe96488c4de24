"""Pools of messages without tokens: AgentEvolver's, and pools whose token ids were lost."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from tests.replay.foreign_pools import of_conversations
from trainer_hooks.batch import build_batch
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.hook import ReplayHook
from trainer_hooks.replay import PoolRules, newest_pool
from trainer_hooks.replay.conversation import Context
from trainer_hooks.replay.exchange import seed_pool
from trainer_hooks.replay.message_rows import MessageTokenizer, tokenized
from trainer_hooks.replay.persistence import read_pool
from trainer_hooks.replay.rows import rows_of
from trajstore import TrajectoryReplayBuffer
from trajstore.errors import ConfigurationError
from trajstore.trajectory import AgentTrajectory, Reward

pytest.importorskip("transformers")

RULES = PoolRules(n_rollout=8, max_trajectories_per_task=20)
HINT = (
    "\n\nThink about the next step before answering. Your thought (<think>...</think>) should be as short and concise"
    " as possible."
)


@pytest.fixture(scope="module")
def tokenizer(request: pytest.FixtureRequest) -> Any:
    from trainer_hooks.replay.message_rows import load_tokenizer

    return load_tokenizer(str(request.getfixturevalue("shared_fixtures") / "experience_pool_cmt" / "tokenizer"))


def without_ids(one: AgentTrajectory) -> AgentTrajectory:
    """Return a trajectory without token ids, with the log-probs of all rows concatenated."""
    columns = [row.old_log_probs for row in rows_of(one)]
    return dataclasses.replace(
        one,
        input_ids=None,
        attention_mask=None,
        loss_mask=None,
        response_start=None,
        response_mask=None,
        old_log_probs=torch.cat([column for column in columns if column is not None]),
        metadata={name: value for name, value in one.metadata.items() if name != "rows"},
    )


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("context", get_args(Context))
def test_ids_made_again_are_those_that_were_lost(
    shared_fixtures: Path, tokenizer: Any, context: Context, filtered: bool
) -> None:
    """Rows equal AgentEvolver's; recorded log-probs return to their tokens, also filtered ones."""
    made = MessageTokenizer.of(tokenizer, context, HINT if context == "linear_think" else "")
    pool = read_pool(shared_fixtures / "experience_pool_cmt" / context / "step_40").task2trajectories
    whole = [history for held in pool.values() for history in held]
    bare = [without_ids(history) for history in whole]
    if filtered:
        for history, known in zip(bare, whole, strict=True):
            rows = rows_of(known)
            history.old_log_probs = torch.cat([row.old_log_probs[row.response_mask == 1] for row in rows])  # type: ignore[index]
    done = tokenized(bare, made)
    assert (done.made, done.without_log_probs, done.problems) == (len(whole), 0, {})
    for history, known in zip(done.histories, whole, strict=True):
        for row, wanted in zip(rows_of(history), rows_of(known), strict=True):
            assert row.input_ids.tolist() == wanted.input_ids.tolist()  # type: ignore[union-attr]
            assert row.loss_mask.tolist() == wanted.loss_mask.tolist()  # type: ignore[union-attr]
            written = wanted.response_mask == 1
            assert torch.equal(row.old_log_probs[written], wanted.old_log_probs[written])  # type: ignore[index]


def replay(offpolicy_trajectories_per_task: int = 1, **options: Any) -> ReplayHook[str]:
    config = ExperienceReplayConfig(
        enable=True, exp_ratio=1.0, offpolicy_trajectories_per_task=offpolicy_trajectories_per_task
    )
    return ReplayHook(config, n_rollout=8, get_task=lambda task: task, **options)


def fresh(history: AgentTrajectory, number: int, tokenizer: MessageTokenizer) -> AgentTrajectory:
    messages = [*history.messages[:2], {"role": "assistant", "content": f"go {number}"}]
    made = AgentTrajectory(
        messages=messages, task_id=history.task_id, rollout_id=f"new-{number}", reward=Reward(outcome=0.0)
    )
    row = tokenizer.rows_of(made)
    return dataclasses.replace(row, metadata={}, old_log_probs=torch.full((len(row.response_mask),), -0.5))


def test_a_pool_of_messages_is_trained_on(
    shared_fixtures: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Log-probs recorded with another tokenizer are dropped, with a warning and a count."""
    folder, tasks = shared_fixtures / "experience_pool" / "step_120", [f"task_{number}" for number in range(5)]
    with replay() as hook, pytest.raises(ConfigurationError, match=r"13 trajectories, none with token ids.*tokenizer="):
        hook.manager.load_experience_pool_from_disk(folder)
    template = MessageTokenizer.of(tokenizer)
    with caplog.at_level(logging.WARNING), replay(tokenizer=tokenizer) as hook:
        hook.manager.load_experience_pool_from_disk(folder)
        plan = hook.before_rollout(hook.tasks_chosen(tasks, 1.0, 130))
        assert "13 trajectories have messages only" in caplog.text
        assert "13 of them with the current policy's log-probs" in caplog.text
        made = [fresh(entry.histories[0], number, template) for entry in plan for number in range(entry.fresh_rollouts)]
        batch = build_batch(hook.batch_rows(plan, made), 0)
    replayed = [number for number, entry in enumerate(batch.non_tensors["extras"]) if entry["is_experience_replay"]]
    assert len(replayed) == sum(len(entry.histories) for entry in plan) > 0
    known = {
        (task, entry.rollout_id): entry for task, held in read_pool(folder).task2trajectories.items() for entry in held
    }
    for number in replayed:
        task, rollout = (batch.non_tensors[name][number] for name in ("task_ids", "rollout_ids"))
        ids = batch.tensors["input_ids"][number][batch.tensors["attention_mask"][number] == 1].tolist()
        messages = [{name: entry[name] for name in ("role", "content")} for entry in known[task, rollout].messages]
        assert tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False) == ids
        on = batch.tensors["exp_mask"][number] == 1
        written = [entry["content"] + "<|im_end|>" for entry in messages if entry["role"] == "assistant"]
        assert tokenizer.decode(batch.tensors["input_ids"][number][on]) == "".join(written)
        assert not batch.tensors["recorded_mask"][number].any()


@pytest.mark.parametrize("context", get_args(Context))
def test_pools_of_conversations_are_trained_on(shared_fixtures: Path, tokenizer: Any, context: Context) -> None:
    """A step's batch has the rows and recorded log-probs of AgentEvolver's code.

    One task's histories have several prompts here; those whose prompt is not in the data are left out.
    """
    base = shared_fixtures / "experience_pool_cmt" / context
    known = {(entry.task, entry.rollout): entry for entry in of_conversations(base)}
    asked = {entry.task: entry.asked for entry in known.values()}
    template = MessageTokenizer.of(tokenizer, context, HINT if context == "linear_think" else "")
    with replay(4, tokenizer=template, task_prompt=asked.__getitem__) as hook:
        hook.manager.load_experience_pool_from_disk(newest_pool(base))
        plan = hook.before_rollout(hook.tasks_chosen(sorted(asked), 1.0, 41))
        made = [fresh(entry.histories[0], number, template) for entry in plan for number in range(entry.fresh_rollouts)]
        batch = build_batch(hook.batch_rows(plan, made), 0)
    came: dict[tuple[str, str], list[int]] = {}
    for number, extras in enumerate(batch.non_tensors["extras"]):
        if extras["is_experience_replay"]:
            key = batch.non_tensors["task_ids"][number], batch.non_tensors["rollout_ids"][number]
            came.setdefault(key, []).append(number)
    for key, numbers in came.items():
        for number, row in zip(numbers, known[key].rows, strict=True):
            here = {name: column[number] for name, column in batch.tensors.items()}
            used = here["attention_mask"] == 1
            assert here["input_ids"][used].tolist() == row.ids
            assert here["loss_mask"][used].tolist() == here["exp_mask"][used].tolist() == row.mask
            response = used[-len(here["response_mask"]) :]
            assert here["recorded_mask"][response].all()
            assert torch.equal(here["recorded_old_log_probs"][response], torch.tensor(row.log_probs))
    # The pool stores equal token sequences of a task once.
    tokens = {(known[key].task, str([row.ids for row in known[key].rows])) for key in came}
    fitting = [entry for entry in known.values() if entry.asked == asked[entry.task]]
    assert len(came) == len(tokens)
    assert tokens == {(entry.task, str([row.ids for row in entry.rows])) for entry in fitting}


def test_rollouts_of_messages_come_out_of_a_store(tmp_path: Path, shared_fixtures: Path, tokenizer: Any) -> None:
    """Trajectories with matching log-probs enter as rollouts of their step; those without do not."""
    pool = read_pool(shared_fixtures / "experience_pool_cmt" / "linear" / "step_40").task2trajectories
    whole = [history for held in pool.values() for history in held]
    bare = [without_ids(history) for history in whole]
    bare[0].old_log_probs = torch.tensor([-0.5])
    failures = [
        dataclasses.replace(history, reward=Reward(outcome=0.0), rollout_id=f"f-{history.rollout_id}")
        for history in whole
    ]
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "rollouts") as buffer:
        buffer.add_trajectories([*bare, *failures])
    words = (tmp_path / "pool", tmp_path / "rollouts", RULES)
    assert seed_pool(*words).refused == {"no_tokens": len(whole)}
    done = seed_pool(*words, tokenizer=MessageTokenizer.of(tokenizer))
    assert (done.tokenized, done.without_log_probs) == (len(whole), 1)
    assert done.refused == {"duplicate": len(whole) - done.entered}
    assert done.entered > 5


def test_what_is_no_tokenizer_is_refused(tokenizer: Any) -> None:
    for wrong, message in ((tokenizer.get_vocab(), "must be a tokenizer"), ("gpt2", "must be a tokenizer")):
        with pytest.raises(ConfigurationError, match=message):
            replay(tokenizer=wrong)
    with pytest.raises(ConfigurationError, match="think_hint"):
        MessageTokenizer.of(tokenizer, "linear", "think")
    with pytest.raises(ConfigurationError, match="tokenizer was made with"):
        replay(tokenizer=tokenizer, tokenizer_fingerprint="another")
