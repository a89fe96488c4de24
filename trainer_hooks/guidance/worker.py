"""``ExperienceWorker``: experience into the messages of a rollout, and out of them for training."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from trainer_hooks.guidance.context import ExperienceTemplate, Guidance, Insertion, TrainMode, put_in, take_out
from trainer_hooks.guidance.maker import NOTHING, ExperienceMaker, MakerError, Retrieved, Trouble
from trainer_hooks.guidance.summary import text_of, unicode_of
from trainer_hooks.replay.control_tokens import ControlTokens
from trajstore.core.base import locks
from trajstore.core.base.arguments import one_of, whole
from trajstore.errors import InvalidTrajectoryError

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TrajExpConfig:
    """What guidance has decided for one rollout, and what it did to its messages so far.

    Attributes:
        add_exp: whether the rollout is to be guided.
        train_mode: whether training keeps what is put in.
        task_id: of the rollout.
        experience_list: texts that were put in, without the template.
        names: names of the experiences in them.
        insertions: what was put into the messages, in order.
    """

    add_exp: bool = False
    train_mode: TrainMode = "discard"
    task_id: str = ""
    experience_list: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    insertions: list[Insertion] = field(default_factory=list)

    def __post_init__(self) -> None:
        one_of("train_mode", self.train_mode, get_args(TrainMode))

    def guidance(self, *, taken_out: bool = False) -> Guidance | None:
        """Return what the trajectory is to say of it; ``None`` if nothing was put in."""
        if not self.insertions:
            return None
        return Guidance(self.train_mode, tuple(self.names), tuple(self.insertions), taken_out)


class ExperienceWorker:
    """Puts experience into messages and takes it out. Thread-safe; every rollout has a ``TrajExpConfig`` of its own.

    Args:
        maker: where experience is asked for; ``None`` = nowhere, and nothing is put in.
        template: the text around it.
        retrieve_top_k: experiences asked for.
        control: tokens that must not stand in an experience; ``None`` = not known, and nothing is changed.
    """

    def __init__(
        self,
        maker: ExperienceMaker | None,
        *,
        template: ExperienceTemplate,
        retrieve_top_k: int = 3,
        control: ControlTokens | None = None,
    ) -> None:
        self._maker = maker
        self._template = template
        self._k = whole("retrieve_top_k", retrieve_top_k, 1)
        self._control = control
        self._trouble = Trouble("retrieving experience")
        self._counts: Counter[str] = Counter()
        self._no_place: Counter[str] = Counter()
        self._lock = locks.lock("ExperienceWorker._lock")

    def manage_rollout_context(
        self, messages: Sequence[Mapping[str, Any]], traj_config: TrajExpConfig
    ) -> list[dict[str, Any]]:
        """Return the messages to send to the model: with experience in front of the last one if there is some for it.

        What is put in is Unicode without control tokens, whatever was found. Where nothing is found, the maker fails,
        or what was found cannot be put in, they are as they were; that is counted and logged.

        Args:
            messages: of the conversation so far; not changed.
            traj_config: of this rollout; told what was put in.
        """
        unchanged = [dict(message) for message in messages]
        if not traj_config.add_exp or self._maker is None:
            return unchanged
        found = self.find(messages)
        if not found.text:
            return unchanged
        try:
            found = self._harmless(found)
            changed, insertion = put_in(messages, self._template.fill(found.text))
        except InvalidTrajectoryError as error:
            self._count("no_place")
            self._tell_of_no_place(traj_config.task_id, error)
            return unchanged
        self._count("guided")
        traj_config.insertions.append(insertion)
        traj_config.experience_list.append(found.text)
        traj_config.names += [name for name in found.names if name and name not in traj_config.names]
        return changed

    def manage_training_context(
        self, messages: Sequence[Mapping[str, Any]], traj_config: TrajExpConfig
    ) -> tuple[list[str], list[dict[str, Any]]]:
        """Return what was put in and is not trained on, and the messages to train on.

        With train mode ``discard`` they are to the byte what they would have been without; with ``keep`` they are as
        sampled.

        Args:
            messages: of the rollout, as the model got them; not changed.
            traj_config: of this rollout.

        Raises:
            InvalidTrajectoryError: a message does not begin with what was put in front of it.
        """
        if traj_config.train_mode != "discard":
            return [], [dict(message) for message in messages]
        return list(traj_config.experience_list), take_out(messages, traj_config.insertions)

    def find(self, messages: Sequence[Mapping[str, Any]]) -> Retrieved:
        """Return the experience for a conversation; nothing if there is none, or the maker fails."""
        if self._maker is None:
            return NOTHING
        query = "\n".join(text_of(message) for message in messages if message.get("role") != "system")
        try:
            found = self._maker.retrieve(query, self._k)
        except MakerError as error:
            self._trouble.failed(error)
            return NOTHING
        except Exception as error:  # a maker is anybody's code, and a rollout goes on without it
            logger.exception("guidance: retrieval failed")
            self._trouble.failed(MakerError("failed", repr(error)))
            return NOTHING
        self._trouble.succeeded()
        if not found.text:
            self._count("nothing_found")
        return found

    def _harmless(self, found: Retrieved) -> Retrieved:
        """Return what was found without halves of characters and control tokens; both are counted.

        Raises:
            InvalidTrajectoryError: control tokens cannot be taken out of it.
        """
        text, apart = unicode_of(found.text), 0
        self._count("cleaned", int(text != found.text))
        if self._control is not None:
            text, apart = self._control.taken_out(text)
        if apart and self._count("control_tokens", apart) == apart:
            logger.warning(
                "guidance: an experience holds names of control tokens; in these a space is put behind the first"
                " character (guidance/retrieve/control_tokens counts them): %r",
                found.text[:200],
            )
        return Retrieved(text, tuple(map(unicode_of, found.names)))

    def metrics(self) -> dict[str, float]:
        """Return figures since the beginning: rollouts guided, queries that found nothing, failures by kind.

        ``cleaned`` are experiences with halves of characters, ``control_tokens`` names of control tokens in them.
        """
        with self._lock:
            figures = {
                f"guidance/retrieve/{name}": float(self._counts[name])
                for name in ("guided", "nothing_found", "no_place", "cleaned", "control_tokens")
            }
        for kind, count in self._trouble.counts().items():
            figures[f"guidance/retrieve/failed/{kind}"] = float(count)
        return figures

    def _tell_of_no_place(self, task_id: str, error: InvalidTrajectoryError) -> None:
        """Log that a prompt has no place for experience: the first of a kind, the tenth, the hundredth, and so on."""
        kind = re.sub(r"\d+", "", str(error))  # of the message's content, wherever the message stands
        with self._lock:
            self._no_place[kind] += 1
            count = self._no_place[kind]
        if count == 10 ** (len(str(count)) - 1):
            logger.warning(
                "guidance: a rollout of task %r is not guided: %s; %d of this kind so far, all are counted as"
                " guidance/retrieve/no_place",
                task_id,
                error,
                count,
            )

    def _count(self, name: str, more: int = 1) -> int:
        with self._lock:
            self._counts[name] += more
            return self._counts[name]
