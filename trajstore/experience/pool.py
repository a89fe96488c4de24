"""``ExperienceManager``: the pool of replayable trajectories, its buckets and its skip set."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trajstore.errors import InvalidTrajectoryError
from trajstore.experience import journal, persistence
from trajstore.experience.buckets import DifficultyBuckets, TaskSampling, draw_tasks
from trajstore.experience.contract import check_same, check_trajectories
from trajstore.experience.cut import PoolCut
from trajstore.experience.diagnosis import why_nothing
from trajstore.experience.ledger import PoolLedger
from trajstore.experience.notices import PoolNotices, warn_of_other_rewards, warn_of_refusals
from trajstore.experience.outcomes import TaskOutcome, count_outcomes
from trajstore.experience.scoring import CurrentEntropy, EntropyScorer
from trajstore.experience.selection import (
    REWARD_FINGERPRINT,
    AdmissionPlan,
    PoolEntry,
    PoolRules,
    Refusal,
    is_worth_keeping,
    mean_entropy,
    own_entropy,
    plan_admissions,
    rank,
    rollouts_to_keep,
    with_reward_fingerprint,
)
from trajstore.experience.store import MemoryStore, PoolStore
from trajstore.trajectory import AgentTrajectory, Reward

logger = logging.getLogger(__name__)


def task_id_of(task: Any) -> str:
    """Return the id of a task: the string itself, or the object's ``task_id``."""
    return task if isinstance(task, str) else str(task.task_id)


class ExperienceManager:
    """Keeps successful rollouts of partly solved tasks, and gives them back as histories.

    Not thread-safe; one training loop owns it. Set :attr:`global_steps` when a step begins.

    Args:
        rules: what enters, what comes out.
        store: where records are kept; opened with whatever pool it holds. In memory if ``None``.
        tokenizer_fingerprint: tokenizer and chat template of the trainer; empty = unknown, nothing is checked
            until the first trajectory that names its own.
        current_entropy: entropy under the current policy; without it the entropy saved with the trajectory counts.
        reward_fingerprint: name and version of the reward function; empty = unknown. It is kept with each trajectory,
            and where it differs there is a warning.

    Raises:
        ConfigurationError: the store's pool was made with another tokenizer.
        CorruptStoreError: the store's pool cannot be understood.
    """

    def __init__(
        self,
        rules: PoolRules,
        *,
        store: PoolStore | None = None,
        tokenizer_fingerprint: str = "",
        current_entropy: CurrentEntropy | None = None,
        reward_fingerprint: str = "",
    ) -> None:
        self.rules = rules
        self.reward_fingerprint = reward_fingerprint
        self.current_entropy = current_entropy
        self.refused: Counter[str] = Counter()
        """How many trajectories were refused so far, by reason (see ``Refusal``)."""
        self._generator = np.random.Generator(np.random.PCG64(rules.seed))
        self._ledger = PoolLedger(MemoryStore() if store is None else store, rules, self._generator)
        check_same(self._ledger.fingerprint, tokenizer_fingerprint, "the pool in the store")
        self._fingerprint = tokenizer_fingerprint or self._ledger.fingerprint
        self._scorer = EntropyScorer()
        self._counting = False
        self._notices = PoolNotices()
        warn_of_other_rewards(self._state.all_entries(), reward_fingerprint)

    # ---- what the pool holds ----

    @property
    def global_steps(self) -> int:
        """The training step that is going on; the age of policies is measured against it."""
        return self._ledger.global_steps

    @global_steps.setter
    def global_steps(self, value: int) -> None:
        goes_back = not self._counting or int(value) < self._ledger.global_steps
        self._ledger.global_steps = int(value)
        self._counting = True
        if goes_back:
            self._notices.newer_versions(self._state.all_entries(), self.rules, self.global_steps)

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

    @property
    def tokenizer_fingerprint(self) -> str:
        """Tokenizer of the pool's trajectories; empty if unknown."""
        return self._fingerprint

    def __len__(self) -> int:
        return self._state.count()

    def metrics(self) -> dict[str, float]:
        """Return the pool's size, tasks per difficulty, skipped tasks and refusals, as flat floats."""
        result = {
            "experience_replay/pool_trajectories": float(len(self)),
            "experience_replay/pool_tasks": float(len(self._state.entries)),
            "experience_replay/skipped_tasks": float(len(self._state.skip)),
            "experience_replay/refused": float(sum(self.refused.values())),
        }
        for difficulty, size in sorted(self._state.buckets.sizes().items()):
            result[f"experience_replay/tasks_at_difficulty/{difficulty}"] = float(size)
        for reason in Refusal:
            result[f"experience_replay/refused/{reason.value}"] = float(self.refused[reason.value])
        return result

    # ---- after a step ----

    def update_difficulty2task_dict(
        self, trajectories: Sequence[AgentTrajectory], asked: Mapping[str, int] | None = None
    ) -> None:
        """Put every task of this step's rollouts into the bucket of its difficulty (``TaskOutcome.difficulty``).

        Replayed trajectories do not count. A failure takes a task out of the skip set; a task that is in the skip
        set and of which no failure was seen stays without a bucket, so the order of the two updates does not matter.
        A task of which nothing is known, since no rollout of it has an outcome, stays where it is.

        Args:
            trajectories: the step's rollouts.
            asked: rollouts that were to be made, by task, where some did not come back; those are unknown.

        Raises:
            InvalidTrajectoryError: a trajectory has no ``task_id``.
        """
        changes = {}
        for task, outcome in count_outcomes(trajectories, self.rules.success_threshold, asked).items():
            difficulty = outcome.difficulty(self.rules.n_rollout)
            if difficulty is None:
                continue
            skip = not outcome.failed and task in self._state.skip
            changes[task] = journal.TaskChange(None if skip else difficulty, skip)
        self._ledger.change(changes)

    def update_skip_uid_set_and_filter_trajectories(
        self,
        trajectories: Sequence[AgentTrajectory],
        entropys: Sequence[torch.Tensor] | torch.Tensor | None = None,
        response_mask: Sequence[torch.Tensor] | torch.Tensor | None = None,
        asked: Mapping[str, int] | None = None,
    ) -> list[AgentTrajectory]:
        """Retire the tasks that this step solved, and return the rollouts that are worth keeping.

        A task is solved on full evidence only (``TaskOutcome.solved``).

        Args:
            trajectories: the step's rollouts, with reward and ``old_log_probs``; replayed ones are left out.
            entropys: ``[N, R]``, or N tensors ``[R]``, nats; row i belongs to ``trajectories[i]``. ``None``: what the
                trajectories themselves tell (``selection.own_entropy``).
            response_mask: as ``entropys``; 1 where the model wrote. ``None`` with these.
            asked: as for :meth:`update_difficulty2task_dict`.

        Returns:
            Copies with ``entropy`` set, and ``policy_version`` where it was unknown, of the rollouts that pass
            the bounds and ``save_filter``, task by task. The trajectories handed in are not changed; tensors
            are shared with them.

        Raises:
            InvalidTrajectoryError: a trajectory has no ``task_id``, or rows and trajectories differ in number.
        """
        if entropys is None or response_mask is None:
            means = [own_entropy(one) for one in trajectories]
        else:
            if not len(trajectories) == len(entropys) == len(response_mask):
                raise InvalidTrajectoryError(
                    f"{len(trajectories)} trajectories, entropys of {len(entropys)} rows and response_mask of"
                    f" {len(response_mask)}: row i must belong to trajectory i"
                )
            means = [mean_entropy(*row) for row in zip(entropys, response_mask, strict=True)]
        outcomes = count_outcomes(trajectories, self.rules.success_threshold, asked)
        kept, refused = rollouts_to_keep(
            trajectories,
            means,
            outcomes={task: one for task, one in outcomes.items() if self._may_enter(task, one)},
            rules=self.rules,
            global_steps=self.global_steps,
            generator=self._generator,
        )
        self.refused.update(refused)
        changes = {}
        for task, outcome in outcomes.items():
            if outcome.solved(self.rules.n_rollout):
                changes[task] = journal.TaskChange(None, skip=True, forget=True)
            elif outcome.failed:
                changes[task] = journal.TaskChange(self._state.buckets.difficulty(task), skip=False)
        self._ledger.change(changes)
        return kept

    def admit(self, rollouts: Sequence[AgentTrajectory], asked: Mapping[str, int] | None = None) -> tuple[int, int]:
        """Let the rollouts of one step enter the pool: both updates, and what passes is saved.

        It is also the way for rollouts that exist already, such as those of a store: step by step, with
        :attr:`global_steps` set. They need no ``entropys`` (``selection.own_entropy``).

        Args:
            rollouts: of one step, with reward and ``old_log_probs``; replayed ones do not count.
            asked: as for :meth:`update_difficulty2task_dict`.

        Returns:
            How many were offered (worth keeping, or refused), and how many of them were refused.

        Raises:
            InvalidTrajectoryError: a trajectory has no ``task_id``.
            StoreWriteError: the store could not write.
        """
        before = self.refused.total()
        self.update_difficulty2task_dict(rollouts, asked)
        kept = self.update_skip_uid_set_and_filter_trajectories(rollouts, asked=asked)
        offered = len(kept) + self.refused.total() - before
        self.save_trajectories_to_memory(kept)
        return offered, self.refused.total() - before

    def save_trajectories_to_memory(self, trajectories: Sequence[AgentTrajectory]) -> int:
        """Take trajectories into the pool and return how many of them it holds now.

        The store has its own copies. What cannot be replayed, is there already, or is no improvement for a
        full task is refused and counted in :attr:`refused`.

        Raises:
            ConfigurationError: a trajectory was made with another tokenizer; nothing was taken.
            InvalidTrajectoryError: a trajectory has no ``task_id``; nothing was taken.
        """
        fingerprint = check_trajectories(trajectories, self._fingerprint)
        marked = [with_reward_fingerprint(one, self.reward_fingerprint) for one in trajectories]
        plan = plan_admissions(self._state.entries, marked, self.rules)
        self._ledger.add(plan)
        self.refused.update(plan.refused)
        self._fingerprint = fingerprint
        return len(plan.accepted)

    # ---- before a step ----

    def get_task_ids(self) -> list[str]:
        """Return the tasks of which the pool has trajectories."""
        return list(self._state.entries)

    def get_valid_replay_task_ids(self) -> list[str]:
        """Return the tasks that are in a bucket, not skipped, and have a trajectory that may come out now."""
        return [task for tasks in self._state.valid_buckets(self.rules, self.global_steps).values() for task in tasks]

    def why_nothing(self) -> str:
        """Return why no task can be drawn now, in a sentence; empty if one can."""
        return why_nothing(self._state, self.rules, self.global_steps, self.refused)

    def sample_tasks_from_replaypool(
        self,
        n: int,
        difficulty: int | None = None,
        strategy: TaskSampling | None = None,
        exclude: Collection[str] = (),
    ) -> list[str]:
        """Draw up to ``n`` valid tasks, without replacement.

        Args:
            n: how many.
            difficulty: the one bucket to draw from; ``None`` = the rules' ``replay_difficulty``, or all.
            strategy: see ``bucket_probabilities``; ``None`` = the rules' ``task_sampling``.
            exclude: tasks that are not drawn.
        """
        buckets = self._state.valid_buckets(self.rules, self.global_steps)
        only = self.rules.replay_difficulty if difficulty is None else difficulty
        if only is not None:
            # Within one bucket every task is equally likely, even under a strategy that gives this bucket no weight.
            buckets = {only: buckets.get(only, [])}
            strategy = "by_task"
        return draw_tasks(
            buckets, n, strategy or self.rules.task_sampling, self.rules.n_rollout, self._generator, exclude
        )

    def get_offpolicy_trajectories_from_memory(self, task_id: str, n: int = 1) -> list[AgentTrajectory]:
        """Return the up to ``n`` best histories of a task; see :meth:`get_offpolicy_batch`."""
        return self.get_offpolicy_batch([task_id], n)

    def get_offpolicy_batch(self, tasks: Sequence[Any], n: int = 1) -> list[AgentTrajectory]:
        """Return up to ``n`` histories of each task, task by task, best first, none twice.

        Those that were drawn least often come first, so that a task's histories take turns; among equally often
        drawn ones the best by ``exp_select_mode``, on the entropy under the current policy if the rules want it and
        :attr:`current_entropy` gives it, else on the saved one. Each call counts as a use of what it returns.
        Returned are copies, marked ``metadata["is_experience_replay"]``.

        Args:
            tasks: task ids, or objects with a ``task_id``.
            n: histories per task at the most.
        """
        candidates = self._candidates(tasks)
        wanted = self.rules.use_current_policy_entropy and self.rules.exp_select_mode != "random"
        records = [record for found in candidates.values() for _, record in found]
        current = self._scorer(self.current_entropy, records) if wanted else None
        chosen: list[AgentTrajectory] = []
        start = 0
        for found in candidates.values():
            saved = [entry.entropy for entry, _ in found]
            entropies = saved if current is None else current[start : start + len(found)]
            start += len(found)
            uses = self._state.uses_of(entry for entry, _ in found)
            order = rank(entropies, self.rules.exp_select_mode, self._generator, uses)
            self._ledger.note_used([found[index][0] for index in order[:n]])
            chosen.extend(journal.replayed_copy(found[index][1]) for index in order[:n])
        return chosen

    def get_all_candidates_batch(self, tasks: Sequence[Any]) -> dict[str, list[AgentTrajectory]]:
        """Return, per task that has any, all histories that may come out now, oldest first, as marked copies."""
        return {
            task: [journal.replayed_copy(record) for _, record in found]
            for task, found in self._candidates(tasks).items()
        }

    @property
    def waiting_tasks(self) -> dict[str, None]:
        """Training tasks that gave way to tasks with history and wait for their turn, the first one longest.

        The mixing's own; here because it goes with the pool into checkpoints.
        """
        return self._state.waiting

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
            ConfigurationError: the state's pool was made with another tokenizer; nothing was changed.
            CorruptStoreError: this is no such state; nothing was changed.
        """
        cut = PoolCut.from_dict(state)
        check_same(cut.tokenizer_fingerprint, self._fingerprint, "the saved pool")
        fresh = cut.state()
        if cut.store_id == self._ledger.store_id:
            self._ledger.adopt(fresh, cut.entries)
        elif cut.entries:
            logger.warning(
                "experience pool: the saved pool is of another store (%s); its trajectories are not here", cut.store_id
            )
        plan = self._plan_all(fresh, cut.trajectories)
        self._ledger.replace(fresh, plan, cut.global_steps, cut.make_generator())
        self.refused = Counter(cut.refused) + plan.refused
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

    def load_experience_pool_from_disk(self, directory: str | Path) -> None:
        """Replace the pool by a saved one, ours or AgentEvolver's. Nothing that a pickle names is run.

        Trajectories that the rules do not admit are refused and counted. The random generator goes on as it is.

        Raises:
            StoreNotFoundError: no such directory.
            CorruptStoreError: files are absent or not what their names say.
            UnsafeContentError: the pickle names something that a pool does not contain.
            ConfigurationError: the pool was made with another tokenizer; nothing was changed.
        """
        contents = persistence.read_pool(Path(directory))
        held = [one for several in contents.task2trajectories.values() for one in several]
        fingerprint = check_trajectories(held, self._fingerprint)
        fresh = journal.PoolState(
            DifficultyBuckets(contents.difficulty2task_dict), dict.fromkeys(contents.skip_uid_set)
        )
        plan = self._plan_all(fresh, contents.task2trajectories)
        self._ledger.replace(fresh, plan, self.global_steps, self._generator)
        self.refused.update(plan.refused)
        warn_of_refusals(directory, plan.refused, len(held))
        warn_of_other_rewards(self._state.all_entries(), self.reward_fingerprint)
        self._fingerprint = fingerprint

    # ---- inside ----

    def _may_enter(self, task: str, outcome: TaskOutcome) -> bool:
        """Return whether a task's rollouts may enter: not if it is solved, or skipped and no failure was seen."""
        return not outcome.solved(self.rules.n_rollout) and (outcome.failed or task not in self._state.skip)

    def _held(self) -> dict[str, list[AgentTrajectory]]:
        """Return ``{task_id: [trajectory, ...]}``, sharing tensors with the store."""
        held = {task: self._ledger.read(entries) for task, entries in list(self._state.entries.items())}
        return {task: [journal.trajectory_of_entry(one) for _, one in found] for task, found in held.items() if found}

    def _plan_all(self, fresh: journal.PoolState, trajectories: dict[str, list[AgentTrajectory]]) -> AdmissionPlan:
        return plan_admissions(fresh.entries, [one for held in trajectories.values() for one in held], self.rules)

    def _candidates(self, tasks: Sequence[Any]) -> dict[str, list[tuple[PoolEntry, AgentTrajectory]]]:
        result = {}
        for task in dict.fromkeys(task_id_of(task) for task in tasks):
            found = self._ledger.read(self._state.eligible(task, self.rules, self.global_steps))
            if found:
                result[task] = found
        return result

    @property
    def _state(self) -> journal.PoolState:
        return self._ledger.state
