"""Makes replayable rows of trajectories that have messages but no tokens, by a Hugging Face tokenizer."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from trainer_hooks.replay.contract import fingerprint_of
from trainer_hooks.replay.control_tokens import ControlTokens
from trainer_hooks.replay.conversation import ChatTemplate, Context, with_tokens
from trainer_hooks.replay.entry import DEMONSTRATION, of_earlier_run
from trainer_hooks.replay.wellformed import field_problem
from trajstore._core.base.arguments import one_of
from trajstore._core.columns.limits import shown
from trajstore.errors import ConfigurationError, InvalidTrajectoryError, trajectories
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

NEEDS_TOKENIZER = (
    "give the run's tokenizer, with its chat template: ReplayHook(tokenizer=...),"
    " or `trajstore pool import --tokenizer`"
)
"""Remedy for trajectories that have messages only."""


@dataclass(frozen=True, slots=True)
class MessageTokenizer:
    """Makes rows of messages in the same way as the run that will replay them.

    Attributes:
        template: makes the tokens.
        control: breaks up names of control tokens in texts, so that no text ends a message.
        fingerprint: of tokenizer and chat template.
        context: ``linear``, a conversation is one row; or ``linear_think``, a row for each turn of the model.
        think_hint: ``linear_think``: see :func:`~trainer_hooks.replay.conversation.rows_of_messages`.

    Raises:
        ConfigurationError: ``think_hint`` has no effect in the context.
    """

    template: ChatTemplate
    control: ControlTokens
    fingerprint: str
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
        return cls(
            ChatTemplate.of(tokenizer, **template_options), control, fingerprint_of(tokenizer), context, think_hint
        )

    def rows_of(self, trajectory: AgentTrajectory) -> AgentTrajectory:
        """Return a trajectory with the rows of its messages; unchanged if it has tokens.

        Recorded log-probs are kept if they fit the tokens (``with_tokens``). Otherwise the trajectory is marked as a
        demonstration: it has no policy version and is replayed with the current policy's log-probs.

        Raises:
            InvalidTrajectoryError: the messages cannot become rows; names the message.
        """
        if trajectory.input_ids is not None:
            return trajectory
        messages, _ = self.control.taken_out_of([dict(message) for message in trajectory.messages])
        converted = with_tokens(
            dataclasses.replace(trajectory, messages=messages), self.template, self.context, self.think_hint
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
    """

    histories: list[AgentTrajectory]
    made: int = 0
    without_log_probs: int = 0
    problems: Counter[str] = dataclasses.field(default_factory=Counter)

    def __add__(self, other: Tokenized) -> Tokenized:
        """Return the sums of both, without the histories."""
        made, without = self.made + other.made, self.without_log_probs + other.without_log_probs
        return Tokenized([], made, without, self.problems + other.problems)

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
    return Tokenized(made, len(changed), sum(trajectory.old_log_probs is None for trajectory in changed), problems)
