"""The tables of ``docs/api/*.md``, written from the docstrings: ``python -m tools.api_page``.

An entry of a page is a comment ``<!-- ::: module.name -->``. The built site shows the whole docstring there
(``.ci/plain.py``). For readers of the file, a table above the entries of a section has their names and first sentences.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

PAGES = sorted((Path(__file__).parent.parent / "docs" / "api").glob("*.md"))
ENTRY = re.compile(r"^<!-- ::: ([\w.]+) -->$", re.MULTILINE)
_TABLE = re.compile(r"^\| name \|.*?\n\n", re.MULTILINE | re.DOTALL)
_ROLE = re.compile(r":\w+:`(?:~(?:\w+\.)*|(?:[a-z_]+\.)*)([^`]+)`")


def find(name: str) -> Any:
    """Return what an entry names: a module, or something in one."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise LookupError(name)


def first_sentences(value: Any) -> str:
    """Return the first paragraph of a docstring, as Markdown for a table."""
    text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    text = _ROLE.sub(lambda match: f"`{match[1]}`", text)
    return text.replace("``", "`").replace("|", "&#124;")


def own_names(module: ModuleType) -> Iterator[str]:
    """Yield the public classes and functions that a module makes, in its order."""
    for name, item in vars(module).items():
        if not name.startswith("_") and callable(item) and getattr(item, "__module__", None) == module.__name__:
            yield name


def rows(entry: str) -> Iterator[str]:
    """Yield the lines of an entry: its own, and for a module those of what it makes."""
    value = find(entry)
    if not isinstance(value, ModuleType):
        yield f"| `{entry.rpartition('.')[2]}` | {first_sentences(value)} |"
        return
    yield f"| **`{entry}`** | {first_sentences(value)} |"
    for name in own_names(value):
        yield f"| `{name}` | {first_sentences(getattr(value, name))} |"


def written(page: str) -> str:
    """Return the page with the tables that its entries make."""
    parts = re.split(r"(?m)^(?=## )", _TABLE.sub("", page))
    made = []
    for part in parts:
        entries = ENTRY.findall(part)
        if entries:
            head, _, _ = part.partition(f"<!-- ::: {entries[0]} -->\n")
            table = "\n".join(
                ["| name | description |", "| --- | --- |", *(row for entry in entries for row in rows(entry))]
            )
            part = f"{head}{table}\n\n" + "".join(f"<!-- ::: {entry} -->\n\n" for entry in entries)
        made.append(part)
    return "".join(made).rstrip("\n") + "\n"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page.read_text()))
