"""The adapters of TRL, with samples of the shape of TRL 1.16; ``test_trl_trains`` has the trainers themselves."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import queue
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.pages import run_section
from tests.support.faults import FaultPlan, failing_disk
from trainer_hooks.integrations.trl import RecordingRollouts, RecordingWorker
from trajstore import TrajectoryReplayBuffer
from trajstore.errors import ConfigurationError, InvalidTrajectoryError, StoreClosedError, StoreWriteError


@dataclass
class Sample:
    """The fields of TRL's RolloutSample."""

    prompt: list[dict[str, str]]
    completion: list[dict[str, str]]
    input_ids: np.ndarray
    completion_mask: np.ndarray
    old_log_probs: np.ndarray
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float] = field(default_factory=dict)
    enqueued_at: float | None = None


def sample(version: int = 0, mask: tuple[int, ...] = (0, 0, 1, 0, 1), group: int = 0, **fields: Any) -> Sample:
    count = len(mask)
    values: dict[str, Any] = {
        "prompt": [{"role": "user", "content": "2+2"}],
        "completion": [{"role": "assistant", "content": "4"}],
        "input_ids": np.arange(count) + 10 * group,
        "completion_mask": np.array(mask),
        "old_log_probs": -np.arange(count, dtype=np.float32) * np.array(mask, np.float32),
        "advantage": 0.1,
        "metrics": {"reward": 0.5, "reward_std": 0.2},
    }
    return Sample(**values | fields, model_version=version, group_id=group)


class Worker:
    """A worker of TRL's protocol, with attributes of its own."""

    def __init__(self) -> None:
        self.rollout_buffer: queue.Queue[Sample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.calls: list[Any] = []
        self._loop_kwargs = {"dataset_start_index": 7}

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")
        if "die" in self.calls:
            raise RuntimeError("the worker died")

    def update_model_version(self, model_version: int) -> None:
        self.calls.append(model_version)

    def check_health(self, stale_after_s: float) -> None:
        if "die" in self.calls:
            raise RuntimeError(f"no heartbeat in {stale_after_s} s")


@pytest.fixture
def worker() -> Worker:
    return Worker()


def store(path: Path) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(auto_save=True, auto_save_path=path)


def take(recording: RecordingWorker, samples: list[Sample]) -> list[Any]:
    """Return the samples that the trainer gets until these samples are taken."""
    for fresh in samples:
        recording.worker.rollout_buffer.put(fresh)
    taken = []
    while recording.rollout_buffer.qsize():
        taken.append(recording.rollout_buffer.get(timeout=5.0))
    return taken


def test_samples_pass_and_come_again_as_they_were(tmp_path: Path, worker: Worker) -> None:
    with store(tmp_path) as buffer:
        recording = RecordingWorker(worker, buffer, replay=0.5, max_staleness=2)
        recording.start()
        first = sample(0, group=3)
        assert take(recording, [first, sample(0, group=4)])[0] is first, "nothing older than the current version yet"
        recording.update_model_version(1)
        fresh, replayed = sample(1, group=5), []
        for later in [fresh, sample(1, group=5)]:
            replayed += [got for got in take(recording, [later]) if "replay/reward" in got.metrics]
        recording.update_model_version(9)
        assert not [got for got in take(recording, [sample(9, group=6)] * 3) if "replay/reward" in got.metrics]
        recording.stop()
    assert worker.calls == ["start", 1, 9, "stop"]
    assert replayed
    for got in replayed:
        kept = first if got.input_ids[0] == 30 else sample(0, group=4)
        assert isinstance(got, Sample)
        assert (got.prompt, got.completion, got.advantage, got.model_version) == (
            kept.prompt,
            kept.completion,
            kept.advantage,
            0,
        )
        for name in ("input_ids", "completion_mask", "old_log_probs"):
            assert np.array_equal(getattr(got, name), getattr(kept, name)), name
        assert got.group_id in (4, 5), "that of the sample before: TRL counts groups of this process"
        assert got.metrics == {"replay/reward": 0.5, "replay/staleness": 1.0}


def test_the_part_that_is_replayed(tmp_path: Path, worker: Worker) -> None:
    with store(tmp_path) as buffer:
        recording = RecordingWorker(worker, buffer, replay=0.75, max_staleness=1)
        take(recording, [sample(0)])
        recording.update_model_version(1)
        kinds = ["replay/reward" in got.metrics for got in take(recording, [sample(1)] * 5)]
    assert kinds == [True, True, True, False] * 5


def test_a_resumed_worker_replays_what_an_earlier_process_recorded(tmp_path: Path, worker: Worker) -> None:
    with store(tmp_path) as buffer:
        take(RecordingWorker(worker, buffer), [sample(version, group=version) for version in range(130)])
    with store(tmp_path) as buffer:
        recording = RecordingWorker(worker, buffer, replay=0.5, max_staleness=120)
        recording.update_model_version(125)
        taken = take(recording, [sample(125, group=300)] * 60)
    versions = {got.model_version for got in taken if "replay/reward" in got.metrics}
    assert min(versions) >= 5
    assert min(versions) < 30, "also rollouts before the newest hundred, the buffer's window"
    assert max(versions) < 125, "none of the future, which another line of the run has made"


@pytest.mark.parametrize("first", [0, 1])
def test_ages_count_over_restarts_in_which_trl_counts_anew(tmp_path: Path, worker: Worker, first: int) -> None:
    """TRL counts the versions of each process from 0, and drops samples by their difference."""
    for process in range(3):
        with store(tmp_path) as buffer:
            recording = RecordingWorker(worker, buffer, replay=0.5, max_staleness=2)
            ages = []
            for version in range(first, first + 10):
                recording.update_model_version(version)
                for got in take(recording, [sample(version, group=version)] * 2):
                    if "replay/reward" in got.metrics:
                        ages.append(version - got.model_version)
                        assert got.metrics["replay/staleness"] == ages[-1]
            versions = [buffer.get(number).policy_version for number in buffer.trajectory_ids.tolist()]
        assert set(ages) == {1, 2}
        assert len(ages) >= 18, "from the first step on after a restart"
        assert sorted(set(versions)) == [*range(first, first + 10 + 10 * process)]


@pytest.mark.parametrize(
    ("odd", "replayable"),
    [
        (sample(mask=(0, 0, 0)), False),
        (sample(mask=(0, 1), old_log_probs=np.array([0, math.nan])), False),
        (sample(mask=(0, 1), old_log_probs=np.array([math.nan, -1])), True),
        (sample(metrics={"reward": math.nan, "rewards/f": math.nan}, advantage=0.0), True),
        (sample(metrics={}), True),
        (sample(prompt=[], completion=[]), True),
        (sample(prompt="2+2", completion="4"), True),
    ],
    ids=[
        "empty completion",
        "no log-prob",
        "log-prob of a prompt",
        "unknown reward",
        "no reward",
        "no text",
        "plain text",
    ],
)
def test_odd_samples_are_recorded(tmp_path: Path, worker: Worker, odd: Sample, replayable: bool) -> None:
    with store(tmp_path) as buffer:
        recording = RecordingWorker(worker, buffer, replay=0.9)
        assert take(recording, [odd]) == [odd]
        stored = buffer.get(0)
        recording.update_model_version(1)
        taken = take(recording, [sample(1)] * 2)
    assert stored.input_ids.tolist() == odd.input_ids.tolist()
    assert stored.loss_mask.tolist() == odd.completion_mask.tolist()
    reward = odd.metrics.get("reward", math.nan)
    assert stored.reward.outcome == (None if math.isnan(reward) else reward)
    assert any("replay/reward" in got.metrics for got in taken) == replayable


def test_a_worker_that_dies_is_reported_and_its_rollouts_are_on_disk(tmp_path: Path, worker: Worker) -> None:
    with store(tmp_path) as buffer:
        recording = RecordingWorker(worker, buffer)
        take(recording, [sample()])
        worker.calls.append("die")
        with pytest.raises(queue.Empty):
            recording.rollout_buffer.get(block=False)
        with pytest.raises(RuntimeError, match="no heartbeat in 3 s"):
            recording.check_health(3)
        with pytest.raises(RuntimeError, match="the worker died"):
            recording.stop()
        with TrajectoryReplayBuffer.open(str(tmp_path)) as reader:
            assert len(reader) == 1


def test_trl_sees_its_own_worker(tmp_path: Path, worker: Worker) -> None:
    with store(tmp_path) as buffer:
        recording = RecordingWorker(worker, buffer)
        assert isinstance(recording, Worker), "TRL keeps the place in the data set only for its own worker"
        recording._loop_kwargs["dataset_start_index"] = 9
    assert worker._loop_kwargs == {"dataset_start_index": 9}
    assert recording.metrics_queue is worker.metrics_queue


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"replay": 1.0}, "replay: 1.0, must be less than 1"),
        ({"replay": -0.1}, "replay"),
        ({"replay": 0.5, "max_staleness": 0}, "max_staleness: 0, but a recorded sample"),
        ({"max_staleness": -1}, "max_staleness"),
    ],
)
def test_wrong_arguments(worker: Worker, arguments: dict[str, Any], message: str) -> None:
    with TrajectoryReplayBuffer() as buffer, pytest.raises(ConfigurationError, match=message):
        RecordingWorker(worker, buffer, **arguments)


def test_a_store_that_cannot_be_written_stops_the_trainer(tmp_path: Path, worker: Worker) -> None:
    with store(tmp_path) as buffer:
        recording = RecordingWorker(worker, buffer)
        with failing_disk(FaultPlan(0, "ENOSPC", lasting=True)):
            take(recording, [sample()])
            with pytest.raises(StoreWriteError, match="No space left"):
                recording.stop()
        with TrajectoryReplayBuffer.open(str(tmp_path)) as reader, pytest.raises(ConfigurationError, match="can add"):
            RecordingWorker(worker, reader)  # type: ignore[arg-type]
    assert worker.calls == ["stop"]
    worker.rollout_buffer.put(sample())
    with pytest.raises(StoreClosedError):
        recording.rollout_buffer.get()


PROMPTS = ["one"] * 3 + ["two"] * 3


def trainer(step: int, **options: Any) -> Any:
    """Return the parts of GRPOTrainer that a rollout function sees."""
    defaults = {"use_vllm": False, "vllm_importance_sampling_correction": True, "off_policy_mask_threshold": 0.5}
    model = SimpleNamespace(training=options.pop("training", True))
    return SimpleNamespace(model=model, state=SimpleNamespace(global_step=step), **defaults | options)


def rollouts_of(calls: list[Any], **changes: Any) -> Callable[..., dict[str, Any]]:
    """Return a rollout function that counts calls in its tokens."""

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        calls.append(prompts)
        count = len(prompts)
        return {
            "prompt_ids": [[1, *map(ord, prompt)] for prompt in prompts],
            "completion_ids": [[len(calls), at] for at in range(count)],
            "logprobs": [[-0.5, -1.0]] * count,
            "scores": [f"{len(calls)}-{at}" for at in range(count)],
            "shared": "of all",
        } | {name: value if value is None else [value] * count for name, value in changes.items()}

    return rollouts


def test_groups_get_recorded_rollouts_of_their_prompt(tmp_path: Path) -> None:
    calls: list[Any] = []
    with store(tmp_path) as buffer:
        hook = RecordingRollouts(rollouts_of(calls, env_mask=[1, 0]), buffer, replay=1, max_staleness=1)
        first = hook(PROMPTS, trainer(0))
        second = hook(PROMPTS, trainer(1))
        hook(PROMPTS, trainer(9))
        hook(PROMPTS, trainer(9, training=False))
    assert [len(prompts) for prompts in calls] == [6, 4, 6, 6]
    assert first["trajectory_ids"] == [0, 1, 2, 3, 4, 5]
    assert second["trajectory_ids"] == [6, 7, None, 8, 9, None]
    assert second["scores"][0] == "2-0"
    for at, group in ((2, (0, 1, 2)), (5, (3, 4, 5))):
        place = int(second["scores"][at].partition("-")[2])
        assert place in group
        for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask", "scores"):
            assert second[name][at] == first[name][place], name
    assert second["shared"] == "of all"


@pytest.mark.parametrize("replay", [1, 2])
def test_a_prompt_twice_in_a_batch_is_two_groups(tmp_path: Path, replay: int) -> None:
    prompts, calls = ["p"] * 3 + ["q"] * 3 + ["p"] * 3, list[Any]()
    with store(tmp_path) as buffer:
        hook = RecordingRollouts(rollouts_of(calls), buffer, replay=replay)
        hook(prompts, trainer(0, num_generations=3))
        output = hook(prompts, trainer(1, num_generations=3))
    assert calls[1] == ["p"] * (3 - replay) + ["q"] * (3 - replay) + ["p"] * (3 - replay)
    taken = [score for score, number in zip(output["scores"], output["trajectory_ids"], strict=True) if number is None]
    assert len(set(taken)) == len(taken) == 3 * replay, "different ones"


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_replays_what_all_have_recorded(tmp_path: Path, ranks: int) -> None:
    """Prompts move between ranks: a rank that draws from its own store alone replays few groups."""
    whole, alone = [], []
    for shared, found in ((True, whole), (False, alone)):
        folder = tmp_path / f"run-{shared}"
        with contextlib.ExitStack() as stack:
            buffers = [stack.enter_context(store(folder / f"rank_{rank}")) for rank in range(ranks)]
            run = folder if shared else None
            hooks = [RecordingRollouts(rollouts_of([]), buffer, replay=1, run=run) for buffer in buffers]
            for step in range(3):
                for rank, hook in enumerate(hooks):
                    prompts = [f"p{(rank + step) % ranks}-{at // 2}" for at in range(12)]
                    found += [hook(prompts, trainer(step, num_generations=2))["trajectory_ids"].count(None)]
                for buffer in buffers:
                    buffer.flush()
    assert whole == [0] * ranks + [6] * 2 * ranks
    assert alone[: 2 * ranks] == [0] * 2 * ranks


def test_rewards_of_fresh_rollouts_are_recorded(tmp_path: Path) -> None:
    seen: list[Any] = []

    def length(completions: list[str], **others: Any) -> list[float | None]:
        """Score by length."""
        seen.append(others)
        return [None, math.nan, 3.0, *[1.0] * (len(completions) - 3)]

    with store(tmp_path) as buffer:
        hook = RecordingRollouts(rollouts_of([]), buffer, replay=1)
        hook(PROMPTS, trainer(0))
        output = hook(PROMPTS, trainer(1))
        score = hook.scored(length)
        score(completions=["a"] * 6, trajectory_ids=output["trajectory_ids"], column=1)
        score(completions=["a"] * 6, column=2)
        outcomes = {number: buffer.get(number).reward.outcome for number in range(10)}
    assert seen == [{"column": 1}, {"column": 2}], "the user's function need not know of ids"
    assert score.__name__ == "length"
    assert outcomes == dict.fromkeys(range(8)) | {8: 1.0, 9: 1.0}


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"off_policy_mask_threshold": None}, "with a ratio of 1; set use_vllm"),
        (
            {},
            {"off_policy_mask_threshold": None, "use_vllm": True, "vllm_importance_sampling_correction": False},
            "set use_vllm",
        ),
        ({"logprobs": None}, {}, "rollout_func returns logprobs=None"),
    ],
)
def test_replay_without_correction_is_refused(
    tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with store(tmp_path) as buffer:
        with pytest.raises(ConfigurationError, match=message):
            RecordingRollouts(rollouts_of([], **changes), buffer, replay=1)(PROMPTS, trainer(0, **options))
        assert len(buffer) == 0
        RecordingRollouts(rollouts_of([], **changes), buffer)(PROMPTS, trainer(0, **options))
        assert len(buffer) == 6, "recording alone needs no correction"


def test_columns_of_other_lengths_are_refused(tmp_path: Path) -> None:
    with store(tmp_path) as buffer, pytest.raises(InvalidTrajectoryError, match="rollout_log_probs has 1 values for 2"):
        RecordingRollouts(rollouts_of([], logprobs=[-1.0]), buffer)(PROMPTS, trainer(0))


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With trainers that take two samples, and two groups."""

    class AsyncGRPOTrainer:
        def __init__(self, *_: Any, rollout_worker: Any, **__: Any) -> None:
            self.worker = rollout_worker

        def train(self) -> None:
            self.worker.start()
            take(self.worker, [sample(), sample(mask=(0, 1))])
            self.worker.stop()

    class GRPOTrainer:
        def __init__(self, model: str, reward_func: Callable[..., Any], *, rollout_func: Any, **_: Any) -> None:
            self.reward_func, self.rollout_func = reward_func, rollout_func

        def train(self) -> None:
            output = self.rollout_func(PROMPTS, trainer(0))
            self.reward_func(trajectory_ids=output["trajectory_ids"])

    for name, members in {
        "trl": {"GRPOTrainer": GRPOTrainer},
        "trl.experimental": {},
        "trl.experimental.async_grpo": {"AsyncGRPOTrainer": AsyncGRPOTrainer},
    }.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[], **members))
    monkeypatch.chdir(tmp_path)
    run_section(
        "trainers.md", "TRL", model="a model", dataset=[], args=SimpleNamespace(max_staleness=3), grpo_args=None,
        my_worker=Worker(), my_rollout_func=rollouts_of([]), reward_func=lambda **_: [1.0] * 6,
    )  # fmt: skip
    with TrajectoryReplayBuffer.open("rollouts") as taken, TrajectoryReplayBuffer.open("rollouts_of_prompts") as made:
        assert len(taken) == 2
        assert [made.get(number).reward.outcome for number in made.trajectory_ids.tolist()] == [1.0] * 6


@pytest.mark.parametrize(
    ("processes", "count", "generations", "fine"),
    [
        (2, 1, 2, False),
        (2, 2, 4, False),
        (4, 6, 4, False),
        (8, 1, 8, False),
        (2, 6, 3, True),
        (4, 3, 3, True),
        (1, 6, 4, True),
    ],
)
def test_groups_that_are_spread_over_processes_are_refused(
    tmp_path: Path, processes: int, count: int, generations: int, fine: bool
) -> None:
    seen = trainer(1, accelerator=SimpleNamespace(num_processes=processes), num_generations=generations)
    with store(tmp_path) as buffer:
        hook = RecordingRollouts(rollouts_of([]), buffer, replay=1)
        if fine:
            assert len(hook(PROMPTS[:count], seen)["prompt_ids"]) == count
        else:
            with pytest.raises(
                ConfigurationError, match=f"{count} prompts in a process, but groups have {generations}"
            ):
                hook(PROMPTS[:count], seen)
        RecordingRollouts(rollouts_of([]), buffer)(PROMPTS[:count], seen)  # without replay, all are recorded


def test_asynchronous_reward_functions_are_recorded_and_models_refused(tmp_path: Path) -> None:
    async def reward(completions: list[str], **others: Any) -> list[float]:
        return [2.0 for _ in completions]

    with store(tmp_path) as buffer:
        hook = RecordingRollouts(rollouts_of([]), buffer)
        output = hook(PROMPTS, trainer(0))
        score = hook.scored(reward)
        assert inspect.iscoroutinefunction(score)
        assert asyncio.run(score(completions=["a"] * 6, trajectory_ids=output["trajectory_ids"])) == [2.0] * 6
        assert [buffer.get(number).reward.outcome for number in range(6)] == [2.0] * 6
        with pytest.raises(ConfigurationError, match="a reward model cannot be wrapped"):
            hook.scored(torch.nn.Linear(2, 1))


def test_two_reward_functions_of_one_name_are_refused(tmp_path: Path) -> None:
    def first(**_: Any) -> list[float]:
        return []

    def second(**_: Any) -> list[float]:
        return []

    with store(tmp_path) as buffer:
        hook = RecordingRollouts(rollouts_of([]), buffer)
        hook.scored(first)
        hook.scored(first)  # of a second trainer
        hook.scored(second, name="style")
        with pytest.raises(ConfigurationError, match="two functions for 'outcome'"):
            hook.scored(second)


@pytest.mark.parametrize(("generations", "replay"), [(4, 1), (4, 2), (3, 1), (8, 3)])
@pytest.mark.parametrize("each", [False, True], ids=["by stride", "one by one"])
def test_rollouts_of_other_prompts_are_refused(tmp_path: Path, generations: int, replay: int, each: bool) -> None:
    """TRL's server mode takes each n-th prompt, as groups are whole without replay."""

    def served(prompts: list[str], trainer: Any) -> dict[str, Any]:
        count = 1 if each else generations
        made = [prompt for prompt in prompts[::count] for _ in range(count)][: len(prompts)]
        ids = [[ord(letter) for letter in prompt] for prompt in made]
        return {"prompt_ids": ids, "completion_ids": [[7]] * len(ids), "logprobs": [[-0.5]] * len(ids)}

    prompts = ["one"] * generations + ["two"] * generations
    with store(tmp_path) as buffer:
        hook = RecordingRollouts(served, buffer, replay=replay)
        hook(prompts, trainer(0))
        if each:
            output = hook(prompts, trainer(1))
            assert output["prompt_ids"] == [[ord(letter) for letter in prompt] for prompt in prompts]
        else:
            with pytest.raises(ConfigurationError, match=r"the same prompt_ids for two prompts.*num_generations=1"):
                hook(prompts, trainer(1))
