"""What a history answers: the identity of its prompt, by content. Pure.

A task's name says little: data that are shuffled or filtered anew may give it to another row. So a history is compared
with the row of its task by what both ask: by the token ids before the first one that the model wrote where both have
ids, else by the messages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import torch

from trajstore.core.columns.document import encode_document
from trajstore.trajectory import AgentTrajectory

_DIGEST_BYTES = 12

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What tells prompts apart.

    Attributes:
        tokens: of the token ids; ``None`` = unknown.
        messages: of the messages: a history may have several beginnings that can be its prompt, one before each turn of
            an assistant, since examples in a prompt look like turns. Empty = unknown.
    """

    tokens: bytes | None = None
    messages: frozenset[bytes] = frozenset()

    def differs(self, row: Prompt) -> bool:
        """Return whether a history with this prompt belongs to another row; not where nothing can be compared."""
        if self.tokens is not None and row.tokens is not None:
            return self.tokens != row.tokens
        return bool(self.messages and row.messages) and self.messages.isdisjoint(row.messages)


UNKNOWN_PROMPT = Prompt()


def prompt_of_row(row: Sequence[Message] | torch.Tensor) -> Prompt:
    """Return the prompt of a row of the training data.

    Args:
        row: its messages, or the token ids ``[P]`` that the model reads, the header of its turn included. Without any
            message nothing is known of it.
    """
    if isinstance(row, torch.Tensor):
        return Prompt(tokens=_of_ids(row))
    return Prompt(messages=frozenset(_beginnings(row, {len(row)}))) if row else UNKNOWN_PROMPT


def prompt_of(trajectory: AgentTrajectory) -> Prompt:
    """Return the prompt of a rollout.

    One that was shown experience, and still holds it, is known by its messages without that.
    """
    messages: Sequence[Message] = trajectory.messages
    shown = trajectory.metadata.get("guidance")
    tokens = _tokens(trajectory)
    if isinstance(shown, Mapping) and not shown.get("taken_out"):
        messages, tokens = _without(messages, shown.get("insertions", ())), None
    by_model = [one.get("role") == "assistant" or one.get("author") == "llm" for one in messages]
    ends = {place for place, on in enumerate(by_model) if on} | {len(messages)}
    return Prompt(tokens, frozenset(_beginnings(messages, ends)) if messages else frozenset())


class RowPrompts:
    """The prompts of the training data's rows, as far as they are known.

    Args:
        get_task: returns the task of an id; ``None`` if the data have no such task.
        row_of: returns what a task's row asks, as for :func:`prompt_of_row`. Without it only what :meth:`tell` said is
            known.
    """

    def __init__(
        self,
        get_task: Callable[[str], Any | None] = str,
        row_of: Callable[[Any], Sequence[Message] | torch.Tensor] | None = None,
    ) -> None:
        self._get_task = get_task
        self._row_of = row_of
        self._known: dict[str, Prompt | None] = {}

    def tell(self, task: str, prompt: Prompt) -> None:
        """Say what a task's row asks, where the data do not."""
        if self._row_of is None:
            self._known[task] = prompt

    def differs(self, task: str, prompt: Prompt) -> bool:
        """Return whether the prompt of a history is another one than that of its task's row."""
        if task not in self._known and self._row_of is not None:
            found = self._get_task(task)
            self._known[task] = None if found is None else prompt_of_row(self._row_of(found))
        row = self._known.get(task)
        return row is not None and prompt.differs(row)


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
    """Return the first place of a mask that is not 0; ``None`` if there is none."""
    written = (mask != 0).to(torch.uint8)  # a tenth of the time that the places of all would take
    place = int(written.argmax()) if len(written) else 0
    return place if len(written) and written[place] else None


def _of_ids(ids: torch.Tensor) -> bytes:
    plain = ids.detach().to(torch.int64).cpu().contiguous().numpy()
    return hashlib.blake2b(plain.tobytes(), digest_size=_DIGEST_BYTES).digest()


def _beginnings(messages: Sequence[Message], ends: set[int]) -> Iterator[bytes]:
    """Yield the digest of the first n messages for each n of ``ends``: of who says what."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for number in range(max(ends) + 1):
        if number in ends:
            yield digest.digest()
        if number < len(messages):
            digest.update(plain_json([messages[number].get("role"), messages[number].get("content")]))


def _without(messages: Sequence[Message], insertions: Iterable[tuple[int, str]]) -> list[dict[str, Any]]:
    plain = [dict(one) for one in messages]
    for number, text in insertions:
        if number < len(plain) and isinstance(plain[number].get("content"), str):
            plain[number]["content"] = plain[number]["content"].replace(text, "", 1)
    return plain


def plain_json(said: list[Any]) -> bytes:
    """Return what messages say as JSON, the same as when they are read back."""
    try:
        return orjson.dumps(said)
    except TypeError:  # numpy's numbers, say, which a store keeps as plain ones
        return orjson.dumps(orjson.loads(encode_document({"said": said}))["said"])
