"""Build the distribution, and install its wheel with each extra in a fresh environment outside the checkout.

    python .ci/wheels.py [--python PYTHON ...] [--extra NAME ...] [--lowest]

Prints a row for each environment, and ends with 1 if one failed. ``--lowest`` installs the oldest versions of torch,
numpy and zarr that ``pyproject.toml`` admits. Needs ``pip install build twine``.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parent.parent

_NOT_FOR_USERS = {"test", "docs", "bench", "all"}

_TRIED = """
import sys, tempfile, torch
from pathlib import Path
import trainer_hooks, trajstore
from trajstore import AgentTrajectory, Reward, Trajectory, TrajectoryReplayBuffer, verify

for package in (trajstore, trainer_hooks):
    folder = Path(package.__file__).parent
    assert "site-packages" in str(folder), folder
    assert (folder / "py.typed").exists(), folder
form = sys.argv[1]
path = Path(tempfile.mkdtemp()) / "store"
with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, trajectory_format=form) as buffer:
    session = buffer.session("task", "0")
    session.add_call([1, 2], [3], [-0.5])
    session.finish(Reward(outcome=1.0))
    buffer.add_trajectories([AgentTrajectory(input_ids=torch.arange(9), response_start=3)])
    buffer.flush()
with TrajectoryReplayBuffer.open(path) as reader:
    assert len(reader) == 2 and reader.get(0).input_ids.tolist() == [1, 2, 3]
assert verify(path).sound
"""


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters")
    parser.add_argument("--extra", nargs="+", help="extras instead of all that are for users; none: the package")
    parser.add_argument("--lowest", action="store_true", help="install the oldest versions that are admitted")
    chosen = parser.parse_args()
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    extras = chosen.extra or ["none", *sorted(project["optional-dependencies"].keys() - _NOT_FOR_USERS)]
    failed = 0
    with tempfile.TemporaryDirectory(prefix="trajstore-wheels.") as folder:
        wheel = _built(Path(folder) / "dist")
        lowest = list(_lowest(project)) if chosen.lowest else []
        for python in chosen.python:
            for extra in extras:
                error = _tried(Path(folder), python, wheel, extra, lowest)
                failed += error is not None
                sys.stdout.write(f"| {python} | {extra} | {' '.join(lowest) or 'newest'} | {error or 'ok'} |\n")
                sys.stdout.flush()
    return min(failed, 1)


def _built(folder: Path) -> Path:
    """Return the wheel, built from the source distribution and checked."""
    _run([sys.executable, "-m", "build", "--outdir", str(folder), str(_ROOT)], folder.parent)
    _run([sys.executable, "-m", "twine", "check", "--strict", *map(str, folder.iterdir())], folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _lowest(project: dict[str, object]) -> Iterator[str]:
    text = str(project)
    for name in ("torch", "numpy", "zarr"):
        found = re.search(rf"'{name}>=([0-9.]+)", text)
        if found is not None:
            yield f"{name}=={found[1]}.*"


def _tried(folder: Path, python: str, wheel: Path, extra: str, lowest: list[str]) -> str | None:
    """Return what went wrong, if anything."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        here = Path(made)
        theirs = here / "environment" / "bin" / "python"
        asked = str(wheel) if extra == "none" else f"{wheel}[{extra}]"
        form = "zarr" if extra in ("zarr", "all") else "pt"
        (here / "tried.py").write_text(_TRIED)
        constraints = [] if lowest else ["-c", str(_ROOT / "constraints.txt")]
        try:
            _run([python, "-m", "venv", "environment"], here)
            _run([str(theirs), "-m", "pip", "install", "--quiet", *constraints, asked, *lowest], here)
            _run([str(theirs), "-m", "pip", "check"], here)
            _run([str(theirs), "tried.py", form], here)
            _run([str(theirs.parent / "trajstore"), "--help"], here)
        except subprocess.CalledProcessError as error:
            return " ".join(f"{error.stdout}{error.stderr}".split())[-300:]
    return None


def _run(command: list[str], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)


if __name__ == "__main__":
    raise SystemExit(main())
