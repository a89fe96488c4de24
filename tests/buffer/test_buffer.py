"""What a user of the buffer sees: the draws, memory, receipts, errors, threads."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.stores import writer_to
from trajstore import AgentTrajectory, Reward, Trajectory, TrajectoryReplayBuffer, WriterOptions, errors
from trajstore.buffer.internals import internals_of
from trajstore.columns.fields import join_name, walk
from trajstore.columns.schema import dtypes
from trajstore.files.local import LocalDirectory
from trajstore.formats import FORMATS
from trajstore.testing.witness import check_batch, check_trajectory, difference, rows_of, witness

KINDS = [("memory", "pt"), *((kind, fmt) for fmt in FORMATS for kind in ("cached", "uncached"))]


def tags_of(trajectory: Trajectory) -> torch.Tensor:
    tags: torch.Tensor = trajectory.curr_obs["tag"].reshape(-1)
    return tags


def plain_draw(trajectories: list[Trajectory], count: int, generator: torch.Generator) -> torch.Tensor:
    """Return the tags that a buffer of lists would draw: one number per sample, counted through the window."""
    lengths = torch.tensor([len(tags_of(item)) for item in trajectories])
    ends = lengths.cumsum(0)
    drawn = torch.randint(0, int(ends[-1]), (min(count, int(ends[-1])),), generator=generator)
    which = torch.bucketize(drawn, ends, right=True)
    within = drawn - (ends - lengths)[which]
    return torch.stack([tags_of(trajectories[i])[j] for i, j in zip(which.tolist(), within.tolist(), strict=True)])


def make(kind: str, fmt: str, path: Path, window: int, seed: int = 7) -> TrajectoryReplayBuffer:
    if kind == "memory":
        return TrajectoryReplayBuffer(seed=seed, sample_window_size=window)
    return TrajectoryReplayBuffer(
        seed=seed,
        enable_cache=kind == "cached",
        cache_size=3,
        sample_window_size=window,
        auto_save=True,
        auto_save_path=path,
        trajectory_format=fmt,
        writer=WriterOptions(commit_interval=0.0),
    )


def flat(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {join_name(path): value for path, value in walk(batch)}


@pytest.mark.parametrize("window", [0, 1, 4, 100])
@pytest.mark.parametrize(("kind", "fmt"), KINDS)
def test_draws_are_those_of_a_list(tmp_path: Path, kind: str, fmt: str, window: int) -> None:
    generator = torch.Generator().manual_seed(7)
    added: list[Trajectory] = []
    with make(kind, fmt, tmp_path / "store", window) as buffer:
        for key in range(9):
            added.append(witness(key))
            assert buffer.add_trajectories([added[-1]]) == [key]
            if key % 4 == 3:
                buffer.flush()
            for count in (5, 1):
                expected = rows_of(plain_draw(added[-window:] if window else added, count, generator))
                found = flat(buffer.sample(count))
                assert found.keys() == expected.keys()
                for name, value in expected.items():
                    assert found[name].dtype == value.dtype, name
                    assert torch.equal(found[name], value), name
        buffer.clear_cache()
        expected = rows_of(plain_draw(added[-window:] if window else added, 50, generator))
        found = flat(buffer.sample(50))
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert len(buffer) == buffer.size == 9
        assert buffer.total_samples == sum(len(tags_of(item)) for item in added)


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_dtype_and_empty_dimensions(tmp_path: Path, fmt: str) -> None:
    trajectories = []
    for name, dtype in dtypes().items():
        bits = torch.arange(3 * 2 * 16 * dtype.itemsize, dtype=torch.int64).to(torch.uint8)
        values = bits % 2 == 1 if dtype == torch.bool else bits.view(dtype)
        values = values[: 3 * 2 * 4].reshape(3, 2, 4)
        trajectories.append(
            Trajectory(
                rewards=torch.zeros(3, 2, 1), curr_obs={name: values}, next_obs={"none": torch.zeros(3, 2, 0, 5)}
            )
        )
    with make("uncached", fmt, tmp_path / "store", 1) as buffer:
        for number, trajectory in enumerate(trajectories):
            buffer.add_trajectories([trajectory])
            buffer.flush()
            assert difference(buffer.get(number), trajectory) is None
            assert buffer.sample(6)["next_obs"]["none"].shape == (6, 0, 5)


# -- sampling ---------------------------------------------------------------------------------------


def test_more_than_there_is_is_cut_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([witness(0)])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert len(buffer.sample(1000)["rewards"]) == buffer.total_samples
    assert len([record for record in caplog.records if "1000" in record.getMessage()]) == 1


def test_columns_and_out() -> None:
    buffer = TrajectoryReplayBuffer(seed=3)
    buffer.add_trajectories([witness(key) for key in range(5)])
    names = ["curr_obs.tag", "rewards"]
    out = {"curr_obs.tag": torch.full((20,), -1), "rewards": torch.zeros(20, 1, dtype=torch.float64)}
    batch = buffer.sample(8, columns=names, out=out)
    assert sorted(flat(batch)) == names
    check_batch(batch)
    assert flat(batch)["curr_obs.tag"].data_ptr() == out["curr_obs.tag"].data_ptr()
    assert out["curr_obs.tag"][8:].eq(-1).all()
    with pytest.raises(errors.SchemaMismatchError, match="no_such"):
        buffer.sample(1, columns=["no_such"])
    for wrong in (torch.zeros(3, dtype=torch.int64), torch.zeros(20), torch.zeros(20, 2, dtype=torch.int64)):
        with pytest.raises(errors.ConfigurationError, match=r"curr_obs\.tag"):
            buffer.sample(8, columns=names, out={**out, "curr_obs.tag": wrong})


def test_state_dict_goes_on_with_the_same_draws() -> None:
    buffer, other = TrajectoryReplayBuffer(seed=5), TrajectoryReplayBuffer(seed=99)
    for item in (buffer, other):
        item.add_trajectories([witness(key) for key in range(5)])
    buffer.sample(10)
    other.load_state_dict(buffer.state_dict())
    assert torch.equal(buffer.sample(30)["curr_obs"]["tag"], other.sample(30)["curr_obs"]["tag"])
    assert other.seed == 5


# -- adding -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "uncached"])
def test_the_callers_tensors_may_change(tmp_path: Path, kind: str) -> None:
    with make(kind, "pt", tmp_path / "store", 0) as buffer:
        trajectories = [witness(key) for key in range(5)]
        buffer.add_trajectories(trajectories)
        for trajectory in trajectories:
            for _, value in walk({k: v for k, v in vars(trajectory).items() if v is not None}):
                if isinstance(value, torch.Tensor):
                    value.zero_()
        check_batch(buffer.sample(30))
        buffer.flush()
        assert [check_trajectory(buffer.get(number)) for number in range(5)] == list(range(5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actions": torch.zeros(7, 2, 3)}, r"actions: has 7 rows, must have T = 4"),
        ({"actions": torch.zeros(4, 3, 3)}, r"actions: shape \[4, 3, 3\].* B = 2"),
        ({"dones": torch.zeros(7, 2, 1)}, r"dones: has 7 rows.*T = 4 or T \+ E with T divisible by E"),
        ({"curr_obs": {"dones": torch.zeros(5, 2, 1)}}, r"curr_obs\.dones: has 5 rows, must have T = 4$"),
        ({"dones": torch.zeros(3, 2, 1)}, r"dones: has 3 rows.*T = 4"),
        ({"dones": torch.zeros(5, 2, 1), "truncations": torch.zeros(6, 2, 1)}, r"has 5 rows|has 6 rows"),
        ({"rewards": None, "actions": torch.zeros(4, 2, 3)}, "prev_logprobs or rewards"),
        ({"rewards": torch.zeros(4)}, r"rewards: shape \[4\]"),
        ({"curr_obs": {"a": {"b": torch.zeros(4, 1)}}}, r"curr_obs\.a\.b: shape \[4, 1\]"),
        ({"curr_obs": {"a": object()}}, r"field curr_obs\.a: a object"),
        ({"versions": torch.full((4, 2, 1), float("nan"))}, "versions"),
    ],
)
def test_what_does_not_fit_is_refused_whole(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {"rewards": torch.zeros(4, 2, 1), **changes}
    with make("cached", "pt", tmp_path / "store", 0) as buffer:
        with pytest.raises(errors.InvalidTrajectoryError, match=message):
            buffer.add_trajectories([witness(0), Trajectory(**values)])
        assert len(buffer) == 0
        assert buffer.add_trajectories([witness(0)]) == [0]


def test_what_has_nothing_in_it_is_passed_over_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nothing = [Trajectory(), Trajectory(rewards=torch.zeros(0, 2, 1)), Trajectory(prev_logprobs=torch.zeros(4, 0, 1))]
    with make("cached", "pt", tmp_path / "store", 0) as buffer:
        assert buffer.add_trajectories(nothing) == []
        caplog.clear()
        given = [nothing[0], witness(0), *nothing[1:], witness(1), Trajectory(max_episode_length=3)]
        assert buffer.add_trajectories(given) == [0, 1]
        (said,) = [record.message for record in caplog.records]
        assert "at the places 0, 2, 3, 5 of 6 there is nothing to store" in said
        assert [check_trajectory(buffer.get(number)) for number in (0, 1)] == [0, 1]


def test_receipts(tmp_path: Path) -> None:
    told: list[int] = []
    buffer = writer_to(tmp_path, on_commit=told.extend, writer=WriterOptions(commit_interval=30.0))
    with buffer:
        assert buffer.points.committed == -1
        ids = buffer.add_trajectories([witness(key) for key in range(3)])
        assert buffer.wait(ids, timeout=0.01) is False
        assert buffer.get_stats()["pending_bytes"] > 0
        buffer.flush()
        assert buffer.wait(ids) is True
        assert buffer.points.committed == 2
        assert buffer.get_stats()["pending_bytes"] == 0
    assert told == ids


def test_a_callback_that_raises_undoes_nothing(tmp_path: Path) -> None:
    def broken(ids: Any) -> None:
        raise RuntimeError("of the user")

    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path, on_commit=broken) as buffer:
        buffer.add_trajectories([witness(0)])
        buffer.flush()
        assert buffer.points.committed == 0
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        assert check_trajectory(buffer.get(0)) == 0


def test_flush_gives_up_after_its_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, publish = threading.Event(), LocalDirectory.publish
    with make("uncached", "pt", tmp_path / "store", 0) as buffer:
        monkeypatch.setattr(LocalDirectory, "publish", lambda *given: publish(*given) if go_on.wait() else None)
        try:
            buffer.add_trajectories([witness(0)])
            with pytest.raises(TimeoutError):
                buffer.flush(timeout=0.05)
            check_batch(buffer.sample(1))
        finally:
            go_on.set()
        buffer.flush()
        assert buffer.points.committed == 0


def test_memory_of_waiting_writes_is_bounded(tmp_path: Path) -> None:
    options = WriterOptions(max_pending_bytes=20_000, on_full="raise", commit_interval=60.0)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path, writer=options) as buffer:
        with pytest.raises(errors.PendingFullError, match="max_pending_bytes"):  # noqa: PT012
            for key in range(1000):
                buffer.add_trajectories([witness(key)])
        count = len(buffer)
        assert 0 < count < 1000
        buffer.flush()
        assert buffer.add_trajectories([witness(0)]) == [count]
    blocking = WriterOptions(max_pending_bytes=20_000, commit_interval=60.0)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path, writer=blocking) as buffer:
        for key in range(100):
            buffer.add_trajectories([witness(key)])
        assert len(buffer) == count + 101


# -- ids, opening, closing --------------------------------------------------------------------------


def test_ids_are_never_given_twice(tmp_path: Path) -> None:
    for kind in ("memory", "cached"):
        with make(kind, "pt", tmp_path / "store", 0) as buffer:
            assert buffer.add_trajectories([witness(0), witness(1)]) == [0, 1]
            buffer.clear()
            assert len(buffer) == buffer.total_samples == 0
            assert buffer.add_trajectories([witness(2)]) == [2]
            assert internals_of(buffer).trajectory_counter == 3
    with make("cached", "zarr", tmp_path / "store", 0) as buffer:
        assert buffer.trajectory_ids.tolist() == [2]
        buffer.clear()
    with make("cached", "pt", tmp_path / "store", 0) as buffer:
        assert internals_of(buffer).trajectory_counter == 3
        assert buffer.add_trajectories([witness(3)]) == [3]


def test_closing(tmp_path: Path) -> None:
    buffer = make("cached", "pt", tmp_path, 0)
    buffer.add_trajectories([witness(0)])
    buffer.close()
    buffer.close()
    calls: list[Any] = [
        lambda: buffer.add_trajectories([witness(1)]),
        lambda: buffer.evict([0]),
        lambda: buffer.points.pin("name"),
        lambda: buffer.points.unpin("name"),
    ]
    for call in calls:
        with pytest.raises(errors.StoreClosedError):
            call()
    with make("cached", "pt", tmp_path, 0) as again:
        assert check_trajectory(again.get(0)) == 0


def test_a_buffer_that_nobody_closed_gives_its_directory_back(tmp_path: Path) -> None:
    for key in range(10):
        buffer = make("cached", "pt", tmp_path, 0)
        buffer.add_trajectories([witness(key)])
        buffer.flush()
        del buffer
    with make("cached", "pt", tmp_path, 0) as buffer:
        assert [check_trajectory(buffer.get(number)) for number in range(10)] == list(range(10))


# -- agents -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
def test_agent_trajectories(tmp_path: Path, fmt: str) -> None:
    def agent(length: int, response: int) -> AgentTrajectory:
        return AgentTrajectory(
            messages=[{"role": "user", "content": "¿qué?"}, {"role": "assistant", "content": "…", "author": "llm"}],
            input_ids=torch.arange(length),
            attention_mask=torch.ones(length, dtype=torch.int64),
            loss_mask=torch.zeros(length, dtype=torch.int64),
            response_start=length - response,
            old_log_probs=-torch.arange(response, dtype=torch.float32),
            reward=Reward(outcome=0.5, metadata={"a": [1, None]}),
            task_id=f"task {length}",
            policy_version=length,
            is_terminated=True,
            metadata={"deep": {"er": 1.5}},
        )

    trajectories = [agent(7, 3), agent(5, 5), agent(9, 0)]
    with make("uncached", fmt, tmp_path, 0) as buffer:
        buffer.add_trajectories(trajectories)
        for _ in range(2):
            for number, trajectory in enumerate(trajectories):
                assert difference(buffer.get(number), trajectory) is None
            assert len(buffer.sample_trajectories(2)) == 2
            buffer.flush()
        assert buffer.total_samples == 3
        wrong = agent(7, 3)
        wrong.old_log_probs = torch.zeros(2)
        with pytest.raises(errors.InvalidTrajectoryError, match="old_log_probs"):
            buffer.add_trajectories([wrong])


# -- threads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "fmt"), [("memory", "pt"), ("cached", "pt"), ("uncached", "zarr"), ("cached", "pkl")])
def test_adding_and_sampling_in_several_threads(tmp_path: Path, kind: str, fmt: str) -> None:
    problems: list[BaseException] = []
    ids: list[int] = []
    adding = threading.Event()
    with make(kind, fmt, tmp_path / "store", 12) as buffer:
        ids += buffer.add_trajectories([witness(0)])

        def guarded(call: Any) -> None:
            try:
                call()
            except BaseException as error:  # shown by the main thread
                problems.append(error)

        def add(start: int) -> None:
            for key in range(start, start + 60, 2):
                ids.extend(buffer.add_trajectories([witness(key), witness(key + 1)]))

        def sample() -> None:
            while not adding.is_set():
                check_batch(buffer.sample(32))
                check_trajectory(buffer.sample_trajectories(1)[0])

        adders = [threading.Thread(target=guarded, args=(lambda n=n: add(1000 * n),)) for n in (1, 2)]
        samplers = [threading.Thread(target=guarded, args=(sample,)) for _ in range(2)]
        for thread in adders + samplers:
            thread.start()
        for thread in adders:
            thread.join()
        adding.set()
        for thread in samplers:
            thread.join()
        assert problems == []
        assert sorted(ids) == list(range(121)) == buffer.trajectory_ids.tolist()
        buffer.flush()
        if kind != "memory":
            keys = sorted(check_trajectory(buffer.get(number)) for number in ids)
            assert keys == [0, *range(1000, 1060), *range(2000, 2060)]
