"""Configuration of experience replay: one frozen dataclass, from a dict or an OmegaConf node."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from trainer_hooks.batch import GroupOffPolicy
from trainer_hooks.replay import PoolRules, RatioSchedule
from trainer_hooks.replay.mixing import histories_per_task, history_problems, ratio_or_points
from trainer_hooks.replay.rules import PoolOptions
from trainer_hooks.replay.store import BufferStore, store_options
from trajstore._core.base.arguments import finite, whole
from trajstore._core.base.settings import Count, NotNegative, Share, names_of, refuse

logger = logging.getLogger(__name__)

SECTION = "exp_manager.experience_replay"
"""Path of the section in a trainer's configuration."""

_DEFAULT_OFF_CLIPRANGE = 1.0


def _shaping(name: str, value: Any) -> float | None:
    return None if value in (None, "none") else finite(name, value, 0, above=True)


@dataclass(frozen=True, kw_only=True)
class ExperienceReplayConfig(PoolOptions):
    """The keys of ``exp_manager.experience_replay`` and their defaults: those of the pool, and these.

    Attributes:
        enable: whether anything is replayed. If not, no pool is opened, and every call of the hook returns its input.
        replay_start_ratio: training progress in [0, 1] before which nothing is replayed, although the pool fills.
        exp_ratio: share of experience tasks in a batch, in [0, 1]; or ``[progress, ratio]`` points with linear
            interpolation.
        offpolicy_trajectories_per_task: k, the maximum number of histories per experience task; below ``n_rollout``.
            None = half of ``n_rollout``, at least 1 and at most ``max_trajectories_per_task``.
        unsolved_first: whether training tasks without a known success keep their places instead of giving way to tasks
            with history, and whether unsolved tasks of earlier batches are used instead of solved ones to fill up. Not
            for data in which each task appears once: then all tasks keep their places, and nothing is replayed.
        off_cliprange_high: upper clip range of off-policy tokens: their ratio is clipped above 1 + this.
        exp_is_correct: whether recorded log-probabilities replace the current policy's on replayed tokens.
        group_offpolicy: whether replayed rows are in the group of their task (``shared``), or each in its own
            (``separate``).
        store: ``path``, and optionally ``format`` and ``capacity``, of the buffer that keeps the pool; ``None`` = in
            memory.
        off_policy_shaping: gamma > 0 replaces the off-policy ratio r by r / (r + gamma); ``None`` (in files also
            ``none``) does not.
        drop_negative_off_policy: whether replayed tokens with a negative advantage have no loss.
        clip_off_policy: whether replayed tokens are clipped at all.

    Raises:
        ConfigurationError: values out of range; the message lists all of them, each by its key.
    """

    section: ClassVar[str] = SECTION

    enable: bool = False
    replay_start_ratio: Share = 0.0
    exp_ratio: Annotated[float | tuple[tuple[float, float], ...], ratio_or_points] = 0.5
    offpolicy_trajectories_per_task: Count | None = None
    unsolved_first: bool = False
    off_cliprange_high: NotNegative = _DEFAULT_OFF_CLIPRANGE
    exp_is_correct: bool = True
    group_offpolicy: GroupOffPolicy = "shared"
    store: Annotated[Mapping[str, Any] | None, store_options] = None
    off_policy_shaping: Annotated[float | None, _shaping] = None
    drop_negative_off_policy: bool = False
    clip_off_policy: bool = True

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if not self.clip_off_policy and self.off_cliprange_high != _DEFAULT_OFF_CLIPRANGE:
            yield f"off_cliprange_high: {self.off_cliprange_high}, has no effect with clip_off_policy: false"
        if self.enable and self.replay_start_ratio == 1:
            yield (
                "replay_start_ratio: 1, but training progress stays below 1, so nothing would be replayed; lower it, or"
                " set enable: false"
            )
        if self.max_policy_age == 0:
            yield "max_policy_age: 0, but a history is at least 1 step old when it is replayed"
        if self.min_reward is not None and self.min_reward > 1 >= self.success_threshold:
            yield (
                f"min_reward: {self.min_reward:g}, with success_threshold = {self.success_threshold:g} outcomes are at"
                " most 1, so nothing would be replayed"
            )
        histories, most = self.offpolicy_trajectories_per_task, self.max_trajectories_per_task
        if histories is not None and histories > most:
            yield f"offpolicy_trajectories_per_task: {histories}, must not be above max_trajectories_per_task = {most}"

    @staticmethod
    def from_mapping(values: Any, *, n_rollout: int | None = None) -> ExperienceReplayConfig:
        """Return the configuration with these keys; absent ones have their defaults.

        Args:
            values: a dict, as YAML is read into, or anything with ``keys()`` and ``[key]`` such as an OmegaConf node.
            n_rollout: rollouts per task, to check k against it.

        Raises:
            ConfigurationError: unknown keys, values out of range; the message lists all of them.
        """
        result = ExperienceReplayConfig.from_node(values)
        if n_rollout is not None:
            result.pool_rules(n_rollout)
        return result

    def warn(self) -> None:
        """Log options with a surprising effect."""
        if self.save_filter == "positive":
            logger.warning(
                "experience replay: save_filter: positive lets every outcome above 0 in: rollouts below"
                " success_threshold = %g, failures with partial rewards, are replayed too",
                self.success_threshold,
            )

    def pool_rules(self, n_rollout: int, **lengths: int | None) -> PoolRules:
        """Return the rules of the pool for ``n_rollout`` rollouts per task.

        Args:
            n_rollout: rows of every task in a batch.
            lengths: ``max_prompt_length`` and ``max_response_length`` of the rules.

        Raises:
            ConfigurationError: ``n_rollout`` is not above 0, k is not below it, or no history could be replayed.
        """
        whole("n_rollout", n_rollout, 1)
        histories = histories_per_task(self.offpolicy_trajectories_per_task, n_rollout, self.max_trajectories_per_task)
        refuse(SECTION, history_problems(histories, n_rollout) or [*self._problems(n_rollout, histories)])
        options: dict[str, Any] = lengths | {name: getattr(self, name) for name in names_of(PoolOptions)}
        return PoolRules(n_rollout=n_rollout, **options)

    def _problems(self, n_rollout: int, histories: int) -> Iterator[str]:
        """Yield a sentence for each key that ``n_rollout`` makes useless."""
        low, high = self.experience_lbound, self.experience_rbound
        least = 0 if self.save_filter == "positive" else 1
        counts = [count for count in range(least, n_rollout) if low is None or low < count]
        if not any(high is None or count < high for count in counts):
            above, below = ("null" if bound is None else f"{bound:g}" for bound in (low, high))
            yield (
                f"experience_lbound: {above}, experience_rbound: {below} (both exclusive), but a task that enters has"
                f" {least} to {n_rollout - 1} successes out of n_rollout = {n_rollout}, so no task could"
            )
        if self.replay_difficulty is not None and self.replay_difficulty >= n_rollout:
            yield (
                f"replay_difficulty: {self.replay_difficulty}, must be below n_rollout = {n_rollout}: a task with that"
                " many successes is solved, and is not replayed"
            )
        capacity = (self.store or {}).get("capacity")
        if capacity is not None and capacity < histories:
            yield f"store.capacity: {capacity}, is below the {histories} histories of a single task"
        if self.group_offpolicy == "separate" and histories == n_rollout - 1:
            yield (
                f"group_offpolicy: separate, with offpolicy_trajectories_per_task = {n_rollout - 1} of n_rollout ="
                f" {n_rollout} the fresh rollout of a task is a group of one, which has no advantage; lower it, or set"
                " shared"
            )

    def open_store(self) -> BufferStore | None:
        """Open the pool's store, to be closed by the caller; ``None`` if the pool is in memory."""
        return None if self.store is None else BufferStore.open(**self.store)

    def ratio(self) -> float | RatioSchedule:
        """Return ``exp_ratio`` in the form that the mixing takes."""
        return RatioSchedule(self.exp_ratio) if isinstance(self.exp_ratio, tuple) else self.exp_ratio
