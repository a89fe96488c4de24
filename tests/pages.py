"""Reads documentation for tests: runs a page's code, and lists the names of figures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

FIGURES = Path(__file__).parent.parent / "docs" / "howto" / "replay_figures.md"


def blocks(text: str, language: str) -> list[str]:
    """Return a page's code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def bytecode() -> dict[str, str]:
    """Return the environment variable of the folder of bytecode, if it is set; without it, a process compiles all."""
    name = "PYTHONPYCACHEPREFIX"
    return {name: os.environ[name]} if name in os.environ else {}


def run_page(project_root: Path, tmp_path: Path, page: str) -> None:
    """Run all Python blocks of a page in order in a separate process; fail if they fail.

    Args:
        project_root: of the checkout.
        tmp_path: working folder. The temporary folder stays the system's, as Ray's sockets need a short path.
        page: below ``docs``.
    """
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks((project_root / "docs" / page).read_text(), "python")))
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env={"PYTHONPATH": str(project_root), "PATH": "", **bytecode()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def explained_figures() -> set[str]:
    """Return the figure names in the tables of the figures page."""
    return set(
        re.findall(
            r"`([^`\s]+)`",
            FIGURES.read_text().partition("\n## The figures\n")[2].partition("\n## AgentEvolver's names\n")[0],
        )
    )


def unexplained(names: Iterable[str]) -> set[str]:
    """Return the replay and recording figures that the page lacks."""
    wanted = (re.sub(r"/\d+$", "/<n>", name.removeprefix("experience_replay/")) for name in names)
    explained = explained_figures()
    return {
        name
        for name in wanted
        if name not in explained and re.sub(r"^(histories_)?refused/", "", name) not in explained
    }
