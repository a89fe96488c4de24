"""Sessions of one process: what a call is refused for, repeated calls, failed writes, threads, and the rows."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.stores import opened
from tests.support.faults import FaultPlan, failing_disk
from trajstore import Reward, Sessions, TrajectoryReplayBuffer, errors
from trajstore._core.sessions import journal
from trajstore._core.sessions.records import scan

MESSAGES = [{"role": "user", "content": "Sort 3 1 2."}, {"role": "assistant", "content": "1 2 3"}]


def records(path: Path) -> list[dict[str, Any]]:
    """Return the records of all journals of a store."""
    return [record.fields for file in sorted(path.glob("calls/*.calls")) for record in scan(file.read_bytes())[0]]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt_ids": []}, "prompt_ids: empty"),
    ({"prompt_ids": [[1]]}, "prompt_ids: .* must be a list of numbers"),
    ({"prompt_ids": ["a"]}, "prompt_ids: .* whole numbers"),
    ({"prompt_ids": [1.5]}, "prompt_ids: .* whole numbers"),
    ({"prompt_ids": [1, -2]}, r"prompt_ids\[1\]: -2, must be in \[0, 2147483647\]"),
    ({"sampled_ids": [1 << 31, 1]}, r"sampled_ids\[0\]: 2147483648"),
    ({"sampled_ids": [True]}, "sampled_ids: .* whole numbers"),
    ({"log_probs": [-0.1]}, "log_probs: has 1 entry, must have one for each of 2"),
    ({"log_probs": [-0.1, 0.1]}, r"log_probs\[1\]: 0.1, must be a finite number of at most 0"),
    ({"log_probs": [-0.1, float("nan")]}, r"log_probs\[1\]: nan"),
    ({"log_probs": [-1e300, -0.1]}, r"log_probs\[0\]: -1e\+300"),
    ({"log_probs": ["a", "b"]}, "log_probs: .* must be a list of numbers"),
    ({"parent": "absent"}, "parent 'absent': the session has no such call"),
    ({"parent": "gap"}, "parent 'gap': the session has no such call with tokens"),
    ({"parent": "first", "prompt_ids": [1, 2, 3, 9]}, "do not begin with the 4 tokens of the parent 'first'"),
    ({"parent": "first", "prompt_ids": [1, 2]}, "do not begin with the 4 tokens of the parent 'first'"),
    ({"messages": "hi"}, "messages: 'hi', must be a list of dicts"),
    ({"messages": iter([{"role": "user"}])}, "messages: .* must be a list of dicts"),
    ({"messages": [{"role": float("nan")}]}, r"messages\[0\].role: nan has no equal in JSON"),
    ({"metadata": {"a": object()}}, "metadata.a: a object has no equal in JSON"),
    ({"policy_version": 1.5}, "policy_version"),
    ({"metadata": {"long": "x" * 2000}}, r"has 2,\d\d\d bytes of tokens, messages and metadata, at most 2,000"),
    ({"call_id": "\ud800"}, r"call \\ud800: .*half of a surrogate pair"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_calls_are_refused_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr("trajstore._core.sessions.records.LONGEST", 2000)
    with opened(tmp_path) as buffer:
        session = buffer.session("task", "bad")
        session.add_call([1, 2], [3, 4], call_id="first")
        session.incomplete("gap", "the engine restarted")
        before = records(tmp_path)
        with pytest.raises(errors.InvalidCallError, match=message) as error:
            session.add_call(**{"prompt_ids": [1, 2, 3, 4], "sampled_ids": [5, 6], "call_id": "second"} | change)
        assert "session task/bad" in str(error.value)
        assert records(tmp_path) == before
        assert len(session.calls()) == 2
        assert session.add_call([1, 2, 3, 4], [5]).parent is session.calls()[0]


FIRST: dict[str, Any] = {
    "prompt_ids": [1, 2],
    "sampled_ids": [3],
    "log_probs": [-0.5],
    "call_id": "a",
    "messages": MESSAGES,
    "policy_version": 4,
    "finish_reason": "stop",
    "metadata": {"server": 3},
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_ids", [1, 3]),
        ("prompt_ids", [1, 2, 3]),
        ("sampled_ids", [4]),
        ("log_probs", [-0.25]),
        ("log_probs", None),
        ("messages", MESSAGES[:1]),
        ("policy_version", None),
        ("finish_reason", "length"),
        ("metadata", {}),
    ],
)
def test_a_repeated_call_does_nothing_and_another_one_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    with opened(tmp_path) as buffer:
        session = buffer.session("task", "again")
        call = session.add_call(**FIRST)
        assert session.add_call(**FIRST) is call
        assert session.add_call(**FIRST, parent=None) is call
        with pytest.raises(errors.CallConflictError, match=f"was added before with other {name}"):
            session.add_call(**FIRST | {name: value})
        with pytest.raises(errors.CallConflictError, match="is not incomplete"):
            session.incomplete("a")
        assert session.calls() == [call]
        assert len(records(tmp_path)) == 3


def test_names_without_value_and_odd_ones(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        assert buffer.session(None, "a") is buffer.session("", "a")  # type: ignore[arg-type]
        with pytest.raises(errors.InvalidCallError, match=r"session t/\\ud800: field rollout_id: .*half"):
            buffer.session("t", "\ud800")
    (tmp_path / "file").touch()
    with pytest.raises(errors.StoreNotFoundError):
        Sessions(tmp_path / "file")


def test_a_journal_takes_so_many_sessions_and_goes_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_FULL_SESSIONS", 2)
    with opened(tmp_path) as buffer:
        sessions = [buffer.session("task", str(number)) for number in range(5)]
        for session in sessions:
            session.add_call([1], [2])
        assert len([*tmp_path.glob("calls/*.calls")]) == 3
        for session in sessions:
            session.finish()
        buffer.flush()
        assert len(buffer) == 5
        assert len([*tmp_path.glob("calls/*.calls")]) == 1  # that for new sessions


def test_messages_with_arrays_are_those_of_the_call_before(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        session = buffer.session("task", "arrays")
        said = [{"role": "user", "content": np.arange(3)}]
        session.add_call([1], [2], messages=said)
        call = session.add_call([1, 2], [3], messages=[*said, {"role": "assistant", "content": "x"}])
        assert call.messages == [{"role": "assistant", "content": "x"}]
        assert call.conversation[0] == {"role": "user", "content": [0, 1, 2]}


def test_a_gap_is_closed_by_the_call_itself(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        session = buffer.session("task", "begun")
        for name in ("a", "b"):
            session.incomplete(name, "begun")
        added = session.add_call(**FIRST)
        assert session.add_call(**FIRST) is added
        assert [call.gap for call in session.calls()] == ["begun", "begun", None]
        with pytest.raises(errors.CallConflictError, match="is not incomplete"):
            session.incomplete("a")
        (number,) = session.finish()
        about = buffer.get(number).metadata["session"]
        assert about["incomplete"] == [{"id": "b", "number": 1, "reason": "begun"}]
        assert [(call["id"], call["retried"]) for call in about["calls"]] == [("a", "begun")]


def test_a_finished_session_is_frozen(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        session = buffer.session("task", "done")
        session.add_call([1], [2])
        assert buffer.session("task", "done") is session
        ids = session.finish(Reward(outcome=1.0), metadata={"judge": "x"})
        assert session.finish(Reward(outcome=1.0), metadata={"judge": "x"}) == ids
        assert len(buffer) == 1
        for late in (lambda: session.add_call([1], [3]), lambda: session.incomplete("x"), session.finish):
            with pytest.raises(errors.SessionFinishedError, match="was finished"):
                late()
        assert buffer.session("task", "done") is not session  # a new one
        assert buffer.get(ids[0]).metadata["judge"] == "x"


@pytest.mark.parametrize(
    ("finish", "message"),
    [
        ({"reward": 1.0}, r"reward: 1\.0, must be a Reward or None"),
        ({"reward": FaultPlan(0, "EIO")}, "reward: .* must be a Reward or None"),
        ({"reward": Reward}, "reward: .* must be a Reward or None"),
        ({"reward": Reward(outcome=float("inf"))}, "outcome: inf"),
        ({"reward": Reward(outcome="good")}, "outcome"),  # type: ignore[arg-type]
        ({"metadata": {"session": 1}}, "the key 'session' is the session's own"),
        ({"metadata": {"long": "x" * 1000}}, r"has 1,\d\d\d bytes .* at most 1,000"),
    ],
)
@pytest.mark.parametrize("writes", [True, False])
def test_a_bad_end_is_refused_in_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finish: dict[str, Any], message: str, writes: bool
) -> None:
    monkeypatch.setattr("trajstore._core.sessions.records.LONGEST", 1000)
    with opened(tmp_path) as buffer, Sessions(tmp_path) as other:
        session = (buffer if writes else other).session("task", "bad")
        session.add_call([1], [2])
        with pytest.raises(errors.InvalidCallError, match=message) as error:
            session.finish(**finish)
        assert "session task/bad" in str(error.value)
        assert session.state == "open"
        session.add_call([1, 2], [3])
        session.finish(Reward(outcome=1.0))
        buffer.flush()
        assert len(buffer) == 1


def test_an_open_session_keeps_its_fields(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        session = buffer.session("task", "one", query="Sort 3 1 2.", metadata={"a": (1,)})
        assert buffer.session("task", "one", metadata={"a": [1]}) is session
        with pytest.raises(errors.InvalidCallError, match="is open with another query; omit"):
            buffer.session("task", "one", query="Sort.")
        with pytest.raises(errors.InvalidCallError, match="the key 'session'"):
            buffer.session("task", "two", metadata={"session": 1})
        unnamed = buffer.session("task")
        assert unnamed.rollout_id == unnamed.id != buffer.session("task").id


def test_the_rows_of_a_session(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        session = buffer.session("task", "rows", query="q", data_id="d", tokenizer_fingerprint="t", metadata={"m": 1})
        session.add_call([1, 2], [3], [-0.5], call_id="a", messages=MESSAGES, policy_version=3)
        more = [*MESSAGES, {"role": "tool", "content": "ok"}, {"role": "assistant", "content": "done"}]
        session.add_call([1, 2, 3, 4], [5], [-0.25], call_id="b", messages=more, policy_version=4, finish_reason="stop")
        session.add_call([1, 2, 3, 6], [7], call_id="c", metadata={"tool": "search"})
        session.incomplete("d", "timeout", metadata={"status": 504})
        ids = session.finish(Reward(success_rate=0.5), is_terminated=True)
        first, second = (buffer.get(number) for number in ids)
        table = buffer.query().table().select(["session", "session_path", "session_paths", "session_calls", "turns"])
    assert (first.task_id, first.rollout_id, first.query, first.data_id) == ("task", "rows", "q", "d")
    assert (first.tokenizer_fingerprint, first.is_terminated, first.policy_version) == ("t", True, 3)
    assert first.messages == more
    assert second.messages == MESSAGES
    assert second.policy_version is None
    assert first.rollout_log_probs.tolist() == [-0.5, 0.0, -0.25]
    assert second.rollout_log_probs is None
    assert first.metadata == {
        "m": 1,
        "session": {
            "id": session.id,
            "path": 0,
            "paths": 2,
            "calls": [
                {"id": "a", "number": 0, "start": 2, "stop": 3, "policy_version": 3, "messages": [0, len(MESSAGES)]},
                {
                    **{"id": "b", "number": 1, "start": 4, "stop": 5, "policy_version": 4, "finish_reason": "stop"},
                    "messages": [len(MESSAGES), len(more)],
                },
            ],
            "incomplete": [{"id": "d", "number": 3, "reason": "timeout", "metadata": {"status": 504}}],
        },
    }
    assert second.metadata["session"]["calls"][1] == {
        **{"id": "c", "number": 2, "start": 4, "stop": 5, "policy_version": None, "metadata": {"tool": "search"}}
    }
    assert table.rows() == [(session.id, 0, 2, 2, 2), (session.id, 1, 2, 2, 1)]


@pytest.mark.parametrize("kind", ["ENOSPC", "EIO", "torn"])
def test_a_call_that_cannot_be_written_is_not_added(tmp_path: Path, kind: Any) -> None:
    at, failed = 0, True
    while failed:
        path = tmp_path / str(at)
        with opened(path) as buffer:
            session = buffer.session("task", "full")
            first = session.add_call([1], [2])
            with failing_disk(FaultPlan(at, kind)) as plan:
                try:
                    session.add_call([1, 2, 3], [4], call_id="a")
                except errors.StoreWriteError:
                    added = [first]
                else:
                    added = session.calls()
            assert session.calls() == added
            failed = plan.fired is not None
            call = session.add_call([1, 2, 3], [4], call_id="a")
            assert call.parent is first
            assert session.calls() == [first, call]
            assert [fields["k"] for fields in records(path) if "k" in fields] == [0, 1]
        at += 1
    assert at > 2


def test_threads_share_a_session_and_its_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs: list[int] = []
    both = threading.Barrier(2, timeout=600)

    def sync(descriptor: int) -> None:
        syncs.append(descriptor)
        if len(syncs) == 1:  # the first call waits for the disk until all others are queued
            both.wait()

    with opened(tmp_path) as buffer:
        session, other = buffer.session("task", "one"), buffer.session("task", "two")
        monkeypatch.setattr(os, "fdatasync", sync)
        threads = [
            threading.Thread(target=one.add_call, args=([number], [number]), kwargs={"call_id": f"{number}"})
            for number in range(8)
            for one in (session, other)
        ]
        threads[0].start()
        (journal,) = buffer._sink.sessions._journals.values()
        while not syncs:
            pass
        for thread in threads[1:]:
            thread.start()
        while len(journal._queue) < len(threads):
            pass
        both.wait()
        for thread in threads:
            thread.join()
        assert len(syncs) == 2  # one for the first, one for all the others
        monkeypatch.undo()
        assert sorted(call.id for call in other.calls()) == sorted(map(str, range(8)))


def test_tasks_that_are_cancelled_and_writes_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as buffer:
        session = buffer.session("task", "one")
        going = threading.Event()

        async def cancelled() -> None:
            monkeypatch.setattr(os, "fdatasync", lambda _: going.wait(600))
            adding = asyncio.ensure_future(session.add_call_async([1], [2], call_id="a"))
            await asyncio.sleep(0)
            adding.cancel()
            with pytest.raises(asyncio.CancelledError):
                await adding

        asyncio.run(cancelled())
        going.set()  # the loop that asked is closed
        monkeypatch.undo()

        async def failing() -> None:
            call = await session.add_call_async([1], [2], call_id="a")
            with failing_disk(FaultPlan(0, "ENOSPC", lasting=True)):
                adding = [session.add_call_async([1, 2, 3], [number], call_id=f"{number}") for number in range(4)]
                failed = await asyncio.gather(*adding, return_exceptions=True)
            assert all(isinstance(error, errors.StoreWriteError) for error in failed)
            assert session.calls() == [call]
            with pytest.raises(errors.InvalidCallError, match="session task/one, call bad: sampled_ids"):
                await session.add_call_async([1], [-1], call_id="bad")
            await session.add_call_async([1, 2, 3], [4], call_id="b")

        asyncio.run(failing())
        assert [call.id for call in session.calls()] == ["a", "b"]
    with pytest.raises(errors.StoreClosedError):
        asyncio.run(session.add_call_async([1], [2]))
    assert [fields["k"] for fields in records(tmp_path) if "k" in fields] == [0, 1]


def test_a_task_without_a_thread_that_waits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with opened(tmp_path) as buffer:
        session = buffer.session("task", "one")
        monkeypatch.setattr(journal, "start_thread", refuse)
        with pytest.raises(RuntimeError, match="thread"):
            asyncio.run(session.add_call_async([1], [2], call_id="a"))
        monkeypatch.undo()
        asyncio.run(session.add_call_async([1], [2], call_id="a"))
        assert [call.id for call in session.calls()] == ["a"]


def test_a_task_goes_on_if_an_interrupt_ends_the_thread_that_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    going, resume = threading.Event(), journal._resume_tasks
    syncs: list[int] = []

    def sync(descriptor: int) -> None:
        syncs.append(descriptor)
        assert going.wait(600)  # the first write ends when the other calls are queued

    def interrupted(entries: Any) -> None:
        monkeypatch.setattr(journal, "_resume_tasks", resume)
        raise KeyboardInterrupt

    async def run(session: Any) -> None:
        adding = asyncio.ensure_future(session.add_call_async([1], [2], [-0.5], call_id="task"))
        await asyncio.sleep(0)  # queued
        (writes,) = buffer._sink.sessions._journals.values()
        while len(writes._queue) < 3:
            await asyncio.sleep(0)
        monkeypatch.setattr(journal, "_resume_tasks", once)
        going.set()
        await asyncio.wait_for(adding, 600)

    def once(entries: Any) -> None:  # of the first write
        monkeypatch.setattr(journal, "_resume_tasks", interrupted)
        resume(entries)

    with opened(tmp_path) as buffer:
        session = buffer.session("task", "one")
        monkeypatch.setattr(os, "fdatasync", sync)
        first = threading.Thread(target=session.add_call, args=([1], [2]), kwargs={"call_id": "first"})
        first.start()
        while not syncs:
            pass
        ended: list[BaseException] = []

        def add() -> None:
            try:
                session.add_call([1], [2], call_id="second")
            except KeyboardInterrupt as error:
                ended.append(error)

        second = threading.Thread(target=add)
        second.start()
        (writes,) = buffer._sink.sessions._journals.values()
        while len(writes._queue) < 2:
            pass
        asyncio.run(run(session))
        first.join()
        second.join()
        monkeypatch.undo()
        assert len(ended) == 1
        assert sorted(call.id for call in session.calls()) == ["first", "second", "task"]


def test_where_there_are_no_sessions(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer() as memory, pytest.raises(errors.StoreError, match="no store of its own"):
        memory.session("task")
    with pytest.raises(errors.StoreNotFoundError, match="no store"):
        Sessions(tmp_path)
    with pytest.raises(errors.ConfigurationError, match="local disk"):
        Sessions("memory://rollouts")
    with opened("memory://rollouts") as remote, pytest.raises(errors.ConfigurationError, match="local disk"):
        remote.session("task")


def test_after_close_and_in_a_forked_child(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        session = buffer.session("task", "left")
        session.add_call([1], [2])
        child = os.fork()
        if not child:
            try:
                session.add_call([1, 2], [3])
            except errors.StoreClosedError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        session.add_call([1, 2], [4])
    with pytest.raises(errors.StoreClosedError, match="were closed"):
        session.add_call([1, 2], [5])
    assert [fields["k"] for fields in records(tmp_path) if "k" in fields] == [0, 1]


def test_a_session_without_calls_has_no_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as buffer:
        session = buffer.session("task", "none")
        session.incomplete("a")
        assert session.finish() == []
        assert "no rollout" in caplog.text


def test_a_frozen_session_takes_gaps_and_a_discarded_one_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        session = buffer.session("task", "frozen")
        call = session.add_call([1], [2], call_id="a")
        for _ in range(2):
            session.freeze()
        assert session.add_call([1], [2], call_id="a") is call
        with pytest.raises(errors.SessionFinishedError, match="was frozen, so no call can be added"):
            session.add_call([1], [3])
        session.incomplete("late")
        assert buffer.session("task", "frozen") is session
        assert len(session.finish()) == 1
        session.freeze()
        with pytest.raises(errors.SessionFinishedError, match="was finished, so it cannot be discarded"):
            session.discard()
        session = buffer.session("task", "discarded")
        session.add_call([1], [2])
        for _ in range(2):
            session.discard()
        for late in (
            lambda: session.add_call([1], [3]),
            lambda: session.incomplete("x"),
            session.finish,
            session.freeze,
        ):
            with pytest.raises(errors.SessionFinishedError, match="was discarded"):
                late()
        assert not buffer.session("task", "discarded").calls()
        assert len(buffer) == 1


@pytest.mark.parametrize("end", ["freeze", "discard", "finish"])
def test_an_end_that_cannot_be_written_is_undone(tmp_path: Path, end: str) -> None:
    with opened(tmp_path) as buffer:
        session = buffer.session("task", "full")
        session.add_call([1], [2])
        with failing_disk(FaultPlan(0, "ENOSPC", lasting=True)), pytest.raises(errors.StoreWriteError):
            getattr(session, end)()
        assert session.state == "open"
        session.add_call([1, 2], [3])
        getattr(session, end)()
        assert len(buffer) == (end == "finish")


def test_a_session_that_cannot_be_opened_says_why_whatever_write_fails(tmp_path: Path) -> None:
    at, said = 0, list[str]()
    while len(said) == at:
        with opened(tmp_path / str(at)) as buffer:
            with failing_disk(FaultPlan(at, "ENOSPC")):
                try:
                    buffer.session("task", "full")
                except errors.StoreWriteError as error:
                    said.append(str(error))
            assert not buffer.session("task", "full").calls()
        at += 1
    assert len(said) > 1
    assert all("No space left on device" in text and "Errno 5" not in text for text in said)
    assert sum("calls/lock" in text for text in said) <= 1, "the file that failed is named"


def test_a_session_opens_although_a_write_of_another_thread_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the simulator: its record was not queued, and the thread waited for it forever."""
    queue, failing = journal.CallJournal.queue, iter([True])

    def queue_after_failure(self: journal.CallJournal, entry: journal.Entry, failures: int) -> bool:
        self.failures += next(failing, False)
        return queue(self, entry, failures)

    with opened(tmp_path / "store") as buffer:
        buffer.session("task", "first")
        monkeypatch.setattr(journal.CallJournal, "queue", queue_after_failure)
        buffer.session("task", "second").add_call([1], [2])
        assert [info.rollout_id for info in buffer._sink.sessions.listed()] == ["first", "second"]
        assert next(failing, None) is None
