"""The rules of a pool, and what is wrong with them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from trajstore.errors import ConfigurationError
from trajstore.experience.buckets import TASK_SAMPLING, TASK_SAMPLING_HELP, TaskSampling
from trajstore.sampling import Sampler, sampler_of

SelectMode = Literal["argmin", "argmax", "random", "reward"]
SELECT_MODES: tuple[SelectMode, ...] = get_args(SelectMode)

_BY_MODE: Mapping[SelectMode, Mapping[str, Any]] = {
    "argmin": {"name": "least_used", "best": "lowest"},
    "argmax": {"name": "least_used", "best": "highest"},
    "random": {"name": "weighted", "unit": "trajectory"},
    "reward": {"name": "least_used", "best": "highest"},
}

PolicyVersions = Literal["any", "spread"]
POLICY_VERSIONS: tuple[PolicyVersions, ...] = get_args(PolicyVersions)

SaveFilter = Literal["success", "best", "positive"]
SAVE_FILTERS: tuple[SaveFilter, ...] = get_args(SaveFilter)


@dataclass(frozen=True, kw_only=True)
class PoolRules:
    """The rules of a pool. ``None`` switches a bound off.

    Attributes:
        n_rollout: rows that each task has in a batch.
        success_threshold: outcome from which on a rollout is a success; see
            :func:`~trajstore.experience.outcomes.is_success`.
        experience_lbound: a task's trajectories enter if its difficulty (successes out of ``n_rollout``) is above this.
        experience_rbound: they enter if its difficulty is below this. (ExGRPO's upper bound is inclusive: its 7 is 8
            here.)
        save_filter: ``success``: every success enters; ``best``: only the best of these by entropy; ``positive``: every
            rollout with an outcome above 0, as in AgentEvolver: with partial rewards these are failures too, and they
            are replayed.
        exp_select_mode: what is best, both when entering a full task and among equally often used ones when coming out:
            the lowest entropy (``argmin``), the highest (``argmax``), the highest outcome (``reward``), or nothing
            (``random``).
        policy_versions: ``spread``: histories of several policy versions on purpose. Each is of the version of which
            the batch has fewest so far; the sampler decides among those of one version. An unknown version counts as
            one of its own.
        sampler: which of a task's trajectories come out, as :func:`~trajstore.sampling.sampler_of` takes it:
            ``weighted`` (with ``unit: trajectory``), ``freshest`` or ``least_used`` (``best`` as ``exp_select_mode``
            says, if it is left out). ``None``: least used first, among equally often used ones the best by
            ``exp_select_mode``; all alike with ``random``. Priorities are outcomes; ages count from this step.
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

    n_rollout: int
    success_threshold: float = 1.0
    experience_lbound: int | None = 0
    experience_rbound: int | None = 8
    save_filter: SaveFilter = "success"
    exp_select_mode: SelectMode = "argmin"
    policy_versions: PolicyVersions = "any"
    sampler: Mapping[str, Any] | None = None
    max_trajectories_per_task: int = 10
    max_policy_age: int | None = None
    min_reward: float | None = None
    use_current_policy_entropy: bool = True
    replay_difficulty: int | None = None
    task_sampling: TaskSampling = "by_task"
    seed: int = 1234

    def __post_init__(self) -> None:
        problems = rule_problems(vars(self))
        if not isinstance(self.use_current_policy_entropy, bool):
            problems.append(f"use_current_policy_entropy: {self.use_current_policy_entropy!r}, must be true or false")
        if problems:
            raise ConfigurationError("experience pool: " + "; ".join(problems))

    def make_sampler(self) -> Sampler:
        """Return a new sampler that chooses among the trajectories of a task."""
        if self.sampler is None:
            return sampler_of(_BY_MODE[self.exp_select_mode])
        best = _BY_MODE[self.exp_select_mode].get("best")
        said = self.sampler.get("name") == "least_used" and best is not None
        return sampler_of({"best": best, **self.sampler} if said else self.sampler)

    @property
    def max_uses(self) -> int | None:
        """How often a trajectory comes out at the most; ``None`` = any number."""
        if self.sampler is None:
            return None
        most: int | None = self.sampler.get("uses", self.sampler).get("max_uses")
        return most


def demonstration_problems(rules: PoolRules) -> list[str]:
    """Return why demonstrations could never come out of a pool with these rules, one sentence each.

    No policy of the run made them, so they have no version and no age.
    """
    found = version_needs(rules)
    if (rules.sampler or {}).get("name") == "freshest":
        found.append(("sampler: freshest", "use least_used or weighted"))
    return [f"{option}, but demonstrations have no policy version: {remedy}" for option, remedy in found]


def version_needs(rules: PoolRules) -> list[tuple[str, str]]:
    """Return the options that let nothing out of which no policy version is known, and what to do about each."""
    found = []
    if rules.max_policy_age is not None:
        found.append((f"max_policy_age: {rules.max_policy_age}", "set null"))
    sampler = rules.sampler or {}
    if "staleness" in sampler or sampler.get("recency", {}).get("by") == "versions":
        factor = "staleness" if "staleness" in sampler else "recency by versions"
        found.append((f"sampler: weighted with {factor}", "leave it out"))
    return found


def rule_problems(values: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with these values of :class:`PoolRules` fields, one sentence each. Absent keys are fine."""
    problems = [] if values.get("sampler") is None else _sampler_problems(values["sampler"])

    def whole(key: str, least: int, optional: bool = False) -> None:
        value = values.get(key)
        if key not in values or (optional and value is None):
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            null = " or null" if optional else ""
            problems.append(f"{key}: {value!r}, must be a whole number of at least {least}{null}")

    def choice(key: str, allowed: Sequence[str]) -> None:
        if key in values and values[key] not in allowed:
            problems.append(f"{key}: {values[key]!r}, must be one of {', '.join(allowed)}")

    whole("n_rollout", 1)
    whole("max_trajectories_per_task", 1)
    whole("seed", 0)
    whole("max_policy_age", 0, optional=True)
    whole("replay_difficulty", 0, optional=True)
    choice("save_filter", SAVE_FILTERS)
    choice("exp_select_mode", SELECT_MODES)
    choice("policy_versions", POLICY_VERSIONS)
    sampler = values.get("sampler")
    lowest = isinstance(sampler, Mapping) and sampler.get("best") == "lowest"
    if values.get("exp_select_mode") == "reward" and lowest:
        problems.append("sampler: best: lowest, with exp_select_mode: reward: the lowest outcomes would come first")
    if values.get("policy_versions") == "spread" and isinstance(sampler, Mapping) and sampler.get("name") == "freshest":
        problems.append("policy_versions: spread, with sampler: freshest: one wants all versions, the other the newest")
    if "task_sampling" in values and values["task_sampling"] not in TASK_SAMPLING:
        problems.append(f"task_sampling: {values['task_sampling']!r}, {TASK_SAMPLING_HELP}")
    threshold = values.get("success_threshold", 1.0)
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not math.isfinite(threshold):
        problems.append(f"success_threshold: {threshold!r}, must be a finite number")
    for key in ("experience_lbound", "experience_rbound", "min_reward"):
        value = values.get(key)
        number = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
        if value is not None and not number:
            problems.append(f"{key}: {value!r}, must be a number or null")
    low, high = values.get("experience_lbound"), values.get("experience_rbound")
    if isinstance(low, int | float) and isinstance(high, int | float) and low >= high:
        problems.append(f"experience_lbound: {low!r}, must be below experience_rbound = {high!r} (both are exclusive)")
    return problems


def _sampler_problems(value: Any) -> list[str]:
    """Return why a sampler cannot choose among the trajectories of a task, one sentence each."""
    if not isinstance(value, Mapping):
        return [f"sampler: {value!r}, must be a mapping with a name, or null"]
    try:
        sampler = sampler_of(value)
    except ConfigurationError as error:
        return [str(error)]
    name = value["name"]
    if name in ("epochs", "groups"):
        return [
            f"sampler: {name}: the pool draws tasks by itself, and chooses among one task's trajectories anew at every"
            " step; use weighted, freshest or least_used"
        ]
    problems = []
    if sampler.unit != "trajectory":
        problems.append(f"sampler: {name}: give it unit: trajectory, since whole trajectories come out")
    if value.get("uses", {}).get("cooldown"):
        problems.append("sampler: uses: cooldown has no meaning here: the pool counts uses, not what lies between them")
    return problems
