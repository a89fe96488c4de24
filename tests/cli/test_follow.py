"""``trajstore list --follow`` and ``--since`` show each trajectory once, across restarts, rollbacks and new ranks."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests import programs
from tests.cli.stores import Run
from tests.stores import filled, opened, stored
from tests.support.witness import witness
from tools.crash.forked import forking
from trajstore import AgentTrajectory
from trajstore.cli import FAILED, INTERRUPTED, UNREAD, main
from trajstore.cli.output import Output
from trajstore.operations.following import Follower

pytest.importorskip("polars", reason="needs polars, of the extra 'query'")

START = "e30"
"""The cursor before the first trajectory: an empty object."""


def after(run: Run, *words: Any) -> tuple[list[int | str], str | None]:
    """Return the shown ids and the last cursor."""
    rows = [json.loads(line) for line in run.out("list", *words, "--json").splitlines()]
    return [row["trajectory_id"] for row in rows], rows[-1]["cursor"] if rows else None


def test_each_is_shown_once_over_restarts_and_rollbacks(tmp_path: Path, run: Run, caplog: Any) -> None:
    path = tmp_path / "store"
    with opened(path) as store:
        store.add_trajectories([witness(key) for key in range(4)])
        store.flush()
        shown, cursor = after(run, path, "--since", START)
        assert shown == [0, 1, 2, 3]
        assert after(run, path, "--since", cursor) == ([], None)
        store.points.save(0)
        store.add_trajectories([witness(4)])
        store.flush()
        shown, cursor = after(run, path, "--since", cursor)
        assert shown == [4]
        store.points.rollback(0)
        store.add_trajectories([witness(5), witness(6), witness(7)])
        store.evict([6])
        store.evict([0])
    filled(path, [8])
    assert not caplog.text.count("have no trajectory")
    shown, cursor = after(run, path, "--since", cursor)
    assert shown == [5, 7, 8]
    assert "1 id before the newest has no trajectory" in caplog.text
    assert "rolled back since; trajectories up to id 4 that are live again are not shown" in caplog.text
    assert after(run, path, "--since", cursor, "--where", "trajectory_id = 0") == ([], None)
    assert f"--since {cursor}" in run.out("list", path, "--since", cursor)
    shutil.copytree(path, tmp_path / "older")
    filled(path, [10])
    shown, cursor = after(run, path, "--since", cursor)
    assert shown == [9]
    shutil.rmtree(path)
    (tmp_path / "older").rename(path)
    cursor = run.out("list", path, "--since", cursor).split()[-1]
    assert "an older copy of the store lies there" in caplog.text
    filled(path, [11])
    assert after(run, path, "--since", cursor)[0] == [9]
    shutil.rmtree(path)
    filled(path, [9])
    assert after(run, path, "--since", cursor)[0] == [0]
    assert "another store lies there" in caplog.text


def test_a_run_whose_ranks_come_one_after_another(tmp_path: Path, run: Run) -> None:
    with opened(tmp_path / "rank_0") as first:
        first.add_trajectories([witness(0)])
        first.flush()
        shown, cursor = after(run, tmp_path, "--since", START)
        with opened(tmp_path / "rank_1") as second:
            second.add_trajectories([witness(1), witness(2)])
            second.flush()
            first.add_trajectories([witness(3)])
            first.flush()
            more, cursor = after(run, tmp_path, "--since", cursor)
            second.add_trajectories([witness(4)])
    assert [*shown, *more, *after(run, tmp_path, "--since", cursor)[0]] == ["0/0", "1/0", "1/1", "0/1", "1/2"]


def follow(path: Path, cursor: list[str], pipe: Connection) -> None:
    sys.stdout = os.fdopen(pipe.fileno(), "w")
    main(["list", str(path), "--json", "--follow", *cursor])


def test_a_follower_that_is_killed_goes_on_where_its_last_line_was(tmp_path: Path) -> None:
    path, ids = tmp_path / "store", list[int]()
    cursor: list[str] = []
    with opened(path) as store:
        for turn in range(3):
            store.add_trajectories([witness(2 * turn), witness(2 * turn + 1)])
            store.flush()
            heard, sender = multiprocessing.Pipe(duplex=False)
            follower = forking().Process(target=follow, args=(path, cursor, sender))
            follower.start()
            sender.close()
            with os.fdopen(os.dup(heard.fileno())) as lines:
                for at in range(3):
                    if at == 2:  # while following
                        store.add_trajectories([witness(100 + turn)])
                        store.flush()
                    line = json.loads(lines.readline())
                    ids.append(line["trajectory_id"])
                    cursor = ["--since", line["cursor"]]
                follower.kill()
                follower.join()
        assert ids == store.trajectory_ids.tolist()


def test_the_cursor_stays_where_a_condition_is_refused(tmp_path: Path, run: Run) -> None:
    path = filled(tmp_path / "store", range(4))
    _, cursor = after(run, path, "--since", START)
    filled(path, range(4, 6))
    assert f"--since {cursor}" in run.out("list", path, "--since", cursor, "--where", "rewards > 0", code=FAILED)
    complaint = run.err("list", path, "--since", cursor, "--where", "rewards > 0")
    assert "rewards: in the table steps, not a fact of trajectories" in complaint
    assert "_at" not in complaint
    assert after(run, path, "--since", cursor)[0] == [4, 5]


def test_the_cursor_stays_before_what_an_interrupt_kept_from_being_shown(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = filled(tmp_path / "store", range(6))
    line = Output.line

    def interrupted(out: Output, text: str = "") -> None:
        if text.startswith("trajectory_id 3"):
            raise KeyboardInterrupt
        line(out, text)

    monkeypatch.setattr(Output, "line", interrupted)
    shown = run.out("list", path, "--since", START, code=INTERRUPTED)
    monkeypatch.undo()
    assert after(run, path, "--since", shown.split()[-1])[0] == [3, 4, 5]


def test_a_follower_ends_when_its_reader_does(tmp_path: Path) -> None:
    path = stored(tmp_path / "store", [witness(0), witness(1)])
    with programs.begun(programs.COMMAND, "list", "--follow", "--limit", 1, path) as (follower, out, _):
        assert "trajectory_id 1" in out.readline()
        out.close()
    assert follower.exitcode == UNREAD


def test_values_of_metadata_are_columns(tmp_path: Path, run: Run) -> None:
    costs = [0.5, None, 2]
    stored(tmp_path / "store", [AgentTrajectory(task_id="t", metadata={"cost": cost}) for cost in costs])
    words = ("list", tmp_path / "store", "--since", START, "--columns", "task,metadata.cost")
    shown = [json.loads(line) for line in run.out(*words, "--json").splitlines()]
    assert [(row["task"], row["metadata.cost"]) for row in shown] == [("t", cost) for cost in costs]
    assert run.out(*words, "--where", "metadata.cost = 2").splitlines()[0] == "task t  metadata.cost 2"


def test_a_key_that_no_batch_has_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path / "store") as store, closing(Follower(tmp_path / "store")) as follower:
        for number in range(3):
            store.add_trajectories([AgentTrajectory(task_id="t")])
            store.flush()
            follower.refresh()
            news = follower.news("metadata.error is null", ["metadata.error"])
            assert news.table.select("trajectory_id", "metadata.error").rows() == [(number, None)]
    assert caplog.messages == ["metadata.error: none of the 1 rollouts that were read has it"]


@pytest.mark.parametrize("apart", [0.0, 0.1])
def test_two_interrupts_end_it_without_a_traceback(tmp_path: Path, apart: float) -> None:
    path = filled(tmp_path / "store", range(2))
    with programs.begun(programs.COMMAND, "list", path, "--follow") as (follower, out, err):
        out.readline()
        assert follower.pid is not None
        os.kill(follower.pid, signal.SIGINT)
        time.sleep(apart)
        os.kill(follower.pid, signal.SIGINT)
        out.read()
        said = err.read()
    assert follower.exitcode == INTERRUPTED
    assert said in ("", "trajstore: interrupted\n"), "empty where the second one came long after the first"
