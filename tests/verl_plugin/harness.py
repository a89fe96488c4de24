"""verl's real V1 trainer on CPU, in the process of the test.

Signatures in the order of use (the fixtures ``verl_assets`` and ``verl_session`` of ``conftest.py`` do the first two)::

    assets = make_assets(folder)                              # assets.py: model, data, reward
    session = VerlSession.start(modules=())                   # Ray, once; modules: more for VERL_USE_EXTERNAL_MODULES
    config = make_config(assets, folder, overrides=())        # Hydra; later overrides win
    run = session.run(config, prepare=None)                   # init, fit, clean up -> Run
    session.close()

``Run.metrics``: one dict per record of verl's "file" tracking (a step, or the validation before training), each with
``"step"`` added; NaN reads as None. ``prepare(trainer)`` is called between construction and ``init``.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests import rays

from .assets import Assets

CPU_MODULES = Path(__file__).resolve().parent / "cpu"
ROOT = Path(__file__).resolve().parents[2]
MODULES = ("trajstore_verl_cpu_platform", "trajstore_verl_cpu_rollout")
LOGICAL_GPUS = 2
OBJECT_STORE_BYTES = 300_000_000
# Poll interval of the TransferQueue in seconds; verl's 2.0 would dominate a step.
POLL_INTERVAL = 0.1
CLEAN_UP_TIMEOUT = 600.0

BASE_OVERRIDES = (
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=4",
    "data.max_prompt_length=32",
    "data.max_response_length=16",
    "data.dataloader_num_workers=0",
    "data.filter_overlong_prompts=False",
    "data.seed=1",
    "actor_rollout_ref.model.use_remove_padding=False",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.fsdp_config.strategy=fsdp2",
    "actor_rollout_ref.actor.use_torch_compile=False",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    # One micro-batch per step: verl averages some metrics over micro-batches of unequal row counts.
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.rollout.name=trajstore_cpu",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.load_format=auto",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "reward.num_workers=1",
    "reward.custom_reward_function.name=compute_score",
    "transfer_queue.enable=True",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "transfer_queue.backend.SimpleStorage.total_storage_size=2000",
    "trainer.v1.trainer_mode=sync",
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=1",
    "trainer.nnodes=1",
    "trainer.logger=[file]",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.total_training_steps=2",
    "trainer.resume_mode=disable",
    "critic.enable=False",
)


def make_config(assets: Assets, folder: Path, overrides: Sequence[str] = ()) -> Any:
    """Return verl's configuration: ours for CPU, then ``overrides``. Checkpoints go to ``folder``/checkpoints."""
    from hydra import compose, initialize_config_module

    paths = (
        f"data.train_files={assets.train}",
        f"data.val_files={assets.val}",
        f"actor_rollout_ref.model.path={assets.model}",
        f"reward.custom_reward_function.path={assets.reward}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
    )
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[*BASE_OVERRIDES, *paths, *overrides])


@dataclasses.dataclass(frozen=True)
class Run:
    """Results of a training; see the module docstring."""

    metrics: list[dict[str, Any]]


class VerlSession:
    """A Ray instance in which trainings run one after another."""

    def __init__(self) -> None:
        self._environment = pytest.MonkeyPatch()

    @classmethod
    def start(cls, modules: Sequence[str] = ()) -> VerlSession:
        """Set the environment that verl reads, import it, and start Ray, whose workers inherit the environment."""
        names = (*MODULES, *modules)
        variables = {
            "VERL_PLATFORM": "cpu",
            "VERL_USE_EXTERNAL_MODULES": ",".join(names),
            "VERL_ENGINE_DEVICE": "cuda",  # the registry of engines has no "cpu"; the class is the same
            "PYTHONPATH": os.pathsep.join(filter(None, (str(CPU_MODULES), str(ROOT), os.environ.get("PYTHONPATH")))),
            "TRANSFER_QUEUE_ENABLE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            # Workers import for seconds at start, and Ray would prestart one per CPU.
            "RAY_prestart_worker_first_driver": "0",
        }
        rays.stop()
        session = cls()
        for name, value in variables.items():
            session._environment.setenv(name, value)
        session._environment.syspath_prepend(CPU_MODULES)
        try:
            importlib.import_module("verl")
            for name in names:  # already imported by verl, unless another test imported verl first
                importlib.import_module(name)
            import ray
            from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

            runtime_env = get_ppo_ray_runtime_env()
            runtime_env.pop("working_dir", None)
            runtime_env["py_executable"] = rays.executable("ray", "verl.trainer.ppo.v1", *names)
            ray.init(
                address="local",  # never a cluster that RAY_ADDRESS or an earlier session names
                num_cpus=16,
                num_gpus=LOGICAL_GPUS,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                runtime_env=runtime_env,
            )
        except BaseException:
            session.close()
            raise
        return session

    def run(self, config: Any, *, prepare: Callable[[Any], None] | None = None) -> Run:
        """Train with ``config``, then end the training's actors and placement groups."""
        import transfer_queue as tq
        from omegaconf import OmegaConf
        from verl.trainer.ppo.v1 import AgentLoopManagerTQ, get_trainer_cls

        from trainer_hooks.verl.early import record_on_arrival

        record_on_arrival(config)
        OmegaConf.resolve(config)
        log = Path(config.trainer.default_local_dir).parent / f"metrics-{time.monotonic_ns()}.jsonl"
        log.parent.mkdir(parents=True, exist_ok=True)
        trainer: Any = None
        try:
            tq.init(config.transfer_queue)
            trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)
            trainer.replay_buffer.poll_interval = POLL_INTERVAL
            if prepare is not None:
                prepare(trainer)
            trainer.init()
            manager = AgentLoopManagerTQ.create(
                config=config,
                llm_client=trainer.get_llm_client(),
                teacher_client=trainer.get_teacher_client(),
                reward_loop_worker_handles=trainer.get_reward_handles(),
            )
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("VERL_FILE_LOGGER_PATH", str(log))
                trainer.fit(manager)
        finally:
            if hasattr(trainer, "logger"):
                trainer.logger.finish()
            tq.close()
            _end_actors()
        records = [orjson.loads(line) for line in log.read_bytes().splitlines()]
        return Run([{**record["data"], "step": record["step"]} for record in records])

    def close(self) -> None:
        """Stop Ray and restore the environment."""
        import ray

        ray.shutdown()
        self._environment.undo()


def _end_actors() -> None:
    """Remove placement groups, kill named actors, and wait until their names are free.

    Raises:
        TimeoutError: a name is still taken after ``CLEAN_UP_TIMEOUT`` seconds.
    """
    import ray
    from ray.util import list_named_actors, placement_group_table, remove_placement_group
    from ray.util.placement_group import PlacementGroup

    for group, facts in placement_group_table().items():
        if facts["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group))))
    end = time.monotonic() + CLEAN_UP_TIMEOUT
    while names := list_named_actors(all_namespaces=True):
        if time.monotonic() > end:
            raise TimeoutError(f"actors still there after {CLEAN_UP_TIMEOUT} s: {names}")
        for actor in names:
            try:
                ray.kill(ray.get_actor(**actor))
            except ValueError:
                continue  # ended since it was listed
        time.sleep(0.05)
    gc.collect()  # unnamed actors end with their last handle
