"""What experiences were worth: counted, kept, and what follows from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.guidance.rollouts import rollout
from trajstore.cli import main
from trajstore.errors import StoreWriteError
from trajstore.experience import BufferStore, MemoryStore
from trajstore.guidance import (
    Guidance,
    Insertion,
    LocalMaker,
    RetirementRule,
    Worth,
    WorthLedger,
    count_worth,
    with_guidance,
)
from trajstore.inspection.inspect import inspect
from trajstore.trajectory import AgentTrajectory


def shown(task: str, outcome: float | None, *names: str) -> AgentTrajectory:
    guidance = Guidance("discard", names, (Insertion(0, "tip"),), taken_out=True) if names else None
    return with_guidance(rollout(task, "x", outcome), guidance)


STEP = [
    shown("cup", 1.0, "1", "2"),
    shown("cup", 0.0, "1"),
    shown("cup", 0.0),
    shown("cup", None, "1"),
    shown("book", 0.5, "2"),
]


def test_rollouts_with_and_without_are_those_of_the_same_task() -> None:
    assert count_worth(STEP) == {"1": Worth(2, 1.0, 1, 0.0), "2": Worth(2, 1.5, 2, 0.0)}
    assert Worth(2, 1.0, 1, 0.0).gain == 0.5
    assert Worth(2, 1.0).gain is None


def test_worth_is_kept_beside_experiences_and_gone_on_with(tmp_path: Path) -> None:
    store = BufferStore.open(tmp_path / "experience")
    LocalMaker(store).summarize([rollout("cup", "go kitchen")])
    ledger = WorthLedger(store)
    for _ in range(70):
        ledger.note(STEP)
    before = ledger.worth
    assert before["1"] == Worth(140, 70.0, 70, 0.0)
    assert len(store.ids()) < 70, "records of changes give way to one of everything"
    store.close()
    store = BufferStore.open(tmp_path / "experience")
    assert WorthLedger(store).worth == before
    assert len(LocalMaker(store)) == 1
    store.close()


def test_experiences_that_do_not_help_are_retired_by_rule_only() -> None:
    store = MemoryStore()
    useless = [shown("cup", 0.0, "1"), shown("cup", 1.0)]
    ledger = WorthLedger(store, RetirementRule(below=0.0, least_count=3))
    for step in range(1, 4):
        assert ledger.retired == ()
        ledger.note([*useless, shown("book", 1.0, "2"), shown("book", 0.0)])
        assert ledger.worth["1"].shown == step
    assert ledger.retired == ("1",)
    assert ledger.metrics()["guidance/worth/experiences_retired"] == 1.0
    assert WorthLedger(store).retired == ("1",)
    without_rule = WorthLedger()
    for _ in range(50):
        without_rule.note(useless)
    assert without_rule.retired == ()


def test_a_full_disk_stops_nothing_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    class Full(MemoryStore):
        def add_trajectories(self, trajectories: list[AgentTrajectory], /) -> list[int]:
            raise StoreWriteError("disk is full")

    ledger = WorthLedger(Full())
    for _ in range(3):
        ledger.note(STEP)
    assert ledger.worth["1"].shown == 6
    assert ledger.metrics()["guidance/worth/not_recorded"] == 3.0
    assert caplog.text.count("is not recorded: disk is full") == 1


def test_inspect_shows_what_experiences_were_worth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = BufferStore.open(tmp_path / "experience")
    LocalMaker(store).summarize([rollout("cup", "go kitchen")])
    ledger = WorthLedger(store, RetirementRule(below=1.0, least_count=1))
    ledger.note(STEP)
    store.close()
    report = inspect(tmp_path / "experience")["experiences"]
    assert report["count"] == 1
    assert report["retired"] == ["1", "2"]
    assert report["shown"]["1"] == {
        "rollouts_with": 2,
        "outcome_with": 0.5,
        "rollouts_without": 1,
        "outcome_without": 0.0,
        "gain": 0.5,
    }
    assert main(["inspect", str(tmp_path / "experience")]) == 0
    said = capsys.readouterr().out
    assert "gain +0.5: outcome 0.5 in 2 rollouts with it, 0 in 1 without, retired" in said
