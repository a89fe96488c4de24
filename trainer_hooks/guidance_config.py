"""Configuration of guided rollouts: ``experience_maker`` (or ``exp_manager.reme``) and ``exp_manager``.

The names of AgentEvolver's source document and those that its code uses today are both understood; giving both for one
option is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trajstore.errors import ConfigurationError
from trajstore.experience import BufferStore
from trajstore.experience.store import LEAST_CAPACITY
from trajstore.guidance.allocation import ROLLOUT_EXP_MODES, SAMPLE_EXP_MODES, RolloutExpMode, SampleExpMode
from trajstore.guidance.client import DIALECTS, Dialect
from trajstore.guidance.context import EXPERIENCE_TEMPLATE, ExperienceTemplate
from trajstore.guidance.manager import AllocationRules
from trajstore.guidance.worth import RetirementRule

MAKER = "experience_maker"
MANAGER = "exp_manager"
REME = "reme"

TODAY = {
    "train_rollout_mode": "train_rollout_expmode",
    "val_rollout_mode": "val_rollout_expmode",
    "rollout_ratio": "rollout_expratio",
    "train_sample_mode": "train_sample_expmode",
    "init_exp_before_training": "init_experience_before_training",
    "init_exp_only": "init_experience_only",
}
"""AgentEvolver's names of today, and the names here."""

OF_REPLAY = ("experience_replay", "recording", "outcome", "on_resume")
"""Keys of ``exp_manager`` that are read elsewhere."""

_MAKER_KEYS = (
    "base_url",
    "dialect",
    "workspace_id",
    "enable_summarizer",
    "enable_context_generator",
    "retrieve_top_k",
    "updated_freq",
    "val_summarizer_save",
    "summary_batch_size",
    "retrieve_timeout",
    "summary_timeout",
    "store",
)
_FLAGS = (
    "enable_summarizer",
    "enable_context_generator",
    "val_summarizer_save",
    "init_experience_before_training",
    "init_experience_only",
)
_WHOLE = {"retrieve_top_k": 1, "updated_freq": 0, "summary_batch_size": 1, "retire_least_count": 1, "seed": 0}
_SECONDS = ("retrieve_timeout", "summary_timeout")
_RATIOS = ("rollout_expratio", "train_sample_keepratio")


@dataclass(frozen=True, kw_only=True)
class GuidanceConfig:
    """The keys of ``experience_maker`` and of ``exp_manager``, and their defaults: nothing is guided.

    Attributes:
        base_url: of a ReMe service; ``None`` = the embedded maker, which needs none.
        dialect: of the service: ``0.2`` (reme-ai up to 0.3.1), ``0.4``, or found out by a probe.
        workspace_id: under which name a ReMe service keeps the experiences.
        enable_summarizer: whether rollouts become experience.
        enable_context_generator: whether experience is put into prompts.
        retrieve_top_k: experiences that go into a prompt, at the most.
        updated_freq: steps from one update of the pool to the next; 0 = none.
        val_summarizer_save: whether validation rollouts become experience too.
        summary_batch_size: rollouts in a call of the maker; those of a task stay together.
        retrieve_timeout: seconds that asking the maker for experience may take.
        summary_timeout: seconds that a call of the maker that makes experience may take.
        store: ``path``, and optionally ``format`` and ``capacity``, of the store of experiences and of what they were
            worth; ``None`` = in memory.
        val_rollout_expmode: which rollouts of a validation are guided, by the names of ``train_rollout_expmode``.
        train_rollout_expmode: which rollouts are guided: ``all``, none (``woexp``), or a share of each task's
            (``mixed``).
        rollout_expratio: share of a task's rollouts that are guided, with ``mixed``.
        train_sample_expmode: whether guided rollouts are trained on with the experience in their prompt: no
            (``alldiscard``), yes (``allkeep``), or those of a share of the tasks (``hybrid``).
        train_sample_keepratio: share of the tasks that keep experience in training, with ``hybrid``.
        experience_template: the text in a prompt, with ``{}`` for the experiences.
        init_experience_before_training: whether the pool is filled before the first step.
        init_experience_only: whether the run ends once the pool is filled.
        retire_below: gain below which an experience is retired; ``None`` = never.
        retire_least_count: rollouts with it, and without it, that must say so.
        seed: of the generator that draws which rollouts and tasks are guided.

    Raises:
        ConfigurationError: values out of range; the message lists all of them, each by its key.
    """

    base_url: str | None = None
    dialect: Dialect = "auto"
    workspace_id: str = "default"
    enable_summarizer: bool = False
    enable_context_generator: bool = False
    retrieve_top_k: int = 3
    updated_freq: int = 0
    val_summarizer_save: bool = False
    summary_batch_size: int = 8
    retrieve_timeout: float = 10.0
    summary_timeout: float = 120.0
    store: Mapping[str, Any] | None = None
    val_rollout_expmode: RolloutExpMode = "woexp"
    train_rollout_expmode: RolloutExpMode = "mixed"
    rollout_expratio: float = 0.0
    train_sample_expmode: SampleExpMode = "alldiscard"
    train_sample_keepratio: float = 1.0
    experience_template: str = EXPERIENCE_TEMPLATE
    init_experience_before_training: bool = False
    init_experience_only: bool = False
    retire_below: float | None = None
    retire_least_count: int = 16
    seed: int = 1234

    def __post_init__(self) -> None:
        problems = _problems(vars(self))
        if problems:
            raise ConfigurationError("; ".join(problems))

    @property
    def is_on(self) -> bool:
        """Whether anything is guided or summarized."""
        return self.enable_context_generator or self.enable_summarizer

    @staticmethod
    def from_config(config: Any) -> GuidanceConfig:
        """Return the configuration in a whole configuration: a dict, or anything with ``keys()`` such as OmegaConf's.

        ``experience_maker`` and ``exp_manager.reme`` are one section under two names. Keys of ``exp_manager`` that
        belong to replay are left alone.

        Raises:
            ConfigurationError: unknown keys, one option given twice, values out of range; the message lists all.
        """
        if not hasattr(config, "keys"):
            raise ConfigurationError(f"config: must be a mapping of keys, is a {type(config).__name__}")
        manager = _section(config, MANAGER)
        given: dict[str, Any] = {}
        said: dict[str, str] = {}
        problems: list[str] = []
        sections = [
            (MAKER, _section(config, MAKER), _MAKER_KEYS),
            (f"{MANAGER}.{REME}", _section(manager, REME), _MAKER_KEYS),
            (MANAGER, {key: manager[key] for key in manager if key not in (*OF_REPLAY, REME)}, _MANAGER_KEYS),
        ]
        for where, values, known in sections:
            for key, value in values.items():
                name = TODAY.get(key, key) if where == MANAGER else key
                if name not in known:
                    names = ", ".join([*known, *(TODAY if where == MANAGER else ())])
                    problems.append(f"{where}.{key}: unknown key; known are {names}")
                elif name in said:
                    problems.append(f"{where}.{key}: is the same option as {said[name]}; give one of them")
                else:
                    said[name] = f"{where}.{key}"
                    given[name] = value
        problems += _problems({**_DEFAULTS, **given}, said)
        if problems:
            raise ConfigurationError("; ".join(problems))
        return GuidanceConfig(**given)

    def rules(self) -> AllocationRules:
        """Return what is guided and what is kept; nothing is guided without ``enable_context_generator``."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(AllocationRules)}
        if not self.enable_context_generator:
            values |= {"train_rollout_expmode": "woexp", "val_rollout_expmode": "woexp"}
        return AllocationRules(**values)

    def retirement(self) -> RetirementRule | None:
        """Return when experiences are retired; ``None`` = never."""
        if self.retire_below is None:
            return None
        return RetirementRule(below=self.retire_below, least_count=self.retire_least_count)

    def open_store(self) -> BufferStore | None:
        """Open the store of experiences, to be closed by the caller; ``None`` if it is in memory."""
        return None if self.store is None else BufferStore.open(**self.store)


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(GuidanceConfig)}
_MANAGER_KEYS = tuple(name for name in _DEFAULTS if name not in _MAKER_KEYS)


def _section(node: Any, name: str) -> dict[str, Any]:
    """Return a section as a dict; empty if it is absent."""
    value = node.get(name) if hasattr(node, "get") else None
    if value is None:
        return {}
    if not hasattr(value, "keys"):
        raise ConfigurationError(f"{name}: must be a mapping of keys, is a {type(value).__name__}")
    return {str(key): _plain(value[key]) for key in value.keys()}  # noqa: SIM118 - may be no dict


def _plain(value: Any) -> Any:
    if hasattr(value, "keys"):
        return {str(key): _plain(value[key]) for key in value.keys()}  # noqa: SIM118 - may be no dict
    return value


def _number(value: Any, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _problems(values: Mapping[str, Any], said: Mapping[str, str] | None = None) -> list[str]:
    """Return what is wrong with the values of all keys, one sentence each, under the names by which they were given."""
    problems: list[str] = []

    def refuse(key: str, what: str) -> None:
        problems.append(f"{(said or {}).get(key, key)}: {values[key]!r}, must be {what}")

    def choice(key: str, allowed: Sequence[str]) -> None:
        if values[key] not in allowed:
            refuse(key, f"one of {', '.join(allowed)}")

    for key in _FLAGS:
        if not isinstance(values[key], bool):
            refuse(key, "true or false")
    for key, least in _WHOLE.items():
        if isinstance(values[key], bool) or not isinstance(values[key], int) or values[key] < least:
            refuse(key, f"a whole number of at least {least}")
    for key in _RATIOS:
        if not _number(values[key], 0, 1):
            refuse(key, "a number in [0, 1]")
    for key in _SECONDS:
        if not _number(values[key], 1e-3, 86400):
            refuse(key, "seconds, above 0 and at most 86400")
    if values["retire_below"] is not None and not _number(values["retire_below"], -1e9, 1e9):
        refuse("retire_below", "a number or null")
    choice("train_rollout_expmode", ROLLOUT_EXP_MODES)
    choice("val_rollout_expmode", ROLLOUT_EXP_MODES)
    choice("train_sample_expmode", SAMPLE_EXP_MODES)
    choice("dialect", DIALECTS)
    url = values["base_url"]
    if url is not None and not (isinstance(url, str) and url.startswith(("http://", "https://"))):
        refuse("base_url", "an address that begins with http:// or https://, or null for the embedded maker")
    if not isinstance(values["workspace_id"], str) or not values["workspace_id"]:
        refuse("workspace_id", "a name")
    try:
        ExperienceTemplate.of(values["experience_template"])
    except ConfigurationError:
        refuse("experience_template", "a text with one {} for the experience")
    if values["updated_freq"] and values["enable_summarizer"] is False:
        refuse("updated_freq", "0 without enable_summarizer: nothing is summarized")
    if values["init_experience_only"] is True and values["init_experience_before_training"] is False:
        refuse("init_experience_only", "false without init_experience_before_training")
    return problems + _store_problems(values["store"], (said or {}).get("store", "store"))


def _store_problems(store: Any, name: str) -> list[str]:
    if store is None:
        return []
    if not isinstance(store, Mapping) or not isinstance(store.get("path"), str) or not store["path"]:
        return [f"{name}: {store!r}, must be a mapping with a path, or null for memory"]
    problems = [f"{name}.{key}: unknown key; known are path, format, capacity" for key in store if key not in _STORE]
    capacity = store.get("capacity")
    if capacity is not None and (type(capacity) is not int or capacity < LEAST_CAPACITY):
        problems.append(f"{name}.capacity: {capacity!r}, must be a whole number of at least {LEAST_CAPACITY} or null")
    return problems


_STORE = ("path", "format", "capacity")
