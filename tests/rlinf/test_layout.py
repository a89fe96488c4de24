"""RLinf's directories are loaded exactly, and written with the same files and keys."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from tests.stores import in_memory, reader_of
from trajstore import AgentTrajectory, TrajectoryReplayBuffer
from trajstore._core.columns.fields import walk
from trajstore.errors import (
    ConfigurationError,
    CorruptStoreError,
    IncompleteCheckpointError,
    TrajectoryUnavailableError,
    UnsafeContentError,
)
from trajstore.operations.verify import verify

FOLDERS = ("auto_save_pt", "auto_save_pkl")


@pytest.fixture
def rlinf(shared_fixtures: Path) -> Path:
    return shared_fixtures / "rlinf"


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def digests(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: digests(item) if isinstance(item, dict) else digest(item) for key, item in batch.items()}


def loaded(path: Path, **options: Any) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(seed=99, sample_window_size=0, **options)
    buffer.load_checkpoint(path)
    return buffer


def listing(path: Path) -> dict[str, int]:
    return {str(p.relative_to(path)): p.stat().st_mtime_ns for p in path.rglob("*")}


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("cached", [False, True])
def test_draws_equal_rlinfs_to_the_byte_also_of_what_was_saved_again(
    rlinf: Path, tmp_path: Path, folder: str, cached: bool
) -> None:
    expected = json.loads((rlinf / "expected_samples.json").read_text())[folder]
    before = listing(rlinf / folder)
    buffer = loaded(rlinf / folder, enable_cache=cached)
    assert buffer.seed == expected["seed"]
    buffer.save_checkpoint(tmp_path / "theirs", layout="rlinf")
    buffer.save_checkpoint(tmp_path / "ours")
    for loaded_buffer in (buffer, *(loaded(tmp_path / name, enable_cache=cached) for name in ("theirs", "ours"))):
        for draw in expected["draws"]:
            assert digests(loaded_buffer.sample(expected["num_chunks"])) == draw
    assert listing(rlinf / folder) == before


@pytest.mark.parametrize("folder", [*FOLDERS, "rlt_pt", "rlt_pkl"])
@pytest.mark.parametrize("through", [False, True])
def test_a_written_directory_has_exactly_rlinfs_files_and_keys(
    rlinf: Path, tmp_path: Path, folder: str, through: bool
) -> None:
    buffer = loaded(rlinf / folder)
    if through:  # a store of ours
        buffer.save_checkpoint(tmp_path / "own")
        buffer = loaded(tmp_path / "own")
    buffer.save_checkpoint(tmp_path / "copy", layout="rlinf")
    names = sorted(p.name for p in (rlinf / folder).iterdir())
    assert sorted(p.name for p in (tmp_path / "copy").iterdir()) == names
    for name in names:
        ours, theirs = tmp_path / "copy" / name, rlinf / folder / name
        if name.endswith(".json"):
            assert json.loads(ours.read_text()) == json.loads(theirs.read_text())
            continue
        a, b = read_plainly(ours), read_plainly(theirs)
        assert list(a) == list(b)
        left, right = dict(walk(a)), dict(walk(b))
        assert list(left) == list(right)
        for key, value in right.items():
            same = torch.equal(left[key], value) if isinstance(value, torch.Tensor) else left[key] == value
            assert same, (name, key)


def read_plainly(path: Path) -> dict[str, Any]:
    """Read a file as RLinf does."""
    if path.suffix == ".pt":
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    return dict(pickle.loads(path.read_bytes()))


def test_a_checkpoint_from_memory_loads_as_in_rlinf(rlinf: Path, caplog: pytest.LogCaptureFixture) -> None:
    """RLinf's index lists all trajectories ever added; its files are those of the window."""
    path = rlinf / "checkpoint_from_cache"
    buffer = TrajectoryReplayBuffer(sample_window_size=5)
    with pytest.raises(IncompleteCheckpointError, match=r"2 of 7.*trajectory_0_e4a7a66b.*trajectory_1_f375879d"):
        buffer.load_checkpoint(path, strict=True)
    assert len(buffer) == 0
    assert buffer.load_checkpoint(path) == 2
    warnings = [record.message for record in caplog.records]
    assert len(warnings) == 1
    assert re.search(
        r"names 7 trajectories; 2 not there.*trajectory_0_e4a7a66b.*, trajectory_1_f375879d.*strict=True", warnings[0]
    )
    assert (len(buffer), buffer.is_ready(7), buffer._trajectory_counter) == (7, True, 7)
    assert buffer.total_samples == json.loads((path / "metadata.json").read_text())["total_samples"]
    files = [torch.load(file, weights_only=True)["rewards"] for file in path.glob("*.pt")]
    stored = {digest(row) for rewards in files for row in rewards.flatten(0, 1)}
    for window in (5, 0, 100, 2):
        buffer.sample_window_size = window
        assert {digest(row) for row in buffer.sample(200)["rewards"]} <= stored
    with pytest.raises(TrajectoryUnavailableError, match="trajectory 1 is listed and counted, but its file"):
        buffer.get(1)


@pytest.mark.parametrize("saved", [False, True])
def test_what_is_added_after_a_checkpoint_from_memory(rlinf: Path, tmp_path: Path, saved: bool) -> None:
    options: dict[str, Any] = {"auto_save": True, "auto_save_path": tmp_path / "own"} if saved else {}
    with TrajectoryReplayBuffer(sample_window_size=3, **options) as buffer:
        buffer.load_checkpoint(rlinf / "checkpoint_from_cache")
        given = [buffer.get(6)] * 8
        assert ([buffer.add_trajectories([item])[0] for item in given], len(buffer)) == (list(range(7, 15)), 15)
        assert buffer.sample(10)["rewards"].shape == (10, 4)
        buffer.save_checkpoint(tmp_path / "next")
        buffer.evict([0, 1, 4])
        assert len(buffer) == 12
        assert buffer.sample(10)["rewards"].shape == (10, 4)
    again = reader_of(tmp_path / "next")
    assert again.trajectory_ids.tolist() == [*range(2, 7), *(range(7, 15) if saved else range(12, 15))]


def test_shares_of_a_checkpoint_from_memory_are_of_what_is_there(rlinf: Path) -> None:
    shares = []
    for rank in range(2):
        buffer = TrajectoryReplayBuffer(sample_window_size=0)
        buffer.load_checkpoint(rlinf / "checkpoint_from_cache", True, rank, 2)
        assert len(buffer.sample(4)["rewards"]) == 4
        shares.append(buffer.trajectory_ids.tolist())
    assert shares == [[2, 3, 4], [5, 6]]


CONTENT: Any = {"rewards": torch.zeros(3, 2, 1)}


def small(path: Path, suffix: str = "pt", content: Any = CONTENT, **changed: Any) -> Path:
    """Write a directory of RLinf with one trajectory of the given content and index changes."""
    path.mkdir(exist_ok=True)
    entry = {"num_samples": 6, "trajectory_id": 0, "max_episode_length": 3, "shape": [3, 2, 1], "model_weights_id": "w"}
    entry |= changed
    file = path / f"trajectory_0_w.{suffix}"
    torch.save(content, file) if suffix == "pt" else file.write_bytes(pickle.dumps(content))
    metadata = {"trajectory_format": suffix, "size": 1, "total_samples": 6, "trajectory_counter": 1, "seed": 1}
    (path / "metadata.json").write_bytes(orjson.dumps(metadata))
    (path / "trajectory_index.json").write_bytes(
        orjson.dumps({"trajectory_index": {"0": entry}, "trajectory_id_list": [0]})
    )
    return path


def test_the_old_misspelt_index_is_read(tmp_path: Path) -> None:
    path = small(tmp_path / "old")
    (path / "trajectory_index.json").rename(path / "trajector_index.json")
    assert len(loaded(path)) == 1


@pytest.mark.parametrize(
    ("name", "error"),
    [
        *((name, UnsafeContentError) for name in ("../x", "a/b", "/etc/passwd")),
        ("..", (UnsafeContentError, IncompleteCheckpointError)),
    ],
)
def test_names_that_leave_the_directory_are_refused(tmp_path: Path, name: str, error: Any) -> None:
    with pytest.raises(error, match="hostile"):
        loaded(small(tmp_path / "hostile", model_weights_id=name))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [3, 3, 1]}, "num_samples"),
        ({"shape": [6]}, "shape"),
        ({"num_samples": "many"}, "many"),
        ({"shape": [2, 3, 1]}, r"\[3, 2\]"),
        ({"max_episode_length": 1e308}, "max_episode_length"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptStoreError, match=message):
        loaded(small(tmp_path / "wrong", **change)).sample(1)


def test_a_file_smaller_than_its_index_says_is_refused_each_time(tmp_path: Path) -> None:
    buffer = loaded(small(tmp_path / "short", shape=[300, 2, 1], num_samples=600))
    for _ in range(3):
        with pytest.raises(CorruptStoreError, match=r"\[3, 2\].*\[300, 2, 1\]|\[300, 2\]"):
            buffer.sample(4)


def test_an_index_that_is_torn_or_lists_an_id_twice_is_refused(tmp_path: Path) -> None:
    index = small(tmp_path / "torn") / "trajectory_index.json"
    text = index.read_bytes()
    for pattern, wrong in (
        (r"torn.*trajectory_index\.json", text[: len(text) // 2]),
        ("twice", text.replace(b"[0]", b"[0,0]")),
    ):
        index.write_bytes(wrong)
        with pytest.raises(CorruptStoreError, match=pattern):
            loaded(index.parent)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Hostile:
        def __reduce__(self) -> Any:
            return (Path.touch, (marker,))

    with pytest.raises(UnsafeContentError, match=r"trajectory_0_w\.pkl"):
        loaded(small(tmp_path / "pkl", "pkl", {"rewards": Hostile()})).sample(1)
    assert not marker.exists()


@pytest.mark.parametrize("suffix", ["pt", "pkl"])
@pytest.mark.parametrize("content", [None, 7, "text", [1, 2], {}], ids=str)
def test_a_file_that_has_no_trajectory_is_refused(tmp_path: Path, suffix: str, content: Any) -> None:
    path = small(tmp_path / "other", suffix, content)
    for read in (lambda: loaded(path).sample(1), lambda: loaded(path).get(0)):
        with pytest.raises(CorruptStoreError, match=rf"trajectory_0_w\.{suffix}: not a trajectory"):
            read()
    assert "not a trajectory" in str(verify(path).problems)


def test_agent_trajectories_cannot_be_written_for_rlinf(tmp_path: Path) -> None:
    buffer = in_memory([AgentTrajectory(input_ids=torch.arange(3))])
    with pytest.raises(ConfigurationError, match="agent"):
        buffer.save_checkpoint(tmp_path / "copy", layout="rlinf")
    assert not (tmp_path / "copy").exists()


def test_strided_tensors_and_stray_leaves_still_load(tmp_path: Path) -> None:
    rewards = torch.arange(12.0).reshape(3, 2, 2)
    content = {
        "rewards": rewards.transpose(0, 1).contiguous().transpose(0, 1),
        "curr_obs": {"text": ["a", "b"], "scalar": torch.zeros(3), "state": rewards.clone()},
    }
    buffer = loaded(small(tmp_path / "odd", content=content))
    drawn: set[tuple[float, ...]] = set()
    for _ in range(30):
        batch = buffer.sample(6)
        assert set(batch["curr_obs"]) == {"state"}
        assert torch.equal(batch["rewards"], batch["curr_obs"]["state"])
        drawn |= {tuple(row) for row in batch["rewards"].tolist()}
    assert drawn == {tuple(row) for row in rewards.reshape(6, 2).tolist()}


@pytest.mark.parametrize(
    "stray",
    [
        torch.ones(2, 3, 1),
        [1, 2],
        "text",
        {0: torch.ones(3, 2, 1)},
        {"a": torch.ones(3, 2).to_sparse()},
        {"a": {}},
        None,
    ],
    ids=["tensor", "list", "text", "numbered", "sparse", "empty", "none"],
)
def test_what_cannot_be_sampled_does_not_keep_the_rest_from_loading(tmp_path: Path, stray: Any) -> None:
    path = small(tmp_path / "odd")
    rewards = torch.arange(12.0).reshape(3, 2, 2)
    content = {"rewards": rewards, "curr_obs": stray, "actions": stray, "next_obs": {"state": rewards}}
    torch.save(content, path / "trajectory_0_w.pt")
    batch = loaded(path).sample(6)
    assert set(batch) == {"rewards", "next_obs"}
    assert torch.equal(batch["rewards"], batch["next_obs"]["state"])
