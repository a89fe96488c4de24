"""A training step's figures of replay: collected during the step, returned at its end."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from trainer_hooks import metrics
from trainer_hooks.batch import Batch
from trainer_hooks.masks import compute_response_mask
from trainer_hooks.metrics import RATIO_NEAR_ZERO, added, figures_of, token_sums
from trainer_hooks.replay import ExperienceManager
from trainer_hooks.replay.entry import is_demonstration
from trainer_hooks.replay.outcomes import known_outcome
from trainer_hooks.replay.rows import row_count
from trajstore.errors import ConfigurationError, counted, listed
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

OFF_POLICY_SHARE_LIMIT = 0.5
"""Share of off-policy tokens above which a warning is logged."""

LITTLE_OF_ASKED = 0.2
"""Share of off-policy tokens below which a warning is logged, as a fraction of the requested share of rows.

Replayed successes are often shorter than other rollouts, and a pool may have too few tasks for some time.
"""

WASTED_SHARE_LIMIT = 0.5
"""Share of off-policy tokens with ratios below ``metrics.RATIO_NEAR_ZERO`` above which a warning is logged."""

OFF_POLICY_RATIO_LIMIT = 10.0
"""Mean importance ratio of the off-policy tokens above which a warning is logged.

Single tokens exceed it in any run that learns: the policy has come to prefer a token of former probability 5 %.
"""

LEAST_SAMPLE_SIZE = 0.1
"""Effective sample size of the off-policy tokens below which a warning is logged."""

WARN_EVERY = 100
"""Steps for which a warning of one kind is not repeated."""

EMPTY_STEPS = 10
"""Consecutive steps without anything to replay after which a warning is logged."""

ZERO_LOSS_STEPS = 10
"""Consecutive steps with a loss of exactly 0 on replayed tokens after which a warning is logged."""


def warnings_of(figures: Mapping[str, float], asked: float) -> dict[str, str]:
    """Return warnings about a step's figures (names of ``trainer_hooks.metrics``), by kind.

    Kinds: ``share`` and ``ratio``, too far off-policy; ``little`` and ``wasted``, replay with almost no effect;
    ``nan``, a loss of replayed tokens that is NaN.

    Args:
        figures: of the step.
        asked: share of the batch's rows that the configuration would have replayed, in [0, 1].
    """
    warnings: dict[str, str] = {}
    share = figures.get(f"{metrics.PREFIX}off_policy_share", 0.0)
    if share > OFF_POLICY_SHARE_LIMIT:
        warnings["share"] = (
            f"{share:.0%} of the tokens are off-policy: lower exp_ratio or replay fewer per task; where rollouts are"
            " guided, those without their experience count too (rollout_expratio)"
        )
    if 0 < share < LITTLE_OF_ASKED * asked:
        warnings["little"] = (
            f"only {share:.1%} of the tokens are replayed, where exp_ratio and offpolicy_trajectories_per_task ask for"
            f" {asked:.1%} of the rows: see whether the pool has enough tasks (experience_replay/pool_tasks), or"
            " whether its histories are far shorter than the fresh rollouts"
        )
    ratio = figures.get(f"{metrics.PREFIX}off_ratio_mean", 1.0)
    size = figures.get(f"{metrics.PREFIX}off_effective_sample_size", 1.0)
    if ratio > OFF_POLICY_RATIO_LIMIT or size < LEAST_SAMPLE_SIZE:
        warnings["ratio"] = (
            f"importance ratios of the off-policy tokens have mean {ratio:.3g} and effective sample size {size:.1%}:"
            " set off_policy_shaping or max_policy_age; where max_policy_age: 1 does not help, the recorded log-probs"
            " are not those of the policy that sampled"
        )
    wasted = figures.get(f"{metrics.PREFIX}off_ratio_near_zero_share", 0.0)
    if wasted > WASTED_SHARE_LIMIT:
        warnings["wasted"] = (
            f"{wasted:.0%} of the replayed tokens have importance ratios below {RATIO_NEAR_ZERO}, so next to no"
            " gradient: the policy has left these histories, set max_policy_age"
        )
    if math.isnan(figures.get(f"{metrics.PREFIX}off_pg_loss", 0.0)):
        warnings["nan"] = "the loss of the replayed tokens is NaN: check the recorded log-probs and the outcomes"
    return warnings


class ReplayFigures:
    """Collects one step's figures of replay.

    Args:
        manager: of the pool.
    """

    def __init__(self, manager: ExperienceManager) -> None:
        self.times = metrics.StepTimes()
        self._manager = manager
        self._sums: dict[str, float] = {}
        self._quiet_until: dict[str, int] = {}
        self._zero_steps = 0
        self._histories: list[AgentTrajectory] = []
        self._refused: dict[str, float] = {}
        self._demonstrations = 0
        self._asked = 0.0

    def note_drawn(self, histories: Mapping[str, Sequence[AgentTrajectory]], asked: float) -> None:
        """Record the histories of this step.

        Args:
            histories: the drawn histories, by task.
            asked: share of the batch's rows that the configuration would have replayed.
        """
        self._asked = asked
        self._histories = [trajectory for held in histories.values() for trajectory in held]

    def note_joined(self, histories: list[AgentTrajectory], other_prompts: int) -> None:
        """Record the histories in the batch, and the number of those drawn that answer another prompt."""
        self._histories = histories
        self._refused = {f"{metrics.PREFIX}histories_refused/other_prompt": float(other_prompts)}

    def note(self, sums: Mapping[str, float]) -> None:
        """Add sums over tokens, of log-probs or a loss."""
        self._sums = added([self._sums, sums])

    def note_loss(self, batch: Batch, rows: Sequence[int], loss: Mapping[str, Tensor], advantages: Tensor) -> None:
        """Record one loss computation over some rows of a batch; see ``ReplayHook.loss_computed``."""
        count = len(batch.prompt_lengths)
        if any(not 0 <= row < count for row in rows) or len(rows) != len(advantages):
            raise ConfigurationError(
                f"rows: {len(rows)} of them for advantages of {len(advantages)}; must be the numbers of these rows in"
                f" the batch, from 0 to {count - 1}"
            )
        response_mask = batch.tensors["response_mask"][list(rows)]
        exp_mask = compute_response_mask(batch.tensors["exp_mask"], response_mask.shape[1])[list(rows)]
        self.note(token_sums(loss, response_mask, exp_mask))

    def take(self, is_experience_replay: Sequence[bool], policy_versions: Sequence[int | None]) -> dict[str, float]:
        """Return all metrics of the step and reset. Every argument has one entry per row of the batch."""
        figures = figures_of(self._sums)
        self.warn(figures)
        result = figures | self._manager.metrics() | self.times.take()
        result |= metrics.batch_metrics(
            is_experience_replay, policy_versions, self._manager.global_steps, self._demonstrations
        )
        self._sums = {}
        return result

    def rollouts(
        self, fresh: Sequence[AgentTrajectory], replayed: Sequence[AgentTrajectory] | None
    ) -> dict[str, float]:
        """Return ``metrics.fresh_metrics`` and the number of rows of demonstrations.

        Args:
            fresh: the rollouts made.
            replayed: the histories of the batch; ``None`` = those drawn for this step.
        """
        histories = self._histories if replayed is None else replayed
        refused, self._histories, self._refused = self._refused, [], {}
        figures = refused | metrics.fresh_metrics(fresh, self._manager.rules.success_threshold)
        self._demonstrations = sum(row_count(trajectory) for trajectory in histories if is_demonstration(trajectory))
        if histories:
            figures[f"{metrics.PREFIX}demonstration_rows"] = float(self._demonstrations)
        return figures

    def warn(self, figures: Mapping[str, float]) -> None:
        """Log warnings about a step's figures; each kind at most once in :data:`WARN_EVERY` steps."""
        warnings = warnings_of(figures, self._asked)
        loss = figures.get(f"{metrics.PREFIX}off_pg_loss")
        if loss is not None:
            self._zero_steps = self._zero_steps + 1 if loss == 0.0 else 0
        if self._zero_steps >= ZERO_LOSS_STEPS:
            warnings["zero"] = (
                f"the loss of the replayed tokens was 0 in {counted(self._zero_steps, 'step')}: their advantages are 0 "
                "(groups of equal rewards?), or all of them are clipped or dropped"
            )
        step = self._manager.global_steps
        for kind, message in warnings.items():
            if step >= self._quiet_until.get(kind, 0):
                self._quiet_until[kind] = step + WARN_EVERY
                logger.warning("experience replay: %s", message)


class ReplayWatch:
    """Warns once if a run with replay enabled replays nothing, with the reason."""

    def __init__(self, manager: ExperienceManager) -> None:
        self._manager = manager
        self._empty_steps = self._waited = 0
        self._ever = False
        self._told = False
        self._handed_over = False
        self._best: float | None = None
        self._reason = ""

    def waiting(self, progress: float, start: float) -> None:
        """Warn, before replay starts, in the first of :data:`WARN_EVERY` steps."""
        if progress < start and self._waited % WARN_EVERY == 0:
            logger.warning(
                "experience replay: nothing is replayed before training progress %.3g (replay_start_ratio); it is %.3g"
                " now. The pool fills meanwhile",
                start,
                progress,
            )
        self._waited += progress < start

    def made(self, rollouts: Sequence[AgentTrajectory]) -> None:
        """Record the best outcome of a step's rollouts."""
        self._handed_over = self._handed_over or bool(rollouts)
        outcomes = [outcome for rollout in rollouts if (outcome := known_outcome(rollout)) is not None]
        self._best = max([*outcomes, *([] if self._best is None else [self._best])], default=None)

    def chosen(self, figures: Mapping[str, float]) -> None:
        """Record a step's mixing figures; warn after :data:`EMPTY_STEPS` steps in a row without anything to replay."""
        empty = figures.get(f"{metrics.PREFIX}nothing_to_replay", 0.0) > 0
        self._ever = self._ever or figures.get(f"{metrics.PREFIX}experience_tasks", 0.0) > 0
        self._empty_steps = self._empty_steps + 1 if empty else 0
        if empty:
            self._reason = self._manager.why_nothing()
        if self._empty_steps >= EMPTY_STEPS:
            self._tell(f"nothing to replay in {counted(self._empty_steps, 'step')}", self._reason)

    def closed(self) -> None:
        """Log the tasks still waiting at the end of a run; warn if nothing was replayed."""
        if self._empty_steps and not self._ever:
            reason = self._manager.why_nothing()
            if not reason and self._reason:  # the last step's rollouts came too late for its own batch
                tasks = len(self._manager.get_valid_replay_task_ids())
                reason = (
                    f"whenever tasks were chosen the pool had none to give; since its last step it has {tasks} that"
                    " could be drawn next. The run was too short"
                )
            self._tell("nothing was replayed in this run", reason)
        waiting = list(self._manager.waiting_tasks)
        if waiting:
            logger.warning(
                "experience replay: %s displaced by history and not drawn again by the end of this run"
                " (%s). They come first when it continues; otherwise train longer, lower exp_ratio, or start"
                " later (replay_start_ratio)",
                counted(len(waiting), "task", "was", "were"),
                listed(waiting, 3),
            )

    def _tell(self, what: str, reason: str) -> None:
        if self._told:
            return
        self._told = True
        best = "no rollout had an outcome" if self._best is None else f"the best outcome so far is {self._best:g}"
        best = best if self._handed_over else "no step was done: its step_done was never called, or refused"
        reason = reason or "exp_ratio, or unsolved_first, leaves no place for it"
        logger.warning("experience replay: %s: %s (%s)", what, reason, best)
