"""The rules of a pool, and what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from trainer_hooks.replay.buckets import TaskSampling
from trajstore.core.base.settings import Count, Finite, Number, Settings, Whole

SelectMode = Literal["argmin", "argmax", "random", "reward"]

PolicyVersions = Literal["any", "spread"]
SaveFilter = Literal["success", "best", "positive"]


@dataclass(frozen=True, kw_only=True)
class PoolOptions(Settings):
    """The rules of a pool that do not depend on the size of a batch. ``None`` switches a bound off.

    Attributes:
        success_threshold: outcome from which on a rollout is a success; see
            :func:`~trainer_hooks.replay.outcomes.is_success`.
        experience_lbound: a task's trajectories enter if its difficulty (successes out of ``n_rollout``) is above this.
        experience_rbound: they enter if its difficulty is below this. (ExGRPO's upper bound is inclusive: its 7 is 8
            here.)
        save_filter: ``success``: every success enters; ``best``: only the best of these by entropy; ``positive``: every
            rollout with an outcome above 0, as in AgentEvolver: with partial rewards these are failures too, and they
            are replayed.
        exp_select_mode: what is best, both when entering a full task and when coming out: the lowest entropy
            (``argmin``), the highest (``argmax``), the highest outcome (``reward``), or nothing (``random``). Where
            two are equally good, the older one comes out.
        policy_versions: ``spread``: histories of several policy versions on purpose. Each is of the version of which
            the batch has fewest so far; of those of one version the best comes. An unknown version counts as
            one of its own.
        in_turns: whether all of a task's trajectories take turns: those that came less often come first, and of equally
            often drawn ones the best.
        max_uses: how often a trajectory comes out at the most; ``None`` = any number.
        max_trajectories_per_task: trajectories that are kept of a task; ``exp_select_mode`` says which.
        max_policy_age: training steps after which a trajectory no longer comes out. One whose version is unknown, or
            newer than the step that is going on, has no known age and does not come out either.
        min_reward: outcome that a trajectory must have at the least to come out.
        use_current_policy_entropy: whether ``exp_select_mode`` goes by the entropy under the current policy, if the
            trainer gives it.
        replay_difficulty: the one bucket from which tasks are drawn.
        task_sampling: how tasks are drawn: evenly (``by_task``), by difficulty (``by_difficulty``, ``normal``,
            ``linear``, ``sqrt``, ``linear_clip``), or ``similar`` to the tasks of the batch.
        seed: of the generator that draws tasks and trajectories.

    Raises:
        ConfigurationError: values out of range; the message lists all of them.
    """

    success_threshold: Finite = 1.0
    experience_lbound: Number | None = 0
    experience_rbound: Number | None = 8
    save_filter: SaveFilter = "success"
    exp_select_mode: SelectMode = "argmin"
    policy_versions: PolicyVersions = "any"
    in_turns: bool = False
    max_uses: Count | None = None
    max_trajectories_per_task: Count = 10
    max_policy_age: Whole | None = None
    min_reward: Number | None = None
    use_current_policy_entropy: bool = True
    replay_difficulty: Whole | None = None
    task_sampling: TaskSampling = "by_task"
    seed: Whole = 1234

    def contradictions(self) -> list[str]:
        low, high = self.experience_lbound, self.experience_rbound
        if low is not None and high is not None and low >= high:
            return [f"experience_lbound: {low}, must be below experience_rbound = {high} (both are exclusive)"]
        return []


@dataclass(frozen=True, kw_only=True)
class PoolRules(PoolOptions):
    """The rules of a pool: :class:`PoolOptions`, and how large a task's group is.

    Attributes:
        n_rollout: rows that each task has in a batch.

    Raises:
        ConfigurationError: values out of range; the message lists all of them.
    """

    section: ClassVar[str] = "experience pool"

    n_rollout: Count
