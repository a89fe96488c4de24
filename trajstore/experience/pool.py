"""``ExperienceManager``: the pool of replayable trajectories, its buckets and its skip set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trajstore.arguments import whole, whole_or_none
from trajstore.checked import Offered, checked
from trajstore.errors import ConfigurationError, InvalidTrajectoryError
from trajstore.experience import journal
from trajstore.experience.buckets import TaskSampling, draw_tasks
from trajstore.experience.choice import choose_histories, undecided
from trajstore.experience.contract import check_demonstrations, check_trajectories, task_id_of
from trajstore.experience.diagnosis import why_nothing
from trajstore.experience.entry import (
    PoolEntry,
    Refusal,
    is_demonstration,
    mean_entropy,
    with_reward_fingerprint,
)
from trajstore.experience.keeping import KeptPool
from trajstore.experience.outcomes import TaskOutcome, count_outcomes
from trajstore.experience.selection import is_worth_keeping, outcome_refusal, plan_admissions, rollouts_to_keep, worthy
from trajstore.trajectory import AgentTrajectory


@checked
class ExperienceManager(KeptPool):
    """Keeps successful rollouts of partly solved tasks, and gives them back as histories.

    Not thread-safe; one training loop owns it. Set :attr:`global_steps` when a step begins.

    Args:
        rules: what enters, what comes out.
        store: where records are kept; opened with whatever pool it holds. In memory if ``None``.
        tokenizer_fingerprint: tokenizer and chat template of the trainer; empty = unknown, nothing is checked
            until the first trajectory that names its own.
        tokenizer: makes rows of what has messages only, which is refused without it.
        current_entropy: entropy under the current policy; without it the entropy saved with the trajectory counts.
        reward_fingerprint: name and version of the reward function; empty = unknown. It is kept with each trajectory,
            and where it differs there is a warning.
        rows: what the rows of the training data ask; histories that answer something else do not come out.

    Raises:
        ConfigurationError: the store's pool was made with another tokenizer, or has demonstrations that could never
            come out under these rules.
        CorruptStoreError: the store's pool cannot be understood.
    """

    # ---- after a step ----

    def update_difficulty2task_dict(
        self, trajectories: Sequence[Offered], asked: Mapping[str, int] | None = None
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
        outcomes = count_outcomes(trajectories, self.rules.success_threshold, asked)
        self._ledger.change(self._state.placed(outcomes, self.rules.n_rollout))

    def update_skip_uid_set_and_filter_trajectories(
        self,
        trajectories: Sequence[Offered],
        entropys: Sequence[torch.Tensor] | torch.Tensor | None = None,
        response_mask: Sequence[torch.Tensor] | torch.Tensor | None = None,
        asked: Mapping[str, int] | None = None,
        *,
        n_rollout: int | None = None,
    ) -> list[AgentTrajectory]:
        """Retire the tasks that this step solved, and return the rollouts that are worth keeping.

        A task is solved on full evidence only (``TaskOutcome.solved``).

        Args:
            trajectories: the step's rollouts, with reward and ``old_log_probs``; replayed ones are left out.
            entropys: ``[N, R]``, or N tensors ``[R]``, nats; row i belongs to ``trajectories[i]``. ``None``: what the
                trajectories themselves tell (``entry.own_entropy``).
            response_mask: as ``entropys``; 1 where the model wrote. ``None`` with these.
            asked: as for :meth:`update_difficulty2task_dict`.
            n_rollout: rollouts that each task was asked for, in the place of ``asked``.

        Returns:
            Copies with ``entropy`` set, and ``policy_version`` where it was unknown, of the rollouts that pass
            the bounds and ``save_filter``, task by task. The trajectories handed in are not changed; tensors
            are shared with them.

        Raises:
            InvalidTrajectoryError: a trajectory has no ``task_id``, or rows and trajectories differ in number.
            ConfigurationError: both ``asked`` and ``n_rollout``.
        """
        if n_rollout is not None:
            whole("n_rollout", n_rollout, 1)
            if asked is not None:
                raise ConfigurationError("n_rollout: the same as asked for each task; give one of them")
            asked = {one.task_id: n_rollout for one in trajectories}
        means: list[float | None] | None = None
        if entropys is not None and response_mask is not None:
            if not len(trajectories) == len(entropys) == len(response_mask):
                raise InvalidTrajectoryError(
                    f"{len(trajectories)} trajectories, entropys of {len(entropys)} rows and response_mask of"
                    f" {len(response_mask)}: row i must belong to trajectory i"
                )
            means = [mean_entropy(*row) for row in zip(entropys, response_mask, strict=True)]
        return self._keep(trajectories, means, count_outcomes(trajectories, self.rules.success_threshold, asked))

    def judge(self, rollouts: Sequence[Offered], asked: Mapping[str, int] | None = None) -> None:
        """Let rollouts that shall not be replayed say what they say of their tasks: both updates, and no more.

        None of them enters the pool, and none is refused: a trainer that drops groups has no log-probs of them.

        Args:
            rollouts: of one step, with reward.
            asked: as for :meth:`update_difficulty2task_dict`.

        Raises:
            InvalidTrajectoryError: a trajectory has no ``task_id``.
            StoreWriteError: the store could not write.
        """
        outcomes = count_outcomes(rollouts, self.rules.success_threshold, asked)
        self._ledger.change(self._state.placed(outcomes, self.rules.n_rollout))
        self._ledger.change(self._state.retired(outcomes, self.rules.n_rollout))

    def admit(self, rollouts: Sequence[Offered], asked: Mapping[str, int] | None = None) -> tuple[int, int]:
        """Let the rollouts of one step enter the pool: both updates, and what passes is saved.

        It is also the way for rollouts that exist already, such as those of a store: step by step. They need no
        ``entropys`` (``entry.own_entropy``). Those without a ``policy_version`` get :attr:`global_steps`, so set it
        first; those of an earlier run (``of_earlier_run``) stay without.

        Args:
            rollouts: of one step, with reward and ``old_log_probs``; replayed ones do not count.
            asked: as for :meth:`update_difficulty2task_dict`.

        Returns:
            How many were offered (successes of tasks that may enter, and rollouts without a finite outcome; by
            ``save_filter: best`` one success for each task, beside those that are refused), and how many of them were
            refused.

        Raises:
            ConfigurationError: a success was made with another tokenizer; nothing was noted or taken.
            InvalidTrajectoryError: a trajectory has no ``task_id``; nothing was noted or taken.
            StoreWriteError: the store could not write.
        """
        before = self.refused.total()
        rollouts = self._with_tokens(rollouts, "experience pool")
        outcomes = count_outcomes(rollouts, self.rules.success_threshold, asked)
        check_trajectories(
            worthy(rollouts, self._state.open_to(outcomes, self.rules.n_rollout), self.rules), self._fingerprint
        )  # before all changes
        self._ledger.change(self._state.placed(outcomes, self.rules.n_rollout))
        kept = self._keep(rollouts, None, outcomes)
        offered = len(kept) + self.refused.total() - before
        self._take(kept, are_checked=True)
        return offered, self.refused.total() - before

    def save_trajectories_to_memory(self, trajectories: Sequence[Offered]) -> int:
        """Take trajectories into the pool and return how many of them it holds now.

        The store has its own copies. What cannot be replayed, is there already, or is no improvement for a
        full task is refused and counted in :attr:`refused`.

        Raises:
            ConfigurationError: a trajectory was made with another tokenizer, or is a demonstration that could never
                come out under the rules; nothing was taken.
            InvalidTrajectoryError: a trajectory has no ``task_id``; nothing was taken.
        """
        return self._take(self._with_tokens(trajectories, "experience pool"))

    def _take(self, trajectories: Sequence[AgentTrajectory], *, are_checked: bool = False) -> int:
        fingerprint = check_trajectories(trajectories, self._fingerprint)
        check_demonstrations(sum(map(is_demonstration, trajectories)), self.rules)
        marked = [with_reward_fingerprint(one, self.reward_fingerprint) for one in trajectories]
        plan = plan_admissions(self._state.entries, marked, self.rules, are_checked=are_checked)
        self._ledger.add(plan)
        self._refuse(plan.refused, trajectories)
        self._fingerprint = fingerprint
        return len(plan.accepted)

    def seed(self, demonstrations: Sequence[Offered]) -> Counter[str]:
        """Take demonstrations in: trajectories that no policy of this run sampled, without log-probs.

        Each has ``metadata["demonstration"]`` true and token ids. Its task comes into the bucket of difficulty 0, where
        no success of the policy is known, unless rollouts of the task have said more; so it can be drawn at once. What
        the pool has already is refused as a duplicate: taking the same ones in again changes nothing. A rollout with
        log-probs is no demonstration, and enters as :meth:`save_trajectories_to_memory` takes it.

        Returns:
            How many were refused, by reason; failures (by ``save_filter``) as ``not_worth_keeping``.

        Raises:
            ConfigurationError: as for :meth:`save_trajectories_to_memory`.
            InvalidTrajectoryError: a trajectory has no ``task_id``; nothing was taken.
            StoreWriteError: the store could not write.
        """
        before = Counter(self.refused)
        worthy = [one for one in demonstrations if is_worth_keeping(one, self.rules)]
        self.save_trajectories_to_memory(worthy)
        for one in demonstrations:
            if not is_worth_keeping(one, self.rules):
                self.refused[(outcome_refusal(one) or Refusal.NOT_WORTH_KEEPING).value] += 1
        state = self._state
        unplaced = [one.task_id for one in worthy if one.task_id not in state.buckets and one.task_id not in state.skip]
        held = [task for task in dict.fromkeys(unplaced) if task in state.entries]
        self._ledger.change({task: journal.TaskChange(0, skip=False) for task in held})
        return self.refused - before

    # ---- before a step ----

    def get_valid_replay_task_ids(self) -> list[str]:
        """Return the tasks that are in a bucket, not skipped, and have a trajectory that may come out now."""
        return [task for tasks in self._state.valid_buckets(self.rules, self.global_steps).values() for task in tasks]

    def drawable_task_ids(self) -> list[str]:
        """Return the tasks that could be drawn now: as above, and in the bucket ``replay_difficulty`` if one is set."""
        buckets = self._state.valid_buckets(self.rules, self.global_steps)
        only = self.rules.replay_difficulty
        return [task for difficulty, tasks in buckets.items() if only in (None, difficulty) for task in tasks]

    def why_nothing(self) -> str:
        """Return why no task can be drawn now, in a sentence; empty if one can."""
        return why_nothing(self._state, self.rules, self.global_steps, self.refused)

    def sample_tasks_from_replaypool(
        self,
        num_tasks: int,
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
        buckets = self._state.valid_buckets(self.rules, self.global_steps)
        only = self.rules.replay_difficulty if difficulty is None else difficulty
        if only is not None:
            # Within one bucket every task is equally likely, even under a strategy that gives this bucket no weight.
            buckets = {only: buckets.get(only, [])}
            strategy = "by_task"
        return draw_tasks(
            buckets, num_tasks, strategy or self.rules.task_sampling, self.rules.n_rollout, self._generator, exclude
        )

    def has_succeeded(self, task_id: str) -> bool:
        """Return whether the pool knows of a success: the task is solved, partly solved, or has a trajectory."""
        state = self._state
        return task_id in state.skip or task_id in state.entries or bool(state.buckets.difficulty(task_id))

    def sample_unsolved_tasks(self, num_tasks: int, exclude: Collection[str] = ()) -> list[str]:
        """Draw up to ``num_tasks`` tasks evenly, without replacement, from all that were rolled out and are not solved.

        Args:
            num_tasks: how many.
            exclude: tasks that are not drawn.
        """
        whole("num_tasks", num_tasks, 0)
        buckets = self.difficulty2task_dict
        return draw_tasks(buckets, num_tasks, "by_task", self.rules.n_rollout, self._generator, exclude)

    def get_offpolicy_trajectories_from_memory(self, task_id: str, num_trajectories: int = 1) -> list[AgentTrajectory]:
        """Return the up to ``num_trajectories`` best histories of a task; see :meth:`get_offpolicy_batch`."""
        return self.get_offpolicy_batch([task_id], num_trajectories)

    def get_offpolicy_batch(self, tasks: Sequence[Any], num_trajectories_per_task: int = 1) -> list[AgentTrajectory]:
        """Return up to ``num_trajectories_per_task`` histories of each task, task by task, best first, none twice.

        The rules' ``sampler`` chooses. Without one the best by ``exp_select_mode`` come, on the entropy under the
        current policy if the rules want it and :attr:`current_entropy` gives it, else on the saved one. Only those that
        nothing else decides about are scored (``choice.undecided``): those of a task that has more than come. Each call
        counts as a use of what it returns. Returned are copies, marked ``metadata["is_experience_replay"]``.

        Args:
            tasks: task ids, or objects with a ``task_id``.
            num_trajectories_per_task: histories per task at the most.
        """
        whole("num_trajectories_per_task", num_trajectories_per_task, 0)
        names = list(dict.fromkeys(map(task_id_of, tasks)))
        function = self.current_entropy if self.rules.use_current_policy_entropy else None
        scores = self._scorer(function, self._ledger.read, lambda: self._undecided(names, num_trajectories_per_task))
        versions: Counter[int | None] = Counter()
        chosen: list[AgentTrajectory] = []
        for task in names:
            wanted = self._order(task, num_trajectories_per_task, self._generator, scores, versions)
            while len(found := self._ledger.read(wanted)) < len(wanted):  # some have left the pool: others come instead
                wanted = self._order(task, num_trajectories_per_task, self._generator, scores, versions)
            self._ledger.note_used(wanted)
            versions.update(entry.policy_version for entry in wanted)
            chosen.extend(journal.replayed_copy(record) for _, record in found)
        return chosen

    def count_offpolicy(self, tasks: Sequence[Any], n: int = 1) -> dict[str, int]:
        """Return how many histories :meth:`get_offpolicy_batch` will find of each task that has any.

        Nothing is drawn, scored or read; a record that turns out to be damaged makes it fewer.
        """
        whole("n", n, 0)
        names = dict.fromkeys(map(task_id_of, tasks))
        orders = {task: self._order(task, n, np.random.default_rng(0), {}, Counter()) for task in names}
        return {task: len(order) for task, order in orders.items() if order}

    def get_all_candidates_batch(self, tasks: Sequence[Any]) -> dict[str, list[AgentTrajectory]]:
        """Return, per task that has any, all histories that may come out now, oldest first, as marked copies."""
        names = dict.fromkeys(map(task_id_of, tasks))
        found = {one: self._ledger.read(self._state.eligible(one, self.rules, self.global_steps)) for one in names}
        return {task: [journal.replayed_copy(record) for _, record in held] for task, held in found.items() if held}

    # ---- inside ----

    def _keep(
        self,
        trajectories: Sequence[AgentTrajectory],
        entropies: Sequence[float | None] | None,
        outcomes: Mapping[str, TaskOutcome],
    ) -> list[AgentTrajectory]:
        """Return the rollouts that are worth keeping, with entropy and version; retire the tasks that are solved."""
        kept, refused = rollouts_to_keep(
            trajectories,
            entropies,
            outcomes=self._state.open_to(outcomes, self.rules.n_rollout),
            rules=self.rules,
            global_steps=self.global_steps,
            generator=self._generator,
        )
        self._refuse(refused, trajectories)
        self._ledger.change(self._state.retired(outcomes, self.rules.n_rollout))
        return kept

    def _undecided(self, tasks: Sequence[str], n: int) -> list[PoolEntry]:
        """Return the entries of which their entropy alone says whether they are among the ``n`` of their task."""
        found: list[PoolEntry] = []
        for task in tasks:
            entries = self._state.eligible(task, self.rules, self.global_steps)
            places = undecided(entries, n, self.rules, self._state.uses_of(entries))
            found += [entries[place] for place in places]
        return found

    def _order(
        self,
        task: str,
        n: int,
        generator: np.random.Generator,
        scores: Mapping[int, float],
        versions: Counter[int | None],
    ) -> list[PoolEntry]:
        """Return up to ``n`` entries of a task, best first.

        Args:
            task: its id.
            n: how many at the most.
            generator: of draws.
            scores: entropies by trajectory id, in the place of the saved ones.
            versions: see ``choose_histories``.
        """
        entries = self._state.eligible(task, self.rules, self.global_steps)
        if not entries:
            return []
        order = choose_histories(
            entries,
            n,
            self.rules,
            uses=self._state.uses_of(entries),
            entropies=[scores.get(entry.trajectory_id, entry.entropy) for entry in entries],
            global_steps=self.global_steps,
            generator=generator,
            versions_drawn=versions,
        )
        return [entries[place] for place in order]
