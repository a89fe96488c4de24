"""The code of the page on many nodes runs as documented."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import run_page

pytest.importorskip("ray")


@pytest.mark.timeout(600)
def test_the_code_of_the_page_runs(project_root: Path, tmp_path: Path) -> None:
    run_page(project_root, tmp_path, "howto/many-nodes.md")
