"""A step of AgentEvolver's trainer, under AgentEvolver's names."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples.agentevolver.names import (
    EMClient,
    ExperienceManager,
    ExperienceMixCollateFn,
    ExperienceWorker,
    ReplayEnvManager,
    ReplayTrainer,
    Reward,
    Trajectory,
    TrajExpConfig,
    compute_response_mask,
    from_agentevolver,
)
from tests.guidance.reme import FakeReMe
from tests.replay.conftest import build
from trainer_hooks.replay.agentevolver import ForeignObject
from trainer_hooks.replay.persistence import read_pool
from trajstore.errors import ConfigurationError, InvalidTrajectoryError
from trajstore.interop.rollouts import row_of
from trajstore.trajectory import AgentTrajectory
from trajstore.trajectory import Reward as PlainReward

pytest.importorskip("verl", exc_type=ImportError)

from omegaconf import OmegaConf
from verl import DataProto

N = 4


def config(**maker: Any) -> Any:
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": {"n": N, "val_kwargs": {"n": 2}}},
            "experience_maker": {"enable_context_generator": True, "retrieve_top_k": 1, **maker},
            "exp_manager": {
                "train_rollout_mode": "mixed",
                "rollout_ratio": 0.5,
                "experience_replay": {
                    "enable": True,
                    "exp_ratio": 0.5,
                    "replay_start_ratio": 0.35,
                    "offpolicy_trajectories_per_task": 1,
                    "experience_lbound": 0,
                    "experience_rbound": N,
                    "exp_select_mode": "argmin",
                },
            },
        }
    )


@dataclass(frozen=True)
class Task:
    task_id: str


class TaskManager:
    def get_task_by_id(self, task_id: str) -> Task | None:
        return Task(task_id) if task_id in "abcd" else None


class Tokenizer:
    pad_token_id = 0


class Environments(ReplayEnvManager):
    tokenizer = Tokenizer()


class Actor:
    """The second response token of rollout i of the batch has entropy i; all log-probs are -2."""

    def compute_log_prob(self, data: DataProto) -> DataProto:
        shape = data.batch["responses"].shape
        rows = data.batch["responses"][:, :1] // 1000
        return DataProto.from_dict(
            tensors={"old_log_probs": torch.full(shape, -2.0), "entropys": rows.float().expand(shape).clone()}
        )


class Trainer(ReplayTrainer):
    def __init__(self) -> None:
        self.exp_manager = ExperienceManager(config().exp_manager)
        self.env_manager = Environments()
        self.actor_rollout_wg = Actor()


def step_of(trainer: Trainer) -> None:
    """Train on four rollouts of task a, of which three succeed; the third has the lowest saved entropy."""
    rollouts = [
        build("a", token, outcome, entropy=entropy)
        for token, outcome, entropy in ((1, 1.0, 3.0), (2, 1.0, 2.0), (3, 1.0, 1.0), (4, 0.0, 0.5))
    ]
    manager = trainer.exp_manager
    manager.update_difficulty2task_dict(rollouts)
    filtered = manager.update_skip_uid_set_and_filter_trajectories(
        trajectories=rollouts, n_rollout=N, entropys=None, response_mask=None
    )
    assert manager.save_trajectories_to_memory(filtered) == 3


def test_a_step_replays_a_history_in_its_tasks_group() -> None:
    trainer = Trainer()
    step_of(trainer)
    trainer.exp_manager.global_steps = 5
    mix = ExperienceMixCollateFn(
        exp_manager=trainer.exp_manager,
        train_task_manager=TaskManager(),
        exp_ratio=0.5,
        replay_start_ratio=0.35,
        offpolicy_trajectories_per_task=1,
        n_rollout=N,
    )
    experience, fresh = mix(training_tasks=[Task("b"), Task("c")], training_progress=0.5, enable_replay=True)
    assert [task.task_id for task in [*experience, *fresh]] == ["a", "b"]

    saved = trainer.exp_manager.get_offpolicy_batch(experience, num_trajectories_per_task=1, use_saved_entropy=True)
    candidates = trainer.exp_manager.get_all_candidates_batch(tasks=experience)
    chosen = trainer._select_best_offpolicy_by_current_entropy(
        task_to_candidates=candidates, tasks=experience, num_trajectories_per_task=1
    )
    assert [history.rollout_id for history in saved] == ["a/3"], "lowest saved entropy"
    assert [history.rollout_id for history in chosen] == ["a/1"], "lowest entropy under the actor"

    positions = {task.task_id: position for position, task in enumerate([*experience, *fresh])}
    histories = trainer.env_manager.convert_offpolicy_to_cmt(
        offpolicy_trajectories=chosen, config=None, tokenizer=None, task_id_to_data_id=positions
    )
    rollouts = [build(task, number, data_id=str(positions[task])) for task in "ab" for number in (8, 9)]
    batch = trainer.env_manager.to_dataproto([*rollouts, *histories])
    assert batch.batch["group_ids"].tolist() == [0, 0, 1, 1, 0]
    assert batch.batch["exp_mask"].any(dim=1).tolist() == [False] * 4 + [True]
    batch.batch["response_mask"] = compute_response_mask(batch)
    assert batch.batch["response_mask"].tolist() == [[1, 0, 1, 1]] * 5

    current = trainer.actor_rollout_wg.compute_log_prob(batch)
    batch = trainer._replace_recorded_old_log_probs(
        batch=batch, current_old_log_prob=current, entropys=current.batch["entropys"]
    )
    old = batch.batch["old_log_probs"]
    assert (old[:4] == -2).all()
    assert old[4].tolist() == [-0.5, -2.0, -0.25, -1.0], "recorded where the model wrote"


def test_a_history_without_a_group_is_refused() -> None:
    with pytest.raises(InvalidTrajectoryError, match="has no task 'a'"):
        Environments().convert_offpolicy_to_cmt([build("a")], task_id_to_data_id={"b": 0})
    with pytest.raises(InvalidTrajectoryError, match=r"trajectories\[0\]: data_id 'x'"):
        Environments().to_dataproto([build("a", data_id="x")])


@pytest.mark.parametrize("section", [False, True])
def test_the_number_of_rollouts_is_that_of_the_configuration(section: bool) -> None:
    values = config()
    manager = ExperienceManager(values.exp_manager if section else values)
    assert manager.rules.n_rollout == N
    configs = manager.get_complete_exp_configs([Task("a"), Task("b")], mode="sample")
    assert [sum(item.add_exp) for item in configs] == [2, 2]
    assert [len(item.add_exp) for item in manager.get_complete_exp_configs([Task("a")], mode="validate")] == [2]
    with pytest.raises(ConfigurationError, match="n_rollout: the configuration has no actor_rollout_ref"):
        ExperienceManager(OmegaConf.to_container(values.exp_manager))
    with pytest.raises(ConfigurationError, match="n_rollout: 8, the pool's is 4"):
        ExperienceMixCollateFn(manager, TaskManager(), n_rollout=8)


def test_experience_of_a_service_is_put_in_and_taken_out() -> None:
    with FakeReMe() as service:
        worker = ExperienceWorker(config=config(base_url=service.url))
        guided = TrajExpConfig(add_exp=True, train_mode="discard", task_id="a", query="where is the cup")
        messages, guided = worker.manage_rollout_context([{"role": "user", "content": "where is the cup"}], guided)
        assert "go kitchen" in messages[-1]["content"]
        assert len(guided.experience_list) == 1
        experience, cleaned = worker.manage_training_context(messages[-1]["content"], {"task_train_mode": "discard"})
        assert cleaned == "where is the cup"
        assert "go kitchen" in experience
        kept = messages[-1]["content"]
        assert worker.manage_training_context(kept, {"task_train_mode": "keep"}) == ("", kept)

        client = EMClient(base_url=service.url)
        rollout = Trajectory(steps=[{"role": "user", "content": "where is the cup"}], reward=Reward(outcome=1.0))
        assert "go kitchen" in client.call_context_generator(rollout, retrieve_top_k=1, workspace_id="w2")
        made, seconds = client.call_summarizer([rollout], workspace_id="w2")
        assert made == 2, "the number that the service reports"
        assert seconds >= 0
        assert {body["workspace_id"] for _, body in service.calls if body} == {"default", "w2"}
        service.mode = "404"
        assert client.call_context_generator(rollout) == ""
        assert client.call_summarizer([rollout])[0] == ""


def test_summaries_run_in_the_background_every_few_steps() -> None:
    with FakeReMe() as service:
        manager = ExperienceManager(config(base_url=service.url, enable_summarizer=True, updated_freq=2))
        rollout = Trajectory(steps=[{"role": "user", "content": "go"}], reward=Reward(outcome=1.0))
        assert manager.update_experience_pool([rollout], global_steps=3) is None
        future = manager.submit_summary_task([rollout], 4)
        assert future is not None
        assert future.result()[0] == 2
        assert (manager.collect_summary_result(future), manager.collect_summary_result(None)) == (
            future.result()[1],
            None,
        )
        sent = len(service.calls)
        manager.summarize_in_batch(
            [Trajectory(steps=rollout.steps, reward=rollout.reward, task_id=name) for name in "aab" * 8]
        )
        calls = [len(body["trajectories"]) for _, body in service.calls[sent:]]
        assert calls == [8, 8, 8], "at most summary_batch_size, of one task"
    without = ExperienceManager(config(enable_summarizer=True, updated_freq=2))
    with pytest.raises(ConfigurationError, match="enable_summarizer needs a service"):
        without.update_experience_pool([rollout], 2)
    with pytest.raises(ConfigurationError, match="summarize_in_batch needs a service"):
        without.summarize_in_batch([rollout])


def test_steps_are_the_messages() -> None:
    rollout = Trajectory(steps=[{"role": "user", "content": "go"}], task_id="a")
    assert rollout.steps is rollout.messages
    with pytest.raises(ConfigurationError, match="steps: the same as messages"):
        Trajectory(steps=[], messages=[])


def test_reward_and_success_have_agentevolvers_names() -> None:
    assert Trajectory("0", "1", [], "go", True, Reward(outcome=0.5, madness=-1.0), {"k": 1}).success
    assert not Trajectory().success
    reward = Reward(outcome=0.0, madness=-1.0)
    assert (reward.madness, reward.success, reward.metadata) == (-1.0, False, {"madness": -1.0})
    assert Reward().madness == 0.0


class Alive:
    """Stands in for AgentEvolver's classes: keeps a pickled state as attributes, as its own objects do."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state.get("__dict__", state) if isinstance(state, dict) else {})


class Living(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        plain = module in ("builtins", "collections")
        return super().find_class(module, name) if plain else type(name, (Alive, dict), {})


@pytest.mark.parametrize(
    "folder",
    ["experience_pool_cmt/linear/step_40", "experience_pool_cmt/linear_think/step_40", "experience_pool/step_120"],
)
def test_rollouts_of_agentevolvers_classes_enter_as_its_pools_do(folder: str, shared_fixtures: Path) -> None:
    """Its objects give the same rows alive and pickled, and enter a pool if they have tokens."""
    with (shared_fixtures / folder / "task2trajectories.pkl").open("rb") as file:
        alive = Living(file).load()
    for task, held in read_pool(shared_fixtures / folder).task2trajectories.items():
        assert [row_of(from_agentevolver(one, task), {}) for one in alive[task]] == [row_of(one, {}) for one in held]
        if held[0].input_ids is None:
            continue
        manager = ExperienceManager(config())
        [first, *others] = alive[task]
        first.reward.outcome = 0.0
        fresh = [first, *others]
        manager.update_difficulty2task_dict(fresh)
        kept = manager.update_skip_uid_set_and_filter_trajectories(fresh, len(fresh))
        assert [id(one) for one in kept] == [id(one) for one in others]
        different = {tuple(history.input_ids.tolist()) for history in held[1:] if history.input_ids is not None}
        assert manager.save_trajectories_to_memory(kept) == len(different)
        for position, one in enumerate(fresh):
            one.data_id = str(position % 2)
        batch = Environments().to_dataproto(fresh)
        groups = dict(zip(batch.batch["rollouts"].tolist(), batch.batch["group_ids"].tolist(), strict=True))
        assert groups == {position: position % 2 for position in range(len(fresh))}


def test_options_of_its_current_code_are_those_of_its_documents() -> None:
    """With every key of ``exp_manager`` in AgentEvolver's ``config/agentevolver.yaml``."""
    current = {
        "train_rollout_mode": "mixed",
        "val_rollout_mode": "all",
        "rollout_ratio": 0.25,
        "train_sample_mode": "hybrid",
        "train_sample_keepratio": 0.5,
        "init_exp_before_training": True,
        "init_exp_only": True,
        "summary_batch_size": 4,
        "reme": {"base_url": "http://127.0.0.1:8001", "retrieve_top_k": 5},
    }
    documented = {
        "train_rollout_expmode": "mixed",
        "val_rollout_expmode": "all",
        "rollout_expratio": 0.25,
        "train_sample_expmode": "hybrid",
        "train_sample_keepratio": 0.5,
        "init_experience_before_training": True,
        "init_experience_only": True,
    }
    of_maker = {"base_url": "http://127.0.0.1:8001", "retrieve_top_k": 5, "summary_batch_size": 4}
    replay = {"experience_replay": {"enable": True, "task_sampling": "uniform"}}
    rollout = {"actor_rollout_ref": {"rollout": {"n": N}}}
    manager = ExperienceManager({**rollout, "exp_manager": {**replay, **current}})
    other = ExperienceManager({**rollout, "exp_manager": {**replay, **documented}, "experience_maker": of_maker})
    assert manager.guidance == other.guidance
    assert (manager.guidance.rollout_expratio, manager.guidance.summary_batch_size) == (0.25, 4)
    assert manager.rules.task_sampling == "by_difficulty"
    assert manager.sample_tasks_from_replaypool(strategy="random") == []
    with pytest.raises(ConfigurationError, match="rollout_expratio under two names"):
        ExperienceManager({**rollout, "exp_manager": {**replay, "rollout_ratio": 0.5, "rollout_expratio": 0.5}})


@pytest.mark.parametrize("calls", ["place filter score save", "filter score save place", "filter place score save"])
def test_log_probs_may_come_after_the_filter(calls: str) -> None:
    manager = ExperienceManager(config())
    rollouts = [build("a", at, outcome, old_log_probs=None, entropy=None) for at, outcome in enumerate((1.0, 1.0, 0.0))]
    kept: list[AgentTrajectory] = []
    for call in calls.split():
        if call == "place":
            manager.update_difficulty2task_dict(rollouts)
        elif call == "filter":
            ones = torch.ones(3, 4)
            kept = manager.update_skip_uid_set_and_filter_trajectories(rollouts, N, ones, ones)
        elif call == "score":
            kept[1].metadata["old_log_probs"] = [-1.0] * 4
        else:
            assert manager.save_trajectories_to_memory(kept) == 1
    assert manager.refused == {"log_probs_mismatch": 1}, "the one that nobody scored, when it is saved"
    assert [history.entropy for history in manager.get_offpolicy_batch(["a"], num_trajectories_per_task=2)] == [1.0]


def test_what_is_no_rollout_is_named() -> None:
    for value in (7, {"steps": []}, SimpleNamespace(name="x"), SimpleNamespace(steps=[], reward=1.0)):
        with pytest.raises(InvalidTrajectoryError, match=f"rollout: a {type(value).__name__}, cannot be read"):
            ExperienceManager(config()).update_difficulty2task_dict([value])
    named = from_agentevolver(SimpleNamespace(steps=[], metadata={"task_id": 0, "rollout_id": "r", "query": "q"}))
    assert (named.task_id, named.rollout_id, named.query) == ("0", "r", "q")
    penalty = SimpleNamespace(outcome=1.0, madness=-1.0, metadata=None)
    reward = from_agentevolver(SimpleNamespace(steps=[], reward=penalty)).reward
    assert reward == PlainReward(outcome=1.0, metadata={"madness": -1.0})


def test_attributes_of_a_later_version_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    reward = SimpleNamespace(outcome=1.0, style="short", metadata={"a": 1})
    given = SimpleNamespace(steps=[], metadata={"task_id": "t"}, reward=reward, turns=[1, {"n": 2}], client=object())
    for _ in range(2):
        made = from_agentevolver(given)
    assert made.metadata["agentevolver"]["turns"] == [1, {"n": 2}]
    assert made.metadata["agentevolver"]["client"] == str(given.client)
    assert made.reward == PlainReward(outcome=1.0, metadata={"a": 1, "style": "short"})
    assert [text for text in caplog.messages if "no JSON are kept as texts: client" in text] == caplog.messages[:1]


def test_experience_that_training_leaves_out_is_not_in_the_rows() -> None:
    """AgentEvolver removes it when it makes rows; a pickle, which has no code for that, is refused."""
    row = SimpleNamespace(input_ids=[1, 2, 3], loss_mask=[0, 0, 1], prompt_ids=[1, 2])
    metadata = {"experience_list": ["go kitchen"], "add_exp": True, "task_train_exp_mode": "discard"}
    made = SimpleNamespace(full_context=[], metadata=metadata, data_id="0", group_tokenize=lambda: [row])
    batch = Environments().to_dataproto([made])
    assert batch.batch["input_ids"].tolist() == [[1, 2, 3]]
    assert batch.batch["exp_mask"].tolist() == [[1, 1, 1]]
    foreign = ForeignObject()
    foreign.fields = {"full_context": [], "metadata": metadata}
    with pytest.raises(InvalidTrajectoryError, match="experience that AgentEvolver trains without"):
        from_agentevolver(foreign)


def test_arguments_whose_order_differs_must_be_named() -> None:
    manager = ExperienceManager(config())
    with pytest.raises(ConfigurationError, match=r"sample_tasks_from_replaypool\(3, 2\): name the arguments"):
        manager.sample_tasks_from_replaypool(3, 2)
    assert manager.sample_tasks_from_replaypool(difficulty=3, num_tasks=2, strategy="random") == []
