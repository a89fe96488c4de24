"""The public names of ``import trajstore``."""

from __future__ import annotations

import re
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


def test_a_local_buffer_loads_only_the_core(project_root: Path, tmp_path: Path) -> None:
    code = (
        "import sys, torch\n"
        "from trajstore import Trajectory, TrajectoryReplayBuffer\n"
        "block = Trajectory(actions=torch.zeros(4, 2, 3), rewards=torch.zeros(4, 2, 1))\n"
        "with TrajectoryReplayBuffer(auto_save=True, auto_save_path=sys.argv[1], sample_window_size=0) as buffer:\n"
        "    buffer.add_trajectories([block])\n"
        "    buffer.flush()\n"
        "    buffer.sample(3)\n"
        "with TrajectoryReplayBuffer.open(sys.argv[1]) as reader:\n"
        "    reader.sample(3)\n"
        "ours = [name.split('.') for name in sys.modules if name.startswith(('trajstore', 'trainer_hooks'))]\n"
        "loaded = {'.'.join(name[:2]) for name in ours}\n"
        "extras = {'zarr', 'polars', 'ray', 'fsspec', 's3fs', 'duckdb', 'pandas', 'aiohttp'} & set(sys.modules)\n"
        "print(*sorted(loaded | extras))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "store")],
        cwd=project_root, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["trajstore", "trajstore._core", "trajstore.errors", "trajstore.trajectory"]


def test_a_reader_and_a_buffer_have_the_members_that_the_reference_lists(project_root: Path) -> None:
    page = (project_root / "docs" / "api" / "store.md").read_text()
    rows = re.findall(r"^\| (drawing|reading|opening and saving|the buffer alone) \| (.+) \|$", page, re.MULTILINE)
    listed = {title: set(re.findall(r"`(\w+)`", names)) for title, names in rows}
    own = listed.pop("the buffer alone")
    for made, names in ((trajstore.Reader, set()), (trajstore.TrajectoryReplayBuffer, own)):
        assert {name for name in dir(made) if not name.startswith("_")} == set().union(*listed.values()) | names
