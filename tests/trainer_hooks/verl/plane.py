"""Rows on verl's real data plane, and replay sessions over them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from tests import rays
from tests.support.faults import FaultPlan, failing_disk
from tests.trainer_hooks.verl.builders import fresh_row
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.guidance import Guidance, Insertion, TrainMode
from trainer_hooks.guidance.config import GuidanceConfig
from trainer_hooks.transfer_queue import BACKEND, Row
from trainer_hooks.verl.arrival import recorded_rollouts
from trainer_hooks.verl.config import OnError, OutcomeRule, RecordingConfig, ReplayBlock
from trainer_hooks.verl.dataplane import add_rows, read_rows, write_column
from trainer_hooks.verl.histories import TRAINING
from trainer_hooks.verl.offers import OFFER, Report
from trainer_hooks.verl.reading import RunTokenizer
from trainer_hooks.verl.session import ReplaySession
from trainer_hooks.verl.tasks import TaskTable
from trajstore import TrajectoryReplayBuffer
from trajstore.trajectory import AgentTrajectory

N = 4
"""Rollouts per prompt."""
TASKS = [f"sums:{index}" for index in range(4)]
EOS = 1


def batch_of(rows: Sequence[Row], partition: str = TRAINING) -> KVBatchMeta:
    return KVBatchMeta(partition_id=partition, keys=[row.key for row in rows], tags=[dict(row.tag) for row in rows])


def put(rows: Sequence[Row], partition: str = TRAINING) -> KVBatchMeta:
    """Write rows session by session, like the agent loop; return them like a sampler."""
    for _, outputs in itertools.groupby(rows, lambda row: row.key.rpartition("_")[0]):
        add_rows(list(outputs), partition)
    return batch_of(rows, partition)


def put_prompts(*uids: str, partition: str = TRAINING, status: str = "finished") -> None:
    tags = [{"is_prompt": True, "status": status, "global_steps": 1} for _ in uids]
    tq.kv_batch_put(keys=list(uids), partition_id=partition, tags=tags)


def rollouts(uid: str, count: int, index: int = 0, **more: Any) -> list[Row]:
    """Return rollouts of one prompt with distinct lengths; the first two succeeded."""
    return [
        fresh_row(uid, session, response=2 + session, score=float(session < 2), index=index, seed=index, **more)
        for session in range(count)
    ]


def rate(batch: KVBatchMeta, value: float = -0.5) -> None:
    """Write the policy pass's output, for padding rows too."""
    for name, start in (("old_log_probs", value), ("entropy", 1.0)):
        columns = [start - torch.arange(tag["response_len"]) / 100 for tag in batch.tags]
        write_column(batch.keys, TRAINING, name, columns)


def column(batch: KVBatchMeta, name: str) -> dict[str, Tensor]:
    return {row.key: row.columns[name] for row in read_rows(batch, [name])}


class Dataset:
    """Four tasks; row i asks for task ``asks[i]``."""

    def __init__(self, asks: Sequence[int] = range(4)) -> None:
        self._asks = asks

    def __len__(self) -> int:
        return len(TASKS)

    def __getitem__(self, position: int) -> dict[str, Any]:
        prompt = [{"role": "user", "content": f"task {self._asks[position]}"}]
        return {"data_source": "sums", "index": position, "raw_prompt": prompt}


MakeSession = Callable[..., ReplaySession]


def train(
    session: ReplaySession, rows: Sequence[Row], step: int, value: float = -0.5
) -> tuple[KVBatchMeta, dict[str, float]]:
    """Run a step with these rows; return the joined batch and the figures."""
    joined = session.join(put(rows))
    rate(joined, value)
    return joined, session.scored(joined, step)


def fill(session: ReplaySession) -> None:
    """Run the first step: every task has n rollouts, two of which succeed and enter the pool."""
    rows = [row for index in range(len(TASKS)) for row in rollouts(f"first{index}", N, index)]
    joined, _ = train(session, rows, 1, value=-2.0)
    tq.kv_clear(keys=joined.keys, partition_id=TRAINING)


def planned(session: ReplaySession) -> dict[str, tuple[AgentTrajectory, ...]]:
    """Return the histories of the next step by task."""
    histories = {task_plan.task: task_plan.histories for task_plan in session.plan(TASKS, 0.5, 2)}
    assert sorted(histories) == TASKS
    assert all(histories.values()), "the pool has histories of every task"
    return histories


def expecting(session: ReplaySession) -> dict[str, tuple[AgentTrajectory, ...]]:
    """Join the next step's histories to prompts ``u0`` to ``u3``, one per task; return them by prompt."""
    histories = planned(session)
    uids = {f"u{index}": histories[task] for index, task in enumerate(TASKS)}
    session.expect(uids)
    return uids


def recorded(folder: Path, run: str = "run-a") -> list[AgentTrajectory]:
    """Return the rollouts that a run recorded."""
    with TrajectoryReplayBuffer.open(folder / run / "rollouts") as store:
        return list(recorded_rollouts(store))


def sessions(batch: KVBatchMeta) -> Counter[str]:
    """Return the number of sessions of each uid."""
    return Counter(session.split("_")[0] for session in {key.rpartition("_")[0] for key in batch.keys})


def shown(row: Row, mode: TrainMode) -> Row:
    """Return a row in the format of the guided agent loop."""
    exchanged = mode == "discard"
    report = Report(Guidance(mode, ("7",), (Insertion(0, "tip: "),), exchanged), exchanged)
    extra = {**row.columns["extra_fields"], OFFER: report.to_json()}
    return Row(row.key, row.tag, {**row.columns, "extra_fields": extra})


@contextmanager
def own_plane() -> Iterator[None]:
    """Run a data plane in a separate Ray instance."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # a worker for every CPU would take long to start
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        runtime_env = {"py_executable": rays.executable("ray", "verl.trainer.ppo.v1", "trainer_hooks.verl.session")}
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=150_000_000,
            runtime_env=runtime_env,
        )
    try:
        storage = {"num_data_storage_units": 1, "total_storage_size": 2000}
        tq.init(OmegaConf.create({"backend": {"storage_backend": BACKEND, "SimpleStorage": storage}}))
        yield
    finally:
        tq.close()
        ray.shutdown()


def empty_plane() -> None:
    """Remove all rows."""
    for partition, rows in (tq.kv_list() or {}).items():
        if rows:
            tq.kv_clear(keys=list(rows), partition_id=partition)


def new_session(
    tmp_path: Path,
    run: str = "run-a",
    on_error: OnError = "raise",
    decoder: Any = None,
    guidance: GuidanceConfig | None = None,
    asks: Sequence[int] = range(4),
    longest: tuple[int | None, int | None] = (None, None),
    draws_ahead: int = 0,
    **options: Any,
) -> ReplaySession:
    """Return a session of four tasks that replays one history of each by default; the caller closes it."""
    values: dict[str, Any] = {"enable": True, "exp_ratio": 1.0, "offpolicy_trajectories_per_task": 1}
    values |= options
    block = ReplayBlock(
        experience_replay=ExperienceReplayConfig(**values),
        recording=RecordingConfig(path=str(tmp_path / run / "rollouts"), on_error=on_error),
        outcome=OutcomeRule(),
        folder=tmp_path,
        n_rollout=N,
        max_prompt_length=longest[0],
        max_response_length=longest[1],
        draws_ahead=draws_ahead,
        guidance=guidance or GuidanceConfig(),
    )
    tokenizer = RunTokenizer("tokens", decoder=decoder)
    return ReplaySession(block, TaskTable(Dataset(asks)), tokenizer=tokenizer, run=run, checkpoints=tmp_path)


def sampler_of_verl(**more: Any) -> ReplayBuffer:
    return ReplayBuffer(
        trainer_mode="sync",
        trainer_config=OmegaConf.create({}),
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs=OmegaConf.create({}),
        **{"poll_interval": 0.05, **more},
    )


# Ray unpickles these in the recorder, where modules of tests cannot be imported.


class Words:
    """A tokenizer."""

    def batch_decode(self, ids: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        return [" ".join(map(str, row_ids)) for row_ids in ids]


def fill_disk_of(recorder: Any) -> None:
    """Let every write of the recorder's process fail, until :func:`heal_disk_of`."""
    recorder.plan = FaultPlan(0, "ENOSPC", lasting=True)
    recorder.disk = failing_disk(recorder.plan)
    recorder.disk.__enter__()


def heal_disk_of(recorder: Any) -> None:
    recorder.plan.heal()


def restore_disk_of(recorder: Any) -> None:
    recorder.disk.__exit__(None, None, None)
