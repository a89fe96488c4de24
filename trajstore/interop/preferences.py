"""Conversations as TRL trains on them, and preferences: pairs of rollouts (``dpo``) and single ones (``kto``)."""

from __future__ import annotations

import math
from base64 import b64decode
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

from trajstore.errors import InvalidTrajectoryError, TrajstoreError
from trajstore.interop.formats import (
    Format,
    Item,
    PartsWriter,
    Row,
    Selection,
    by_pyarrow,
    damaged,
    logger,
    read_parquet,
)
from trajstore.interop.rollouts import TENSORS, message_columns, message_type
from trajstore.query.documents import image_in, text_of
from trajstore.query.engine import pl
from trajstore.trajectory import AgentTrajectory

Columns = dict[str, Any]
"""Types of Polars by name."""

LIKED = 0.5
"""Outcomes above this are desirable in ``kto``."""


NO_MESSAGES = (
    *TENSORS,
    *("response_start", "is_terminated", "policy_version", "entropy", "tokenizer_fingerprint"),
    *("reward.success_rate", "reward.description", "reward.metadata", "late values"),
)
"""Fields for which conversations have no place."""


def first_reply(rollout: AgentTrajectory) -> int:
    """Return the number of the model's first message; that of all messages without one."""
    roles = [message.get("role") for message in rollout.messages]
    return roles.index("assistant") if "assistant" in roles else len(roles)


def conversation(
    rollout: AgentTrajectory, pictured: bool, whole: bool = False
) -> tuple[list[Row], list[Row], list[Row]]:
    """Return the messages before the model's first one, the others, and the images, as columns of :func:`schema_of`.

    Args:
        rollout: with messages.
        pictured: the content of messages is a list of texts and places of images.
        whole: keep each message as JSON too, so that what TRL has no place for may be JSON text, with a warning.

    Raises:
        InvalidTrajectoryError: TRL has no place for a part of a message; names it.
    """
    split, images = first_reply(rollout), []
    columns = [message_columns(message) for message in rollout.messages]
    if not whole:
        for message in columns:
            del message["json"]
    for number, message in enumerate(rollout.messages):
        try:
            parts = _parts(message.get("content"), number, number < split and message.get("role") == "user")
        except InvalidTrajectoryError:
            if not whole:
                raise
            logger.warning(
                "convert: contents with images after the model's first message, or with parts that are no texts and no "
                "images as data, are JSON texts"
            )
            parts = [text_of(message.get("content")) or ""]
        images += [{"bytes": part, "path": None} for part in parts or () if isinstance(part, bytes)]
        if not pictured:
            columns[number]["content"] = None if parts is None else "".join(map(str, parts))
        else:
            columns[number]["content"] = parts and [
                {"type": "image", "text": None} if isinstance(part, bytes) else {"type": "text", "text": part}
                for part in parts
            ]
    return columns[:split], columns[split:], images


def _parts(content: Any, number: int, takes_images: bool) -> list[str | bytes] | None:
    """Return the texts and images of a message's content; None without any."""
    if content is None or isinstance(content, str):
        return content if content is None else [content]
    if not isinstance(content, list):
        return [text_of(content) or ""]
    parts: list[str | bytes] = []
    for at, part in enumerate(content):
        if (image := image_in(part)) is not None:
            if not takes_images:
                raise InvalidTrajectoryError(
                    f"messages[{number}]: an image, which TRL takes only from users before the model's first message"
                )
            try:
                parts.append(b64decode(image[1], validate=True))
            except ValueError as error:
                raise InvalidTrajectoryError(f"messages[{number}].content[{at}]: no base64: {error}") from error
        elif isinstance(part, str):
            parts.append(part)
        elif isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            parts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise InvalidTrajectoryError(
                f"messages[{number}].content[{at}]: {kind!r} is no text and no image as data, which TRL takes"
            )
    return parts


def is_pictured(items: Iterable[Item]) -> bool:
    """Return whether a rollout has an image that TRL takes; unreadable ones have none."""
    for item in items:
        with suppress(TrajstoreError, OSError):
            rollout = item.load()
            if isinstance(rollout, AgentTrajectory) and conversation(rollout, True)[2]:
                return True
    return False


def schema_of(names: Sequence[str], pictured: bool, others: Columns, *, whole: bool = False) -> Columns:
    """Return the types of columns: lists of messages by ``names``, ``images`` if there are any, and ``others``."""
    messages = pl.List(message_type(pictured, whole=whole))
    images = {"images": pl.List(pl.Struct({"bytes": pl.Binary, "path": pl.String}))} if pictured else {}
    return {**dict.fromkeys(names, messages), **images, **others}


# -- preferences --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Judged:
    """A rollout with a finite outcome and an answer.

    Attributes:
        item: loads it again.
        outcome: the one in force.
        prompt: digest of its task, prompt and tools.
        answer: digest of the messages after the prompt.
    """

    item: Item
    outcome: float
    prompt: bytes
    answer: bytes


def _judged(items: Iterable[Item], left_out: Counter[str]) -> Iterator[_Judged | Item]:
    """Yield the rollouts with an outcome and an answer, and an item for each that cannot be written."""
    for item in items:
        try:
            rollout = item.load()
            if not isinstance(rollout, AgentTrajectory):
                raise InvalidTrajectoryError("is not a rollout")
            conversation(rollout, False)
        except (TrajstoreError, OSError) as error:
            yield damaged(item.key, str(error), item.done)
            continue
        outcome, split = _outcome(rollout), first_reply(rollout)
        if outcome is None or not math.isfinite(outcome):
            left_out["without an outcome"] += 1
        elif not 0 < split < len(rollout.messages):
            left_out["without a prompt or without an answer of the model"] += 1
        else:
            prompt = _digest(rollout.task_id, rollout.messages[:split], rollout.metadata.get("tools"))
            yield _Judged(item, outcome, prompt, _digest(rollout.messages[split:]))


def _outcome(rollout: AgentTrajectory) -> float | None:
    return None if rollout.reward is None else rollout.reward.outcome


def _digest(*values: Any) -> bytes:
    return blake2b(orjson.dumps(values, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()


def _pairs(items: Iterable[Item]) -> tuple[list[Item], Counter[str]]:
    """Choose the best and the worst rollout of each task and prompt; of equal outcomes the newest.

    Returns:
        An item for each pair, which loads (chosen, rejected), and the numbers of rollouts left out by reason.
    """
    pairs: list[Item] = []
    left_out: Counter[str] = Counter()
    groups: dict[bytes, list[_Judged]] = {}  # by prompt: its worst and its best
    counts: Counter[bytes] = Counter()
    for found in _judged(items, left_out):
        if isinstance(found, Item):
            pairs.append(found)
            continue
        counts[found.prompt] += 1
        worst, best = groups.get(found.prompt, (found, found))
        groups[found.prompt] = [
            found if found.outcome <= worst.outcome else worst,
            found if found.outcome >= best.outcome else best,
        ]
    for prompt, (worst, best) in groups.items():
        if counts[prompt] == 1:
            left_out["alone with its task and prompt"] += 1
        elif worst.outcome == best.outcome:
            left_out["of the same outcome as all others of its task and prompt"] += counts[prompt]
        elif worst.answer == best.answer:
            left_out["of tasks whose best and worst answers are the same"] += counts[prompt]
        else:
            left_out["neither the best nor the worst of its task and prompt"] += counts[prompt] - 2
            names = {"chosen": best.item, "rejected": worst.item}
            facts = {f"{name}_{fact}": value for name, item in names.items() for fact, value in item.facts.items()}
            key = f"{best.item.key} over {worst.item.key.removeprefix('trajectory ')}"
            done = max(best.item.done, worst.item.done)
            pairs.append(Item(key, partial(_both, best.item, worst.item), done, facts))
    return pairs, +left_out


def _both(best: Item, worst: Item) -> Any:
    return best.load(), worst.load()


def _each(items: Iterable[Item]) -> tuple[list[Item], Counter[str]]:
    """Choose the rollouts with an outcome, see :func:`_pairs`."""
    left_out: Counter[str] = Counter()
    return [found if isinstance(found, Item) else found.item for found in _judged(items, left_out)], left_out


def _pair_row(pair: Any, facts: Mapping[str, Any], pictured: bool) -> Row:
    chosen, rejected = pair
    row = _columns(chosen, "chosen", pictured) | {"rejected": conversation(rejected, pictured)[1]}
    for name, one in (("chosen", chosen), ("rejected", rejected)):
        row |= {f"{name}_id": str(facts[f"{name}_trajectory_id"]), f"{name}_outcome": _outcome(one)}
    return row


def _row(rollout: AgentTrajectory, facts: Mapping[str, Any], pictured: bool) -> Row:
    outcome = _outcome(rollout)
    own = {"label": outcome is not None and outcome > LIKED, "outcome": outcome}
    return {**_columns(rollout, "completion", pictured), **own, "trajectory_id": str(facts["trajectory_id"])}


def _columns(rollout: AgentTrajectory, answer: str, pictured: bool) -> Row:
    """Return the columns of a conversation, whose messages after the prompt are the column ``answer``."""
    prompt, messages, images = conversation(rollout, pictured)
    tools = text_of(rollout.metadata.get("tools"))
    row: Row = {"prompt": prompt, answer: messages, "tools": tools, "task_id": rollout.task_id}
    return row | ({"images": images} if pictured else {})


def _write_pairs(path: Path, selection: Selection) -> PartsWriter:
    pictured = is_pictured(selection.items())
    texts: Columns = dict.fromkeys(("tools", "task_id", "chosen_id", "rejected_id"), pl.String)
    outcomes: Columns = dict.fromkeys(("chosen_outcome", "rejected_outcome"), pl.Float64)
    schema = schema_of(("prompt", "chosen", "rejected"), pictured, texts | outcomes)
    return PartsWriter(path, partial(_pair_row, pictured=pictured), schema)


def _write_each(path: Path, selection: Selection) -> PartsWriter:
    pictured = is_pictured(selection.items())
    others = {
        "label": pl.Boolean,
        **dict.fromkeys(("tools", "task_id", "trajectory_id"), pl.String),
        "outcome": pl.Float64,
    }
    return PartsWriter(path, partial(_row, pictured=pictured), schema_of(("prompt", "completion"), pictured, others))


_CANNOT_CARRY = (*NO_MESSAGES, "data_id", "rollout_id", "query", "metadata")

_rows_again = by_pyarrow(partial(read_parquet, trajectory_of=lambda row: row))

FORMATS = (
    Format("dpo", "rollouts", _CANNOT_CARRY, (), None, _write_pairs, _rows_again, _pairs, thoughts=True),
    Format("kto", "rollouts", _CANNOT_CARRY, (), None, _write_each, _rows_again, _each, thoughts=True),
)
