"""Runs verl's command line in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import orjson

from .assets import Assets
from .harness import BASE_OVERRIDES, CPU_MODULES, MODULES
from .witness import WITNESS_FOLDER, WITNESS_MODULE, Witness


def run_main(
    project_root: Path,
    assets: Assets,
    folder: Path,
    *overrides: str,
    options: Path | None = None,
    witness: Witness | None = None,
) -> list[dict[str, float]]:
    """Train through verl's command line; return the metrics of each step.

    Args:
        project_root: of the checkout.
        assets: model, data and reward.
        folder: of the run, for checkpoints, stores and logs.
        overrides: as in Hydra's command line; the last ones win.
        options: replaces the how-to's ``verl_replay.yaml``; the command line then has none of our options.
        witness: records the loss's inputs.
    """
    log = folder / "metrics.jsonl"
    environment = {
        **os.environ,
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": ",".join(MODULES if witness is None else (*MODULES, WITNESS_MODULE)),
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_FILE_LOGGER_PATH": str(log),
        "PYTHONPATH": os.pathsep.join((str(CPU_MODULES), str(project_root))),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "OMP_NUM_THREADS": "1",
        **({} if witness is None else {WITNESS_FOLDER: str(witness.folder)}),
    }
    replay = "exp_manager.experience_replay"
    ours = () if options else ("exp_manager.outcome.key=hit", f"{replay}.figures=all")
    options = options or project_root / "docs" / "howto" / "verl_replay.yaml"
    given = [override for override in BASE_OVERRIDES if not override.startswith("trainer.v1.trainer_mode")]
    command = [sys.executable, "-m", "verl.trainer.main_ppo"]
    command += [f"--config-dir={options.parent}", f"--config-name={options.stem}", *given]
    command += [
        f"data.train_files={assets.train}",
        f"data.val_files={assets.val}",
        "data.train_max_samples=6",
        f"actor_rollout_ref.model.path={assets.model}",
        f"reward.custom_reward_function.path={assets.reward}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        *ours,
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
