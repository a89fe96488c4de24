"""Configuration of experience replay: one frozen dataclass, from a dict, a YAML file or an OmegaConf node."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_hooks.batch import GROUPS, GroupOffPolicy
from trainer_hooks.masks import REGULARIZERS, RegularizeReplayed
from trajstore.arguments import whole
from trajstore.checked import checked
from trajstore.errors import ConfigurationError, MissingDependencyError
from trajstore.experience import PoolRules, RatioSchedule, TaskSampling
from trajstore.experience.mixing import history_problems, ratio_problems, start_problems
from trajstore.experience.rules import PolicyVersions, SaveFilter, SelectMode, rule_problems
from trajstore.experience.store import LEAST_CAPACITY, BufferStore

logger = logging.getLogger(__name__)

SECTION = "exp_manager.experience_replay"
"""Where the keys stand in a trainer's configuration."""

_DEFAULT_OFF_CLIPRANGE = 1.0
_STORE_KEYS = ("path", "format", "capacity")
_FLAGS = (
    "enable",
    "exp_is_correct",
    "prepare_in_background",
    "use_current_policy_entropy",
    "drop_negative_off_policy",
    "clip_off_policy",
)


@dataclass(frozen=True, kw_only=True)
class ExperienceReplayConfig:
    """The keys of ``exp_manager.experience_replay`` and their defaults.

    Attributes:
        enable: whether anything is replayed. Without it no pool is opened, and every call of the hook hands back what
            it got.
        replay_start_ratio: training progress in [0, 1] before which nothing is replayed; the pool fills all the same.
        exp_ratio: share of experience tasks in a batch, in [0, 1]; or ``[progress, ratio]`` points joined by straight
            lines.
        offpolicy_trajectories_per_task: histories per experience task at the most: k, below ``n_rollout``.
        off_cliprange_high: upper clip range of off-policy tokens: their ratio is clipped above 1 + this.
        exp_is_correct: whether recorded log-probabilities stand for the current policy's on replayed tokens.
        group_offpolicy: whether replayed rows are in the group of their task (``shared``), or each in one of its own
            (``separate``).
        max_policy_age: training steps after which a trajectory is no longer replayed; ``None`` = any age.
        task_sampling: how experience tasks are drawn: evenly (``by_task``), by difficulty (``by_difficulty``,
            ``normal``, ``linear``, ``sqrt``, ``linear_clip``), or ``similar`` to the tasks of the batch.
        store: ``path``, and optionally ``format`` and ``capacity``, of the buffer that keeps the pool; ``None`` = in
            memory.
        max_trajectories_per_task: trajectories that the pool keeps of a task; ``exp_select_mode`` says which.
        success_threshold: outcome from which on a rollout is a success.
        experience_lbound: a task enters the pool if more than this of ``n_rollout`` rollouts succeeded.
        experience_rbound: a task enters the pool if fewer than this of ``n_rollout`` rollouts succeeded. (ExGRPO's
            upper bound is inclusive.)
        exp_select_mode: which of a task's trajectories are the best: those of the lowest entropy (``argmin``), of the
            highest (``argmax``), of the highest outcome (``reward``), or none (``random``).
        policy_versions: ``spread``: a batch's histories are of as many policy versions as there are.
        sampler: which of a task's trajectories are replayed, by the names of ``trajstore.sampling.sampler_of``;
            ``None`` = least used first, then by ``exp_select_mode``.
        use_current_policy_entropy: whether ``exp_select_mode`` goes by the entropy under the current policy, which the
            trainer must give (``current_entropy`` of the hook); else by the recorded one. In verl always false.
        prepare_in_background: whether a thread reads, scores and chooses the histories while the rollouts are made; the
            same ones come.
        replay_difficulty: the one number of successes whose tasks are replayed; ``None`` = all.
        save_filter: ``success``: every success enters the pool; ``best``: only the best by entropy; ``positive``: every
            rollout with an outcome above 0, failures with partial rewards among them.
        min_reward: outcome that a trajectory must have at the least to be replayed.
        reward_fingerprint: name and version of the reward function, kept with each trajectory: where it differs there
            is a warning.
        seed: of the generator that draws tasks and histories.
        off_policy_shaping: gamma > 0 puts r / (r + gamma) for the off-policy ratio r; ``None`` (in files also ``none``)
            does not.
        drop_negative_off_policy: whether replayed tokens with a negative advantage have no loss.
        clip_off_policy: whether replayed tokens are clipped at all.
        regularize_replayed: which regularizers count replayed tokens: ``entropy``, ``both`` (KL too) or ``none``. In
            verl always ``both``, since its own terms count every token.
        pool_path: folder ``experience_pool`` for the pool as files, ``step_N/``; ``None`` = neither written nor read.
        pool_save_freq: steps between two ``step_N``; ``None`` = none is written.

    Raises:
        ConfigurationError: values out of range; the message lists all of them, each by its key.
    """

    enable: bool = False
    replay_start_ratio: float = 0.35
    exp_ratio: float | tuple[tuple[float, float], ...] = 0.5
    offpolicy_trajectories_per_task: int = 1
    off_cliprange_high: float = _DEFAULT_OFF_CLIPRANGE
    exp_is_correct: bool = True
    group_offpolicy: GroupOffPolicy = "shared"
    max_policy_age: int | None = None
    task_sampling: TaskSampling = "by_task"
    store: Mapping[str, Any] | None = None
    max_trajectories_per_task: int = 10
    success_threshold: float = 1.0
    experience_lbound: int | None = 0
    experience_rbound: int | None = 8
    exp_select_mode: SelectMode = "argmin"
    policy_versions: PolicyVersions = "any"
    sampler: Mapping[str, Any] | None = None
    use_current_policy_entropy: bool = True
    prepare_in_background: bool = False
    replay_difficulty: int | None = None
    save_filter: SaveFilter = "success"
    min_reward: float | None = None
    reward_fingerprint: str | None = None
    seed: int = 1234
    off_policy_shaping: float | None = None
    drop_negative_off_policy: bool = False
    clip_off_policy: bool = True
    regularize_replayed: RegularizeReplayed = "entropy"
    pool_path: str | None = None
    pool_save_freq: int | None = None

    def __post_init__(self) -> None:
        _raise_if(_problems(vars(self)))

    @staticmethod
    def from_mapping(values: Any, *, n_rollout: int | None = None) -> ExperienceReplayConfig:
        """Return the configuration with these keys; absent ones have their defaults.

        Args:
            values: a dict, or anything with ``keys()`` and ``[key]`` such as an OmegaConf node.
            n_rollout: rollouts per task, if k is to be checked against it.

        Raises:
            ConfigurationError: unknown keys, values out of range; the message lists all of them.
        """
        if not hasattr(values, "keys"):
            raise ConfigurationError(f"{SECTION}: must be a mapping of keys, is a {type(values).__name__}")
        given = {str(key): _plain(values[key]) for key in values.keys()}  # noqa: SIM118 - may be no dict
        known = {field.name: field.default for field in dataclasses.fields(ExperienceReplayConfig)}
        problems = [f"{key}: unknown key; known are {', '.join(sorted(known))}" for key in given if key not in known]
        given = {key: _normal(key, value) for key, value in given.items() if key in known}
        problems += _problems({**known, **given}, n_rollout)
        _raise_if(problems)
        return ExperienceReplayConfig(**given)

    @staticmethod
    @checked
    def from_yaml(path: str | Path, *, section: str = SECTION, n_rollout: int | None = None) -> ExperienceReplayConfig:
        """Return the configuration in a section of a YAML file.

        Args:
            path: the file.
            section: dotted path of the section; empty if the keys stand at the top.
            n_rollout: rollouts per task, if k is to be checked against it.

        Raises:
            ConfigurationError: no such file or section, not YAML, unknown keys, values out of range.
            MissingDependencyError: PyYAML is not installed.
        """
        try:
            import yaml  # type: ignore[import-untyped]  # an optional package, needed only here
        except ImportError:
            raise MissingDependencyError("pyyaml", "yaml") from None
        try:
            node = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ConfigurationError(f"{path}: not YAML: {error}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"path: {path}: cannot be read: {error}") from error
        for name in section.split(".") if section else ():
            if not isinstance(node, Mapping) or name not in node:
                raise ConfigurationError(f"{path}: has no section {section}; add it, or name another")
            node = node[name]
        try:
            return ExperienceReplayConfig.from_mapping({} if node is None else node, n_rollout=n_rollout)
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}: {error}") from error

    @checked
    def warn(self, *, knows_entropy: bool) -> None:
        """Log what of this has no effect, or another one than its name may say.

        Args:
            knows_entropy: whether the trainer tells the entropy of trajectories under the current policy.
        """
        if self.use_current_policy_entropy and not knows_entropy and self.exp_select_mode in ("argmin", "argmax"):
            logger.warning(
                "experience replay: use_current_policy_entropy has no effect: the trainer gives no current_entropy, so"
                " the saved entropy decides. Set it to false to say so"
            )
        if self.save_filter == "positive":
            logger.warning(
                "experience replay: save_filter: positive lets every outcome above 0 in: rollouts below"
                " success_threshold = %g, failures with partial rewards, are replayed too",
                self.success_threshold,
            )

    def pool_rules(self, n_rollout: int) -> PoolRules:
        """Return the rules of the pool for ``n_rollout`` rollouts per task.

        Raises:
            ConfigurationError: ``n_rollout`` is no number above 0, or k is not below it.
        """
        whole("n_rollout", n_rollout, 1)
        _raise_if(history_problems(self.offpolicy_trajectories_per_task, n_rollout))
        shared = {field.name for field in dataclasses.fields(PoolRules)} - {"n_rollout"}
        return PoolRules(n_rollout=n_rollout, **{name: getattr(self, name) for name in shared})

    def open_store(self) -> BufferStore | None:
        """Open the pool's store, to be closed by the caller; ``None`` if the pool is in memory."""
        return None if self.store is None else BufferStore.open(**self.store)

    def ratio(self) -> float | RatioSchedule:
        """Return ``exp_ratio`` as the mixing takes it."""
        return RatioSchedule(self.exp_ratio) if isinstance(self.exp_ratio, tuple) else self.exp_ratio


def _raise_if(problems: Sequence[str]) -> None:
    if problems:
        raise ConfigurationError(f"{SECTION}: " + "; ".join(problems))


def _plain(value: Any) -> Any:
    """Return dicts and lists for whatever behaves like one."""
    if isinstance(value, str | bytes):
        return value
    if isinstance(value, Mapping) or hasattr(value, "keys"):
        return {str(key): _plain(value[key]) for key in value.keys()}  # noqa: SIM118 - may be no dict
    return [_plain(item) for item in value] if isinstance(value, Sequence) else value


def _normal(key: str, value: Any) -> Any:
    """Return a value as the dataclass has it: points as tuples, ``none`` as None."""
    if key == "exp_ratio" and isinstance(value, list):
        return tuple(tuple(point) if isinstance(point, list) else point for point in value)
    return None if key == "off_policy_shaping" and value == "none" else value


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _problems(values: Mapping[str, Any], n_rollout: int | None = None) -> list[str]:
    """Return what is wrong with the values of all keys, one sentence each; k is checked if ``n_rollout`` is known."""
    problems = [f"{key}: {values[key]!r}, must be true or false" for key in _FLAGS if not isinstance(values[key], bool)]
    problems += start_problems(values["replay_start_ratio"]) + ratio_problems(values["exp_ratio"])
    problems += history_problems(values["offpolicy_trajectories_per_task"], n_rollout)
    clip = values["off_cliprange_high"]
    if not _number(clip) or clip < 0:
        problems.append(f"off_cliprange_high: {clip!r}, must be a number of at least 0")
    if values["group_offpolicy"] not in GROUPS:
        problems.append(f"group_offpolicy: {values['group_offpolicy']!r}, must be one of {', '.join(GROUPS)}")
    shaping = values["off_policy_shaping"]
    if shaping is not None and (not _number(shaping) or shaping <= 0):
        problems.append(f"off_policy_shaping: {shaping!r}, must be a number above 0, or none")
    if values["regularize_replayed"] not in REGULARIZERS:
        problems.append(
            f"regularize_replayed: {values['regularize_replayed']!r}, must be one of {', '.join(REGULARIZERS)}"
        )
    problems += _without_effect(values)
    pool_path, freq = values["pool_path"], values["pool_save_freq"]
    if pool_path is not None and (not isinstance(pool_path, str) or not pool_path):
        problems.append(f"pool_path: {pool_path!r}, must be a folder or null")
    if freq is not None and (isinstance(freq, bool) or not isinstance(freq, int) or freq < 1):
        problems.append(f"pool_save_freq: {freq!r}, must be a whole number of at least 1, or null")
    elif freq is not None and pool_path is None:
        problems.append(f"pool_save_freq: {freq}, has no effect without pool_path")
    fingerprint = values["reward_fingerprint"]
    if fingerprint is not None and (not isinstance(fingerprint, str) or not fingerprint):
        problems.append(f"reward_fingerprint: {fingerprint!r}, must be a name or null")
    problems += _store_problems(values["store"])
    return problems + rule_problems(values)


def _without_effect(values: Mapping[str, Any]) -> list[str]:
    """Return which options have no effect beside the others, one sentence each."""
    problems = []
    if values["clip_off_policy"] is False and values["off_cliprange_high"] != _DEFAULT_OFF_CLIPRANGE:
        problems.append(
            f"off_cliprange_high: {values['off_cliprange_high']!r}, has no effect with clip_off_policy: false"
        )
    return problems


def _store_problems(store: Any) -> list[str]:
    if store is None:
        return []
    if not isinstance(store, Mapping):
        return [f"store: {store!r}, must be a mapping with a path, or null for memory"]
    problems = [
        f"store.{key}: unknown key; known are {', '.join(_STORE_KEYS)}" for key in store if key not in _STORE_KEYS
    ]
    if not isinstance(store.get("path"), str | Path) or not str(store["path"]):
        problems.append(f"store.path: {store.get('path')!r}, must be a directory or URL")
    if not isinstance(store.get("format", ""), str):
        problems.append(f"store.format: {store['format']!r}, must be the name of a format")
    capacity = store.get("capacity")
    if capacity is not None and (
        isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < LEAST_CAPACITY
    ):
        problems.append(f"store.capacity: {capacity!r}, must be a whole number of at least {LEAST_CAPACITY} or null")
    return problems
