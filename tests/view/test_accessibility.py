"""Accessibility tree of each view, in a real Chromium, light and dark.

``TRAJSTORE_AXE=/path/to/axe.min.js`` adds the rules of axe-core.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.stores import stored, writer_to
from tests.support.witness import witness
from tests.view.conftest import Serve
from tests.view.rollouts import opened, rollout, session_in, text_of
from tools.browser import Page

CONTROLS = {
    *("button", "link", "textbox", "searchbox", "combobox", "slider", "checkbox", "radio", "spinbutton"),
    *("grid", "table", "columnheader", "DisclosureTriangle", "img", "image", "figure", "navigation", "form", "search"),
}
LANDMARKS = {"banner", "navigation", "main"}

AXE = os.environ.get("TRAJSTORE_AXE")

RUN_AXE = """
const done = arguments[0];
axe.run(document, { resultTypes: ['violations'] }).then(
  ({ violations }) => done(violations.flatMap(({ help, nodes }) => nodes.map((node) => `${help}: ${node.html}`))),
  (error) => done([String(error)]));
"""


def told_of(page: Page) -> list[dict[str, Any]]:
    """Return the accessibility tree: role, name and properties of each element."""
    nodes = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    return [
        {
            "role": node["role"]["value"],
            "name": node.get("name", {}).get("value", ""),
            **{prop["name"]: prop["value"].get("value") for prop in node.get("properties", ())},
        }
        for node in nodes
        if not node["ignored"]
    ]


def prefer(page: Page, theme: str) -> None:
    """Emulate the system's light or dark preference; empty = none."""
    feature = {"name": "prefers-color-scheme", "value": theme}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


@pytest.mark.parametrize("theme", ["light", *(["dark"] if AXE else [])])  # only contrasts differ
def test_every_view_names_its_controls(tmp_path: Path, serve: Serve, page: Page, theme: str) -> None:
    stored(tmp_path / "rollouts", [rollout(number) for number in range(40)])
    stored(tmp_path / "blocks", [witness(7), witness(8)])
    session_in(tmp_path / "session")
    rollouts, blocks = serve(tmp_path / "rollouts"), serve(tmp_path / "blocks")
    session = serve(tmp_path / "session")
    prefer(page, theme)
    page.expected_errors += ["status of 400", "status of 404"]
    violations = []
    for address, drawn in (
        (f"{rollouts}/#/overview", "document.querySelectorAll('.curves canvas').length === 4"),
        (f"{rollouts}/#/table", "document.querySelectorAll('.row').length > 5"),
        (f"{rollouts}/#/table?where=taks", "document.querySelector('.refused').textContent"),
        (f"{rollouts}/#/trajectory/3?token=9", "document.querySelector('.token.selected')"),
        (f"{rollouts}/#/group?task=task-1", "document.querySelectorAll('.sibling').length === 4"),
        (f"{session}/#/trajectory/2", "document.querySelectorAll('.tree a.name').length === 5"),
        (f"{blocks}/#/trajectory/0", "document.querySelector('[data-drawn]')"),
        (f"{blocks}/#/table", "document.querySelectorAll('.row').length === 2"),
        (f"{blocks}/#/trajectory/99", "document.querySelector('main .trouble')"),
    ):
        page.open(address)
        page.until("document.querySelector('main[aria-busy=false]') && document.querySelector('#live[data-live]')")
        page.until(drawn)
        page.run("for (const one of document.querySelectorAll('details')) one.open = true")
        nodes = told_of(page)
        violations += [
            f"{address}: a {node['role']} without a name"
            for node in nodes
            if node["role"] in CONTROLS and not node["name"].strip()
        ]
        violations += [f"{address}: no {role}" for role in LANDMARKS - {node["role"] for node in nodes}]
        if AXE:
            page.run(Path(AXE).read_text())
            violations += [f"{address}: {node}" for node in page.driver.execute_async_script(RUN_AXE)]
    prefer(page, "")
    assert not violations, "\n".join(dict.fromkeys(violations))


def test_the_page_is_dark_where_the_system_is_unless_somebody_chose(tmp_path: Path, serve: Serve, page: Page) -> None:
    stored(tmp_path, [rollout(number) for number in range(30)])
    ground = "getComputedStyle(document.body).backgroundColor"
    drawn = "document.querySelector('[data-curve=outcome] canvas').toDataURL()"
    prefer(page, "light")
    opened(page, f"{serve(tmp_path)}/#/overview", "document.querySelectorAll('.curves canvas').length === 4")
    light, curve = page.run(f"return {ground}"), page.run(f"return {drawn}")
    prefer(page, "dark")
    dark = page.until(f"{ground} !== arguments[0] && {ground}", light)
    page.until(f"{drawn} !== arguments[0]", curve)  # the canvas follows, too
    page.click("#theme")
    assert page.run(f"return {ground}") == light
    page.driver.refresh()
    page.until(
        f"document.querySelector('.curves canvas') && {ground} === arguments[0]", light
    )  # an explicit choice wins
    assert "light" in page.run("return document.querySelector('#theme').getAttribute('aria-label')")
    page.click("#theme")  # equals the system's theme, so the choice is dropped
    page.until(f"{ground} === arguments[0]", dark)
    prefer(page, "light")
    page.until(f"{ground} === arguments[0]", light)
    assert page.run("return localStorage.length") == 0
    prefer(page, "")


def test_keys_reach_what_a_mouse_reaches_while_others_write(tmp_path: Path, serve: Serve, page: Page) -> None:
    focused = "document.activeElement.dataset.focus"
    with writer_to(tmp_path) as writer:
        writer.add_trajectories([rollout(number) for number in range(48)])
        writer.flush()
        opened(page, f"{serve(tmp_path)}/#/overview", "document.querySelectorAll('.curves [role=slider]').length === 4")
        page.until("document.querySelector('#live[data-live]')")  # the page knows how many there are now
        assert text_of(page, "#said") == ""
        for selector in ("[data-curve=count] .u-over", ".task"):
            page.run(f"document.querySelector('{selector}').focus()")
            held = page.run(f"return {focused}")
            shown = text_of(page, ".figures dd")
            writer.add_trajectories([rollout(56), rollout(57)])
            writer.flush()
            page.until("document.querySelector('.figures dd').textContent !== arguments[0]", shown)
            assert page.run(f"return {focused}") == held
            if selector != ".task":  # more is said later
                page.until("document.querySelector('#said').textContent === '2 trajectories more, 50 now'")
        page.keys("[data-curve=count] .u-over", "\ue012", "\ue012")  # left, left: from version 7 to 4
        label = "document.querySelector('[data-curve=count] .u-over').getAttribute('aria-valuetext')"
        assert page.run(f"return {label}") == "policy version 4: 8"
        page.keys("[data-curve=count] .u-over", "\ue007")  # Enter
        page.until("document.querySelector('.total')?.textContent.startsWith('8 trajectories')")
        assert page.run("return document.title") == f"Trajectories · {tmp_path.name} · trajstore"
        page.keys(".heads > div:nth-child(2) button", "\ue007")
        page.until("document.querySelector('[aria-sort=descending]').textContent.startsWith('task')")
        assert page.run(f"return {focused}") == "task"
        page.keys(".grid", "\ue007")
        page.until("document.activeElement.id === 'main' && document.title.startsWith('Trajectory ')")
