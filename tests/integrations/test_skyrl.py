"""The generator's wrapper for SkyRL, with a generator's inputs and outputs as in SkyRL 0.3."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.pages import run_section
from trainer_hooks.integrations.skyrl import RecordingGenerator
from trajstore import TrajectoryReplayBuffer
from trajstore.errors import ConfigurationError

CORRECTED = SimpleNamespace(off_policy_correction=SimpleNamespace(tis_ratio_type="token"))


@dataclass
class TrajectoryID:
    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        return f"{self.instance_id}_{self.repetition_id}"


def inputs(step: int, phase: str = "train") -> dict[str, Any]:
    """Return the input of two prompts, three rollouts each."""
    names = ["a"] * 3 + ["b"] * 3
    return {
        "prompts": [[{"role": "user", "content": name}] for name in names],
        "env_classes": ["env"] * 6,
        "env_extras": [{"number": at} for at in range(6)],
        "sampling_params": {"logprobs": 1},
        "trajectory_ids": [TrajectoryID(name, at % 3) for at, name in enumerate(names)],
        "batch_metadata": SimpleNamespace(global_step=step, training_phase=phase),
    }


class Generator:
    """Counts its calls in the tokens."""

    def __init__(self, **changes: Any) -> None:
        self.calls: list[list[dict[str, int]]] = []
        self.changes = changes

    async def generate(self, input_batch: dict[str, Any], disable_tqdm: bool = False) -> dict[str, Any]:
        self.calls.append(input_batch["env_extras"])
        count = len(input_batch["prompts"])
        output = {
            "prompt_token_ids": [[1, 2]] * count,
            "response_ids": [[10 * len(self.calls), at, 7] for at in range(count)],
            "rewards": [[0.0, 0.0, at / 4] for at in range(count)],
            "loss_masks": [[1, 0, 1]] * count,
            "stop_reasons": ["stop", *["length"] * (count - 1)],
            "rollout_logprobs": [[-0.5, 0.0, -1.0]] * count,
            "rollout_metrics": {"generate/turns": 2.0},
            "trajectory_ids": input_batch["trajectory_ids"],
            "trajectory_generation_times": [0.1] * count,
            "is_last_step": None,
        } | self.changes  # fmt: skip
        return {name: value(count) if callable(value) else value for name, value in output.items()}


def run(hook: RecordingGenerator, *steps: Any) -> list[dict[str, Any]]:
    return [asyncio.run(hook.generate(inputs(*given), disable_tqdm=True)) for given in steps]


def check(output: dict[str, Any]) -> None:
    """Check lengths, as SkyRL's validate_generator_output."""
    for name, values in output.items():
        assert not isinstance(values, list) or len(values) == 6, name
    for row, ids in enumerate(output["response_ids"]):
        assert len(ids) == len(output["loss_masks"][row]) == len(output["rollout_logprobs"][row])


def test_rollouts_are_recorded_and_replayed_in_their_groups(tmp_path: Path) -> None:
    generator = Generator()
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        hook = RecordingGenerator(generator, buffer, algorithm=CORRECTED, replay=1, max_staleness=1)
        first, second, _, evaluated = run(hook, (1,), (2,), (9,), (9, "eval"))
        stored = buffer.get(3)
        assert len(buffer) == 6 + 4 + 6
    assert [len(call) for call in generator.calls] == [6, 4, 6, 6]
    assert generator.calls[1] == [{"number": at} for at in (0, 1, 3, 4)], "what belongs to fresh prompts"
    for output in (first, second, evaluated):
        check(output)
    for at, group in ((2, (0, 1, 2)), (5, (3, 4, 5))):
        place = second["response_ids"][at][1]
        assert place in group
        for name in ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "rollout_logprobs", "stop_reasons"):
            assert second[name][at] == first[name][place], name
    assert second["trajectory_ids"] == inputs(2)["trajectory_ids"]
    assert second["trajectory_generation_times"] == [0.1, 0.1, 0.0] * 2
    assert (stored.reward.outcome, stored.policy_version, stored.rollout_id) == (0.75, 1, "b_0")
    assert stored.loss_mask.tolist() == [0, 0, 1, 0, 1]
    assert (stored.is_terminated, buffer._closed) == (False, True)


def test_rewards_that_are_not_known_and_empty_responses_are_recorded(tmp_path: Path) -> None:
    def empty(column: list[Any]) -> Any:
        return lambda count: [[] for _ in range(count)] if column else None

    generator = Generator(
        rewards=lambda count: [math.nan] * count,
        response_ids=empty([0]),
        loss_masks=empty([0]),
        rollout_logprobs=empty([0]),
    )
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        hook = RecordingGenerator(generator, buffer, algorithm=CORRECTED, replay=1)
        run(hook, (1,), (2,))
        assert len(buffer) == 12, "nothing can be replayed"
        assert buffer.get(0).reward.outcome is None


def test_rows_of_steps_are_recorded(tmp_path: Path) -> None:
    def twice(make: Any) -> Any:
        return lambda count: [make(row) for row in range(2 * count)]

    generator = Generator(
        prompt_token_ids=twice(lambda _: [1]), response_ids=twice(lambda row: [row]), rewards=twice(lambda _: 0.5),
        loss_masks=twice(lambda _: [1]), stop_reasons=None, rollout_logprobs=None,
        trajectory_ids=twice(lambda row: TrajectoryID("a", row // 2)), is_last_step=twice(lambda row: row % 2 == 1),
    )  # fmt: skip
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        run(RecordingGenerator(generator, buffer), (1,))
        assert [buffer.get(number).rollout_id for number in range(3)] == ["a_0", "a_0", "a_1"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout_logprobs": None}, "set generator.sampling_params.logprobs"),
        ({"is_last_step": [True] * 6}, "returns is_last_step, which a replayed rollout does not have"),
        ({"pixel_values": [object()] * 6}, "returns pixel_values, which a replayed rollout does not have"),
    ],
)
def test_replay_of_what_is_not_kept_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        hook = RecordingGenerator(Generator(**changes), buffer, algorithm=CORRECTED, replay=1)
        with pytest.raises(ConfigurationError, match=message):
            run(hook, (1,))


@pytest.mark.parametrize(
    "algorithm", [None, SimpleNamespace(off_policy_correction=SimpleNamespace(tis_ratio_type=None))]
)
def test_replay_without_correction_is_refused(algorithm: Any) -> None:
    with (
        TrajectoryReplayBuffer() as buffer,
        pytest.raises(ConfigurationError, match="with a ratio of 1; set algorithm="),
    ):
        RecordingGenerator(Generator(), buffer, algorithm=algorithm, replay=1)


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callbacks: list[Any] = []

    def make_trainer(generator: RecordingGenerator) -> Any:
        run(generator, (1,))
        return SimpleNamespace(add_callback=callbacks.append)

    for name in ("skyrl", "skyrl.train", "skyrl.train.utils", "skyrl.train.utils.callbacks"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[], TrainingCallback=object))
    monkeypatch.chdir(tmp_path)
    cfg = SimpleNamespace(trainer=SimpleNamespace(algorithm=CORRECTED))
    names = run_section("trainers.md", "SkyRL", my_generator=Generator(), cfg=cfg, make_trainer=make_trainer)
    given = SimpleNamespace(global_step=1, logs={})
    with names["buffer"] as buffer:
        callbacks[0].on_save(None, given, None)
        callbacks[0].on_log(None, given, None)
        assert [point.step for point in buffer.points.saved] == [1]
    assert given.logs == {"trajstore/rollouts": 6}


def test_every_field_of_the_output_is_joined_or_refused(tmp_path: Path) -> None:
    def splits(count: int) -> dict[str, list[float]]:
        return {"llm": [0.1 * at for at in range(count)], "env": [0.2] * count}

    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "a") as buffer:
        hook = RecordingGenerator(Generator(trajectory_time_splits=splits), buffer, algorithm=CORRECTED, replay=1)
        _, second = run(hook, (1,), (2,))
        assert second["trajectory_time_splits"] == {
            "llm": [0.0, 0.1, 0.0, 0.2, 0.1 * 3, 0.0],
            "env": [0.2, 0.2, 0.0] * 2,
        }
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "b") as buffer:
        generator = Generator(trajectory_generation_times=lambda count: [1.0] * 5)
        hook = RecordingGenerator(generator, buffer, algorithm=CORRECTED, replay=1)
        run(hook, (1,))
        with pytest.raises(ConfigurationError, match="has 5 trajectory_generation_times for 4 rollouts"):
            run(hook, (2,))


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda rows: {"a": rows}])
def test_an_unknown_field_of_the_output_is_refused(tmp_path: Path, kind: Callable[[list[int]], Any]) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "a") as buffer:
        generator = Generator(new_field=lambda count: kind([1] * count))
        run(RecordingGenerator(generator, buffer), (1,))  # without replay, it passes
        with pytest.raises(ConfigurationError, match="new_field"):
            run(RecordingGenerator(generator, buffer, algorithm=CORRECTED, replay=1), (1,))
