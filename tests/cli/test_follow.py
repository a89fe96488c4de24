"""``trajstore list --follow`` shows each trajectory once, in the order of the commits, with those of new ranks."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests import programs
from tests.stores import filled, opened, stored
from tests.support.witness import witness
from tools.crash.forked import forking
from trajstore import AgentTrajectory, TrajectoryReplayBuffer
from trajstore.cli import INTERRUPTED, UNREAD, main

pytest.importorskip("polars", reason="needs polars, of the extra 'query'")


def follow(path: Path, words: list[str], pipe: Connection) -> None:
    sys.stdout = os.fdopen(pipe.fileno(), "w")
    main(["list", str(path), "--json", "--follow", *words])


def test_a_run_whose_ranks_come_one_after_another(tmp_path: Path) -> None:
    def add(store: TrajectoryReplayBuffer, cost: float | None) -> None:
        store.add_trajectories([AgentTrajectory(task_id="t", metadata={"cost": cost})])
        store.flush()

    columns = ["--columns", "trajectory_id,metadata.cost", "--where", "metadata.cost is null or metadata.cost < 3"]
    heard, sender = multiprocessing.Pipe(duplex=False)
    with opened(tmp_path / "rank_0") as first:
        for cost in (0.0, 9.0, 1.0, 2.0):
            add(first, cost)
        follower = forking().Process(target=follow, args=(tmp_path, ["--limit", "2", *columns], sender))
        follower.start()
        sender.close()
        with os.fdopen(os.dup(heard.fileno())) as lines, opened(tmp_path / "rank_1") as second:
            shown = [json.loads(lines.readline()) for _ in range(2)]
            for store, cost in ((second, None), (second, 9.0), (first, 0.5), (second, 1.5)):
                add(store, cost)
            shown += [json.loads(lines.readline()) for _ in range(3)]
            follower.kill()
            follower.join()
    expected = {"0/2": 1.0, "0/3": 2.0, "1/0": None, "0/4": 0.5, "1/2": 1.5}
    assert [(row["trajectory_id"], row["metadata.cost"]) for row in shown] == list(expected.items())


def test_a_follower_ends_when_its_reader_does(tmp_path: Path) -> None:
    path = stored(tmp_path / "store", [witness(0), witness(1)])
    with programs.begun(programs.COMMAND, "list", "--follow", "--limit", 1, path) as (follower, out, _):
        assert "trajectory_id 1" in out.readline()
        out.close()
    assert follower.exitcode == UNREAD


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
