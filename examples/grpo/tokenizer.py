"""A word tokenizer with a chat template of five marks. Pure; no I/O.

A conversation is ``<bos>``, then messages. The environment's are ``<user> words <end>``; the model's are
``<model> words <end>``, where ``<model>`` is part of the prompt, and the model writes the words and ``<end>``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trajstore.errors import ConfigurationError

PAD, BOS, USER, MODEL, END = "<pad>", "<bos>", "<user>", "<model>", "<end>"
_MARKS = (PAD, BOS, USER, MODEL, END)
_TEMPLATE = "bos (user words end | model words end)*"


class WordTokenizer:
    """Maps words to ids and back. Ids 0..4 are the marks; words follow in the given order.

    Attributes:
        pad_id, end_id: ids of ``<pad>`` and of ``<end>``.
        fingerprint: identifies vocabulary and chat template; stored with every trajectory.
    """

    def __init__(self, words: Iterable[str]) -> None:
        self._words = (*_MARKS, *words)
        self._ids = {word: index for index, word in enumerate(self._words)}
        if len(self._ids) != len(self._words):
            raise ConfigurationError("words: the same word twice, or a mark among them")
        self.pad_id = self._ids[PAD]
        self.end_id = self._ids[END]
        text = json.dumps([_TEMPLATE, *self._words])
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._words)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text of known words.

        Raises:
            ConfigurationError: a word is not in the vocabulary.
        """
        try:
            return [self._ids[word] for word in text.split()]
        except KeyError as error:
            raise ConfigurationError(f"word {error}: not in the vocabulary; add it to the environment") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Return the words of ids, marks included."""
        return " ".join(self._words[index] for index in ids)

    # ---- Hugging Face's interface ----

    all_special_tokens = _MARKS
    all_special_ids = range(len(_MARKS))

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tokenize: bool = False, add_generation_prompt: bool = False
    ) -> str:
        """Return a conversation as text, of words and marks."""
        words = [BOS]
        for message in messages:
            words += [MODEL if message["role"] == "assistant" else USER, str(message["content"]), END]
        return " ".join([*words, MODEL] if add_generation_prompt else words)

    def convert_tokens_to_ids(self, words: Sequence[str]) -> list[int]:
        """Return the ids of words and marks."""
        return [self._ids[word] for word in words]

    def __call__(self, text: str, *, add_special_tokens: bool = False) -> dict[str, list[int]]:
        """Return the ids of a text of known words and marks."""
        return {"input_ids": self.encode(text)}

    def opening(self, message: str) -> list[int]:
        """Return the ids of a conversation's start, up to the model's first token."""
        return [self._ids[BOS], *self.turn(message)]

    def turn(self, message: str) -> list[int]:
        """Return the ids of an environment's message and of the mark that asks for the next reply."""
        return [self._ids[USER], *self.encode(message), self.end_id, self._ids[MODEL]]

    def reply(self, text: str) -> list[int]:
        """Return the ids of a reply as the model writes it: the words and ``<end>``."""
        return [*self.encode(text), self.end_id]

    def reply_text(self, ids: Sequence[int]) -> str:
        """Return the text of the model's reply, without the closing ``<end>``."""
        return self.decode(ids[:-1] if ids and ids[-1] == self.end_id else ids)
