"""The page on object storage does what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import run_page

pytest.importorskip("s3fs", reason="needs s3fs, of the extra 's3'")
pytest.importorskip("moto.server", reason="needs moto[server]")


def test_the_code_of_the_page_runs(project_root: Path, tmp_path: Path) -> None:
    run_page(project_root, tmp_path, "howto/object-store.md")
