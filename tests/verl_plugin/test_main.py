"""verl's own command line with the configuration file of the how-to: train, stop, go on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from trajstore.guidance import Guidance

from .assets import Assets
from .harness import BASE_OVERRIDES, CPU_MODULES, MODULES
from .runs import guidance_table, recorded

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run_main(project_root: Path, assets: Assets, folder: Path, *overrides: str) -> list[dict[str, float]]:
    """Train as a user does; return the metrics of each step.

    Args:
        project_root: of the checkout.
        assets: model, data and reward.
        folder: of the run, for checkpoints, stores and logs.
        overrides: as in Hydra's command line; the last ones win.
    """
    log = folder / "metrics.jsonl"
    environment = {
        **os.environ,
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": ",".join(MODULES),
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_FILE_LOGGER_PATH": str(log),
        "PYTHONPATH": os.pathsep.join((str(CPU_MODULES), str(project_root))),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "OMP_NUM_THREADS": "1",
    }
    given = [one for one in BASE_OVERRIDES if not one.startswith("trainer.v1.trainer_mode")]
    command = [sys.executable, "-m", "verl.trainer.main_ppo"]
    command += [f"--config-dir={project_root / 'docs' / 'howto'}", "--config-name=verl_replay", *given]
    command += [
        f"data.train_files={assets.train}",
        f"data.val_files={assets.val}",
        "data.train_max_samples=6",
        f"actor_rollout_ref.model.path={assets.model}",
        f"reward.custom_reward_function.path={assets.reward}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        "exp_manager.outcome.key=hit",
        "exp_manager.experience_replay.replay_start_ratio=0.0",
        "+ray_kwargs.ray_init.address=local",
        "ray_kwargs.ray_init.num_cpus=16",
        "+ray_kwargs.ray_init.num_gpus=1",
        "+ray_kwargs.ray_init.include_dashboard=False",
        "+ray_kwargs.ray_init._node_ip_address=127.0.0.1",
        "+ray_kwargs.ray_init.object_store_memory=300000000",
        f"hydra.run.dir={folder / 'hydra'}",
        *overrides,
    ]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    records = [orjson.loads(line) for line in log.read_bytes().splitlines()]
    log.unlink()
    return [{**record["data"], "step": record["step"]} for record in records]


def test_guided_rollouts(verl_assets: Assets, project_root: Path, tmp_path: Path) -> None:
    """As the how-to has it; prints the figures that it shows."""
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
    shown = [one for one in recorded(tmp_path) if Guidance.of(one) is not None]
    assert shown
    assert len(shown) == sum(record["guidance/guided_rollouts"] for record in records)
