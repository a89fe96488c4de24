"""The rules of a pool, and what is wrong with them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from trajstore.arguments import finite, is_number, whole, whole_or_none
from trajstore.columns.limits import shown
from trajstore.errors import ConfigurationError
from trajstore.experience.buckets import TaskSampling
from trajstore.sampling import Sampler, sampler_of
from trajstore.settings import Settings

SelectMode = Literal["argmin", "argmax", "random", "reward"]

_BY_MODE: Mapping[SelectMode, Mapping[str, Any]] = {
    "argmin": {"name": "least_used", "best": "lowest"},
    "argmax": {"name": "least_used", "best": "highest"},
    "random": {"name": "weighted", "unit": "trajectory"},
    "reward": {"name": "least_used", "best": "highest"},
}

_BEST = "best"
"""Name of the ``sampler`` that is the pool's own."""

_SAMPLERS = (_BEST, "least_used", "freshest", "weighted")
"""The others are of ``trajstore.sampling``."""

PolicyVersions = Literal["any", "spread"]
SaveFilter = Literal["success", "best", "positive"]


def _bound(name: str, value: Any) -> float | None:
    """Check a bound; infinity is one too.

    Raises:
        ConfigurationError: it is no number.
    """
    if value is not None and (not is_number(value) or math.isnan(value)):
        raise ConfigurationError(f"{name}: {shown(value)}, must be a number or null")
    return None if value is None else value


def _sampler(name: str, value: Any) -> Mapping[str, Any] | None:
    """Check options of a sampler that chooses among the trajectories of a task.

    Raises:
        ConfigurationError: it cannot.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{name}: {value!r}, must be a mapping with a name, or null")
    kind = value.get("name")
    if kind not in _SAMPLERS:
        raise ConfigurationError(
            f"{name}: name {kind!r}, must be one of {', '.join(_SAMPLERS)}: the pool draws tasks by itself, and"
            " chooses among one task's trajectories anew at every step"
        )
    if kind == _BEST:
        whole_or_none(f"{name}: best: max_uses", value.get("max_uses"), 1)
        if others := sorted(map(str, set(value) - {"name", "max_uses"})):
            raise ConfigurationError(
                f"{name}: best has no option {', '.join(map(repr, others))}; there is max_uses, and exp_select_mode"
                " says what is best"
            )
        return value
    if sampler_of(value).unit != "trajectory":
        raise ConfigurationError(f"{name}: {kind}: give it unit: trajectory, since whole trajectories come out")
    if value.get("uses", {}).get("cooldown"):
        raise ConfigurationError(
            f"{name}: uses: cooldown has no meaning here: the pool counts uses, not what lies between them"
        )
    return value


@dataclass(frozen=True, kw_only=True)
class PoolOptions(Settings):
    """The rules of a pool that do not depend on the size of a batch. ``None`` switches a bound off.

    Attributes:
        success_threshold: outcome from which on a rollout is a success; see
            :func:`~trajstore.experience.outcomes.is_success`.
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
            the batch has fewest so far; the sampler decides among those of one version. An unknown version counts as
            one of its own.
        sampler: which of a task's trajectories come out, as :func:`~trajstore.sampling.sampler_of` takes it:
            ``weighted`` (with ``unit: trajectory``), ``freshest`` or ``least_used``: all take turns, of equally often
            used ones the best by ``exp_select_mode`` first, unless its own ``best`` says another order; or ``best``:
            by ``exp_select_mode`` (not ``random``), at most ``max_uses`` times each. ``None``: by ``exp_select_mode``,
            however often it was used; all alike with ``random``. Priorities are outcomes; ages count from this step.
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

    success_threshold: Annotated[float, finite] = 1.0
    experience_lbound: Annotated[float | None, _bound] = 0
    experience_rbound: Annotated[float | None, _bound] = 8
    save_filter: SaveFilter = "success"
    exp_select_mode: SelectMode = "argmin"
    policy_versions: PolicyVersions = "any"
    sampler: Annotated[Mapping[str, Any] | None, _sampler] = None
    max_trajectories_per_task: Annotated[int, partial(whole, least=1)] = 10
    max_policy_age: Annotated[int | None, partial(whole_or_none, least=0)] = None
    min_reward: Annotated[float | None, _bound] = None
    use_current_policy_entropy: bool = True
    replay_difficulty: Annotated[int | None, partial(whole_or_none, least=0)] = None
    task_sampling: TaskSampling = "by_task"
    seed: Annotated[int, partial(whole, least=0)] = 1234

    def contradictions(self) -> list[str]:
        problems = []
        sampler, mode = self.sampler or {}, self.exp_select_mode
        if mode == "reward" and sampler.get("best") == "lowest":
            problems.append("sampler: best: lowest, with exp_select_mode: reward: the lowest outcomes would come first")
        if mode == "random" and sampler.get("name") == _BEST:
            problems.append(
                "sampler: best, with exp_select_mode: random, which calls none the best: leave the sampler out, or"
                " choose argmin, argmax or reward"
            )
        if self.policy_versions == "spread" and sampler.get("name") == "freshest":
            problems.append(
                "policy_versions: spread, with sampler: freshest: one wants all versions, the other the newest"
            )
        low, high = self.experience_lbound, self.experience_rbound
        if low is not None and high is not None and low >= high:
            problems.append(f"experience_lbound: {low}, must be below experience_rbound = {high} (both are exclusive)")
        return problems


@dataclass(frozen=True, kw_only=True)
class PoolRules(PoolOptions):
    """The rules of a pool: :class:`PoolOptions`, and how large a task's group is.

    Attributes:
        n_rollout: rows that each task has in a batch.

    Raises:
        ConfigurationError: values out of range; the message lists all of them.
    """

    section: ClassVar[str] = "experience pool"

    n_rollout: Annotated[int, partial(whole, least=1)]

    def make_sampler(self) -> Sampler:
        """Return a new sampler that chooses among the trajectories of a task."""
        if self.sampler is None or self.is_best_only:
            return sampler_of(_BY_MODE[self.exp_select_mode])
        best = _BY_MODE[self.exp_select_mode].get("best")
        said = self.sampler.get("name") == "least_used" and best is not None
        return sampler_of({"best": best, **self.sampler} if said else self.sampler)

    @property
    def is_best_only(self) -> bool:
        """Whether ``exp_select_mode`` alone says what comes out: how often it was used does not count."""
        return self.sampler is None or self.sampler["name"] == _BEST

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
