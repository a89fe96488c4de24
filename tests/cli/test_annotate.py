"""``trajstore annotate`` through the command line."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tests.stores import stored
from trajstore import TrajectoryReplayBuffer, notes_of
from trajstore.cli import main
from trajstore.testing.witness import witness

pytest.importorskip("polars", reason="needs polars, of the extra 'query'")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return stored(tmp_path / "store", [witness(key) for key in range(3)])


def test_values_of_the_command_line(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = ["--set", "score=0.5", "--set", "tag=a=b", "--set", "ok=true", "--set", "year=2026x", "--who", "anna"]
    assert main(["annotate", str(store), "0", "2", *told]) == 0
    assert main(["annotate", str(store), "0", "--set", "tag=null", "--who", "", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.partition("\n")[2])["trajectories"] == 1
    with TrajectoryReplayBuffer.open(store) as reader:
        rows = reader.query().select("score", "tag", "ok", "year").rows()
    assert [tuple(row.values()) for row in rows] == [
        (0.5, None, 1.0, "2026x"),
        (None, None, None, None),
        (0.5, "a=b", 1.0, "2026x"),
    ]
    assert {note.who for note in notes_of(store, 2)} == {"anna"}
    assert main(["list", str(store), "--where", "tag = 'a=b'", "--columns", "trajectory_id,score", "--csv"]) == 0
    assert capsys.readouterr().out.split() == ["trajectory_id,score", "2,0.5"]


def test_values_of_a_file(store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"trajectory_id": 0, "a": 1}, {"trajectory_id": "1", "a": 2}, {"trajectory_id": 0, "a": 3}]
    lines += [{"trajectory_id": 2, "b": "x"}]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(map(json.dumps, lines)) + "\n\n"))
    assert main(["annotate", str(store), "--file", "-"]) == 0
    assert [(note.name, note.value) for note in notes_of(store, 0)] == [("a", 1.0), ("a", 3.0)]
    assert [(note.name, note.value) for note in notes_of(store, 2)] == [("b", "x")]
    monkeypatch.setattr("sys.stdin", io.StringIO('{"trajectory_id": 0, "b": "y"}\n{"trajectory_id": 9, "a": 1}\n'))
    assert main(["annotate", str(store), "--file", "-"]) == 2
    told = capsys.readouterr()
    assert "only the first 1 trajectories" in told.out
    assert "id 9" in told.err
    monkeypatch.setattr("sys.stdin", io.StringIO('{"trajectory_id": 9, "a": 1}\n'))
    assert main(["annotate", str(store), "--file", "-"]) == 2
    assert "none of the trajectories of - have their values" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        *(["0"], ["--set", "a=1"], ["0", "--set", "a"], ["0", "--set", "a=[1]", "--file", "x"], ["--file", "absent"]),
        *(["0", "--set", f"a={value}"] for value in ("nan", "NaN", " -inf", "Infinity", "+INF", "1e400")),
        *(["0", "--set", f"a={value}"] for value in (".5", "5.", "+3", "007", "1_000")),
    ],
)
def test_wrong_words_change_nothing(store: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["annotate", str(store), *words]) == 2
    assert capsys.readouterr().err
    assert notes_of(store, 0) == []
    assert not (store / "inbox").exists()


def test_what_is_no_finite_number_is_a_text_where_it_is_quoted(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["annotate", str(store), "0", "--set", "a=nan"]) == 2
    said = (
        """--set a=nan: nan is no finite number; null says that there is none, and a text is quoted: --set 'a="nan"'"""
    )
    assert said in capsys.readouterr().err
    assert main(["annotate", str(store), "0", "--set", 'a="nan"', "--set", "b=nanny"]) == 0
    assert [(note.name, note.value) for note in notes_of(store, 0)] == [("a", "nan"), ("b", "nanny")]
