"""The Python listings of AgentEvolver's design documents, read from ``../shared/seeds`` and run on our names.

A listing is found by a name that only it has. Those that define a class or methods serve as an independent computation;
those of the training loop are run in the order of the document.
"""

from __future__ import annotations

import os
import random
import re
import sys
import typing
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import SHARED
from tests.guidance.reme import FakeReMe
from tests.replay.conftest import build
from trainer_hooks import agentevolver as ours
from trainer_hooks.agentevolver import Reward, Trajectory
from trainer_hooks.replay.persistence import read_pool

pytest.importorskip("verl", exc_type=ImportError)

import yaml
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.core_algos import agg_loss
from verl.utils import torch_functional

N = 4
PARTIAL = {"experience_lbound": 0, "experience_rbound": N, "exp_select_mode": "argmin"}
LOGGER = SimpleNamespace(**dict.fromkeys(("info", "debug", "warning"), lambda *_: None))


class Documents:
    """The documents; skips the test where they are absent."""

    def __init__(self) -> None:
        folder = SHARED.parent / "seeds"
        if not folder.is_dir():
            pytest.skip("needs ../shared/seeds, the design documents of AgentEvolver")
        self.texts = {path.name[:3]: path.read_text(encoding="utf-8") for path in folder.glob("*.txt")}

    def listing(self, number: str, *names: str) -> str:
        """Return the shortest Python listing of a document that has all names."""
        found = re.findall(r"^ *```python\n(.*?)^ *```", self.texts[number], re.DOTALL | re.MULTILINE)
        return dedent(min((code for code in found if all(name in code for name in names)), key=len))

    def run(self, number: str, /, *names: str, **values: Any) -> dict[str, Any]:
        """Run a listing and return its names."""
        scope = {name: getattr(typing, name) for name in typing.__all__} | {"np": np, "torch": torch, "re": re}
        scope |= {"random": random, "logger": LOGGER, "defaultdict": defaultdict, "DataProto": DataProto}
        scope |= {"Trajectory": Trajectory, "Task": Task} | values
        exec(self.listing(number, *names), scope)
        return scope


@pytest.fixture(scope="module")
def documents() -> Documents:
    return Documents()


class Task(SimpleNamespace):
    """A task of AgentEvolver."""


class TaskManager:
    def get_task_by_id(self, task_id: str) -> Task:
        return Task(task_id=task_id)


def config(**replay: Any) -> Any:
    section = {"enable": True, "replay_start_ratio": 0.0, "max_trajectories_per_task": 5, **PARTIAL, **replay}
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": {"n": N, "context_template": "linear"}},
            "exp_manager": {"experience_replay": section},
        }
    )


def rollout(task: str, number: int, outcome: float, data_id: int = 0) -> Trajectory:
    """Return a rollout of 2 prompt and up to 6 response tokens; its number and task determine them."""
    length = 3 + (number + len(task)) % 4
    mask = [1, 0, 1, 1, 0, 1][:length]
    return Trajectory(
        str(data_id),
        str(number),
        [{"role": "user", "content": task}, {"role": "assistant", "content": str(number)}],
        task,
        True,
        Reward(outcome=outcome),
        {},
        task_id=task,
        input_ids=torch.tensor([1, 2, *(100 * number + 10 * ord(task[-1]) + place for place in range(length))]),
        loss_mask=torch.tensor([0, 0, *mask]),
        response_start=2,
    )


class Environments(ours.ReplayEnvManager):
    tokenizer = SimpleNamespace(pad_token_id=0)

    def __init__(self) -> None:
        self.made: list[Trajectory] = []

    def rollout(self, tasks: Sequence[Task], *_: Any, **__: Any) -> list[Trajectory]:
        """Return N rollouts of each task, of which some succeed."""
        first = len(self.made)
        self.made += [
            rollout(task.task_id, first + place * N + number, float(number <= (first + place) % 3), place)
            for place, task in enumerate(tasks)
            for number in range(N)
        ]
        return self.made[first:]


class Actor:
    """A policy whose log-probs and entropies depend on the token and on its version."""

    version = 0

    def compute_log_prob(self, data: DataProto) -> DataProto:
        values = (data.batch["responses"] % 97).float() / 97
        return DataProto.from_dict(
            tensors={"old_log_probs": -values - self.version / 10 - 0.01, "entropys": values * (self.version + 1)}
        )


class Trainer(ours.ReplayTrainer):
    def __init__(self, options: Any) -> None:
        self.config = options
        self.exp_manager = ours.ExperienceManager(options.exp_manager)
        self.env_manager, self.actor_rollout_wg = Environments(), Actor()
        self.train_task_manager = TaskManager()
        self.tokenizer = Environments.tokenizer
        self.global_steps, self.total_training_steps = 0, 10
        self._save_checkpoint = int  # nothing else to save


FILTER = ("001", "on_policy_entropys")
LOG_PROBS = ("001", "old_log_probs_tensor")
WHOLE = ("000", 'traj.metadata["response_mask"]')
SAVE = ("001", "save_trajectories_to_memory(f")
ORDERS = {
    "filter first, as in 001": (FILTER, LOG_PROBS, SAVE),
    "log-probs first, as in 000": (LOG_PROBS, FILTER, SAVE),
    "log-probs of whole padded rows, as in 002": (FILTER, WHOLE, SAVE),
    "these first": (WHOLE, FILTER, SAVE),
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_training_loop_of_001(
    documents: Documents, order: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    trainer = Trainer(config(exp_ratio=0.5, offpolicy_trajectories_per_task=1, max_trajectories_per_task=99))
    scope: dict[str, Any] = {"self": trainer, "ExperienceMixCollateFn": ours.ExperienceMixCollateFn, "Task": Task}
    scope |= {"task_exp_configs": None, "epoch": 0, "i": 0, "n_rollout": N, "np": np, "offpolicy_cmt_array": []}

    def play(number: str, *names: str, **values: Any) -> None:
        exec(documents.listing(number, *names), scope.update(values) or scope)  # type: ignore[func-returns-value]

    recorded: dict[tuple[str, str], list[float]] = {}
    replayed = 0
    for step in range(1, 4):
        trainer.global_steps = trainer.actor_rollout_wg.version = step
        scope["tasks"] = [Task(task_id=f"{step}{letter}") for letter in "abcd"]
        play("001", "enable_exp_replay =")
        play("001", "experience_mix_collate =")
        play("001", "tasks = experience_tasks +")
        play("001", "task_id_to_data_id = {", "use_saved_entropy")
        play("001", "env_manager.rollout")
        play("001", "update_difficulty2task_dict(trajectories)")
        play("001", "trajectories + offpolicy")
        play("001", "to_dataproto(all_trajectories)")
        batch = scope["batch"] = scope["gen_batch_output"]
        masks = batch.batch["response_mask"] = ours.compute_response_mask(batch)
        play("001", 'batch.non_tensor_batch["uid"]')
        play("001", "entropys = old_log_prob")
        play("001", "exp_is_correct = ")
        fresh, current = scope["trajectories"], scope["old_log_prob"].batch["old_log_probs"]
        for row, history in enumerate(scope["offpolicy_cmt_array"], len(fresh)):
            replayed += 1
            assert batch.non_tensor_batch["uid"][row] == history.data_id
            used = batch.batch["old_log_probs"][row][masks[row].bool()]
            assert used.tolist() == recorded[history.task_id, history.rollout_id]
        scope["on_policy_entropys"], scope["on_policy_response_mask"] = scope["entropys"][:16], masks[:16]
        for listing in ORDERS[order]:
            if listing is not WHOLE:
                play(*listing)
                continue
            for made, log_probs, mask in zip(fresh, current, masks, strict=False):
                play(*listing, traj=made, traj_old_log_prob=log_probs.numpy(), traj_response_mask=mask.numpy())
                made.metadata["policy_version"] = step
        for made, log_probs, mask in zip(fresh, current, masks, strict=False):
            assert isinstance(made.metadata["entropy"], float)
            recorded[made.task_id, made.rollout_id] = log_probs[mask.bool()].tolist()
    assert replayed == 4, "two tasks in two steps"
    manager = trainer.exp_manager
    assert len(manager) == sum(made.success for made in trainer.env_manager.made)
    for history in (history for held in manager.task2trajectories.values() for history in held):
        log_probs, mask = (torch.tensor(history.metadata[name]) for name in ("old_log_probs", "response_mask"))
        assert log_probs[mask.bool()].tolist() == recorded[history.task_id, history.rollout_id]
        assert history.metadata["policy_version"] == int(history.rollout_id) // 16 + 1
        assert history.metadata["task_id"] == history.task_id
    assert not caplog.messages

    trainer.config.trainer = {"save_freq": 1, "default_local_dir": str(tmp_path)}
    folder = str(tmp_path / "experience_pool" / "step_3")
    play("001", "save_experience_pool_to_disk", os=os, is_last_step=True)
    play("001", "load_experience_pool_from_disk", ExperienceManager=ours.ExperienceManager, exp_pool_load_dir=folder)
    assert trainer.exp_manager is not manager
    assert trainer.exp_manager.rerate(lambda history: history.reward and history.reward.outcome) == len(manager)
    trainer.exp_manager.save_experience_pool_to_disk(tmp_path / "again")
    for path in (Path(folder), tmp_path / "again"):
        saved = [one for held in read_pool(path).task2trajectories.values() for one in held]
        assert not any("old_log_probs" in one.metadata for one in saved), "what was in metadata is stored once"
    assert trainer.exp_manager.difficulty2task_dict == manager.difficulty2task_dict
    assert len(trainer.exp_manager) == len(manager)


def test_rows_have_the_keys_masks_and_advantages_of_the_documents(documents: Documents) -> None:
    environments, tasks = Environments(), [Task(task_id=name) for name in "ab"]
    found = histories(ours.ExperienceManager(config()))
    for history, name in zip(found, "aabb", strict=True):
        history.task_id = name
    replayed = environments.convert_offpolicy_to_cmt(found, task_id_to_data_id={"a": 0, "b": 1})
    guided = rollout("a", 9, 1.0)
    guided.metadata |= {"add_exp": True, "task_train_exp_mode": "discard"}
    made = [*environments.rollout(tasks), guided, *replayed]
    rows = environments.trajectories_to_samples(made)
    data = environments.samples_to_dataproto(rows)
    keys, others = (
        set(re.findall(r'"(\w+)"', documents.listing("001", *names)))
        for names in (('"prompts": torch.Tensor',), ('"rollout_ids": np.ndarray',))
    )
    computed = {"old_log_probs", "log_probs", "advantages", "returns", "token_level_rewards"}
    assert keys - computed <= set(data.batch.keys())
    assert others <= set(data.non_tensor_batch)

    names = ("prompt_exp_mask_list", "response_exp_mask_list")
    for row, one in enumerate(rows):
        mask = one.trajectory.loss_mask
        assert mask is not None
        sample = SimpleNamespace(extras=one.extras, prompt_loss_mask=mask[:2], response_loss_mask=mask[2:].tolist())
        lists: dict[str, list[Any]] = {name: [] for name in names}
        marker = "torch.tensor(sample.response_loss_mask" if one.is_experience_replay else "add_exp"
        documents.run("002", "prompt_exp_mask_list.append", marker, sample=sample, **lists)
        wanted = torch.cat([lists[name][0] for name in names])
        assert torch.equal(data.batch["exp_mask"][row][: len(wanted)], wanted.long())

    generator = torch.Generator().manual_seed(1)
    arguments = {"token_level_rewards": torch.rand(data.batch["responses"].shape, generator=generator)}
    arguments["response_mask"] = ours.compute_response_mask(data)
    index = [str(int(group)) for group in data.batch["group_ids"]]
    scope = {"index": index, "id2mean": {}, "id2std": {}, "bsz": len(index), "epsilon": 1e-6} | arguments
    scope |= {"torch": torch, "defaultdict": defaultdict, "norm_adv_by_std_in_grpo": True}
    for name in ("token_level_rewards.sum", "id2score = ", "id2std[idx]", "scores[i] = (", "scores.unsqueeze"):
        exec(documents.listing("001", name), scope)
    mine, _ = ours.compute_grpo_outcome_advantage(**arguments, index=index)
    torch.testing.assert_close(mine, scope["scores"])


def test_the_pool_of_000_has_the_same_contents(documents: Documents) -> None:
    """Its methods, run as a class of their own, beside ours; ``save_filter: best`` is the filter of this document."""
    names = (
        "update_difficulty2task_dict",
        "update_skip_uid_set_and_filter_trajectories",
        "save_trajectories_to_memory",
    )
    found = {name: documents.run("000", f"def {name}(")[name] for name in names}
    theirs: Any = type("Documented", (SimpleNamespace,), found)()
    theirs.difficulty2task_dict, theirs.task2trajectories, theirs.skip_uid_set = defaultdict(list), {}, set()
    theirs.max_trajectories_per_task, theirs.exp_select_mode = 2, "argmin"
    theirs.experience_lbound, theirs.experience_rbound = 0, N
    manager = ours.ExperienceManager(config(max_trajectories_per_task=2, save_filter="best"))
    for name in re.findall(r"self\.(\w+)[:\s]", documents.listing("000", "def __init__(self, config: DictConfig)")):
        assert hasattr(manager, name), name
    chance = random.Random(5)
    for step in range(12):
        done = [
            build(task, 100 * step + number, float(chance.random() < share), entropy=None, metadata={})
            for task, share in (("a", 0.9), ("b", 0.4), ("c", 0.1), ("d", 0.7))
            for number in range(N)
        ]
        entropys, mask = torch.rand(len(done), 4, generator=torch.Generator().manual_seed(step)), torch.ones(16, 4)
        kept = []
        for pool in (theirs, manager):
            pool.update_difficulty2task_dict(done)
            kept.append(pool.update_skip_uid_set_and_filter_trajectories(done, N, entropys, mask))
            pool.save_trajectories_to_memory(kept[-1])
        assert [made.rollout_id for made in kept[0]] == [made.rollout_id for made in kept[1]]
        assert manager.skip_uid_set == theirs.skip_uid_set
        buckets = {key: set(tasks) - theirs.skip_uid_set for key, tasks in theirs.difficulty2task_dict.items()}
        buckets = {key: tasks for key, tasks in buckets.items() if tasks}  # without solved tasks, as in 001
        assert {key: set(tasks) for key, tasks in manager.difficulty2task_dict.items()} == buckets
        contents = [
            {task: {made.rollout_id for made in held} for task, held in pool.task2trajectories.items() if held}
            for pool in (theirs, manager)
        ]
        assert contents[0] == contents[1]
    assert manager.skip_uid_set or len(manager)


def histories(manager: ours.ExperienceManager, count: int = 2) -> list[Any]:
    """Fill a pool with successes of two tasks, and return ``count`` of each task."""
    done = [rollout(task, number, float(number < 3)) for task in ("5", "6") for number in range(N)]
    for made in done:
        assert made.loss_mask is not None
        made.metadata |= {"old_log_probs": [-0.5] * int(made.loss_mask.sum()), "policy_version": 3}
    manager.update_difficulty2task_dict(done)
    assert manager.save_trajectories_to_memory(manager.update_skip_uid_set_and_filter_trajectories(done, N)) == 6
    return manager.get_offpolicy_batch(["5", "6"], count)


def test_a_conversion_of_ones_own_finds_the_values_of_histories(
    documents: Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listings 3.2 of 000, with stand-ins for AgentEvolver's context."""
    module: Any = ModuleType("agentevolver.module.context_manager.cmt_linear")
    module.ExtendedMessage = SimpleNamespace
    for name in ("agentevolver", "agentevolver.module", "agentevolver.module.context_manager"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    context = {"Linear_CMT": lambda *_: SimpleNamespace(full_context=[], metadata={}), "DictConfig": Any}
    convert = documents.run("000", "def convert_offpolicy_to_cmt(", **context, LinearThinkCMT=None)
    convert = convert["convert_offpolicy_to_cmt"]
    found = histories(ours.ExperienceManager(config()))
    made = convert(None, found, config(), None)
    assert [(one.task_id, one.rollout_id, one.query, one.data_id) for one in made] == [
        (one.task_id, one.rollout_id, one.task_id, str(1000000 + 1000 * int(one.task_id) + number))
        for number, one in enumerate(found)
    ]
    get_extra = documents.run("000", "def get_extra(self, cmt)")["get_extra"]
    for one, history in zip(made, found, strict=True):
        extra = get_extra(None, one)
        assert extra["old_log_probs"] == history.old_log_probs.tolist()
        assert one.metadata["policy_version"] == 3
        assert one.reward.model_dump() == {**vars(Reward(outcome=1.0)), "madness": 0.0}
        assert [message.author for message in one.full_context] == ["user", "llm"]
        assert {"old_log_probs", "is_experience_replay"} <= set(extra) == set(Environments().get_extra(history))

    positions = {"5": 0, "6": 1}
    batch = Environments().to_dataproto(Environments().convert_offpolicy_to_cmt(found, task_id_to_data_id=positions))
    samples = [
        SimpleNamespace(extras=get_extra(None, one), response_ids=history.input_ids[2:])
        for one, history in zip(made, found, strict=True)
    ]
    width = batch.batch["responses"].shape[1]
    columns = ("prompt_ids", "response_ids", "input_ids", "attention_mask", "position_ids", "loss_mask", "exp_mask")
    built = documents.run(
        *("000", "recorded_old_log_probs_list = []"),
        **dict.fromkeys((*columns, "step_ids_pad", "group_ids"), torch.zeros(4)),
        samples=samples,
        TensorDict=TensorDict,
        pad_sequence=torch.nn.utils.rnn.pad_sequence,
        pad_sequence_to_length=torch_functional.pad_sequence_to_length,
        max_response_length_this_batch=width,
    )
    recorded = built["recorded_old_log_probs"]
    assert torch.equal(recorded, batch.batch["recorded_old_log_probs"])

    replace = documents.run("000", "def _replace_recorded_old_log_probs(")["_replace_recorded_old_log_probs"]
    current = DataProto.from_dict(tensors={"old_log_probs": torch.full((4, width), -2.0)})
    own = DataProto.from_dict(tensors={key: value for key, value in batch.batch.items() if key != "recorded_mask"})
    mine = Trainer(config())._replace_recorded_old_log_probs(own, current).batch["old_log_probs"]
    theirs = replace(None, batch, current).batch["old_log_probs"]
    assert torch.equal(mine, theirs)
    assert set(mine.unique().tolist()) == {-0.5, -2.0}


def test_batches_are_mixed_by_the_class_of_000_from_our_pool(documents: Documents) -> None:
    manager = ours.ExperienceManager(config())
    histories(manager)
    names = {"ExperienceManager": ours.ExperienceManager, "TaskManager": TaskManager}
    theirs = documents.run("000", "class ExperienceMixCollateFn", **names)["ExperienceMixCollateFn"]
    tasks = [Task(task_id=name) for name in "abcd"]
    for kind in (theirs, ours.ExperienceMixCollateFn):
        mix = kind(manager, TaskManager(), 0.5, 0.35, 1, N)
        assert mix(tasks, 0.3) == ([], tasks)
        experience, fresh = mix(tasks, 0.4, True)
        assert {task.task_id for task in experience} == {"5", "6"}
        assert [task.task_id for task in fresh] == ["a", "b"]
        for name, value in vars(theirs(manager, TaskManager(), 0.5, 0.35, 1, N)).items():
            assert name == "train_task_manager" or getattr(mix, name) == value


def test_the_loss_of_000(documents: Documents) -> None:
    listing = documents.run(
        "000", "def het_compute_token_on_off_policy_loss(", verl_F=torch_functional, agg_loss=agg_loss
    )
    generator = torch.Generator().manual_seed(3)
    old, new, advantages = (torch.randn(4, 6, generator=generator) for _ in range(3))
    mask = (torch.rand(4, 6, generator=generator) > 0.2).float()
    arguments = (old, new, advantages, mask, torch.tensor([0.0, 1.0, 0.0, 1.0])[:, None] * mask)
    options = {"cliprange_low": 0.2, "cliprange_high": 0.28, "off_cliprange_high": 1.0}
    theirs = listing["het_compute_token_on_off_policy_loss"](*arguments, **options)
    mine: dict[str, Any] = dict(ours.het_compute_token_on_off_policy_loss(*arguments, **options))  # type: ignore[arg-type]
    for name in ("pg_loss", "on_pg_loss", "off_pg_loss", "ppo_kl"):
        torch.testing.assert_close(mine[name], theirs[name])


def test_experience_as_in_003(documents: Documents) -> None:
    with FakeReMe() as service:
        (text,) = re.findall(r"```yaml\n(.*?)```", documents.texts["003"], re.DOTALL)
        options = yaml.safe_load(text) | {"actor_rollout_ref": {"rollout": {"n": N}}}
        options["experience_maker"] |= {"base_url": service.url, "enable_context_generator": True}
        manager, worker = ours.ExperienceManager(options), ours.ExperienceWorker(options)
        tasks = [Task(task_id=name) for name in "abcd"]
        modes = documents.run("003", "expmode_to_ratio =", self=manager, tasks=tasks, keep_count=0)["exp_modes"]
        assert [one.train_mode for one in manager.allocate_train_mode(tasks)] == modes
        choices = documents.run("003", "add_exp_choices =", self=manager, rollout_n=N, exp_mode="mixed")
        assert [sum(one.add_exp) for one in manager.get_complete_exp_configs(tasks)] == [
            sum(choices["add_exp_choices"])
        ] * 4

        trajectory = Trajectory("0", "0", [{"role": "user", "content": "where is the cup"}], reward=Reward(outcome=1.0))
        summary = documents.run("003", "thread_pool.submit", self=manager, trajectories=[trajectory])["summary_task"]
        assert summary.result()[0] == 2
        documents.run("003", "call_context_generator", self=worker, trajectory=trajectory)
        content = trajectory.steps[-1]["content"]
        assert "go kitchen" in content
        taken = documents.run("003", "cleaned_message =", self=worker, message=content)["cleaned_message"]
        assert taken == "where is the cup" == worker.manage_training_context(content, {})[1]
