"""``KeptPool``: what a pool holds, and how it is kept: in its store, in checkpoints, as files.

Takes no lock: the one training loop that owns the pool is the one caller.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trajstore.checked import checked
from trajstore.errors import ConfigurationError
from trajstore.experience import journal, persistence
from trajstore.experience.buckets import DifficultyBuckets
from trajstore.experience.contract import check_demonstrations, check_same, check_trajectories
from trajstore.experience.cut import Draws, PoolCut
from trajstore.experience.entry import (
    REWARD_FINGERPRINT,
    Departure,
    PoolEntry,
    Refusal,
    is_demonstration,
    of_earlier_run,
)
from trajstore.experience.facts import with_pool_facts
from trajstore.experience.ledger import PoolLedger
from trajstore.experience.message_rows import NEEDS_TOKENIZER, MessageTokenizer, Tokenized, tokenized
from trajstore.experience.notices import PoolNotices, warn_of_other_rewards, warn_of_refusals
from trajstore.experience.prompts import Prompt, RowPrompts
from trajstore.experience.rules import PoolRules
from trajstore.experience.scoring import CurrentEntropy, EntropyScorer
from trajstore.experience.selection import is_worth_keeping, plan_admissions
from trajstore.experience.store import MemoryStore, PoolStore
from trajstore.trajectory import AgentTrajectory, Reward

if TYPE_CHECKING:
    from trajstore.querying import Query

logger = logging.getLogger(__name__)

MOST_TOLD = 3
"""Trajectories of files that cannot be read and are logged each; all of them are counted."""


@checked
class KeptPool:
    """Buckets, skip set and trajectories of a pool. How one is made, ``ExperienceManager`` says."""

    def __init__(
        self,
        rules: PoolRules,
        *,
        store: PoolStore | None = None,
        tokenizer_fingerprint: str = "",
        tokenizer: MessageTokenizer | None = None,
        current_entropy: CurrentEntropy | None = None,
        reward_fingerprint: str = "",
        rows: RowPrompts | None = None,
    ) -> None:
        self.rules = rules
        self.tokenized = Tokenized([])
        """What was made of trajectories that had messages only, so far."""
        self._tokenizer = tokenizer
        if tokenizer is not None:
            check_same(tokenizer.fingerprint, tokenizer_fingerprint, "tokenizer")
            tokenizer_fingerprint = tokenizer.fingerprint
        self.reward_fingerprint = reward_fingerprint
        self.refused: Counter[str] = Counter()
        """How many trajectories were refused so far, by reason (see ``Refusal``)."""
        self.draws: Draws = []
        """What was drawn in the newest steps. The figures' own; here because it goes with the pool into checkpoints."""
        self._generator = np.random.Generator(np.random.PCG64(rules.seed))
        self._ledger = PoolLedger(MemoryStore() if store is None else store, rules, self._generator)
        check_same(self._ledger.fingerprint, tokenizer_fingerprint, "the pool in the store")
        check_demonstrations(self._state.demonstrations(), rules)
        self._fingerprint = tokenizer_fingerprint or self._ledger.fingerprint
        self._counting = False
        self._notices = PoolNotices()
        warn_of_other_rewards(self._state.all_entries(), reward_fingerprint)
        self._state.rows = RowPrompts() if rows is None else rows
        self.current_entropy = current_entropy
        self._scorer = EntropyScorer()

    # ---- what the pool holds ----

    @property
    def global_steps(self) -> int:
        """The training step that is going on; the age of policies is measured against it.

        With a new step the pool goes by the outcomes that its trajectories were given late since (``annotate``).
        """
        return self._ledger.global_steps

    @global_steps.setter
    def global_steps(self, value: int) -> None:
        goes_back = not self._counting or int(value) < self._ledger.global_steps
        self._ledger.global_steps = int(value)
        self._ledger.correct()
        self._counting = True
        if goes_back:
            self._notices.ages(self._state.all_entries(), self.rules, self.global_steps)

    @property
    def difficulty2task_dict(self) -> dict[int, list[str]]:
        """``{difficulty: [task_id, ...]}``, a copy."""
        return self._state.buckets.to_dict()

    @property
    def skip_uid_set(self) -> set[str]:
        """Tasks whose fresh rollouts of the newest step all succeeded, a copy."""
        return set(self._state.skip)

    @property
    def task2trajectories(self) -> dict[str, list[AgentTrajectory]]:
        """``{task_id: [trajectory, ...]}``, oldest first. Reads the whole pool from the store; all are copies."""
        return copy.deepcopy(self._held())

    def query(self, relation: str = "trajectories") -> Query:
        """Ask about the histories that the pool holds; see :meth:`TrajectoryReplayBuffer.query`.

        Facts besides: ``difficulty`` of the task (null where it has none), ``pool_entropy`` (of the history when it
        entered, in nats), ``uses`` (how often it was drawn), ``demonstration``. Needs Polars (extra ``query``).

        Args:
            relation: what a row is: ``"trajectories"``, ``"messages"``, ``"tokens"``.

        Raises:
            ConfigurationError: the pool is in memory; or there is no such relation.
        """
        whole = self._ledger.query(relation)
        return replace(whole, facts=lambda: with_pool_facts(whole.facts(), self._state))

    @property
    def tokenizer_fingerprint(self) -> str:
        """Tokenizer of the pool's trajectories; empty if unknown."""
        return self._fingerprint

    @property
    def left(self) -> Counter[str]:
        """How many trajectories that had entered have left since the pool was opened, by reason; a copy.

        ``task_solved``: every rollout of a later step of their task succeeded. ``replaced``: a better one took the
        place in a full task. ``unavailable``: the store evicted it. ``unreadable``: it is damaged.
        """
        return self._ledger.left.copy()

    def __len__(self) -> int:
        return self._state.count()

    def metrics(self) -> dict[str, float]:
        """Return the pool's size, tasks per difficulty, skipped tasks and refusals, as flat floats."""
        result = {
            "experience_replay/pool_trajectories": float(len(self)),
            "experience_replay/pool_demonstrations": float(self._state.demonstrations()),
            "experience_replay/pool_tasks": float(len(self._state.entries)),
            "experience_replay/skipped_tasks": float(len(self._state.skip)),
            "experience_replay/refused": float(sum(self.refused.values())),
            "experience_replay/unreadable": float(self._ledger.left[Departure.UNREADABLE.value]),
        }
        for difficulty, size in sorted(self._state.buckets.sizes().items()):
            result[f"experience_replay/tasks_at_difficulty/{difficulty}"] = float(size)
        for reason, count in (+self.refused).items():
            result[f"experience_replay/refused/{reason}"] = float(count)
        return result

    def get_task_ids(self) -> list[str]:
        """Return the tasks of which the pool has trajectories."""
        return list(self._state.entries)

    @property
    def waiting_tasks(self) -> dict[str, None]:
        """Training tasks that gave way to tasks with history and wait for their turn, the first one longest.

        The mixing's own; here because it goes with the pool into checkpoints.
        """
        return self._state.waiting

    def tell_prompt(self, task_id: str, prompt: Prompt) -> None:
        """Say what the row of a task asks, where nothing else told the pool."""
        self._state.rows.tell(task_id, prompt)

    def of_other_rows(self) -> list[PoolEntry]:
        """Return what never comes out, since it answers another prompt than that of its task's row."""
        return [entry for entry in self._state.all_entries() if self._state.is_of_other_row(entry)]

    # ---- keeping it ----

    def rerate(self, outcome: Callable[[AgentTrajectory], float | None]) -> int:
        """Give every trajectory a new outcome, after the reward function has changed; return how many stay.

        What is no longer worth keeping by ``save_filter`` leaves the pool. Buckets and skip set stay as they are:
        they are of the steps that were, and the next step of a task corrects them.

        Args:
            outcome: returns the new outcome of a trajectory, a copy; ``None`` = unknown, which is no success.

        Raises:
            StoreWriteError: the store could not write; nothing was changed.
        """
        rated = []
        for held in self.task2trajectories.values():
            for one in held:
                reward = replace(one.reward or Reward(), outcome=outcome(one))
                metadata = {**one.metadata, REWARD_FINGERPRINT: self.reward_fingerprint}
                rated.append(replace(one, reward=reward, metadata=metadata))
        state = self._state
        fresh = journal.PoolState(
            DifficultyBuckets(state.buckets.to_dict()), dict(state.skip), uses=dict(state.uses), waiting=state.waiting
        )
        plan = plan_admissions({}, [one for one in rated if is_worth_keeping(one, self.rules)], self.rules)
        self._ledger.replace(fresh, plan, self.global_steps, self._generator)
        self._refuse(plan.refused, rated)
        return len(self)

    def flush(self) -> None:
        """Return when every change so far is in the store as durably as the store can make it.

        Raises:
            StoreWriteError: the store could not write.
        """
        self._ledger.flush()

    def compact(self) -> None:
        """Write the whole state as one record, and give up the records that no longer matter.

        Raises:
            StoreWriteError: the store could not write; nothing was given up.
        """
        self._ledger.compact()

    def state_dict(self) -> dict[str, Any]:
        """Return the pool's cut for a checkpoint: plain containers.

        With a durable store it names trajectories by id (:meth:`hold` keeps them there), and they are flushed.
        Without one it contains them.
        """
        self.flush()
        durable = self._ledger.durable
        entries = self._state.entries.items()
        return PoolCut(
            difficulty2task_dict=self.difficulty2task_dict,
            skip_uid_set=list(self._state.skip),
            generator=journal.generator_state(self._generator),
            global_steps=self.global_steps,
            refused=dict(self.refused),
            tokenizer_fingerprint=self._fingerprint,
            store_id=self._ledger.store_id,
            entries={task: [entry.trajectory_id for entry in held] for task, held in entries} if durable else {},
            trajectories={} if durable else self._held(),
            uses=self._state.live_uses(),
            waiting=list(self._state.waiting),
            draws=list(self.draws),
        ).to_dict()

    def hold(self, cuts: Iterable[Mapping[str, Any]]) -> None:
        """Keep the trajectories of these cuts in the store although they leave the pool, until the next call.

        So that a run can go back to any checkpoint that it may resume from. The store's own capacity counts all
        the same.

        Args:
            cuts: what :meth:`state_dict` returned at each of those checkpoints.

        Raises:
            CorruptStoreError: one is no such state; nothing was changed.
        """
        known = [PoolCut.from_dict(cut) for cut in cuts]
        named = [cut.entries for cut in known if cut.store_id == self._ledger.store_id]
        self._ledger.hold({number for entries in named for ids in entries.values() for number in ids})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state that :meth:`state_dict` returned. Trajectories the store does not keep are left out.

        Raises:
            ConfigurationError: the state's pool was made with another tokenizer, or has demonstrations that could
                never come out; nothing was changed.
            CorruptStoreError: this is no such state; nothing was changed.
        """
        cut = PoolCut.from_dict(state)
        check_same(cut.tokenizer_fingerprint, self._fingerprint, "the saved pool")
        held = self._with_tokens([one for several in cut.trajectories.values() for one in several], "the saved pool")
        fresh = cut.state()
        if cut.store_id == self._ledger.store_id:
            self._ledger.adopt(fresh, cut.entries)
        elif cut.entries:
            logger.warning(
                "experience pool: the saved pool is of another store (%s); its trajectories are not here", cut.store_id
            )
        plan = plan_admissions(fresh.entries, held, self.rules)
        found = fresh.demonstrations() + sum(map(is_demonstration, plan.accepted.values()))
        check_demonstrations(found, self.rules)
        self._ledger.replace(fresh, plan, cut.global_steps, cut.make_generator())
        self.refused = Counter(cut.refused)
        self._refuse(plan.refused, held)
        warn_of_refusals("the saved pool", plan.refused, len(held))
        self.draws = list(cut.draws)
        warn_of_other_rewards(self._state.all_entries(), self.reward_fingerprint)
        self._fingerprint = self._fingerprint or cut.tokenizer_fingerprint

    def save_experience_pool_to_disk(self, directory: str | Path) -> None:
        """Write the pool as ``difficulty2task_dict.json``, ``skip_uid_set.json`` and ``task2trajectories.pkl``.

        The directory appears whole or not at all; one that exists is replaced. The pickle holds plain
        containers only and needs neither trajstore nor torch to be read.

        Raises:
            StoreWriteError: it did not reach the disk; what was there before still is.
        """
        contents = persistence.PoolContents(self.difficulty2task_dict, list(self._state.skip), self._held())
        persistence.write_pool(Path(directory), contents)

    def load_experience_pool_from_disk(
        self, directory: str | Path, *, same_run: bool = True, global_steps: int | None = None, task_prefix: str = ""
    ) -> int:
        """Replace the pool by a saved one, ours or AgentEvolver's. Nothing that a pickle names is run.

        Trajectories that the rules do not admit, or that cannot be read, are refused and counted. The random generator
        goes on as it is.

        Args:
            directory: with the three files.
            same_run: whether policy versions are of the run that goes on; else they are unknown (``of_earlier_run``).
            global_steps: the training step to which the run goes back with the files; ``None`` = it stays at its own.
            task_prefix: comes before the name of every task.

        Returns:
            How many trajectories the files hold.

        Raises:
            StoreNotFoundError: no such directory.
            CorruptStoreError: files are absent or not what their names say, or not one trajectory can be read.
            UnsafeContentError: the pickle names something that a pool does not contain.
            ConfigurationError: the pool was made with another tokenizer, has messages only and there is no tokenizer,
                or has demonstrations that could never come out; nothing was changed.
        """
        contents = persistence.read_pool(Path(directory)).renamed(task_prefix)
        held = self._with_tokens([one for held in contents.task2trajectories.values() for one in held], directory)
        if held and all(one.input_ids is None for one in held):
            raise ConfigurationError(
                f"{directory}: not one of its {len(held)} trajectories has token ids, and their messages cannot become"
                f" tokens: {self._why_no_tokens()}"
            )
        if not same_run:
            held = [of_earlier_run(one) for one in held]
        fingerprint = check_trajectories(held, self._fingerprint)
        check_demonstrations(sum(map(is_demonstration, held)), self.rules)
        fresh = journal.PoolState(
            DifficultyBuckets(contents.difficulty2task_dict), dict.fromkeys(contents.skip_uid_set)
        )
        plan = plan_admissions(fresh.entries, held, self.rules)
        self._ledger.replace(fresh, plan, self.global_steps if global_steps is None else global_steps, self._generator)
        if global_steps is not None:  # not before: the pool that the files replace is no longer of interest
            self._counting = True
            self._notices.ages(self._state.all_entries(), self.rules, global_steps)
        self._refuse(plan.refused, held)
        for told in contents.unreadable[:MOST_TOLD]:
            logger.warning("experience pool: refused as malformed: %s", told)
        unreadable = +Counter({Refusal.MALFORMED.value: len(contents.unreadable)})
        self.refused.update(unreadable)
        warn_of_refusals(directory, plan.refused + unreadable, len(held) + len(contents.unreadable))
        warn_of_other_rewards(self._state.all_entries(), self.reward_fingerprint)
        self._fingerprint = fingerprint
        return len(held) + len(contents.unreadable)

    # ---- inside ----

    def _refuse(self, refused: Counter[str], among: Sequence[AgentTrajectory]) -> None:
        """Count what was not taken, and tell what is wrong with what is malformed."""
        self.refused.update(refused)
        if refused[Refusal.MALFORMED.value]:
            self._notices.malformed(among)

    def _held(self) -> dict[str, list[AgentTrajectory]]:
        """Return ``{task_id: [trajectory, ...]}``, sharing tensors with the store."""
        held = {task: self._ledger.read(entries) for task, entries in list(self._state.entries.items())}
        return {task: [journal.trajectory_of_entry(one) for _, one in found] for task, found in held.items() if found}

    def _with_tokens(self, trajectories: Sequence[AgentTrajectory], source: object) -> Sequence[AgentTrajectory]:
        """Return trajectories with tokens where messages can become some; tell what was made of which."""
        if self._tokenizer is None or all(one.input_ids is not None for one in trajectories):
            return trajectories
        done = tokenized(trajectories, self._tokenizer)
        done.tell(source)
        self.tokenized += done
        return done.histories

    def _why_no_tokens(self) -> str:
        if self._tokenizer is None:
            return NEEDS_TOKENIZER
        return "; ".join(problem for problem, _ in self.tokenized.problems.most_common(3)) or "there are none"

    @property
    def _state(self) -> journal.PoolState:
        return self._ledger.state
