"""A model in Hugging Face's format as the policy of a recorded step, for ``trajstore replay-step``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trajstore.errors import ConfigurationError, MissingDependencyError, StoreNotFoundError

MODEL_FOLDERS = ("", "actor/huggingface")
"""Where a path may have the model: itself, or a ``global_step_N`` of verl with ``hf_model`` in ``save_contents``."""

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


class HuggingFacePolicy:
    """A causal language model. See :class:`trainer_hooks.steps.Policy`; it has no optimizer and cannot learn.

    Args:
        path: model folder with weights, or a ``global_step_N`` of verl that contains one.
        step: number of the step.
        options: ``policy`` among the step's options.

    Raises:
        StoreNotFoundError: there are no weights in this format.
        ConfigurationError: they cannot be loaded, or the ledger's dtype is unknown.
        MissingDependencyError: ``transformers`` is not installed.
    """

    def __init__(self, path: str | Path, step: int, options: Mapping[str, Any]) -> None:
        dtype = getattr(torch, name := str(options.get("dtype", "float32")), None)
        if not isinstance(dtype, torch.dtype):
            raise ConfigurationError(f"step {step}: the ledger names the dtype {name!r}, which torch does not have")
        try:
            from transformers import AutoModelForCausalLM
        except ImportError as error:
            raise MissingDependencyError("transformers", "verl") from error
        folders = [Path(path) / folder for folder in MODEL_FOLDERS]
        found = [folder for folder in folders if any(any(folder.glob(pattern)) for pattern in WEIGHTS)]
        if not found:
            raise StoreNotFoundError(
                f"{path}: has no weights in Hugging Face's format. Step {step} began with the model of step "
                f"{step - 1}: verl writes it with actor.checkpoint.save_contents=[model,hf_model], and "
                "`python -m verl.model_merger` makes it from another checkpoint. Step 1 began with the first model"
            )
        try:
            self._model = AutoModelForCausalLM.from_pretrained(found[0], dtype=dtype, local_files_only=True)
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigurationError(f"{found[0]}: not a causal language model: {error}") from error
        self._temperature = float(options.get("temperature", 1.0))

    def log_probs(self, tensors: Mapping[str, Tensor], rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies of rows, each row without its padding."""
        width = tensors["response_mask"].shape[1]
        parts: tuple[list[Tensor], list[Tensor]] = ([], [])
        for row in rows:
            attended = tensors["attention_mask"][row] != 0
            tokens = tensors["input_ids"][row][attended]
            length = int(attended[-width:].sum())
            logits = self._model(input_ids=tokens[None]).logits[0, -length - 1 : -1].float() / self._temperature
            log_probs = logits.log_softmax(dim=-1)
            parts[0].append(log_probs.gather(1, tokens[-length:, None])[:, 0])
            parts[1].append(-(log_probs.exp() * log_probs).sum(dim=1))
        padded = [pad_sequence([*part, torch.zeros(width)], batch_first=True)[:-1] for part in parts]
        return padded[0], padded[1]

    def learn(self, objective: Tensor) -> None:
        """Raise an error: there is no optimizer.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError("a model in Hugging Face's format has no optimizer; only its log-probs are known")
