"""Conversation lines, and a small Hugging Face tokenizer for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.tokenizers_of_words import tokenizer_of

TEMPLATES = Path(__file__).parent / "templates"
WORDS = (
    "bring",
    "the",
    "cup",
    "go",
    "kitchen",
    "take",
    "drop",
    "done",
    "seen",
    "think",
    "why",
    "system",
    "user",
    "tool",
)
MARKS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<unk>")


def make_tokenizer(template: str = "chatml") -> Any:
    """Return a tokenizer with one token per word, line break and mark."""
    return tokenizer_of(
        (*MARKS, *WORDS, "assistant", "\n", " ", "<think>", "</think>"),
        r"</?think>|\w+|\n| ",
        (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8").rstrip("\n"),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )


def turn(*contents: str) -> list[dict[str, Any]]:
    """Return alternating user and assistant messages."""
    return [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]


def conversation(task: str = "a", last: str = "done", **values: Any) -> dict[str, Any]:
    """Return the line of a successful conversation of two turns."""
    messages = turn("bring the cup", "go kitchen", "seen cup", last)
    return {"task_id": task, "messages": messages, "reward": 1.0, **values}


def write(path: Path, *lines: Any) -> Path:
    """Write lines, given as values or texts."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return path
