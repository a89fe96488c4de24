"""Late values from the writer and from other processes: durable, the latest counts, history is kept."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.stores import another_writer, damage_indexes, stored, writer_to
from tests.support.waiting import freeze
from tools.crash.forked import forking
from trajstore import AgentTrajectory, Reward, TrajectoryReplayBuffer, annotate, notes_of
from trajstore._core.files.local import LocalDirectory
from trajstore._core.store.index import TrajectoryIndex
from trajstore._core.writing.commit_log import CommitLog
from trajstore.errors import ConfigurationError, StoreError, StoreWriteError, TrajectoryUnavailableError
from trajstore.operations.verify import verify

pytest.importorskip("polars", reason="needs polars, of the extra 'query'")


def rollout(number: int) -> AgentTrajectory:
    return AgentTrajectory(
        input_ids=torch.arange(4),
        reward=Reward(outcome=float(number % 2), metadata={"judge": 0.5}),
        task_id=f"t{number % 2}",
    )


def column(buffer: TrajectoryReplayBuffer, name: str) -> list[Any]:
    return [row[name] for row in buffer.query().select(name).rows()]


def values_of(store: Path | TrajectoryReplayBuffer, number: int | str) -> list[Any]:
    return [(note.name, note.value, note.who) for note in notes_of(store, number)]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored(tmp_path_factory.mktemp("pristine") / "store", [rollout(number) for number in range(4)])


@pytest.fixture
def path(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "store"))


@pytest.mark.parametrize("added", [1, 100])  # more than the index has room for: it moves
@pytest.mark.parametrize("name", ["score", "tag"])
def test_rollouts_may_be_added_while_values_are_shown(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str, added: int
) -> None:
    """They have no values, and the others have theirs: those are set on copies of the columns, without the lock."""
    values: list[Any] = [1.5, 2.5] if name == "score" else ["good", "bad"]
    with writer_to(path) as writer:
        annotate(writer, 3, {name: values[1]})
        shown, note = writer._live.contents.index, TrajectoryIndex.note

        def note_late(index: TrajectoryIndex, *arguments: Any) -> None:
            note(index, *arguments)
            if index.table == "slot" and len(shown) == 4:
                adder = threading.Thread(target=writer.add_trajectories, args=([rollout(0)] * added,))
                adder.start()
                adder.join()

        monkeypatch.setattr(TrajectoryIndex, "note", note_late)
        annotate(writer, [0, 1], {name: values})
        assert column(writer, name) == [*values, None, values[1]] + [None] * added
        annotate(writer, 4, {name: values[0]})
        expected = [*values, None, values[1], values[0]] + [None] * (added - 1)
        assert column(writer, name) == expected
    with TrajectoryReplayBuffer.open(path) as reader:
        assert column(reader, name) == expected


def test_the_latest_counts_and_the_history_stays(path: Path) -> None:
    with writer_to(path) as writer, TrajectoryReplayBuffer.open(path) as reader:
        annotate(writer, [0, 1], {"score": torch.tensor([1.5, 2.5]), "tag": "good"}, who="anna")
        annotate(writer, 1, {"score": True, "tag": None}, who="bob")
        annotate(writer, [2, 3], {"outcome": 9, "reward_judge": [0, None]})
        expected = {
            "score": [1.5, 1.0, None, None],
            "tag": ["good", None, None, None],
            "outcome": [0.0, 1.0, 9.0, 9.0],
            "reward_judge": [0.5, 0.5, 0.0, 0.5],
        }
        history = [("score", 2.5, "anna"), ("tag", "good", "anna"), ("score", 1.0, "bob"), ("tag", None, "bob")]
        with TrajectoryReplayBuffer.open(path) as of_log:
            assert "score" not in reader.query().table().columns
            reader.refresh()
            for buffer in (writer, reader, of_log):
                assert {name: column(buffer, name) for name in expected} == expected
        assert values_of(writer, 1) == values_of(path, 1) == history
        assert writer.query().where("tag = 'good' and score > 1").ids().tolist() == [0]
        writer.points.save(0)
    with TrajectoryReplayBuffer.open(path) as of_snapshot:
        assert {name: column(of_snapshot, name) for name in expected} == expected
    assert values_of(path, 1) == history


def beside(target: Callable[..., None], *arguments: object) -> int | None:
    """Run a function in another process; return its exit code."""
    process = forking().Process(target=target, args=arguments)
    process.start()
    process.join(300)
    return process.exitcode


def test_a_value_is_compared_with_what_waits_for_the_writer(path: Path) -> None:
    """Values are numbered in the order of application, whatever the annotators' clocks."""
    with another_writer(path) as writer:
        freeze(writer)
        annotate(path, 0, {"race": 0.5})
        (ahead,) = (path / "inbox").iterdir()
        ahead.rename(ahead.with_name("09" + ahead.name[2:]))  # given by a clock that is ahead
        with pytest.raises(ConfigurationError, match=r"race: a text, .*numbers here"):
            annotate(path, 0, {"race": "good"})
        annotate(path, 1, {"late": "x", "n": 1})
        annotate(path, 1, {"late": None})
        annotate(path, 1, {"n": 2})
        with pytest.raises(ConfigurationError, match="64 names"):
            annotate(path, 1, {f"n{number}": 1 for number in range(62)})
        assert verify(path).sound
    writer_to(path).close()
    assert values_of(path, 0) == [("race", 0.5, "")]
    assert values_of(path, 1) == [("late", "x", ""), ("n", 1.0, ""), ("late", None, ""), ("n", 2.0, "")]
    assert os.listdir(path / "inbox") == []


def test_of_two_who_annotate_at_one_moment_the_later_is_refused_and_set_aside(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with another_writer(path) as writer:
        freeze(writer)
        annotate(path, 0, {"race": 0.5})
        (first,) = (path / "inbox").iterdir()
        first.rename(path / "first")  # hidden from the second look
        annotate(path, [0, 1], {"race": ["good", None], "other": 1}, who="anna")
        (path / "first").rename(first)
    writer_to(path).close()
    assert caplog.text.count("the values race, other of trajectories 0 to 1, given by anna, are refused") == 1
    caplog.clear()
    (aside,) = (path / "inbox").iterdir()
    assert aside.suffix == ".refused"
    assert values_of(path, 0) == [("race", 0.5, "")]
    verification = verify(path)
    assert verification.sound
    assert verification.notes == [
        f"inbox/{aside.name}: the values race, other of trajectories 0 to 1, given by anna, are refused and reach no "
        "trajectory: race: a text, but the values of this name are numbers here; take another name; the file has them, "
        "and may be deleted"
    ]
    annotate(path, 0, {"race": 1})
    with writer_to(path) as again:
        assert column(again, "race") == [1.0, None, None, None]
    assert "refused" not in caplog.text, "only who sets them aside says so"
    assert list((path / "inbox").iterdir()) == [aside]


def _annotate_often(path: Path, who: str) -> None:
    for at in range(4):
        annotate(path, [at, (at + 1) % 4], {"score": [10 * at, 10 * at + 1], "tag": who}, who=who)


@pytest.mark.parametrize("live", [False, True])
def test_processes_annotate_at_once_and_the_writer_gives_rows_meanwhile(path: Path, live: bool) -> None:
    """Each value of each process is present once, in its order; so are the writer's rows, if any."""
    names = [f"p{number}" for number in range(6)]
    given = 0
    with writer_to(path) if live else nullcontext() as writer:
        others = [forking().Process(target=_annotate_often, args=(path, name)) for name in names]
        for other in others:
            other.start()
        while writer is not None and (any(other.is_alive() for other in others) or given < 5):
            rows = [torch.full((4,), float(given + number)) for number in range(4)]
            annotate(writer, range(4), {"rows": rows, "score": [float(given + n) for n in range(4)]}, who="writer")
            given += 1
        for other in others:
            other.join(300)
        assert [other.exitcode for other in others] == [0] * len(names)
    assert os.listdir(path / "inbox") == []
    with writer_to(path) as again:
        for number in range(4):
            values_by_process: dict[str, list[Any]] = {}
            for note in notes_of(again, number):
                values_by_process.setdefault(note.who + " " + note.name, []).append(note.value)
            mine = sorted([(number, 10.0 * number), ((number - 1) % 4, 10.0 * ((number - 1) % 4) + 1)])
            for name in names:
                assert values_by_process.pop(f"{name} score") == [value for _, value in mine]
                assert values_by_process.pop(f"{name} tag") == [name, name]
            assert values_by_process.pop("writer score", []) == [float(number + at) for at in range(given)]
            assert values_by_process.pop("writer rows", []) == ["rows of float32"] * given
            assert not values_by_process
            if live:
                assert again.get(number).notes["rows"].tolist() == [float(given - 1 + number)] * 4
    assert verify(path).sound


def test_a_run_is_annotated_by_its_ids(tmp_path: Path) -> None:
    for rank in range(2):
        stored(tmp_path / f"rank_{rank}", [rollout(number) for number in range(2)])
    annotate(tmp_path, ["1/1", "0/0"], {"score": [7, 8]})
    with TrajectoryReplayBuffer.open(tmp_path) as run:
        scores = {row["trajectory_id"]: row["score"] for row in run.query().where("score is not null").rows()}
        assert sorted(scores.values()) == [7.0, 8.0]
    assert [note.value for note in notes_of(tmp_path, "1/1")] == [7.0]
    assert [note.value for note in notes_of(tmp_path / "rank_1", 1)] == [7.0]
    for wrong, why in (("2/0", "no rank_2, only rank_0, rank_1"), (1, "such as '0/1'")):
        with pytest.raises(TrajectoryUnavailableError, match=why):
            annotate(tmp_path, wrong, {"score": 1})
        with pytest.raises(TrajectoryUnavailableError, match=why):
            notes_of(tmp_path, wrong)


def test_a_name_stands_for_one_kind_of_values_in_all_ranks_of_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for rank in range(3):
        with writer_to(tmp_path / f"rank_{rank}") as writer:
            writer.add_trajectories([rollout(0)])
            if rank == 1:
                annotate(writer, 0, {"advantages": [torch.zeros(4)], "score": 1})
    message = "advantages: a number, but the values of this name are rows of float32 in rank 1 of the run"
    with pytest.raises(ConfigurationError, match=message):
        annotate(tmp_path, ["0/0", "2/0"], {"advantages": 1, "score": 1})
    with pytest.raises(ConfigurationError, match=r"score: a text, .*numbers in rank 1"):
        annotate(tmp_path, "2/0", {"score": "high"})
    annotate(tmp_path / "rank_2", 0, {"advantages": 1})  # no check across ranks
    annotate(tmp_path, "2/0", {"advantages": 2, "score": 2})
    assert values_of(tmp_path, "2/0") == [("advantages", 1.0, ""), ("advantages", 2.0, ""), ("score", 2.0, "")]
    damage_indexes(tmp_path / "rank_1")
    annotate(tmp_path, "0/0", {"fresh": "high"})
    assert "rank 1 cannot be read, so the names of its values are not checked" in caplog.text


def test_values_acknowledged_before_a_snapshot_is_taken_or_left_are_in_it(path: Path) -> None:
    with writer_to(path) as writer:
        annotate(path, 0, {"judge": 1.0})
        writer.points.save(1)
        annotate(path, 0, {"judge": 2.0})
        writer.points.pin("kept")
        annotate(path, 0, {"judge": 3.0})
        writer.points.rollback(1)
        assert column(writer, "judge") == [1.0, None, None, None]
        (left,) = [snapshot.name for snapshot in writer.points.snapshots if snapshot.kind == "aside"]
        for name, value in (("kept", 2.0), (left, 3.0)):
            writer.points.go_to(name)
            assert column(writer, "judge") == [value, None, None, None]


def test_a_name_keeps_its_kind_but_in_stores_that_are_made_of_its_store(path: Path, tmp_path: Path) -> None:
    with writer_to(path) as writer:
        annotate(writer, 0, {"tag": "x"})
        writer.points.save(1)
        annotate(writer, 0, {"tag": None})
        with pytest.raises(ConfigurationError, match=r"tag: a number, .*texts here"):
            annotate(writer, 0, {"tag": 1})
        writer.save_checkpoint(tmp_path / "checkpoint")
        writer.points.rollback(1)
        assert column(writer, "tag") == ["x", None, None, None]
    annotate(tmp_path / "checkpoint", 0, {"tag": 1})
    assert values_of(tmp_path / "checkpoint", 0) == [("tag", 1.0, "")]


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ([0, 0], {"score": 1}, "twice"),
    ([0, 1], {"score": [1]}, "1 value for 2"),
    (0, {"score": float("nan")}, "finite"),
    (0, {"score": 2**53 + 1}, "exactly"),
    (0, {"outcome": "good"}, "replaces a number"),
    (0, {"reward_judge": ["good"]}, "replaces a number"),
    (0, {"score": b"x"}, "must be a finite number"),
    (0, {"score": "text"}, "are numbers here"),
    (0, {"new": None}, "no value of this name"),
    ([0, 1], {"new": [1, "x"]}, "numbers and texts"),
    (0, {"task": "t"}, "stays as it is"),
    (0, {"Outcome": 1}, "the fact outcome has this name but for the case of letters"),
    (0, {"Score": 1}, "there are values score, which differ in the case of letters alone; write score, or"),
    (0, {"new": 1, "NEW": 1}, "differ in the case of letters alone"),
    *((0, {name: 1}, "a-z, A-Z, 0-9 and _, and begin with no digit") for name in ("not a name", "caf\u00e9")),
    (0, {"new": "\ud800"}, "no Unicode"),
    (0, {"new": "x" * 5000}, "5,000 characters"),
    (0, {f"n{number}": 1 for number in range(64)}, "64 names"),
    ("x", {"new": 1}, "must be an id"),
    (0, [("new", 1)], "must be a dict"),
]


@pytest.fixture(scope="module")
def scored(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, TrajectoryReplayBuffer]]:
    """A store being written, with one value."""
    path = Path(shutil.copytree(pristine, tmp_path_factory.mktemp("scored") / "store"))
    with writer_to(path) as writer:
        annotate(writer, 0, {"score": 1})
        yield path, writer


@pytest.mark.parametrize(("ids", "values", "message"), REFUSED)
def test_what_cannot_be_kept_is_refused(
    scored: tuple[Path, TrajectoryReplayBuffer], ids: Any, values: Any, message: str
) -> None:
    path, writer = scored
    for store in scored:
        with pytest.raises(ConfigurationError, match=message):
            annotate(store, ids, values)
        with pytest.raises(ConfigurationError, match="who: a text that is no Unicode"):
            annotate(store, 0, {"score": 1}, who="\udcff")
        with pytest.raises(TrajectoryUnavailableError, match="id 99"):
            annotate(store, [0, 99], {"score": 1})
    assert not list(path.glob("inbox/*"))
    assert values_of(writer, 0) == [("score", 1.0, "")]


@pytest.mark.parametrize("kind", [np.float32, np.array, torch.tensor])
def test_numbers_of_numpy_and_torch_may_be_in_a_list(path: Path, kind: Callable[[float], Any]) -> None:
    annotate(path, [0, 1], {"judge": [kind(0.5), kind(2)]})
    assert [notes_of(path, number)[-1].value for number in (0, 1)] == [0.5, 2.0]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("live", [False, True])
def test_an_array_of_floats_is_recorded_as_their_list_is(path: Path, dtype: Any, live: bool) -> None:
    values = np.array([0.1, -2.5], dtype)
    wanted = values.tolist()
    with writer_to(path) if live else nullcontext(path) as store:
        annotate(store, [0, 1], {"judge": values, "same": wanted})
        values[:] = 7
        with pytest.raises(ConfigurationError, match="judge: nan, must be a finite number"):
            annotate(store, [0, 1], {"judge": np.array([1, np.nan], dtype)})
    notes = [note for number in (0, 1) for note in notes_of(path, number)]
    assert [(note.name, note.value) for note in notes] == [
        (name, value) for value in wanted for name in ("judge", "same")
    ]


def test_a_buffer_without_a_store_says_so(path: Path) -> None:
    with TrajectoryReplayBuffer() as buffer, pytest.raises(StoreError, match="give the path"):
        annotate(buffer, 0, {"score": 1})
    with TrajectoryReplayBuffer.open(path) as reader, pytest.raises(ConfigurationError, match=r"store: .*a Reader"):
        annotate(reader, 0, {"score": 1})  # type: ignore[arg-type]
    with TrajectoryReplayBuffer() as memory, pytest.raises(StoreError, match="give the path"):
        notes_of(memory, 0)
    with TrajectoryReplayBuffer() as memory, pytest.raises(StoreError, match="no store of its own"):
        annotate(memory, memory.add_trajectories([rollout(0)]), {"rows": [torch.zeros(4)]})


def test_a_bad_file_in_the_inbox_is_named_and_hides_no_other(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = writer_to(path)
    annotate(path, [0, 1], {"score": [1, 2]})
    annotate(path, 2, {"score": 3})
    annotate(path, 1, {"gone": 3})
    first, *_ = sorted((path / "inbox").iterdir())
    whole = first.read_bytes()
    for name, content in (("0.json", whole[:-9]), ("1.json", b"\xff" * 9), ("2.json", whole * 2), ("note.txt", b"")):
        (path / "inbox" / name).write_bytes(content)
    (path / "inbox" / "folder.json").mkdir()
    writer.evict([1])
    with caplog.at_level(logging.WARNING):
        writer.close()
        with writer_to(path) as again:
            backing = again._sink
            backing.writer.inbox.take_in()  # type: ignore[attr-defined]
            assert column(again, "score") == [1.0, 3.0, None]
    log = caplog.text
    assert all(f"inbox/{name}: " in log for name in ("0.json", "1.json", "2.json"))
    assert "trajectories 1 were evicted" in log
    left = {"0.json", "1.json", "2.json", "note.txt", "folder.json"}
    assert set(os.listdir(path / "inbox")) == left, "without the three that were given"


def _annotate_until_killed(path: Path, left: int) -> None:
    """Annotate, and kill the process before directory change number ``at``."""
    changes = itertools.count(1)

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **named: Any) -> Any:
            if next(changes) == left:
                os.kill(os.getpid(), signal.SIGKILL)
            return change(*arguments, **named)

        return counting

    for name in ("publish", "append", "remove", "create", "cut"):
        setattr(LocalDirectory, name, counted(getattr(LocalDirectory, name)))
    annotate(path, [0, 1], {"score": [1, 2]})


@pytest.mark.parametrize("at", range(1, 7))
def test_a_kill_between_two_calls_of_the_directory_loses_and_doubles_nothing(path: Path, at: int) -> None:
    """Kill an annotating process before its ``at``-th directory change, then open the store."""
    killed = beside(_annotate_until_killed, path, at)
    assert killed in (0, -signal.SIGKILL)
    with writer_to(path) as writer:
        values = [note.value for note in notes_of(writer, 0)]
        assert values in ([], [1.0])
        assert killed or values == [1.0]
        assert [note.value for note in notes_of(writer, 1)] == [2.0] * len(values)
        annotate(writer, 0, {"score": 3})
        assert [note.value for note in notes_of(writer, 0)] == [*values, 3.0]


def test_an_object_store_has_an_inbox_too(memory_url: str) -> None:
    with writer_to(memory_url) as writer:
        writer.add_trajectories([rollout(number) for number in range(2)])
        writer.flush()
        annotate(memory_url, 0, {"score": 1}, who="beside")
        annotate(writer, 1, {"score": 2})  # ordered after the waiting one
        assert [note.who for note in notes_of(writer, 0)] == ["beside"]
    annotate(memory_url, [0, 1], {"score": 3}, who="after")
    with TrajectoryReplayBuffer.open(memory_url) as reader:
        assert column(reader, "score") == [3.0, 3.0]
    assert [note.value for note in notes_of(memory_url, 0)] == [1.0, 3.0]


def test_a_clock_before_1970_damages_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: -5_000_000_000)
    store = tmp_path / "store"
    with writer_to(store) as buffer:
        buffer.add_trajectories([rollout(0)])
        buffer.flush()
        annotate(buffer, [0], {"judge": 0.5})
        assert verify(store).sound  # as the log records it
    annotate(store, [0], {"judge": 0.75})
    assert [(note.value, note.time) for note in notes_of(store, 0)] == [(0.5, 0.0), (0.75, 0.0)]
    assert verify(store).sound


def test_a_trajectory_is_evicted_while_its_values_are_taken_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the simulator: an unrelated ``annotate`` raised the error of that trajectory."""
    real = CommitLog.unknown

    def unknown(log: CommitLog, ids: Sequence[int]) -> set[int]:
        gone = real(log, ids)
        if 0 in ids and not gone:
            log.evict([0])
        return gone

    with writer_to(tmp_path / "store") as buffer:
        buffer.add_trajectories([rollout(number) for number in range(3)])
        buffer.flush()
        monkeypatch.setattr(CommitLog, "unknown", unknown)
        annotate(tmp_path / "store", [0, 1], {"v": 1})
        annotate(buffer, [2], {"v": 2})
        rows = buffer.query().rows()
    assert {row["trajectory_id"]: row["v"] for row in rows} == {1: 1, 2: 2}


def full_once() -> Callable[..., Any]:
    """Return ``LocalDirectory.append`` on a disk that is full at the first call."""
    real, failures = LocalDirectory.append, iter([OSError(errno.ENOSPC, "full")])

    def append(*arguments: Any) -> Any:
        for error in failures:
            raise error
        return real(*arguments)

    return append


def test_values_that_wait_in_the_inbox_never_replace_later_ones(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the simulator: the log failed to take them in, and took in the later ones."""
    with writer_to(path) as writer:
        annotate(path, [0], {"v": 1})
        monkeypatch.setattr(LocalDirectory, "append", full_once())
        with pytest.raises(StoreWriteError, match="annotate"):
            annotate(writer, [0], {"v": 2})
        annotate(writer, [0], {"v": 3})
    assert [note.value for note in notes_of(path, 0)] == [1, 3]


def test_a_call_that_fails_sets_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with writer_to(path) as writer:
        monkeypatch.setattr(LocalDirectory, "append", full_once())
        with pytest.raises(StoreWriteError, match="annotate"):
            annotate(writer, [0], {"v": 1})
        writer.flush()
        annotate(writer, [0], {"v": "a text"})
    assert [note.value for note in notes_of(path, 0)] == ["a text"]
