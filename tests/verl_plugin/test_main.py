"""verl's command line with the how-to's configuration: train, stop, resume."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .assets import Assets
from .harness import BASE_OVERRIDES, CPU_MODULES, MODULES

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(600)]


def test_options_are_refused_before_ray_is_started(verl_assets: Assets, project_root: Path, tmp_path: Path) -> None:
    """With the how-to's file of options."""
    environment = {
        **os.environ,
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": ",".join(MODULES),
        "PYTHONPATH": os.pathsep.join((str(CPU_MODULES), str(project_root))),
    }
    given = [override for override in BASE_OVERRIDES if not override.startswith("trainer.v1.trainer_mode")]
    options = [f"--config-dir={project_root / 'docs' / 'howto'}", "--config-name=verl_replay", *given]
    options += [f"actor_rollout_ref.model.path={verl_assets.model}", f"hydra.run.dir={tmp_path / 'hydra'}"]
    options.append("+exp_manager.recording.directory=/elsewhere")
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *options]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode
    assert "exp_manager.recording: directory: unknown key" in done.stdout + done.stderr
    assert "ray init kwargs" not in done.stdout + done.stderr, "what verl prints before it starts Ray"


def test_the_pages_small_command_runs_as_written(verl_assets: Assets, project_root: Path, tmp_path: Path) -> None:
    """The fixture only skips the test where verl cannot run; the command creates its own assets."""
    page = (project_root / "docs" / "start" / "verl.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"```sh\n([^`]*tests\.verl_plugin\.assets[^`]*)```", page)
    for name in ("tests", "trajstore", "trainer_hooks"):
        (tmp_path / name).symlink_to(project_root / name)
    environment = {**os.environ, "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))}
    done = subprocess.run(
        ["bash", "-ec", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "small/run/trajstore/rollouts: 6 steps, 96 rows, " in done.stdout
