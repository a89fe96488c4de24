"""Draws from the trajectories that match a condition, or are in a list of ids."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.feeding.test_loader import block, waits_for
from tests.stores import in_memory, refused, stored, writer_to
from trajstore import AgentTrajectory, Reader, Reward, TrajectoryReplayBuffer, annotate
from trajstore._core.buffer.sequences import sample_hindsight, sample_n_step, sample_sequences
from trajstore.errors import ConfigurationError, EmptyBufferError
from trajstore.loader import PreloadReplayBufferDataset, ReplayBufferDataset, ReplayLoader, TokenLoader
from trajstore.samplers import EpochSampler, GroupSampler, Priorities, Recency, Sampler, UseLimit, WeightedSampler

pytest.importorskip("polars", reason="needs polars, of the extra 'query'")


def rollout(number: int) -> AgentTrajectory:
    return AgentTrajectory(
        input_ids=torch.full((5 + number % 4,), number),
        task_id=f"t{number % 3}",
        policy_version=number,
        reward=Reward(outcome=float(number % 2)),
        metadata={"source": "math" if number % 4 < 2 else "code"},
    )


SAMPLERS: dict[str, Callable[[], Sampler | None]] = {
    "none": lambda: None,
    "epochs": lambda: EpochSampler(unit="trajectory"),
    "groups": lambda: GroupSampler(),
    "weighted": lambda: WeightedSampler([Recency(5), UseLimit(1000)], Priorities(per="trajectory"), unit="trajectory"),
}


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("name", list(SAMPLERS))
def test_only_what_matches_is_drawn_and_changes_count_at_the_next_draw(tmp_path: Path, name: str, window: int) -> None:
    """Against a plain filter, while trajectories come, go and change."""
    sampler = SAMPLERS[name]()
    with writer_to(tmp_path / "store") as writer:
        writer.sample_window_size = window
        writer.add_trajectories([rollout(number) for number in range(12)])

        def drawn() -> tuple[set[int], set[int]]:
            seen = set[int]()
            for _ in range(40):
                some = writer.sample_trajectories(4, sampler=sampler, where="outcome = 1 and metadata.source = 'math'")
                assert len(some) <= 12
                seen |= {int(item.input_ids[0]) for item in some if isinstance(item, AgentTrajectory)}
            shown = writer.trajectory_ids.tolist()
            return seen, set(shown[-window:] if window else shown)

        def expect(matching: set[int]) -> None:
            seen, inside = drawn()
            assert seen == matching & inside

        expect({1, 5, 9})
        writer.add_trajectories([rollout(number) for number in range(12, 15)])
        expect({1, 5, 9, 13})
        annotate(writer, [9, 4], {"outcome": [0.0, 1.0]})
        expect({1, 4, 5, 13})
        writer.evict([5])
        expect({1, 4, 13})
        writer.evict([1, 4, 13])
        with pytest.raises(EmptyBufferError, match=r"of 11 trajectories, none match where=.outcome = 1 and"):
            drawn()


def test_every_way_of_drawing_takes_a_condition_and_ids(tmp_path: Path) -> None:
    stored(tmp_path / "store", [block(key) for key in range(6)])
    reader = TrajectoryReplayBuffer.open(tmp_path / "store", seed=2)
    condition, wanted = "trajectory_id in (1, 4)", {1, 4}
    for only in (
        {"where": condition},
        {"ids": ["1", 4]},
        {"where": "trajectory_id > 0", "ids": torch.tensor([0, 1, 4])},
    ):
        batches: list[Any] = [
            reader.sample(64, **only),
            reader.sample(64, sampler=WeightedSampler(), **only),
            reader.read(reader.draw(64, **only)),
            sample_sequences(reader, 64, 2, ends=(), **only),
            sample_n_step(reader, 64, 2, 0.0, ends=(), terminations="rewards", **only),
        ]
        for batch in batches:
            assert {int(value) // 1000 for value in batch["rewards"].reshape(-1).tolist()} == wanted
        relabelled = sample_hindsight(
            reader, 64, goal="curr_obs.s", achieved="curr_obs.s", reward=lambda a, g: a.double(), ends=(), **only
        )
        assert {int(value) // 1000 for value in relabelled["curr_obs"]["s"].reshape(-1).tolist()} == wanted
        with ReplayLoader(reader, 64, **only) as loader:
            assert {int(value) // 1000 for value in next(loader)["rewards"].reshape(-1).tolist()} == wanted
    for dataset in (ReplayBufferDataset, PreloadReplayBufferDataset):
        drawn = dataset(reader, None, 64, 0, 0, where=condition)
        assert {int(value) // 1000 for value in next(iter(drawn))["rewards"].reshape(-1).tolist()} == wanted
        drawn.where = "trajectory_id = 4"
        batches = itertools.islice(drawn, 9)  # those made ahead are kept
        assert [int(batch["rewards"][:, 0].min()) // 1000 for batch in batches][6:] == [4, 4, 4]
        drawn.close()
    sampler = EpochSampler(epochs=1)
    with ReplayLoader(reader, 8, sampler=sampler, ids=[1, 4]) as loader:
        rows = list(itertools.chain(*(batch["rewards"].reshape(-1).tolist() for batch in loader)))
    assert sorted(rows) == [1000.0 * key + step for key in (1, 4) for step in range(8)]


def loader_of(reader: Reader, **options: Any) -> TokenLoader:
    return TokenLoader(reader, 32, batch_size=2, prefetch=2, **options)


def named(loader: Iterable[Any], count: int) -> list[list[int]]:
    return [pack["trajectory_ids"].tolist() for batch in itertools.islice(loader, count) for pack in batch]


@pytest.mark.parametrize("sampler", [lambda: None, lambda: EpochSampler(unit="trajectory")])
def test_a_loader_resumes_with_its_condition_and_refuses_another(tmp_path: Path, sampler: Callable[[], Any]) -> None:
    stored(tmp_path / "store", [rollout(number) for number in range(40)])

    def make(where: str | None = "metadata.source = 'math'", **more: Any) -> TokenLoader:
        reader = TrajectoryReplayBuffer.open(tmp_path / "store", seed=4)
        return loader_of(reader, where=where, sampler=sampler(), **more)

    with make() as loader:
        first = named(loader, 3)
        state = loader.state_dict()
        expected = named(loader, 5)
    assert {number % 4 for pack in first + expected for number in pack} == {0, 1}
    with make() as again:
        again.load_state_dict(pickle.loads(pickle.dumps(state)))
        assert named(again, 5) == expected
    for other in (make("outcome = 1"), make(None), make(ids=[1, 2])):
        with other, pytest.raises(ConfigurationError, match=r"where|ids"):
            other.load_state_dict(state)
    with make("outcome = 1") as other:
        other.load_state_dict(state, changed=True)
        assert {number % 2 for pack in named(other, 30)[30:] for number in pack} == {1}


def test_a_forked_process_is_told_that_conditions_need_spawn(tmp_path: Path) -> None:
    with writer_to(tmp_path / "store") as writer:
        writer.add_trajectories([rollout(number) for number in range(6)])
        assert writer.query().count() == 6
    loader = loader_of(TrajectoryReplayBuffer.open(tmp_path / "store", seed=4), where="outcome = 1")
    workers = DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context="fork")
    refused(workers, "start it with the method 'spawn'")
    by_ids = loader_of(TrajectoryReplayBuffer.open(tmp_path / "store", seed=4), ids=[1, 3])
    workers = DataLoader(by_ids, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert {number for pack in named(iter(workers), 4) for number in pack} == {1, 3}


def test_what_a_selection_refuses(caplog: pytest.LogCaptureFixture) -> None:
    buffer = in_memory([rollout(number) for number in range(6)])
    sampler = WeightedSampler(priorities=Priorities(per="trajectory"), unit="trajectory")
    buffer.sample_trajectories(2, sampler=sampler, ids=[0, 1, 77])
    assert "ids: 1 of 3 are not here: 77" in caplog.text
    drawn = buffer._sampling.draw(2, 0, sampler.selection)
    assert buffer.update_priorities(sampler, drawn, torch.ones(len(drawn))) == 0
    with pytest.raises(ConfigurationError, match=r"sampler: .*where= or ids="):
        buffer.sample_trajectories(2, sampler=sampler)
    with pytest.raises(ConfigurationError, match=r"sampler: .*where=None and 3 ids.*a sampler for each"):
        buffer.sample_trajectories(2, sampler=sampler, ids=[0, 1])
    used = EpochSampler(unit="trajectory")
    buffer.sample_trajectories(2, sampler=used)
    with pytest.raises(ConfigurationError, match=r"sampler: it .*has drawn all trajectories, without where= and ids="):
        buffer.sample_trajectories(2, sampler=used, where="outcome = 1")
    with pytest.raises(ConfigurationError, match=r"where: 'outcom = 1': there is no column 'outcom'"):
        buffer.sample_trajectories(2, where="outcom = 1")
    for wrong in ({"where": 3}, {"ids": "7"}, {"ids": 7}, {"ids": ["x"]}, {"ids": [1.5]}):
        with pytest.raises(ConfigurationError, match=f"^{next(iter(wrong))}: "):
            buffer.sample_trajectories(2, **wrong)  # type: ignore[arg-type]
    with pytest.raises(EmptyBufferError, match=r"of 6 trajectories, none are among 1 id"):
        buffer.sample(2, ids=[99])


@pytest.mark.parametrize(("make", "one"), [(ReplayLoader, block), (TokenLoader, rollout)])
def test_a_loader_of_an_empty_store_refuses_conditions_that_can_never_match(
    tmp_path: Path, make: Any, one: Any
) -> None:
    with writer_to(tmp_path / "store") as writer:
        for wrong in ("outcome >", "nosuch(outcome) > 0", "outcome + 1", "sum(outcome) > 0"):
            with make(writer, 8, where=wrong, timeout=60) as loader, pytest.raises(ConfigurationError, match="where: "):
                next(loader)
        with make(writer, 8, where="outcme = 1", min_size=2) as loader:
            words = r"0 of 2 trajectories \(where: 'outcme = 1': there is no column 'outcme'.*did you mean 'outcome'"
            waits_for(loader, words)
            writer.add_trajectories([one(1)])
            annotate(writer, 0, {"outcme": 1.0})
            writer.add_trajectories([one(3)])
        with make(writer, 8, where="outcme = 1", timeout=600, min_size=2) as loader:
            next(loader)
        with make(writer, 8, where="outcome = 0", timeout=0.5) as loader, pytest.raises(TimeoutError):
            next(loader)


def test_a_condition_on_a_late_value_matches_nothing_after_a_rollback_to_before_it(tmp_path: Path) -> None:
    wanted = "judge >= 0"
    with writer_to(tmp_path / "store") as writer, TrajectoryReplayBuffer.open(tmp_path / "store") as reader:
        ids = writer.add_trajectories([rollout(number) for number in range(4)])
        writer.points.save(1)
        with pytest.raises(ConfigurationError, match="no column 'judge'"):
            writer.sample_trajectories(2, where=wanted)
        annotate(writer, ids, {"judge": 1.0})
        with loader_of(writer, where=wanted, timeout=60) as loader:
            next(loader)
            reader.refresh()
            for shown in (writer, reader):
                assert shown.query().where(wanted).ids().tolist() == ids
            writer.points.rollback(1)
            reader.refresh()
            for shown in (writer, reader):
                assert shown.query().where(wanted).count() == 0
                assert shown.query().where("judge is null").ids().tolist() == ids
                with pytest.raises(EmptyBufferError, match="none match"):
                    shown.sample_trajectories(2, where=wanted)
            annotate(writer, ids, {"judge": "good"})
            assert writer.query().where("judge = 'good'").ids().tolist() == ids
