"""Inserts experience into messages, removes it exactly, and records it in metadata. Pure.

Given messages are never changed; :func:`put_back` replaces a rollout's.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from trajstore._core.base.arguments import whole
from trajstore._core.columns.limits import shown
from trajstore.errors import ConfigurationError, InvalidTrajectoryError
from trajstore.trajectory import AgentTrajectory

EXPERIENCE_TEMPLATE = "\n\nSome Related Experience to help you to complete the task:<EXP>{}</EXP>\n\n"
"""The default text around an experience; ``{}`` is its place."""

_PLACE = "{}"

Message = Mapping[str, Any]

TrainMode = Literal["keep", "discard"]
"""Whether training keeps the experience in the prompt, or discards it."""

Content = TypeVar("Content", str, list[Any])


@dataclass(frozen=True, slots=True)
class Insertion:
    """A text that was inserted in front of a message's content.

    Attributes:
        message: index of the message.
        text: the inserted text.
    """

    message: int
    text: str

    def __post_init__(self) -> None:
        whole("message", self.message, 0)


@dataclass(frozen=True, slots=True)
class ExperienceTemplate:
    """The text around an experience. Only the one ``{}`` is special; other braces are literal.

    Attributes:
        before: text in front of the experience.
        after: text behind it.
    """

    before: str
    after: str

    @classmethod
    def of(cls, text: Any, name: str = "experience_template") -> ExperienceTemplate:
        """Return the template of a text with one ``{}``.

        Args:
            text: the text.
            name: of the option, for the message.

        Raises:
            ConfigurationError: it is not a string, or does not have exactly one ``{}``.
        """
        if not isinstance(text, str) or text.count(_PLACE) != 1:
            raise ConfigurationError(f"{name}: {shown(text)}, must be a text with one {{}} for the experience")
        before, _, after = text.partition(_PLACE)
        return cls(before, after)

    def fill(self, experience: str) -> str:
        """Return the template with an experience in its place; nothing in the experience is interpreted."""
        return f"{self.before}{experience}{self.after}"


def put_in(messages: Sequence[Message], text: str) -> tuple[list[dict[str, Any]], Insertion]:
    """Insert a text in front of the last message's content; return new messages and the insertion.

    Args:
        messages: the last one's content is a string, or a list of parts, to which a text part is prepended.
        text: the text to insert, including the template.

    Raises:
        InvalidTrajectoryError: there are no messages, or the last content is of another kind.
    """
    if not messages:
        raise InvalidTrajectoryError("messages: empty, there is no message to put experience into")
    index = len(messages) - 1
    changed = [dict(message) for message in messages]
    content = changed[index].get("content")
    if isinstance(content, str):
        changed[index]["content"] = text + content
    elif isinstance(content, list):
        changed[index]["content"] = [{"type": "text", "text": text}, *content]
    else:
        raise InvalidTrajectoryError(
            f"messages[{index}].content: a {type(content).__name__}; experience goes in front of a text or a list of"
            " parts"
        )
    return changed, Insertion(index, text)


def take_out(messages: Sequence[Message], insertions: Sequence[Insertion]) -> list[dict[str, Any]]:
    """Return the messages as they were before the insertions, byte for byte.

    Messages may have been added since. The last insertion is removed first.

    Args:
        messages: with the insertions in them.
        insertions: from :func:`put_in`, in its order.

    Raises:
        InvalidTrajectoryError: a message does not begin with its insertion; names the message.
    """
    changed = [dict(message) for message in messages]
    for item in reversed(insertions):
        content = changed[item.message].get("content") if item.message < len(changed) else None
        if isinstance(content, str) and content.startswith(item.text):
            changed[item.message]["content"] = content[len(item.text) :]
        elif isinstance(content, list) and content and content[0] == {"type": "text", "text": item.text}:
            changed[item.message]["content"] = content[1:]
        else:
            raise InvalidTrajectoryError(
                f"messages[{item.message}].content: does not begin with the experience that was put in front of it;"
                " pass the messages of the rollout as they were sent to the model"
            )
    return changed


def strip_template(text: str, template: ExperienceTemplate) -> tuple[list[str], str]:
    """Return the experiences found in a text by their form, and the text without them.

    For texts without recorded insertions, such as transcripts of other programs: every shortest match of the template
    counts.

    Args:
        text: any.
        template: must have text on both sides of ``{}`` to be recognized; otherwise nothing is found.
    """
    if not template.before.strip() or not template.after.strip():
        return [], text
    pattern = re.compile(f"{re.escape(template.before)}(.*?){re.escape(template.after)}", re.DOTALL)
    return pattern.findall(text), pattern.sub("", text)


GUIDANCE = "guidance"
"""Key of ``AgentTrajectory.metadata``."""


@dataclass(frozen=True, slots=True)
class Guidance:
    """The experience shown to a rollout. Rollouts without insertions have none.

    Attributes:
        train_mode: whether training keeps the inserted experience.
        experiences: the maker's names of the experiences shown.
        insertions: the texts inserted into the messages, in order.
        taken_out: whether ``messages`` and tokens are those without the insertions.
    """

    train_mode: TrainMode
    experiences: tuple[str, ...]
    insertions: tuple[Insertion, ...]
    taken_out: bool = False

    @property
    def is_discarded(self) -> bool:
        """True if training discards the inserted experience."""
        return self.train_mode == "discard"

    def to_json(self) -> Any:
        """Return the guidance as JSON values, for ``metadata``."""
        return msgspec.to_builtins(self)

    @classmethod
    def of(cls, trajectory: AgentTrajectory) -> Guidance | None:
        """Return the guidance of a trajectory; ``None`` if nothing was inserted into its messages.

        Raises:
            InvalidTrajectoryError: its guidance record is invalid.
        """
        value = trajectory.metadata.get(GUIDANCE)
        try:
            return msgspec.convert(value, cls | None)
        except msgspec.ValidationError as error:
            raise InvalidTrajectoryError(f"field metadata.{GUIDANCE}: not what guidance records: {error}") from error


def with_guidance(trajectory: AgentTrajectory, guidance: Guidance | None) -> AgentTrajectory:
    """Return a copy of the trajectory that records its guidance; the same one if there is none."""
    if guidance is None:
        return trajectory
    metadata = {**trajectory.metadata, GUIDANCE: guidance.to_json()}
    return dataclasses.replace(trajectory, metadata=metadata)


def plain_messages(trajectory: AgentTrajectory) -> Sequence[Mapping[str, Any]]:
    """Return a trajectory's messages without inserted experience.

    Raises:
        InvalidTrajectoryError: its messages do not match its insertions.
    """
    guidance = Guidance.of(trajectory)
    if guidance is None or guidance.taken_out:
        return trajectory.messages
    return take_out(trajectory.messages, guidance.insertions)


def put_back(rollout: AgentTrajectory) -> None:
    """Insert the experience that training keeps into a rollout's messages, which become those that the model read."""
    guidance = Guidance.of(rollout)
    if guidance is None or guidance.taken_out:
        return
    changed = [dict(message) for message in rollout.messages]
    for insertion in guidance.insertions:
        if insertion.message < len(changed):
            changed[: insertion.message + 1] = put_in(changed[: insertion.message + 1], insertion.text)[0]
    rollout.messages = changed
