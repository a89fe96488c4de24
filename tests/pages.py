"""What tests read in the documentation: the code of a page, run by itself, and the names of figures."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

FIGURES = Path(__file__).parent.parent / "docs" / "howto" / "replay_figures.md"


def blocks(text: str, language: str) -> list[str]:
    """Return the code of a language in the text of a page, a text for each block."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run_page(project_root: Path, tmp_path: Path, page: str) -> None:
    """Run all Python blocks of a page one after the other in a process of its own, and fail if they do.

    Args:
        project_root: of the checkout.
        tmp_path: where the process works. Its temporary folder is the system's: Ray's sockets need a short path.
        page: below ``docs``.
    """
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks((project_root / "docs" / page).read_text(), "python")))
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env={"PYTHONPATH": str(project_root), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def explained_figures() -> set[str]:
    """Return the names in code in the tables of the page of figures."""
    return set(
        re.findall(
            r"`([^`\s]+)`",
            FIGURES.read_text().partition("\n## The figures\n")[2].partition("\n## AgentEvolver's names\n")[0],
        )
    )


def unexplained(names: Iterable[str]) -> set[str]:
    """Return those of some figures of replay and recording that the page does not have."""
    wanted = (re.sub(r"/\d+$", "/<n>", name.removeprefix("experience_replay/")) for name in names)
    explained = explained_figures()
    return {name for name in wanted if name not in explained and name.removeprefix("refused/") not in explained}
