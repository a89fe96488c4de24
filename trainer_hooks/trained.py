"""The rows of an optimizer step for a ledger (:mod:`trajstore.ledger`), from the tensors of its batch."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer_hooks.batch import Batch
from trainer_hooks.completion import check_lengths
from trainer_hooks.replay.store import ids_by_name
from trajstore import AgentTrajectory, TrajectoryReplayBuffer
from trajstore._core.base.closing import Closing
from trajstore.errors import ConfigurationError
from trajstore.ledger import ROW, Ledger, TrainedStep
from trajstore.ledger.step import digest, mask_digest

NO_TOKENS = {"advantages": 0.0, "ratios": 1.0, "log_probs": 0.0}
"""Values of rows without trained tokens."""


def trained_step(
    step: int,
    *,
    uids: Sequence[Hashable],
    task_ids: Sequence[str],
    mask: Tensor,
    advantages: Tensor,
    ratios: Tensor | None,
    versions: Sequence[int | None],
    replayed: Sequence[bool],
    trajectories: Sequence[int | None] | None = None,
    rollouts: Sequence[Hashable] | None = None,
    weights: Tensor | None = None,
    policy_before: int | None = None,
    policy_after: int | None = None,
    loss: Mapping[str, float | Tensor] | None = None,
    data: Mapping[str, Any] | None = None,
    seeds: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    tokens: Sequence[Tensor] | None = None,
    log_probs: Tensor | None = None,
    config: Mapping[str, Any] | None = None,
) -> TrainedStep:
    """Return the record of a step with B trained rows; leave out padding and rows that were not trained.

    All tensors but mask and tokens are read in one transfer from their device.

    Args:
        step: its number.
        uids: prompt group of each row; groups are numbered in the order of their first rows.
        task_ids: task of each row.
        mask: [B, R], nonzero on trained tokens.
        advantages: [B, R], or [B]. A row has the mean over its trained tokens.
        ratios: the same of importance ratios; None = unknown.
        versions: policy version that sampled each row; None = unknown.
        replayed: for each row, whether it is replayed.
        trajectories: id of each row's rollout in the store; None = it is in no store.
        rollouts: rows with equal entries are one rollout, in this order; None = each row is one.
        weights: [B], further factor of each row in the loss; None = 1.
        policy_before: policy version before the step.
        policy_after: policy version after it.
        loss: loss terms by name.
        data: data set identity and position, JSON values.
        seeds: seeds by name, JSON values.
        options: of padding, advantages and weights, for ``trajstore replay-step``; JSON values.
        tokens: token ids of each row, prompt and response without padding; None = unknown.
        log_probs: [B, R], natural logarithm, to which the ratios are relative; None = unknown.
        config: the trainer's whole configuration, JSON values without credentials; written when it changes.

    Raises:
        ConfigurationError: lengths or shapes differ, or a group has two tasks.
    """
    count = len(uids)
    ids = [None] * count if trajectories is None else trajectories
    of_rollout = range(count) if rollouts is None else rollouts
    check_lengths(
        uids=uids,
        task_ids=task_ids,
        mask=mask,
        versions=versions,
        replayed=replayed,
        trajectories=ids,
        rollouts=of_rollout,
    )
    groups: dict[Hashable, int] = {}
    group_of_row = [groups.setdefault(uid, len(groups)) for uid in uids]
    tasks: list[str] = [""] * len(groups)
    for row, (group, task) in enumerate(zip(group_of_row, task_ids, strict=True)):
        tasks[group] = tasks[group] or task
        if tasks[group] != task:
            raise ConfigurationError(
                f"step {step}: row {row} is of task {task!r}, but its group {uids[row]!r} is of task {tasks[group]!r}"
            )
    numbers: dict[Hashable, int] = {}
    rows_so_far: Counter[tuple[int, int | None]] = Counter()
    rows = np.zeros(count, ROW)
    for row, (rollout, trajectory) in enumerate(zip(of_rollout, ids, strict=True)):
        number = numbers.setdefault(rollout, len(numbers))
        rows["row"][row] = rows_so_far[number, trajectory]
        rows_so_far[number, trajectory] += 1
        rows["trajectory"][row] = -1 - number if trajectory is None else trajectory
    rows["group"] = group_of_row
    rows["version"] = [-1 if version is None else version for version in versions]
    rows["replayed"] = replayed
    rows["mask_digest"] = [mask_digest(row) for row in mask.detach().cpu().numpy()]
    if tokens is not None:
        check_lengths(uids=uids, tokens=tokens)
        rows["token_digest"] = [digest(row.cpu().numpy()) for row in tokens]
    given = {"advantages": advantages, "ratios": ratios, "weights": weights, "log_probs": log_probs}
    known = {name: tensor for name, tensor in given.items() if tensor is not None}
    columns = row_means(mask, **known).cpu().numpy()
    rows["weight"] = 1.0
    for name, column in zip(("tokens", *(name.removesuffix("s") for name in known)), columns, strict=True):
        rows[name] = column
    terms = {name: float(value) for name, value in (loss or {}).items()}
    optional = {"ratio": ratios, "token_digest": tokens, "log_prob": log_probs}
    return TrainedStep(
        step,
        rows,
        tasks,
        policy_before,
        policy_after,
        terms,
        dict(data or {}),
        dict(seeds or {}),
        dict(options or {}),
        ("probability", *(name for name, given in optional.items() if given is None)),
        without_credentials(config or {}),
    )


_SECRET = re.compile(
    r"(?i)(^|_)(api_?key|access_?key(_id)?|secret(_\w+)?|password|passwd|credentials?|authorization)$"
    r"|^((\w*_)?(auth|access|api|hf|hub|bearer|session|security|wandb)_)?token$"
)
_IN_URL = re.compile(r"(?i)(?<=://)[^/@\s]+(?=@)|(?<=[?&])(token|key|sig\w*|secret|password|x-amz-[\w-]+)=[^&\s]+")

HIDDEN = "(not recorded)"
"""Stands for a credential."""


def without_credentials(config: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a configuration as JSON values, with :data:`HIDDEN` for credentials and all environment variables.

    Credentials are known by their names, such as ``api_key`` or ``password``, and in URLs.
    """
    return {
        str(name): HIDDEN
        if value and (_SECRET.search(str(name)) or (name == "key" and "secret" in config))
        else dict.fromkeys(map(str, value), HIDDEN)
        if name == "env_vars" and isinstance(value, Mapping)
        else _plain(value)
        for name, value in config.items()
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_credentials(value)
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return _IN_URL.sub(HIDDEN, str(value))


def row_means(mask: Tensor, **values: Tensor) -> Tensor:
    """Return the number of trained tokens of each row, and means over them, [1 + len(values), B] float64.

    Means of equal float32 values are exact. Rows without trained tokens have :data:`NO_TOKENS`.

    Args:
        mask: [B, R], nonzero on trained tokens.
        values: [B, R], or [B] for values of rows.

    Raises:
        ConfigurationError: a tensor has another shape.
    """
    trained = mask.detach() != 0
    tokens = trained.sum(dim=-1, dtype=torch.float64)
    columns = [tokens]
    for name, tensor in values.items():
        if tensor.shape not in (mask.shape, mask.shape[:1]):
            raise ConfigurationError(
                f"{name}: shape {list(tensor.shape)}, must be [B, R] or [B] of mask, {list(mask.shape)}"
            )
        column = tensor.detach().to(tokens)
        if tensor.dim() == 2:
            column = torch.where(trained, column, 0.0).sum(dim=-1) / tokens.clamp(min=1)
            column = torch.where(tokens > 0, column, NO_TOKENS[name])
        columns.append(column)
    return torch.stack(columns)


class StepRecorder(Closing):
    """Collects what a step of a trainer with :class:`Batch` trains on, and records it in a ledger.

    Args:
        path: folder of the ledger.
        drops_negative: whether replayed rows with a negative advantage have no loss.
        rollouts: folder of a store of all fresh rollouts; ``None`` = there is none, and ids are the pool's.
    """

    def __init__(self, path: str | Path, *, drops_negative: bool, rollouts: str | Path | None = None) -> None:
        self._drops_negative = drops_negative
        self.step = 0
        """The step that began last."""
        self.buffer: TrajectoryReplayBuffer | None = None
        """The store of all fresh rollouts; ``None`` if there is none."""
        self.ids: dict[tuple[str, str], int] = {}
        """Ids of stored rollouts by task and rollout id: the pool's of the step, if there is no store of all."""
        self.ledger = Ledger(path)
        try:
            if rollouts is not None:
                self.buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=rollouts, enable_cache=False)
                self.ids = self.buffer._live.locked(ids_by_name)
        except BaseException:
            self.ledger.close()
            raise
        self._rows: list[int] = []
        self._means: list[Tensor] = []
        self._terms: list[dict[str, Tensor]] = []

    def begin(self, step: int) -> None:
        """Begin a step. Recorded steps from it on will be replaced, with a warning."""
        if self.ledger.last is not None and step <= self.ledger.last:
            self.ledger.continue_from(step - 1 if step else None)
        self.step, self._rows, self._means, self._terms = step, [], [], []

    def loss_computed(self, batch: Batch, rows: Sequence[int], loss: Mapping[str, Tensor], advantages: Tensor) -> None:
        """Collect one loss computation; nothing is read from the device."""
        self._rows += rows
        mask = batch.tensors["response_mask"][list(rows)]
        self._means.append(row_means(mask, advantages=advantages, ratios=loss["importance_ratio"]))
        self._terms.append({name: term.detach() for name, term in loss.items() if term.dim() == 0})

    def keep(self, fresh: Sequence[AgentTrajectory]) -> None:
        """Record the fresh rollouts of the step, if there is a store of all; :meth:`record` makes them durable.

        Raises:
            StoreWriteError: they could not be written.
        """
        if self.buffer is not None:
            names = ((rollout.task_id, rollout.rollout_id) for rollout in fresh)
            self.ids.update(zip(names, self.buffer.add_trajectories(list(fresh)), strict=True))

    def find(self, rollouts: Sequence[AgentTrajectory]) -> list[int | None]:
        """Return the ids of stored rollouts, by task and rollout id."""
        return [self.ids.get((rollout.task_id, rollout.rollout_id)) for rollout in rollouts]

    def record(self, batch: Batch, log_probs: Tensor, **header: Mapping[str, Any] | None) -> None:
        """Record the step: the rows of which a loss was computed, in the batch's order, with their last values.

        Args:
            batch: the whole batch.
            log_probs: [B, R], to which the ratios are relative.
            header: ``data``, ``seeds``, ``options`` and ``config``, as for :func:`trained_step`.

        Raises:
            ConfigurationError: no loss was computed.
            OSError: the step could not be written.
            StoreWriteError: the rollouts could not be written.
        """
        if not self._rows:
            raise ConfigurationError(
                f"{self.ledger.url}: no loss of step {self.step} was reported; call the hook's loss_computed"
            )
        means = torch.cat(self._means, dim=1).cpu()
        newest = {row: place for place, row in enumerate(self._rows)}
        rows = sorted(newest)
        _, advantages, ratios = means[:, [newest[row] for row in rows]]
        named, tensors = batch.non_tensors, batch.tensors
        extras = named["extras"]
        replayed = [bool(extras[row]["is_experience_replay"]) for row in rows]
        dropped = torch.tensor(replayed) & (advantages < 0) & self._drops_negative
        numbers = batch.rollouts.tolist()
        keys = zip(named["task_ids"], named["rollout_ids"], strict=True)
        if self.buffer is not None:
            self.buffer.flush()
        ids = [
            of_row.get("trajectory_id") if of_row["is_experience_replay"] else self.ids.get(key)
            for key, of_row in zip(keys, extras, strict=True)
        ]
        terms = {name: float(torch.stack([term[name] for term in self._terms]).mean()) for name in self._terms[0]}
        self.ledger.record(
            trained_step(
                self.step,
                uids=[named["uid"][row] for row in rows],
                task_ids=[named["task_ids"][row] for row in rows],
                mask=tensors["response_mask"][rows],
                advantages=advantages,
                ratios=ratios,
                versions=[
                    extras[row]["policy_version"] if is_replayed else self.step
                    for row, is_replayed in zip(rows, replayed, strict=True)
                ],
                replayed=replayed,
                trajectories=[ids[row] for row in rows],
                rollouts=[numbers[row] for row in rows],
                weights=1.0 - dropped.double(),
                policy_before=self.step,
                policy_after=self.step + 1,
                loss=terms,
                tokens=[tensors["input_ids"][row][tensors["attention_mask"][row] != 0] for row in rows],
                log_probs=log_probs[rows],
                **header,
            )
        )

    def close(self) -> None:
        """Close the store and release the ledger's folder."""
        try:
            if self.buffer is not None:
                self.buffer.close()
        finally:
            self.ledger.close()
