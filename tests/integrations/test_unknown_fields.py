"""Fields of trainers that the adapters do not know are kept in the store; replayed only if they come back exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.integrations import test_episodes as episodes
from tests.integrations import test_skyrl as skyrl
from tests.integrations import test_slime as slime
from tests.integrations import test_trl as trl
from trainer_hooks.integrations.areal import rollouts_of
from trainer_hooks.integrations.openrlhf import rollout_of
from trainer_hooks.integrations.rollouts import LACKS
from trainer_hooks.integrations.skyrl import RecordingGenerator
from trainer_hooks.integrations.trl import RecordingRollouts, RecordingWorker
from trajstore import TrajectoryReplayBuffer
from trajstore.attachments import attached
from trajstore.errors import ConfigurationError
from trajstore.trajectory import AgentTrajectory

VALUES = {
    "text": "four", "nested": {"a": [1, None, 0.5]}, "number": np.float64(0.25), "tuple": (1, 2), "nan": float("nan"),
    "tensor": torch.arange(6.0).reshape(2, 3), "array": np.arange(4, dtype=np.int16), "bytes": b"\x89PNG",
    "object": object(),
}  # fmt: skip
arguments = slime.arguments
EXACT = ("text", "nested", "number")


def is_kept(rollout: AgentTrajectory, trainer: str, kind: str) -> None:
    """Check that the field ``new`` of a stored rollout has the value, or for odd ones a text of it."""
    value, found = VALUES[kind], rollout.metadata[trainer]["new"]
    if kind in ("tensor", "array", "bytes"):
        same = attached(rollout.metadata)[f"{trainer}.new"]
        assert same == value if kind == "bytes" else torch.equal(same, torch.as_tensor(value))
    elif kind in ("nan", "object"):
        assert found == str(value)
    else:
        assert found == (list(value) if kind == "tuple" else value)


@pytest.mark.parametrize("kind", VALUES)
def test_recording_keeps_them(kind: str, tmp_path: Path) -> None:
    value = VALUES[kind]
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        buffer.add_trajectories(rollouts_of(episodes.episode() | {"new": [value, value]}))
        buffer.add_trajectories([rollout_of(episodes.execution(new=value, label="4", extra_logs={"turns": 2}))])
        generator = skyrl.Generator(new=lambda count: [value] * count)
        skyrl.run(RecordingGenerator(generator, buffer), (1,))
        is_kept(buffer.get(0), "areal", kind)
        is_kept(buffer.get(2), "openrlhf", kind)
        is_kept(buffer.get(3), "skyrl", kind)
        assert (
            buffer.get(2).metadata["openrlhf"] | {"label": "4", "extra_logs": {"turns": 2}, "prompt": "2+2"}
            == (buffer.get(2).metadata["openrlhf"])
        )


def test_columns_of_an_episode_have_no_padding() -> None:
    columns = {"entropy": torch.rand(2, 5), "turn": torch.tensor([3, 4])}
    whole, short = rollouts_of(episodes.episode() | columns)
    assert torch.equal(attached(short.metadata)["areal.entropy"], columns["entropy"][1, :3])
    assert (whole.metadata["areal"]["turn"], short.metadata["areal"]["turn"]) == (3, 4)


@dataclass
class NewSample(trl.Sample):
    new: Any = None


@pytest.mark.parametrize("kind", VALUES)
def test_samples_of_trl_come_again_only_if_they_are_exact(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fresh(version: int) -> NewSample:
        return NewSample(**vars(trl.sample(version, enqueued_at=1.0)), new=VALUES[kind])

    with trl.store(tmp_path) as buffer:
        recording = RecordingWorker(trl.Worker(), buffer, replay=0.5, max_staleness=2)
        trl.take(recording, [fresh(0)])  # type: ignore[list-item]
        recording.update_model_version(1)
        taken = trl.take(recording, [fresh(1), fresh(1)])  # type: ignore[list-item]
        is_kept(buffer.get(0), "trl", kind)
    replayed = [sample for sample in taken if "replay/reward" in sample.metrics]
    assert bool(replayed) == (kind in EXACT) == (not caplog.messages)
    assert all((sample.new, sample.enqueued_at, sample.advantage) == (VALUES[kind], None, 0.1) for sample in replayed)


def test_samples_of_another_version_of_trl_are_named(tmp_path: Path) -> None:
    with trl.store(tmp_path) as buffer:
        recording = RecordingWorker(trl.Worker(), buffer, replay=0.5, max_staleness=2)
        trl.take(recording, [NewSample(**vars(trl.sample(0)), new=1)])
        recording.update_model_version(1)
        with pytest.raises(ConfigurationError, match=r"other fields than TRL's: .*'new'; use a new store"):
            trl.take(recording, [trl.sample(1), trl.sample(1)])


@pytest.mark.parametrize("kind", VALUES)
def test_lists_of_a_rollout_func_pass_as_they_are(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def made(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        count = len(prompts)
        columns = {"prompt_ids": [[1]] * count, "completion_ids": [[2]] * count, "logprobs": [[-0.5]] * count}
        return columns | {"new": [VALUES[kind]] * count, "temperature": 0.5}

    with trl.store(tmp_path) as buffer:
        rollouts = RecordingRollouts(made, buffer, replay=1)
        for step in range(2):
            output = rollouts(["a", "a"], trl.trainer(step))
            assert all(value is VALUES[kind] for value in output["new"][: 1 if step and kind in EXACT else 2])
        is_kept(buffer.get(0), "trl", kind)
        assert buffer.get(0).metadata["trl"]["temperature"] == 0.5
        assert (len(buffer) == 3) == (kind in EXACT) == (not caplog.messages)
        assert output["new"] == [VALUES[kind]] * 2


def test_lists_of_another_length_are_refused_in_replay(tmp_path: Path) -> None:
    def made(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        count = len(prompts)
        columns = {"prompt_ids": [[1]] * count, "completion_ids": [[2]] * count, "logprobs": [[-0.5]] * count}
        return columns | {"new": [1, 2, 3]}

    with trl.store(tmp_path) as buffer:
        rollouts = RecordingRollouts(made, buffer, replay=1)
        assert rollouts(["a", "a"], trl.trainer(0))["new"] == [1, 2, 3]
        with pytest.raises(ConfigurationError, match="has 3 new for 1 rollouts"):
            rollouts(["a", "a"], trl.trainer(1))


@pytest.mark.parametrize(
    ("value", "exact"),
    [
        *((value, kind in EXACT) for kind, value in VALUES.items()),
        (slime.Status.PENDING, False),
        (slime.Adapter("a", 1), False),
        ({"a": [float("inf")]}, False),
    ],
)
def test_samples_of_slime_come_again_only_if_they_are_exact(
    value: Any, exact: bool, arguments: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    args = arguments(trajstore_replay=1)
    source = slime.ReplayDataSource(args)
    for version in ("1", "2"):
        slime.step(args, source, version, False, label=value)
    assert slime.recording_of(args).buffer.get(0).metadata.get(LACKS, []) == ([] if exact else ["label"])
    again = [sample for group in source.get_samples(2) for sample in group if sample.status.value != "pending"]
    assert [sample.label for sample in again] == ([value] * 2 if exact else [])
    assert (not caplog.messages) == exact


def test_what_a_rollout_func_returns_passes_as_it_is(tmp_path: Path) -> None:
    """Log-probs are not rounded to ``float32``, and those that are not known stay None; also beside replayed ones."""

    def made(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        count = len(prompts)
        columns = {"prompt_ids": [[1]] * count, "completion_ids": [[2, 3]] * count}
        return columns | {"logprobs": [[-0.1, -0.3] if at % 2 == 0 else None for at in range(count)]}

    with trl.store(tmp_path) as buffer:
        rollouts = RecordingRollouts(made, buffer, replay=1)
        assert rollouts(["a"] * 3, trl.trainer(0))["logprobs"] == [[-0.1, -0.3], None, [-0.1, -0.3]]
        again = rollouts(["a"] * 3, trl.trainer(1))
        assert again["logprobs"][:2] == [[-0.1, -0.3], None]
        assert again["logprobs"][2] == pytest.approx([-0.1, -0.3])
        assert again["trajectory_ids"][2] is None


@pytest.mark.parametrize("reward", [np.array([0.0, 0.25, 0.5]), torch.tensor([0.0, 0.25, 0.5]), np.float32(0.75), 0.75])
def test_rewards_of_skyrl_may_be_arrays_and_stop_reasons_unknown(reward: Any, tmp_path: Path) -> None:
    generator = skyrl.Generator(rewards=lambda count: [reward] * count, stop_reasons=lambda count: [None] * count)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        skyrl.run(RecordingGenerator(generator, buffer), (1,))
        stored = buffer.get(0)
    assert (stored.reward.outcome, stored.is_terminated) == (0.75, None)
