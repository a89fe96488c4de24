"""Finished rollouts of an interrupted step take the place of ones to be generated.

A prompt gets the ``uid`` of its interrupted group, so its missing sessions complete this group; the agent loop
``trajstore_reuse`` returns a finished session from the store.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from tensordict import TensorDict

from trainer_hooks.guidance.context import GUIDANCE
from trainer_hooks.plain import plain
from trainer_hooks.replay.rows import row_count
from trainer_hooks.verl.rows import MEDIA, REUSE, SAMPLING, attached_names, messages_of
from trainer_hooks.verl.tasks import column_of, task_name, with_texts
from trajstore._core.buffer.reader import Reader
from trajstore._core.reading.contents import Contents
from trajstore.errors import TrajstoreError, listed
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

_CHANGED = "sampled with other"
"""Begins the reasons that a user may not expect, since something was changed after the crash."""

REUSE_LOOP = "trajstore_reuse"
"""Name of the agent loop of reused rollouts in verl's registry."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Finished rollouts of a prompt, as sent to its agent loop."""

    loop: str
    """Agent loop of the other rollouts."""
    sessions: dict[int, int]
    """Trajectory id by session."""

    def to_text(self) -> str:
        """Return the column's text; inverse of :meth:`of_text`."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def of_text(cls, text: str) -> Finished:
        """Return the finished rollouts in a column's text."""
        return msgspec.json.decode(text, type=cls)


@dataclass(frozen=True, slots=True)
class _Group:
    """A prompt's rollouts in the store."""

    uid: str
    task: str
    messages: list[dict[str, Any]]
    """Of the prompt, and of a response."""
    truth: Any
    """Ground truth with which they were rated; None if there was none."""
    sessions: dict[int, int] = field(default_factory=dict)
    """Trajectory id by session."""

    def changed(self, messages: list[dict[str, Any]], rated: Any) -> str:
        """Return what is not this prompt's: messages or ground truth; those of a response have an author."""
        count = len(messages)
        if not messages or self.messages[:count] != messages:
            return "prompt"
        if not all("author" in more for more in self.messages[count:]):
            return "prompt"
        other = isinstance(rated, Mapping) and plain(rated.get("ground_truth")) != self.truth
        return "ground truth" if other else ""


class Reuse:
    """The rollouts of the step that a crash interrupted. Not thread-safe.

    Args:
        sampling: digest of the options that rollouts depend on.
        agent_loop: agent loop of prompts that name none.
        tokenizer: fingerprint of the tokenizer and its chat template.
    """

    def __init__(self, sampling: str, agent_loop: str, tokenizer: str) -> None:
        self._sampling, self._tokenizer = sampling, tokenizer
        self._agent_loop = agent_loop
        self._groups: list[_Group] = []
        """Groups without a prompt."""
        self._offers: dict[str, _Group] = {}
        """Groups of prompts that are not generated yet, by ``uid``."""
        self._step = -1
        self._refused: Counter[str] = Counter()

    def find(self, reader: Reader, step: int, runs: Container[str] | None) -> None:
        """Find the rollouts that the weights of a checkpoint sampled.

        Args:
            reader: of the recorded rollouts.
            step: step of the checkpoint; 0 = none.
            runs: ids of the processes that sampled with these weights; ``None`` = all.
        """
        ids, versions = reader._live.locked(_ids_and_versions)
        self._step = step + 1
        self._refused = Counter({"sampled by newer weights than the checkpoint's": int((versions > step + 1).sum())})
        groups: dict[str, _Group] = {}
        for number in ids[versions == step + 1].tolist():
            try:
                rollout = reader.get(number)
            except (TrajstoreError, OSError) as error:
                logger.warning("rollout %d is generated again, it cannot be read: %s", number, error)
                self._refused["unreadable"] += 1
                continue
            if not isinstance(rollout, AgentTrajectory):
                continue
            if reason := self._refusal(rollout, runs):  # also of one that the pool was seeded with
                self._refused[reason] += 1
                continue
            uid, session = rollout.rollout_id.split("_")[:2]
            group = groups.setdefault(
                uid, _Group(uid, rollout.task_id, rollout.messages, rollout.metadata.get("ground_truth"))
            )
            group.sessions.setdefault(int(session), number)
        self._groups = [*groups.values()]

    def waits_for(self, rollout_id: str) -> bool:
        """Return whether a rollout is of a group that waits for its prompt."""
        return rollout_id.split("_")[0] in {group.uid for group in self._groups}

    def _refusal(self, rollout: AgentTrajectory, runs: Container[str] | None) -> str:
        """Return why a rollout of the right version is not reused; empty if it is."""
        metadata = rollout.metadata
        if runs is not None and metadata.get("run") not in runs:
            return "sampled by weights of another run"
        if metadata.get("min_global_steps") != metadata.get("max_global_steps"):
            return "sampled by weights of several steps"
        if metadata.get(SAMPLING) != self._sampling:
            return f"{_CHANGED} options, tools or reward function"
        if rollout.tokenizer_fingerprint != self._tokenizer:
            return f"{_CHANGED} tokenizer or chat template"
        if GUIDANCE in metadata or metadata.get("outputs") != row_count(rollout):
            return "guided, or incomplete"
        if any(name.startswith(f"{MEDIA}.") for name in attached_names(metadata)):
            return "with images, sound or video, which are not stored as the agent loop had them"
        return ""

    def named(self, prompts: TensorDict, step: int) -> TensorDict:
        """Return new prompts; those with finished rollouts have the ``uid`` of these.

        Args:
            prompts: of the training data.
            step: that they are for.
        """
        if step != self._step:
            self._groups = []
            self._refused.clear()
        if not self._groups and not any(self._refused.values()):
            return prompts
        uids = list(prompts["uid"])
        sources, indices = column_of(prompts, "data_source", ""), column_of(prompts, "index", "")
        messages, rated = column_of(prompts, "raw_prompt", ()), column_of(prompts, "reward_model", None)
        changed: dict[str, set[str]] = {}
        for place, task in enumerate(task_name(*names) for names in zip(sources, indices, strict=True)):
            asked = messages_of(messages[place])
            of_task = [(group.changed(asked, rated[place]), group) for group in self._groups if group.task == task]
            if fits := [group for change, group in of_task if not change]:
                uids[place] = fits[0].uid
                self._offers[fits[0].uid] = fits[0]
                self._groups.remove(fits[0])
            else:
                for change, _ in of_task:
                    changed.setdefault(change, set()).add(task)
        self._log(changed)
        return with_texts(prompts, uid=uids)

    def _log(self, changed: Mapping[str, set[str]]) -> None:
        reasons = self._refused.copy()
        for group in self._groups:
            of_task = [
                f"{_CHANGED} {change} ({listed(sorted(tasks))})"
                for change, tasks in changed.items()
                if group.task in tasks
            ]
            reasons[of_task[0] if of_task else "of prompts that are not in the step"] += len(group.sessions)
        is_changed = any(reason.startswith(_CHANGED) for reason in reasons)
        logger.log(
            logging.WARNING if is_changed else logging.INFO,
            "step %d: %d finished rollouts of %d prompts are in the store and are not generated again; not reused: %s",
            self._step,
            sum(len(group.sessions) for group in self._offers.values()),
            len(self._offers),
            ", ".join(f"{count} {reason}" for reason, count in reasons.items() if count) or "none",
        )
        self._refused.clear()

    def offered(self, prompts: TensorDict) -> TensorDict:
        """Return prompts whose finished rollouts come from the store; see :class:`Finished`."""
        groups = [self._offers.pop(uid, None) for uid in column_of(prompts, "uid", "")] if self._offers else []
        if not any(groups):
            return prompts
        loops = column_of(prompts, "agent_name", self._agent_loop)
        texts = [""] * len(groups)
        for place, group in enumerate(groups):
            if group is not None:
                texts[place], loops[place] = Finished(loops[place], group.sessions).to_text(), REUSE_LOOP
        return with_texts(prompts, agent_name=loops, **{REUSE: texts})


def _ids_and_versions(contents: Contents) -> tuple[Any, Any]:
    index = contents.index
    readable = slice(max(contents.start - index.first, 0), None)
    return index["trajectory_id"][readable].copy(), index["version_low"][readable].copy()
