"""Build the distribution, and use its wheel with each extra in a fresh environment outside the checkout.

    python .ci/wheels.py [--python PYTHON ...] [--extra NAME ...] [--without NAME ...] [--lowest]

Prints a row of a table for each environment, and ends with 1 if one failed. ``--lowest`` installs the oldest versions
that ``pyproject.toml`` admits and the Python has wheels for. Needs ``pip install build twine uv``: uv resolves the
versions, and links files from its cache, so that torch is downloaded once.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
_NOT_FOR_USERS = {"test", "docs", "bench", "all"}

_USE = """
import subprocess, sys, torch
from pathlib import Path
import trainer_hooks, trajstore
from trajstore import AgentTrajectory, Reward, TrajectoryReplayBuffer, verify
from trajstore.cli import main

for package in (trajstore, trainer_hooks):
    folder = Path(package.__file__).parent
    assert "site-packages" in str(folder), folder
    assert (folder / "py.typed").exists(), folder
form = "zarr" if sys.argv[1] == "zarr" else "pt"
with TrajectoryReplayBuffer(auto_save=True, auto_save_path="store", trajectory_format=form) as buffer:
    session = buffer.session("task", "0")
    session.add_call([1, 2], [3], [-0.5])
    session.finish(Reward(outcome=1.0))
    buffer.add_trajectories([AgentTrajectory(input_ids=torch.arange(9), response_start=3)])
    buffer.flush()
with TrajectoryReplayBuffer.open("store") as reader:
    assert len(reader) == 2 and reader.get(0).input_ids.tolist() == [1, 2, 3]
assert verify("store").sound
command = str(Path(sys.executable).parent / "trajstore")
subprocess.run([command, "--version"], check=True)
assert main(["inspect", "store", "--trajectory", "0"]) == 0
"""

_USES_OF_EXTRAS = {
    "convert": "assert main(['convert', 'store', 'files', '--to', 'parquet']) == 0",
    "demo": "import matplotlib.pyplot, transformers; transformers.Qwen2Config",
    "guided": "import httpx; from trainer_hooks.guidance import *",
    "gymnasium": """
import gymnasium
from trajstore.interop.gymnasium import VectorSteps

environments = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
steps = VectorSteps(environments)
steps.reset(environments.reset(seed=1)[0])
for _ in range(8):
    actions = environments.action_space.sample()
    steps.add(actions, environments.step(actions))
assert steps.take().actions.shape[:2] == (8, 2)
""",
    "query": "assert main(['query', 'store', 'select avg(outcome) from trajectories']) == 0",
    "ray": """
import ray
from trajstore.distributed import DistributedReplayBuffer

ray.init("local", num_cpus=2, include_dashboard=False)
handle = DistributedReplayBuffer.create("stores", str(Path("run").resolve()), stores=1)
handle.add_trajectories([AgentTrajectory(input_ids=torch.arange(9))])
handle.flush()
ray.shutdown()
""",
    "s3": "import obstore, s3fs",
    "verl": "import trainer_hooks.verl.trainer",
    "view": """
import urllib.request

server = subprocess.Popen([command, "view", "store", "--port", "0"], stdout=subprocess.PIPE, text=True)
address = next(word for line in server.stdout for word in line.split() if word.startswith("http://"))
assert urllib.request.urlopen(address).status == 200
server.terminate()
server.wait()
""",
}


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters")
    parser.add_argument("--extra", nargs="+", help="extras instead of all that are for users; none: the package")
    parser.add_argument("--without", nargs="+", default=[], help="extras to leave out")
    parser.add_argument("--lowest", action="store_true", help="install the oldest versions that are admitted")
    chosen = parser.parse_args()
    names = chosen.extra or ["none", *sorted(_PROJECT["optional-dependencies"].keys() - _NOT_FOR_USERS)]
    names = [name for name in names if name not in chosen.without]
    failed = 0
    with tempfile.TemporaryDirectory(prefix="trajstore-wheels.") as folder:
        wheel = _built(Path(folder) / "dist")
        for python in chosen.python:
            for extra in names:
                try:
                    result = _used(Path(folder), python, wheel, extra, "lowest-direct" if chosen.lowest else "highest")
                except subprocess.CalledProcessError as error:
                    failed += 1
                    result = "failed: " + " ".join(f"{error.stdout}{error.stderr}".split())[-600:]
                sys.stdout.write(f"| {python} | {extra} | {result} |\n")
                sys.stdout.flush()
    return min(failed, 1)


def _built(folder: Path) -> Path:
    """Return the wheel, built from the source distribution and checked."""
    _run([sys.executable, "-m", "build", "--outdir", str(folder), str(_ROOT)], _ROOT)
    _run([sys.executable, "-m", "twine", "check", "--strict", *map(str, folder.iterdir())], folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _used(folder: Path, python: str, wheel: Path, extra: str, resolution: str) -> str:
    """Return the installed versions of what the package and the extra ask for."""
    here = folder / "tried"  # one path for all, so that the bytecode of torch is made once
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()
    environment = here / "environment" / "bin" / "python"
    asked, options = (str(wheel), []) if extra == "none" else (f"{wheel}[{extra}]", ["--extra", extra])
    uv = [sys.executable, "-m", "uv"]
    (here / "use.py").write_text(_USE + _USES_OF_EXTRAS.get(extra, ""))
    _run([*uv, "venv", "--quiet", "--python", python, "environment"], here)
    resolved = ["--resolution", resolution, "--python", str(environment), "--output-file", "versions.txt"]
    wheels = [word for name in _named(extra) for word in ("--only-binary", name)]  # old versions may need a compiler
    _run([*uv, "pip", "compile", str(_ROOT / "pyproject.toml"), *options, *resolved, *wheels], here)
    _run([*uv, "pip", "install", "--python", str(environment), "-c", "versions.txt", asked], here)
    _run([*uv, "pip", "check", "--python", str(environment)], here)
    _run([str(environment), "use.py", extra], here, PYTHONPYCACHEPREFIX=str(folder / "bytecode"))
    versions = dict(line.split("==") for line in (here / "versions.txt").read_text().splitlines() if "==" in line)
    return " ".join(f"{name} {versions[name]}" for name in _named(extra))


def _named(extra: str) -> list[str]:
    """Return the names of the packages that the project asks for, alone or with an extra."""
    requirements = [*_PROJECT["dependencies"], *(() if extra == "none" else _PROJECT["optional-dependencies"][extra])]
    names = {re.split(r"[><=\[]", requirement)[0].lower() for requirement in requirements} - {"trajstore"}
    for other in re.findall(r"trajstore\[([\w,]+)\]", " ".join(requirements)):
        names.update(name for inner in other.split(",") for name in _named(inner))
    return sorted(names)


def _run(command: list[str], folder: Path, **variables: str) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, env={**os.environ, **variables})


if __name__ == "__main__":
    raise SystemExit(main())
