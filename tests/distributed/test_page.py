"""The page on many nodes does what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")


@pytest.mark.timeout(600)
def test_the_code_of_the_page_runs(project_root: Path, tmp_path: Path) -> None:
    page = (project_root / "docs" / "howto" / "many-nodes.md").read_text()
    script = tmp_path / "page.py"
    script.write_text("\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)))
    done = subprocess.run(  # its temporary folder is the system's: Ray's sockets need a short path
        [sys.executable, script],
        cwd=tmp_path,
        env={"PYTHONPATH": str(project_root), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
