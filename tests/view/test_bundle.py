"""Bundles in a real Chromium, over a static file server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.stores import files_of as files_below
from tests.stores import stored, writer_to
from tests.support.witness import witness
from tests.view.rollouts import clicked, opened, rollout, session_in, text_of
from tests.view.test_page import HOSTILE, ROWS
from tools.browser import Page
from tools.crash.forked import forking
from trajstore import Reward, TrajectoryReplayBuffer, annotate
from trajstore.cli import main
from trajstore.view import bundle
from trajstore.view.living import Living

Serve = Callable[[Path], str]


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder's files without logging."""

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def files_of(folder: Path) -> Iterator[str]:
    """Serve a folder from a thread, below a path like publishers do; yield the address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder.parent))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/{folder.name}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def serve_files() -> Iterator[Serve]:
    """Return a function that serves a folder until the test ends."""
    with ExitStack() as stack:
        yield lambda folder: stack.enter_context(files_of(folder))


def bundled(source: Path, target: Path, *options: str) -> Path:
    """Write a bundle with the command line and return its folder."""
    assert main(["view", str(source), "--bundle", str(target), *options]) == 0
    return target


def shown(page: Page) -> list[str]:
    """Return the ids in the table."""
    rows: list[str] = page.run(f"return {ROWS}")
    return rows


def test_a_bundle_shows_what_the_server_shows(tmp_path: Path, serve_files: Serve, page: Page) -> None:
    with writer_to(tmp_path / "store") as writer:
        writer.add_trajectories([rollout(number) for number in range(250)])
        writer.add_trajectories([rollout(250, reward=None)])
        writer.flush()
        expected = writer.query().where("task != 'task-4'").order_by("outcome desc", "trajectory_id").ids().tolist()
    address = serve_files(bundled(tmp_path / "store", tmp_path / "out", "--where", "task != 'task-4'"))
    shutil.rmtree(tmp_path / "store")  # the bundle does not need it
    opened(page, address, "document.querySelectorAll('.curves canvas').length === 4")
    assert text_of(page, ".figures dd") == str(len(expected))
    assert f"{len(expected)} trajectories where task != 'task-4'" in text_of(page, "#live")
    assert "trajstore view" in text_of(page, ".question")
    assert page.run("return document.querySelector('#filter')") is None
    clicked(page, ".lacking a", f"{ROWS}.join() === '250'")
    page.click(".question a")  # clears the filter
    page.until(
        f"{ROWS}[0] === '250' && document.querySelector('.total').textContent.startsWith('{len(expected)} traject')"
    )
    page.run("location.hash = '#/table?order=outcome%20desc'")
    page.until(f"{ROWS}[0] === '{expected[0]}'")
    assert shown(page) == [str(number) for number in expected[: len(shown(page))]]
    page.keys(".grid", "\ue010")  # End
    page.until(f"{ROWS}.at(-1) === '{expected[-1]}'")
    clicked(page, ".heads > div:nth-child(1) button", f"{ROWS}[0] === '250'")
    clicked(page, ".heads > div:nth-child(1) button", f"{ROWS}[0] === '0'")
    page.run("location.hash = '#/overview?over=version'")
    page.until("document.querySelectorAll('.curves canvas').length === 4")
    page.click_at("[data-curve=count] .u-over", 3, 20)
    page.until("document.querySelector('.question')?.textContent.includes('version_high = 0')")
    page.until("document.querySelector('.total').textContent.startsWith('8 trajectories')")
    page.run("location.hash = '#/table?where=outcome%20%3E%200'")
    page.until("document.querySelector('.refused').textContent.includes('answers no conditions')")


def test_links_lead_to_a_rollout_and_to_its_group(tmp_path: Path, serve_files: Serve, page: Page) -> None:
    with writer_to(tmp_path / "store") as writer:
        writer.add_trajectories([rollout(number) for number in range(28)])
        annotate(writer, 5, {"judge": 0.25, "outcome": -3.5}, who="anna")
    address = serve_files(bundled(tmp_path / "store", tmp_path / "out"))
    page.open(f"{address}#/trajectory/5?color=old_log_probs&token=6")
    page.until("document.querySelector('.late')?.textContent.includes('anna')")
    page.until("document.querySelector('.facts .outcome')?.textContent === '-3.5'")
    page.until("document.querySelector('#token').textContent.includes('token 6')")
    assert "log-prob (trainer) -0.2857143" in text_of(page, "#token")
    colors = page.run("return [...document.querySelectorAll('.token')].map((one) => one.style.backgroundColor)")
    assert len(set(colors[8:])) > 8
    assert page.run("return document.querySelectorAll('.message').length") == 3
    clicked(page, ".facts a", "document.querySelectorAll('.sibling .message').length === 4")
    assert text_of(page, ".versions [aria-current]") == "0"
    page.open(f"{address}#/trajectory/4")
    page.until("document.querySelector('main .message') && document.querySelector('.late').hidden")
    page.open(f"{address}#/group?task=task-1")
    page.until("document.querySelector('.versions [aria-current]')?.textContent === '3'")
    page.until("document.querySelectorAll('.sibling .message').length === 4")
    assert "advantage in group -0.866" in text_of(page, ".sibling")
    page.open(f"{address}#/trajectory/99")
    page.until("document.querySelector('main .trouble').textContent.includes('not in this bundle')")


def test_a_session_has_the_calls_of_its_bundled_paths(tmp_path: Path, serve_files: Serve, page: Page) -> None:
    session_in(tmp_path / "store")
    address = serve_files(bundled(tmp_path / "store", tmp_path / "out", "--where", "session_path < 2"))
    opened(page, f"{address}#/trajectory/2", "document.querySelectorAll('.tree a').length === 4")
    assert "2 of its 4 paths are not shown" in text_of(page, ".of-session details")
    clicked(page, ".of-session p a", f"{ROWS}.join() === '1,2'")


def test_nothing_that_was_recorded_becomes_a_path_or_markup(tmp_path: Path, serve_files: Serve, page: Page) -> None:
    climbing = "../../../out of it/\x00"
    block = witness(7)
    hostile = rollout(0, task_id=HOSTILE, reward=Reward(outcome=1.0, metadata={climbing: 0.5}))
    stored(tmp_path / "store", [hostile, rollout(1, task_id=climbing, rollout_id=climbing), block])
    before = {path.name for path in tmp_path.iterdir()}
    target = bundled(tmp_path / "store", tmp_path / "<img src=x> #?%2e")
    assert {path.name for path in tmp_path.iterdir()} == before | {target.name}
    for path in (target / "data").rglob("*"):
        assert set(path.name) <= set("0123456789-.bin")
    with files_of(target) as address:
        address = address.replace(target.name, "%3Cimg%20src=x%3E%20%23%3F%252e")
        opened(page, f"{address}#/table", f"{ROWS}.length === 3")
        opened(page, f"{address}#/overview", "document.querySelectorAll('.task').length === 2")
        page.run("[...document.querySelectorAll('.task')].find((one) => one.textContent.includes('script')).click()")
        page.until("document.querySelectorAll('.sibling .message').length > 0")
        assert "<script>window.stolen = 1</script>" in text_of(page, "main")
        page.open(f"{address}#/trajectory/..%2F..%2Findex.html")
        page.until("document.querySelector('main .trouble').textContent.includes('not in this bundle')")
        page.expected_errors.append("Content Security Policy")
        page.run(
            "const late = document.createElement('script'); late.textContent = 'window.stolen = 1';"
            "document.body.append(late)"
        )
        assert page.run("return window.stolen") is None


def test_blocks_have_their_pictures(
    tmp_path: Path, serve_files: Serve, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, other = witness(7), witness(10)
    image = block.curr_obs["image"]
    monkeypatch.setattr(bundle, "_PART_BYTES", 2 * image[0, 0].numel())
    stored(tmp_path / "store", [block, other])
    address = serve_files(bundled(tmp_path / "store", tmp_path / "out"))
    page.expected_errors.append("willReadFrequently")  # this test looks at pixels
    pixel = "document.querySelector('.large').getContext('2d').getImageData(2, 1, 1, 1).data.slice(0, 3).join()"
    for number, made in enumerate((block, other)):
        page.open(f"{address}#/trajectory/{number}?step=2")  # of the second file
        color = ",".join(str(value) for value in made.curr_obs["image"][2, 0, 1, 2].tolist())
        page.until(f"{pixel} === arguments[0]", color)


def test_damage_is_said_and_hides_nothing_else(
    tmp_path: Path, serve_files: Serve, page: Page, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(tmp_path / "store", [rollout(number) for number in range(3)], each=True)
    shard = tmp_path / "store" / "shards" / "shard_00000001.pt"
    with closing(Living(tmp_path / "store")) as living:
        shard.write_bytes(shard.read_bytes()[:1000])
        done = bundle.write_bundle(living, tmp_path / "out")
    assert list(done.problems) == ["1"], "it came while the bundle was written"
    assert main(["view", str(tmp_path / "store"), "--bundle", str(tmp_path / "later")]) == 1
    message = capsys.readouterr().out
    assert "A part of the store cannot be shown" in message
    assert "later: 2 trajectories" in message
    opened(page, f"{serve_files(tmp_path / 'later')}#/table", f"{ROWS}.join() === '2,0'")
    page.until("document.querySelector('#trouble').textContent.includes('A part of the store cannot be shown')")
    address = serve_files(tmp_path / "out")
    opened(page, f"{address}#/table", f"{ROWS}.length === 3")
    page.until(
        "document.querySelector('#trouble').textContent.startsWith('1 trajectory unreadable when this was written: 1')"
    )
    for at, selector in (("1", ".trouble[role=alert]"), ("0", ".message"), ("2", ".message")):
        page.run("location.hash = `#/trajectory/${arguments[0]}`", at)
        page.until("document.querySelector(`main ${arguments[0]}`)", selector)
    (tmp_path / "out" / "data" / "2.bin").unlink()  # an incomplete copy
    page.expected_errors.append("status of 404")
    page.open(f"{address}#/trajectory/2")
    page.until("document.querySelector('main .trouble').textContent.includes('the folder is incomplete')")


def test_a_run_directory_and_an_empty_query(tmp_path: Path, serve_files: Serve, page: Page) -> None:
    for rank in range(2):
        stored(tmp_path / "run" / f"rank_{rank}", [rollout(number) for number in range(4)])
    address = serve_files(bundled(tmp_path / "run", tmp_path / "out"))
    page.open(f"{address}#/table?order=trajectory_id")
    with TrajectoryReplayBuffer.open(tmp_path / "run") as reader:
        assert len(reader) == 8
    page.until(f"{ROWS}.join() === '0/0,0/1,0/2,0/3,1/0,1/1,1/2,1/3'")
    page.run("document.querySelectorAll('.row .id a')[6].click()")
    page.until("location.hash.startsWith('#/trajectory/1/2?') && document.querySelector('.message.assistant')")
    assert "answer 2" in text_of(page, ".message.assistant")
    address = serve_files(bundled(tmp_path / "run", tmp_path / "none", "--where", "outcome > 7"))
    for place in ("overview", "table", "group?task=task-0"):
        opened(page, f"{address}#/{place}", "document.querySelector('main[aria-busy=false] .nothing')")


def test_only_a_bundle_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored(tmp_path / "store", [rollout(number) for number in range(3)])
    store, target = tmp_path / "store", tmp_path / "out"
    target.mkdir()
    bundled(store, target)
    assert stat.S_IMODE(target.stat().st_mode) == stat.S_IMODE((tmp_path / "store").stat().st_mode)
    bundled(store, target, "--where", "trajectory_id = 2")
    assert [row[0] for row in json.loads((target / "bundle.json").read_bytes())["rows"]] == ["2"]
    assert not (target / "data" / "1.bin").exists()
    (target / "notes.md").write_text("mine")
    file = tmp_path / "file"
    file.write_text("mine")
    capsys.readouterr()
    for refused in (target, store, file):
        before = sorted(refused.rglob("*"))
        assert main(["view", str(store), "--bundle", str(refused)]) == 2
        assert "has files that no bundle has" in capsys.readouterr().err
        assert sorted(refused.rglob("*")) == before
    other = tmp_path / "other"
    other.mkdir()
    (other / "bundle.json").write_text("{}")
    assert main(["view", str(store), "--bundle", str(other)]) == 2
    assert (other / "bundle.json").read_text() == "{}"
    capsys.readouterr()
    assert main(["view", str(store), "--bundle", str(store / "page")]) == 2
    assert f"{store / 'page'} is within {store}, or contains it" in capsys.readouterr().err
    assert not (store / "page").exists()


@pytest.mark.parametrize(("limit", "most"), [("MOST", 3), ("MOST_BYTES", 250_000)])
def test_too_much_is_refused_and_the_remedy_named(
    tmp_path: Path, limit: str, most: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(tmp_path / "store", [rollout(number, 4000, metadata={}) for number in range(4)])
    monkeypatch.setattr(bundle, limit, most)
    assert main(["view", str(tmp_path / "store"), "--bundle", str(tmp_path / "out")]) == 2
    assert "--where" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["store"]


def write_until_killed(store: Path, target: Path, by: signal.Signals) -> None:
    def progress(done: int, total: int) -> None:
        if done == 2:
            os.kill(os.getpid(), by)

    os.close(2)  # hides Python's traceback of the interrupt
    bundle.write_bundle(Living(store), target, progress=progress)


def test_a_kill_leaves_the_earlier_bundle_whole(tmp_path: Path) -> None:
    stored(tmp_path / "store", [rollout(number) for number in range(3)])
    target = bundled(tmp_path / "store", tmp_path / "out")
    before = files_below(target)
    for by in (signal.SIGKILL, signal.SIGINT):
        killed = forking().Process(target=write_until_killed, args=(tmp_path / "store", target, by))
        killed.start()
        killed.join()
        assert killed.exitcode != 0
        assert files_below(target) == before
    bundled(tmp_path / "store", target)
    assert sorted(os.listdir(tmp_path)) == ["out", "store"]


def test_a_bundle_is_of_one_state_while_others_write(tmp_path: Path) -> None:
    with writer_to(tmp_path / "store") as writer:
        writer.add_trajectories([rollout(number) for number in range(4)])
        writer.flush()

        def meanwhile(done: int, total: int) -> None:
            if done == 1:
                writer.evict([2])
                writer.add_trajectories([rollout(9)])
                writer.flush()

        with closing(Living(tmp_path / "store")) as living:
            done = bundle.write_bundle(living, tmp_path / "out", progress=meanwhile)
    assert (done.trajectories, done.problems) == (4, {})
    assert len(list((tmp_path / "out" / "data").glob("*.bin"))) == 4
