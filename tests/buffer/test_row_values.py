"""Late per-row values: read with the columns, in every format, and included in all copies of a store."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.remote.stores import level
from tests.stores import opened
from trajstore import AgentTrajectory, Trajectory, TrajectoryReplayBuffer, annotate, notes_of
from trajstore._core.buffer.sequences import sample_sequences
from trajstore._core.files.local import LocalDirectory
from trajstore._core.formats import FORMATS
from trajstore.errors import (
    ConfigurationError,
    CorruptStoreError,
    InvalidTrajectoryError,
    SchemaMismatchError,
    TrajectoryUnavailableError,
)
from trajstore.loader import ReplayLoader, TokenLoader
from trajstore.operations.conversion import convert
from trajstore.operations.copying import repair_store
from trajstore.operations.verify import verify
from trajstore.samplers import WeightedSampler


def block(number: int, steps: int = 4) -> Trajectory:
    """Return a block whose samples have unique numbers: 100 times the trajectory's number, plus the place."""
    places = torch.arange(steps * 2).reshape(steps, 2, 1) + 100 * number
    return Trajectory(rewards=places.float(), dones=torch.zeros(steps, 2, 1, dtype=torch.bool))


def rollout(number: int, length: int = 6) -> AgentTrajectory:
    return AgentTrajectory(
        input_ids=torch.arange(length) + 10 * number,
        old_log_probs=torch.full((length - 2,), -0.5),
        response_mask=torch.ones(length - 2, dtype=torch.int64),
        response_start=2,
    )


def rows_of(number: int, steps: int = 4) -> torch.Tensor:
    """Return values that identify their samples."""
    return (torch.arange(steps * 2).reshape(steps, 2) + 100 * number) * 2.0


def agree(batch: dict[str, Any], given_to: set[int]) -> None:
    """Compare the values of a batch with its rewards, which encode the sample."""
    samples = batch["rewards"].reshape(-1)
    values = batch["notes"]["advantages"].reshape(-1)
    known = torch.tensor([int(sample) // 100 in given_to for sample in samples.tolist()])
    assert torch.equal(values[known], 2 * samples[known])
    assert torch.isnan(values[~known]).all()
    if "judge" in batch["notes"]:  # one number per trajectory, only for even ones
        judged = batch["notes"]["judge"].reshape(-1)
        even = samples // 100 % 2 == 0
        assert (judged[even] == 0.5).all()
        assert torch.isnan(judged[~even]).all()


@pytest.mark.parametrize("trajectory_format", list(FORMATS))
def test_rows_are_columns_wherever_columns_are_read(trajectory_format: str, tmp_path: Path) -> None:
    columns = ["rewards", "notes.advantages", "notes.judge"]
    with opened(tmp_path / "store", trajectory_format=trajectory_format) as writer:
        writer.add_trajectories([block(number, 3 + number) for number in range(4)])
        annotate(writer, [2, 0], {"advantages": [rows_of(2, 5), rows_of(0, 3).numpy()], "judge": 0.5}, who="anna")
        annotate(writer, 1, {"advantages": [rows_of(1, 4)]})
        with TrajectoryReplayBuffer.open(tmp_path / "store") as reader:
            for buffer in (writer, reader):
                assert [sorted(buffer.get(number).notes) for number in range(4)] == [["advantages"]] * 3 + [[]]
                assert torch.equal(buffer.get(2).notes["advantages"], rows_of(2, 5))
                batch = buffer.sample(40, columns=columns, sampler=WeightedSampler())
                agree(batch, {0, 1, 2})
                agree(buffer.read(batch.drawn, columns=columns), {0, 1, 2})
                agree(sample_sequences(buffer, 6, 2, columns=columns), {0, 1, 2})
                out = {"notes.advantages": torch.empty(40), "rewards": torch.empty(40, 1)}
                agree(buffer.sample(36, columns=columns[:2], out=out), {0, 1, 2})
                with ReplayLoader(buffer, batch_size=16, columns=columns) as loader:
                    agree(next(iter(loader)), {0, 1, 2})
                assert "notes" not in buffer.sample(4)
    with opened(tmp_path / "store", trajectory_format=trajectory_format) as again:  # from the snapshot
        agree(again.sample(40, columns=columns), {0, 1, 2})
        notes = [(note.name, note.value, note.who) for note in notes_of(again, 2)]
        assert notes == [("judge", 0.5, "anna"), ("advantages", "rows of float32", "anna")]
    assert verify(tmp_path / "store").sound


@pytest.mark.parametrize(("trajectory_format", "layout"), [("pkl", "packed"), ("zarr", "padded")])
def test_packs_of_tokens_have_rows_of_tokens_and_of_the_response(
    trajectory_format: str, layout: Any, tmp_path: Path
) -> None:
    with opened(tmp_path, trajectory_format=trajectory_format) as writer:
        writer.add_trajectories([rollout(number, 5 + number) for number in range(3)])
        of_tokens = [torch.arange(5.0 + number) + 10 * number for number in (0, 1)]
        of_response = [torch.arange(3 + number, dtype=torch.float64) + 10 * number for number in (0, 1)]
        annotate(writer, [0, 1], {"advantages": of_tokens, "kl": of_response})
        columns = ["input_ids", "notes.advantages", "notes.kl"]
        with TokenLoader(writer, 18, columns=columns, layout=layout, sampler=None) as loader:
            packs = [next(iter(loader))[0] for _ in range(4)]
        for pack in packs:
            tokens, advantages, kl = pack["input_ids"], pack["notes"]["advantages"], pack["notes"]["kl"]
            assert advantages.shape == kl.shape == tokens.shape
            inside = pack["mask"] if layout == "padded" else torch.ones_like(tokens, dtype=torch.bool)
            third = inside & (tokens >= 20)
            assert torch.isnan(advantages[third]).all()
            known = inside & (tokens < 20)
            assert torch.equal(advantages[known], tokens[known].float())
            place = tokens % 10
            assert torch.equal(kl[known & (place >= 2)], (tokens - 2)[known & (place >= 2)].double())
            assert (kl[known & (place < 2)] == 0).all()
        trajectory = writer.get(1)
        assert torch.equal(trajectory.notes["advantages"], of_tokens[1])
        assert torch.equal(trajectory.notes["kl"], of_response[1])


def test_what_does_not_fit_is_refused_by_name_and_nothing_is_written(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as writer:
        writer.add_trajectories([block(0), block(1)])
        annotate(writer, 0, {"advantages": [rows_of(0)], "judge": 1})
        files = sorted((tmp_path / "store" / "shards").iterdir())
        generation = notes_of(writer, 0)[-1].generation
        for values, sentence in (
            ({"advantages": [torch.zeros(3, 2)]}, r"shape \[3, 2\], must have \[4, 2, ...\]: a row for each step"),
            ({"advantages": [torch.zeros(4, 2).double()]}, "rows of float64, but the values of this name are rows of"),
            ({"advantages": [torch.zeros(4, 2, 1)]}, r"rows of float32\[1\], but the values of this name are rows"),
            ({"advantages": 0.5}, "a number, but the values of this name are rows of float32 here"),
            ({"judge": [torch.zeros(4, 2)]}, "rows of float32, but the values of this name are numbers here"),
            ({"outcome": [torch.zeros(4, 2)]}, "has values by row, but replaces a number"),
            ({"label": [torch.zeros(4, 2)] * 2}, "rows of 2 trajectories for 1, must be as many"),
            ({"task": [torch.zeros(4, 2)]}, "is a fact that stays as it is"),
            ({"4": [torch.zeros(4, 2)]}, "must be a name"),
            ({"label": [torch.zeros(4, 2).to_sparse()]}, "make it dense"),
        ):
            with pytest.raises(ConfigurationError, match=sentence):
                annotate(writer, 0, values)
        with pytest.raises(ConfigurationError, match=r"trajectory 1 has rows of float64 .*, trajectory 0 of float32"):
            annotate(writer, [0, 1], {"label": [torch.zeros(4, 2), torch.zeros(4, 2).double()]})
        with pytest.raises(ConfigurationError, match="others are arrays of rows"):
            annotate(writer, [0, 1], {"label": [torch.zeros(4, 2), None]})
        with pytest.raises(TrajectoryUnavailableError, match="no trajectory has the id 7"):
            annotate(writer, 7, {"label": [torch.zeros(4, 2)]})
        with pytest.raises(ConfigurationError, match="only the store's writer"):
            annotate(tmp_path / "store", 0, {"advantages": [rows_of(0)]})
        assert sorted((tmp_path / "store" / "shards").iterdir()) == files
        assert notes_of(writer, 0)[-1].generation == generation
        with pytest.raises(InvalidTrajectoryError, match="advantages: late values by row need a store"):
            TrajectoryReplayBuffer().add_trajectories([writer.get(0)])
        for notes in ({"judge": "good"}, {1: torch.zeros(4, 2)}):
            with pytest.raises(InvalidTrajectoryError, match="must be a name with a tensor of rows; set numbers and"):
                writer.add_trajectories([writer.get(0), replace(block(1), notes=notes)])
        annotate(writer, 0, {"count": [torch.ones(4, 2, dtype=torch.int64)]})
        with pytest.raises(SchemaMismatchError, match="trajectory 1 has no rows, and int64 has no NaN"):
            writer.sample(16, columns=["notes.count"])
        with pytest.raises(SchemaMismatchError, match=r"column notes\.nothing: "):
            writer.sample(4, columns=["notes.nothing"])


def test_kinds_of_trajectories_take_a_call_of_their_own(tmp_path: Path) -> None:
    with opened(tmp_path) as writer:
        writer.add_trajectories([block(0), rollout(1)])
        with pytest.raises(ConfigurationError, match=r"trajectory 1 .*trajectory 0 "):
            annotate(writer, [0, 1], {"label": [rows_of(0), torch.zeros(6)]})
        with pytest.raises(ConfigurationError, match=r"must have \[6, ...\] or \[4, ...\]: a row for each token"):
            annotate(writer, 1, {"label": [torch.zeros(5)]})
        with pytest.raises(ConfigurationError, match="must have one number for each token"):
            annotate(writer, 1, {"label": [torch.zeros(6, 2)]})


def test_rows_that_others_replace_while_a_point_is_saved_stay_with_the_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state file is written during other commits: the point is not visible yet, and precedes them."""
    genuine = LocalDirectory.publish

    def publish(directory: LocalDirectory, files: Any) -> None:
        genuine(directory, files)
        if any(file.name.endswith(".state") for file in files):
            annotate(writer, [0], {"advantages": [rows_of(5)]})

    with opened(tmp_path) as writer:
        writer.add_trajectories([block(0)])
        annotate(writer, [0], {"advantages": [rows_of(3)]})
        with monkeypatch.context() as patch:
            patch.setattr(LocalDirectory, "publish", publish)
            writer.points.save(1, {"step": 1})
        assert torch.equal(writer.get(0).notes["advantages"], rows_of(5))
        writer.points.rollback(1)
        assert torch.equal(writer.get(0).notes["advantages"], rows_of(3))
    assert verify(tmp_path).sound


def shards_in(path: Path) -> int:
    return len(list((path / "shards").iterdir()))


def test_rows_that_nobody_can_come_back_to_go(tmp_path: Path) -> None:
    with opened(tmp_path) as writer:
        writer.add_trajectories([block(0), block(1)])
        writer.flush()
        before = shards_in(tmp_path)
        for key in range(5):
            annotate(writer, [0, 1], {"advantages": [rows_of(key), rows_of(key)]})
        assert shards_in(tmp_path) == before + 1
        writer.points.save(0)
        annotate(writer, [0, 1], {"advantages": [rows_of(0), rows_of(1)]})
        assert shards_in(tmp_path) == before + 2
        writer.points.remove("step-0")
        assert shards_in(tmp_path) == before + 1
        assert len([note for note in notes_of(writer, 0) if note.name == "advantages"]) == 6
        agree(writer.sample(16, columns=["rewards", "notes.advantages"]), {0, 1})
        annotate(writer, [0], {"advantages": None})
        agree(writer.sample(16, columns=["rewards", "notes.advantages"]), {1})
        writer.evict([0, 1])
        writer.compact()
        assert shards_in(tmp_path) == 0
    assert verify(tmp_path).sound


def test_evicting_and_compacting_leave_the_rows_of_the_rest(tmp_path: Path) -> None:
    with opened(tmp_path) as writer:
        writer.add_trajectories([block(number) for number in range(8)])
        annotate(writer, range(8), {"advantages": [rows_of(number) for number in range(8)]})
        with TrajectoryReplayBuffer.open(tmp_path) as reader:
            annotate(writer, [2, 4], {"advantages": [rows_of(2), rows_of(4)]})  # in another shard
            writer.evict([0, 1, 3, 6])
            writer.compact()
            for _ in range(2):
                agree(reader.sample(64, columns=["rewards", "notes.advantages"]), set(range(8)))
                reader.refresh()
            agree(writer.sample(64, columns=["rewards", "notes.advantages"]), {2, 4, 5, 7})
    with TrajectoryReplayBuffer.open(tmp_path) as reader:
        agree(reader.sample(64, columns=["rewards", "notes.advantages"]), {2, 4, 5, 7})
        assert reader.trajectory_ids.tolist() == [2, 4, 5, 7]
    assert verify(tmp_path).sound


def test_a_run_is_read_with_the_rows_of_each_rank(tmp_path: Path) -> None:
    for rank in range(2):
        with opened(tmp_path / f"rank_{rank}") as writer:
            writer.add_trajectories([block(2 * rank), block(2 * rank + 1)])
            annotate(writer, [1], {"advantages": [rows_of(2 * rank + 1)]})
    with TrajectoryReplayBuffer.open(tmp_path, sample_window_size=0) as run:
        agree(run.sample(64, columns=["rewards", "notes.advantages"]), {1, 3})
    with opened(tmp_path / "rank_1") as writer:
        annotate(writer, [0], {"label": [rows_of(0)]})
    with opened(tmp_path / "rank_0") as writer:
        annotate(writer, [0], {"label": [rows_of(0).double()]})
    message = r"notes.label: its rows are float32 \[\] and float64 \[\]"
    with (
        TrajectoryReplayBuffer.open(tmp_path, sample_window_size=0) as run,
        pytest.raises(SchemaMismatchError, match=message),
    ):
        run.sample(32, columns=["notes.label"])


@pytest.mark.parametrize("way", ["checkpoint", "unite", "convert"])
def test_copies_have_the_latest_rows(way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    with opened(run / "rank_0") as writer:
        writer.add_trajectories([block(0), block(1), block(2)])
        annotate(writer, [0, 1, 2], {"advantages": [rows_of(7)] * 3})
        annotate(writer, [0, 1], {"advantages": [rows_of(0), rows_of(1)], "judge": 0.5})
        annotate(writer, 2, {"advantages": None})
        if way == "checkpoint":
            writer.save_checkpoint(copy)
            with caplog.at_level(logging.WARNING):
                writer.save_checkpoint(tmp_path / "rlinf", layout="rlinf")
            assert "no place for values by row (advantages)" in caplog.text
    if way == "unite":
        with opened(run / "rank_1") as writer:
            writer.add_trajectories([block(3), block(4)])
            annotate(writer, [1], {"advantages": [rows_of(4)]})
        convert(run, copy, "pt")
    elif way == "convert":
        convert(run / "rank_0", copy, "zarr")
        assert all(".zarr" in str(file) for file in (copy / "shards").iterdir())
    with TrajectoryReplayBuffer.open(copy, sample_window_size=0) as reader:
        agree(reader.sample(64, columns=["rewards", "notes.advantages"]), {0, 1, 4})
        assert math.isnan(reader.sample(64, columns=["notes.judge"])["notes"]["judge"].min()) or way != "unite"
    assert verify(copy).sound


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ([rows_of(0)], [rows_of(0).double()], "rows of float32.* in one store and rows of float64"),
        (1.5, [rows_of(0)], "numbers in one store and rows of float32"),
        ("good", [rows_of(0)], "texts in one store and rows of float32"),
        (1.5, "good", "in one store and .* in another"),
    ],
)
def test_one_store_is_not_made_of_values_of_two_kinds(one: Any, other: Any, said: str, tmp_path: Path) -> None:
    """A failed save leaves nothing at the target, and succeeds after renaming the values."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    for rank, values in enumerate((one, other)):
        with opened(run / f"rank_{rank}") as writer:
            writer.add_trajectories([block(rank)])
            annotate(writer, [0], {"x": values})
    with TrajectoryReplayBuffer.open(run) as reader, pytest.raises(ConfigurationError, match=f"values x are .*{said}"):
        reader.save_checkpoint(whole)
    with pytest.raises(ConfigurationError, match=f"values x are .*{said}"):
        convert(run, whole, "pt")
    assert not whole.exists()
    with opened(run / "rank_1") as writer:
        annotate(writer, [0], {"x": None, "y": other})
    convert(run, whole, "pt")
    assert verify(whole).sound


@pytest.mark.parametrize("way", ["repair", "convert"])
def test_damaged_rows_are_named_and_left_out_of_a_repaired_store(way: str, tmp_path: Path) -> None:
    store, copy = tmp_path / "store", tmp_path / "copy"
    with opened(store) as writer:
        writer.add_trajectories([block(0), block(1)])
        annotate(writer, [0], {"advantages": [rows_of(0)]})
        annotate(writer, [1], {"advantages": [rows_of(1)], "label": [rows_of(1)]})
    file = sorted((store / "shards").iterdir())[-1]
    file.write_bytes(file.read_bytes().replace(rows_of(1).numpy().tobytes(), rows_of(2).numpy().tobytes()))
    (problem,) = {(problem.file, problem.lost) for problem in verify(store).problems}
    assert problem == (f"shards/{file.name}", ())
    assert "values by row of trajectories 1 are lost" in verify(store).problems[0].message
    with TrajectoryReplayBuffer.open(store, verify_shards=True) as reader:
        assert torch.equal(reader.get(0).notes["advantages"], rows_of(0))
        with pytest.raises(CorruptStoreError, match="values by row of trajectories 1 are in it"):
            reader.get(1)
    if way == "repair":
        repair_store(store, copy)
    else:
        convert(store, copy, "pt")
    with TrajectoryReplayBuffer.open(copy) as reader:
        assert torch.equal(reader.get(0).notes["advantages"], rows_of(0))
        assert not reader.get(1).notes
    assert verify(copy).sound


def test_a_mirror_has_the_rows(tmp_path: Path) -> None:
    store, mirror = tmp_path / "store", tmp_path / "mirror"
    with opened(store, mirror=str(mirror)) as writer:
        writer.add_trajectories([block(0), block(1)])
        annotate(writer, [0, 1], {"advantages": [rows_of(7)] * 2})
        level(writer)
        annotate(writer, [0], {"advantages": [rows_of(0)]})
        level(writer)
        for number, key in ((0, 0), (1, 7)):
            with TrajectoryReplayBuffer.open(mirror) as reader:
                assert torch.equal(reader.get(number).notes["advantages"], rows_of(key))
        assert verify(mirror).sound
    assert verify(mirror).sound
