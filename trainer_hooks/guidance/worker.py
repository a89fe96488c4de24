"""``ExperienceWorker``: inserts experience into a rollout's messages."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from trainer_hooks.guidance.context import ExperienceTemplate, Guidance, Insertion, TrainMode, put_in
from trainer_hooks.guidance.maker import NOTHING, ExperienceMaker, Retrieved, Trouble
from trainer_hooks.guidance.summary import conversation_of, unicode_of
from trainer_hooks.replay.control_tokens import ControlTokens
from trajstore._core.base import locks
from trajstore._core.base.arguments import one_of, whole
from trajstore.errors import InvalidTrajectoryError

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TrajExpConfig:
    """Guidance of one rollout, and the insertions made so far.

    Attributes:
        add_exp: whether the rollout is guided.
        train_mode: whether training keeps the inserted experience.
        task_id: of the rollout.
        experience_list: inserted texts, without the template.
        names: names of the experiences in them.
        insertions: the texts inserted into the messages, in order.
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
        """Return the trajectory's guidance record; ``None`` if nothing was inserted."""
        if not self.insertions:
            return None
        return Guidance(self.train_mode, tuple(self.names), tuple(self.insertions), taken_out)


class ExperienceWorker:
    """Inserts experience into messages. Thread-safe; every rollout has its own ``TrajExpConfig``.

    Args:
        maker: source of experience; ``None`` = nothing is inserted.
        template: the text around it.
        retrieve_top_k: number of experiences to retrieve.
        control: tokens not allowed in an experience; ``None`` = unknown, nothing is changed.
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
        self._lock = locks.lock("ExperienceWorker._lock")

    def manage_rollout_context(
        self, messages: Sequence[Mapping[str, Any]], traj_config: TrajExpConfig
    ) -> list[dict[str, Any]]:
        """Return the messages to send to the model, with experience in front of the last one if there is any.

        Inserted text is Unicode without control tokens. If nothing is found, the maker fails, or the experience cannot
        be inserted, the messages are returned unchanged; this is counted and logged.

        Args:
            messages: of the conversation so far; not changed.
            traj_config: of this rollout; records the insertion.
        """
        unchanged = [dict(message) for message in messages]
        if not traj_config.add_exp or self._maker is None:
            return unchanged
        retrieved = self.find(messages)
        if not retrieved.text:
            return unchanged
        try:
            retrieved = self._harmless(retrieved)
            changed, insertion = put_in(messages, self._template.fill(retrieved.text))
        except InvalidTrajectoryError as error:
            self._count("no_place")
            kind = re.sub(r"\d+", "", str(error))  # the same kind whatever the message's index
            if self._count(kind) == 1:
                logger.warning(
                    "guidance: a rollout of task %r is not guided: %s; guidance/retrieve/no_place counts this and later"
                    " ones",
                    *(traj_config.task_id, error),
                )
            return unchanged
        self._count("guided")
        traj_config.insertions.append(insertion)
        traj_config.experience_list.append(retrieved.text)
        traj_config.names += [name for name in retrieved.names if name and name not in traj_config.names]
        return changed

    def find(self, messages: Sequence[Mapping[str, Any]]) -> Retrieved:
        """Return the experience for a conversation; empty if there is none, or the maker fails."""
        if (maker := self._maker) is None:
            return NOTHING
        retrieved = self._trouble.outcome_of(lambda: maker.retrieve(conversation_of(messages), self._k))
        if retrieved is None:
            return NOTHING
        if not retrieved.text:
            self._count("nothing_found")
        return retrieved

    def _harmless(self, found: Retrieved) -> Retrieved:
        """Return experience without unpaired surrogates and control tokens; counts both.

        Raises:
            InvalidTrajectoryError: control tokens cannot be removed from it.
        """
        text, apart = unicode_of(found.text), 0
        self._count("cleaned", int(text != found.text))
        if self._control is not None:
            text, apart = self._control.taken_out(text)
        if apart and self._count("control_tokens", apart) == apart:
            logger.warning(
                "guidance: an experience holds names of control tokens; a space is inserted after their first"
                " character (guidance/retrieve/control_tokens counts them): %r",
                found.text[:200],
            )
        return Retrieved(text, tuple(map(unicode_of, found.names)))

    def metrics(self) -> dict[str, float]:
        """Return figures since the beginning: rollouts guided, queries without results, failures by kind.

        ``cleaned`` counts experiences with unpaired surrogates, ``control_tokens`` names of control tokens in them.
        """
        with self._lock:
            figures = {
                f"guidance/retrieve/{name}": float(self._counts[name])
                for name in ("guided", "nothing_found", "no_place", "cleaned", "control_tokens")
            }
        return figures | self._trouble.metrics("guidance/retrieve/failed/")

    def _count(self, name: str, more: int = 1) -> int:
        with self._lock:
            self._counts[name] += more
            return self._counts[name]
