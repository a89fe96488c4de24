"""Fixtures for all tests."""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from trajstore.core.base import locks

# A run of the tests tries what the last one tried, however fast the machine is; the slow forms search anew each time.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("stateful", settings.get_profile("repeatable"), suppress_health_check=list(HealthCheck))
settings.load_profile("repeatable")

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "fixtures"


@pytest.fixture(autouse=True, scope="session")
def nothing_waits_for_the_disk() -> Iterator[None]:
    """Nobody pulls the plug: in this process, syncing only looks whether there is such a descriptor; children do it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, os.fstat)
        yield


@pytest.fixture(scope="session")
def project_root() -> Path:
    """Folder of ``pyproject.toml``."""
    return ROOT


@pytest.fixture(scope="session")
def shared_fixtures() -> Path:
    """Directories that RLinf and AgentEvolver wrote; they do not come with the project."""
    if not SHARED.is_dir():
        pytest.skip("needs ../shared/fixtures, directories written by RLinf and AgentEvolver")
    return SHARED


@pytest.fixture(scope="session")
def s3_options() -> Iterator[dict[str, Any]]:
    """Start an S3 server on the loopback interface; return the storage options that lead to it."""
    pytest.importorskip("s3fs", reason="needs s3fs, of the extra 's3'")
    pytest.importorskip("moto.server", reason="needs moto[server]")
    from tools.campaigns import s3_server

    with s3_server() as options:
        yield options


@pytest.fixture
def s3_url(s3_options: dict[str, Any]) -> str:
    """Return the URL of a folder in a new bucket."""
    import s3fs

    bucket = f"bucket-{uuid.uuid4()}"
    s3fs.S3FileSystem(**s3_options).mkdir(bucket)
    return f"s3://{bucket}/runs/run1"


@pytest.fixture
def memory_url() -> str:
    """Return the URL of a folder in memory that no other test has."""
    return f"memory://bucket-{uuid.uuid4()}/run1"


@pytest.fixture
def small_ray() -> None:
    """Start Ray with two processors unless it runs; it goes on for the next test that needs no more of it."""
    ray = pytest.importorskip("ray")
    if not ray.is_initialized():
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)


@pytest.fixture(autouse=True)
def locks_in_order(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which locks are taken out of order, unless the marker ``locks_unchecked`` says why it cannot."""
    if request.node.get_closest_marker("locks_unchecked") is not None:
        yield
        return
    with locks.checked() as breaches:
        yield
    assert not breaches, "\n\n".join(breaches)


TESTS = ROOT / "tests"
STARTS = {
    "verl": (TESTS / "verl_plugin", TESTS / "trainer_hooks" / "verl", TESTS / "trainer_hooks" / "test_dataproto.py"),
    "ray": tuple(TESTS / "distributed" / f"test_{name}.py" for name in ("dataset", "page", "ray")),
}
"""What files and folders of tests start, by marker; importing them alone takes seconds."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file whose tests ``-m`` leaves out."""
    chosen = config.getoption("markexpr")
    return any(f"not {mark}" in chosen and collection_path in paths for mark, paths in STARTS.items()) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by what it starts: its file, its folder or a fixture shows that."""
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        where = {item.path, *item.path.parents}
        marks = [mark for mark, paths in STARTS.items() if where & set(paths)]
        if marks:
            item.add_marker(marks[0])
        elif "small_ray" in fixtures:
            item.add_marker("ray")
        elif "driver" in fixtures:
            item.add_marker("browser")


def pytest_collection_finish() -> None:
    """Let what was imported and collected stay for good: else every collection of garbage looks through all of it."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Tell of threads for which the interpreter would wait for ever, and end it."""
    gc.unfreeze()  # else libraries that count what they gave out call it leaked
    faulthandler.dump_traceback_later(300, exit=True, file=sys.__stderr__)
