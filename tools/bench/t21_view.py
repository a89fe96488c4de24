"""T21: ``trajstore view`` in Chromium: time to the first rows, scrolling, and the effect on a writer.

The server is the command itself, in a process of its own; Chromium is without a window and draws without a GPU. Times
are the page's own: from the start of the navigation until the frame with the thing has been made. Each wait ends after
two minutes with an error that says what did not come.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

import torch

from tools.bench.report import Figure, Options, SkippedError
from tools.bench.t08_open import write_store
from tools.bench.t23_questions import some_facts
from tools.bench.timing import in_child, seconds
from tools.bench.workloads import PROMPT, add_all, agents, opened, rollout
from tools.browser import Command, NoBrowserError, Page, browser
from tools.meanwhile import meanwhile
from trajstore import AgentTrajectory, TrajectoryReplayBuffer
from trajstore.view.page import STATIC

_TOKEN = "[...document.querySelectorAll('.token')].some((one) => one.style.backgroundColor)"
_ROW = "document.querySelectorAll('.row .id a').length > 10"

_WATCH = """
const look = () => {
  let isSeen = false;
  try { isSeen = Boolean(SEEN); } catch { /* there is no body yet */ }
  if (!isSeen) return requestAnimationFrame(look);
  const { port1, port2 } = new MessageChannel();
  port1.onmessage = () => { window.seenAfter = performance.now(); };
  return port2.postMessage(null); // comes when this frame has been made
};
requestAnimationFrame(look);
"""

_SCROLL = """
const [seconds, done] = arguments;
const pane = document.querySelector('.scroller');
const step = Math.max(1, (pane.scrollHeight - pane.clientHeight) / (60 * seconds)); // all of it, at 60 frames a second
const frames = [];
const next = (now) => {
  frames.push(now);
  pane.scrollTop += step;
  if (now - frames[0] < 1000 * seconds) requestAnimationFrame(next);
  else done({ frames, left: pane.scrollHeight - pane.clientHeight - pane.scrollTop });
};
requestAnimationFrame(next);
setTimeout(() => done(null), 1000 * (seconds + 60));
"""


def figures(options: Options) -> Iterator[Figure]:
    """Yield all figures; see the module."""
    size = sum(path.stat().st_size for path in STATIC.rglob("*") if path.is_file())
    yield Figure("T21", "files of the page, all", size / 1000, 300.0, "kB")
    try:
        with browser(options.folder / "profile") as driver:
            for part in (_first_rollout, _first_page, _scrolling, _writer):
                yield from part(options, options.folder / part.__name__, Page(driver))
    except NoBrowserError as error:
        raise SkippedError(str(error)) from None


def _first_rollout(options: Options, path: Path, page: Page) -> Iterator[Figure]:
    """A rollout of 1,000 tokens by its link, from a store of 10,000 that is being written."""
    total = options.count(10_000, 100)
    made = agents(100)
    with opened(path) as writer:
        add_all(writer, made, total, len(made))
        with Command(path) as command, meanwhile(lambda: writer.add_trajectories(made[:8]), 0.05):
            links = [f"{command.address}/#/trajectory/{number * 7 % total}" for number in range(options.repeats)]
            times = [_seen(page, f"{link}?color=old_log_probs&token={PROMPT}", _TOKEN) for link in links]
    name = f"first coloured rollout, one of {total:,} in a store that is written"
    details = {"first_s": times[0]}
    yield Figure("T21", name, median(times), 1.0, "s", details=details)


def _first_page(options: Options, path: Path, page: Page) -> Iterator[Figure]:
    """The table of many trajectories, each time from a server that has just been started, over opening the store."""
    total = options.count(1_000_000, 800)
    write_store(path, total, 100, some_facts)
    times, alone, again = [], [], []
    for _ in range(options.repeats):
        alone.append(in_child(_opening, path))
        with Command(path) as command:
            times.append(_seen(page, f"{command.address}/#/table", _ROW))
            again.append(_seen(page, f"{command.address}/#/table", _ROW))
    details = {"page_s": median(times), "open_s": median(alone), "page_again_s": median(again)}
    name = f"first page of {total:,} trajectories over opening the store"
    yield Figure("T21", name, median(times) / median(alone), 2.0, details=details)


def _scrolling(options: Options, path: Path, page: Page) -> Iterator[Figure]:
    """All tokens of a long rollout scrolled through within ten seconds, in equal steps at each frame."""
    tokens = options.count(100_000, 2000)
    ones = torch.ones(tokens, dtype=torch.int64)
    with opened(path) as writer:
        writer.add_trajectories([rollout(torch.Generator().manual_seed(5), 0, 0, ones)])
    found: list[list[float]] = []
    with Command(path) as command:
        _seen(page, f"{command.address}/#/trajectory/0?show=tokens&color=old_log_probs", _TOKEN)
        for _ in range(max(1, options.repeats // 2)):
            page.run("document.querySelector('.scroller').scrollTop = 0")
            answer = page.driver.execute_async_script(_SCROLL, 10 * min(1.0, options.scale * 10))
            if answer is None or len(answer["frames"]) < 2:
                raise TimeoutError("T21: no frames came while a rollout was scrolled")
            frames = answer["frames"]
            found.append([after - before for before, after in pairwise(frames)])
    rates = [1000 * len(gaps) / sum(gaps) for gaps in found]
    details = {"frame_ms_longest": max(gap for gaps in found for gap in gaps)}
    name = f"frames a second while {tokens:,} tokens are scrolled"
    yield Figure("T21", name, median(rates), 50.0, "1/s", at_least=True, details=details)


def _writer(options: Options, path: Path, page: Page) -> Iterator[Figure]:
    """Rollouts added as fast as they are taken, with the table open in the browser, and with the server stopped.

    It is stopped and goes on by a signal, so that turns are short and what else the machine does meets both. The ratio
    is the median of those of turns that follow each other.
    """
    total = options.count(8_000, 128)
    made = agents(64)
    turns: list[dict[bool, tuple[float, float]]] = []
    with opened(path) as writer:
        _added(writer, made, total)
        with Command(path) as command:
            _seen(page, f"{command.address}/#/table", _ROW)
            for number in range(3 * options.repeats):
                turns.append({})
                for is_watched in (True, False) if number % 2 else (False, True):
                    os.kill(command.process.pid, signal.SIGCONT if is_watched else signal.SIGSTOP)
                    turns[-1][is_watched] = _added(writer, made, total)
                    os.kill(command.process.pid, signal.SIGCONT)
                    writer.evict(writer.trajectory_ids[:-total])  # so that all turns meet the same store
                    writer.flush()
    ratios = [turn[False][0] / turn[True][0] for turn in turns]
    details = {
        "rate_watched": total / median(turn[True][0] for turn in turns),
        "rate_alone": total / median(turn[False][0] for turn in turns),
        "quarters": quantiles(ratios, n=4),
        "by_processor_time": median(turn[False][1] / turn[True][1] for turn in turns),
    }
    name = f"rate of a writer, watched over alone, {total:,} rollouts a turn"
    yield Figure("T21", name, median(ratios), 0.98, at_least=True, details=details)


def _added(writer: TrajectoryReplayBuffer, made: list[AgentTrajectory], total: int) -> tuple[float, float]:
    """Add rollouts; return the seconds until all are durable, by the clock and by this process."""
    clock, used = time.perf_counter(), time.process_time()
    add_all(writer, made, total, len(made))
    return time.perf_counter() - clock, time.process_time() - used


def _seen(page: Page, address: str, what: str) -> float:
    """Load an address and return the seconds until something is seen."""
    script = page.driver.execute_cdp_cmd(
        "Page.addScriptToEvaluateOnNewDocument", {"source": _WATCH.replace("SEEN", what)}
    )
    try:
        page.open(address)
        return float(page.until("window.seenAfter")) / 1000
    finally:
        page.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)


def _opening(path: Path) -> float:
    """Return the seconds of opening a store."""
    return seconds(partial(TrajectoryReplayBuffer.open, path))
