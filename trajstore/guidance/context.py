"""Experience put into messages, and taken out again to the byte. Pure; messages that are given are never changed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from trajstore.arguments import whole
from trajstore.checked import checked
from trajstore.errors import ConfigurationError, InvalidTrajectoryError

EXPERIENCE_TEMPLATE = "\n\nSome Related Experience to help you to complete the task:<EXP>{}</EXP>\n\n"
"""The default text around an experience; ``{}`` is its place."""

_PLACE = "{}"

Message = Mapping[str, Any]

TrainMode = Literal["keep", "discard"]
"""Whether training keeps the experience in the prompt, or discards it."""

Content = TypeVar("Content", str, list[Any])


@checked
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


@checked
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


@checked
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


@checked
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


@checked
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
