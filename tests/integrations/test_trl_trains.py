"""TRL's own trainers, unchanged, train the rollouts in the store. Needs TRL 1.16; a minute on a CPU."""

from __future__ import annotations

import itertools
import os
import queue
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.pages import blocks, section
from tests.verl_plugin.assets import make_assets
from trainer_hooks.integrations.trl import RecordingRollouts, RecordingWorker
from trajstore import AgentTrajectory, TrajectoryReplayBuffer
from trajstore.errors import ConfigurationError

pytest.importorskip("trl", reason="needs trl 1.16")
pytestmark = pytest.mark.campaign

STEPS, BATCH, GROUP = 30, 8, 4


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, *_: Any,
    softmax_scale: float, **__: Any,
) -> torch.Tensor:  # fmt: skip
    """FlashAttention's function of variable lengths, causal, for a CPU."""
    parts = []
    for start, end, first, last in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        q, (k, v) = (
            query[start:end],
            (x[first:last].repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value)),
        )
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        scores = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v))
    return torch.cat(parts)


def log_probs_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs of the tokens but the first."""
    position_ids = torch.arange(len(ids))
    segments = {
        "tree_kv_index": position_ids,
        "tree_cu_seqlens_q": torch.tensor([0, len(ids)], dtype=torch.int32),
        "tree_cu_seqlens_k": torch.tensor([0, len(ids)], dtype=torch.int32),
        "tree_max_seqlen_q": len(ids),
        "tree_max_seqlen_k": len(ids),
    }
    logits = model(input_ids=ids[None], position_ids=position_ids[None], use_cache=False, **segments).logits[0]
    return logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]


class Stored(dict[tuple[int, ...], AgentTrajectory]):
    """Rollouts of a store by their tokens, read again by another reader while the store is written."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def __missing__(self, ids: tuple[int, ...]) -> AgentTrajectory:
        with TrajectoryReplayBuffer.open(str(self.path)) as reader:
            for number in reader.trajectory_ids.tolist()[len(self) :]:
                rollout = reader.get(number)
                self[tuple(rollout.input_ids.tolist())] = rollout
        return self[ids]


class Worker:
    """Makes groups with the trainer's weights when its queue is asked: prompt, reply, words of a tool, reply."""

    def __init__(self) -> None:
        self.rollout_buffer, self.metrics_queue = self, queue.Queue()
        self.made: list[Any] = []
        self.trainer: Any = None
        self.version, self.groups, self.running = 0, itertools.count(), False
        self.generator = torch.Generator().manual_seed(5)

    def start(self) -> None:
        self.running = True

    def stop(self) -> None:
        self.running = False

    def update_model_version(self, model_version: int) -> None:
        self.version = model_version

    def check_health(self, stale_after_s: float) -> None: ...

    def qsize(self) -> int:
        return len(self.made)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self.made:
            self.made = self.group(next(self.groups))
        return self.made.pop(0)

    @torch.no_grad()
    def group(self, number: int) -> list[Any]:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        prompt, made = torch.randint(5, 40, (6,), generator=self.generator), []
        for _ in range(GROUP):
            lengths = torch.randint(1, 6, (3,), generator=self.generator).tolist()
            reply = torch.randint(5, 40, (sum(lengths),), generator=self.generator)
            mask = np.repeat([0, 1, 0, 1], [6, *lengths])
            ids = torch.cat([prompt, reply])
            log_probs = torch.cat([torch.zeros(1), log_probs_of(self.trainer.model, ids)]).numpy() * mask
            reward = float((reply < 20).float().mean())
            made.append(
                RolloutSample(
                    prompt=[{"role": "user", "content": str(prompt.tolist())}],
                    completion=[{"role": "assistant", "content": str(reply.tolist())}],
                    input_ids=ids.numpy(), completion_mask=mask, old_log_probs=log_probs.astype(np.float32),
                    advantage=0.0, model_version=self.version, group_id=number, metrics={"reward": reward},
                )
            )  # fmt: skip
        mean = np.mean([sample.metrics["reward"] for sample in made])
        for sample in made:
            sample.advantage = float(sample.metrics["reward"] - mean)
        return made


def noted(take: Any, delivered: list[Any]) -> Any:
    """Return a function that also appends what ``take`` returns to a list."""

    def get(*given: Any, **named: Any) -> Any:
        delivered.append(take(*given, **named))
        return delivered[-1]

    return get


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=attention))


@pytest.mark.usefixtures("on_cpu")
def test_asynchronous_trainer_trains_what_is_stored_also_after_a_restart(tmp_path: Path) -> None:
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    delivered: list[Any] = []
    losses: list[tuple[float, float]] = []
    steps = itertools.count()

    class Trainer(AsyncGRPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            step = next(steps)
            with torch.no_grad():
                losses.append((loss.item(), loss_of_stored(model, delivered[step * BATCH : (step + 1) * BATCH])))
            return loss

    def loss_of_stored(model: Any, samples: list[Any]) -> float:
        buffer.flush()
        terms = []
        for sample in samples:
            rollout = stored[tuple(sample.input_ids.tolist())]
            assert rollout.policy_version == sample.model_version + recording.rollout_buffer.recording.before
            start = rollout.response_start
            ratio = (log_probs_of(model, rollout.input_ids)[start - 1 :] - rollout.rollout_log_probs).exp()
            advantage = rollout.metadata["trl"]["advantage"]
            terms.append(-torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)[rollout.response_mask == 1])
        return float(torch.cat(terms).mean())

    stored = Stored(tmp_path / "store")
    assets = make_assets(tmp_path / "assets")
    args = AsyncGRPOConfig(
        str(tmp_path / "out"), max_steps=STEPS, per_device_train_batch_size=BATCH, gradient_accumulation_steps=1,
        max_staleness=3, token_budget=0, learning_rate=1e-2, report_to="none", save_strategy="no", use_cpu=True,
        bf16=False, dtype="float32", logging_steps=1, epsilon=0.2, temperature=1.0, gradient_checkpointing=False,
        num_generations=GROUP, disable_tqdm=True,
    )  # fmt: skip
    quiet = SimpleNamespace(**dict.fromkeys(("init_weight_transfer", "pause", "resume", "destroy"), lambda: None))
    quiet.send_weights = lambda iterator: [None for _ in iterator]
    for process in range(2):  # TRL counts the versions of each from 0
        delivered, losses, steps = [], [], itertools.count()
        worker = Worker()
        worker.generator.manual_seed(5 + process)
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store") as buffer:
            recording = RecordingWorker(worker, buffer, replay=0.25, max_staleness=args.max_staleness)
            recording.rollout_buffer.get = noted(recording.rollout_buffer.get, delivered)
            trainer = Trainer(
                str(assets.model), train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "2"}]}]),
                reward_funcs=[lambda **_: [0.0]], args=args, rollout_worker=recording, weight_transfer=quiet,
            )  # fmt: skip
            worker.trainer = trainer
            trainer.train()
            versions = [rollout.policy_version for rollout in map(buffer.get, buffer.trajectory_ids.tolist())]
        replayed = [sample for sample in delivered if "replay/reward" in sample.metrics]
        assert len(losses) == STEPS
        assert [trained for trained, _ in losses] == pytest.approx([kept for _, kept in losses], rel=1e-4, abs=1e-6)
        assert 0.2 < len(replayed) / len(delivered) <= 0.25
        assert {sample.metrics["replay/staleness"] for sample in replayed} == {1.0, 2.0, 3.0}
        log = [line for line in trainer.state.log_history if "replay/reward" in line]
        assert len(log) > STEPS - 5
        assert max(line["ratio"] for line in log) != pytest.approx(1, abs=1e-3)
        assert not any("sample/dropped_stale_total" in line for line in trainer.state.log_history)
        assert not worker.running
        assert sorted(set(versions)) == [*range(1, max(versions) + 1)]
        assert max(versions) == (process + 1) * (trainer.model_version - 1)


@pytest.mark.usefixtures("on_cpu")
def test_trainer_with_rollout_function_trains_what_is_stored(tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    threshold, made, losses = 0.02, [], []
    generator = torch.Generator().manual_seed(6)

    @torch.no_grad()
    def rollouts(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        made.append(len(prompts))
        output: dict[str, Any] = {
            name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask", "tries")
        }
        for prompt in prompts:
            prompt_ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
            reply = torch.randint(5, 40, (int(torch.randint(2, 8, (1,), generator=generator)),), generator=generator)
            ids = torch.cat([torch.tensor(prompt_ids), reply])
            logits = trainer.model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
            log_probs = logits.gather(1, ids[1:, None])[len(prompt_ids) - 1 :, 0]
            for name, value in zip(
                output,
                (prompt_ids, reply.tolist(), log_probs.tolist(), [1, 0, *[1] * (len(reply) - 2)], 3),
                strict=True,
            ):
                output[name].append(value)
        return output

    def short(completion_ids: list[list[int]], tries: list[int], **_: Any) -> list[float]:
        assert tries == [3] * len(completion_ids)
        return [float(np.mean([token < 20 for token in ids])) for ids in completion_ids]

    class Trainer(GRPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            buffer.flush()
            if not self.replays:
                return loss
            rows = zip(
                inputs["prompt_ids"],
                inputs["prompt_mask"],
                inputs["completion_ids"],
                inputs["completion_mask"],
                strict=True,
            )
            terms = []
            for at, (prompt, prompt_mask, reply, mask) in enumerate(rows):
                rollout = stored[(*prompt[prompt_mask == 1].tolist(), *reply[mask == 1].tolist())]
                taken, on = rollout.rollout_log_probs, rollout.response_mask == 1
                assert torch.equal(taken, inputs["sampling_per_token_logps"][at][mask == 1])
                with torch.no_grad():
                    now = model(input_ids=rollout.input_ids[None]).logits[0, :-1].log_softmax(-1)
                now = now.gather(1, rollout.input_ids[1:, None])[rollout.response_start - 1 :, 0]
                rewards[rollout.task_id].append(rollout.reward.outcome)
                advantage = float(inputs["advantages"][at])
                kept = advantage >= 0 or float((taken - now)[on].mean()) <= threshold
                terms.append(-advantage * kept)
                ages.add(self.state.global_step - rollout.policy_version)
            losses.append((loss.item(), float(np.mean(terms))))
            return loss

    assets = make_assets(tmp_path / "assets")
    tokenizer = AutoTokenizer.from_pretrained(assets.model)
    dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{n}"}]} for n in (2, 3, 4)])
    stored, ages, rewards = Stored(tmp_path / "store"), set(), defaultdict(list)

    def trainer_of(steps: int, replay: int, **options: Any) -> Any:
        recording = RecordingRollouts(rollouts, buffer, replay=replay, max_staleness=8)
        args = GRPOConfig(
            str(tmp_path / "out"), max_steps=steps, per_device_train_batch_size=8, num_generations=GROUP, beta=0.0,
            learning_rate=1e-2, report_to="none", save_strategy="no", use_cpu=True, bf16=False, loss_type="grpo",
            logging_steps=1, gradient_checkpointing=False, disable_tqdm=True, max_completion_length=8, **options,
        )  # fmt: skip
        trainer = Trainer(
            str(assets.model), recording.scored(short), args=args, train_dataset=dataset, rollout_func=recording,
            processing_class=tokenizer,
        )  # fmt: skip
        trainer.replays = replay
        return trainer

    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store") as buffer:
        with pytest.raises(ConfigurationError, match="with a ratio of 1; set use_vllm"):
            trainer_of(1, 1).train()
        trainer_of(STEPS, 1, off_policy_mask_threshold=threshold).train()
    assert len(losses) == STEPS
    assert [trained for trained, _ in losses] == pytest.approx([kept for _, kept in losses], rel=1e-3, abs=1e-5)
    assert any(abs(loss) > 1e-3 for loss, _ in losses), "some rollouts are masked, or the loss is 0"
    assert {8, 6} <= set(made)
    assert max(ages) > 0
    assert all(reward is not None for group in rewards.values() for reward in group)


def test_the_script_of_the_page_prints_its_output(project_root: Path, tmp_path: Path) -> None:
    page = section((project_root / "docs" / "start" / "agents.md").read_text(), "Another trainer")
    (script,), (output,) = blocks(page, "python"), blocks(page, "text")
    environment = {**os.environ, "PYTHONPATH": str(project_root), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in output.splitlines() if line not in done.stdout.splitlines()] == []
    with TrajectoryReplayBuffer.open(tmp_path / "replayed") as store:
        assert {store.get(number).policy_version for number in store.trajectory_ids.tolist()} == set(range(40))
