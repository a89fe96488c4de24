"""The code of the page on many nodes runs as documented."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from tests.pages import run_section

ray = pytest.importorskip("ray")


def test_the_code_of_the_page_runs(small_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page starts and stops a cluster; here the tests' cluster stands in for it."""
    started, stopped = mock.Mock(), mock.Mock()
    monkeypatch.setattr(ray, "init", started)
    monkeypatch.setattr(ray, "shutdown", stopped)
    monkeypatch.chdir(tmp_path)
    run_section("ranks.md", "Many nodes with Ray")
    started.assert_called_once_with("local", num_cpus=2, include_dashboard=False)
    stopped.assert_called_once_with()
