"""Reports of ``inspect`` and ``verify`` on values in the inbox."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.stores import Run
from tests.stores import filled, nothing_can_be_deleted, writer_to
from tests.support.witness import witness
from trajstore import AgentTrajectory, TrajectoryReplayBuffer, annotate, notes_of
from trajstore._core.files.held import HeldFolder
from trajstore._core.files.local import LocalDirectory
from trajstore._core.store.catalog import Catalog
from trajstore._core.writing.inbox import Inbox, Pending
from trajstore._core.writing.unattended import held_log
from trajstore.cli import DAMAGED
from trajstore.operations.copying import copy_store


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
    assert run.json("inspect", store)["waiting"] == {"files": 2, "values": 7, "refused": [], "written": False}
    assert summary in run("inspect", store.parent)[1], "a run reports values that wait in its ranks"
    assert f"note: late values wait: {summary}" in run.out("verify", store)
    assert run("annotate", store, "0", "--set", "score=9")[0] == 0
    assert "inbox/" not in run("inspect", store)[1] + run("verify", store)[1]
    assert run.json("inspect", store)["waiting"] is None


def test_the_next_writer_deletes_unfinished_files_and_a_process_that_is_writing_one_writes_it_again(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (store / "inbox" / "1.json.tmp").write_bytes(b"{")
    rename, opened = HeldFolder.rename, []

    def rename_after_a_writer_opened(folder: HeldFolder, old: str, new: str) -> None:
        if old.startswith("inbox/") and not opened:
            opened.append(old)
            writer_to(store).close()
        rename(folder, old, new)

    monkeypatch.setattr(HeldFolder, "rename", rename_after_a_writer_opened)
    annotate(store, 0, {"score": 4})
    assert opened
    assert not list((store / "inbox").iterdir())
    assert notes_of(store, 0)[-1].value == 4


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
    assert out.count("its values reach no trajectory: add its values again with `trajstore annotate`") == 2
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
        patch.setattr(Inbox, "take_in", lambda _: None)
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
            catalog = Catalog.open(LocalDirectory(path))
            pending = Pending(catalog.directory, set_aside=True)
            _, files = pending.foreseen(catalog.store_id, catalog.notes, catalog.unknown)
            assert [file.given and file.given.values for file in files] == [{"score": ("high",)}], "the page shows them"
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


EVERY = ({"score": 1.0, "tag": "x"}, {"tag": "x"}, {"score": 3.0, "tag": "x"})
"""Values of the trajectories of :func:`store`, with those in its inbox."""


def values_at(path: Path | str) -> list[dict[str, Any]]:
    """Return the late values of a store's trajectories."""
    with TrajectoryReplayBuffer.open(path) as reader:
        rows = reader.query().table().to_dicts()
    return [{name: row[name] for name in ("score", "tag") if row.get(name) is not None} for row in rows]


@pytest.mark.parametrize("state", ["closed", "written", "killed"])
def test_every_copy_and_answer_includes_the_values_in_the_inbox_once(
    store: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setattr(Inbox, "look", lambda _: True)
    pytest.importorskip("polars", reason="needs polars, of the extra 'query'")
    with ExitStack() as stack:
        if state == "written":
            stack.enter_context(writer_to(store))
        if state == "killed":  # between recording the values and deleting their files
            with (
                nothing_can_be_deleted(monkeypatch),
                held_log(LocalDirectory(store)) as log,
                pytest.raises(OSError, match="no"),
            ):
                Inbox(log).take_in()
        assert len(list((store / "inbox").iterdir())) == 2
        copies = {
            "copy": ("copy", store, tmp_path / "copy"),
            "repair": ("repair", store, tmp_path / "repair"),
            "convert": ("convert", store, tmp_path / "convert", "--to", "pkl"),
        }
        for name, words in copies.items():
            run.out(*words)
            assert tuple(values_at(tmp_path / name)) == EVERY, name
            notes = [(note.name, note.value, note.in_force) for note in notes_of(tmp_path / name, 0)]
            assert notes == [("score", 0.5, False), ("score", 1.0, True), ("tag", "x", True)], name
        run.out("convert", store, tmp_path / "part", "--to", "pt", "--where", "score = 3")
        assert (*values_at(tmp_path / "part"),) == EVERY[2:]
        rows = run.json("list", store, "--columns", "tag")
        assert [row["tag"] for row in rows] == ["x"] * 3
        assert run.json("prune", store, "--where", "score >= 1")["trajectories"] == 2
    assert run.json("prune", store, "--where", "score >= 1", "--yes")["trajectories"] == 2


def test_exports_bundles_and_dry_runs_include_the_values_in_the_inbox(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("polars", reason="needs polars, of the extra 'query'")
    path = tmp_path / "store"
    with writer_to(path) as writer:
        writer.add_trajectories([AgentTrajectory(input_ids=torch.arange(4))])
        writer.points.save(1)
    monkeypatch.setattr(Inbox, "look", lambda _: True)
    annotate(path, 0, {"judge": 0.5}, who="anna")
    run.out("convert", path, tmp_path / "out.jsonl", "--to", "jsonl", "--where", "judge = 0.5")
    assert json.loads((tmp_path / "out.jsonl").read_text())["notes"] == {"judge": 0.5}
    run.out("view", path, "--bundle", tmp_path / "page")
    late = json.loads((tmp_path / "page" / "bundle.json").read_text())["late"]
    assert [(value["name"], value["who"]) for value in late["0"]["values"]] == [("judge", "anna")]
    plan = run.json("rollback", path, "--step", 1, "--dry-run")
    assert (plan["values"], run.json("rollback", path, "--step", 1)["aside"]) == (1, plan["aside"])


def test_a_copy_from_object_storage_includes_the_inbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"memory://{tmp_path.name}/store"
    filled(path, [0])
    monkeypatch.setattr(Inbox, "look", lambda _: True)
    annotate(path, 0, {"tag": "x"}, who="anna")
    assert copy_store(path, tmp_path / "copy").is_whole
    assert [(note.value, note.who) for note in notes_of(tmp_path / "copy", 0)] == [("x", "anna")]


def test_copies_refuse_or_name_what_the_inbox_has_and_they_lack(store: Path, tmp_path: Path, run: Run) -> None:
    _, second = sorted((store / "inbox").iterdir())
    second.write_bytes(second.read_bytes()[:-9])
    named = f"inbox/{second.name}: is damaged; its values reach no trajectory"
    assert named in run.err("copy", store, tmp_path / "copy", code=DAMAGED)
    assert named in run.out("repair", store, tmp_path / "repair")
    assert values_at(tmp_path / "repair")[1] == {"score": 2.0, "tag": "x"}
