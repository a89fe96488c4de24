"""A tiny generated model with tokenizer, tasks and reward."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tests.tokenizers_of_words import tokenizer_of

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<user>", "<assistant>", "<system>")
CHARACTERS = "0123456789+=" + LETTERS + " .:?\n"
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TRAIN_ROWS = 32
VAL_ROWS = 4
REWARD = '''"""Reward of the digit task: 1 when the asked digit occurs, else 0.9 times the fraction of digits."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **more):
    """Return the score, 0.0 to 0.9 or exactly 1.0, and whether the digit was hit."""
    hit = ground_truth in solution_str
    digits = sum(character.isdigit() for character in solution_str)
    return {"score": 1.0 if hit else 0.9 * digits / max(len(solution_str), 1), "hit": float(hit)}
'''


@dataclasses.dataclass(frozen=True)
class Assets:
    """Paths of the generated files."""

    model: Path
    train: Path
    val: Path
    reward: Path


def make_rows(first: int, count: int, split: str) -> list[dict[str, Any]]:
    """Return tasks ``first`` to ``first + count``, each with its own prompt and ``extra_info.index``."""
    rows = []
    for index in range(first, first + count):
        digit = str(index % 10)
        text = f"{LETTERS[index // 26]}{LETTERS[index % 26]} say {digit}"
        rows.append(
            {
                "data_source": "digit",
                "prompt": [{"role": "user", "content": text}],
                "ability": "toy",
                "reward_model": {"style": "rule", "ground_truth": digit},
                "extra_info": {"index": index, "split": split},
            }
        )
    return rows


def make_tokenizer() -> Any:
    """Return a tokenizer with one token per character and a chat template."""
    return tokenizer_of(
        (*SPECIAL, *CHARACTERS),
        r"[\s\S]",
        CHAT_TEMPLATE,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        additional_special_tokens=["<user>", "<assistant>", "<system>"],
    )


def make_assets(folder: Path) -> Assets:
    """Write model, tokenizer, parquet files and reward into ``folder``, which need not exist.

    The model is a Llama, as verl replaces the tokenizer of other architectures with the published one.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    assets = Assets(folder / "model", folder / "train.parquet", folder / "val.parquet", folder / "reward.py")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(assets.model)
    config = LlamaConfig(
        vocab_size=max(64, len(tokenizer)),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):  # transformers initialises with the global generator
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.float32).save_pretrained(assets.model)
    pq.write_table(pa.Table.from_pylist(make_rows(0, TRAIN_ROWS, "train")), assets.train)
    pq.write_table(pa.Table.from_pylist(make_rows(TRAIN_ROWS, VAL_ROWS, "val")), assets.val)
    assets.reward.write_text(REWARD, encoding="utf-8")
    return assets
