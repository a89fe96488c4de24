"""Exit codes, and one-sentence errors instead of tracebacks."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import programs
from tests.cli.stores import Run
from trajstore import Trajectory, TrajectoryReplayBuffer
from trajstore.cli import INTERRUPTED, UNREAD
from trajstore.cli.output import Output, ProgressBar


def test_interruption_is_clean(run: Run, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trajstore.operations.verify.find_place", interrupt)
    assert run.err("verify", store, code=INTERRUPTED) == "trajstore: interrupted\n"


def test_a_reader_that_stops_reading_ends_the_command_in_silence(project_root: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "trajstore", "--version"],
            cwd=project_root,
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (UNREAD, "")


@pytest.mark.parametrize(
    ("descriptor", "message", "words"),
    [
        (0, "trajstore: annotate: --file -: standard input is closed; name a file\n", ["--file", "-"]),
        (1, "trajstore: standard output is closed\n", []),
        (2, "", []),
    ],
)
def test_a_closed_stream_is_reported(descriptor: int, message: str, words: list[str], tmp_path: Path) -> None:
    stream = ("stdin", "stdout", "stderr")[descriptor]
    closes = f"import os, sys\nos.close({descriptor})\nsys.{stream} = None\n"  # as Python finds it
    done = programs.run(tmp_path, closes + programs.COMMAND, "annotate", tmp_path / "absent", *words)
    assert (done.returncode, done.stderr) == (2, message)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_terminals_only() -> None:
    for stream in (io.StringIO(), Terminal()):
        with ProgressBar("reading", stream) as bar:
            bar(3, 3, "nearly there")
        shown = stream.getvalue()
        assert ("3/3" in shown and "nearly there" in shown) == stream.isatty()
        assert shown == "" or shown.endswith("\r\x1b[K"), "the line is wiped"
    with ProgressBar("training", stream := io.StringIO(), lines=3) as bar:
        for step in range(1, 8):
            bar(step, 7, f"success {step}")
    assert stream.getvalue() == "training 3/7  success 3\ntraining 5/7  success 5\ntraining 7/7  success 7\n"


def test_the_widest_texts_of_an_answer_are_cut_to_the_terminal() -> None:
    rows = [["id", "task", "content"], ["123456789", "t" * 14, "x" * 100], ["2", "猫", "short"]]
    for width, cells in ((60, ("t" * 14, f"{'x' * 30}…")), (20, (f"{'t' * 11}…", f"{'x' * 11}…")), (None, rows[1][1:])):
        stream = io.StringIO()
        Output(stream, width).table(rows, right=[0], fitted=True)
        lines = stream.getvalue().splitlines()
        assert tuple(lines[1].split()) == ("123456789", *cells)
        assert lines[3:] == ([] if width is None else [f"cut to {width} characters; --json shows all"])


# -- Without a UTF-8 locale, reports escape characters, and unencodable file names are refused by name --


PIN_AND_LOOK = """
import sys
from trajstore import TrajectoryReplayBuffer
from trajstore.cli import main
from trajstore.errors import ConfigurationError, CorruptStoreError

plain, pinned = sys.argv[1:]
with TrajectoryReplayBuffer(auto_save=True, auto_save_path=plain) as buffer:
    try:
        buffer.points.pin("n\\u00e4del")
    except ConfigurationError as error:
        assert "PYTHONUTF8=1" in str(error)
    else:
        raise SystemExit("pinned")
    assert buffer.points.pin("plain")
try:
    TrajectoryReplayBuffer.open(pinned)
except CorruptStoreError as error:
    assert "PYTHONUTF8=1" in str(error)
else:
    raise SystemExit("opened")
assert main(["inspect", plain]) == 0
assert main(["inspect", plain, "--json"]) == 0
"""


def test_a_locale_without_utf_8(tmp_path: Path) -> None:
    for name, pin in (("plain", "kept"), ("pinned", "nädel")):
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / name) as buffer:
            buffer.add_trajectories(
                [Trajectory(rewards=torch.zeros(3, 2, 1), curr_obs={"größe": torch.zeros(3, 2, 1)})]
            )
            buffer.points.pin(pin)
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PIN_AND_LOOK, tmp_path / "plain", tmp_path / "pinned"],
        env=environment,
        capture_output=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    report, text = done.stdout.decode("ascii").split("\n{", 1)
    assert "curr_obs.gr\\xf6\\xdfe" in report
    assert "curr_obs.größe" in {column["name"] for column in json.loads("{" + text)["columns"]}
