"""The page in a real Chromium over 2,000 agent rollouts, while a writer adds and evicts."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from pathlib import Path

from tests.stores import writer_to
from tests.view.conftest import Serve
from tests.view.rollouts import rollout, text_of
from tools.browser import Page
from tools.meanwhile import meanwhile
from trajstore import TrajectoryReplayBuffer

MANY = 2_000
ROWS = "[...document.querySelectorAll('.row a.id, .row .id a')].map((one) => Number(one.textContent))"


def adding(writer: TrajectoryReplayBuffer, first: int) -> AbstractContextManager[None]:
    """While entered, add eight siblings at a time and evict as many of those that were there before.

    What was added meanwhile stays, and so do the newest thousand before it: the test looks at them later, however slow
    the browser is.
    """
    numbers = itertools.count(first, 8)

    def work() -> None:
        number = next(numbers)
        writer.add_trajectories([rollout(at) for at in range(number, number + 8)])
        if number < 3 * MANY // 2:
            writer.evict(range(number - MANY, number - MANY + 8))

    return meanwhile(work, 0.02)


def test_every_view_follows_a_writer(tmp_path: Path, serve: Serve, page: Page) -> None:
    made = [rollout(number) for number in range(400)]
    with writer_to(tmp_path) as writer:
        for _ in range(MANY // len(made)):
            writer.add_trajectories(made)
        writer.flush()
        address = serve(tmp_path)
        with adding(writer, MANY):
            page.open(f"{address}/#/table")
            newest = page.until(f"{ROWS}[0] > {MANY} && {ROWS}[0]")
            page.until(f"{ROWS}[0] > {newest}")  # at the top, new rows appear without a reload
            page.run("const grid = document.querySelector('.grid'); grid.scrollTop = 34 * 600")
            page.until(
                "document.querySelector('.news').checkVisibility()"
            )  # farther down, new rows do not move the others
            steady = page.until(f"{ROWS}.length > 10 && {ROWS}.every(Boolean) && {ROWS}")
            before = text_of(page, "#live")
            page.until("document.querySelector('#live').textContent !== arguments[0]", before)
            assert page.run(f"return {ROWS}") == steady

            page.run("location.hash = '#/overview'")
            page.until("document.querySelectorAll('.curves canvas').length === 4")
            count = "Number(document.querySelector('.figures dd').textContent.replaceAll(',', ''))"
            versions = (
                "Number(document.querySelectorAll('.figures dd')[3].textContent.split(' ').at(-1).replaceAll(',', ''))"
            )
            shown = page.run(f"return {versions}")
            assert page.run(f"return {count}") >= MANY - 100
            page.until(f"{versions} > {shown}")

            page.run(f"location.hash = '#/trajectory/{newest}'")
            page.until("document.querySelectorAll('.token').length === 24 && document.querySelector('.message')")
            page.run("location.hash = '#/trajectory/3'")  # evicted while the page was open
            page.expected_errors.append("status of 404")
            page.until("document.querySelector('main .trouble')?.textContent.includes('id 3')")

            page.run("location.hash = '#/group?task=task-1'")
            current = "Number(document.querySelector('.versions [aria-current]')?.textContent.replaceAll(',', ''))"
            version = page.until(f"document.querySelectorAll('.sibling .message').length >= 4 && {current}")
            page.until(f"{current} > {version}")
        writer.flush()
        page.run("location.hash = '#/table'")
        last = len(writer.query().ids())
        page.until("document.querySelector('#live').textContent.includes(arguments[0])", f"{last:,} trajectories")
