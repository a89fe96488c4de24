"""What ``import trajstore`` offers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import trajstore
import trajstore.interop.rlinf


@pytest.mark.parametrize("module", [trajstore, trajstore.interop.rlinf])
def test_exports_are_listed_by_dir_and_other_names_are_attribute_errors(module: ModuleType) -> None:
    assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name


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
