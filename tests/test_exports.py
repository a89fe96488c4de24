"""What ``import trajstore`` offers."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import trajstore


@pytest.mark.parametrize("name", sorted(trajstore.__all__))
def test_export_is_there_and_documented(name: str) -> None:
    value = getattr(trajstore, name)
    if inspect.isclass(value) or inspect.isroutine(value):
        own = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
        assert own, f"{name} has no docstring"
        assert not own.startswith(f"{name}("), f"{name} has only the docstring that dataclass makes"


def test_exports_are_listed_by_dir() -> None:
    assert set(trajstore.__all__) <= set(dir(trajstore))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = trajstore.no_such_name  # type: ignore[attr-defined]


def test_command_line_starts_without_torch(project_root: Path) -> None:
    code = (
        "import sys\n"
        "from trajstore.cli import build_parser\n"
        "build_parser().format_help()\n"
        "heavy = {'torch', 'numpy', 'numba', 'orjson', 'fsspec', 'gymnasium'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=project_root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"loaded at start: {done.stderr}"
