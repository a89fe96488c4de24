"""Text from outside, rid of control tokens: as a message's content it stays inside of the message. Pure.

A chat template parts messages by control tokens (``<|im_end|>``), and tokenizers take the names of these for the tokens
wherever they stand in a text. So a name in an experience or a transcript would end its message and begin another one.
Here each name gets a space behind its first character: people and models can read it, and it is ordinary text.
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
"""Added tokens that templates write too, and that messages hold by right."""


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """The control tokens of one tokenizer.

    Attributes:
        names: their texts.
        ids: their ids.
        encode: token ids of a text; none are added.
    """

    names: tuple[str, ...]
    ids: frozenset[int]
    encode: Callable[[str], Sequence[int]]

    @classmethod
    def of(cls, tokenizer: Any, *, in_messages: bool = False) -> ControlTokens:
        """Return the control tokens of a Hugging Face tokenizer: special and added ones.

        Args:
            tokenizer: with ``all_special_tokens`` and ``convert_tokens_to_ids``.
            in_messages: for whole conversations, whose messages hold added tokens by right (``<think>``,
                ``<tool_call>``): of these only those that the chat template puts around plain messages.
        """
        special = list(tokenizer.all_special_tokens)
        added: list[str] = []
        for token in getattr(tokenizer, "added_tokens_decoder", {}).values():
            (special if token.special else added).append(str(token))
        if in_messages:
            rendered = _rendered(tokenizer)
            added = [name for name in added if name in rendered and name not in _THOUGHTS]
        names = [name for name in dict.fromkeys([*special, *added]) if name.strip()]  # runs of blanks are no control
        unknown = getattr(tokenizer, "unk_token_id", None)  # what any text may become
        ids = frozenset(tokenizer.convert_tokens_to_ids(names)) - {unknown, None}
        return cls(tuple(names), ids, lambda text: tokenizer(text, add_special_tokens=False)["input_ids"])

    def taken_out(self, text: str) -> tuple[str, int]:
        """Return a text in which no control token stands, and how many names were changed.

        Raises:
            InvalidTrajectoryError: the tokenizer finds one all the same, or refuses the text.
        """
        places = {
            found.start() + len(name) - len(name.lstrip()) + 1
            for name in self.names
            if name in text
            for found in re.finditer(f"(?={re.escape(name)})", text)
        }
        cuts = [0, *sorted(places), len(text)]
        result = " ".join(text[start:end] for start, end in pairwise(cuts))
        try:
            left = self.ids.intersection(self.encode(result))
        except Exception as error:  # tokenizers raise anything about texts that they are not made for
            raise InvalidTrajectoryError(f"text: the tokenizer refuses it: {error!r}") from error
        if left:
            raise InvalidTrajectoryError(f"text: holds control tokens that no space takes apart: ids {sorted(left)}")
        return result, len(places)

    def taken_out_of(self, value: Any) -> tuple[Any, int]:
        """Do what :meth:`taken_out` does with every text in JSON, the keys of objects included."""
        if isinstance(value, str):
            return self.taken_out(value)
        if isinstance(value, list):
            done = [self.taken_out_of(one) for one in value]
            return [one for one, _ in done], sum(count for _, count in done)
        if isinstance(value, dict):
            keys = [self.taken_out(name) for name in value]
            values = [self.taken_out_of(one) for one in value.values()]
            made = {name: one for (name, _), (one, _) in zip(keys, values, strict=True)}
            return made, sum(count for _, count in [*keys, *values])
        return value, 0


def _rendered(tokenizer: Any) -> str:
    try:
        return str(tokenizer.apply_chat_template(_PROBE, tokenize=False, add_generation_prompt=True))
    except Exception:  # a template may raise anything, or there is none; special tokens are known without it
        return ""
