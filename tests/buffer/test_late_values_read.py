"""Late values on reading: corrected rewards, and batch columns."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.stores import writer_to
from tests.support.equality import same
from trajstore import AgentTrajectory, Reward, Trajectory, TrajectoryReplayBuffer, annotate
from trajstore._core.columns.facts import GIVEN, RECORDED
from trajstore._core.columns.schema import dtypes
from trajstore._core.formats import FORMATS
from trajstore.errors import ConfigurationError, SchemaMismatchError
from trajstore.loader import TokenLoader


def rollout(number: int, **fields: Any) -> AgentTrajectory:
    reward = Reward(outcome=float(number), description="tests", metadata={"tests": 3})
    return AgentTrajectory(input_ids=torch.arange(4 + number), reward=reward, task_id=f"t{number % 2}", **fields)


def first_of(loader: Any) -> Any:
    with loader:
        return next(iter(loader))


def nans_as_none(values: torch.Tensor) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]


def test_a_rollout_has_the_reward_that_it_was_given_late(tmp_path: Path) -> None:
    recorded = [rollout(number, metadata={"own": number}) for number in range(4)]
    recorded[3] = replace(recorded[3], reward=None)
    with writer_to(tmp_path, cache_size=1) as writer:
        ids = writer.add_trajectories(recorded)
        writer.points.save(0)
        annotate(writer, [1, 3], {"outcome": 0.25, "reward_tests": [5, None], "tag": "cheat"}, who="anna")
        annotate(writer, 2, {"judge": 0.75})
        given = {"outcome": 0.25, "reward_tests": 5.0, "tag": "cheat"}
        first = replace(
            recorded[1],
            reward=Reward(outcome=0.25, description="tests", metadata={"tests": 5.0}),
            metadata={"own": 1, GIVEN: given, RECORDED: {"outcome": 1.0, "reward_tests": 3}},
        )
        two = replace(recorded[2], metadata={"own": 2, GIVEN: {"judge": 0.75}})
        three = replace(
            recorded[3],
            reward=Reward(outcome=0.25),
            metadata={"own": 3, GIVEN: {"outcome": 0.25, "tag": "cheat"}, RECORDED: {"outcome": None}},
        )
        with TrajectoryReplayBuffer.open(tmp_path) as reader:
            for buffer in (writer, reader):
                for number, expected in zip(ids, (recorded[0], first, two, three), strict=True):
                    assert same(buffer.get(number), expected)
                drawn = buffer.sample_trajectories(4)
                assert sorted(each.reward.outcome for each in drawn) == [0.0, 0.25, 0.25, 2.0]
        annotate(writer, 1, dict.fromkeys(given))
        assert same(writer.get(1), recorded[1])
        writer.points.rollback(0)
        assert all(same(writer.get(number), recorded[number]) for number in ids)


def test_what_get_returned_is_added_with_its_late_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with writer_to(tmp_path / "first") as first, writer_to(tmp_path / "second") as second:
        recorded = [rollout(0), rollout(1, metadata={"own": 1}), replace(rollout(2), reward=None)]
        ids = first.add_trajectories([*recorded, Trajectory(rewards=torch.ones(2, 1, 1))])
        annotate(first, ids[1:3], {"outcome": 0.25, "reward_tests": [5, None], "judge": 0.5, "tag": "cheat"})
        annotate(first, ids[3:], {"advantage": [torch.full((2, 1), 7.0)]})
        annotate(first, ids[:1], {"advantage": [torch.arange(4.0)]})
        empty = Trajectory()
        again = second.add_trajectories([first.get(ids[0]), empty, *(first.get(number) for number in ids[1:])])
        assert "late values of 4 trajectories were set again without author and history" in caplog.text
        with TrajectoryReplayBuffer() as in_memory:
            in_memory.add_trajectories([first.get(ids[1])])
        assert "1 trajectory has late values, which a buffer in memory lacks" in caplog.text
        condition = "judge = 0.5 and tag = 'cheat' and outcome = 0.25"
        assert second.query().where(condition).ids().tolist() == again[1:3]
        for old, new in zip(ids[:3], again[:3], strict=True):
            assert same(replace(second.get(new), notes={}), replace(first.get(old), notes={}))
        assert second.get(again[1]).metadata[RECORDED] == {"outcome": 1.0, "reward_tests": 3}
        assert torch.equal(second.get(again[0]).notes["advantage"], torch.arange(4.0))
        assert torch.equal(second.get(again[3]).notes["advantage"], torch.full((2, 1), 7.0))
        annotate(second, again[1:3], dict.fromkeys(("outcome", "reward_tests", "judge", "tag")))
        assert same(second.get(again[1]), recorded[1])
        annotate(second, again[0], {"other": "text"})
        annotate(first, ids[1], {"other": 1.0})
        with pytest.raises(ConfigurationError, match="other"):
            second.add_trajectories([recorded[0], first.get(ids[1])])
        assert len(second) == 4


@pytest.mark.parametrize(
    ("late", "message"),
    [
        ([{"judge": 0.5}, {"judge": "good"}], "judge: has numbers and texts"),
        ([{"judge": 0.5}, {"Judge": 0.5}], "differ in the case of letters"),
        ([{f"a{n}": 1 for n in range(40)}, {f"b{n}": 1 for n in range(40)}], "64 names of values, the most"),
        ([{"task": 1.0}], "task is a fact that stays as it is"),
        ([5], "must be dicts of late values by name"),
    ],
)
def test_late_values_that_cannot_be_set_together_are_refused_before_anything_is_added(
    tmp_path: Path, late: list[Any], message: str
) -> None:
    with writer_to(tmp_path) as writer:
        with pytest.raises(ConfigurationError, match=message):
            writer.add_trajectories([rollout(n, metadata={GIVEN: values}) for n, values in enumerate(late)])
        assert len(writer) == 0
        writer.add_trajectories([rollout(0)])
        writer.flush()
        with TrajectoryReplayBuffer.open(tmp_path) as reader:
            assert len(reader) == 1


def test_packs_have_the_outcome_that_was_given_late_and_values_that_are_asked_for(tmp_path: Path) -> None:
    with writer_to(tmp_path) as writer:
        writer.add_trajectories([rollout(number) for number in range(4)])
        annotate(writer, [1, 2], {"outcome": [-1.0, -2.0], "judge": [0.5, 0.25], "tag": "read"})
        for layout in ("packed", "padded"):
            (pack,) = first_of(TokenLoader(writer, 100, columns=["input_ids", "notes.judge"], layout=layout))
            by_id = dict(zip(pack["trajectory_ids"].tolist(), pack["outcomes"].tolist(), strict=True))
            assert by_id.items() <= {0: 0.0, 1: -1.0, 2: -2.0, 3: 3.0}.items()
            assert len(pack["outcomes"]) > 8
            judged = dict(zip(pack["trajectory_ids"].tolist(), nans_as_none(pack["notes"]["judge"]), strict=True))
            assert judged.items() <= {0: None, 1: 0.5, 2: 0.25, 3: None}.items()
            assert "notes" not in first_of(TokenLoader(writer, 100, layout=layout))[0]
        for name, message in (("jugde", "no trajectory was given such a value"), ("tag", "its values are texts")):
            pattern = rf"column notes\.{name}: {message}; there are outcome, judge"
            with pytest.raises(SchemaMismatchError, match=pattern):
                first_of(TokenLoader(writer, 100, columns=[f"notes.{name}"]))


@pytest.mark.parametrize("kept", ["memory", "pt", "zarr"])
def test_what_is_changed_in_a_copy_stays_there(tmp_path: Path, kept: Any) -> None:
    recorded = rollout(1, messages=[{"role": "user", "content": "go"}], metadata={"own": [1, {"deep": 2}]})
    block = Trajectory(rewards=torch.rand(3, 2, 1), curr_obs={"states": torch.rand(3, 2, 4)})
    expected = block.rewards.clone()  # type: ignore[union-attr]
    store = {} if kept == "memory" else {"auto_save": True, "auto_save_path": tmp_path, "trajectory_format": kept}
    buffer = TrajectoryReplayBuffer(sample_window_size=0, enable_cache=True, **store)
    buffer.add_trajectories([recorded, block])
    for _ in range(2):  # first perhaps before the commit, then after it
        drawn = buffer.sample_trajectories(2)
        for each_rollout in (buffer.get(0), *(each for each in drawn if isinstance(each, AgentTrajectory))):
            each_rollout.reward.outcome = 0.0
            each_rollout.reward.metadata["tests"] = "changed"
            each_rollout.metadata["own"][1]["deep"] = 3
            each_rollout.messages[0]["content"] = "changed"
            each_rollout.input_ids += 7
            each_rollout.task_id = "changed"
        changed = buffer.get(1)
        changed.rewards.fill_(9.0)
        changed.curr_obs["states"].zero_()
        assert same(buffer.get(0), recorded)
        assert buffer.get(0).input_ids.tolist() == list(range(5))
        assert torch.equal(buffer.get(1).rewards, expected)
        buffer.flush()
    buffer.close()
    if kept != "memory":
        with TrajectoryReplayBuffer.open(tmp_path) as reader:
            assert same(reader.get(0), recorded)


# -- Windows whose trajectories do not all have the same columns --


def block(start: int, dtype: torch.dtype, **fields: torch.Tensor) -> Trajectory:
    rewards = torch.arange(start, start + 6, dtype=torch.float64).reshape(3, 2, 1)
    return Trajectory(rewards=rewards.to(dtype), curr_obs={"copy": rewards.clone()}, **fields)


def options(path: Path, form: str) -> dict[str, Any]:
    saved = {"auto_save": True, "auto_save_path": path, "trajectory_format": form}
    return {"sample_window_size": 0, "enable_cache": False, **(saved if form != "memory" else {})}


@pytest.mark.parametrize("form", ["memory", *FORMATS])
def test_a_dtype_that_changes_is_cast_to_the_oldest_ones_and_told_once(
    tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    with TrajectoryReplayBuffer(**options(tmp_path / "store", form)) as buffer:
        for start, dtype in ((0, torch.float32), (6, torch.float64), (12, torch.float16), (18, torch.float32)):
            buffer.add_trajectories([block(start, dtype)])
        if form != "memory":
            buffer.flush()
        with caplog.at_level(logging.WARNING):
            batches = [buffer.sample(count) for count in (1, 2, 24) for _ in range(8)]
        for batch in batches:
            assert batch["rewards"].dtype == torch.float32
            assert torch.equal(batch["rewards"].double(), batch["curr_obs"]["copy"])
        messages = [record.message for record in caplog.records if "column rewards" in record.message]
        assert sorted(text.split(": ", 1)[1].split(" are ")[0] for text in messages) == ["float16 rows", "float64 rows"]
        assert all("cast to float32" in text for text in messages)
        out = {"rewards": torch.zeros(9, 1)}
        assert buffer.sample(9, columns=["rewards"], out=out)["rewards"].data_ptr() == out["rewards"].data_ptr()
        buffer.sample_window_size = 2
        assert buffer.sample(6)["rewards"].dtype == torch.float16


@pytest.mark.parametrize("dtype", [dtype for dtype in dtypes().values() if not dtype.is_complex], ids=str)
def test_rows_are_cast_to_every_dtype(dtype: torch.dtype) -> None:
    """Torch has no assignment by index for some dtypes, such as uint16."""
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([block(0, dtype), block(0, torch.int8 if dtype != torch.int8 else torch.int16)])
    batch = buffer.sample(12)
    assert same(batch["rewards"], batch["curr_obs"]["copy"].to(dtype))


@pytest.mark.parametrize("form", ["memory", "pt"])
def test_what_else_differs_is_refused_with_column_and_trajectories(tmp_path: Path, form: str) -> None:
    with TrajectoryReplayBuffer(**options(tmp_path / "store", form)) as buffer:
        buffer.add_trajectories([block(0, torch.float32, actions=torch.zeros(3, 2, 4))])
        buffer.add_trajectories([block(6, torch.float32)])
        buffer.add_trajectories([block(12, torch.float64, actions=torch.zeros(3, 2, 5))])
        if form != "memory":
            buffer.flush()
        with pytest.raises(SchemaMismatchError, match=r"differ in actions \(absent from trajectory 1\); name"):
            buffer.sample(18)
        buffer.evict([1])
        with pytest.raises(SchemaMismatchError, match=r"actions \(\[4\] in trajectory 0, \[5\] in trajectory 2\)"):
            buffer.sample(12)
        batch = buffer.sample(12, columns=["curr_obs.copy", "rewards"])
        assert torch.equal(batch["rewards"].double(), batch["curr_obs"]["copy"])
        assert batch["rewards"].dtype == torch.float32
