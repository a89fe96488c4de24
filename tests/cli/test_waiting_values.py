"""Reports of ``inspect`` and ``verify`` on values in the inbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.stores import Run
from tests.stores import filled, nothing_can_be_deleted, writer_to
from trajstore import annotate
from trajstore.cli import DAMAGED
from trajstore.core.files.local import LocalDirectory
from trajstore.core.store.catalog import Catalog
from trajstore.core.writing.inbox import Inbox, InboxView
from trajstore.testing.witness import witness


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a store with seven values in two files that no writer has read."""
    path = tmp_path / "rank_0"
    with writer_to(path) as writer:
        writer.add_trajectories([witness(key) for key in range(3)])
        annotate(writer, 0, {"score": 0.5})
    with monkeypatch.context() as patch:
        patch.setattr(Inbox, "look", lambda _: True)
        annotate(path, [0, 1, 2], {"score": [1, 2, 3], "tag": "x"})
        annotate(path, 1, {"score": None})
    return path


def test_values_that_wait_are_counted_with_what_helps(store: Path, run: Run) -> None:
    summary = "7 values in 2 files of inbox/; the next writer takes them in, or the next `trajstore annotate`"
    assert summary in run.out("inspect", store)
    assert run.json("inspect", store)["waiting"] == {
        "files": 2,
        "values": 7,
        "refused": [],
        "written": False,
    }
    assert summary in run("inspect", store.parent)[1], "a run tells what waits in its parts"
    assert f"note: values that came late wait: {summary}" in run.out("verify", store)
    assert run("annotate", store, "0", "--set", "score=9")[0] == 0
    assert "inbox/" not in run("inspect", store)[1] + run("verify", store)[1]
    assert run.json("inspect", store)["waiting"] is None


def test_a_writer_that_has_the_store_open_is_named(store: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inbox, "look", lambda _: True)
    with writer_to(store):
        assert "7 values in 2 files of inbox/; the writer takes them in within seconds" in run("inspect", store)[1]


def test_a_file_that_was_recorded_and_only_not_deleted_does_not_wait(
    store: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nothing_can_be_deleted(monkeypatch):
        annotate(store, 0, {"score": 4})
    assert len(list((store / "inbox").iterdir())) == 3
    assert "of inbox/" not in run("inspect", store)[1] + run("verify", store)[1]


def test_files_that_no_writer_takes_in_are_problems_and_hide_no_other(store: Path, run: Run) -> None:
    first, second = sorted((store / "inbox").iterdir())
    whole = first.read_bytes()
    second.write_bytes(second.read_bytes()[:-9])
    (store / "inbox" / "2.json").write_bytes(whole.replace(b"store_id", b"store_ix"))
    out = run.out("verify", store, code=DAMAGED)
    for name in (second.name, "2.json"):
        assert f"inbox/{name}: " in out
    assert out.count("its values reach no trajectory: give its values anew with `trajstore annotate`") == 2
    assert "6 values in 1 file of inbox/" in out
    out = run.out("inspect", store, code=DAMAGED)
    assert f"inbox/{second.name}: is damaged" in out
    assert "6 values in 1 file of inbox/" in out


def test_refused_values_are_told_as_such_before_a_writer_refuses_them_and_after(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run" / "rank_0"
    filled(path, [0])
    with monkeypatch.context() as patch:
        patch.setattr(Inbox, "look", lambda _: True)
        annotate(path, 0, {"score": "high"}, who="anna")
        with writer_to(path) as writer:
            annotate(writer, 0, {"score": 1})
    message = (
        "the values score of trajectories 0, given by anna, are refused and reach no trajectory: score: a text, but"
    )
    for state in ("waits", "set aside, not deleted yet", "set aside"):
        if state == "set aside":
            writer_to(path).close()
        elif state != "waits":
            with nothing_can_be_deleted(monkeypatch):
                writer_to(path).close()
            assert len(list((path / "inbox").iterdir())) == 2
            values = InboxView(LocalDirectory(path)).look(Catalog.open(LocalDirectory(path)).store_id)
            assert [value.values for value in values] == [{"score": ("high",)}], "what the page is told"
        *_, file = sorted((path / "inbox").iterdir())
        code, out, _ = run("verify", path)
        assert (code, f"note: inbox/{file.name}: {message}" in out) == (0, True)
        code, out, _ = run("inspect", path)
        assert (code, "refused values" in out, message in out) == (0, True, True)
        assert "values that wait" not in out
        (refused,) = run.json("inspect", path.parent)["waiting"]["refused"]
        assert refused.startswith(f"rank_0/inbox/{file.name}: {message}")
    assert file.suffix == ".refused"
    file.write_bytes(file.read_bytes()[:-9])
    code, out, _ = run("verify", path)
    assert (code, f"inbox/{file.name}: is damaged" in out) == (1, True)
