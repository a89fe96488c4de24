"""The stores under test, each through its public calls; imports happen in the constructors."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from tools.crash.peers.child import Peer, Rollout

_SETTLE = 8
_PARTITION = "train"


def _columns(rollouts: Sequence[Rollout]) -> Any:
    """Return rollouts as columns of TransferQueue."""
    from tensordict import TensorDict
    from torch import jagged, nested, tensor

    columns = {
        "number": tensor([rollout.number for rollout in rollouts]),
        "prompt": tensor([rollout.prompt for rollout in rollouts]),
        "input_ids": nested.as_nested_tensor([tensor(rollout.tokens) for rollout in rollouts], layout=jagged),
        "rollout_log_probs": nested.as_nested_tensor(
            [tensor(rollout.log_probs) for rollout in rollouts], layout=jagged
        ),
        "reward": tensor([rollout.reward for rollout in rollouts]),
    }
    return TensorDict(columns, batch_size=len(rollouts))


def _found(trajectory: Any) -> tuple[int, Mapping[str, Any]]:
    fields = {
        "tokens": trajectory.input_ids.tolist(),
        "log_probs": trajectory.rollout_log_probs.tolist(),
        "version": trajectory.policy_version,
        "reward": trajectory.reward.outcome,
    }
    return int(trajectory.rollout_id), fields


class AddRollouts(Peer):
    """trajstore: ``add_rollouts``, and ``flush`` after some calls."""

    calls_per_settle = _SETTLE

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        import torch

        import tools.crash.warm  # noqa: F401  # imports the modules of the first calls
        import trajstore

        torch.set_num_threads(1)
        self._torch, self._trajstore = torch, trajstore

    def open(self) -> None:
        self._buffer = self._trajstore.TrajectoryReplayBuffer(auto_save=True, auto_save_path=self.folder / "store")

    def read(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        for number in self._buffer.trajectory_ids.tolist():
            yield _found(self._buffer.get(number))

    def add(self, rollouts: Sequence[Rollout]) -> None:
        tensor = self._torch.tensor
        self._buffer.add_rollouts(
            {
                "input_ids": tensor([token for rollout in rollouts for token in rollout.tokens]),
                "rollout_log_probs": tensor([value for rollout in rollouts for value in rollout.log_probs]),
            },
            [len(rollout.tokens) for rollout in rollouts],
            [
                {
                    "rollout_id": str(rollout.number),
                    "policy_version": rollout.version,
                    "reward": {"outcome": rollout.reward},
                }
                for rollout in rollouts
            ],
            prompts=[rollout.prompt for rollout in rollouts],
        )

    def settle(self) -> None:
        self._buffer.flush()


class MegatronBank(Peer):
    """Megatron-LM: ``RolloutBank.append`` of a group; ``recover`` after a crash, as its trainer does."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from megatron.rl import rollout_bank, types

        self._bank_of, self._types = rollout_bank.RolloutBank, types

    def open(self) -> None:
        self._bank = self._bank_of(str(self.folder / "bank"))
        self._groups = self._bank.recover(0)
        self._bank.set_collection(1)

    def read(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        for rollout in chain.from_iterable(group.rollouts for group in self._groups):
            (prompt, response), (_, log_probs) = rollout.trajectory, rollout.logprobs
            yield (
                int(rollout.problem_id),
                {"tokens": prompt + response, "log_probs": log_probs, "reward": rollout.reward},
            )

    def add(self, rollouts: Sequence[Rollout]) -> None:
        members = [
            self._types.TokenRollout(
                trajectory=[rollout.tokens[: rollout.prompt], rollout.tokens[rollout.prompt :]],
                logprobs=[[0.0] * rollout.prompt, rollout.log_probs],
                reward=rollout.reward,
                problem_id=str(rollout.number),
            )
            for rollout in rollouts
        ]
        self._bank.append(self._types.RolloutGroup(rollouts=members))


class LanceRollouts(Peer):
    """lance-context: an embedded ``RolloutStore``; ``add``, and ``flush`` after some calls."""

    calls_per_settle = _SETTLE

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from lance_context import RolloutStore

        self._kind = RolloutStore

    def open(self) -> None:
        self._store = self._kind.open(str(self.folder / "rollouts"))
        self._store.flush()  # rows of an earlier process that it recovers become visible

    def read(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        for row in self._store.list(limit=1 << 30):
            fields = {
                "tokens": row["input_tokens"] + row["output_tokens"],
                "log_probs": row["output_logprobs"],
                "version": int(row["policy_version"]),
                "reward": row["reward"],
            }
            yield int(row["rollout_id"]), fields

    def add(self, rollouts: Sequence[Rollout]) -> None:
        self._store.add(
            [
                {
                    "id": str(rollout.number),
                    "rollout_id": str(rollout.number),
                    "input_tokens": rollout.tokens[: rollout.prompt],
                    "output_tokens": rollout.tokens[rollout.prompt :],
                    "output_logprobs": rollout.log_probs,
                    "policy_version": str(rollout.version),
                    "reward": rollout.reward,
                }
                for rollout in rollouts
            ]
        )

    def settle(self) -> None:
        self._store.flush()


class TrinitySql(Peer):
    """Trinity-RFT: ``SQLWriter.write`` to SQLite in one transaction; ``query`` reads."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        import torch
        from trinity.buffer.storage.sql import SQLExperienceStorage
        from trinity.buffer.writer.sql_writer import SQLWriter
        from trinity.common.config import StorageConfig
        from trinity.common.constants import StorageType
        from trinity.common.experience import EID, Experience

        config = StorageConfig(
            name="rollouts",
            storage_type=StorageType.SQL.value,
            path=f"sqlite:///{folder / 'rollouts.db'}",
            schema_type="experience",
            wrap_in_ray=False,
        )
        self._tensor, self._experience, self._eid = torch.tensor, Experience, EID
        self._writer, self._reader = SQLWriter(config), SQLExperienceStorage(config)
        self._loop = asyncio.Runner()

    def read(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        count = self._loop.run(self._reader.count())
        for rollout in self._loop.run(self._reader.query(limit=count)) if count else ():
            fields = {
                "tokens": rollout.tokens.tolist(),
                "log_probs": rollout.logprobs.tolist(),
                "version": rollout.info["model_version"],
                "reward": rollout.reward,
            }
            yield int(rollout.eid.suffix), fields

    def add(self, rollouts: Sequence[Rollout]) -> None:
        group = [
            self._experience(
                eid=self._eid(task=rollout.number // len(rollouts), run=index, suffix=str(rollout.number)),
                tokens=self._tensor(rollout.tokens),
                logprobs=self._tensor(rollout.log_probs),
                prompt_length=rollout.prompt,
                reward=rollout.reward,
                info={"model_version": rollout.version},
            )
            for index, rollout in enumerate(rollouts)
        ]
        self._loop.run(self._writer.write(group))


class QueueCheckpoint(Peer):
    """TransferQueue with its own storage: ``kv_batch_put``, and ``save_checkpoint`` after some calls."""

    calls_per_settle = _SETTLE

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        # A worker for every processor would take long to start.
        os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112
        import ray
        import transfer_queue
        from omegaconf import OmegaConf

        ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=150_000_000)
        units = {"num_data_storage_units": 1, "total_storage_size": None}
        transfer_queue.init(OmegaConf.create({"backend": {"SimpleStorage": units}}))
        self._queue = transfer_queue
        self._checkpoint = folder / "checkpoint"

    def open(self) -> None:
        if self._checkpoint.exists() or self._checkpoint.with_name("checkpoint.old").exists():
            self._queue.load_checkpoint(self._checkpoint)

    def read(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        rows = (self._queue.kv_list() or {}).get(_PARTITION, {})
        if rows:
            found = self._queue.kv_batch_get(keys=list(rows), partition_id=_PARTITION)
            columns = [found[name].unbind() for name in ("input_ids", "rollout_log_probs", "reward")]
            for (key, tag), tokens, log_probs, reward in zip(rows.items(), *columns, strict=True):
                fields = {"tokens": tokens.tolist(), "log_probs": log_probs.tolist(), "reward": reward.item()}
                yield int(key), {**fields, "version": tag["version"]}

    def add(self, rollouts: Sequence[Rollout]) -> None:
        keys, tags = (
            [str(rollout.number) for rollout in rollouts],
            [{"version": rollout.version} for rollout in rollouts],
        )
        self._queue.kv_batch_put(keys=keys, partition_id=_PARTITION, fields=_columns(rollouts), tags=tags)

    def settle(self) -> None:
        self._queue.save_checkpoint(self._checkpoint)
