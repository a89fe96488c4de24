"""What people read of a recorded rollout: its conversation as messages, its query, the name of its tokenizer."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainer_hooks.replay.message_rows import MessageTokenizer
from trainer_hooks.verl.rows import plain
from trajstore.operations.trajectory_report import TOKENIZER_KEY
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

_DECODING = ("batch_decode", "decode", "_decode")
"""Methods of transformers' tokenizers that make text."""


@dataclass(frozen=True, slots=True)
class RunTokenizer:
    """The tokenizer of a run, as far as recording needs it."""

    fingerprint: str
    """Tells tokenizers and chat templates apart."""
    name: str = ""
    """Folder, or name in a model hub; empty = unknown."""
    decoder: Any = None
    """Has transformers' ``batch_decode``; ``None``: no text is recorded."""
    messages: MessageTokenizer | None = None
    """Makes rows of histories that have messages only, which are refused without it."""


def name_of(tokenizer: Any) -> str:
    """Return from where a tokenizer was loaded: an absolute path if it is a folder here."""
    name = str(getattr(tokenizer, "name_or_path", "") or "")
    return str(Path(name).absolute()) if name and Path(name).is_dir() else name


class Scribe:
    """Adds to rollouts what people read.

    Text is decoded beside the training, and a tokenizer must not be used by two threads at once, so the scribe has a
    copy of it.

    Args:
        tokenizer: of the run.
        text: whether the response's turns are decoded.
    """

    def __init__(self, tokenizer: RunTokenizer, *, text: bool) -> None:
        self._name = tokenizer.name
        self._decode: Callable[..., Sequence[Any]] | None = None
        self.without_text = 0
        """Rollouts whose tokens the tokenizer could not decode."""
        if not text:
            return
        try:
            self._decode = _decoding(copy.deepcopy(tokenizer.decoder))
        except Exception as error:  # a tokenizer's own code may fail in any way, and tokens are recorded without it
            logger.warning("rollouts are recorded without text: the tokenizer cannot be copied: %r", error)

    def introduce(self, made: Sequence[AgentTrajectory]) -> None:
        """Set ``query`` and ``metadata["tokenizer"]`` of rollouts that have the prompt's messages, in place."""
        for one in made:
            one.query = _query(one.messages)
            if self._name:
                one.metadata[TOKENIZER_KEY] = self._name

    def write(self, made: Sequence[AgentTrajectory]) -> None:
        """Add a message for each turn behind the prompt's ``messages``, in place. Not for two threads at once.

        A turn is a run of response tokens that the model wrote (role ``assistant``, author ``llm``; special tokens
        left out) or that it was told (role ``environment``, author ``env``; special tokens shown, since they part
        what several speakers said). Tokens are what is trained on; the text is for reading. A rollout that the
        tokenizer cannot decode stays without text, is counted, and the first one told of; those beside it have theirs.
        """
        decode = self._decode
        if decode is None or not made:
            return
        try:
            _write_turns(made, decode)
        except BaseException as error:  # as above; what compiled code throws when it gives up is no Exception
            if len(made) > 1:
                for one in made:
                    self.write([one])
                return
            if not self.without_text:
                logger.warning(
                    "rollout %s is recorded without text: the tokenizer cannot decode it: %r;"
                    " recording/without_text counts such ones",
                    made[0].rollout_id,
                    error,
                )
            self.without_text += 1


def _decoding(decoder: Any) -> Callable[..., Sequence[Any]] | None:
    """Return what makes texts of lists of ids: ``decode(ids, skip_special_tokens=...)``; ``None`` without a decoder.

    transformers' own ``batch_decode`` keeps the interpreter's lock, so that the training would get a turn every few
    milliseconds; what it calls for a fast tokenizer can do without. A tokenizer with more to it decodes itself.
    """
    if decoder is None:
        return None
    backend = getattr(decoder, "backend_tokenizer", None)
    methods = [getattr(getattr(type(decoder), name, None), "__module__", "") for name in _DECODING]
    usual = all(module.startswith("transformers.tokenization_utils") for module in methods)
    if backend is None or not usual or decoder.clean_up_tokenization_spaces:
        return decoder.batch_decode  # type: ignore[no-any-return]
    return backend.decode_batch  # type: ignore[no-any-return]


def _write_turns(made: Sequence[AgentTrajectory], decode: Callable[..., Sequence[Any]]) -> None:
    turns = [(one, written, ids) for one in made for written, ids in _turns(one)]
    texts = [""] * len(turns)
    for kind in (True, False):
        places = [place for place, (_, written, _) in enumerate(turns) if written is kind]
        if not places:
            continue
        decoded = decode([turns[place][2] for place in places], skip_special_tokens=kind)
        for place, text in zip(places, decoded, strict=True):
            texts[place] = plain(str(text))
    for (one, written, _), text in zip(turns, texts, strict=True):
        role, author = ("assistant", "llm") if written else ("environment", "env")
        one.messages.append({"role": role, "content": text, "author": author})


def _query(messages: Sequence[dict[str, Any]]) -> str:
    """Return what the user asked last; empty if nobody did in words."""
    asked = [one.get("content") for one in messages if one.get("role") == "user"]
    return asked[-1] if asked and isinstance(asked[-1], str) else ""


def _turns(one: AgentTrajectory) -> list[tuple[bool, list[int]]]:
    """Return the runs of a response that one side wrote: whether it was the model, and the token ids."""
    if one.input_ids is None or one.response_start is None or one.response_mask is None:
        return []
    ids, written = one.input_ids[one.response_start :].tolist(), one.response_mask != 0
    edges = [0, *((written[1:] != written[:-1]).nonzero().flatten() + 1).tolist(), len(ids)]
    return [(bool(written[first]), ids[first:end]) for first, end in pairwise(edges) if first < end]
