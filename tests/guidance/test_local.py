"""The embedded maker: summaries, retrieval, and its state after a crash."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.guidance.rollouts import rollout
from tools.crash.forked import forking
from trainer_hooks.guidance import Experience, ExtractiveSummarizer, LocalMaker, MakerError
from trainer_hooks.replay import BufferStore
from trajstore.errors import StoreWriteError
from trajstore.trajectory import AgentTrajectory


def test_a_success_is_contrasted_with_a_failure_of_the_same_task() -> None:
    [made] = ExtractiveSummarizer()(
        [rollout("cup", "go attic", 0.0, "1"), rollout("cup", "go kitchen", 1.0, "2"), rollout("cup", "?", None, "3")]
    )
    assert made.content == "This worked:\n- go kitchen\nThis did not work:\n- go attic"
    assert (made.task_id, made.query, made.score, made.sources) == ("cup", "please do cup", 1.0, ("2", "1"))
    [failed] = ExtractiveSummarizer()([rollout("cup", "go attic", 0.0), rollout("cup", "go hall", 0.5)])
    assert failed.content == "This did not work:\n- go hall"
    assert ExtractiveSummarizer()([rollout("cup", "go attic", None)]) == []


def test_long_replies_are_cut() -> None:
    [made] = ExtractiveSummarizer()([rollout("cup", "x" * 100_000, query="y" * 100_000)])
    assert len(made.content) < 2000
    assert len(made.when_to_use) < 500


def test_a_summary_that_fails_does_not_keep_others_from_theirs() -> None:
    def summarize(rollouts: Sequence[AgentTrajectory]) -> list[Experience]:
        if rollouts[0].task_id == "bad":
            raise RuntimeError("no model")
        return ExtractiveSummarizer()(rollouts)

    maker = LocalMaker(summarizer=summarize)
    with pytest.raises(MakerError, match="1 task without a summary: task 'bad': RuntimeError") as caught:
        maker.summarize([rollout("bad", "x"), rollout("cup", "go kitchen")])
    assert caught.value.kind == "failed"
    assert len(maker) == 1


def test_an_experience_that_cannot_be_stored_does_not_keep_others_out() -> None:
    class Full(BufferStore):
        def add_trajectories(self, trajectories: list[AgentTrajectory], /) -> list[int]:
            if trajectories[0].task_id == "bad":
                raise StoreWriteError("disk is full")
            return super().add_trajectories(trajectories)

    maker = LocalMaker(Full())
    with pytest.raises(MakerError, match="disk is full") as caught:
        maker.summarize([rollout("bad", "x"), rollout("cup", "go kitchen")])
    assert caught.value.kind == "store"
    assert maker.retrieve("cup", 1).names


def test_other_records_of_the_store_and_damaged_ones_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    store = BufferStore()
    store.add_trajectories([rollout("x", "y"), AgentTrajectory(metadata={"experience": {"kind": "experience"}})])
    LocalMaker(store).summarize([rollout("cup", "go kitchen")])
    assert len(LocalMaker(store)) == 1
    assert "experience 1 cannot be read" in caplog.text


def test_a_closed_maker_says_so() -> None:
    maker = LocalMaker()
    maker.close()
    for call in (lambda: maker.retrieve("x", 1), lambda: maker.summarize([rollout("x", "y")])):
        with pytest.raises(MakerError) as caught:
            call()
        assert caught.value.kind == "closed"


def summarize_until_killed(path: Path, start: int, pipe: Connection) -> None:
    maker = LocalMaker(BufferStore.open(path))
    for number in itertools.count(start):
        assert maker.summarize([rollout(f"task {number}", f"reply {number}")]) == 1
        pipe.send(number)


def killed_run(path: Path, start: int, acknowledged: int) -> list[int]:
    """Summarize in a child, kill it after some acknowledgements; return the acknowledged numbers."""
    heard, sender = multiprocessing.Pipe(duplex=False)
    child = forking().Process(target=summarize_until_killed, args=(path, start, sender))
    child.start()
    sender.close()
    numbers = [heard.recv() for _ in range(acknowledged)]
    child.kill()
    child.join()
    with suppress(EOFError, OSError):  # the last message may be truncated
        while True:
            numbers.append(heard.recv())
    return numbers


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.campaign)])
def test_sigkill_while_summarizing_loses_nothing_acknowledged_and_doubles_nothing(tmp_path: Path, kills: int) -> None:
    path = tmp_path / "experience"
    acknowledged: list[int] = []
    for kill in range(kills):
        acknowledged += killed_run(path, 10_000 * kill, 3 + 2 * kill)
    store = BufferStore.open(path)
    maker = LocalMaker(store)
    for number in acknowledged:
        maker.summarize([rollout(f"task {number}", f"reply {number}")])  # like a run that repeats its steps
    kept = [Experience.of_trajectory(store.get(number)) for number in store.ids()]
    digests = [experience.digest for experience in kept if experience is not None]
    assert len(digests) == len(kept)
    assert len(digests) == len(set(digests)), "none twice"
    assert {experience.task_id for experience in kept if experience} >= {f"task {number}" for number in acknowledged}
    for number in acknowledged[:3]:
        assert f"reply {number}" in maker.retrieve(f"task {number}", 1).text
    store.close()
