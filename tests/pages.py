"""The code of a page of the documentation, run by itself."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def run_page(project_root: Path, tmp_path: Path, page: str) -> None:
    """Run all Python blocks of a page one after the other in a process of its own, and fail if they do.

    Args:
        project_root: of the checkout.
        tmp_path: where the process works. Its temporary folder is the system's: Ray's sockets need a short path.
        page: below ``docs``.
    """
    code = re.findall(r"^```python\n(.*?)^```$", (project_root / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)
    script = tmp_path / "page.py"
    script.write_text("\n".join(code))
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env={"PYTHONPATH": str(project_root), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
