"""Generated tokenizers, so that no test needs a published one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def tokenizer_of(vocabulary: Sequence[str], split: str, chat_template: str, **special: Any) -> Any:
    """Return a tokenizer for a vocabulary, which includes ``<unk>``.

    Args:
        vocabulary: the tokens, by their ids.
        split: regular expression of the parts of a text.
        chat_template: of Jinja.
        special: in the format of ``PreTrainedTokenizerFast``.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {token: number for number, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(split), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **special)
    fast.chat_template = chat_template
    return fast
