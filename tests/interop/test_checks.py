"""``--check``: the files are read by another program too. And times that Python's own types would cut."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.interop.test_formats import read_all
from tests.interop.test_sources import rollout
from tests.stores import stored
from trajstore import AgentTrajectory, Trajectory, TrajectoryReplayBuffer
from trajstore.errors import CorruptStoreError
from trajstore.interop.convert import convert_from, convert_to

pytest.importorskip("polars", reason="needs polars, of the extra 'query'")
pa = pytest.importorskip("pyarrow", reason="needs the extra 'convert'")
pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra 'convert'")


class Claims:
    """Stands for Minari: reads a data set with pyarrow, and returns other values after a change."""

    change: Callable[[dict[str, Any]], Any] = staticmethod(lambda columns: None)

    def __init__(self, path: Path) -> None:
        self.tables = [
            pq.ParquetFile(folder / "part-0.parquet").read() for folder in sorted(path.iterdir()) if folder.is_dir()
        ]

    def __len__(self) -> int:
        return len(self.tables)

    def __getitem__(self, number: int) -> Any:
        columns = self.tables[number].to_pydict()
        columns = {name: np.array(values, np.float32) for name, values in columns.items() if name != "infos"}
        columns |= {name: columns[name][:-1] for name in ("actions", "rewards")}
        columns |= {name: columns[name][:-1].astype(bool) for name in ("terminations", "truncations")}
        Claims.change(columns)
        return SimpleNamespace(**columns)


def steps(tmp_path: Path) -> str:
    values, ends = torch.rand(3, 1, 2), torch.tensor([0, 0, 1]).bool()[:, None, None]
    one = Trajectory(actions=values, rewards=values[..., :1], terminations=ends, truncations=ends & False, dones=ends)
    one.curr_obs, one.next_obs = {"states": values}, {"states": torch.cat([values[1:], values[:1]])}
    return stored(tmp_path / "store", [one, one])


@pytest.mark.parametrize("name", ["observations", "actions", "rewards", "truncations"])
def test_a_converter_does_not_approve_itself(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program that reads other values is believed, in both directions."""
    store, out = steps(tmp_path), tmp_path / "out-v0"
    monkeypatch.setitem(sys.modules, "minari", SimpleNamespace(MinariDataset=Claims))  # type: ignore[arg-type]
    monkeypatch.setattr("trajstore.interop.minari.version", lambda _: "9.9")
    done = convert_to(store, out, "minari", check=True)
    assert (done.checked, done.checked_by) == (2, ("Minari 9.9",))
    monkeypatch.setattr(Claims, "change", staticmethod(lambda columns: columns[name].__setitem__(0, 1)))
    with pytest.raises(CorruptStoreError, match=r"episode 0: the check by Minari 9\.9 found other values"):
        convert_from(out, tmp_path / "back", "minari", check=True)
    with pytest.raises(CorruptStoreError, match=r"the check by Minari 9\.9 found other values"):
        convert_to(store, tmp_path / "again-v0", "minari", check=True)


def test_a_check_says_that_another_program_cannot_open_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "minari", SimpleNamespace(MinariDataset=lambda path: {}))  # type: ignore[arg-type]
    monkeypatch.setattr("trajstore.interop.minari.version", lambda _: "9.9")
    done = convert_to(steps(tmp_path), tmp_path / "out-v0", "minari", check=True)
    assert (done.checked, done.checked_by) == (2, ())
    assert "checked by trajstore alone, for another program cannot: " in caplog.text
    assert "it sees 0 items, and trajstore 2" in caplog.text


@pytest.mark.parametrize("form", ["jsonl", "chat", "parquet", "trl", "verl", "atif"])
def test_files_of_rollouts_are_checked_by_another_reader(form: str, tmp_path: Path) -> None:
    by = "Python's json" if form in ("jsonl", "chat", "atif") else f"pyarrow {pa.__version__}"
    store = stored(tmp_path / "store", [rollout("a"), rollout("b")])
    assert convert_to(store, tmp_path / "out", form, check=True).checked_by == (by,)
    assert convert_from(tmp_path / "out", tmp_path / "back", form, check=True).checked_by == (by,)


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


def test_a_program_that_cannot_read_what_it_wrote_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Minari 0.5.4 cannot read infos of one number per step in its own Arrow and Parquet files."""
    store, out = steps(tmp_path), tmp_path / "out-v0"
    monkeypatch.setitem(sys.modules, "minari", SimpleNamespace(MinariDataset=Claims))  # type: ignore[arg-type]
    monkeypatch.setattr("trajstore.interop.minari.version", lambda _: "9.9")
    convert_to(store, out, "minari")
    monkeypatch.setattr(Claims, "change", staticmethod(lambda columns: int("")))
    done = convert_from(out, tmp_path / "back", "minari", check=True)
    assert (done.checked, done.checked_by) == (2, ())
    assert "2 of 2 items checked by trajstore alone, because Minari 9.9 cannot read them: " in caplog.text
    with pytest.raises(CorruptStoreError, match="Minari cannot read episode 0"):
        convert_to(store, tmp_path / "again-v0", "minari", check=True)


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
