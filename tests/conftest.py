"""Fixtures for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

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
