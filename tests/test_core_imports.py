"""The core reaches the packages above it only through what they register."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path


def is_above(text: str) -> bool:
    """Return whether a text is the name of a module above the core."""
    if not re.fullmatch(r"(trajstore|trainer_hooks)(\.[a-z_]+)+", text) or text.startswith("trajstore._core"):
        return False
    try:
        return find_spec(text) is not None
    except ModuleNotFoundError:
        return False


def test_no_string_of_the_core_names_a_module_above_it(project_root: Path) -> None:
    found = [
        f"{path.relative_to(project_root)}:{node.lineno} {node.value}"
        for path in sorted((project_root / "trajstore" / "_core").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and is_above(node.value)
    ]
    assert found == []
    assert is_above("trajstore.query.reader")


def test_documentation_and_examples_name_no_private_module(project_root: Path) -> None:
    pages = [
        project_root / "README.md",
        *(project_root / "docs").rglob("*.md"),
        *(project_root / "examples").rglob("*.py"),
    ]
    assert [str(page) for page in pages if re.search(r"trajstore\._", page.read_text())] == []
