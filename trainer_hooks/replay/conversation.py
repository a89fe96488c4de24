"""Rows of tokens from messages without token ids: demonstrations, transcripts, other programs' pools. Pure.

A chat template makes the text and a tokenizer the tokens; a :class:`ChatTemplate` has both. Two contexts::

    linear         the whole conversation is one row, up to the model's last message
    linear_think   a row for each of the model's turns: earlier turns without their thoughts and not trained on, the
                   last one whole

``loss_mask`` is 1 on the model's text and the token that ends its turn, and 0 on the template's own text: the header
before the turn, the line break after it. A message's tokens are located by comparing prefixes: the tokens of the first
n messages must be a prefix of the tokens of all. Templates that change earlier messages when later ones come, or that
leave out a part of a message, such as its tool calls, raise an error.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from trainer_hooks.replay.rows import over_rows, pack_rows, rows_of
from trajstore._core.base.arguments import one_of, whole
from trajstore.errors import InvalidTrajectoryError
from trajstore.trajectory import AgentTrajectory

Context = Literal["linear", "linear_think"]

_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)

_BESIDE_CONTENT = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""Keys of a message with more of the model's text."""

_RECORDED = ("old_log_probs", "rollout_log_probs", "entropys")

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """Converts messages to tokens.

    Attributes:
        render: text of messages; with True, followed by the header of the model's next turn.
        encode: token ids of a text in which special tokens appear as text; adds none.
        special_ids: ids of the special tokens; each turn of the model ends with one.
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
            plain = [dict(message) for message in messages]
            try:
                text = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=ask, **options)
            except Exception as error:  # templates may raise anything about unexpected messages
                raise InvalidTrajectoryError(
                    f"messages: the chat template refuses {len(plain)} of them: {error}"
                ) from error
            return str(text)

        def encode(text: str) -> Any:
            return tokenizer(text, add_special_tokens=False)["input_ids"]

        return cls(render, encode, frozenset(tokenizer.all_special_ids))

    def end_of_turn(self, ids: Sequence[int], start: int, end: int) -> int:
        """Return the position after the special token that ends the turn ids[start:end]; ``end`` without one."""
        return next((place + 1 for place in reversed(range(start, end)) if ids[place] in self.special_ids), end)


@dataclass(frozen=True, slots=True)
class TokenRow:
    """Tokens of one row.

    Attributes:
        input_ids: of prompt and response.
        loss_mask: 1 on the model's tokens that are trained on.
        response_start: position of the header of the first trained turn.
    """

    input_ids: list[int]
    loss_mask: list[int]
    response_start: int

    def __post_init__(self) -> None:
        whole("response_start", self.response_start, 0)


def has_thoughts(message: Message) -> bool:
    """Return whether a message has thoughts, which ``linear_think`` removes from earlier turns."""
    return _THOUGHT.search(str(message.get("content"))) is not None


def is_of_model(message: Message) -> bool:
    """Return whether the model wrote a message: by its author, else by its role."""
    author = message.get("author")
    return author == "llm" if author else message.get("role") == "assistant"


def is_trained(message: Message) -> bool:
    """Return whether a message is trained on: it is the model's, and its OpenAI ``weight`` is not 0."""
    return is_of_model(message) and message.get("weight") != 0


def rows_of_messages(
    messages: Sequence[Message], template: ChatTemplate, context: Context = "linear", think_hint: str = ""
) -> list[TokenRow]:
    """Return the rows of a conversation.

    Args:
        messages: with strings as content. A message of the model with ``weight`` 0 is not trained on.
        template: makes the tokens.
        context: the number of rows and their contents.
        think_hint: ``linear_think``: appended to the message that each row's turn answers, as at generation.

    Raises:
        ConfigurationError: the context is unknown.
        InvalidTrajectoryError: no message is the model's, a content is not a string, or the template changes earlier
            messages or leaves out a part of one; names the message.
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
    """Return a copy of the trajectory with the tokens of its messages, all rows; unchanged if it has tokens.

    Recorded log-probs and entropies are kept if there is one for each token of the responses (or for each that the
    model wrote), and if a recorded ``response_mask`` is that of these tokens. Otherwise they are dropped.

    Args:
        trajectory: not changed.
        template: makes the tokens.
        context: as for :func:`rows_of_messages`.
        think_hint: as for :func:`rows_of_messages`.

    Raises:
        ConfigurationError: the context is unknown.
        InvalidTrajectoryError: the messages cannot become rows; names the message.
    """
    if trajectory.input_ids is not None:
        return trajectory
    return with_rows(trajectory, rows_of_messages(trajectory.messages, template, context, think_hint))


def with_rows(trajectory: AgentTrajectory, rows: Sequence[TokenRow]) -> AgentTrajectory:
    """Return a copy of the trajectory with these rows as its tokens, and with the recorded columns that fit them."""
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
    """Return each row's part of a recorded column; ``None`` for each if the column belongs to other tokens."""
    column, mask = getattr(trajectory, name), trajectory.response_mask
    parts = None if column is None else over_rows(column, masks)
    recorded_masks = masks if mask is None else over_rows(mask, masks)
    agree = recorded_masks is not None and all(
        torch.equal(recorded == 1, expected == 1) for recorded, expected in zip(recorded_masks, masks, strict=True)
    )
    return parts if parts is not None and agree else [None] * len(masks)


def with_prompt(trajectory: AgentTrajectory, messages: Sequence[Message], template: ChatTemplate) -> AgentTrajectory:
    """Return a copy of the trajectory with new messages, whose tokens become the prompt of each of its rows.

    The model's tokens stay as sampled; their log-probs are dropped, since they belong to the old prompt.

    Args:
        trajectory: with tokens, and with the messages that the model read and wrote; not changed.
        messages: the same number of messages, of which some before the response may differ.
        template: makes the tokens; the one that the trajectory was made with.

    Raises:
        InvalidTrajectoryError: messages of the response differ, or a row does not begin with the template's tokens of
            the trajectory's messages up to the model's next turn.
    """
    if len(messages) != len(trajectory.messages):
        raise InvalidTrajectoryError(f"messages: {len(messages)}, the trajectory has {len(trajectory.messages)}")
    pairs = enumerate(zip(trajectory.messages, messages, strict=True))
    last = max((number for number, (old_message, new_message) in pairs if old_message != new_message), default=-1)
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
    """Return the row of a conversation in which the turns ``trained`` are trained on."""
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
    _check_printed(messages, trained, template)
    return TokenRow(ids, mask, start)


def _check_printed(messages: Sequence[Message], trained: Sequence[int], template: ChatTemplate) -> None:
    """Refuse messages with a part that does not change the text.

    Raises:
        InvalidTrajectoryError: there is one; names it.
    """
    text = template.render(messages, False)
    for number, message in enumerate(messages):
        for part, without in _parts(message):
            if part == "content" and number not in trained and message["content"].strip() in text:
                continue
            try:
                other = template.render([*messages[:number], without, *messages[number + 1 :]], False)
            except InvalidTrajectoryError:
                continue  # the template requires this part, so it uses it
            if other == text:
                raise InvalidTrajectoryError(
                    f"messages[{number}].{part}: the chat template leaves it out, so the model would learn to leave it"
                    " out too; use a template that prints it, or remove it from the message"
                )


def _parts(message: Message) -> Iterator[tuple[str, Message]]:
    """Yield the name of each part of a message's text, and the message without it."""
    content = message["content"]
    if content.strip():
        yield "content", {**message, "content": ""}
    if has_thoughts(message):
        yield "content (<think>)", {**message, "content": _THOUGHT.sub("", content)}
    for name in _BESIDE_CONTENT:
        value = message.get(name)
        if isinstance(value, list):
            for place in range(len(value)):
                others = value[:place] + value[place + 1 :]
                rest = {key: held for key, held in message.items() if key != name}
                yield f"{name}[{place}]", {**rest, name: others} if others else rest
        elif value:
            yield name, {key: held for key, held in message.items() if key != name}


def _prefix(messages: Sequence[Message], count: int, ask: bool, ids: Sequence[int], template: ChatTemplate) -> int:
    """Return the number of tokens of the first ``count`` messages.

    Raises:
        InvalidTrajectoryError: these tokens are not a prefix of ``ids``.
    """
    if count == 0 and not ask:
        return 0
    text = template.render(messages[:count], ask)
    part = list(template.encode(text))
    if part == list(ids[: len(part)]):
        return len(part)
    place = next(
        (position for position, (own, whole_id) in enumerate(zip(part, ids, strict=False)) if own != whole_id), len(ids)
    )
    kind = "the header that asks for" if ask else "what the template makes of"
    upto = f"messages[{count}]" if ask else f"messages[:{count}]"
    raise InvalidTrajectoryError(
        f"{kind} {upto} is not the beginning of what it makes of all {len(messages)} messages: they part at token"
        f" {place}, after {text[-60:]!r}. The chat template changes earlier messages when later ones come, so"
        " these have no row of their own; use context linear_think, or a template that leaves them as they are"
    )
