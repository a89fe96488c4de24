"""Times that Python's own types would cut, and actions and shapes of Minari."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interop.test_formats import read_all
from tests.stores import stored
from trajstore import AgentTrajectory, Trajectory, TrajectoryReplayBuffer
from trajstore.interop.convert import convert_from, convert_to

pytest.importorskip("polars", reason="needs polars, of the extra 'query'")
pa = pytest.importorskip("pyarrow", reason="needs the extra 'convert'")
pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra 'convert'")


def steps(tmp_path: Path) -> str:
    values, ends = torch.rand(3, 1, 2), torch.tensor([0, 0, 1]).bool()[:, None, None]
    one = Trajectory(actions=values, rewards=values[..., :1], terminations=ends, truncations=ends & False, dones=ends)
    one.curr_obs, one.next_obs = {"states": values}, {"states": torch.cat([values[1:], values[:1]])}
    return stored(tmp_path / "store", [one, one])


def test_nanoseconds_are_kept_and_years_after_9999_are_named(tmp_path: Path) -> None:
    counts = pa.array([0, 1_700_000_000_123_456_000, -1, 1_700_000_000_123_456_789, 5], pa.int64())
    times = counts.cast(pa.timestamp("ns"))
    columns = {
        "prompt": ["a"] * 5,
        "completion": ["b"] * 5,
        "utc": times,
        "there": times.cast(pa.timestamp("ns", "Asia/Kolkata")),
        "took": counts.cast(pa.duration("ns")),
        "day": pa.array([0, 1_000, 1_001, 86_399_999_999_999, 5], pa.time64("ns")),
        "lists": pa.array([[value] for value in counts.to_pylist()], pa.list_(pa.timestamp("ns"))),
        "parts": pa.array([{"at": value} for value in counts.to_pylist()], pa.struct([("at", pa.timestamp("ns"))])),
        "map": pa.array([[("at", value)] for value in counts.to_pylist()], pa.map_(pa.string(), pa.timestamp("ns"))),
        "far": pa.array([0, 0, 0, 0, 10**18], pa.timestamp("us")),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    done = convert_from(tmp_path / "a.parquet", tmp_path / "out", "trl", check=True)
    assert (done.checked, list(done.problems)) == (4, ["a.parquet: row 4"])
    assert "year 33658 is out of range" in done.problems["a.parquet: row 4"]
    found = [one.metadata for one in read_all(tmp_path / "out") if isinstance(one, AgentTrajectory)]
    expected = ["1970-01-01 00:00:00", "2023-11-14 22:13:20.123456", "1969-12-31 23:59:59.999999999"]
    expected.append("2023-11-14 22:13:20.123456789")
    assert [one["utc"] for one in found] == expected
    assert [one["lists"] for one in found] == [[time] for time in expected]
    assert [one["parts"] for one in found] == [one["map"] for one in found] == [{"at": time} for time in expected]
    assert [one["there"] for one in found][2:] == [
        "1970-01-01 05:29:59.999999999+05:30",
        "2023-11-15 03:43:20.123456789+05:30",
    ]
    assert [one["took"] for one in found][2:] == ["-1 day, 23:59:59.999999999", "19675 days, 22:13:20.123456789"]
    assert [one["day"] for one in found] == ["00:00:00", "00:00:00.000001", "00:00:00.000001001", "23:59:59.999999999"]


def test_actions_that_are_texts_come_back(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer.open(steps(tmp_path)) as reader:
        one = reader.get(0)
    words = ["look", "", "take \u202e key"]
    one.actions, one.forward_inputs = None, {"actions": words}
    convert_to(stored(tmp_path / "words", [one]), tmp_path / "words-v0", "minari", check=True)
    convert_from(tmp_path / "words-v0", tmp_path / "back", "minari", check=True)
    (back,) = read_all(tmp_path / "back")
    assert isinstance(back, Trajectory)
    assert (back.actions, back.forward_inputs["actions"]) == (None, words)


@pytest.mark.parametrize(
    ("space", "shape"),
    [
        ({"type": "MultiBinary", "n": [2, 3]}, (2, 3)),
        ({"type": "MultiBinary", "n": 6}, (6,)),
        ({"type": "MultiDiscrete", "dtype": "int64", "nvec": [[3, 4, 2], [2, 2, 2]]}, (2, 3)),
        ({"type": "MultiDiscrete", "dtype": "int64", "nvec": [3, 4, 2, 2, 2, 2]}, (6,)),
        ({"type": "Box", "dtype": "float32", "shape": [3, 2], "low": 0, "high": 1}, (3, 2)),
    ],
)
def test_rows_have_the_shape_of_their_space(space: dict[str, Any], shape: tuple[int, ...], tmp_path: Path) -> None:
    """Minari writes flat rows of Arrow and Parquet."""
    values, ends = torch.rand(3, 1, 6).round(), torch.tensor([0, 0, 1]).bool()[:, None, None]
    one = Trajectory(actions=values, rewards=values[..., :1], terminations=ends, truncations=ends & False, dones=ends)
    one.curr_obs, one.next_obs = {"states": values}, {"states": torch.cat([values[1:], values[:1]])}
    convert_to(stored(tmp_path / "store", [one]), tmp_path / "out-v0", "minari")
    metadata = json.loads((tmp_path / "out-v0/data/metadata.json").read_text())
    metadata |= {"observation_space": json.dumps(space), "action_space": json.dumps(space)}
    (tmp_path / "out-v0/data/metadata.json").write_text(json.dumps(metadata))
    convert_from(tmp_path / "out-v0", tmp_path / "back", "minari")
    (back,) = read_all(tmp_path / "back")
    assert isinstance(back, Trajectory)
    assert back.curr_obs["states"].shape == back.actions.shape == (3, 1, *shape)
    assert torch.equal(back.actions.reshape(values.shape), values)
