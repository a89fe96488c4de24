"""The page on object storage does what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("s3fs", reason="needs s3fs, of the extra 's3'")
pytest.importorskip("moto.server", reason="needs moto[server]")


def test_the_code_of_the_page_runs(project_root: Path, tmp_path: Path) -> None:
    page = (project_root / "docs" / "howto" / "object-store.md").read_text()
    script = tmp_path / "page.py"
    script.write_text("\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)))
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env={"PYTHONPATH": str(project_root), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
