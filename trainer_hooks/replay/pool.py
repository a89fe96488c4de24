"""``ExperienceManager``: the pool of replayable trajectories, its buckets and its skip set.

Takes no lock: only the training loop that owns the pool calls it.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer_hooks.replay import persistence
from trainer_hooks.replay.agentevolver import with_fields_of_metadata
from trainer_hooks.replay.buckets import DifficultyBuckets, TaskSampling, draw_tasks
from trainer_hooks.replay.contract import check_demonstrations, check_same, check_trajectories, task_ids_of
from trainer_hooks.replay.entry import Departure, PoolEntry, Refusal, is_demonstration, of_earlier_run
from trainer_hooks.replay.ledger import PoolLedger
from trainer_hooks.replay.message_rows import NEEDS_TOKENIZER, MessageTokenizer, Tokenized, tokenized
from trainer_hooks.replay.notices import PoolNotices, warn_of_refusals, why_nothing
from trainer_hooks.replay.outcomes import count_outcomes, is_replayed
from trainer_hooks.replay.prompts import Prompt, RowPrompts
from trainer_hooks.replay.rows import whole_sessions
from trainer_hooks.replay.rules import PoolRules
from trainer_hooks.replay.selection import (
    LeftOut,
    Refused,
    choose_histories,
    is_too_long,
    is_worth_keeping,
    outcome_refusal,
    plan_admissions,
    rollouts_to_keep,
)
from trainer_hooks.replay.state import PoolState, replayed_copy, set_generator_state, with_pool_facts
from trainer_hooks.replay.store import BufferStore
from trajstore._core.base.arguments import truth, whole, whole_or_none
from trajstore.errors import ConfigurationError, CorruptStoreError, counted
from trajstore.interop.rollouts import rollout_of, row_of
from trajstore.trajectory import AgentTrajectory

if TYPE_CHECKING:
    from trajstore.query import Query

logger = logging.getLogger(__name__)

MOST_TOLD = 3
"""Number of unreadable trajectories of files that are logged individually; all are counted."""


CurrentEntropy = Callable[[Sequence[AgentTrajectory]], Sequence[float]]
"""Returns, for each trajectory, its mean entropy in nats under the current policy. One batched call."""


class ExperienceManager:
    """Keeps successful rollouts of partly solved tasks, and replays them as histories.

    Not thread-safe; one training loop owns it. Set :attr:`global_steps` when a step begins.

    Args:
        rules: for admission and selection.
        store: where records are kept, with the pool that it already has; in memory if ``None``.
        tokenizer_fingerprint: tokenizer and chat template of the trainer; empty = unknown: that of the first trajectory
            that has one.
        tokenizer: makes rows of trajectories that have messages only; without it these are refused.
        current_entropy: entropy under the current policy; without it the saved entropy is used.
        rows: prompts of the training data's rows; histories that answer another prompt are not replayed.
        draws_ahead: steps between a draw and the step that trains on it; ``max_policy_age`` applies to that step.

    Raises:
        ConfigurationError: the store's pool was made with another tokenizer, or has demonstrations that these rules
            would never replay.
        CorruptStoreError: the store's pool cannot be decoded.
    """

    def __init__(
        self,
        rules: PoolRules,
        *,
        store: BufferStore | None = None,
        tokenizer_fingerprint: str = "",
        tokenizer: MessageTokenizer | None = None,
        current_entropy: CurrentEntropy | None = None,
        rows: RowPrompts | None = None,
        draws_ahead: int = 0,
    ) -> None:
        self.rules = rules
        self._draws_ahead = draws_ahead
        self.tokenized = Tokenized([])
        """Total of trajectories that had messages only and were tokenized."""
        self._tokenizer = tokenizer
        if tokenizer is not None:
            check_same(tokenizer.fingerprint, tokenizer_fingerprint, "tokenizer")
            tokenizer_fingerprint = tokenizer.fingerprint
        self._generator = np.random.Generator(np.random.PCG64(rules.seed))
        self._ledger = PoolLedger(BufferStore() if store is None else store, self._generator)
        check_same(self._state.fingerprint, tokenizer_fingerprint, "the pool in the store")
        check_demonstrations(self._state.demonstrations(), rules)
        self._state.fingerprint = tokenizer_fingerprint or self._state.fingerprint
        self.admitted: dict[tuple[str, str], int] = {}
        """Ids in a durable store of the rollouts that the newest :meth:`admit` added, by task and rollout id."""
        self.left_out: Counter[LeftOut] = Counter()
        """Number of rollouts of steps that were neither offered nor refused so far, by reason."""
        self._counting = False
        self._notices = PoolNotices()
        self._state.rows = RowPrompts() if rows is None else rows
        self.current_entropy = current_entropy
        self._scoring_failed = False

    # ---- after a step ----

    def judge(self, rollouts: Sequence[AgentTrajectory], asked: Mapping[str, int] | None = None) -> None:
        """Update buckets (``TaskOutcome.difficulty``) and skip set from rollouts that will not be replayed.

        None of them enters the pool, and none is refused: a trainer that drops groups has no log-probs of them.
        A task is retired on full evidence only (``TaskOutcome.solved``); a failure removes it from the skip set. A
        skipped task without an observed failure gets no bucket. A task whose rollouts have no outcomes stays where it
        is.

        Args:
            rollouts: of one step, with reward; replayed ones do not count.
            asked: number of requested rollouts, by task, if some did not come back; those are unknown.

        Raises:
            InvalidTrajectoryError: a trajectory has no ``task_id``.
            StoreWriteError: the store could not write.
        """
        outcomes = count_outcomes(rollouts, self.rules.success_threshold, asked)
        self._state.place(outcomes, self.rules.n_rollout)
        self._ledger.retire(outcomes, self.rules.n_rollout)

    def admit(self, rollouts: Sequence[AgentTrajectory], asked: Mapping[str, int] | None = None) -> tuple[int, int]:
        """Admit the rollouts of one step: update buckets and skip set as :meth:`judge`, and keep those that pass.

        The store has its own copies. Existing rollouts, such as those of a store, enter in the same way, step by step.
        They need no ``entropys`` (``entry.own_entropy``). Those without a ``policy_version`` get :attr:`global_steps`,
        so set it first; those of an earlier run (``of_earlier_run``) stay without.

        Args:
            rollouts: of one step, with reward and ``old_log_probs``; replayed ones do not count.
            asked: as for :meth:`judge`.

        Returns:
            The number offered (successes of tasks that may enter, and rollouts without a finite outcome; with
            ``save_filter: best`` one success for each task, besides those that are refused), and how many of them were
            refused.

        Raises:
            ConfigurationError: a success was made with another tokenizer; nothing was changed.
            InvalidTrajectoryError: a trajectory has no ``task_id``; nothing was changed.
            StoreWriteError: the store could not write.
        """
        before = self.refused.total()
        self.admitted = {}
        rollouts = self._with_tokens(rollouts, "experience pool")
        outcomes = count_outcomes(rollouts, self.rules.success_threshold, asked)
        fresh = [rollout for rollout in rollouts if not is_replayed(rollout) and is_worth_keeping(rollout, self.rules)]
        check_trajectories(fresh, self._state.fingerprint)  # before all changes
        self._state.place(outcomes, self.rules.n_rollout)
        kept, refused, others = rollouts_to_keep(
            rollouts,
            outcomes=self._state.open_to(outcomes, self.rules.n_rollout),
            rules=self.rules,
            global_steps=self.global_steps,
            generator=self._generator,
        )
        self._refuse(refused)
        self.left_out.update(others)
        self._ledger.retire(outcomes, self.rules.n_rollout)
        offered = len(kept) + self.refused.total() - before
        self._take(kept, are_checked=True)
        return offered, self.refused.total() - before

    def _take(self, trajectories: Sequence[AgentTrajectory], *, are_checked: bool = False) -> None:
        fingerprint = check_trajectories(trajectories, self._state.fingerprint)
        check_demonstrations(sum(map(is_demonstration, trajectories)), self.rules)
        plan = plan_admissions(
            self._state.entries, trajectories, self.rules, are_checked=are_checked, rows=self._state.rows
        )
        ids = self._ledger.add(plan)
        if self._ledger.store.store_id:
            keys = ((accepted.task_id, accepted.rollout_id) for accepted in plan.accepted.values())
            self.admitted |= dict(zip(keys, ids, strict=True))
        self._refuse(plan.refused)
        self._state.fingerprint = fingerprint

    def seed(self, demonstrations: Sequence[AgentTrajectory]) -> Counter[str]:
        """Add demonstrations: trajectories without log-probs that no policy of this run sampled.

        Each has ``metadata["demonstration"]`` true and token ids. Its task is put into the bucket of difficulty 0,
        unless its difficulty is known from rollouts, so that it can be drawn at once. Duplicates are refused, so adding
        the same demonstrations again changes nothing. Rollouts with log-probs may be added in the same way. What cannot
        be replayed, or is no improvement for a full task, is refused and counted in :attr:`refused`.

        Returns:
            The number refused, by reason; failures (by ``save_filter``) as ``not_worth_keeping``.

        Raises:
            ConfigurationError: a trajectory was made with another tokenizer, or is a demonstration that the rules would
                never replay; nothing was added.
            InvalidTrajectoryError: a trajectory has no ``task_id``; nothing was added.
            StoreWriteError: the store could not write.
        """
        before = Counter(self.refused)
        worthy = [demonstration for demonstration in demonstrations if is_worth_keeping(demonstration, self.rules)]
        self._take(self._with_tokens(worthy, "experience pool"))
        for demonstration in demonstrations:
            if not is_worth_keeping(demonstration, self.rules):
                self.refused[(outcome_refusal(demonstration) or Refusal.NOT_WORTH_KEEPING).value] += 1
        state = self._state
        for task in dict.fromkeys(demonstration.task_id for demonstration in worthy):
            if task in state.entries and task not in state.buckets and task not in state.skip:
                state.buckets.place(task, 0)
        return self.refused - before

    # ---- before a step ----

    def get_valid_replay_task_ids(self) -> list[str]:
        """Return the tasks that are in a bucket, not skipped, and have a trajectory that may be drawn now."""
        return [task for tasks in self._state.valid_buckets(self.rules, self.training_step).values() for task in tasks]

    def drawable_task_ids(self) -> list[str]:
        """Return the tasks that could be drawn now: as above, and in the bucket ``replay_difficulty`` if one is set."""
        buckets, only = self._state.valid_buckets(self.rules, self.training_step), self.rules.replay_difficulty
        return [task for difficulty, tasks in buckets.items() if only in (None, difficulty) for task in tasks]

    def why_nothing(self) -> str:
        """Return why no task can be drawn now, in a sentence; empty if one can."""
        return why_nothing(self._state, self.rules, self.training_step, self.refused)

    def sample_tasks_from_replaypool(
        self,
        num_tasks: int,
        *,
        difficulty: int | None = None,
        strategy: TaskSampling | None = None,
        exclude: Collection[str] = (),
    ) -> list[str]:
        """Draw up to ``num_tasks`` valid tasks, without replacement.

        Args:
            num_tasks: how many.
            difficulty: the one bucket to draw from; ``None`` = the rules' ``replay_difficulty``, or all.
            strategy: see ``bucket_probabilities``; ``None`` = the rules' ``task_sampling``.
            exclude: tasks that are not drawn.
        """
        whole("num_tasks", num_tasks, 0)
        whole_or_none("difficulty", difficulty, 0)
        buckets = self._state.valid_buckets(self.rules, self.training_step)
        only = self.rules.replay_difficulty if difficulty is None else difficulty
        if only is not None:
            # Within one bucket every task is equally likely, even under a strategy that gives this bucket no weight.
            buckets = {only: buckets.get(only, [])}
            strategy = "by_task"
        return draw_tasks(
            buckets, num_tasks, strategy or self.rules.task_sampling, self.rules.n_rollout, self._generator, exclude
        )

    def has_succeeded(self, task_id: str) -> bool:
        """Return whether a success is known: the task is solved, partly solved, or has a trajectory."""
        state = self._state
        return task_id in state.skip or task_id in state.entries or bool(state.buckets.difficulty(task_id))

    def sample_unsolved_tasks(self, num_tasks: int, exclude: Collection[str] = ()) -> list[str]:
        """Draw up to ``num_tasks`` unsolved tasks uniformly, without replacement, from all that were rolled out.

        Args:
            num_tasks: how many.
            exclude: tasks that are not drawn.
        """
        whole("num_tasks", num_tasks, 0)
        buckets = self._state.buckets.to_dict()
        return draw_tasks(buckets, num_tasks, "by_task", self.rules.n_rollout, self._generator, exclude)

    def get_offpolicy_batch(self, tasks: Sequence[Any], num_trajectories_per_task: int = 1) -> list[AgentTrajectory]:
        """Return up to ``num_trajectories_per_task`` different histories of each task, task by task, best first.

        They are the best by ``exp_select_mode`` (with ``in_turns``, among the least often drawn). Entropy is that under
        the current policy, if the rules and :attr:`current_entropy` provide it, else the saved one; only tasks with
        more histories than are drawn are scored. Each call counts as one use of every returned history. Returns copies,
        marked ``metadata["is_experience_replay"]``.

        Args:
            tasks: task ids, or objects with a ``task_id``.
            num_trajectories_per_task: maximum number of histories per task.
        """
        whole("num_trajectories_per_task", num_trajectories_per_task, 0)
        names = task_ids_of(tasks)
        scores = self._current_entropies(names, num_trajectories_per_task)
        versions: Counter[int | None] = Counter()
        chosen: list[AgentTrajectory] = []
        for task in names:
            wanted = self._order(task, num_trajectories_per_task, scores, versions)
            while len(records := self._ledger.read(wanted)) < len(wanted):  # replace those that have left the pool
                wanted = self._order(task, num_trajectories_per_task, scores, versions)
            self._ledger.note_used(wanted)
            versions.update(entry.policy_version for entry in wanted)
            chosen.extend(self._replayed(records))
        return chosen

    def _replayed(self, records: Sequence[tuple[PoolEntry, AgentTrajectory]]) -> list[AgentTrajectory]:
        named = bool(self._ledger.store.store_id)
        return [replayed_copy(record, entry.trajectory_id if named else None) for entry, record in records]

    # ---- contents ----

    @property
    def global_steps(self) -> int:
        """The current training step; policy ages are measured against it.

        Setting it applies outcomes that were corrected since (``annotate``).
        """
        return self._state.global_steps

    @global_steps.setter
    def global_steps(self, value: int) -> None:
        goes_back = not self._counting or int(value) < self._state.global_steps
        self._state.global_steps = int(value)
        self._ledger.correct()
        self._counting = True
        if goes_back:
            self._notices.ages(self._state.all_entries(), self.rules, self.global_steps)

    @property
    def training_step(self) -> int:
        """The step that trains on what is drawn now."""
        return self.global_steps + self._draws_ahead

    @property
    def difficulty2task_dict(self) -> Mapping[int, tuple[str, ...]]:
        """``{difficulty: (task_id, ...)}``, read-only."""
        return MappingProxyType({key: tuple(tasks) for key, tasks in self._state.buckets.to_dict().items()})

    @property
    def skip_uid_set(self) -> frozenset[str]:
        """Tasks whose fresh rollouts of the newest step all succeeded; read-only."""
        return frozenset(self._state.skip)

    @property
    def task2trajectories(self) -> Mapping[str, tuple[AgentTrajectory, ...]]:
        """``{task_id: (trajectory, ...)}``, oldest first, read-only. Reads the whole pool; all are copies."""
        return MappingProxyType({task: tuple(copy.deepcopy(held)) for task, held in self._held().items()})

    def query(self, relation: str = "trajectories") -> Query:
        """Return a query over the pool's histories; see :meth:`TrajectoryReplayBuffer.query`.

        Additional facts: ``difficulty`` of the task (null where it has none), ``pool_entropy`` (of the history at
        entry, in nats), ``uses`` (number of draws), ``demonstration``. Needs Polars (extra ``query``).

        Args:
            relation: kind of the rows: ``"trajectories"``, ``"messages"``, ``"tokens"``.

        Raises:
            ConfigurationError: there is no such relation.
        """
        every = self._ledger.store.query(relation)
        return replace(every, facts=lambda: with_pool_facts(every.facts(), self._state))

    @property
    def tokenizer_fingerprint(self) -> str:
        """Tokenizer of the pool's trajectories; empty if unknown."""
        return self._state.fingerprint

    @property
    def refused(self) -> Counter[str]:
        """Number of refused trajectories so far, by reason (see ``Refusal``)."""
        return self._state.refused

    @property
    def left(self) -> Counter[str]:
        """Number of trajectories that have left the pool since it was opened, by reason; a copy.

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
            "experience_replay/unreadable": float(self._ledger.left[Departure.UNREADABLE.value]),
        }
        for difficulty, size in sorted(self._state.buckets.sizes().items()):
            result[f"experience_replay/tasks_at_difficulty/{difficulty}"] = float(size)
        for reason, count in (+self.refused).items():
            result[f"experience_replay/refused/{reason}"] = float(count)
        return result

    def get_task_ids(self) -> list[str]:
        """Return the tasks with trajectories in the pool."""
        return list(self._state.entries)

    @property
    def store_id(self) -> str:
        """UUID of the pool's store; empty for a pool in memory."""
        return self._ledger.store.store_id

    def withdraw(self, policy_version: int, chosen: Callable[[str], bool]) -> None:
        """Remove the trajectories that a policy version sampled and whose ``rollout_id`` is chosen.

        For rollouts that a step trains on as fresh ones again, after which they may enter again.
        """
        sampled = [entry for entry in self._state.all_entries() if entry.policy_version == policy_version]
        self._ledger.withdraw([entry for entry, record in self._ledger.read(sampled) if chosen(record.rollout_id)])

    @property
    def waiting_tasks(self) -> dict[str, None]:
        """Training tasks displaced by tasks with history, longest waiting first.

        Managed by the mixing; stored here because it goes into checkpoints with the pool.
        """
        return self._state.waiting

    def note_prompt(self, task_id: str, prompt: Prompt) -> None:
        """Set the prompt of a task's row, if no other source provides it."""
        self._state.rows.note(task_id, prompt)

    def answers(self, task_id: str, prompt: Prompt) -> bool:
        """Return whether a history with this prompt may be replayed for a task."""
        return not self._state.rows.differs(task_id, prompt)

    def never_drawn(self) -> dict[str, list[PoolEntry]]:
        """Return the entries that are never drawn, by metric name.

        ``other_prompts`` answer another prompt than their task's row, ``too_long`` exceed the trainer's lengths.
        """
        entries = list(self._state.all_entries())
        return {
            "other_prompts": [entry for entry in entries if self._state.is_of_other_row(entry)],
            "too_long": [entry for entry in entries if is_too_long(entry, self.rules)],
        }

    # ---- changes and persistence ----

    def flush(self) -> None:
        """Save the pool as a point of its store, in which it would survive a crash exactly as it is now.

        The point replaces that of the previous call. Trajectories that have left the pool are evicted.

        Raises:
            StoreWriteError: the store could not write.
        """
        self._ledger.save()

    def state_dict(self) -> dict[str, Any]:
        """Return the pool's state for a checkpoint, as plain containers.

        With a durable store this names a saved point, which stays until :meth:`hold` releases it. Otherwise it has the
        trajectories.

        Raises:
            StoreWriteError: the store could not write.
        """
        store = self._ledger.store
        if store.store_id:
            return {"store_id": store.store_id, "point": self._ledger.save(keep=True)}
        held = {task: [row_of(one, {}) for one in held] for task, held in self._held().items()}
        return {**self._ledger.document(), "trajectories": held}

    def hold(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Keep the saved points of these states, and remove those of all other checkpoints.

        A run can then go back to any checkpoint that it may resume from.

        Args:
            states: the results of :meth:`state_dict` at those checkpoints.
        """
        store = self._ledger.store
        store.hold({str(state["point"]) for state in states if state.get("store_id") == store.store_id})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that :meth:`state_dict` returned. Trajectories no longer in the store are left out.

        If the store is still at the state's point, outcomes that were corrected since stay.

        Raises:
            ConfigurationError: the state's pool was made with another tokenizer, or has demonstrations that the rules
                would never replay.
            CorruptStoreError: ``state`` is not a pool's state; nothing was changed.
            StoreNotFoundError: the store has no such point; nothing was changed.
        """
        if "point" in state:
            self._go_to(str(state.get("store_id")), str(state["point"]))
            return
        fresh = PoolState.of_document(state)
        try:
            generator = np.random.Generator(np.random.PCG64())
            set_generator_state(generator, state["generator"])
            held = [rollout_of(row) for rows in state["trajectories"].values() for row in rows]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptStoreError(f"not the state of an experience pool: {error!r}") from error
        check_same(fresh.fingerprint, self._state.fingerprint, "the saved pool")
        self._go_on_with(fresh, self._with_tokens(held, "the saved pool"), "the saved pool", generator)

    def _go_to(self, store_id: str, point: str) -> None:
        if store_id != self._ledger.store.store_id:
            logger.warning(
                "experience pool: the checkpoint names a point of another store (%s); the pool stays as it is in this"
                " one (%s)",
                store_id,
                self._ledger.store.store_id or "in memory",
            )
            return
        fingerprint = self._state.fingerprint
        self._ledger.go_to(point)
        self._state.fingerprint = fingerprint or self._state.fingerprint
        check_demonstrations(self._state.demonstrations(), self.rules)

    def save_experience_pool_to_disk(self, directory: str | Path) -> None:
        """Write the pool as ``difficulty2task_dict.json``, ``skip_uid_set.json`` and ``task2trajectories.pkl``.

        The write is atomic; an existing directory is replaced. The pickle holds plain containers only and can be read
        without trajstore or torch.

        Raises:
            StoreWriteError: it did not reach the disk; earlier files are unchanged.
        """
        contents = persistence.PoolContents(self._state.buckets.to_dict(), list(self._state.skip), self._held())
        persistence.write_pool(Path(directory), contents)

    def load_experience_pool_from_disk(
        self, directory: str | Path, *, same_run: bool = True, task_prefix: str = ""
    ) -> int:
        """Replace the pool by a saved one, ours or AgentEvolver's. No code named in the pickle is run.

        Trajectories that the rules do not admit, or that cannot be read, are refused and counted. The random generator
        is not changed.

        Args:
            directory: with the three files.
            same_run: whether policy versions are of the run that continues; otherwise they are unknown
                (``of_earlier_run``).
            task_prefix: prepended to the name of every task.

        Returns:
            The number of trajectories in the files.

        Raises:
            StoreNotFoundError: no such directory.
            CorruptStoreError: files are absent or have invalid contents, or no trajectory can be read.
            UnsafeContentError: the pickle names an object that does not belong in a pool.
            ConfigurationError: the pool was made with another tokenizer, has messages only and there is no tokenizer,
                or has demonstrations that the rules would never replay; nothing was changed.
        """
        contents = persistence.read_pool(Path(directory), task_prefix)
        held = self._with_tokens(
            [trajectory for held in contents.task2trajectories.values() for trajectory in held], directory
        )
        if held and all(trajectory.input_ids is None for trajectory in held):
            raise ConfigurationError(
                f"{directory}: has {counted(len(held), 'trajectory')}, none with token ids, and messages cannot become"
                f" tokens: {self._why_no_tokens()}"
            )
        if not truth("same_run", same_run):
            held = [of_earlier_run(trajectory) for trajectory in held]
        fresh = PoolState(
            DifficultyBuckets(contents.difficulty2task_dict),
            dict.fromkeys(contents.skip_uid_set),
            global_steps=self.global_steps,
            refused=self.refused,
            fingerprint=check_trajectories(held, self._state.fingerprint),
        )
        self._go_on_with(fresh, held, directory, self._generator, unreadable=contents.unreadable)
        return len(held) + len(contents.unreadable)

    # ---- internals ----

    def _go_on_with(
        self,
        fresh: PoolState,
        held: Sequence[AgentTrajectory],
        source: object,
        generator: np.random.Generator,
        unreadable: Sequence[str] = (),
    ) -> None:
        """Replace the pool by a state and some trajectories; warn of refused and unreadable ones.

        Raises:
            ConfigurationError: the rules would never replay its demonstrations; nothing was changed.
        """
        plan = plan_admissions({}, held, self.rules)
        check_demonstrations(sum(map(is_demonstration, plan.accepted.values())), self.rules)
        fresh.fingerprint = fresh.fingerprint or self._state.fingerprint
        self._ledger.replace(fresh, plan, generator)
        for problem in unreadable[:MOST_TOLD]:
            logger.warning("experience pool: refused as malformed: %s", problem)
        lost = self._refuse(plan.refused, len(unreadable))
        warn_of_refusals(source, lost, len(held) + len(unreadable))

    def _current_entropies(self, tasks: Sequence[str], n: int) -> dict[int, float]:
        """Return entropies under the current policy by trajectory id; empty if the saved ones are to be used.

        All of them are used or none, since current and saved entropies do not compare. The first failure is logged.
        """
        if self.current_entropy is None:
            return {}
        wanted = self._undecided(tasks, n)
        while len(records := self._ledger.read(wanted)) < len(wanted):  # some have left the pool
            wanted = self._undecided(tasks, n)
        if not records:
            return {}
        try:
            values = list(map(float, self.current_entropy([replayed_copy(record) for _, record in records])))
            if len(values) != len(records) or not np.isfinite(values).all():
                raise ValueError(f"{len(values)} values for {counted(len(records), 'trajectory')}, or not finite")
        except Exception as error:  # trainer code may raise anything; saved entropies are used
            if not self._scoring_failed:
                self._scoring_failed = True
                logger.warning("entropy under the current policy failed (%r): using the saved entropy", error)
            return {}
        return {entry.trajectory_id: value for (entry, _), value in zip(records, values, strict=True)}

    def _undecided(self, tasks: Sequence[str], n: int) -> list[PoolEntry]:
        """Return the entries whose entropy may decide whether they are among the ``n`` of their task."""
        if self.rules.exp_select_mode not in ("argmin", "argmax") or not n:
            return []
        held = (self._state.eligible(task, self.rules, self.training_step) for task in tasks)
        return [entry for entries in held if len(entries) > n for entry in entries]

    def _order(self, task: str, n: int, scores: Mapping[int, float], versions: Counter[int | None]) -> list[PoolEntry]:
        """Return up to ``n`` entries of a task, best first.

        Args:
            task: its id.
            n: the maximum.
            scores: entropies by trajectory id, instead of the saved ones.
            versions: see ``choose_histories``.
        """
        entries = self._state.eligible(task, self.rules, self.training_step)
        order = choose_histories(
            entries,
            n,
            self.rules,
            uses=self._state.uses_of(entries),
            entropies=[scores.get(entry.trajectory_id, entry.entropy) for entry in entries],
            generator=self._generator,
            versions_drawn=versions,
        )
        return [entries[place] for place in order]

    def _refuse(self, refused: Refused, unreadable: int = 0) -> Counter[str]:
        """Count refused and unreadable trajectories by reason, and log each reason once; return these counts."""
        counts = Counter({reason.value: len(rollouts) for reason, rollouts in refused.items()})
        counts += Counter({Refusal.MALFORMED.value: unreadable})
        self.refused.update(counts)
        self._notices.refused(refused)
        return counts

    def _held(self) -> dict[str, list[AgentTrajectory]]:
        """Return ``{task_id: [trajectory, ...]}``, sharing tensors with the store."""
        held = {task: self._ledger.read(entries) for task, entries in list(self._state.entries.items())}
        return {task: [record for _, record in records] for task, records in held.items() if records}

    def _with_tokens(self, trajectories: Sequence[AgentTrajectory], source: object) -> Sequence[AgentTrajectory]:
        """Return trajectories with tokens made of their messages where possible; log a summary.

        Rows of a session become one trajectory. Values that AgentEvolver keeps in ``metadata`` become fields.
        """
        trajectories = whole_sessions(list(map(with_fields_of_metadata, trajectories)), strict=False)
        if self._tokenizer is None or all(trajectory.input_ids is not None for trajectory in trajectories):
            return trajectories
        result = tokenized(trajectories, self._tokenizer)
        result.log(source)
        self.tokenized += result
        return result.histories

    def _why_no_tokens(self) -> str:
        if self._tokenizer is None:
            return NEEDS_TOKENIZER
        return "; ".join(problem for problem, _ in self.tokenized.problems.most_common(3)) or "there are none"

    @property
    def _state(self) -> PoolState:
        return self._ledger.state
