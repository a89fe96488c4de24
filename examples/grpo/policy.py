"""The reference trainer's policy at the beginning of a recorded step, for ``trajstore replay-step``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.common import read_checkpoint
from examples.grpo.model import ModelConfig, build_model, response_log_probs
from trajstore.errors import ConfigurationError, CorruptStoreError


class ReferencePolicy:
    """A policy from a checkpoint, on the CPU. See :class:`trainer_hooks.steps.Policy`.

    Args:
        path: checkpoint of the step before.
        step: number of the step.
        options: ``policy`` among the step's options.

    Raises:
        StoreNotFoundError: there is no checkpoint.
        CorruptStoreError: it is damaged.
        ConfigurationError: it is of another step or another model.
    """

    def __init__(self, path: str | Path, step: int, options: Mapping[str, Any]) -> None:
        state = read_checkpoint(Path(path), "give a checkpoint of this trainer")
        if lacking := [key for key in ("model", "optimizer", "curve") if key not in state]:
            raise CorruptStoreError(f"{path}: lacks {', '.join(lacking)}")
        done = state["curve"][-1]["step"] if state["curve"] else 0
        if done != step - 1:
            raise ConfigurationError(f"{path}: is of step {done}; step {step} began with that of step {step - 1}")
        self._model = build_model(ModelConfig(**options["model"]), options["vocabulary"], 0)
        try:
            self._model.load_state_dict(state["model"])
        except RuntimeError as error:  # raised by torch when names or shapes differ
            raise ConfigurationError(f"{path}: another size of model: {error}") from error
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=options["learning_rate"], weight_decay=0.0)
        self._optimizer.load_state_dict(state["optimizer"])
        self._max_grad_norm = options["max_grad_norm"]

    def log_probs(self, tensors: Mapping[str, Tensor], rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies of rows."""
        ids, attention, positions = (
            tensors[name][list(rows)] for name in ("input_ids", "attention_mask", "position_ids")
        )
        return response_log_probs(self._model, ids, attention, positions, tensors["response_mask"].shape[1])

    def learn(self, objective: Tensor) -> None:
        """Take one optimizer step."""
        self._optimizer.zero_grad()
        objective.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._max_grad_norm)
        self._optimizer.step()
