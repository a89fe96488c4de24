"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from trajstore import locks

# A run of the tests tries what the last one tried, however fast the machine is; the slow forms search anew each time.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("repeatable")

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "fixtures"


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


@pytest.fixture(autouse=True)
def locks_in_order(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which locks are taken out of order, unless the marker ``locks_unchecked`` says why it cannot."""
    if request.node.get_closest_marker("locks_unchecked") is not None:
        yield
        return
    with locks.checked() as breaches:
        yield
    assert not breaches, "\n\n".join(breaches)
