"""Configuration of guided rollouts: ``experience_maker`` (or ``exp_manager.reme``) and ``exp_manager``.

AgentEvolver's documents have the first section in either place; giving an option in both is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, get_args

from msgspec import Meta

from trainer_hooks.guidance.client import Dialect
from trainer_hooks.guidance.context import EXPERIENCE_TEMPLATE, ExperienceTemplate
from trainer_hooks.guidance.manager import AllocationRules
from trainer_hooks.replay import BufferStore
from trainer_hooks.replay.store import store_options
from trajstore._core.base.arguments import one_of
from trajstore._core.base.settings import Count, Text, Whole, keys_of, names_of, refuse, settle
from trajstore.errors import ConfigurationError

MAKER = "experience_maker"
MANAGER = "exp_manager"
REME = "reme"

OF_REPLAY = ("experience_replay", "recording", "outcome")
"""Keys of ``exp_manager`` that other modules read."""

_Timeout = Annotated[float, Meta(ge=1e-3, le=86400)]


def _dialect(name: str, value: Any) -> str:
    # YAML reads an unquoted 0.2 as a number.
    return one_of(name, str(value) if isinstance(value, float) else value, get_args(Dialect))


def _template(name: str, value: Any) -> str:
    ExperienceTemplate.of(value, name)
    return str(value)


@dataclass(frozen=True, kw_only=True)
class GuidanceConfig(AllocationRules):
    """The keys of ``experience_maker`` and ``exp_manager``. By default nothing is guided.

    :class:`~trainer_hooks.guidance.AllocationRules` has the keys for which rollouts are guided and which experience is
    kept.

    Attributes:
        base_url: of a ReMe service; ``None`` = the embedded maker, which needs no service.
        dialect: of the service: ``0.2`` (reme-ai up to 0.3.1), ``0.4``, or detected by a probe.
        workspace_id: workspace of the experiences in a ReMe service.
        enable_summarizer: whether experiences are made of rollouts.
        enable_context_generator: whether experience is put into prompts.
        retrieve_top_k: maximum number of experiences in a prompt.
        updated_freq: steps between updates of the pool; 0 = none.
        val_summarizer_save: whether experiences are made of validation rollouts too.
        summary_batch_size: rollouts in a call of the maker; those of a task stay together.
        summary_workers: concurrent calls of the maker; ``None`` = 8 for a service, and 1 for the embedded maker, so
            that experiences arrive in the order of the rollouts and runs are reproducible.
        retrieve_timeout: time limit in seconds for retrieving experience from the maker.
        summary_timeout: time limit in seconds for a call of the maker that makes experience.
        store: ``path``, and optionally ``format`` and ``capacity``, of the store of experiences; ``None`` = in memory.
        experience_template: the text in a prompt, with ``{}`` for the experiences.
        init_experience_before_training: whether the pool is filled before the first step.
        seed: of the generator that chooses guided rollouts and tasks.

    Raises:
        ConfigurationError: values out of range; the message lists all of them, each by its key.
    """

    base_url: Annotated[str, Meta(pattern="^https?://")] | None = None
    dialect: Annotated[Dialect, _dialect] = "auto"
    workspace_id: Text = "default"
    enable_summarizer: bool = False
    enable_context_generator: bool = False
    retrieve_top_k: Count = 3
    updated_freq: Whole = 0
    val_summarizer_save: bool = False
    summary_batch_size: Count = 8
    summary_workers: Annotated[int, Meta(ge=1, le=256)] | None = None
    retrieve_timeout: _Timeout = 10.0
    summary_timeout: _Timeout = 120.0
    store: Annotated[Mapping[str, Any] | None, store_options] = None
    experience_template: Annotated[str, _template] = EXPERIENCE_TEMPLATE
    init_experience_before_training: bool = False
    seed: Whole = 1234

    def contradictions(self) -> Iterator[str]:
        if self.updated_freq and not self.enable_summarizer:
            yield f"updated_freq: {self.updated_freq}, must be 0 without enable_summarizer: nothing is summarized"

    @property
    def is_on(self) -> bool:
        """True if anything is guided or summarized."""
        return self.enable_context_generator or self.enable_summarizer

    @property
    def workers(self) -> int:
        """Number of concurrent summarizing calls of the maker."""
        if self.summary_workers is None:
            return 1 if self.base_url is None else 8
        return self.summary_workers

    @staticmethod
    def from_config(config: Any) -> GuidanceConfig:
        """Return this part of a whole configuration: a dict, or anything with ``keys()`` such as OmegaConf's.

        ``experience_maker`` and ``exp_manager.reme`` are one section in two places. Keys of ``exp_manager`` that
        belong to replay are ignored.

        Raises:
            ConfigurationError: unknown keys, one option given twice, values out of range; the message lists all.
        """
        if not hasattr(config, "keys"):
            raise ConfigurationError(f"config: must be a mapping of keys, is a {type(config).__name__}")
        manager = keys_of(config.get(MANAGER), MANAGER)
        given: dict[str, Any] = {}
        sources: dict[str, str] = {}
        problems: list[str] = []
        sections = [
            (MAKER, keys_of(config.get(MAKER), MAKER), _MAKER_KEYS),
            (f"{MANAGER}.{REME}", keys_of(manager.get(REME), f"{MANAGER}.{REME}"), _MAKER_KEYS),
            (MANAGER, {key: manager[key] for key in manager if key not in (*OF_REPLAY, REME)}, _OF_MANAGER),
        ]
        for where, values, known in sections:
            for key, value in values.items():
                if key not in known:
                    problems.append(f"{where}.{key}: unknown key; known are {', '.join(known)}")
                elif key in sources:
                    problems.append(f"{where}.{key}: is the same option as {sources[key]}; give one of them")
                else:
                    sources[key] = f"{where}.{key}"
                    given[key] = value
        refuse("", problems + settle(GuidanceConfig, given, sources))
        return GuidanceConfig(**given)

    def rules(self) -> AllocationRules:
        """Return the allocation rules; nothing is guided without ``enable_context_generator``."""
        if self.enable_context_generator:
            return self
        return replace(self, train_rollout_expmode="woexp", val_rollout_expmode="woexp")

    def open_store(self) -> BufferStore | None:
        """Open the store of experiences, to be closed by the caller; ``None`` if it is in memory."""
        return None if self.store is None else BufferStore.open(**self.store)


_OF_MANAGER = (*names_of(AllocationRules), *("experience_template", "init_experience_before_training", "seed"))
_MAKER_KEYS = [name for name in names_of(GuidanceConfig) if name not in _OF_MANAGER]
