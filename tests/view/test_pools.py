"""Pools on the page: in a run's store, and in a bundle."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from tests.replay.conftest import build
from tests.view.conftest import Serve
from tests.view.rollouts import clicked, opened, text_of
from tests.view.test_bundle import bundled, files_of
from tests.view.test_page import HOSTILE, ROWS
from tools.browser import Page
from trainer_hooks.replay import BufferStore, ExperienceManager, PoolRules

RULES = PoolRules(n_rollout=4)

CELLS = "[...document.querySelectorAll('.row')].map((row) => [...row.children].map((cell) => cell.textContent))"

BUCKETS = "[...document.querySelectorAll('.by-task[aria-label=Pool] .task')].map((row) => row.innerText.split(/\\n/))"


def train(manager: ExperienceManager, step: int, successes: dict[str, int]) -> None:
    """Add a step of four rollouts per task with the given number of successes."""
    manager.global_steps = step
    rollouts = [
        build(task, tokens=1000 * step + number, outcome=float(number < good), policy_version=step)
        for task, good in successes.items()
        for number in range(4)
    ]
    manager.admit(rollouts)
    manager.flush()


def pool(path: Path, tasks: tuple[str, ...] = ("a", "b", "c")) -> BufferStore:
    """Return the store of a pool after two steps: the first task is solved, the second has a demonstration."""
    store = BufferStore.open(path)
    manager = ExperienceManager(RULES, store=store)
    shown = build(tasks[1], tokens=7, old_log_probs=None, entropy=None, metadata={"demonstration": True})
    manager.seed([shown])
    train(manager, 1, dict(zip(tasks, (1, 2, 3), strict=True)))
    manager.get_offpolicy_batch([tasks[2]], 1)
    train(manager, 2, dict(zip(tasks, (4, 1, 3), strict=True)))
    return store


def buckets(page: Page) -> list[tuple[str, str]]:
    """Return the overview's difficulties and their task counts."""
    shown: list[list[str]] = page.run(f"return {BUCKETS}")
    return [(row[0], row[-1].split()[0]) for row in shown]


def test_a_pool_shows_its_histories_and_follows_its_run(tmp_path: Path, serve: Serve, page: Page) -> None:
    with closing(pool(tmp_path)) as store:
        manager = ExperienceManager(RULES, store=store)
        expected = manager.query().order_by("trajectory_id desc").rows()
        address = serve(tmp_path)
        page.open(f"{address}/#/table?columns=trajectory_id,task,difficulty,pool_entropy,uses,demonstration")
        page.until(f"{ROWS}.length === {len(expected)}")  # no journal records, no removed histories
        shown = page.run(f"return {CELLS}")
        assert shown == [
            [
                str(row["trajectory_id"]),
                row["task"],
                *("" if value is None else f"{value:g}" for value in (row["difficulty"], row["pool_entropy"])),
                str(row["uses"]),
                "yes" if row["demonstration"] else "no",
            ]
            for row in expected
        ]
        assert {row["uses"] for row in expected} == {0, 1}
        opened(page, f"{address}/#/overview", "document.querySelector('[data-curve=difficulty] canvas')")
        assert buckets(page) == [("0 successes", "0"), ("1 success", "1"), ("2 successes", "0"), ("3 successes", "1")]
        note = text_of(page, "[aria-label=Pool] .note")
        assert note.startswith(
            f"{len(expected)} rollouts (1 demonstration among them) of 2 tasks; 1 more task is solved"
        )
        assert "outcome of all of these is 1" in text_of(page, ".lacking")
        assert "mean outcome" not in text_of(page, "main")
        train(manager, 3, {"a": 2, "d": 2})
        page.until(f"{BUCKETS}[2].includes('2 tasks')")
        page.run("document.querySelector('[data-focus=\"difficulty 3\"]').click()")
        page.until(f"{ROWS}.length === 6")
        page.click(".row .id a")
        page.until("document.querySelector('.message') && document.querySelectorAll('.token').length === 6")
        page.until("document.querySelector('.facts dd')")  # facts are asked for separately
        facts = text_of(page, ".facts")
        assert "difficulty3" in facts
        assert "demonstrationno" in facts
        assert "experience_pool" not in text_of(page, "main")
        page.click(".facts a")  # all histories of the task, of any version
        page.until("document.querySelectorAll('.sibling').length === 6")
        pairs = page.run("return [...document.querySelectorAll('.sibling .pairs')].map((one) => one.textContent)")
        assert sum("policy version 1versions behind 1" in pair for pair in pairs) == 3
        assert sum("policy version 2versions behind 0" in pair for pair in pairs) == 3
        assert sum("drawn 1 time" in pair for pair in pairs) == 1
        page.expected_errors.append("status of 404")
        other = min(set(range(20)) - set(manager.query().ids()))
        page.run("location.hash = `#/trajectory/${arguments[0]}`", str(other))
        page.until("document.querySelector('main .trouble')?.textContent.includes('not in the pool')")


def test_a_bundle_of_a_pool(tmp_path: Path, page: Page) -> None:
    pool(tmp_path / "store", (HOSTILE, "b", "c")).close()
    with files_of(bundled(tmp_path / "store", tmp_path / "out")) as address:
        opened(page, address, "document.querySelector('[data-curve=difficulty] canvas')")
        assert buckets(page) == [("0 successes", "0"), ("1 success", "1"), ("2 successes", "0"), ("3 successes", "1")]
        page.run("document.querySelector('[data-focus=\"difficulty 1\"]').click()")
        page.until(f"{ROWS}.length === 4")
        clicked(page, ".row a[title]", "document.querySelectorAll('.sibling .message').length > 0")
        assert page.run("return document.querySelectorAll('.sibling').length") == 4


def test_a_pool_that_cannot_be_read_is_shown_as_the_store_that_it_is(tmp_path: Path, serve: Serve, page: Page) -> None:
    with closing(BufferStore.open(tmp_path / "odd")) as store:
        store.add_trajectories([build("a"), build("a", tokens=1)])
        store.save({"version": 99}, False)
    opened(page, f"{serve(tmp_path / 'odd')}/#/table", f"{ROWS}.length === 2")
    page.until("document.querySelector('#trouble').textContent.includes('the pool cannot be read')")


def test_a_store_becomes_a_pool_while_the_page_is_open(tmp_path: Path, serve: Serve, page: Page) -> None:
    """Its rollouts are committed, and seen, before the first point."""
    with closing(BufferStore.open(tmp_path)) as store:
        opened(page, f"{serve(tmp_path)}/#/overview", "document.querySelector('.nothing')")
        store.add_trajectories([build("a", tokens=1), build("b", tokens=2)])
        page.until("document.querySelectorAll('[aria-label=Tasks] .task').length === 2")
        train(ExperienceManager(RULES, store=store), 1, {"a": 1})
        page.until("document.querySelectorAll('[aria-label=Pool] .task').length === 1")
