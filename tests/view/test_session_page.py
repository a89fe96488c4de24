"""A row of an agent session: the calls of its path, and the session's other paths."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from tests.view.conftest import Serve
from tests.view.rollouts import HOSTILE_CALL, clicked, opened, rollout, session_in, text_of
from tools.browser import Page
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
        {"id": "b", "start": 8, "stop": 24, "policy_version": None},
        {"id": "c", "start": 20, "stop": 25},
        {"start": "x"},
        "odd",
    ]
    about = {"id": "s", "path": 1, "paths": 3, "calls": calls, "incomplete": [{"id": "d", "reason": "timeout"}, 7]}
    header = header_of(metadata={"session": about}, **given)
    assert header["session"] == {
        "id": "s",
        "path": 1,
        "paths": 3,
        "calls": [
            {"id": "a", "version": str(2**60), "start": 4, "stop": 6, "trained": trained[0]},
            {"id": "b", "version": None, "start": 8, "stop": 24, "trained": trained[1]},
        ],
        "incomplete": [{"id": "d", "reason": "timeout"}],
    }
    assert [text.partition(":")[0] for text in header["left_out"]] == [
        *(f"metadata.session.calls[{n}]" for n in (2, 3, 4)),
        "metadata.session.incomplete[1]",
    ]


@pytest.mark.parametrize("session", [None, 7, {}, {"id": "s", "path": 2, "paths": 2}])
def test_other_metadata_is_no_session(session: object) -> None:
    assert header_of(metadata={"session": session})["session"] is None


def test_a_call_leads_to_its_tokens_and_a_token_to_its_call(tmp_path: Path, serve: Serve, page: Page) -> None:
    session_in(tmp_path)
    address = serve(tmp_path)
    shared = (
        "document.querySelector('[aria-label=\"Other paths\"] td:last-child')?.textContent === 'first 4 tokens shared'"
    )
    opened(page, f"{address}/#/trajectory/1", shared)
    lines = "[...document.querySelectorAll('[aria-label=\"Calls of this path\"] tbody tr')]"
    rows = f"{lines}.map((row) => [...row.cells].map((cell) => cell.textContent))"
    assert page.run(f"return {rows}") == [
        ["plan", "token 3", "3 added", "1 sampled", "version 3", "in the loss"],
        [HOSTILE_CALL, "token 6", "2 added", "2 sampled", "version 4", "in the loss"],
    ]
    assert ": path 0, 2 paths in all" in text_of(page, ".session p")
    assert text_of(page, ".session li") == "lost: timeout"
    selected = "document.querySelector('.token.selected')?.dataset.at === arguments[0]"
    clicked(page, '[aria-label="Calls of this path"] tr:nth-child(2) .to-token', selected, "6")
    assert HOSTILE_CALL in text_of(page, "#token")
    assert page.run("return location.hash").startswith("#/trajectory/1?")
    clicked(page, '[aria-label="Other paths"] a', f"location.hash === '#/trajectory/2' && {shared}")
    assert page.run(f"return {rows}[0].at(-1)") == "not in the loss of this row"
    assert page.run(f"return {rows}[1]")[1:] == ["token 5", "1 added", "1 sampled", "version unknown", "in the loss"]
    clicked(page, ".session p a", "document.querySelector('.total')?.textContent.startsWith('2 trajectories')")
    opened(page, f"{address}/#/trajectory/0", "document.querySelector('.token')")
    assert page.run("return document.querySelector('.session')") is None


def test_many_paths_wait_for_a_click_and_fit_a_narrow_screen(tmp_path: Path, serve: Serve, page: Page) -> None:
    session_in(tmp_path, extra=40)
    address = serve(tmp_path)
    page.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    )
    opened(page, f"{address}/#/trajectory/3", "document.querySelector('.session details:last-child:not([open])')")
    assert page.run("return document.querySelector('[aria-label=\"Other paths\"]')") is None
    cells = (
        "[...document.querySelectorAll('[aria-label=\"Other paths\"] td:last-child')].map((cell) => cell.textContent)"
    )
    clicked(page, ".session details:last-child summary", f"{cells}.length === 32 && !{cells}.includes('…')")
    assert set(page.run(f"return {cells}")) == {"first 2 tokens shared"}
    assert "32 of 41 are listed" in text_of(page, ".session details:last-child")
    assert page.run("return document.querySelector('main').scrollWidth") <= 360
    page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
