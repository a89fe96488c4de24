"""The protocol with ReMe: requests, accepted answers, and harmless failures."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from tests.guidance.reme import ERROR_TEXT, FakeReMe
from tests.guidance.rollouts import rollout
from tests.support.waiting import wait_until
from trainer_hooks.guidance import (
    EXPERIENCE_TEMPLATE,
    EMClient,
    ExperienceTemplate,
    ExperienceWorker,
    MakerError,
    TrajExpConfig,
    UpdateQueue,
)

FAST: dict[str, Any] = {"retrieve_timeout": 0.3, "summary_timeout": 0.3, "retries": 1, "backoff": 0.01, "rest": 0.0}
# A generous timeout where an answer is expected, for busy machines.
PATIENT: dict[str, Any] = {**FAST, "retrieve_timeout": 60.0, "summary_timeout": 60.0}
MESSAGES = [{"role": "user", "content": "where is the cup"}]
TEMPLATE = ExperienceTemplate.of(EXPERIENCE_TEMPLATE)

FAILURES = [
    ("503", "server"),
    ("500", "server"),
    ("404", "refused"),
    ("422", "refused"),
    ("garbage", "garbage"),
    ("not an object", "garbage"),
    ("no metadata", "garbage"),
    ("no success", "failed"),
    ("reset", "connection"),
    ("hang", "timeout"),
    ("drip", "timeout"),
    ("drip headers", "timeout"),
    ("deep", "garbage"),
]


@pytest.mark.parametrize("dialect", ["auto", "0.2"])
def test_task_memories_are_sent_and_read(dialect: Any) -> None:
    with FakeReMe() as service:
        client = EMClient(service.url, workspace_id="w1", dialect=dialect, **PATIENT)
        experiences = client.retrieve("where is the cup", 1)
        assert experiences.text == "Memory 1 :\n When to use: when looking for a cup\n Content: go kitchen"
        assert experiences.names == ("m1",)
        assert client.retrieve("nothing of the kind", 3).text == ""
        assert client.retrieve(" ", 3).text == "", "an empty query fails in the service; it is not sent"
        assert client.summarize([rollout("cup", "go kitchen"), rollout("cup", "?", None)]) == 2
        assert client.summarize([rollout("cup", "?", None)]) == 0
        calls = [call for call in service.calls if call[1]]
        assert calls[0] == ("/retrieve_task_memory", {"query": "where is the cup", "top_k": 1, "workspace_id": "w1"})
        path, body = calls[-1]
        assert path == "/summary_task_memory"
        assert body["workspace_id"] == "w1"
        assert [trajectory["score"] for trajectory in body["trajectories"]] == [1.0], (
            "a null score would fail the whole call"
        )
        assert body["trajectories"][0]["messages"][-1] == {"role": "assistant", "content": "go kitchen"}


@pytest.mark.parametrize("dialect", ["auto", "0.4"])
def test_notes_are_sent_and_searched(dialect: Any) -> None:
    with FakeReMe("0.4") as service:
        client = EMClient(service.url, dialect=dialect, **PATIENT)
        assert client.retrieve("where is the cup", 2).text == "go kitchen"
        assert client.retrieve("nothing", 2).text == ""
        tried = rollout("cup", "go kitchen")
        tried.messages.append({"role": "tool", "content": "you see a cup"})
        assert client.summarize([tried]) == 1
        path, body = service.calls[-1]
        assert path == "/auto_memory"
        assert body["session_id"] == "cup-1"
        assert body["messages"][2:4] == [
            {"name": "assistant", "role": "assistant", "content": "go kitchen"},
            {"name": "user", "role": "user", "content": "you see a cup"},
        ]


@pytest.mark.parametrize(("mode", "kind"), [*FAILURES, ("silent failure", "failed"), ("error as answer", "failed")])
def test_no_failure_reaches_a_prompt_and_each_is_one_metric_and_one_log_line(
    mode: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeReMe(mode=mode) as service:
        client = EMClient(service.url, dialect="0.2", **(FAST if kind == "timeout" else PATIENT))
        worker = ExperienceWorker(client, template=TEMPLATE)
        updates = UpdateQueue(client)
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                config = TrajExpConfig(add_exp=True)
                assert worker.manage_rollout_context(MESSAGES, config) == MESSAGES
                assert config.guidance() is None
            assert updates.submit([rollout("cup", "go kitchen")])
            assert updates.wait(600)
        lines = [record.message for record in caplog.records]
        assert [line for line in lines if "retrieving experience failed" in line and kind in line] == lines[:1]
        assert [line for line in lines if "summarizing rollouts failed" in line] == lines[1:]
        assert worker.metrics()[f"guidance/retrieve/failed/{kind}"] == 3
        assert updates.metrics()[f"guidance/update/failed/{kind}"] == 1
        attempts = 2 if kind in ("server", "connection") else 1
        calls = len(service.calls)  # a request may time out before the service has read it
        assert calls == 4 * attempts or (kind == "timeout" and calls < 4), "nothing is tried for ever"
        updates.close()


@pytest.mark.parametrize("mode", ["no success", "error as answer", "garbage", "500"])
def test_no_error_of_the_other_dialect_is_an_experience(mode: str) -> None:
    with FakeReMe("0.4", mode) as service:
        worker = ExperienceWorker(EMClient(service.url, dialect="0.4", **PATIENT), template=TEMPLATE)
        messages = worker.manage_rollout_context(MESSAGES, TrajExpConfig(add_exp=True))
        if mode == "error as answer":  # 0.4 marks errors with success=false, so its successes are trusted
            assert ERROR_TEXT in messages[0]["content"]
        else:
            assert messages == MESSAGES


def test_a_service_that_is_down_is_left_alone_for_a_while() -> None:
    with FakeReMe() as service:
        url = service.url
    client = EMClient(url, **{**PATIENT, "rest": 3600.0})
    kinds = []
    for _ in range(5):
        with pytest.raises(MakerError) as caught:
            client.retrieve("cup", 1)
        kinds.append(caught.value.kind)
    assert kinds == ["connection", *["resting"] * 4]


def test_a_service_of_another_kind_is_told() -> None:
    with FakeReMe(mode="404") as service, pytest.raises(MakerError, match="/search: HTTP 404"):
        EMClient(service.url, **PATIENT).retrieve("cup", 1)


@pytest.mark.parametrize("mode", ["hang", "drip", "drip headers"])
def test_closing_ends_a_call_that_is_under_way(mode: str) -> None:
    with FakeReMe(mode=mode) as service:
        client = EMClient(service.url, dialect="0.2", **{**FAST, "summary_timeout": 3600.0})
        updates = UpdateQueue(client)
        for task in ("cup", "book", "key"):
            updates.submit([rollout(task, "go kitchen")])
        wait_until(lambda: bool(service.calls))
        client.close()
        updates.close(timeout=600)
        assert updates.metrics()["guidance/update/failed/closed"] == 3
        with pytest.raises(MakerError) as caught:
            client.retrieve("cup", 1)
        assert caught.value.kind == "closed"


def test_a_wait_before_another_try_ends_when_the_client_is_closed() -> None:
    with FakeReMe(mode="500") as service:
        client = EMClient(service.url, dialect="0.2", retries=5, backoff=3600.0)
        caught: list[MakerError] = []

        def ask() -> None:
            try:
                client.retrieve("cup", 1)
            except MakerError as error:
                caught.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: bool(service.calls))
        client.close()
        thread.join(600)
        assert not thread.is_alive()
        assert len(caught) == 1
