"""The page of ``trajstore view`` in a real browser: what tests, pictures and benchmarks of it are made with."""

from __future__ import annotations

import json
import select
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from trajstore.view.living import Living
from trajstore.view.server import listening, server_of

PATIENCE = 600
"""Seconds that a loaded machine may take."""

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)


class NoBrowserError(Exception):
    """There is no browser here; the message says what is needed."""


class NoServerError(Exception):
    """The command has printed no address; the message says what it has said instead."""


class Command:
    """``trajstore view`` in a process of its own, ended when the context is left, whatever happens within.

    Args:
        arguments: of the command, but for the port.

    Attributes:
        process: of the command.
        address: what it has printed.

    Raises:
        NoServerError: it has printed no address in time.
    """

    def __init__(self, *arguments: object) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the process
        command = [sys.executable, "-m", "trajstore", "view", *map(str, arguments), "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._errors, text=True)
        said = self.process.stdout
        ready = said is not None and select.select([said], [], [], PATIENCE)[0]
        self.address = said.readline().strip().rstrip("/") if said and ready else ""
        if not self.address.startswith("http"):
            why = self.end() or "it says nothing"
            raise NoServerError(f"trajstore view printed no address within {PATIENCE} s: {why}")

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> str:
        """End it, kill it if it does not end; return what it wrote to standard error."""
        if self._errors.closed:
            return ""
        self.process.terminate()
        try:
            self.process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
        with self._errors:
            self._errors.seek(0)
            return self._errors.read()


@contextmanager
def serving(path: Path, token: str | None = None, *, pin: str | None = None) -> Iterator[str]:
    """Serve a directory from a thread; yield the address."""
    with listening("127.0.0.1", 0) as (listener, _, address), closing(Living(path, pin=pin)) as living:
        server = server_of(living, token)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield address.removesuffix("/")
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def browser(profile: Path) -> Iterator[Any]:
    """Start Chromium without a window, and end it.

    Args:
        profile: empty folder for what the browser keeps.

    Raises:
        NoBrowserError: selenium, chromium or chromedriver is missing.
    """
    chromium, driving = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driving is None:
        raise NoBrowserError("needs Debian's packages chromium and chromium-driver")
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ModuleNotFoundError as error:
        raise NoBrowserError("needs selenium") from error

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*_FLAGS, f"--user-data-dir={profile}", "--window-size=1280,800"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(driving))
    try:
        driver.set_script_timeout(PATIENCE)
        driver.set_page_load_timeout(PATIENCE)
        yield driver
    finally:
        driver.quit()


class Page:
    """A page in a real browser."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.expected_errors: list[str] = []
        """Parts of lines on the console that the test brings about on purpose."""

    def open(self, address: str) -> None:
        """Load an address anew, also where only what is behind # is another."""
        self.driver.get("about:blank")
        self.driver.get(address)

    def run(self, script: str, *arguments: Any) -> Any:
        """Return what a function body of JavaScript returns."""
        return self.driver.execute_script(script, *arguments)

    def until(self, script: str, *arguments: Any) -> Any:
        """Wait until an expression of JavaScript is true, and return its value."""
        from selenium.common.exceptions import TimeoutException
        from selenium.webdriver.support.ui import WebDriverWait

        body = f"try {{ return {script} }} catch (error) {{ return null }}"
        try:
            return WebDriverWait(self.driver, PATIENCE, 0.05).until(lambda _: self.run(body, *arguments))
        except TimeoutException:
            shown = self.run("return document.body.innerText")[:2000]
            raise AssertionError(f"never true: {script}; the page says: {shown}; {self.console()}") from None

    def keys(self, selector: str, *keys: str) -> None:
        """Type into the element that a selector finds."""
        self._act(selector, lambda element: element.send_keys(*keys))

    def click(self, selector: str) -> None:
        """Click on the element that a selector finds."""
        self._act(selector, lambda element: element.click())

    def _act(self, selector: str, act: Callable[[Any], None]) -> None:
        """Act on an element; again if the page replaced, covered or moved it after it was found."""
        from selenium.common.exceptions import (
            ElementClickInterceptedException,
            ElementNotInteractableException,
            StaleElementReferenceException,
        )
        from selenium.webdriver.common.by import By
        from selenium.webdriver.support.ui import WebDriverWait

        def acted(driver: Any) -> bool:
            act(driver.find_element(By.CSS_SELECTOR, selector))
            return True

        moved = [StaleElementReferenceException, ElementClickInterceptedException, ElementNotInteractableException]
        WebDriverWait(self.driver, PATIENCE, 0.05, moved).until(acted, selector)

    def click_at(self, selector: str, right: int, down: int) -> None:
        """Click within the element that a selector finds, some pixels from its upper left corner."""
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.by import By

        element = self.driver.find_element(By.CSS_SELECTOR, selector)
        self.driver.execute_script("arguments[0].scrollIntoView()", element)  # offsets refer to the visible part
        from_center = right - element.size["width"] // 2, down - element.size["height"] // 2
        ActionChains(self.driver).move_to_element_with_offset(element, *from_center).pause(0.1).click().perform()

    def console(self) -> list[str]:
        """Return what the browser has complained of since the last call, and is not expected."""
        lines = [entry["message"] for entry in self.driver.get_log("browser")]
        return [line for line in lines if not any(part in line for part in self.expected_errors)]

    def requested(self) -> list[str]:
        """Return the addresses that were asked for since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
