"""Fixtures for all tests."""

from __future__ import annotations

import faulthandler
import gc
import os
import re
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import rays
from tests.support.lock_order import checked

# Deterministic examples without deadlines; the slow forms search anew on each run.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("stateful", settings.get_profile("repeatable"), suppress_health_check=list(HealthCheck))
settings.load_profile("repeatable")

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "fixtures"


@pytest.fixture(autouse=True, scope="session")
def nothing_waits_for_the_disk() -> Iterator[None]:
    """Replace syncs in this process by a check of the descriptor; child processes do sync."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, os.fstat)
        yield


@pytest.fixture(scope="session")
def project_root() -> Path:
    """Return the folder of ``pyproject.toml``."""
    return ROOT


@pytest.fixture(scope="session")
def shared_fixtures() -> Path:
    """Return directories written by RLinf and AgentEvolver; not part of the project."""
    if not SHARED.is_dir():
        pytest.skip("needs ../shared/fixtures, directories written by RLinf and AgentEvolver")
    return SHARED


@pytest.fixture(scope="session")
def s3_options() -> Iterator[dict[str, Any]]:
    """Start an S3 server on loopback; return its storage options."""
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
    """Return the URL of a private in-memory folder."""
    return f"memory://bucket-{uuid.uuid4()}/run1"


@pytest.fixture
def small_ray() -> Any:
    """Return the Ray cluster that all tests of this process share."""
    pytest.importorskip("ray")
    return rays.running(rays.cluster)


@pytest.fixture(autouse=True)
def locks_in_order(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that takes locks out of order, unless it has the marker ``locks_unchecked``."""
    if request.node.get_closest_marker("locks_unchecked") is not None:
        yield
        return
    with checked() as breaches:
        yield
    assert not breaches, "\n\n".join(breaches)


TESTS = ROOT / "tests"
STARTS = {
    "verl": (
        TESTS / "verl_plugin",
        TESTS / "trainer_hooks" / "verl",
        TESTS / "examples" / "test_agentevolver.py",
        TESTS / "trainer_hooks" / "test_dataproto.py",
    ),
    "ray": (*(TESTS / "distributed" / f"test_{name}.py" for name in ("page", "ray")),),
}
"""Test files and folders by the marker of the services they start; importing these takes seconds."""
HOLDS = {**STARTS, "browser": (TESTS / "view",)}
"""All test files and folders with tests of a marker."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the import of files whose tests ``-m`` excludes."""
    chosen = config.getoption("markexpr")
    if any(f"not {mark}" in chosen and collection_path in paths for mark, paths in STARTS.items()):
        return True
    wanted = [paths for mark, paths in HOLDS.items() if re.match(rf"{mark}( and |$)", chosen)]
    if wanted and collection_path.suffix == ".py":
        return not {collection_path, *collection_path.parents} & set(wanted[0]) or None
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by the services it starts, found by file, folder or fixture."""
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
    """Freeze imported and collected objects, so that garbage collections skip them."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Report threads that would block interpreter exit for ever, and exit."""
    gc.unfreeze()  # otherwise some libraries report leaked objects
    faulthandler.dump_traceback_later(300, exit=True, file=sys.__stderr__)
