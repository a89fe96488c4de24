"""Pictures of ``trajstore view``, light and dark:  python -m tools.screenshots FOLDER.

Makes small stores, opens each view over them in Chromium, and writes ``view-NAME-light.png`` and ``-dark.png``.
``python -m tools.screenshots docs/images`` makes those of the documentation again. ``--all`` adds the other views, and
each view on a narrow screen (``view-NAME-light-400.png``). Exit code 1 where a view complains.
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

WIDE, NARROW = 1280, 400
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
        damaged: whether the page is expected to report an error.
        who: author of values given in the page; None if the page is read-only.
        other: store to compare.
    """

    name: str
    store: str
    address: str
    drawn: str
    height: int = 800
    damaged: bool = False
    who: str | None = None
    other: str | None = None

    @property
    def served(self) -> tuple[str, str | None, str | None]:
        """Arguments of its server."""
        return self.store, self.who, self.other


_CURVES = "document.querySelectorAll('.curves:not(section *) canvas').length"

VIEWS = (
    View("overview", "terminal", "overview", f"{_CURVES} === 5", 1280),
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
    View(
        "pool",
        "experience_pool",
        "overview",
        f"{_CURVES} === 4 && document.querySelector('[data-curve=difficulty] canvas')",
        1380,
    ),
)

_COMPARED = "document.querySelector('[data-curve=log_prob] [role=slider]')?.ariaValueText.includes('runs/slower -')"
_FACTS = "document.querySelector('.neighbours a') && document.querySelector('.facts dd')"
_PRESSED = """document.querySelector('dialog') ||
void document.body.dispatchEvent(new KeyboardEvent('keydown', { key: '?', bubbles: true }))"""
_OPENED = "document.querySelector('.row') && (document.querySelector('.late details').open = true)"
_READ = "document.querySelectorAll('.message').length"
OTHER_VIEWS = tuple(
    View(*view, **more)
    for *view, more in (
        ("compare", "terminal", "overview", _COMPARED, {"other": "slower"}),
        ("conversation", "terminal", "trajectory/52?where=turns+%3E+3&order=response+desc", _FACTS, {}),
        ("keys", "terminal", "table", _PRESSED, {}),
        ("mask", "terminal", "trajectory/52?color=loss_mask&show=tokens", "document.querySelector('.token')", {}),
        ("group-all", "terminal", "group?task=undo-commit&version=all", f"{_READ} > 8", {}),
        ("late", "noted", "trajectory/3", "document.querySelector('.give') && " + _READ, {"who": "anna"}),
        ("give-all", "noted", "table", _OPENED, {"who": "anna"}),
        ("blocks", "pusher", "overview", "document.querySelector('[data-curve=reward] canvas')", {}),
        ("blocks-table", "pusher", "table", "document.querySelectorAll('.row').length > 8", {}),
        ("open-sessions", "sessions", "overview", "document.querySelector('.open tbody tr')", {}),
        ("beside", "pusher", "beside/9?other=3&step=20", "document.querySelectorAll('[data-drawn]').length === 24", {}),
        ("pool-group", "experience_pool", "group?task=undo-commit", _READ, {}),
        ("damaged", "damaged", "trajectory/3", "document.querySelector('#trouble').textContent", {"damaged": True}),
        ("damaged-overview", "damaged", "overview", f"{_CURVES} === 5", {"damaged": True}),
        (
            "refused",
            "terminal",
            "table?where=taks%20%3D%201",
            "document.querySelector('.refused').textContent",
            {"damaged": True},
        ),
        ("empty", "empty", "overview", "document.querySelector('.nothing')", {}),
    )
)


class ComplaintError(Exception):
    """A view has an error; the message says which view, and what the page says."""


def pictures(*, every: bool = False) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the PNG of each picture.

    Args:
        every: all views, also on a narrow screen; else those of the documentation.

    Raises:
        ComplaintError: a view has an error.
        NoBrowserError: there is no browser here.
    """
    with tempfile.TemporaryDirectory(prefix="trajstore_pictures_") as folder, contextlib.chdir(folder):
        runs = Path("runs")
        runs.mkdir()
        profile = Path(folder, "profile")
        views = [*VIEWS, *(OTHER_VIEWS if every else ())]
        with browser(profile) as driver, contextlib.ExitStack() as stack:
            for store in {store for view in views for store in (view.store, view.other) if store is not None}:
                WRITERS[store](runs / store)
            addresses = {
                served: stack.enter_context(
                    serving(runs / store, who=who, compare=None if other is None else runs / other)
                )
                for served in {view.served for view in views}
                for store, who, other in (served,)
            }
            page = Page(driver)
            for view in views:
                for width in (WIDE, NARROW) if every else (WIDE,):
                    size = {"width": width, "height": view.height, "deviceScaleFactor": 1, "mobile": width == NARROW}
                    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
                    for theme in ("light", "dark"):
                        name = f"view-{view.name}-{theme}{'' if width == WIDE else f'-{width}'}.png"
                        yield name, _picture(page, view, addresses[view.served], theme)


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
    if said and not view.damaged:
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
    parser.add_argument("--all", action="store_true", help="all views, also on a narrow screen")
    options = parser.parse_args(arguments)
    folder: Path = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for name, png in pictures(every=options.all):
            (folder / name).write_bytes(png)
            sys.stdout.write(f"{name}  {len(png) / 1000:.0f} kB\n")
    except (ComplaintError, NoBrowserError) as error:
        sys.stderr.write(f"{error}\n")
        return 1 if isinstance(error, ComplaintError) else 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
