"""Rows of a ``DataProto`` with replay survive everything that verl's older trainers do to it."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.pages import run_section
from trainer_hooks.advantages import compute_grpo_outcome_advantage
from trainer_hooks.batch import Batch, BatchRow, assign_group_ids, build_batch
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.dataproto import batch_of, loss_arguments, replace_old_log_probs, step_done, to_dataproto
from trainer_hooks.hook import ReplayHook
from trajstore.errors import ConfigurationError, InvalidTrajectoryError, MissingDependencyError
from trajstore.trajectory import AgentTrajectory, Reward

pytest.importorskip("verl", exc_type=ImportError)

from verl import DataProto
from verl.protocol import pad_dataproto_to_divisor, unpad_dataproto
from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.utils import tensordict_utils
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

PAD = 0
DISCARDED = {"add_exp": True, "train_mode": "discard"}


def make_row(number: int, prompt: int, response: int, kind: str, task: int) -> BatchRow:
    """Return a row whose token ids, log-probs and flags follow from its number, which names its rollout."""
    length = prompt + response
    position = torch.arange(length)
    loss_mask = ((position + number) % 3 > 0).long()
    loss_mask[:prompt] = 0
    recorded = max(response - number % 2, 0)  # every other row has one log-prob too few
    trajectory = AgentTrajectory(
        input_ids=1000 * (number + 1) + position,
        loss_mask=loss_mask,
        response_start=prompt,
        old_log_probs=recorded_log_probs(number, recorded),
        reward=Reward(outcome=number % 3 / 2),
        task_id=f"task-{task}",
        rollout_id=str(number),
        policy_version=number,
    )
    marks: dict[str, Any] = DISCARDED if kind == "discarded" else {"is_experience_replay": kind == "replayed"}
    return BatchRow(trajectory=trajectory, group_id=task, **marks)


def recorded_log_probs(number: int, length: int) -> Tensor:
    return -(number + 1 + torch.arange(length) / 100)


def current_log_probs(data: Any) -> Tensor:
    """Return the current policy's log-probs of a ``DataProto``: [B, R], a function of each row's tokens."""
    log_probs: Tensor = -(data.batch["responses"] + 1).float().log() / 50
    return log_probs


def log_prob_pass(data: Any) -> Any:
    """Return the output of the trainer's log-prob pass: other keys, the same rows."""
    log_probs = current_log_probs(data)
    return DataProto.from_dict({"old_log_probs": log_probs, "entropys": log_probs.abs() / 2})


@st.composite
def mixed_rows(draw: st.DrawFn, least: int = 2, most: int = 7) -> list[BatchRow]:
    kinds = draw(st.lists(st.sampled_from(["fresh", "replayed", "discarded"]), min_size=least, max_size=most))
    length = st.integers(1, 5)
    return [
        make_row(number, draw(length), draw(length), kind, draw(st.integers(0, 2))) for number, kind in enumerate(kinds)
    ]


def some_rows() -> list[BatchRow]:
    kinds = ["fresh", "replayed", "fresh", "discarded", "replayed", "fresh"]
    return [make_row(number, 1 + number % 3, 2 + number % 4, kind, number // 3) for number, kind in enumerate(kinds)]


def make_hook(**options: Any) -> ReplayHook[str]:
    return ReplayHook(ExperienceReplayConfig(**{"enable": True, **options}), n_rollout=8, get_task=str)


def replaced(rows: list[BatchRow]) -> Any:
    """Return the rows after replacing their log-probs."""
    data = to_dataproto(build_batch(rows, PAD))
    data = data.union(log_prob_pass(data))
    replace_old_log_probs(data, make_hook())
    return data


def numbers_of(data: Any) -> list[int]:
    """Return the original number of each row, from its rollout's name."""
    return [int(name) for name in data.non_tensor_batch["rollout_ids"]]


def check_rows(data: Any, batch: Batch, rows: list[BatchRow]) -> None:
    """Check that all columns of a row belong to the rollout that the row names."""
    for place, number in enumerate(numbers_of(data)):
        ids = data.batch["input_ids"][place]
        assert set((ids[ids != PAD] // 1000).tolist()) == {number + 1}
        for name, tensor in batch.tensors.items():
            assert data.batch[name][place].equal(tensor[number]), name
        for name, array in batch.non_tensors.items():
            assert data.non_tensor_batch[name][place] == array[number], name
        assert data.non_tensor_batch["extras"][place]["is_experience_replay"] is rows[number].is_experience_replay


def check_old_log_probs(data: Any, rows: list[BatchRow]) -> None:
    """Check that exactly the recorded log-probs of replayed model tokens were replaced."""
    current = current_log_probs(data)
    assert data.batch["current_old_log_probs"].equal(current)
    for place, number in enumerate(numbers_of(data)):
        row, trajectory = rows[number], rows[number].trajectory
        expected = current[place].clone()
        written = trajectory.loss_mask[trajectory.response_start :].tolist()
        for position, (is_written, log_prob) in enumerate(zip(written, trajectory.old_log_probs, strict=False)):
            if is_written and row.is_experience_replay:
                expected[position] = log_prob
        assert data.batch["response_mask"][place, : len(written)].tolist() == written
        counted = data.batch["response_mask"][place].bool()
        assert data.batch["old_log_probs"][place][counted].equal(expected[counted])
        if row.is_experience_replay or not row.add_exp:
            assert data.batch["old_log_probs"][place].equal(expected)


# -- there and back ----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(rows=mixed_rows(least=1), more=st.none() | st.integers(5, 8))
def test_a_dataproto_holds_the_batch_and_gives_it_back(rows: list[BatchRow], more: int | None) -> None:
    batch = build_batch(rows, PAD, prompt_length=more, response_length=more)
    data = to_dataproto(batch)
    assert isinstance(data, DataProto)
    assert len(data) == len(rows)
    check_rows(data, batch, rows)
    back = batch_of(data)
    assert set(back.tensors) == set(batch.tensors)
    assert all(back.tensors[name].equal(tensor) for name, tensor in batch.tensors.items())
    assert all(np.array_equal(back.non_tensors[name], array) for name, array in batch.non_tensors.items())
    assert back.prompt_lengths.equal(batch.prompt_lengths)
    assert back.response_lengths.equal(batch.response_lengths)


# -- trainer operations on rows ----------------------------------------------------------------------


def chunk_and_concat(data: Any, order: Tensor) -> Any:
    padded, added = pad_dataproto_to_divisor(data, 2)
    return unpad_dataproto(DataProto.concat(padded.chunk(2)), added)


def reorder(data: Any, order: Tensor) -> Any:
    data.reorder(order)
    return data


def repeat_and_thin(data: Any, order: Tensor) -> Any:
    return data.repeat(2, interleave=True)[::2] if len(order) % 2 else data.repeat(2, interleave=False)[: len(order)]


def pop_and_union(data: Any, order: Tensor) -> Any:
    popped = data.pop(batch_keys=["input_ids", "exp_mask"], non_tensor_batch_keys=["extras", "uid"])
    assert "exp_mask" not in data.batch.keys()  # noqa: SIM118
    return data.union(popped)


def select_and_union(data: Any, order: Tensor) -> Any:
    selected = data.select(batch_keys=["recorded_old_log_probs", "recorded_mask"], non_tensor_batch_keys=["uid"])
    return selected.union(data)


def iterate(data: Any, order: Tensor) -> Any:
    return DataProto.concat(list(data.make_iterator(1, 1, seed=7, dataloader_kwargs={"shuffle": True})))


OPERATIONS: list[Callable[[Any, Tensor], Any]] = [
    chunk_and_concat,
    reorder,
    repeat_and_thin,
    pop_and_union,
    select_and_union,
    iterate,
    lambda data, order: pickle.loads(pickle.dumps(data)),
    lambda data, order: data[order],
    lambda data, order: DataProto.concat(data.split(2)),
]


@settings(max_examples=60, deadline=None)
@given(
    rows=mixed_rows(),
    before=st.lists(st.sampled_from(OPERATIONS), max_size=4),
    after=st.lists(st.sampled_from(OPERATIONS), max_size=4),
    seed=st.integers(0, 99),
)
def test_rows_stay_whole(
    rows: list[BatchRow],
    before: list[Callable[[Any, Tensor], Any]],
    after: list[Callable[[Any, Tensor], Any]],
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch = build_batch(rows, PAD)
    data = to_dataproto(build_batch(rows, PAD))
    for operation in before:
        data = operation(data, torch.randperm(len(rows), generator=generator))
    data = data.union(log_prob_pass(data))
    replace_old_log_probs(data, make_hook())
    for operation in after:
        data = operation(data, torch.randperm(len(rows), generator=generator))
    assert len(data) == len(rows)
    check_rows(data, batch, rows)
    check_old_log_probs(data, rows)
    assert data.batch["entropys"].equal(current_log_probs(data).abs() / 2)
    assert data.meta_info["replay_loss_options"] == make_hook().loss_options


def test_through_verls_conversion_to_rows_without_padding() -> None:
    rows = some_rows()
    data = replaced(rows)
    sent = left_right_2_no_padding(data.to_tensordict())
    per_token = sent["input_ids"].values().float()  # a model's output of token t is about token t + 1
    padded = no_padding_2_padding(per_token, sent)
    mask = data.batch["attention_mask"][:, data.batch["prompts"].shape[1] :].bool()
    assert torch.where(mask, padded, 0.0).equal(torch.where(mask, data.batch["responses"] - 1.0, 0.0))
    sent["advantages"] = torch.ones_like(sent["old_log_probs"])
    options = tensordict_utils.get(sent, "replay_loss_options")
    arguments = loss_arguments(sent, {"replay_loss_options": options})
    assert arguments["old_log_prob"].equal(data.batch["old_log_probs"])
    assert arguments["off_cliprange_high"] == 1.0
    assert arguments["off_policy_shaping"] is None


# -- advantages and loss -----------------------------------------------------------------------------


def token_level_rewards(batch: Batch, rows: list[BatchRow]) -> Tensor:
    rewards = torch.zeros(batch.tensors["responses"].shape)
    outcomes = [row.trajectory.reward.outcome for row in rows if row.trajectory.reward is not None]
    rewards[torch.arange(len(rows)), batch.response_lengths - 1] = torch.tensor(outcomes)
    return rewards


@settings(max_examples=40, deadline=None)
@given(rows=mixed_rows(), separate=st.booleans(), normalized=st.booleans(), order=st.permutations(range(7)))
def test_verls_advantages_are_ours(rows: list[BatchRow], separate: bool, normalized: bool, order: list[int]) -> None:
    groups = assign_group_ids(
        [row.group_id for row in rows], [row.is_experience_replay for row in rows], "separate" if separate else "shared"
    )
    rows = [replace(row, group_id=group) for row, group in zip(rows, groups, strict=True)]
    batch = build_batch(rows, PAD)
    data: Any = to_dataproto(batch)
    data.batch["token_level_rewards"] = token_level_rewards(batch, rows)
    data.reorder(torch.tensor([index for index in order if index < len(rows)]))
    data = compute_advantage(data, AdvantageEstimator.GRPO, norm_adv_by_std_in_grpo=normalized)
    rewards, mask = data.batch["token_level_rewards"], data.batch["response_mask"]
    for index in (data.batch["group_ids"], data.non_tensor_batch["uid"]):
        ours, _ = compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=normalized)
        torch.testing.assert_close(data.batch["advantages"], ours, rtol=1e-5, atol=1e-6)


# -- the hook's configuration ------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"enable": False}, {"exp_is_correct": False}])
def test_without_correction_log_probs_stay(options: dict[str, Any]) -> None:
    data = to_dataproto(build_batch(some_rows(), PAD))
    data = data.union(log_prob_pass(data))
    replace_old_log_probs(data, make_hook(**options))
    assert data.batch["old_log_probs"].equal(current_log_probs(data))
    assert data.batch["current_old_log_probs"].equal(current_log_probs(data))


def test_loss_options_are_those_of_the_configuration() -> None:
    data = to_dataproto(build_batch(some_rows(), PAD))
    data = data.union(log_prob_pass(data))
    replace_old_log_probs(data, make_hook(off_cliprange_high=0.7, off_policy_shaping=0.1))
    data.batch["advantages"] = data.batch["old_log_probs"]
    arguments = loss_arguments(data.batch, data.meta_info)
    assert (arguments["off_cliprange_high"], arguments["off_policy_shaping"]) == (0.7, 0.1)


def test_what_enters_the_pool_has_the_log_probs_of_the_policy_that_made_it() -> None:
    rows = [make_row(number, 2, 4, "discarded", task=0) for number in (1, 2, 3)]  # outcomes 0.5, 1.0 and 0.0
    hook = make_hook(save_filter="positive")
    hook.tasks_chosen(["task-0"], 0.0, 1)
    batch = build_batch(rows, PAD)
    data: Any = to_dataproto(batch)
    data = data.union(log_prob_pass(data))
    replace_old_log_probs(data, hook)
    assert data.batch["old_log_probs"].equal(data.batch["current_old_log_probs"]), "sampled under another prompt"
    data.reorder(torch.tensor([2, 0, 1]))
    step_done(data, [row.trajectory for row in rows], hook)
    held = {history.rollout_id: history.old_log_probs for history in hook.manager.task2trajectories["task-0"]}
    assert set(held) == {"1", "2"}
    for place, number in enumerate(numbers_of(data)):
        if number != 3:
            stored = held[str(number)]
            assert stored.equal(current_log_probs(data)[place])


# -- refused data ------------------------------------------------------------------------------------


def test_missing_keys_are_named() -> None:
    hook = make_hook()
    data = to_dataproto(build_batch(some_rows(), PAD))
    with pytest.raises(ConfigurationError, match="old_log_probs; join"):
        replace_old_log_probs(data, hook)
    data = data.union(log_prob_pass(data))
    with pytest.raises(ConfigurationError, match="current_old_log_probs; call replace_old_log_probs"):
        step_done(data, [], hook)
    for name in ("exp_mask", "recorded_mask", "recorded_old_log_probs", "response_mask"):
        with pytest.raises(ConfigurationError, match=rf"data\.batch: lacks {name};"):
            replace_old_log_probs(data.select([key for key in data.batch.keys() if key != name]), hook)  # noqa: SIM118
    with pytest.raises(ConfigurationError, match=r"data\.non_tensor_batch: lacks task_ids, extras;"):
        replace_old_log_probs(data.select(non_tensor_batch_keys=["rollout_ids"]), hook)
    replace_old_log_probs(data, hook)
    with pytest.raises(ConfigurationError, match="tensors: lacks advantages; compute"):
        loss_arguments(data.batch, data.meta_info)
    data.batch["advantages"] = data.batch["old_log_probs"]
    with pytest.raises(ConfigurationError, match="meta_info: lacks replay_loss_options"):
        loss_arguments(data.batch, {})
    data.pop(["entropys"])
    with pytest.raises(ConfigurationError, match=r"entropys; .*don't pop"):
        step_done(data, [], hook)


def test_log_probs_are_replaced_only_once() -> None:
    data = replaced(some_rows())
    before = data.batch["old_log_probs"].clone()
    with pytest.raises(ConfigurationError, match="only once"):
        replace_old_log_probs(data, make_hook())
    assert data.batch["old_log_probs"].equal(before)


def test_padding_rows_have_to_go_before_the_step_is_done() -> None:
    rows = some_rows()
    fresh = [row.trajectory for row in rows if not row.is_experience_replay]
    padded, added = pad_dataproto_to_divisor(replaced(rows), 4)
    with pytest.raises(InvalidTrajectoryError, match="twice"):
        step_done(padded, fresh, make_hook())
    assert step_done(unpad_dataproto(padded, added), fresh, make_hook())["experience_replay/rows"] == len(rows)


def test_without_verl_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verl", None)
    with pytest.raises(MissingDependencyError, match=r"verl.*trajstore\[verl\]"):
        to_dataproto(build_batch(some_rows(), PAD))


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process, as a new one takes seconds to import verl."""
    monkeypatch.chdir(tmp_path)
    run_section("trainers.md", "Trainers that pass a DataProto")
