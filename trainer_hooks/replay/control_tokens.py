"""Removes control tokens from outside text, so that a message's content cannot end the message. Pure.

A chat template separates messages by control tokens (``<|im_end|>``), and tokenizers map their names to the tokens
anywhere in a text. So a name in an experience or a transcript would end its message and begin another one. Here a space
is inserted after the first character of each name: it stays readable, and becomes ordinary text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from trajstore.errors import InvalidTrajectoryError

_PROBE = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]

_THOUGHTS = ("<think>", "</think>")
"""Added tokens that templates also write, and that are legitimate in messages."""


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """The control tokens of one tokenizer.

    Attributes:
        names: their texts.
        ids: their ids.
        encode: returns the token ids of a text, without adding special tokens.
    """

    names: tuple[str, ...]
    ids: frozenset[int]
    encode: Callable[[str], Sequence[int]]

    @classmethod
    def of(cls, tokenizer: Any, *, in_messages: bool = False) -> ControlTokens:
        """Return the control tokens of a Hugging Face tokenizer: special and added ones.

        Args:
            tokenizer: with ``all_special_tokens`` and ``convert_tokens_to_ids``.
            in_messages: for whole conversations, where added tokens are legitimate (``<think>``, ``<tool_call>``):
                takes only those added tokens that the chat template puts around plain messages.
        """
        special = list(tokenizer.all_special_tokens)
        added: list[str] = []
        for token in getattr(tokenizer, "added_tokens_decoder", {}).values():
            (special if token.special else added).append(str(token))
        if in_messages:
            rendered = _rendered(tokenizer)
            added = [name for name in added if name in rendered and name not in _THOUGHTS]
        names = [name for name in dict.fromkeys([*special, *added]) if name.strip()]  # not runs of blanks
        unknown = getattr(tokenizer, "unk_token_id", None)  # any text may map to it
        ids = frozenset(tokenizer.convert_tokens_to_ids(names)) - {unknown, None}
        return cls(tuple(names), ids, lambda text: tokenizer(text, add_special_tokens=False)["input_ids"])

    def taken_out(self, text: str) -> tuple[str, int]:
        """Return the text without control tokens, and the number of names changed.

        Raises:
            InvalidTrajectoryError: the result still holds a control token, or the tokenizer refuses the text.
        """
        places = {
            match.start() + len(name) - len(name.lstrip()) + 1
            for name in self.names
            if name in text
            for match in re.finditer(f"(?={re.escape(name)})", text)
        }
        cuts = [0, *sorted(places), len(text)]
        result = " ".join(text[start:end] for start, end in pairwise(cuts))
        try:
            left = self.ids.intersection(self.encode(result))
        except Exception as error:  # tokenizers may raise anything about unexpected texts
            raise InvalidTrajectoryError(f"text: the tokenizer refuses it: {error!r}") from error
        if left:
            raise InvalidTrajectoryError(f"text: holds control tokens that no space takes apart: ids {sorted(left)}")
        return result, len(places)

    def taken_out_of(self, value: Any) -> tuple[Any, int]:
        """Apply :meth:`taken_out` to every text in a JSON value, including the keys of objects."""
        if isinstance(value, str):
            return self.taken_out(value)
        if isinstance(value, list):
            pairs = [self.taken_out_of(item) for item in value]
            return [item for item, _ in pairs], sum(count for _, count in pairs)
        if isinstance(value, dict):
            keys = [self.taken_out(name) for name in value]
            values = [self.taken_out_of(item) for item in value.values()]
            cleaned = {name: item for (name, _), (item, _) in zip(keys, values, strict=True)}
            return cleaned, sum(count for _, count in [*keys, *values])
        return value, 0


def _rendered(tokenizer: Any) -> str:
    try:
        return str(tokenizer.apply_chat_template(_PROBE, tokenize=False, add_generation_prompt=True))
    except Exception:  # no template, or it failed; special tokens are known anyway
        return ""
