"""Reads documentation for tests: the code of a page, and the names of figures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HOWTO = Path(__file__).parent.parent / "docs" / "howto"
FIGURES = HOWTO / "replay_figures.md"


def all_blocks(text: str, languages: Sequence[str]) -> list[tuple[str, str]]:
    """Return the language and code of a page's blocks of these languages."""
    found: list[tuple[str, str]] = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for block in found if block[0] in languages]


def blocks(text: str, language: str) -> list[str]:
    """Return a page's code blocks of a language."""
    return [code for _, code in all_blocks(text, [language])]


def section(text: str, heading: str) -> str:
    """Return the part of a page below a heading of the second level, up to the next one outside code."""
    parts = re.split(r"^## (.+)$", re.sub(r"^```.*?^```$", _keep_headings_apart, text, flags=re.M | re.S), flags=re.M)
    return parts[parts.index(heading) + 1].replace("\0", "#")


def run_section(guide: str, heading: str, **given: Any) -> dict[str, Any]:
    """Run a section's Python code in this process, with these names; return all names."""
    page = HOWTO / guide
    code = "\n".join(blocks(section(page.read_text(), heading), "python"))
    names = {"__name__": "__main__", **given}
    exec(compile(code, page, "exec"), names)
    return names


def _keep_headings_apart(block: re.Match[str]) -> str:
    return re.sub(r"^#", "\0", block[0], flags=re.MULTILINE)


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
