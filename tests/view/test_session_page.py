"""Agent sessions on the page: the tree of a row's session, and sessions that are open."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from tests.stores import writer_to
from tests.view.conftest import Serve
from tests.view.rollouts import HOSTILE_CALL, clicked, opened, rollout, session_in, text_of
from tools.browser import Page
from trajstore import Reward, TrajectoryReplayBuffer
from trajstore.view.rollout import answer_of


def header_of(**changed: Any) -> Any:
    body = answer_of(rollout(0, **changed), None)
    return orjson.loads(body[4 : 4 + struct.unpack_from("<I", body)[0]])


@pytest.mark.parametrize(
    ("masks", "trained"),
    [
        ({}, [False, True]),
        ({"loss_mask": None}, [False, True]),
        ({"loss_mask": None, "response_mask": None}, [None] * 2),
    ],
)
def test_the_answer_has_the_calls_of_the_row(masks: dict[str, None], trained: list[bool | None]) -> None:
    given = {
        "loss_mask": torch.tensor([0] * 8 + [1] * 16),
        "response_mask": torch.tensor([0] * 4 + [1] * 16),
        "rollout_log_probs": None,
        **masks,
    }
    calls = [
        {"id": "a", "start": 4, "stop": 6, "policy_version": 2**60},
        {"id": "b", "number": "x", "start": 8, "stop": 24, "policy_version": None, "messages": [3, 1], "shared": -1},
        {"id": "c", "start": 20, "stop": 25},
        {"start": "x"},
        "odd",
    ]
    about = {"id": "s", "path": 1, "paths": 3, "calls": calls, "incomplete": [{"id": "d", "reason": "timeout"}, 7]}
    header = header_of(metadata={"session": about}, **given)
    unknown = dict.fromkeys(("number", "messages", "base", "shared", "retried", "finish"))
    assert header["session"] == {
        "id": "s",
        "path": 1,
        "paths": 3,
        "calls": [
            {**unknown, "id": "a", "version": str(2**60), "start": 4, "stop": 6, "trained": trained[0]},
            {**unknown, "id": "b", "version": None, "start": 8, "stop": 24, "trained": trained[1]},
        ],
        "incomplete": [{"id": "d", "reason": "timeout", "number": None}],
    }
    assert [text.partition(":")[0] for text in header["left_out"]] == [
        *(f"metadata.session.calls[{n}]" for n in (2, 3, 4)),
        "metadata.session.incomplete[1]",
    ]


@pytest.mark.parametrize("session", [None, 7, {}, {"id": "s", "path": 2, "paths": 2}])
def test_other_metadata_is_no_session(session: object) -> None:
    assert header_of(metadata={"session": session})["session"] is None


LINES = "[...document.querySelectorAll('.tree li')]"
TEXTS = f"{LINES}.map((line) => [line.querySelector('.name').textContent, line.querySelector('.did').textContent])"
TREE = [
    ["plan", "3 added · 1 sampled · log-prob -0.5, lowest -0.5 · version 3"],
    [HOSTILE_CALL, "continues plan: 2 added · 2 sampled · log-prob -0.375, lowest -0.5 · version 4 · length"],
    ["search", "continues plan: 1 added · 1 sampled · no log-probs · version unknown"],
    ["again", "continues plan: prompt of search · 1 sampled · no log-probs · version unknown · retried: timeout"],
    ["lost", "incomplete: timeout"],
    ["small", "2 added · 2 shared with plan · 1 sampled · no log-probs · version unknown"],
]


def test_a_call_leads_to_its_tokens_and_a_token_to_its_call(tmp_path: Path, serve: Serve, page: Page) -> None:
    session_in(tmp_path)
    address = serve(tmp_path)
    opened(page, f"{address}/#/trajectory/1", f"{LINES}.length === {len(TREE)}")
    assert page.run(f"return {TEXTS}") == TREE
    assert text_of(page, ".tree li .heard") == "user go assistant on it "
    assert text_of(page, ".of-session summary") == "5 calls, 4 paths, 1 gap"
    assert ": path 0, 4 paths in all" in text_of(page, ".of-session p")
    assert page.run(f"return {LINES}.map((line) => line.className)") == ["own", "own", "", "", "gap", ""]
    assert page.run("return document.querySelectorAll('.tree path').length") == 3
    selected = "document.querySelector('.token.selected')?.dataset.at === arguments[0]"
    current = "document.querySelector('.tree [aria-current] .name').textContent"
    clicked(page, ".tree li:nth-child(2) .name", selected, "6")
    assert page.run("return location.hash").startswith("#/trajectory/1?")
    clicked(page, "[data-at='3']", f"{current} === 'plan'")
    page.click("#token button")
    assert page.run("return document.activeElement === document.querySelector('.tree li .name')")
    clicked(page, ".tree li:nth-child(3) .name", f"location.hash.startsWith('#/trajectory/2?') && {selected}", "5")
    page.until(f"{LINES}.length === {len(TREE)} && {current} === 'search'")
    assert page.run(f"return {TEXTS}[0]")[1].endswith(" · in the loss of path 0")
    clicked(page, ".tree li:nth-child(4) .end", f"location.hash === '#/trajectory/3' && {LINES}.length")
    clicked(page, ".of-session p a", "document.querySelector('.total')?.textContent.startsWith('4 trajectories')")
    opened(page, f"{address}/#/trajectory/0", "document.querySelector('.token')")
    assert page.run("return document.querySelector('.of-session')") is None


def test_a_tree_has_what_can_be_read_of_its_session(tmp_path: Path, serve: Serve, page: Page) -> None:
    session_in(tmp_path)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path, sample_window_size=0) as writer:
        writer.evict([1])
        writer.add_trajectories([rollout(0, metadata={"session": {"id": "odd", "path": 0, "paths": 1, "calls": [7]}})])
    address = serve(tmp_path)
    opened(page, f"{address}/#/trajectory/2", f"{LINES}.length")
    assert page.run(f"return {TEXTS}.map(([name]) => name)") == ["plan", "search", "again", "lost", "small"]
    assert "1 of its 4 paths are not shown" in text_of(page, ".of-session details")
    opened(page, f"{address}/#/trajectory/5", "document.querySelector('.of-session details .refused')")
    assert "path 0: metadata.session.calls[0]: not shown" in text_of(page, ".of-session details .refused")


def test_open_sessions_are_listed_and_grow(tmp_path: Path, serve: Serve, page: Page) -> None:
    with writer_to(tmp_path) as writer:
        writer.add_trajectories([rollout(0)])
        writer.flush()
        session = writer.session("task", HOSTILE_CALL)
        address = serve(tmp_path)
        link = "document.querySelector('[aria-label=\"Open sessions\"] tbody a')"
        opened(page, f"{address}/#/overview", link)
        assert f"task / {HOSTILE_CALL}open0 calls" in text_of(page, ".open tbody")
        session.incomplete("plan", "begun")
        page.until(f"{link}.closest('tr').textContent.includes('0 calls, 1 gap')")
        clicked(page, ".open tbody a", "document.querySelector('.tree .gap')")
        assert "No call is durable yet." in text_of(page, ".body")
        session.add_call([1, 2, 3], [4], call_id="plan")
        page.until("document.querySelector('.token.selected')?.dataset.at === '3'")
        assert page.run(f"return {TEXTS}") == [
            ["plan", "3 added · 1 sampled · no log-probs · version unknown · retried: begun"]
        ]
        for number in range(199):
            session.add_call([*range(1, 5), *[7] * number], [9], [-0.25], call_id=f"sample-{number}")
        page.until(f"{LINES}.length === 200")
        clicked(
            page,
            ".tree li:nth-child(149) .name",
            "document.querySelector('#token button')?.textContent === 'sample-147'",
        )
        assert page.run("return new URLSearchParams(location.hash.split('?')[1]).get('call')") == "sample-147"
        session.add_call([*range(1, 5), *[7] * 147, 9, 5], [6], call_id="next")
        clicked(page, ".news:not([hidden])", "document.querySelectorAll('.token').length === 154")
        page.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride", {"width": 400, "height": 740, "deviceScaleFactor": 1, "mobile": True}
        )
        assert page.run("return document.querySelector('main').scrollWidth") <= 400
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        session.finish(Reward(outcome=1.0))
        writer.flush()
        page.until(f"location.hash.startsWith('#/trajectory/') && {LINES}.length === 201")


def test_a_damaged_call_is_named(tmp_path: Path, serve: Serve, page: Page) -> None:
    with writer_to(tmp_path) as writer:
        session = writer.session("task", "one")
        for number in range(2):
            session.add_call([1, 2, 3, number], [4], call_id=f"call-{number}")
        (journal,) = (tmp_path / "calls").glob("*.calls")
        data = journal.read_bytes()
        journal.write_bytes(data.replace(b"call-0", b"call-9"))
        opened(page, f"{serve(tmp_path)}/#/overview", "document.querySelector('.open .refused')")
        assert "is damaged and left out" in text_of(page, ".open .refused")
