"""Steps that are not valid: in no batch and no count, whatever draws, in every format; against plain loops."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sampling.chance import fits
from tests.sampling.test_sequences import check_windows
from tests.stores import stored, writer_to
from trajstore import ChunkStepResult, EmbodiedRolloutResult, Reader, Trajectory, TrajectoryReplayBuffer, annotate
from trajstore._core.buffer.sequences import sample_hindsight, sample_n_step, sample_sequences
from trajstore._core.formats import FORMATS
from trajstore.errors import CorruptStoreError, EmptyBufferError, InvalidTrajectoryError
from trajstore.loader import ReplayLoader
from trajstore.operations.conversion import convert
from trajstore.operations.copying import copy_store
from trajstore.operations.inspect import inspect
from trajstore.operations.verify import verify
from trajstore.samplers import EpochSampler, Priorities, UseLimit, WeightedSampler

SIZES = ((6, 3), (1, 4), (9, 1), (5, 2))


class World:
    """Blocks of codes; the third has no field, the second no valid step; ``after`` has the run of each valid step."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.blocks: list[Trajectory] = []
        self.after: dict[int, list[int]] = {}
        self.rows: dict[int, tuple[int, int]] = {}
        for at, (steps, batch) in enumerate(SIZES):
            code = 1000 * at + torch.arange(steps * batch).reshape(steps, batch, 1)
            valid = torch.rand(steps, batch, generator=generator) < (0.0 if at == 1 else 1.0 if at == 2 else 0.7)
            dones = torch.rand(steps, batch, 1, generator=generator) < 0.2
            observed = {"code": code, "goal": -code}
            self.blocks.append(
                Trajectory(
                    rewards=code.float(),
                    dones=dones,
                    terminations=dones,
                    valid=None if at == 2 else valid,
                    curr_obs=observed,
                    next_obs={"code": code + 100_000, "goal": -code},
                )
            )
            for t in range(steps):
                for b in range(batch):
                    run = []
                    for later in range(t, steps):
                        if not valid[later, b]:
                            break
                        run.append(int(code[later, b]))
                        if dones[later, b]:
                            break
                    if run:
                        self.after[run[0]] = run
                        self.rows[run[0]] = (at, t * batch + b)


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@pytest.fixture(params=["memory", "pending", *FORMATS, "checkpoint", "copy", "united"])
def reader(request: pytest.FixtureRequest, world: World, tmp_path: Path) -> Iterator[Reader]:
    kind = request.param
    if kind == "memory":
        buffer: Any = TrajectoryReplayBuffer(seed=3, sample_window_size=0)
        buffer.add_trajectories(world.blocks)
        yield buffer
        return
    form = kind if kind in FORMATS else "pt"
    with writer_to(tmp_path / "run" / "store", trajectory_format=form, seed=3, sample_window_size=0) as buffer:
        if kind == "united":
            buffer.add_trajectories(world.blocks[:2])
            buffer.flush()
            stored(tmp_path / "run" / "other", world.blocks[2:])
            convert(tmp_path / "run", tmp_path / "united", "pt")
        else:
            buffer.add_trajectories(world.blocks)
            if kind == "pending":
                yield buffer
                return
            buffer.flush()
            if kind == "checkpoint":
                buffer.save_checkpoint(str(tmp_path / "checkpoint"))
    if kind == "copy":
        copy_store(tmp_path / "run" / "store", tmp_path / "copy")
    path = tmp_path / (kind if kind in ("checkpoint", "copy", "united") else "run/store")
    with Reader.open(path, seed=3, sample_window_size=0) as opened:
        yield opened


def codes(batch: Any) -> list[int]:
    found: list[int] = batch["curr_obs"]["code"][..., 0].flatten().tolist()
    return found


def test_every_draw_is_of_valid_steps(reader: Reader, world: World) -> None:
    known = sorted(world.after)
    assert reader.total_samples == len(known)
    drawn = [code for _ in range(100) for code in codes(reader.sample(len(known)))]
    assert fits([drawn.count(code) for code in known], [1] * len(known))
    assert "valid" not in reader.sample(1)
    weighted = [code for _ in range(10) for code in codes(reader.sample(300, sampler=WeightedSampler()))]
    assert fits([weighted.count(code) for code in known], [1] * len(known))
    batch = reader.sample(len(known), sampler=EpochSampler())
    assert sorted(codes(batch)) == known
    rows = zip(batch.drawn.ids.tolist(), reader._sampling.origins(batch.drawn)[0].tolist(), strict=True)  # type: ignore[attr-defined]
    assert list(rows) == [world.rows[code] for code in codes(batch)]
    assert torch.equal(reader.read(batch.drawn)["rewards"], batch["rewards"])  # type: ignore[attr-defined]
    sampler = WeightedSampler([UseLimit(1000)], Priorities(alpha=1, beta=1, eps=0))
    batch = reader.sample(500, sampler=sampler)
    reader.update_priorities(sampler, batch.drawn, [float(code % 7) for code in codes(batch)])  # type: ignore[attr-defined]
    updated = codes(reader.sample(4000, sampler=sampler))
    assert fits([updated.count(code) for code in known], [code % 7 for code in known])


def test_spans_are_of_valid_steps(reader: Reader, world: World) -> None:
    known = sorted(world.after)
    padded = sample_sequences(reader, len(known), 4, pad=True, burn_in=2, sampler=EpochSampler())
    assert sorted(codes(padded)[2::6]) == known
    check_windows(padded, world.after, 2, 4)
    possible = [code for code, run in world.after.items() if len(run) >= 2]
    whole = codes(sample_sequences(reader, 2000, 2))
    assert fits([whole[::2].count(code) for code in possible], [1] * len(possible))
    assert all(world.after[code][1] == then for code, then in zip(whole[::2], whole[1::2], strict=True))
    sums = sample_n_step(reader, len(known), 3, 1.0, sampler=EpochSampler())
    for row, code in enumerate(codes(sums)):
        run = world.after[code][:3]
        assert (sums["steps"][row], sums["rewards"][row], sums["next_obs"]["code"][row]) == (
            len(run),
            sum(run),
            run[-1] + 100_000,
        )
    for strategy in ("final", "future"):
        relabelled = sample_hindsight(
            reader,
            len(known),
            goal="curr_obs.goal",
            achieved="next_obs.code",
            reward=lambda achieved, goal: goal.float(),
            share=1,
            strategy=strategy,  # type: ignore[arg-type]
            sampler=EpochSampler(),
        )
        for code, goal in zip(codes(relabelled), relabelled["curr_obs"]["goal"].flatten().tolist(), strict=True):
            assert goal - 100_000 in world.after[code][-1 if strategy == "final" else 0 :]


def test_every_count_is_of_valid_steps(world: World, tmp_path: Path) -> None:
    with writer_to(tmp_path / "a") as buffer:
        buffer.add_trajectories(world.blocks)
        buffer.flush()
        assert buffer.get_stats()["total_samples"] == len(world.after)
        assert [row["samples"] for row in buffer.query().rows()] == [
            len([code for code in world.after if code // 1000 == at]) for at in range(4)
        ]
        steps = buffer.query("steps")
        assert steps.count() == sum(steps * batch for steps, batch in SIZES)
        rewards = [row["rewards"] for row in steps.where("valid").rows()]
        assert sorted(rewards) == sorted(map(float, world.after))
        returned = buffer.get(0)
        assert isinstance(returned, Trajectory)
        assert world.blocks[0].valid is not None
        assert torch.equal(returned.valid, world.blocks[0].valid)  # type: ignore[arg-type]
        for number in range(4):  # late values by row belong to the rows that are drawn
            block = world.blocks[number]
            assert block.rewards is not None
            annotate(buffer, [number], {"negated": [-block.rewards[..., 0]]})
        batch = buffer.sample(50, columns=["rewards", "notes.negated"])
        assert torch.equal(batch["notes"]["negated"], -batch["rewards"][:, 0])
        buffer.flush()
    for rank in range(2):
        with Reader.open(tmp_path / "a", share=(rank, 2)) as part:
            part.save_checkpoint(tmp_path / "run" / f"rank_{rank}")
    for path in (tmp_path / "a", tmp_path / "run"):
        report = inspect(path)
        assert report["samples"] == len(world.after)
        assert report["invalid_steps"] == sum(steps * batch for steps, batch in SIZES) - len(world.after)
    parts = []
    for rank in range(2):
        source = Reader.open(tmp_path / "a", seed=1, sample_window_size=0)
        with ReplayLoader(source, 8, sampler=EpochSampler(epochs=1), rank=(rank, 2)) as loader:
            parts += [code for batch in loader for code in codes(batch)]
    assert sorted(parts) == sorted(world.after)


def test_rlinf_has_no_such_field_and_a_warning_says_so(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = TrajectoryReplayBuffer(seed=1, sample_window_size=0)
    buffer.add_trajectories(world.blocks)
    with caplog.at_level(logging.WARNING):
        buffer.save_checkpoint(str(tmp_path), layout="rlinf")
    invalid = sum(steps * batch for steps, batch in SIZES) - len(world.after)
    assert (
        f"RLinf has no field valid and will also draw {invalid} invalid steps of 3 trajectories (0 to 1, 3)"
        in caplog.text
    )
    again = TrajectoryReplayBuffer(seed=1, sample_window_size=0)
    again.load_checkpoint(str(tmp_path))
    assert again.total_samples == sum(steps * batch for steps, batch in SIZES)
    assert isinstance(again.get(0), Trajectory)
    assert again.get(0).valid is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "valid", [torch.ones(4, 2), torch.ones(4, dtype=torch.bool), torch.ones(4, 2, 1, dtype=torch.bool)]
)
def test_fields_that_do_not_say_it_of_each_step_are_refused(valid: torch.Tensor) -> None:
    buffer = TrajectoryReplayBuffer()
    with pytest.raises(InvalidTrajectoryError, match=r"field valid: .*\[T, B"):
        buffer.add_trajectories([Trajectory(rewards=torch.ones(4, 2, 1), valid=valid)])


def test_a_builder_collects_it_and_a_buffer_without_valid_steps_is_empty() -> None:
    result = EmbodiedRolloutResult()
    for _ in range(3):
        result.append_step_result(ChunkStepResult(rewards=torch.ones(2, 1), valid=torch.zeros(2, dtype=torch.bool)))
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([result.to_trajectory()])
    assert buffer.total_samples == 0
    with pytest.raises(EmptyBufferError, match="no step of the window is valid"):
        buffer.sample(1)
    for sampler in (EpochSampler(), WeightedSampler(), WeightedSampler(priorities=Priorities())):
        with pytest.raises(EmptyBufferError):
            buffer.sample(1, sampler=sampler)
    assert [part.valid.tolist() for part in result.to_splited_trajectories(2) if part.valid is not None] == [
        [[False]] * 3
    ] * 2


def test_a_count_that_disagrees_with_the_field_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajstore._core.columns.steps._valid_samples", lambda *_: 3)
    valid = torch.tensor([[True, False]] * 4)
    stored(tmp_path, [Trajectory(rewards=torch.ones(4, 2, 1), valid=valid)])
    problem = "its field valid has 4 valid steps, the index says 3"
    assert [found.message for found in verify(tmp_path).problems] == [problem]
    with Reader.open(tmp_path) as reader, pytest.raises(CorruptStoreError, match=f"trajectory 0: {problem}"):
        reader.sample(1)
