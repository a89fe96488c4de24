"""Pictures of ``trajstore view``, light and dark:  python -m tools.screenshots FOLDER.

Makes small stores, opens each view over them in Chromium, and writes ``view-NAME-light.png`` and ``-dark.png``.
``python -m tools.screenshots docs/images`` makes those of the documentation again. Exit code 1 where a view complains.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from PIL import Image

from tools.browser import NoBrowserError, Page, browser, serving
from tools.screenshots.stores import WRITERS

WIDTH = 1280
COLORS = 255
"""Colours that a picture keeps, at a third of the bytes. Those of small things are among them (maximum coverage)."""

COMPLAINTS = """
const all = [...document.querySelectorAll('.trouble, .refused, main [role=alert]')];
return all.filter((one) => one.checkVisibility()).map((one) => one.textContent).filter(Boolean);
"""


@dataclass(frozen=True)
class View:
    """A view.

    Attributes:
        name: of the picture.
        store: served store.
        address: address within the page.
        drawn: JavaScript expression that is true once the view is drawn.
        height: of the window.
    """

    name: str
    store: str
    address: str
    drawn: str
    height: int = 800


VIEWS = (
    View("overview", "terminal", "overview", "document.querySelectorAll('.curves canvas').length === 4", 1040),
    View(
        "table",
        "terminal",
        f"table?{urlencode({'where': 'turns > 3 and version_high >= 4', 'order': 'response desc'})}",
        "document.querySelectorAll('.row').length > 8",
    ),
    View(
        "rollout",
        "terminal",
        "trajectory/52?color=old_log_probs&token=113",
        "document.querySelector('.token.selected') && document.querySelector('.neighbours a')",
    ),
    View(
        "group",
        "terminal",
        "group?task=undo-commit&version=2&color=old_log_probs",
        "document.querySelectorAll('.sibling .message').length > 8",
    ),
    View(
        "session",
        "sessions",
        "trajectory/3?token=150",
        "document.querySelector('.tree [aria-current]') && document.querySelector('.neighbours a, .neighbours span')",
    ),
    View(
        "episode",
        "pusher",
        "trajectory/9?environment=1&step=20",
        "document.querySelectorAll('[data-drawn]').length > 8",
    ),
)


class ComplaintError(Exception):
    """A view has an error; the message says which view, and what the page says."""


def pictures() -> Iterator[tuple[str, bytes]]:
    """Yield the name and the PNG of each picture.

    Raises:
        ComplaintError: a view has an error.
        NoBrowserError: there is no browser here.
    """
    with tempfile.TemporaryDirectory(prefix="trajstore_pictures_") as folder, contextlib.chdir(folder):
        runs = Path("runs")
        runs.mkdir()
        with browser(Path(folder, "profile")) as driver, contextlib.ExitStack() as stack:
            addresses = {}
            for store, write in WRITERS.items():
                write(runs / store)
                addresses[store] = stack.enter_context(serving(runs / store))
            page = Page(driver)
            for view in VIEWS:
                size = {"width": WIDTH, "height": view.height, "deviceScaleFactor": 1, "mobile": False}
                driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
                for theme in ("light", "dark"):
                    yield f"view-{view.name}-{theme}.png", _picture(page, view, addresses[view.store], theme)


def _picture(page: Page, view: View, address: str, theme: str) -> bytes:
    feature = {"name": "prefers-color-scheme", "value": theme}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    page.open(f"{address}/#/{view.address}")
    try:
        page.until("document.querySelector('main[aria-busy=false]') && document.querySelector('#live[data-live]')")
        page.until(view.drawn)
    except AssertionError as error:
        raise ComplaintError(f"{view.name}, {theme}: {error}") from None
    page.driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    said = [*page.run(COMPLAINTS), *page.console()]
    if said:
        raise ComplaintError(f"{view.name}, {theme}: {'; '.join(said)}")
    data = page.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"]
    return _small(base64.b64decode(data))


def _small(png: bytes) -> bytes:
    picture = (
        Image.open(io.BytesIO(png))
        .convert("RGB")
        .quantize(COLORS, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
    )
    out = io.BytesIO()
    picture.save(out, "png", optimize=True)
    return out.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pictures; return 1 where a view has an error, 2 where there is no browser."""
    parser = argparse.ArgumentParser(prog="python -m tools.screenshots", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the pictures are written")
    folder: Path = parser.parse_args(arguments).folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for name, png in pictures():
            (folder / name).write_bytes(png)
            sys.stdout.write(f"{name}  {len(png) / 1000:.0f} kB\n")
    except (ComplaintError, NoBrowserError) as error:
        sys.stderr.write(f"{error}\n")
        return 1 if isinstance(error, ComplaintError) else 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
