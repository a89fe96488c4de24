"""Records every micro-batch that the het loss passes to verl's ``ppo_loss``.

Loaded in every process of a run; writes to the folder ``TRAJSTORE_VERL_WITNESS``, if set.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import torch

import trainer_hooks.verl.loss as het

FOLDER = "TRAJSTORE_VERL_WITNESS"

_ppo_loss = het.ppo_loss


def _witness(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
    loss, metrics = _ppo_loss(config, model_output, data, dp_group)
    folder = os.environ.get(FOLDER)
    call = het._call.get()
    if folder and call is not None:
        seen = {
            name: [row.clone() for row in data[name].unbind()]
            for name in ("prompts", "responses", "response_mask", "old_log_probs", "advantages")
        }
        seen["exp_mask"] = list(call.exp_mask.clone())
        seen["uid"], seen["session"] = list(data["uid"]), [int(number) for number in data["session_id"]]
        # A token's log-prob is stored at the previous token.
        starts, whole = [len(values) for values in seen["prompts"]], model_output["log_probs"].unbind()
        seen["log_probs"] = [
            values.detach()[start - 1 : -1].clone() for values, start in zip(whole, starts, strict=True)
        ]
        seen["loss"] = float(loss)
        seen["batch_tokens"] = int(data["batch_num_tokens"]) / int(data["dp_size"])
        target = Path(folder) / f"{uuid.uuid4().hex}.pt"
        torch.save(seen, target.with_suffix(".part"))
        target.with_suffix(".part").rename(target)
    return loss, metrics


het.ppo_loss = _witness
