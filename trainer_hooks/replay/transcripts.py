"""Conversations of other programs as demonstrations: JSON lines, one conversation each, for an experience pool.

A line is in OpenAI's chat format with a few additions::

    {"task_id": "gsm8k:12", "messages": [{"role": "user", "content": "..."}, ...], "reward": 1.0}

``task_id`` and ``messages`` are required. ``reward`` (a number) or ``success`` (true or false) is the outcome, and
``tools`` goes to the chat template. ``rollout_id`` and ``query`` are kept under these names, all other keys in
``metadata["transcript"]``. A message may have ``token_ids``, the tokens that it added to the conversation including its
header, and ``loss_mask``, 1 on the model's tokens. If all messages up to the model's last one have ids, these are used
and nothing is tokenized. A message with OpenAI's ``weight`` 0 is not trained on, ``function_call`` is a tool call, and
``refusal`` is the model's text.

Control tokens are removed from texts before tokenization (:mod:`trainer_hooks.replay.control_tokens`).

A demonstration has no log-probs. It is replayed with those of the current policy.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from trainer_hooks.replay.conversation import (
    ChatTemplate,
    Context,
    TokenRow,
    has_thoughts,
    is_trained,
    with_rows,
    with_tokens,
)
from trainer_hooks.replay.entry import DEMONSTRATION, token_refusal
from trainer_hooks.replay.exchange import Exchanged, check_is_pool
from trainer_hooks.replay.message_rows import MessageTokenizer
from trainer_hooks.replay.outcomes import is_success, outcome_of
from trainer_hooks.replay.pool import ExperienceManager
from trainer_hooks.replay.rows import turns_as_rows
from trainer_hooks.replay.rules import PoolRules
from trainer_hooks.replay.selection import is_worth_keeping
from trainer_hooks.replay.store import BufferStore
from trajstore._core.base.arguments import finite
from trajstore.errors import (
    ConfigurationError,
    InvalidTrajectoryError,
    StoreNotFoundError,
)
from trajstore.operations.tokenizers import tokenizer_at
from trajstore.trajectory import AgentTrajectory, Reward

AT_ONCE = 64
"""Number of conversations added to the pool together."""

TRANSCRIPT = "transcript"
"""Key of ``metadata``: file and line of a demonstration, and other fields of the line."""

CONTROL_TOKENS = "control_tokens"
"""Key beside these: number of control-token names in the line's texts that got a space; absent = none."""

TOKEN_IDS, LOSS_MASK = "token_ids", "loss_mask"
"""Keys of a message with its own tokens."""

_OWN = ("messages", "task_id", "reward", "success", "rollout_id", "query")

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is not a valid conversation.

    Attributes:
        line: counted from 1.
        reason: the problem in words.
    """

    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class TranscriptReader:
    """Makes demonstrations of lines.

    Attributes:
        tokenizer: of Hugging Face, with the chat template of the run that will replay them.
        context: ``linear``, a conversation is one row; or ``linear_think``, a row for each turn of the model.
        think_hint: ``linear_think``: see :func:`~trainer_hooks.replay.conversation.rows_of_messages`.
        outcome: of lines with neither ``reward`` nor ``success``; ``None`` = such a line is bad.
        success_threshold: lowest outcome of a success.
        messages: makes the tokens; derived from the other attributes.

    Raises:
        ConfigurationError: no tokenizer, no such context, or an option that has no effect in it.
    """

    tokenizer: Any
    context: Context = "linear"
    think_hint: str = ""
    outcome: float | None = None
    success_threshold: float = 1.0
    messages: MessageTokenizer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        made = MessageTokenizer.of(self.tokenizer, self.context, self.think_hint)
        object.__setattr__(self, "messages", made)
        finite("success_threshold", self.success_threshold)
        if self.outcome is not None:
            finite("outcome", self.outcome)

    @property
    def fingerprint(self) -> str:
        """Identifies tokenizer and chat template."""
        return self.messages.fingerprint

    def read(self, path: str | Path, progress: Progress | None = None) -> Iterator[AgentTrajectory | BadLine]:
        """Yield the demonstration or problem of each line of a file, in order; skips empty lines.

        Args:
            path: a file of UTF-8 text.
            progress: called with (bytes read, bytes of the file) after each line.

        Raises:
            OSError: the file cannot be read.
        """
        name = Path(path).name
        total, done = Path(path).stat().st_size, 0
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                done += len(line)
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    try:
                        yield self._demonstration(line, {"file": name, "line": number})
                    except InvalidTrajectoryError as error:
                        yield BadLine(number, str(error))
                if progress is not None:
                    progress(done, total)

    def _demonstration(self, line: bytes, place: dict[str, Any]) -> AgentTrajectory:
        """Return the demonstration of a line.

        Raises:
            InvalidTrajectoryError: the line is not a valid conversation.
        """
        try:
            fields = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise InvalidTrajectoryError(f"not JSON: {error.msg} (character {error.pos + 1})") from error
        if not isinstance(fields, dict):
            raise InvalidTrajectoryError(f"a {type(fields).__name__}, must be an object with messages and task_id")
        messages = _messages_of(fields.get("messages"))
        if all(message.get(TOKEN_IDS) is None for message in messages):
            texts = {"messages": messages} | {name: fields[name] for name in ("tools",) if name in fields}
            changed, change_count = self.messages.control.taken_out_of(texts)
            fields |= changed
            messages = changed["messages"]
            place |= {CONTROL_TOKENS: change_count} if change_count else {}
        outcome = self._outcome(fields)
        trajectory = AgentTrajectory(
            messages=[
                {name: value for name, value in message.items() if name not in (TOKEN_IDS, LOSS_MASK)}
                for message in messages
            ],
            reward=Reward(outcome=outcome, metadata={"score": outcome}),
            task_id=_text_at(fields, "task_id"),
            rollout_id=_text_at(fields, "rollout_id", f"{place['file']}:{place['line']}"),
            query=_text_at(fields, "query", _first_query(messages)),
            tokenizer_fingerprint=self.fingerprint,
            metadata={
                DEMONSTRATION: True,
                TRANSCRIPT: {**{name: value for name, value in fields.items() if name not in _OWN}, **place},
            },
        )
        options = {} if fields.get("tools") is None else {"tools": fields["tools"]}
        template = ChatTemplate.of(self.tokenizer, **options)
        trajectory = self._with_ids(trajectory, messages, template) or with_tokens(
            trajectory, template, self.context, self.think_hint
        )
        refusal = token_refusal(trajectory)
        if refusal is not None:
            raise InvalidTrajectoryError(f"cannot be replayed: {refusal.value}")
        return trajectory

    def _outcome(self, said: Mapping[str, Any]) -> float:
        reward, success = said.get("reward"), said.get("success")
        if reward is None and success is None:
            if self.outcome is None:
                raise InvalidTrajectoryError(
                    "neither reward nor success: add one of them, or pass an outcome for all such lines"
                )
            return self.outcome
        if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
            raise InvalidTrajectoryError(f"reward: {reward!r}, must be a number")
        if success is not None and not isinstance(success, bool):
            raise InvalidTrajectoryError(f"success: {success!r}, must be true or false")
        outcome = float(success or 0) if reward is None else float(reward)
        if success is not None and is_success(outcome, self.success_threshold) is not success:
            raise InvalidTrajectoryError(
                f"success: {str(success).lower()}, but an outcome of {outcome:g} is"
                f" {'none' if success else 'one'} with success_threshold = {self.success_threshold:g}; set reward"
            )
        return outcome

    def _with_ids(
        self, one: AgentTrajectory, messages: Sequence[Mapping[str, Any]], template: ChatTemplate
    ) -> AgentTrajectory | None:
        """Return the demonstration with its messages' own ids; ``None`` if they have none."""
        turns = [number for number, message in enumerate(messages) if is_trained(message)]
        used = messages[: turns[-1] + 1] if turns else []
        given = [number for number, message in enumerate(used) if message.get(TOKEN_IDS) is not None]
        if not given:
            return None
        if len(given) < len(used):
            absent = next(number for number in range(len(used)) if number not in given)
            raise InvalidTrajectoryError(f"messages[{absent}]: has no {TOKEN_IDS}, but others have; give all or none")
        if self.context == "linear_think" and any(has_thoughts(messages[number]) for number in turns[:-1]):
            raise InvalidTrajectoryError(
                f"{TOKEN_IDS}: of a conversation with thoughts, which linear_think leaves out of earlier turns: leave"
                " the ids out, or use context linear"
            )
        ids: list[int] = []
        mask: list[int] = []
        start = None
        for number, message in enumerate(used):
            tokens = _ids_of(message[TOKEN_IDS], number, len(self.tokenizer))
            if is_trained(message) and start is None:
                start = len(ids)
            ids += tokens
            mask += _mask_of(messages, number, tokens, template)
        row = with_rows(one, [TokenRow(ids, mask, start or 0)])
        return row if self.context == "linear" else turns_as_rows(row)


@dataclass(frozen=True)
class Imported(Exchanged):
    """Result of an import of transcripts: ``read`` counts lines without empty ones, ``entered`` new demonstrations.

    Attributes:
        bad: lines that are no valid conversations; neither ``entered`` nor ``refused``.
        control_tokens: number of control-token names in texts that got a space after the first character.
        highest_failure: highest outcome among those refused as ``not_worth_keeping``; ``None`` = there are none.
    """

    bad: list[BadLine] = field(default_factory=list)
    control_tokens: int = 0
    highest_failure: float | None = None


def import_transcripts(
    store: str | Path, source: str | Path, rules: PoolRules, reader: TranscriptReader, progress: Progress | None = None
) -> Imported:
    """Add the conversations of a file to the pool of a store, which is created if there is none.

    Known conversations are skipped, so the same file can be imported again, also after an interruption.

    Args:
        store: directory or URL of the pool's store.
        source: the file, in this module's format.
        rules: of the run that will replay them; only its limits per task matter.
        reader: makes demonstrations of lines.
        progress: called with (bytes read, bytes of the file) after each line.

    Raises:
        ConfigurationError: ``store`` is not a pool, or of another tokenizer, or its rules never replay demonstrations.
        StoreNotFoundError: there is no such file.
        StoreLockedError: a run is using the store.
        StoreWriteError: the store could not write; earlier additions are kept.
    """
    if not Path(source).is_file():
        raise StoreNotFoundError(f"{source}: no such file")
    check_is_pool(store)
    with BufferStore.open(store) as buffer:
        manager = ExperienceManager(rules, store=buffer, tokenizer_fingerprint=reader.fingerprint)
        before = len(manager)
        refused: Counter[str] = Counter()
        bad: list[BadLine] = []
        control_tokens = 0
        outcomes: list[float] = []
        items = reader.read(source, progress)
        lines = 0
        while chunk := list(islice(items, AT_ONCE)):
            lines += len(chunk)
            bad += [item for item in chunk if isinstance(item, BadLine)]
            demonstrations = [item for item in chunk if isinstance(item, AgentTrajectory)]
            control_tokens += sum(item.metadata[TRANSCRIPT].get(CONTROL_TOKENS, 0) for item in demonstrations)
            outcomes += [outcome_of(item) or 0.0 for item in demonstrations if not is_worth_keeping(item, rules)]
            refused += manager.seed(demonstrations)
        manager.flush()
        return Imported(
            source=str(source),
            trajectories=len(manager),
            tasks=len(manager.get_task_ids()),
            refused=refused,
            read=lines,
            before=before,
            entered=lines - len(bad) - refused.total(),
            left=manager.left,
            bad=bad,
            control_tokens=control_tokens,
            highest_failure=max(outcomes, default=None),
        )


def load_tokenizer(path: str, chat_template: str | Path | None = None) -> Any:
    """Return a Hugging Face tokenizer, optionally with the chat template in a file.

    Args:
        path: folder, or name in the cache of a model hub on this machine.
        chat_template: file with a template in Jinja.

    Raises:
        ConfigurationError: it cannot be loaded, or there is no chat template.
        MissingDependencyError: transformers is not installed.
    """
    tokenizer = tokenizer_at(path)
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"chat_template: {chat_template}: cannot be read: {error}") from error
    if not tokenizer.chat_template:
        raise ConfigurationError(f"tokenizer: {path}: has no chat template; give one")
    return tokenizer


def _text_at(said: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """Return a string field of a line, or the default if absent."""
    value = said.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str) or not value:
        raise InvalidTrajectoryError(f"{name}: {value!r}, must be a text that is not empty")
    return value


def _messages_of(value: Any) -> list[dict[str, Any]]:
    """Return messages with strings as content, and the arguments of tool calls as objects."""
    if not isinstance(value, list) or not value:
        raise InvalidTrajectoryError("messages: must be a list of messages, at least one")
    return [_message(message, number) for number, message in enumerate(value)]


def _message(value: Any, number: int) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise InvalidTrajectoryError(f"messages[{number}]: must be an object with a role")
    message = dict(value)
    if message.get("weight") not in (None, 0, 1):
        raise InvalidTrajectoryError(f"messages[{number}].weight: {message['weight']!r}, must be 0 or 1")
    if (call := message.pop("function_call", None)) is not None:  # OpenAI's predecessor of tool_calls
        message["tool_calls"] = [{"type": "function", "function": call}]
    if message["role"] == "function":
        message["role"] = "tool"
    content = message.get("content")
    calls = message.get("tool_calls")
    if content is None and isinstance(message.get("refusal"), str):
        content = message.pop("refusal")  # the model's text instead of an answer
    if content is None and calls:
        content = ""
    elif isinstance(content, list):
        parts = [
            part.get(part["type"]) if isinstance(part, dict) and part.get("type") in ("text", "refusal") else None
            for part in content
        ]
        if any(not isinstance(part, str) for part in parts):
            raise InvalidTrajectoryError(
                f"messages[{number}].content: has parts that are not text; only text is replayed"
            )
        content = "".join(map(str, parts))
    if not isinstance(content, str):
        raise InvalidTrajectoryError(f"messages[{number}].content: a {type(content).__name__}, must be a text")
    message["content"] = content
    if calls is not None:
        if not isinstance(calls, list):
            raise InvalidTrajectoryError(f"messages[{number}].tool_calls: must be a list")
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _call(call: Any) -> Any:
    """Return a tool call with its arguments as an object: OpenAI has JSON text, chat templates an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = orjson.loads(function["arguments"])
    except orjson.JSONDecodeError:  # the model's invalid JSON; templates print it unchanged
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _first_query(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the content of the first user message; empty if there is none."""
    return next((str(message["content"]) for message in messages if message["role"] == "user"), "")


def _ids_of(value: Any, number: int, vocabulary: int) -> list[int]:
    """Return the token ids of a message."""
    is_valid = isinstance(value, list) and all(type(token) is int and 0 <= token < vocabulary for token in value)
    if not is_valid:
        raise InvalidTrajectoryError(f"messages[{number}].{TOKEN_IDS}: must be a list of ids in [0, {vocabulary})")
    ids: list[int] = value
    return ids


def _mask_of(
    messages: Sequence[Mapping[str, Any]], number: int, tokens: Sequence[int], template: ChatTemplate
) -> list[int]:
    """Return 1 on a message's tokens by the model: its own mask, else from its header to its end mark."""
    message = messages[number]
    given = message.get(LOSS_MASK)
    if given is not None:
        if not isinstance(given, list) or len(given) != len(tokens) or any(value not in (0, 1) for value in given):
            raise InvalidTrajectoryError(
                f"messages[{number}].{LOSS_MASK}: must be 0 or 1 for each of {len(tokens)} {TOKEN_IDS}"
            )
        if any(given) and not is_trained(message):
            raise InvalidTrajectoryError(
                f"messages[{number}].{LOSS_MASK}: 1 on a message that is not the model's, or has weight 0"
            )
        return [int(value) for value in given]
    if not is_trained(message):
        return [0] * len(tokens)
    header = list(template.header(messages[:number]))
    first = len(header) if header and list(tokens[: len(header)]) == header else 0
    stop = template.end_of_turn(tokens, first, len(tokens))
    return [int(first <= place < stop) for place in range(len(tokens))]
