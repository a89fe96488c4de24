"""Experience put into messages, and taken out again to the byte; what a trajectory's metadata say of that. Pure.

Messages that are given are never changed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from trajstore.core.base.arguments import whole
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
    """A text that was put in front of a message's content.

    Attributes:
        message: index of the message.
        text: what was put in.
    """

    message: int
    text: str

    def __post_init__(self) -> None:
        whole("message", self.message, 0)


@dataclass(frozen=True, slots=True)
class ExperienceTemplate:
    """The text around an experience. Only the one ``{}`` is special: other braces are what they are.

    Attributes:
        before: text in front of the experience.
        after: text behind it.
    """

    before: str
    after: str

    @classmethod
    def of(cls, text: Any) -> ExperienceTemplate:
        """Return the template of a text with one ``{}``.

        Raises:
            ConfigurationError: it is no text, or has another number of places.
        """
        if not isinstance(text, str) or text.count(_PLACE) != 1:
            raise ConfigurationError(f"experience_template: {text!r}, must be a text with one {{}} for the experience")
        before, _, after = text.partition(_PLACE)
        return cls(before, after)

    def fill(self, experience: str) -> str:
        """Return the template with an experience in its place; nothing in the experience is interpreted."""
        return f"{self.before}{experience}{self.after}"


def put_in(messages: Sequence[Message], text: str) -> tuple[list[dict[str, Any]], Insertion]:
    """Put a text in front of the last message's content; return new messages and what was done.

    Args:
        messages: the last one's content is a text, or a list of parts, to which a text part is added in front.
        text: what to put in, the template included.

    Raises:
        InvalidTrajectoryError: there is no last message, or its content is of another kind.
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
    """Return the messages as they were before the insertions, to the byte.

    The messages may have become more since. What was put in last is taken out first.

    Args:
        messages: with the insertions in them.
        insertions: what :func:`put_in` returned, in its order.

    Raises:
        InvalidTrajectoryError: a message does not begin with what was put in front of it; names the message.
    """
    changed = [dict(message) for message in messages]
    for one in reversed(insertions):
        content = changed[one.message].get("content") if one.message < len(changed) else None
        if isinstance(content, str) and content.startswith(one.text):
            changed[one.message]["content"] = content[len(one.text) :]
        elif isinstance(content, list) and content and content[0] == {"type": "text", "text": one.text}:
            changed[one.message]["content"] = content[1:]
        else:
            raise InvalidTrajectoryError(
                f"messages[{one.message}].content: does not begin with the experience that was put in front of it;"
                " hand over the messages of the rollout as they were sent to the model"
            )
    return changed


def strip_template(text: str, template: ExperienceTemplate) -> tuple[list[str], str]:
    """Return the experiences that a text holds by the look of it, and the text without them.

    For texts of which no insertions are recorded, such as transcripts of other programs: every place that looks like
    the template is taken for one, the shortest possible each.

    Args:
        text: any.
        template: one with a text on both sides of its place, so that it can be recognized; another one finds nothing.
    """
    if not template.before.strip() or not template.after.strip():
        return [], text
    pattern = re.compile(f"{re.escape(template.before)}(.*?){re.escape(template.after)}", re.DOTALL)
    return pattern.findall(text), pattern.sub("", text)


GUIDANCE = "guidance"
"""Key of ``AgentTrajectory.metadata``."""


@dataclass(frozen=True, slots=True)
class Guidance:
    """What a rollout was shown. A rollout into which nothing was put has none.

    Attributes:
        train_mode: whether training keeps what was put in.
        experiences: names of the experiences shown, as the maker names them.
        insertions: what was put into the messages, in order.
        taken_out: whether ``messages`` and tokens are those without the insertions.
    """

    train_mode: TrainMode
    experiences: tuple[str, ...]
    insertions: tuple[Insertion, ...]
    taken_out: bool = False

    @property
    def is_discarded(self) -> bool:
        """Whether training discards what was put in."""
        return self.train_mode == "discard"

    def to_json(self) -> dict[str, Any]:
        """Return the guidance as JSON; inverse of :meth:`of`."""
        return {
            "train_mode": self.train_mode,
            "experiences": list(self.experiences),
            "insertions": [[one.message, one.text] for one in self.insertions],
            "taken_out": self.taken_out,
        }

    @classmethod
    def of(cls, trajectory: AgentTrajectory) -> Guidance | None:
        """Return the guidance that a trajectory has; ``None`` if nothing was put into its messages.

        Raises:
            InvalidTrajectoryError: what it has is no guidance.
        """
        return cls.of_json(trajectory.metadata.get(GUIDANCE))

    @classmethod
    def of_json(cls, value: Any) -> Guidance | None:
        """Return the guidance that :meth:`to_json` wrote; ``None`` of ``None``.

        Raises:
            InvalidTrajectoryError: it is no guidance.
        """
        if value is None:
            return None
        try:
            mode = value["train_mode"]
            if mode not in ("keep", "discard"):
                raise ValueError(f"train_mode {mode!r}")
            return cls(
                mode,
                tuple(str(name) for name in value["experiences"]),
                tuple(Insertion(int(index), str(text)) for index, text in value["insertions"]),
                bool(value["taken_out"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidTrajectoryError(f"field metadata.{GUIDANCE}: not what guidance records: {error!r}") from error


def with_guidance(trajectory: AgentTrajectory, guidance: Guidance | None) -> AgentTrajectory:
    """Return a copy of the trajectory that records its guidance; the same one if there is none."""
    if guidance is None:
        return trajectory
    metadata = {**trajectory.metadata, GUIDANCE: guidance.to_json()}
    return dataclasses.replace(trajectory, metadata=metadata)


def plain_messages(trajectory: AgentTrajectory) -> Sequence[Mapping[str, Any]]:
    """Return a trajectory's messages without what guidance put in.

    Raises:
        InvalidTrajectoryError: they are not the messages that its insertions were made in.
    """
    guidance = Guidance.of(trajectory)
    if guidance is None or guidance.taken_out:
        return trajectory.messages
    return take_out(trajectory.messages, guidance.insertions)
