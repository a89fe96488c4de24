"""verl's command line with the how-to's configuration: train, stop, resume."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_hooks.guidance import Guidance

from .assets import Assets
from .command import run_main
from .runs import guidance_table, recorded

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(600)]


def test_guided_rollouts(verl_assets: Assets, project_root: Path, tmp_path: Path) -> None:
    """Runs the how-to's example and prints its figures."""
    records = run_main(
        project_root,
        verl_assets,
        tmp_path,
        "exp_manager.experience_replay.enable=false",
        "experience_maker.enable_summarizer=true",
        "experience_maker.updated_freq=1",
        "experience_maker.enable_context_generator=true",
        "experience_maker.retrieve_top_k=1",
        "exp_manager.rollout_expratio=0.5",
        "data.max_prompt_length=384",
        "trainer.total_training_steps=6",
    )
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    sys.stdout.write("\n" + guidance_table(records) + "\n")
    assert records[0]["guidance/guided_rollouts"] == 0.0, "nothing was known"
    shown = [rollout for rollout in recorded(tmp_path) if Guidance.of(rollout) is not None]
    assert shown
    assert len(shown) == sum(record["guidance/guided_rollouts"] for record in records)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+exp_manager.recording.directory=/elsewhere", r"exp_manager\.recording: directory: unknown key"),
        ("trainer.v1.trainer_mode=sync", r"enable: true, but trainer\.v1\.trainer_mode=sync replays"),
        ("trainer.use_v1=False", r"enable: true, but trainer\.use_v1=False replays"),
    ],
    ids=["unknown", "stock mode", "old trainer"],
)
def test_options_are_refused_before_ray_is_started(
    override: str, message: str, verl_assets: Assets, project_root: Path, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=message) as caught:
        run_main(project_root, verl_assets, tmp_path, override)
    assert "ray init kwargs" not in str(caught.value), "what verl prints before it starts Ray"


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
