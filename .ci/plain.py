"""For the built site: each page also as Markdown, and ``llms.txt``, the list of pages (https://llmstxt.org)."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ENTRY = re.compile(r"^<!-- (::: [\w.]+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page with the entries of mkdocstrings, which the repository's view of it hides."""
    return _ENTRY.sub(r"\1", markdown)


def on_post_build(config: Any) -> None:
    """Copy the pages' sources into the site, and write ``llms.txt``."""
    docs, site = Path(config["docs_dir"]), Path(config["site_dir"])
    for source in docs.rglob("*.md"):
        target = site / source.relative_to(docs)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    (site / "llms.txt").write_text("\n".join(_lines(config["nav"], docs)) + "\n")


def _lines(nav: list[Any], docs: Path) -> Iterator[str]:
    """Yield the lines of ``llms.txt``: a heading for each section, a link and a description for each page."""
    yield "# trajstore"
    yield ""
    yield f"> {_summary(docs / 'index.md')}"
    for section in nav:
        [(heading, pages)] = section.items()
        yield ""
        yield f"## {heading}"
        yield ""
        for page in pages:
            [(title, path)] = page.items()
            yield f"- [{title}]({path}): {_summary(docs / path)}"


def _summary(page: Path) -> str:
    """Return the first sentence of a page."""
    paragraph = page.read_text().split("\n\n")[1]
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
    return re.split(r"(?<=[.:]) (?=[A-Z])", text)[0]
