"""The identity of prompts, by content. Pure.

Shuffling or filtering the data anew may give a task's name to another row. So a history is compared with its task's row
by prompt: by the token ids before the model's first token if both have ids, else by the messages.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import torch

from trajstore._core.columns.document import encode_document
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 12

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """The identity of a prompt.

    Attributes:
        tokens: digest of the token ids; ``None`` = unknown.
        messages: digests of the messages. A history may have several possible prompts, one before each turn of an
            assistant, since examples in a prompt look like turns. Empty = unknown.
        beginnings: digests of all other beginnings of a history's messages. A row of the data may be shorter than the
            prompt, to which the agent adds a first observation.
    """

    tokens: bytes | None = None
    messages: frozenset[bytes] = frozenset()
    beginnings: frozenset[bytes] = frozenset()

    def differs(self, row: Prompt) -> bool:
        """Return whether a history with this prompt belongs to another row; False if nothing can be compared."""
        if self.tokens is not None and row.tokens is not None:
            return self.tokens != row.tokens
        return bool(self.messages and row.messages) and row.messages.isdisjoint(self.messages | self.beginnings)


UNKNOWN_PROMPT = Prompt()


def prompt_of_row(row: Sequence[Message] | torch.Tensor) -> Prompt:
    """Return the prompt of a row of the training data.

    Args:
        row: its messages, or the token ids ``[P]`` that the model reads, including the header of its turn. Without
            messages it is unknown.
    """
    if isinstance(row, torch.Tensor):
        return Prompt(tokens=_of_ids(row))
    return Prompt(messages=frozenset(_beginnings(row, {len(row)}))) if row else UNKNOWN_PROMPT


def prompt_of(trajectory: AgentTrajectory) -> Prompt:
    """Return the prompt of a rollout.

    A guided rollout that still has experience in its messages is identified by its messages without it.
    """
    messages: Sequence[Message] = trajectory.messages
    shown = trajectory.metadata.get("guidance")
    tokens = _tokens(trajectory)
    if isinstance(shown, Mapping) and not shown.get("taken_out"):
        messages, tokens = _without(messages, shown.get("insertions", ())), None
    by_model = [message.get("role") == "assistant" or message.get("author") == "llm" for message in messages]
    ends = {place for place, flag in enumerate(by_model) if flag} | {len(messages)}
    if not messages:
        return Prompt(tokens)
    others = set(range(1, len(messages))) - ends
    return Prompt(tokens, frozenset(_beginnings(messages, ends)), frozenset(_beginnings(messages, others)))


class RowPrompts:
    """The known prompts of the training data's rows.

    Args:
        get_task: returns the task of an id; ``None`` if the data have no such task.
        row_of: returns the prompt of a task's row, as for :func:`prompt_of_row`. Without it, prompts are set by
            :meth:`note`.
    """

    def __init__(
        self,
        get_task: Callable[[str], Any | None] = str,
        row_of: Callable[[Any], Sequence[Message] | torch.Tensor] | None = None,
    ) -> None:
        self._get_task = get_task
        self._row_of = row_of
        self._known: dict[str, Prompt | None] = {}
        """Prompt by task; ``None`` = nothing to compare."""
        self._warned = False

    def note(self, task: str, prompt: Prompt) -> None:
        """Set the prompt of a task's row from a rollout of this run, if the data do not provide it.

        A task whose rollouts have different prompts, such as a clock or a first observation, is not compared.
        """
        if self._row_of is not None:
            return
        known = self._known.setdefault(task, prompt)
        if known is None or not prompt.differs(known):
            return
        self._known[task] = None
        if not self._warned:
            self._warned = True
            logger.warning(
                "experience pool: rollouts of task %r have different prompts (a clock, a first observation?), so its"
                " histories are replayed without comparing prompts, and so are those of other such tasks;"
                " ReplayHook(task_prompt=...) gives the prompts to compare",
                task,
            )

    def differs(self, task: str, prompt: Prompt) -> bool:
        """Return whether a history's prompt differs from that of its task's row."""
        row = self._row(task)
        return row is not None and prompt.differs(row)

    def is_other(self, task: str, prompt: Prompt, newest: Prompt) -> bool:
        """As :meth:`differs`; a task whose row is unknown has the prompt of its newest rollout."""
        row = self._row(task)
        return prompt.differs(newest if task not in self._known else row or UNKNOWN_PROMPT)

    def _row(self, task: str) -> Prompt | None:
        if task not in self._known and self._row_of is not None:
            known_task = self._get_task(task)
            self._known[task] = None if known_task is None else prompt_of_row(self._row_of(known_task))
        return self._known.get(task)


def _tokens(trajectory: AgentTrajectory) -> bytes | None:
    ids, mask = trajectory.input_ids, trajectory.loss_mask
    if ids is None:
        return None
    end = None if mask is None else _first_written(mask)
    if end is None:
        end = trajectory.response_start
    if end is None:
        return None
    prompt = ids[:end]
    if trajectory.attention_mask is not None:
        prompt = prompt[trajectory.attention_mask[:end] != 0]
    return _of_ids(prompt)


def _first_written(mask: torch.Tensor) -> int | None:
    """Return the first position of a mask that is not 0; ``None`` if there is none."""
    written = (mask != 0).to(torch.uint8)  # ten times as fast as computing all positions
    place = int(written.argmax()) if len(written) else 0
    return place if len(written) and written[place] else None


def _of_ids(ids: torch.Tensor) -> bytes:
    plain = ids.detach().to(torch.int64).cpu().contiguous().numpy()
    return hashlib.blake2b(plain.tobytes(), digest_size=_DIGEST_BYTES).digest()


def _beginnings(messages: Sequence[Message], ends: set[int]) -> Iterator[bytes]:
    """Yield, for each n of ``ends``, the digest of roles and contents of the first n messages."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for number in range(max(ends, default=-1) + 1):
        if number in ends:
            yield digest.digest()
        if number < len(messages):
            digest.update(plain_json([messages[number].get("role"), messages[number].get("content")]))


def _without(messages: Sequence[Message], insertions: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    plain = [dict(message) for message in messages]
    for number, text in ((insertion["message"], insertion["text"]) for insertion in insertions):
        if number < len(plain) and isinstance(plain[number].get("content"), str):
            plain[number]["content"] = plain[number]["content"].replace(text, "", 1)
    return plain


def plain_json(said: list[Any]) -> bytes:
    """Return JSON that is the same before and after storage."""
    try:
        return orjson.dumps(said)
    except TypeError:  # such as numpy's numbers, which a store keeps as plain ones
        return orjson.dumps(orjson.loads(encode_document({"said": said}))["said"])
