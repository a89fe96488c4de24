"""Sessions of several processes: continued after a crash, taken in by the writer once, and never by two at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from tests.stores import opened, stored
from tests.support.sessions import session_rows
from trajstore import Retention, Reward, Sessions, errors
from trajstore._core.buffer.sink import StoreSink
from trajstore._core.sessions import folder, journal
from trajstore._core.sessions.records import scan


def in_child(work: Callable[[], object], *, killed: bool = False) -> None:
    """Do some work in a forked child, which then ends; ``killed``: by SIGKILL, without closing anything."""
    child = os.fork()
    if not child:
        try:
            work()
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert status == (signal.SIGKILL if killed else 0)


def journals(path: Path) -> list[Path]:
    """Return the journals of a store."""
    return sorted(path.glob("calls/*.calls"))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return an empty store."""
    opened(tmp_path).close()
    return tmp_path


def begin(store: Path, name: str = "a", *, state: str = "open") -> None:
    """Record two calls in a session, and bring it to a state."""
    session = Sessions(store).session("task", name, query="q")
    session.add_call([1, 2], [3], [-0.5], call_id="first")
    session.add_call([1, 2, 3, 4], [5], [-0.25], call_id="second", policy_version=7)
    if state == "frozen":
        session.freeze()
    elif state == "finished":
        session.finish(Reward(outcome=1.0), is_terminated=True)


@pytest.mark.parametrize("state", ["open", "frozen"])
@pytest.mark.parametrize("torn", [b"", b"\xcc\xa1\xff", b"\xcc\xa1\x05\x00\x00\x00abcdefgh"])
def test_a_session_goes_on_after_a_kill(store: Path, state: str, torn: bytes) -> None:
    in_child(lambda: begin(store, state=state), killed=True)
    (old,) = journals(store)
    data = old.read_bytes()
    end = scan(data)[1]
    assert len(data) > end + len(torn)
    assert not any(data[end:])  # zeros, into which the next calls are written
    old.write_bytes(data[:end] + torn + data[end + len(torn) :])
    with opened(store) as buffer:
        assert len(buffer) == 0
        session = buffer.session("task", "a")
        assert [call.id for call in session.calls()] == ["first", "second"]
        assert session.state == state
        assert session.fields["query"] == "q"
        assert not old.exists()
        again = session.add_call([1, 2], [3], [-0.5], call_id="first")
        assert again is session.calls()[0]  # it was durable, heard or not
        if state == "open":
            session.add_call([1, 2, 3, 4, 5, 6], [7], [-0.125], call_id="third")
        else:
            with pytest.raises(errors.SessionFinishedError, match="was frozen"):
                session.add_call([1, 2, 3, 4, 5, 6], [7])
        (row,) = map(buffer.get, session.finish())
        assert row.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7][: 7 if state == "open" else 5]
    assert not journals(store)


def test_one_of_several_sessions_is_moved(store: Path) -> None:
    def both() -> None:
        sessions = Sessions(store)
        for name in "ab":
            sessions.session("task", name).add_call([1], [2], call_id=name)

    in_child(both, killed=True)
    with Sessions(store) as one, Sessions(store) as other:
        assert [call.id for call in one.session("task", "a").calls()] == ["a"]
        with pytest.raises(errors.StoreLockedError, match=f"session task/a is open in process {os.getpid()} on"):
            other.session("task", "a")
        assert [call.id for call in other.session("task", "b").calls()] == ["b"]
        assert {session.rollout_id for session in one.listed()} == {"a", "b"}
        assert len(journals(store)) == 2
        assert [call.id for call in one.read("task", "b")] == ["b"]
    with Sessions(store) as third:
        assert [session.owner for session in third.listed()] == [None, None]
        third.session("task", "a").discard()
        third.session("task", "b").finish()
        assert [(session.rollout_id, session.state) for session in third.listed()] == [("b", "finished")]
        with pytest.raises(errors.TrajectoryUnavailableError, match="no session task/a"):
            third.read("task", "a")
    with opened(store) as buffer:
        assert [buffer.get(number).rollout_id for number in buffer.trajectory_ids.tolist()] == ["b"]
    assert not journals(store)


def test_a_crash_between_copy_and_move_leaves_one_session(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    in_child(lambda: begin(store), killed=True)
    (old,) = journals(store)
    before = old.read_bytes()
    in_child(lambda: Sessions(store).session("task", "a").add_call([1, 2, 3, 4, 5], [6], call_id="third"), killed=True)
    old.write_bytes(before)  # as if the copied session had not been marked as moved
    (new,) = set(journals(store)) - {old}
    whole = new.read_bytes()
    with Sessions(store) as sessions:
        assert [session.calls for session in sessions.listed()] == [3]
    at = whole.index(b'"second"')
    copied = whole[: whole.index(b'"third"')]  # the head of the call after the copy is cut, too
    new.write_bytes(whole[:at] + bytes(8) + whole[at + 8 :])
    with Sessions(store) as sessions, pytest.raises(errors.CorruptStoreError, match="damaged or missing"):
        sessions.read("task", "a")  # the call after it was acknowledged, so this is damage
    assert "is damaged and left out" in caplog.text
    caplog.clear()
    for torn in (copied[:at], copied[:at] + bytes(8) + copied[at + 8 :]):
        new.write_bytes(torn)  # and as if the copy, which is one write, had not reached the disk whole
        with Sessions(store) as sessions:
            assert [session.calls for session in sessions.listed()] == [2]
    assert not caplog.records
    with Sessions(store) as sessions:
        assert len(sessions.session("task", "a").calls()) == 2


@pytest.mark.parametrize("length", [1, 3, 200])
def test_a_reader_forgets_records_whose_write_failed(
    store: Path, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    with Sessions(store) as sessions, Sessions(store) as reader, ThreadPoolExecutor() as elsewhere:
        session = sessions.session("task", "a")
        session.add_call([1], [2])

        def fail(_: int) -> None:
            assert [info.calls for info in elsewhere.submit(reader.listed).result()] == [2]  # it is in the file
            raise OSError(errno.EIO, "input/output error")

        with mock.patch.object(os, "fdatasync", fail), pytest.raises(errors.StoreWriteError):
            session.add_call([1, 2, 3], [4], call_id="failed")
        session.add_call([1, 2, 5, *[6] * length], [7], call_id="next")
        session.add_call([1, 2, 5, *[6] * length, 7, 8], [9], call_id="last")
        assert [info.calls for info in reader.listed()] == [3]
        assert [call.id for call in reader.read("task", "a")] == ["0", "next", "last"]
        assert not caplog.records


@pytest.mark.parametrize("alive", [True, False])
def test_the_writer_takes_in_finished_sessions_once(store: Path, alive: bool) -> None:
    def finished() -> None:
        begin(store, state="finished")
        begin(store, "b")

    if alive:
        sessions = Sessions(store)
        session = sessions.session("task", "a", query="q")
        session.add_call([1, 2], [3], [-0.5])
        with opened(store) as buffer:
            assert session.finish(Reward(outcome=1.0)) == []
            buffer.flush()
            assert len(buffer) == 1
            buffer.flush()
            assert not sessions.listed()
            assert len(journals(store)) == 2
        sessions.close()
    else:
        in_child(finished, killed=True)
    for _ in range(2):
        with opened(store) as buffer:
            (number,) = buffer.trajectory_ids.tolist()
            assert buffer.get(number).reward.outcome == 1.0
    assert [session.rollout_id for session in Sessions(store).listed()] == ([] if alive else ["b"])


@pytest.mark.parametrize("limit", [None, 1])
def test_rows_that_the_store_has_are_not_added_again(store: Path, limit: int | None) -> None:
    in_child(lambda: begin(store, state="finished"), killed=True)
    (old,) = journals(store)
    content = old.read_bytes()
    stored(store, session_rows([(None, [1], [2])], 1.0, rollout_id="newer"))
    assert not old.exists()
    old.write_bytes(content)  # a crash between the commit of the rows and the record of it
    for _ in range(2):
        with opened(store, retention=Retention(max_trajectories=limit)) as buffer:
            buffer.flush()
            names = [buffer.get(number).rollout_id for number in buffer.trajectory_ids.tolist()]
            assert names == ["a", "newer"][-(limit or 2) :]
    assert not journals(store)


def test_rows_that_could_not_be_added_are_added_later(store: Path) -> None:
    with opened(store) as buffer:
        with mock.patch.object(StoreSink, "add_flattened", side_effect=errors.StoreWriteError("disk full")):
            in_child(lambda: begin(store, state="finished"), killed=True)
            for _ in range(2):
                buffer.flush()
        buffer.flush()
        assert len(buffer) == 1


def test_damage_of_one_session_leaves_its_neighbours(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    def several() -> None:
        sessions = Sessions(store)
        for name in "abc":
            session = sessions.session("task", name)
            session.add_call([1, 2], [3], call_id=f"call of {name}")
            session.add_call([1, 2, 3, 4], [5])
            if name != "c":
                session.finish()

    in_child(several, killed=True)
    (old,) = journals(store)
    old.write_bytes(old.read_bytes().replace(b"call of b", b"damaged b"))
    with opened(store) as buffer:
        assert [buffer.get(number).rollout_id for number in buffer.trajectory_ids.tolist()] == ["a"]
        assert len(buffer.session("task", "c").calls()) == 2
    assert "is damaged and left out" in caplog.text
    assert "session task/b" in caplog.text
    assert old.exists()  # the calls of b stay


def test_a_forked_child_makes_its_own(store: Path) -> None:
    sessions = Sessions(store)
    session = sessions.session("task", "a")

    def in_fork() -> None:
        for late in (lambda: session.add_call([1], [2]), lambda: sessions.session("task", "b")):
            with pytest.raises(errors.StoreClosedError, match="parent process"):
                late()
        with pytest.raises(errors.StoreLockedError, match="is open in process"):
            Sessions(store).session("task", "a")
        Sessions(store).session("task", "b").add_call([1], [2])

    in_child(in_fork)
    session.add_call([1], [2])
    assert [(one.rollout_id, one.owner is None) for one in sessions.listed()] == [("a", False), ("b", True)]
    sessions.close()


@pytest.mark.parametrize("name", ["_FULL_BYTES", "_WORTH_BYTES"])
def test_a_journal_of_a_live_process_goes_when_its_sessions_are_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(journal, "_WORTH_BYTES", 1)
    monkeypatch.setattr(journal, name, 1)
    with opened(tmp_path) as buffer:
        first = buffer.session("task", "first")
        call = first.add_call([1], [2], call_id="a")
        second = buffer.session("task", "second")
        assert len(journals(tmp_path)) == (2 if name == "_FULL_BYTES" else 1)
        ids = first.finish()
        second.discard()
        buffer.flush()
        buffer.session("task", "third").add_call([1], [2])
        assert len(journals(tmp_path)) <= 2  # of the third one, and of what is over
        assert first.finish() == ids
        assert first.add_call([1], [2], call_id="a") is call
        with pytest.raises(errors.SessionFinishedError, match="was finished"):
            first.add_call([1], [3])
        with pytest.raises(errors.SessionFinishedError, match="was discarded"):
            second.finish()
    assert len(journals(tmp_path)) == 1


def test_a_process_that_was_stopped_in_a_moment_of_the_lock_holds_up_nobody_for_ever(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(store, "before")
    monkeypatch.setattr(folder, "_PATIENCE", 0.01)
    with opened(store) as buffer, (store / "calls" / "lock").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(errors.StoreLockedError, match=r"calls/lock: held for 0\.01 s by another process"):
            buffer.session("task", "a", query="q")
        fcntl.flock(held, fcntl.LOCK_UN)
        buffer.session("task", "a", query="q")
