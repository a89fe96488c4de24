"""Readable parts of a recorded rollout: its conversation as messages, its query, the name of its tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ray import cloudpickle

from trainer_hooks.guidance.context import put_back
from trainer_hooks.plain import plain
from trajstore.operations.trajectory_report import TOKENIZER_KEY
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunTokenizer:
    """The parts of a run's tokenizer that recording needs."""

    fingerprint: str
    """Identifies tokenizer and chat template."""
    name: str = ""
    """Folder, or name in a model hub; empty = unknown."""
    decoder: Any = None
    """Object with transformers' ``batch_decode``; ``None``: no text is recorded."""


def name_of(tokenizer: Any) -> str:
    """Return the name or path of a tokenizer; the path of a local folder is absolute."""
    name = str(getattr(tokenizer, "name_or_path", "") or "")
    return str(Path(name).absolute()) if name and Path(name).is_dir() else name


class Scribe:
    """Adds text to rollouts. Not thread-safe.

    Args:
        name: of the tokenizer; empty = unknown.
        decoder: pickled tokenizer; empty: no text is wanted. Code of a model's repository may be absent here; then all
            rollouts are counted as without text.
    """

    def __init__(self, name: str, decoder: bytes) -> None:
        self._name, self._decoder = name, decoder
        self._decode: Callable[..., Sequence[Any]] | None = None
        self._is_lost = False
        self.without_text = 0
        """Number of rollouts that could not be decoded."""

    def _load(self) -> None:
        """Load the tokenizer, at the first call."""
        decoder, self._decoder = self._decoder, b""
        try:
            self._decode = cloudpickle.loads(decoder).batch_decode if decoder else self._decode
        except Exception as error:  # of any code
            logger.warning("rollouts are recorded without text: the recorder cannot load the tokenizer: %r", error)
            self._is_lost = True

    def finish(self, made: Sequence[AgentTrajectory]) -> None:
        """Add the query, the tokenizer's name, kept experience and text to rollouts with the prompt's messages.

        In place. Where training keeps the experience, the messages become those that the model read.
        """
        self._load()
        for rollout in made:
            rollout.query = _query(rollout.messages)
            if self._name:
                rollout.metadata[TOKENIZER_KEY] = self._name
            put_back(rollout)
        self.without_text += len(made) if self._is_lost else 0
        self._write(made)

    def _write(self, made: Sequence[AgentTrajectory]) -> None:
        """Append a message per turn to the prompt's ``messages``, in place.

        A turn is a run of response tokens by the model (role ``assistant``, author ``llm``, without special tokens) or
        by the environment (role ``environment``, author ``env``, with special tokens, as they separate speakers). The
        text is for reading; training uses the tokens. Rollouts that the tokenizer cannot decode get no text and are
        counted; the first one is logged.
        """
        decode = self._decode
        if decode is None or not made:
            return
        try:
            _write_turns(made, decode)
        except BaseException as error:  # as above; a panic of compiled code is not an Exception
            if len(made) > 1:
                for rollout in made:
                    self._write([rollout])
                return
            if not self.without_text:
                logger.warning(
                    "rollout %s is recorded without text: the tokenizer cannot decode it: %r;"
                    " recording/without_text counts such ones",
                    made[0].rollout_id,
                    error,
                )
            self.without_text += 1


def _write_turns(made: Sequence[AgentTrajectory], decode: Callable[..., Sequence[Any]]) -> None:
    turns = [(rollout, written, ids) for rollout in made for written, ids in _turns(rollout)]
    texts = [""] * len(turns)
    for kind in (True, False):
        places = [place for place, (_, written, _) in enumerate(turns) if written is kind]
        if not places:
            continue
        decoded = decode([turns[place][2] for place in places], skip_special_tokens=kind)
        for place, text in zip(places, decoded, strict=True):
            texts[place] = plain(str(text))
    for (rollout, written, _), text in zip(turns, texts, strict=True):
        role, author = ("assistant", "llm") if written else ("environment", "env")
        rollout.messages.append({"role": role, "content": text, "author": author})


def _query(messages: Sequence[dict[str, Any]]) -> str:
    """Return the last user message; empty if there is none, or it is not text."""
    queries = [message.get("content") for message in messages if message.get("role") == "user"]
    return queries[-1] if queries and isinstance(queries[-1], str) else ""


def _turns(one: AgentTrajectory) -> list[tuple[bool, list[int]]]:
    """Return the turns of a response as (written by the model, token ids)."""
    if one.input_ids is None or one.response_start is None or one.response_mask is None:
        return []
    ids, written = one.input_ids[one.response_start :].tolist(), one.response_mask != 0
    edges = [0, *((written[1:] != written[:-1]).nonzero().flatten() + 1).tolist(), len(ids)]
    return [(bool(written[first]), ids[first:end]) for first, end in pairwise(edges) if first < end]
