"""The rules of a pool, and their validation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from trainer_hooks.replay.buckets import TaskSampling
from trajstore._core.base.settings import Count, Finite, Number, Settings, Whole

SelectMode = Literal["argmin", "argmax", "random", "reward"]

PolicyVersions = Literal["any", "spread"]
SaveFilter = Literal["success", "best", "positive"]


@dataclass(frozen=True, kw_only=True)
class PoolOptions(Settings):
    """The rules of a pool that do not depend on the size of a batch. ``None`` switches a limit off.

    Attributes:
        success_threshold: lowest outcome of a success; see :func:`~trainer_hooks.replay.outcomes.is_success`.
        experience_lbound: a task's trajectories enter if its difficulty (successes out of ``n_rollout``) is above this.
        experience_rbound: they enter if its difficulty is below this; ``None`` = ``n_rollout``. (ExGRPO's upper bound
            is inclusive: its 7 is 8 here.)
        save_filter: ``success``: every success enters; ``best``: only the best of these by entropy; ``positive``: every
            rollout with an outcome above 0, as in AgentEvolver. With partial rewards, ``positive`` admits and replays
            failures too.
        exp_select_mode: the criterion for the best trajectory, both when entering a full task and when being drawn:
            lowest entropy (``argmin``), highest entropy (``argmax``), highest outcome (``reward``), or none
            (``random``). Of two equal ones the older is drawn.
        policy_versions: ``spread``: histories are drawn from different policy versions. Each is the best of the version
            that the batch has fewest of so far. All unknown versions count as one.
        in_turns: whether a task's trajectories take turns: the least often drawn come first, and the best among these.
        max_trajectories_per_task: trajectories kept per task, chosen by ``exp_select_mode``.
        max_policy_age: training steps after which a trajectory is no longer drawn. A trajectory whose version is
            unknown, or newer than the current step, has no known age and is not drawn either.
        min_reward: lowest outcome of a trajectory that may be drawn.
        replay_difficulty: the only bucket from which tasks are drawn.
        task_sampling: how tasks are drawn: evenly (``by_task``), by difficulty (``by_difficulty``, ``normal``,
            ``linear``, ``sqrt``, ``linear_clip``), or ``similar`` to the tasks of the batch.
        seed: of the generator that draws tasks and trajectories.

    Raises:
        ConfigurationError: values out of range; the message lists all of them.
    """

    success_threshold: Finite = 1.0
    experience_lbound: Number | None = 0
    experience_rbound: Number | None = None
    save_filter: SaveFilter = "success"
    exp_select_mode: SelectMode = "argmin"
    policy_versions: PolicyVersions = "any"
    in_turns: bool = False
    max_trajectories_per_task: Count = 10
    max_policy_age: Whole | None = None
    min_reward: Number | None = None
    replay_difficulty: Whole | None = None
    task_sampling: TaskSampling = "by_task"
    seed: Whole = 1234

    def contradictions(self) -> Iterator[str]:
        low, high = self.experience_lbound, self.experience_rbound
        if low is not None and high is not None and low >= high:
            yield f"experience_lbound: {low}, must be below experience_rbound = {high} (both are exclusive)"


@dataclass(frozen=True, kw_only=True)
class PoolRules(PoolOptions):
    """The rules of a pool: :class:`PoolOptions`, and those that the trainer sets.

    Attributes:
        n_rollout: rows of each task in a batch.
        max_prompt_length: tokens of the longest prompt; trajectories with a longer one are not drawn. Of several rows
            only the first one's counts.
        max_response_length: tokens of the longest response of a row; trajectories with a longer one are not drawn.

    Raises:
        ConfigurationError: values out of range; the message lists all of them.
    """

    section: ClassVar[str] = "experience pool"

    n_rollout: Count
    max_prompt_length: Whole | None = None
    max_response_length: Whole | None = None

    @property
    def bounds(self) -> str:
        """The successes with which a task's trajectories enter, for messages."""
        low = "" if self.experience_lbound is None else f"more than {self.experience_lbound:g} and "
        high = self.n_rollout if self.experience_rbound is None else self.experience_rbound
        return f"{low}fewer than {high:g} successes out of {self.n_rollout}"
