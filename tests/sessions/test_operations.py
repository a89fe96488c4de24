"""What commands and retention do with open sessions."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from tests.sessions.test_processes import begin, in_child, journals
from tests.stores import opened
from trajstore import Retention, Sessions, verify
from trajstore.cli import main


def test_list_shows_open_sessions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(tmp_path / "rank_0") as buffer:
        session = buffer.session("sort", "7")
        session.add_call([1, 2], [3])
        session.add_call([1, 2, 3, 5], [4])
        assert main(["list", str(tmp_path / "rank_0"), "--open"]) == 0
        head, row = capsys.readouterr().out.splitlines()
        assert head.split()[:5] == ["task", "rollout", "state", "calls", "tokens"]
        assert row.split()[:5] == ["sort", "7", "open", "2", "5"]
    assert main(["list", str(tmp_path), "--open", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["rollout_id"], found["state"], found["owner"]) == ("7", "open", None)
    assert found["id"] == session.id
    assert main(["list", str(tmp_path), "--open", "--facts"]) == 2
    assert "--open takes no" in capsys.readouterr().err


def test_verify_and_copy_name_open_and_damaged_sessions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    opened(store).close()
    in_child(lambda: begin(store), killed=True)
    found = verify(store)
    assert not found.problems
    assert "1 session is not in the store yet, with 2 calls" in str(found.notes)
    assert main(["copy", str(store), str(tmp_path / "copy")]) == 0
    assert "calls/: 1 session not in the store yet, not copied" in capsys.readouterr().out
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
