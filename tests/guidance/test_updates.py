"""Background summaries are bounded, never block a step, and report every failure."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from tests.guidance.rollouts import rollout
from trainer_hooks.guidance import Guidance, Insertion, LocalMaker, Retrieved, UpdateQueue, with_guidance
from trajstore.trajectory import AgentTrajectory


class SlowMaker:
    """Summarizes once released."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.free = threading.Event()
        self.batches: list[list[str]] = []

    def retrieve(self, query: str, k: int) -> Retrieved:
        raise NotImplementedError

    def summarize(self, rollouts: Sequence[AgentTrajectory]) -> int:
        self.begun.set()
        assert self.free.wait(600)
        self.batches.append([rollout.task_id for rollout in rollouts])
        if rollouts[0].task_id == "bad":
            raise ZeroDivisionError("a maker that fails")
        return len(rollouts)

    def close(self) -> None:
        raise NotImplementedError


def test_what_does_not_fit_is_dropped_counted_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    maker = SlowMaker()
    updates = UpdateQueue(maker, capacity=2)
    assert updates.submit([rollout("a", "x")])
    assert maker.begun.wait(600)
    taken = [updates.submit([rollout("b", "x"), rollout("b", "y")]) for _ in range(5)]
    assert taken == [True, True, False, False, False]
    assert caplog.text.count("summaries take longer than steps") == 1
    maker.free.set()
    assert updates.wait(600)
    assert updates.metrics() == {
        "guidance/update/submitted": 5.0,
        "guidance/update/dropped": 6.0,
        "guidance/update/summarized": 5.0,
        "guidance/update/made": 5.0,
    }
    updates.close(600)
    assert not updates.submit([rollout("a", "x")])


def test_batches_are_of_whole_tasks_and_one_that_fails_leaves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    maker = SlowMaker()
    maker.free.set()
    updates = UpdateQueue(maker, batch_size=3)
    tasks = ["bad", "a", "bad", "b", "bad", "a", "c", "c", "c", "c"]
    updates.submit([rollout(task, "x", name=str(number)) for number, task in enumerate(tasks)])
    assert updates.wait(600)
    assert maker.batches == [["bad"] * 3, ["a", "a", "b"], ["c"] * 4]
    assert updates.metrics()["guidance/update/failed/failed"] == 1
    assert updates.metrics()["guidance/update/summarized"] == 7
    assert "ZeroDivisionError" in caplog.text
    assert "summarizing rollouts works again" in caplog.text
    updates.close(600)


def test_as_many_summaries_are_made_at_once_as_there_are_workers() -> None:
    meeting = threading.Barrier(4)

    class Meeting(SlowMaker):
        def summarize(self, rollouts: Sequence[AgentTrajectory]) -> int:
            meeting.wait(600)  # passes only with four concurrent calls
            return 1

    updates = UpdateQueue(Meeting(), batch_size=1, workers=4)
    updates.submit([rollout(str(task), "x") for task in range(8)])
    assert updates.wait(600)
    assert updates.metrics()["guidance/update/made"] == 8
    updates.close(600)


def test_summaries_do_not_see_experience() -> None:
    maker = LocalMaker()
    updates = UpdateQueue(maker)
    guided = rollout("cup", "go kitchen")
    guided.messages[1]["content"] = "<EXP>old tip</EXP>" + guided.messages[1]["content"]
    good = with_guidance(guided, Guidance("keep", ("1",), (Insertion(1, "<EXP>old tip</EXP>"),)))
    broken = with_guidance(rollout("book", "go attic"), Guidance("keep", ("1",), (Insertion(1, "never put in"),)))
    updates.submit([broken, good])
    assert updates.wait(600)
    experiences = maker.retrieve("cup", 3)
    assert "go kitchen" in experiences.text
    assert "old tip" not in experiences.text
    assert len(maker) == 1
    assert updates.metrics()["guidance/update/failed/garbage"] == 1
    updates.close(600)


def test_closing_tells_what_was_not_summarized(caplog: pytest.LogCaptureFixture) -> None:
    maker = SlowMaker()
    updates = UpdateQueue(maker, capacity=3)
    updates.submit([rollout("a", "x")])
    assert maker.begun.wait(600)
    updates.submit([rollout("b", "x")])
    updates.close(timeout=0.05)
    assert "abandoned: 1 rollout not summarized, and 1 summary under way" in caplog.text
    assert updates.metrics()["guidance/update/dropped"] == 1
    maker.free.set()
    updates.close()
