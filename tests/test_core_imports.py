"""The core reaches the packages above it only through what they register."""

from __future__ import annotations

import ast
import re
from pathlib import Path


def test_no_string_of_the_core_names_a_module_above_it(project_root: Path) -> None:
    above = re.compile(r"trajstore\.(?!_core\b|errors\b|trajectory\b)\w+(\.\w+)*|trainer_hooks(\.\w+)+")
    found = [
        f"{path.relative_to(project_root)}:{node.lineno} {node.value}"
        for path in sorted((project_root / "trajstore" / "_core").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and above.fullmatch(node.value)
    ]
    assert found == []


def test_the_documentation_names_no_private_module(project_root: Path) -> None:
    pages = [project_root / "README.md", *sorted((project_root / "docs").rglob("*.md"))]
    found = [str(page) for page in pages if re.search(r"trajstore\._", page.read_text())]
    assert found == []
