"""Reads the loss's rows recorded by ``cpu/trajstore_verl_cpu_witness.py``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

WITNESS_MODULE = "trajstore_verl_cpu_witness"
WITNESS_FOLDER = "TRAJSTORE_VERL_WITNESS"


@dataclasses.dataclass(frozen=True, eq=False)
class MicroBatch:
    """Inputs and output of one loss call."""

    loss: float
    batch_tokens: float
    """Counted tokens of the mini-batch per rank."""


@dataclasses.dataclass(frozen=True, eq=False)
class LossRow:
    """One row of a micro-batch; all tensors but ``prompt`` have the response's length, ``exp_mask`` may be padded."""

    uid: str
    prompt: torch.Tensor
    response: torch.Tensor
    response_mask: torch.Tensor
    old_log_probs: torch.Tensor
    advantages: torch.Tensor
    exp_mask: torch.Tensor
    log_probs: torch.Tensor
    session: int
    micro_batch: MicroBatch

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(torch.cat([self.prompt, self.response]).tolist())


class Witness:
    """The folder where all processes write their micro-batches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def take(self) -> list[LossRow]:
        """Return the rows seen since the last call."""
        rows = []
        for path in sorted(self.folder.glob("*.pt"), key=lambda path: path.stat().st_mtime_ns):
            seen = torch.load(path, weights_only=True)
            names = ("uid", "prompts", "responses", "response_mask", "old_log_probs", "advantages", "exp_mask")
            columns = zip(*(seen[name] for name in (*names, "log_probs", "session")), strict=True)
            micro_batch = MicroBatch(seen["loss"], seen["batch_tokens"])
            rows += [LossRow(*values, micro_batch) for values in columns]
            path.unlink()
        return rows
