"""Rows of tokens from messages that have no token ids: demonstrations, transcripts, pools of other programs. Pure.

A chat template makes the text, a tokenizer the tokens; both are handed in as one :class:`ChatTemplate`. Two contexts::

    linear         the whole conversation is one row; what comes after the model's last message is left out
    linear_think   a row for each of the model's turns: earlier turns without their thoughts and not trained on, the
                   last one whole

``loss_mask`` is 1 on what the model wrote with the token that ends its turn, and 0 on the template's own text: the
header that asks for the turn, the line break after it. Which tokens belong to which message is found by comparing: the
tokens of the first n messages must be the beginning of the tokens of all. Some templates change earlier messages when
later ones come; that is told.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from trainer_hooks.replay.rows import over_rows, pack_rows, rows_of
from trajstore.core.base.arguments import one_of, whole
from trajstore.errors import InvalidTrajectoryError
from trajstore.trajectory import AgentTrajectory

Context = Literal["linear", "linear_think"]

_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)

_RECORDED = ("old_log_probs", "rollout_log_probs", "entropys")

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """What makes tokens of messages.

    Attributes:
        render: text of messages; with True, and of the header that asks for the model's next turn.
        encode: token ids of a text, in which special tokens stand as text; none are added.
        special_ids: ids of the special tokens, of which one ends each turn of the model.
    """

    render: Callable[[Sequence[Message], bool], str]
    encode: Callable[[str], Sequence[int]]
    special_ids: Collection[int]

    @classmethod
    def of(cls, tokenizer: Any, **options: Any) -> ChatTemplate:
        """Return the chat template of a Hugging Face tokenizer.

        Args:
            tokenizer: with ``apply_chat_template`` and ``all_special_ids``.
            options: for its template.
        """

        def render(messages: Sequence[Message], ask: bool) -> str:
            listed = [dict(message) for message in messages]
            try:
                text = tokenizer.apply_chat_template(listed, tokenize=False, add_generation_prompt=ask, **options)
            except Exception as error:  # a template may raise anything about messages that it is not made for
                raise InvalidTrajectoryError(
                    f"messages: the chat template refuses {len(listed)} of them: {error}"
                ) from error
            return str(text)

        def encode(text: str) -> Any:
            return tokenizer(text, add_special_tokens=False)["input_ids"]

        return cls(render, encode, frozenset(tokenizer.all_special_ids))

    def end_of_turn(self, ids: Sequence[int], start: int, end: int) -> int:
        """Return the place behind the special token that ends the turn ids[start:end]; ``end`` without one."""
        return next((place + 1 for place in reversed(range(start, end)) if ids[place] in self.special_ids), end)

    def header(self, messages: Sequence[Message]) -> Sequence[int]:
        """Return the tokens that ask for the model's turn after these messages; none if they are not told apart."""
        if not messages:
            return []
        said, asked = self.render(messages, False), self.render(messages, True)
        return self.encode(asked[len(said) :]) if asked.startswith(said) else []


@dataclass(frozen=True, slots=True)
class TokenRow:
    """Tokens of one row.

    Attributes:
        input_ids: of prompt and response.
        loss_mask: 1 on what the model wrote and is trained on.
        response_start: where the header of the first turn that is trained on begins.
    """

    input_ids: list[int]
    loss_mask: list[int]
    response_start: int

    def __post_init__(self) -> None:
        whole("response_start", self.response_start, 0)


def has_thoughts(message: Message) -> bool:
    """Return whether a message has thoughts, which ``linear_think`` leaves out of earlier turns."""
    return _THOUGHT.search(str(message.get("content"))) is not None


def is_of_model(message: Message) -> bool:
    """Return whether the model wrote a message: by its author, else by its role."""
    author = message.get("author")
    return author == "llm" if author else message.get("role") == "assistant"


def is_trained(message: Message) -> bool:
    """Return whether a message is trained on: the model's, unless OpenAI's ``weight`` of it is 0."""
    return is_of_model(message) and message.get("weight") != 0


def rows_of_messages(
    messages: Sequence[Message], template: ChatTemplate, context: Context = "linear", think_hint: str = ""
) -> list[TokenRow]:
    """Return the rows of a conversation.

    Args:
        messages: with texts as content. One of the model's with ``weight`` 0 is not trained on.
        template: makes the tokens.
        context: how many rows there are, and what is in them.
        think_hint: ``linear_think``: put behind the message that each row's turn answers, as when it was written.

    Raises:
        ConfigurationError: no such context.
        InvalidTrajectoryError: no message is the model's, a content is no text, or the template changes earlier
            messages; names the message.
    """
    for number, message in enumerate(messages):
        if not isinstance(message.get("content"), str):
            kind = type(message.get("content")).__name__
            raise InvalidTrajectoryError(f"messages[{number}].content: a {kind}, must be a text to become tokens")
    one_of("context", context, get_args(Context))
    turns = [number for number, message in enumerate(messages) if is_trained(message)]
    if not turns:
        raise InvalidTrajectoryError("messages: none is the model's with a weight, so there is nothing to train on")
    if context == "linear":
        return [_row(messages[: turns[-1] + 1], turns, template)]
    rows = []
    for turn in turns:
        shown: list[Message] = []
        for number, message in enumerate(messages[: turn + 1]):
            content = message["content"]
            if number < turn and is_of_model(message):
                content = _THOUGHT.sub("", content)
            elif number == turn - 1:
                content += think_hint
            shown.append({**message, "content": content})
        rows.append(_row(shown, [turn], template))
    return rows


def with_tokens(
    trajectory: AgentTrajectory, template: ChatTemplate, context: Context = "linear", think_hint: str = ""
) -> AgentTrajectory:
    """Return a copy of the trajectory with the tokens of its messages, all rows; one that has tokens as it is.

    Recorded log-probs and entropies stay where there is one for each token of the responses (or for each that the model
    wrote) and the recorded ``response_mask``, if there is one, is that of these tokens; others are left out.

    Args:
        trajectory: not changed.
        template: makes the tokens.
        context: as for :func:`rows_of_messages`.
        think_hint: as for :func:`rows_of_messages`.

    Raises:
        ConfigurationError: no such context.
        InvalidTrajectoryError: the messages cannot become rows; names the message.
    """
    if trajectory.input_ids is not None:
        return trajectory
    return with_rows(trajectory, rows_of_messages(trajectory.messages, template, context, think_hint))


def with_rows(trajectory: AgentTrajectory, rows: Sequence[TokenRow]) -> AgentTrajectory:
    """Return a copy of the trajectory with these rows as its tokens, and with what is recorded of these tokens."""
    masks = [torch.tensor(row.loss_mask[row.response_start :]) for row in rows]
    log_probs, rollout_log_probs, entropys = (_recorded(trajectory, name, masks) for name in _RECORDED)
    parts = [
        dataclasses.replace(
            trajectory,
            input_ids=torch.tensor(row.input_ids),
            attention_mask=None,
            loss_mask=torch.tensor(row.loss_mask),
            response_mask=mask,
            response_start=row.response_start,
            old_log_probs=log_probs[number],
            rollout_log_probs=rollout_log_probs[number],
            entropys=entropys[number],
        )
        for number, (row, mask) in enumerate(zip(rows, masks, strict=True))
    ]
    return pack_rows(parts)


def _recorded(trajectory: AgentTrajectory, name: str, masks: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    """Return each row's part of a recorded column; ``None`` for each where the column fits other tokens than these."""
    column, mask = getattr(trajectory, name), trajectory.response_mask
    found = None if column is None else over_rows(column, masks)
    said = masks if mask is None else over_rows(mask, masks)
    agree = said is not None and all(torch.equal(one == 1, other == 1) for one, other in zip(said, masks, strict=True))
    return found if found is not None and agree else [None] * len(masks)


def with_prompt(trajectory: AgentTrajectory, messages: Sequence[Message], template: ChatTemplate) -> AgentTrajectory:
    """Return a copy of the trajectory with these messages, and with their tokens as the prompt of each of its rows.

    What the model wrote stays as it was sampled; its log-probs, which were those of another prompt, are left out.

    Args:
        trajectory: with tokens, and with the messages that the model read and wrote; not changed.
        messages: as many; some of those before the response are others.
        template: makes the tokens, as it did when the trajectory was made.

    Raises:
        InvalidTrajectoryError: messages of the response differ, or a row does not begin with what the template makes of
            the trajectory's messages up to the model's next turn.
    """
    if len(messages) != len(trajectory.messages):
        raise InvalidTrajectoryError(f"messages: {len(messages)}, the trajectory has {len(trajectory.messages)}")
    pairs = enumerate(zip(trajectory.messages, messages, strict=True))
    last = max((number for number, (one, other) in pairs if one != other), default=-1)
    turn = next((number for number in range(last + 1, len(messages)) if is_of_model(messages[number])), len(messages))
    old = template.encode(template.render(trajectory.messages[:turn], True))
    new = torch.tensor(template.encode(template.render(messages[:turn], True)))
    rows = []
    for row in rows_of(trajectory):
        ids, mask, start = row.input_ids, row.loss_mask, row.response_start
        if ids is None or mask is None or start is None or start < len(old) or ids[: len(old)].tolist() != list(old):
            raise InvalidTrajectoryError(
                f"input_ids: the prompt of a row does not begin with the {len(old)} tokens that the chat template makes"
                f" of messages[:{turn}] and the header of the model's turn, so no others can take their place"
            )
        rows.append(
            dataclasses.replace(
                row,
                messages=[dict(message) for message in messages],
                input_ids=torch.cat([new, ids[len(old) :]]),
                attention_mask=None,
                loss_mask=torch.cat([torch.zeros(len(new), dtype=mask.dtype), mask[len(old) :]]),
                response_start=start - len(old) + len(new),
                old_log_probs=None,
                rollout_log_probs=None,
                entropys=None,
                entropy=None,
            )
        )
    return pack_rows(rows, tuple({name for row in rows for name in row.metadata} - set(trajectory.metadata)))


def _row(messages: Sequence[Message], trained: Sequence[int], template: ChatTemplate) -> TokenRow:
    """Return the row of messages, of which some are turns that are trained on."""
    ids = list(template.encode(template.render(messages, False)))
    mask = [0] * len(ids)
    start = len(ids)
    for turn in trained:
        before = _prefix(messages, turn, False, ids, template)
        header = _prefix(messages, turn, True, ids, template)
        end = _prefix(messages, turn + 1, False, ids, template)
        start = min(start, before)
        stop = template.end_of_turn(ids, header, end)
        mask[header:stop] = [1] * (stop - header)
    return TokenRow(ids, mask, start)


def _prefix(messages: Sequence[Message], count: int, ask: bool, ids: Sequence[int], template: ChatTemplate) -> int:
    """Return how many tokens the first messages have, which are the beginning of all tokens.

    Raises:
        InvalidTrajectoryError: they are not.
    """
    if count == 0 and not ask:
        return 0
    text = template.render(messages[:count], ask)
    part = list(template.encode(text))
    if part == list(ids[: len(part)]):
        return len(part)
    place = next((at for at, (one, other) in enumerate(zip(part, ids, strict=False)) if one != other), len(ids))
    what = "the header that asks for" if ask else "what the template makes of"
    upto = f"messages[{count}]" if ask else f"messages[:{count}]"
    raise InvalidTrajectoryError(
        f"{what} {upto} is not the beginning of what it makes of all {len(messages)} messages: they part at token"
        f" {place}, after {text[-60:]!r}. The chat template changes earlier messages when later ones come, so"
        " these have no row of their own; use context linear_think, or a template that leaves them as they are"
    )
