"""Late values on the page: over HTTP, and in a real Chromium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.stores import stored, writer_to
from tests.view.conftest import Serve
from tests.view.rollouts import opened, rollout, text_of
from tests.view.test_server import ask, get
from tools.browser import Page
from trajstore import annotate

HOSTILE = "<img src=x onerror='window.stolen = 1'>\x1b[2J \u202egnp.exe\u202c {{7*7}}\nsecond line \U0001f600"


def history_of(address: str, shown: str = "0") -> list[Any]:
    """Return the page's late values."""
    return [(value["name"], value["value"]) for value in ask(address, "notes", id=shown)["values"]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return stored(tmp_path / "store", [rollout(number) for number in range(4)])


def test_the_history_has_all_values_and_facts_the_latest(path: Path, serve: Serve) -> None:
    expected = [("judge", 0.5), ("judge", -3), ("tag", HOSTILE), ("judge", None), ("outcome", 2**53 - 1)]
    for name, value in expected:
        annotate(path, 0, {name: value}, who="anna")
    address = serve(path)
    values = ask(address, "notes", id="0")["values"]
    assert [(value["name"], value["value"], value["who"]) for value in values] == [(*each, "anna") for each in expected]
    assert [value["latest"] for value in values] == [False, False, True, True, True]
    assert ask(address, "facts", id="0")["outcome"] == 2**53 - 1
    notes = {column["name"]: column["note"] for column in ask(address, "about")["columns"]}
    assert (notes["tag"], notes["reward_judge"]) == ("late value", "judge of the reward's metadata")


def test_a_run_and_a_pin(tmp_path: Path, serve: Serve) -> None:
    for rank in range(2):
        with writer_to(tmp_path / "run" / f"rank_{rank}") as writer:
            writer.add_trajectories([rollout(number) for number in range(2)])
            writer.points.pin("kept")
            writer.evict([0])
    annotate(tmp_path / "run", "1/1", {"judge": 0.5})
    run = serve(tmp_path / "run")
    assert (history_of(run, "1/1"), history_of(run, "0/1")) == ([("judge", 0.5)], [])
    assert get(run, "/api/notes?id=2/0")[0] == 404
    pinned = serve(tmp_path / "run" / "rank_1", pin="kept")
    assert (history_of(pinned), history_of(pinned, "1")) == ([], []), "0 was evicted; 1 got its value after the pin"


def test_a_directory_of_rlinf_has_no_values(serve: Serve, shared_fixtures: Path) -> None:
    directories = sorted((shared_fixtures / "rlinf").iterdir())
    rlinf = next(directory for directory in directories if (directory / "metadata.json").is_file())
    assert history_of(serve(rlinf)) == []


CELLS = "[...row.cells].slice(0, 3).map((one) => one.textContent).join('|')"
VALUES = f"[...document.querySelectorAll('.given tbody tr')].map((row) => {CELLS})"


def test_values_appear_while_a_page_is_open_and_hostile_ones_are_text(path: Path, serve: Serve, page: Page) -> None:
    outcome = "document.querySelector('.facts .outcome').textContent"
    with writer_to(path) as writer:
        opened(page, f"{serve(path)}/#/trajectory/0?show=scores", f"{outcome} === '0'")
        assert page.run("return document.querySelector('.late').hidden")
        annotate(writer, 0, {"tag": HOSTILE}, who=HOSTILE)
        annotate(writer, 0, {"outcome": -0.25}, who="anna")
        page.until(f"{VALUES}[0] === 'outcome|-0.25|anna' && {outcome} === '-0.25'")
        page.until("document.querySelector('.scores').textContent.includes('recordedoutcome0')")
        text = text_of(page, ".late")
        assert "\\x1b[2J" in text
        assert "\\u{202e}" in text
        assert not set("\x1b\u202e\u202c") & set(text)
        assert page.run("return document.querySelectorAll('main script, main img').length") == 0
        annotate(writer, 0, {"outcome": None}, who="anna")
        page.until(f"{VALUES}[0] === 'outcome|removed|anna' && {outcome} === '0'")
        assert page.run("return window.stolen") is None
