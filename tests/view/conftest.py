"""Fixtures: a server of the page over a directory, and a browser that shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

pytest.importorskip("polars", reason="needs polars, of the extra 'view'")
pytest.importorskip("uvicorn", reason="needs uvicorn, of the extra 'view'")
pytest.importorskip("starlette", reason="needs starlette, of the extra 'view'")

from tools.browser import NoBrowserError, Page, browser, serving

Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return a function that serves a directory until the test ends."""
    with ExitStack() as stack:
        yield lambda *arguments, **named: stack.enter_context(serving(*arguments, **named))


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start Chromium, once for all tests."""
    with ExitStack() as stack:
        try:
            yield stack.enter_context(browser(tmp_path_factory.mktemp("chromium")))
        except NoBrowserError as error:
            pytest.skip(f"the page was not tested: {error}")


@pytest.fixture
def page(driver: Any) -> Iterator[Page]:
    """Return the browser; at teardown, check for an empty console and no external requests."""
    new_page = Page(driver)
    new_page.console(), new_page.requested()
    yield new_page
    complaints, requested = new_page.console(), new_page.requested()
    driver.get("about:blank")
    assert complaints == []
    inner = ("about:", "chrome:", "chrome-untrusted:", "data:")  # the browser's own pages
    assert [url for url in requested if not url.startswith(("http://127.0.0.1:", *inner))] == []
