"""Power fails while sessions are recorded: every acknowledged call is there once, and each finished session whole."""

from __future__ import annotations

import shutil
from collections import defaultdict
from pathlib import Path

import pytest

from tests.stores import opened
from tools.powerloss.filesystem import Op, Promise
from tools.powerloss.recorder import Recorder
from tools.powerloss.sessions import write_tree
from tools.powerloss.states import build, digest, plan
from trajstore import Reward, Session, Sessions, verify


def recorded(folder: Path) -> list[Op]:
    """Record sessions of two processes, of which one is taken over; return all that was done to the disk."""
    ops: list[Op] = []
    folder.mkdir()
    recorder = Recorder(folder, ops)

    def call(session: Session, number: int) -> None:
        before = session.calls()[-1].tokens.tolist() if session.calls() else []
        session.add_call([*before, number + 1], [number + 500], [-0.5], call_id=str(number))
        recorder.note("call", session=session.rollout_id, call=str(number))

    def finish(session: Session) -> None:
        recorder.note("finishing", session=session.rollout_id)
        session.finish(Reward(outcome=1.0))
        recorder.note("finished", session=session.rollout_id)

    with recorder.recording():
        with opened(folder / "store") as buffer:
            own = buffer.session("task", "own")
            with Sessions(folder / "store") as other:
                sessions = [other.session("task", name) for name in ("left", "elsewhere")]
                for number in range(3):
                    for session in (own, *sessions):
                        call(session, number)
                finish(sessions[1])
            finish(own)
            buffer.flush()
        with opened(folder / "store") as buffer:
            left = buffer.session("task", "left")
            call(left, 3)
            finish(left)
            last = buffer.session("task", "last")
            call(last, 0)
    return ops


def look(folder: Path, promises: list[Promise]) -> int:
    """Compare a store after the crash with what was promised; return the number of calls that were compared."""
    acknowledged: dict[str, list[str]] = defaultdict(list)
    ended: dict[str, str] = {}
    for promise in promises:
        if promise.event == "call":
            acknowledged[promise.values["session"]].append(promise.values["call"])
        else:
            ended[promise.values["session"]] = promise.event
    if not (folder / "store" / "metadata.json").exists():
        assert not acknowledged
        return 0
    there: dict[str, list[str]] = {}
    for _ in range(2):  # the second writer finds the same
        with opened(folder / "store") as buffer:
            buffer.flush()
            rows = [buffer.get(number) for number in buffer.trajectory_ids.tolist()]
            assert len({row.rollout_id for row in rows}) == len(rows)
            there = {row.rollout_id: [call["id"] for call in row.metadata["session"]["calls"]] for row in rows}
            for info in buffer._sink.sessions.listed():
                assert info.rollout_id not in there
                there[info.rollout_id] = [call.id for call in buffer.session("task", info.rollout_id).calls()]
            assert all(name in {row.rollout_id for row in rows} for name, event in ended.items() if event == "finished")
            assert all(row.rollout_id in ended for row in rows)
    for name, calls in acknowledged.items():
        assert there[name][: len(calls)] == calls
        assert len(there[name]) <= len(calls) + 1  # one that was written and not acknowledged
    assert not verify(folder / "store").problems
    return sum(map(len, acknowledged.values()))


@pytest.mark.parametrize("states", [25, pytest.param(1000, marks=[pytest.mark.campaign, pytest.mark.timeout(1800)])])
def test_no_acknowledged_call_is_lost_when_the_power_fails(tmp_path: Path, states: int) -> None:
    ops = recorded(tmp_path / "record")
    seen: set[bytes] = set()
    compared = 0
    for case in plan(ops, states, seed=3):
        files = build(ops, case)
        if len(seen) < states and digest(files) not in seen:
            seen.add(digest(files))
            write_tree(tmp_path / "state", files)
            promises = [op for op in ops[: case.moment] if isinstance(op, Promise)]
            compared += look(tmp_path / "state", promises)
            shutil.rmtree(tmp_path / "state")
    assert compared > states
