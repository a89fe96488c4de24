"""``trajstore annotate`` through the command line."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tests.cli.stores import Run
from tests.stores import stored
from tests.support.witness import witness
from trajstore import AgentTrajectory, Reward, TrajectoryReplayBuffer, notes_of

pytest.importorskip("polars", reason="needs polars, of the extra 'query'")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return stored(tmp_path / "store", [witness(key) for key in range(3)])


def test_values_of_the_command_line(store: Path, run: Run) -> None:
    options = ["--set", "score=0.5", "--set", "tag=a=b", "--set", "ok=true", "--set", "year=2026x", "--who", "anna"]
    run.out("annotate", store, "0", "2", *options)
    assert run.json("annotate", store, "0", "--set", "tag=null")["trajectories"] == 1
    with TrajectoryReplayBuffer.open(store) as reader:
        rows = reader.query().select("score", "tag", "ok", "year").rows()
    assert [tuple(row.values()) for row in rows] == [
        (0.5, None, 1.0, "2026x"),
        (None, None, None, None),
        (0.5, "a=b", 1.0, "2026x"),
    ]
    assert {note.who for note in notes_of(store, 2)} == {"anna"}
    (row,) = run.json("list", store, "--where", "tag = 'a=b'", "--columns", "trajectory_id,score")
    assert row == {"trajectory_id": 2, "score": 0.5}


def test_names_that_the_store_did_not_have_are_reported(tmp_path: Path, run: Run) -> None:
    rollout = AgentTrajectory(reward=Reward(outcome=1.0, metadata={"style": 0.5}))
    for rank in range(2):
        stored(tmp_path / f"rank_{rank}", [rollout])
    known = ["--set", "outcome=0", "--set", "reward_style=1"]
    assert run.json("annotate", tmp_path, "0/0", *known)["new_names"] == []
    assert "new here: ouctome, reward_stile; " in run.out(
        "annotate", tmp_path, "0/0", *known, "--set", "ouctome=1", "--set", "reward_stile=1"
    )
    for name in ("0/0", "1/0"):
        assert "new here" not in run.out("annotate", tmp_path, name, "--set", "ouctome=1"), "another rank has it"


def test_values_of_a_file(store: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    lines = [{"trajectory_id": 0, "a": 1}, {"trajectory_id": "1", "a": 2}, {"trajectory_id": 0, "a": 3}]
    lines += [{"trajectory_id": 2, "b": "x"}]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(map(json.dumps, lines)) + "\n\n"))
    run.out("annotate", store, "--file", "-")
    assert [(note.name, note.value) for note in notes_of(store, 0)] == [("a", 1.0), ("a", 3.0)]
    assert [(note.name, note.value) for note in notes_of(store, 2)] == [("b", "x")]
    monkeypatch.setattr("sys.stdin", io.StringIO('{"trajectory_id": 0, "b": "y"}\n{"trajectory_id": 9, "a": 1}\n'))
    code, out, err = run("annotate", store, "--file", "-")
    assert (code, "only the first 1 trajectory" in out, "id 9" in err) == (2, True, True)
    monkeypatch.setattr("sys.stdin", io.StringIO('{"trajectory_id": 9, "a": 1}\n'))
    assert "none of the trajectories of - have their values" in run.out("annotate", store, "--file", "-", code=2)


def test_what_is_no_finite_number_is_a_text_where_it_is_quoted(store: Path, run: Run) -> None:
    message = """--set a=nan: nan is not finite; null removes a value, and a text is quoted: --set 'a="nan"'"""
    assert message in run.err("annotate", store, "0", "--set", "a=nan")
    run.out("annotate", store, "0", "--set", 'a="nan"', "--set", "b=nanny")
    assert [(note.name, note.value) for note in notes_of(store, 0)] == [("a", "nan"), ("b", "nanny")]


def test_directories_of_rlinf_are_refused_as_such(tmp_path: Path, store: Path, run: Run) -> None:
    with TrajectoryReplayBuffer.open(store) as reader:
        reader.save_checkpoint(tmp_path / "rlinf", layout="rlinf")
    assert "is of the kind 'rlinf'" in run.err("annotate", tmp_path / "rlinf", 0, "--set", "a=1")
    assert "is of the kind 'rlinf'" in run.err("restore", tmp_path / "rlinf", tmp_path / "new")
