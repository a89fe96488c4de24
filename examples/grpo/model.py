"""The policy: a small causal language model with random weights, built from a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trajstore.errors import ConfigurationError, MissingDependencyError

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Size of the policy. ``max_length`` bounds the tokens of a conversation."""

    hidden_size: int = 64
    layers: int = 2
    heads: int = 4
    max_length: int = 256

    def __post_init__(self) -> None:
        for name in ("hidden_size", "layers", "heads", "max_length"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name}: {getattr(self, name)}, must be at least 1")


def build_model(config: ModelConfig, vocabulary: int, seed: int) -> LlamaForCausalLM:
    """Return a float32 Llama on the CPU whose random weights depend on ``seed`` alone.

    Raises:
        MissingDependencyError: transformers is not installed.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise MissingDependencyError("transformers", "demo") from error

    settings = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=config.hidden_size,
        intermediate_size=2 * config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        max_position_embeddings=config.max_length,
        initializer_range=config.hidden_size**-0.5,
    )
    with torch.random.fork_rng(devices=[]):  # transformers draws weights from the global generator
        torch.manual_seed(seed)
        model: LlamaForCausalLM = LlamaForCausalLM(settings)
    return model


def response_log_probs(
    model: LlamaForCausalLM,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    position_ids: torch.Tensor,
    response_length: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probability and entropy, in nats, of the last ``response_length`` positions.

    Args:
        model: the policy.
        input_ids: [B, P + R] integer.
        attention_mask: [B, P + R], 1 on real tokens.
        position_ids: [B, P + R] integer.
        response_length: R; P must be at least 1.

    Returns:
        ``log π(token | what precedes it)`` and the entropy of that distribution, both [B, R] float32.
    """
    logits = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        use_cache=False,
        logits_to_keep=response_length + 1,
    ).logits
    scores = logits[:, :-1].float().log_softmax(dim=-1)
    chosen = scores.gather(-1, input_ids[:, -response_length:, None]).squeeze(-1)
    return chosen, -(scores.exp() * scores).sum(dim=-1)
