"""Makes replayable rows of trajectories that have messages but no tokens, by a Hugging Face tokenizer.

The messages may be OpenAI's: contents of parts, ``tool_calls`` or ``function_call`` with arguments as JSON texts,
``refusal``, and ``weight`` 0 on a message that is not trained on. ``metadata["tools"]`` goes to the chat template.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import orjson

from trainer_hooks.replay.contract import fingerprint_of
from trainer_hooks.replay.control_tokens import ControlTokens
from trainer_hooks.replay.conversation import ChatTemplate, Context, with_tokens
from trainer_hooks.replay.entry import DEMONSTRATION, of_earlier_run
from trainer_hooks.replay.wellformed import field_problem
from trajstore._core.base.arguments import one_of
from trajstore._core.columns.limits import shown
from trajstore.errors import ConfigurationError, InvalidTrajectoryError, trajectories
from trajstore.operations.tokenizers import tokenizer_at
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

NEEDS_TOKENIZER = (
    "give the run's tokenizer, with its chat template: ReplayHook(tokenizer=...), or `trajstore pool seed --tokenizer`"
)
"""Remedy for trajectories that have messages only."""

CONTROL_TOKENS = "control_tokens"
"""Key of ``metadata``: number of control-token names in the texts, each of which got a space; absent = none."""


@dataclass(frozen=True, slots=True)
class MessageTokenizer:
    """Makes rows of messages in the same way as the run that will replay them.

    Attributes:
        template: makes the tokens.
        control: breaks up names of control tokens in texts, so that no text ends a message.
        fingerprint: of tokenizer and chat template.
        with_tools: returns the template for a list of tools.
        context: ``linear``, a conversation is one row; or ``linear_think``, a row for each turn of the model.
        think_hint: ``linear_think``: see :func:`~trainer_hooks.replay.conversation.rows_of_messages`.

    Raises:
        ConfigurationError: ``think_hint`` has no effect in the context.
    """

    template: ChatTemplate
    control: ControlTokens
    fingerprint: str
    with_tools: Callable[[Any], ChatTemplate]
    context: Context = "linear"
    think_hint: str = ""

    def __post_init__(self) -> None:
        if self.think_hint and self.context != "linear_think":
            raise ConfigurationError(f"think_hint: {self.think_hint!r}, has no effect with context {self.context}")

    @classmethod
    def of(
        cls, tokenizer: Any, context: Context = "linear", think_hint: str = "", **template_options: Any
    ) -> MessageTokenizer:
        """Return the message tokenizer for a Hugging Face tokenizer.

        Args:
            tokenizer: with its chat template.
            context: as above.
            think_hint: as above.
            template_options: for the chat template, such as ``tools``.

        Raises:
            ConfigurationError: it is no tokenizer, or has no chat template.
        """
        one_of("context", context, get_args(Context))
        if not hasattr(tokenizer, "get_vocab"):
            raise ConfigurationError(
                f"tokenizer: {shown(tokenizer)} is a {type(tokenizer).__name__}, must be a tokenizer of Hugging Face"
                " (load_tokenizer returns one)"
            )
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigurationError("tokenizer: has no chat template, which makes tokens of messages; give one")
        control = ControlTokens.of(tokenizer, in_messages=True)

        def with_tools(tools: Any) -> ChatTemplate:
            return ChatTemplate.of(tokenizer, **{**template_options, "tools": tools})

        template = ChatTemplate.of(tokenizer, **template_options)
        return cls(template, control, fingerprint_of(tokenizer), with_tools, context, think_hint)

    def rows_of(self, trajectory: AgentTrajectory) -> AgentTrajectory:
        """Return a trajectory with the rows of its messages; unchanged if it has tokens.

        Recorded log-probs are kept if they fit the tokens (``with_tokens``). Otherwise the trajectory is marked as a
        demonstration: it has no policy version and is replayed with the current policy's log-probs.

        Raises:
            InvalidTrajectoryError: the messages cannot become rows; names the message.
        """
        if trajectory.input_ids is not None:
            return trajectory
        messages = [_plain(message, number) for number, message in enumerate(trajectory.messages)]
        tools = trajectory.metadata.get("tools")
        (messages, tools), count = self.control.taken_out_of([messages, tools])
        metadata = {**trajectory.metadata, **({CONTROL_TOKENS: count} if count else {})}
        converted = with_tokens(
            dataclasses.replace(trajectory, messages=messages, metadata=metadata),
            self.template if tools is None else self.with_tools(tools),
            self.context,
            self.think_hint,
        )
        if converted.old_log_probs is None:
            converted = dataclasses.replace(of_earlier_run(converted), entropy=None)
            converted.metadata = {**converted.metadata, DEMONSTRATION: True}
        return dataclasses.replace(converted, tokenizer_fingerprint=self.fingerprint)


@dataclass(frozen=True)
class Tokenized:
    """Result of making rows of messages.

    Attributes:
        histories: all trajectories, in order; those that could not become rows are unchanged.
        made: number of trajectories that had messages only and now have rows.
        without_log_probs: number of these without log-probs that fit their tokens.
        problems: counted reasons why trajectories could not become rows.
        control_tokens: names of control tokens in their texts, each of which got a space after its first character.
    """

    histories: list[AgentTrajectory]
    made: int = 0
    without_log_probs: int = 0
    problems: Counter[str] = dataclasses.field(default_factory=Counter)
    control_tokens: int = 0

    def __add__(self, other: Tokenized) -> Tokenized:
        """Return the sums of both, without the histories."""
        made, without = self.made + other.made, self.without_log_probs + other.without_log_probs
        count = self.control_tokens + other.control_tokens
        return Tokenized([], made, without, self.problems + other.problems, count)

    def log(self, source: object) -> None:
        """Log a warning about trajectories without tokens, if there were any."""
        if self.made:
            logger.warning(
                "%s: %s messages only; they are replayed with the tokens that the tokenizer makes of"
                " them, %d of them with the current policy's log-probs, since none that fit these tokens are recorded",
                source,
                trajectories(self.made, "has", "have"),
                self.without_log_probs,
            )
        if self.control_tokens:
            logger.warning(
                "%s: %d names of control tokens in the messages; each has a space after its first character now",
                source,
                self.control_tokens,
            )
        for problem, count in self.problems.most_common(3):
            logger.warning("%s: %s cannot become tokens: %s", source, trajectories(count), problem)


def tokenized(histories: Sequence[AgentTrajectory], tokenizer: MessageTokenizer) -> Tokenized:
    """Return trajectories with rows of their messages; one that cannot become rows is returned unchanged."""
    made: list[AgentTrajectory] = []
    problems: Counter[str] = Counter()
    for trajectory in histories:
        if field_problem(trajectory) or not all(isinstance(message, Mapping) for message in trajectory.messages):
            made.append(trajectory)  # will be refused as malformed
            continue
        try:
            made.append(tokenizer.rows_of(trajectory))
        except InvalidTrajectoryError as error:
            problems[str(error)] += 1
            made.append(trajectory)
    changed = [new for new, old in zip(made, histories, strict=True) if new is not old]
    return Tokenized(
        made,
        len(changed),
        sum(trajectory.old_log_probs is None for trajectory in changed),
        problems,
        sum(trajectory.metadata.get(CONTROL_TOKENS, 0) for trajectory in changed),
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


def _plain(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a message as chat templates read it: a text as content, arguments of tool calls as objects.

    Raises:
        InvalidTrajectoryError: it has other content, or its own tokens.
    """
    message = dict(message)
    if message.get("token_ids") is not None:
        raise InvalidTrajectoryError(
            f"messages[{number}].token_ids: tokens would be made of the text instead; give the rollout's input_ids,"
            " loss_mask and response_start (`trajstore convert --from jsonl`), or leave them out"
        )
    if message.get("weight") not in (None, 0, 1):
        raise InvalidTrajectoryError(f"messages[{number}].weight: {message['weight']!r}, must be 0 or 1")
    if (call := message.pop("function_call", None)) is not None:  # OpenAI's predecessor of tool_calls
        message["tool_calls"] = [{"type": "function", "function": call}]
    if message.get("role") == "function":
        message["role"] = "tool"
    content, calls = message.get("content"), message.get("tool_calls")
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
