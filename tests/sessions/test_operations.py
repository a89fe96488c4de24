"""What commands and retention do with open sessions."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sessions.test_processes import begin, in_child, journals
from tests.stores import opened
from trajstore import AgentTrajectory, Retention, Reward, Sessions, TrajectoryReplayBuffer, verify
from trajstore.cli import main


def test_list_shows_open_sessions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(tmp_path / "rank_0") as buffer:
        session = buffer.session("sort", "7")
        session.add_call([1, 2], [3])
        session.incomplete("late", "no answer yet")
        session.incomplete("lost", "no answer")
        session.add_call([1, 2, 3, 5], [4], call_id="late")
        assert main(["list", str(tmp_path / "rank_0"), "--open"]) == 0
        head, row = capsys.readouterr().out.splitlines()
        assert head.split()[:6] == ["task", "rollout", "state", "calls", "gaps", "tokens"]
        assert row.split()[:6] == ["sort", "7", "open", "2", "1", "5"]
    assert main(["list", str(tmp_path), "--open", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["rollout_id"], found["state"], found["owner"]) == ("7", "open", None)
    assert found["id"] == session.id
    assert main(["list", str(tmp_path), "--open", "--facts"]) == 2
    assert "--open takes no" in capsys.readouterr().err


def test_inspect_and_query_know_sessions_paths_and_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(tmp_path) as buffer:
        session = buffer.session("sort", "7")
        session.incomplete("b", "timeout")
        session.add_call([1, 2], [3], call_id="a", policy_version=3)
        session.add_call([1, 2, 3, 4], [5], call_id="b", finish_reason="length")
        session.add_call([1, 2, 3, 4], [6], call_id="c")
        session.incomplete("d", "no answer")
        session.finish()
        buffer.session("sort", "8")
        buffer.add_trajectories([AgentTrajectory(metadata={"session": {"id": "x", "path": 0, "paths": 1, "calls": 7}})])
        buffer.flush()
        columns = "call, number, start, stop, policy_version, finish_reason, retried"
        found = buffer.query().sql(f"select session_path, {columns} from calls order by session_path, number")
        assert found.rows() == [
            (0, "a", 1, 2, 3, 3, None, None),
            (0, "b", 2, 4, 5, None, "length", "timeout"),
            (1, "a", 1, 2, 3, 3, None, None),
            (1, "c", 3, 4, 5, None, None, None),
        ]
        assert main(["inspect", str(tmp_path), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["agents"]["sessions"], report["open_sessions"]) == (2, 1)
    assert main(["inspect", str(tmp_path), "--trajectory", "1"]) == 0
    text = capsys.readouterr().out
    assert f"session {session.id}, path 1 of 2" in text
    calls = text[text.index("path 1 of 2") : text.index("  incomplete: d, no answer")].splitlines()[2:]
    assert [line.split() for line in calls] == [["a", "1", "2", "3", "3", "no"], ["c", "3", "4", "5", "yes"]]
    assert main(["inspect", str(tmp_path), "--trajectory", "1", "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)["token_parts"]
    assert next(part["part"] for part in parts if part["first"] <= 2 <= part["last"]) == "model"  # of another row too


def test_verify_and_copy_name_open_and_damaged_sessions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    opened(store).close()
    in_child(lambda: begin(store), killed=True)
    found = verify(store)
    assert not found.problems
    assert "1 session is not in the store yet, with 2 calls" in str(found.notes)
    assert main(["copy", str(store), str(tmp_path / "copy")]) == 0
    assert "calls/: 1 session not in the store yet (task/a), not copied" in capsys.readouterr().out
    (journal,) = journals(store)
    journal.write_bytes(journal.read_bytes().replace(b'"first"', b'"worst"'))
    damaged, unreadable = verify(store).problems
    assert damaged.file == unreadable.file == f"calls/{journal.name}"
    assert "is damaged" in damaged.message
    assert "session task/a" in unreadable.message


@pytest.mark.parametrize("limit", [None, 3600.0, 0.0])
def test_abandoned_sessions_are_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture, limit: float | None) -> None:
    opened(tmp_path).close()
    in_child(lambda: begin(tmp_path), killed=True)
    with Sessions(tmp_path) as other:
        other.session("task", "alive").add_call([1], [2])
        caplog.set_level(logging.WARNING)
        with opened(tmp_path, retention=Retention(abandoned_after=limit)) as buffer:
            assert len(buffer) == 0
        left = {session.rollout_id for session in other.listed()}
    assert left == ({"alive"} if limit == 0 else {"a", "alive"})
    assert ("1 open session is dropped" in caplog.text and "task/a" in caplog.text) == (limit == 0)


LACKING: dict[str, Callable[[TrajectoryReplayBuffer, Path], object]] = {
    "the point of step 2 lacks": lambda buffer, _: buffer.points.save(2),
    "the pin mine lacks": lambda buffer, _: buffer.points.pin("mine"),
    "the checkpoint PATH lacks": lambda buffer, path: buffer.save_checkpoint(path),
    "all calls are kept, also those after the snapshot": lambda buffer, _: buffer.points.rollback(1),
    "the mirror PATH lacks": lambda buffer, _: buffer.mirror.wait(),
}


@pytest.mark.parametrize("said", LACKING)
def test_what_has_no_open_sessions_names_them(tmp_path: Path, caplog: pytest.LogCaptureFixture, said: str) -> None:
    copy = tmp_path / "copy"
    mirror = {"mirror": copy} if "mirror" in said else {}
    with opened(tmp_path / "store", **mirror) as buffer:
        buffer.points.save(1)
        buffer.session("task", "done").finish()
        assert not caplog.messages[1:]  # that session had no calls
        caplog.clear()
        session = buffer.session("task", "{a}")
        session.add_call([1], [2])
        LACKING[said](buffer, copy)
        assert [call.id for call in session.calls()] == ["0"]
        assert said.replace("PATH", f"{copy}") in caplog.text
        caplog.clear() if mirror else None
    assert "1 session not in the store yet (task/{a})" in caplog.text  # of a mirror again, at its end


@pytest.mark.parametrize("by", ["buffer", "command"])
def test_a_rollback_takes_rollouts_away_and_leaves_open_sessions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, by: str
) -> None:
    with opened(tmp_path) as buffer, Sessions(tmp_path) as other:
        before, after = other.session("task", "before"), buffer.session("task", "after")
        for session in (before, after):
            session.add_call([1], [2], call_id="x")
        going_on = buffer.session("task", "open")
        going_on.add_call([1], [2], call_id="x")
        before.finish(Reward(outcome=1.0))
        buffer.points.save(1)  # takes in what other processes finished before
        going_on.add_call([1, 2], [3], call_id="y")
        after.finish(Reward(outcome=1.0))
        if by == "buffer":
            buffer.flush()
            (journal,) = (file for file in journals(tmp_path) if b"after" in file.read_bytes())
            unsettled = journal.read_bytes()
            unsettled = unsettled[: unsettled.rindex(b'{"over"') - 10]
            buffer.points.rollback(1)
            assert [call.id for call in going_on.calls()] == ["x", "y"]
    if by == "command":
        assert main(["rollback", str(tmp_path), "--step", "1"]) == 0
        assert "(task/open)" in caplog.text
    else:
        journal.write_bytes(unsettled)  # a crash before the sessions were recorded as over
    for _ in range(2):
        with opened(tmp_path) as buffer:
            assert [buffer.get(number).rollout_id for number in buffer.trajectory_ids.tolist()] == ["before"]
            assert [call.id for call in buffer.session("task", "open").calls()] == ["x", "y"]
            assert not buffer.session("task", "after").calls()  # a new one
            (aside,) = (point.name for point in buffer.points.snapshots if point.kind == "aside")
    with opened(tmp_path) as buffer:
        buffer.points.go_to(aside)
        names = [buffer.get(number).rollout_id for number in buffer.trajectory_ids.tolist()]
        assert names == ["before", "after"]
