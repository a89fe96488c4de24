"""The block ``exp_manager`` of a verl configuration, checked against verl's other options."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from omegaconf import OmegaConf

from trainer_hooks.config import SECTION as REPLAY_SECTION
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.guidance.config import MAKER, MANAGER, REME, GuidanceConfig
from trainer_hooks.replay import is_success
from trajstore._core.base.arguments import whole
from trajstore._core.base.settings import Count, Positive, Settings, Text, keys_of, refuse, unknown
from trajstore._core.files.opening import is_url
from trajstore._core.formats import get_format
from trajstore.errors import ConfigurationError, InvalidTrajectoryError, StoreWriteError, TrajstoreError, counted
from trajstore.ledger import LEDGER_FOLDER

logger = logging.getLogger(__name__)

SECTION = "exp_manager"
"""Key of the block in verl's configuration."""

FOLDER = "trajstore"
"""Default folder, below ``trainer.default_local_dir``, of stores without a path."""

ASYNCHRONOUS = "colocate_async_replay"
"""Value of ``trainer.v1.trainer_mode`` with which histories are drawn before the step that trains on them."""

OnError = Literal["raise", "warn"]

_BELOW_ONE = 1.0 - 2.0**-23
"""Largest outcome of a failure: below 1 also in float32, in which the pool compares."""


def _format(_name: str, value: Any) -> str:
    get_format(value)
    return str(value)


@dataclass(frozen=True, kw_only=True)
class RecordingConfig(Settings):
    """``exp_manager.recording``: storage of every sampled rollout. The pool chooses among them.

    Attributes:
        path: directory or URL; ``None`` = ``<trainer.default_local_dir>/trajstore/rollouts``.
        format: format of new shards.
        capacity: number of trajectories to keep, deleting the oldest; ``None`` = all. Those that the pool, or that of a
            checkpoint, may replay stay beyond it.
        text: also record the response's turns as text, in ``messages``. Tokens are always recorded.
        on_error: reaction to a failed write, here and in the pool. With ``warn`` training continues, metrics count lost
            rollouts, and pending writes are retried.
        reuse: after a crash, the interrupted step takes its finished rollouts from the store, and generates only the
            others (synchronous mode, without guidance).

    Raises:
        ConfigurationError: a value is out of range; the message names the key.
    """

    section: ClassVar[str] = f"{SECTION}.recording"

    path: Text | None = None
    format: Annotated[str, _format] = "pt"
    capacity: Count | None = None
    text: bool = True
    on_error: OnError = "raise"
    reuse: bool = True


@dataclass(frozen=True, kw_only=True)
class OutcomeRule(Settings):
    """``exp_manager.outcome``: derives a rollout's outcome from verl's rewards.

    Attributes:
        key: key in the reward function's result (for example ``acc``); ``None`` = the score.
        success: smallest value of a success, whose outcome is 1. Below it the outcome is value / success. A float32
            score is compared in float32: ``0.7`` of a reward function reaches ``success: 0.7``.

    Raises:
        ConfigurationError: a value is out of range; the message names the key.
    """

    section: ClassVar[str] = f"{SECTION}.outcome"

    key: Text | None = None
    success: Positive = 1.0

    def of(self, score: float, reward_extra: Mapping[str, Any]) -> float:
        """Return the outcome of a rollout: 1 for a success, below 1 otherwise; non-finite values are kept.

        Raises:
            InvalidTrajectoryError: the reward function's result has no number under ``key``.
        """
        value: Any = score
        if self.key is not None:
            value = reward_extra.get(self.key)
            if isinstance(value, bool):
                value = float(value)
            if not isinstance(value, int | float):
                known = ", ".join(sorted(reward_extra)) or "none"
                raise InvalidTrajectoryError(
                    f"{SECTION}.outcome.key: the reward function gave no number {self.key!r}; it gave: {known}"
                )
        if not math.isfinite(value):
            return float(value)
        return 1.0 if is_success(value, self.success) else min(value / self.success, _BELOW_ONE)


@dataclass(frozen=True, kw_only=True)
class ReplayBlock:
    """The whole block, checked against verl's other options."""

    experience_replay: ExperienceReplayConfig
    recording: RecordingConfig
    outcome: OutcomeRule
    folder: Path
    """``<trainer.default_local_dir>/trajstore``."""
    n_rollout: int
    max_prompt_length: int | None = None
    """``data.max_prompt_length``, in tokens; ``None`` = any."""
    max_response_length: int | None = None
    """``data.max_response_length``, in tokens; ``None`` = any."""
    n_validation: int = 1
    """Rollouts of a task in validation."""
    agent_loop: str = "single_turn_agent"
    """Default agent loop, for data set rows that name none."""
    draws_ahead: int = 0
    """Maximum number of steps between drawing histories and training on them: ``num_warmup_batches`` of the
    asynchronous mode, in whole batches."""
    contents: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Digests of the files that rollouts depend on, by option."""
    sampling: str = ""
    """Digest of what rollouts depend on: model, template, sampling, lengths, files of loop, tools and reward."""
    guidance: GuidanceConfig = dataclasses.field(default_factory=GuidanceConfig)
    """Guidance: ``experience_maker`` or ``exp_manager.reme``, and keys of ``exp_manager``."""

    @property
    def masks_rows(self) -> bool:
        """True if rows may need their own loss: each row then has ``exp_mask``, and the loss is ``het``."""
        return self.experience_replay.enable or self.discards_experience

    @property
    def discards_experience(self) -> bool:
        """True if rows may be trained on without the experience that they were sampled with."""
        return guides_training(self.guidance) and self.guidance.train_sample_expmode != "allkeep"

    @property
    def recording_path(self) -> str:
        """Path or URL of the recorded rollouts."""
        return self.recording.path or str(self.folder / "rollouts")

    @property
    def paths(self) -> dict[str, str]:
        """Paths and URLs of everything that is written, by option."""
        given = {
            f"{SECTION}.recording.path": self.recording_path,
            f"{SECTION}.recording.path (its ledger)": self.ledger_folder,
            "trainer.default_local_dir": self.folder.parent,
            f"{MAKER}.store.path": (self.guidance.store or {}).get("path") if self.guidance.is_on else None,
        }
        return {name: str(path) for name, path in given.items() if path is not None}

    @property
    def ledger_folder(self) -> Path:
        """Folder of the training ledger: in the rollouts' store, where queries look; else in the run's folder."""
        return (self.folder if is_url(self.recording_path) else Path(self.recording_path)) / LEDGER_FOLDER

    @staticmethod
    def from_config(config: Any) -> ReplayBlock:
        """Return the block of verl's configuration.

        Args:
            config: the whole configuration, an OmegaConf node; not changed.

        Raises:
            ConfigurationError: unknown keys, values out of range, or conflicts with verl's other options.
        """
        block = keys_of(config.get(SECTION), SECTION)
        refuse(SECTION, unknown(block, ["experience_replay", "recording", "outcome", *KEYS]))
        root = config.trainer.default_local_dir
        if not root or is_url(root):
            raise ConfigurationError(f"trainer.default_local_dir: {root}, must be a local folder, as verl writes there")
        folder = Path(str(root)).absolute() / FOLDER
        replay = keys_of(block.get("experience_replay"), REPLAY_SECTION)
        if "success_threshold" in replay:
            raise ConfigurationError(
                f"{REPLAY_SECTION}.success_threshold: an outcome is 1 from {SECTION}.outcome.success on; set that"
            )
        rollout = config.actor_rollout_ref.rollout
        n_rollout = whole("actor_rollout_ref.rollout.n", rollout.n, 1)
        result = ReplayBlock(
            experience_replay=ExperienceReplayConfig.from_mapping(
                replay, n_rollout=n_rollout if replay.get("enable") else None
            ),
            recording=RecordingConfig.from_node(block.get("recording")),
            outcome=OutcomeRule.from_node(block.get("outcome")),
            folder=folder,
            n_rollout=n_rollout,
            max_prompt_length=int(config.data.max_prompt_length),
            max_response_length=int(config.data.max_response_length),
            n_validation=int(rollout.val_kwargs.n),
            agent_loop=str(rollout.agent.default_agent_loop),
            draws_ahead=_draws_ahead(config),
            contents=contents_of(config),
            sampling=_sampling_digest(config),
            guidance=guidance_of(config, folder),
        )
        problems = _contradictions(config, result)
        refuse("", [*problems, *guidance_problems(config, result.guidance, n_rollout, text=result.recording.text)])
        return result


_SAMPLED_BY = (
    *(f"actor_rollout_ref.model.{name}" for name in ("path", "tokenizer_path", "custom_chat_template")),
    *(
        f"actor_rollout_ref.rollout.{name}"
        for name in ("temperature", "top_p", "top_k", "calculate_log_probs", "prompt_length", "response_length")
    ),
    "actor_rollout_ref.rollout.multi_turn",
    "actor_rollout_ref.rollout.agent.default_agent_loop",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path",
    "data.apply_chat_template_kwargs",
    "data.tool_config_path",
    "reward.custom_reward_function",
    "reward.reward_manager",
)
"""Options that rollouts depend on."""

_SAMPLED_BY_FILES = (
    "actor_rollout_ref.rollout.agent.agent_loop_config_path",
    "actor_rollout_ref.rollout.multi_turn.interaction_config_path",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path",
    "data.tool_config_path",
    "reward.custom_reward_function.path",
)
"""Options that name files whose contents count too."""


def contents_of(config: Any) -> dict[str, str]:
    """Return the digest of each file that rollouts depend on, by option; without those that are not there."""
    files = {name: Path(str(OmegaConf.select(config, name))) for name in _SAMPLED_BY_FILES}
    return {
        name: hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
        for name, file in files.items()
        if file.is_file()
    }


def _sampling_digest(config: Any) -> str:
    values = {name: str(OmegaConf.select(config, name)) for name in _SAMPLED_BY} | contents_of(config)
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=8).hexdigest()


def _draws_ahead(config: Any) -> int:
    options = config.trainer.v1
    return math.ceil(options.colocate_async.num_warmup_batches) if options.trainer_mode == ASYNCHRONOUS else 0


def _contradictions(config: Any, block: ReplayBlock) -> Iterator[str]:
    """Yield the conflicts between options, one sentence each."""
    replay = block.experience_replay
    if replay.enable and replay.store is not None:
        yield (
            f"{REPLAY_SECTION}.store.path: {replay.store['path']}, would have copies of the rollouts in"
            f" {block.recording_path}, among which the pool chooses; leave out {REPLAY_SECTION}.store"
        )
    estimator = str(config.algorithm.adv_estimator)
    if replay.enable and estimator in ("gae", "remax", "reinforce_plus_plus"):
        yield (
            f"algorithm.adv_estimator: {estimator}, with {REPLAY_SECTION}.enable: true replayed rows are rated within"
            " their group; take grpo or another estimator of groups"
        )
    age, least = replay.max_policy_age, block.draws_ahead + 1
    if replay.enable and age is not None and age < least:
        yield (
            f"{REPLAY_SECTION}.max_policy_age: {age}, must be at least {least} with"
            f" trainer.v1.colocate_async.num_warmup_batches = {least - 1}: histories wait for as many steps"
        )
    if replay.enable and block.draws_ahead and not config.actor_rollout_ref.rollout.calculate_log_probs:
        logger.warning(
            "actor_rollout_ref.rollout.calculate_log_probs: false, so the importance ratios of rollouts that wait for"
            " a step use the actor's log-probs of that step, not those of the policy that sampled; set it to true"
        )
    prompts, ratio = whole("data.train_batch_size", config.data.train_batch_size, 1), replay.exp_ratio
    highest = max(value for _, value in ratio) if isinstance(ratio, tuple) else ratio
    if replay.enable and int(prompts * highest) < 1:
        yield (
            f"{REPLAY_SECTION}.exp_ratio: {highest:g}, of data.train_batch_size = {prompts} is less than one task, so"
            " nothing would be replayed"
        )
    rollouts, capacity = prompts * block.n_rollout * (block.draws_ahead + 1), block.recording.capacity
    if capacity is not None and capacity < rollouts:
        yield (
            f"{SECTION}.recording.capacity: {capacity}, is below the {rollouts} rollouts of"
            f" {counted(block.draws_ahead + 1, 'step')} (data.train_batch_size = {prompts}, rollout.n ="
            f" {block.n_rollout}), which would be deleted before they are trained on"
        )
    yield from _problems_of_paths(block)
    if (replay.enable or block.guidance.enable_context_generator) and (
        config.get("skip", None) and config.skip.rollout_tq.enable
    ):
        yield "skip.rollout_tq.enable: true, but skipped rollouts are shown nothing, and join no history"
    yield from _problems_of_the_loss(config, block)


def _problems_of_paths(block: ReplayBlock) -> Iterator[str]:
    """Yield the paths of which two are one folder, or one is a file, one sentence each."""
    options: dict[str, str] = {}
    for option, path in block.paths.items():
        place = path.rstrip("/") if is_url(path) else os.path.realpath(path.removeprefix("file://"))
        if (other := options.setdefault(place, option)) != option:
            yield f"{option}: {path}, is the folder of {other} too; give each its own"
        if Path(place).is_file():
            yield f"{option}: {path}, is a file, must be a folder"


def _problems_of_the_loss(config: Any, block: ReplayBlock) -> list[str]:
    """Return the options that replace the loss ``het`` or withhold its inputs, one sentence each."""
    actor = config.actor_rollout_ref.actor
    mode = str(actor.policy_loss.get("loss_mode", "vanilla"))
    ours = mode in ("vanilla", "het")
    problems = [
        f"actor_rollout_ref.actor.{name}: {value:g}, must be {'above 1' if name == 'clip_ratio_c' else 'at least 0'}"
        for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high", *(["clip_ratio_c"] if ours else []))
        if (value := actor.get(name)) is not None and not (value > 1 if name == "clip_ratio_c" else value >= 0)
    ]
    if not block.masks_rows:
        return problems + ([f"policy_loss.loss_mode: het, needs {REPLAY_SECTION}.enable=true"] if mode == "het" else [])
    rows = "replayed rows" if block.experience_replay.enable else "rows without their experience"
    correction, distillation = config.algorithm.get("rollout_correction", None), config.get("distillation", None)
    clipping, problems = problems, []
    if not ours:
        problems.append(
            f"policy_loss.loss_mode: {mode}, but {rows} have a loss of their own (het); leave it at vanilla"
        )
    if correction and correction.get("bypass_mode", False):
        problems.append(
            f"algorithm.rollout_correction.bypass_mode: true, but {rows} need log-probs of the actor, which this mode"
            " does not compute"
        )
    if distillation and distillation.get("enabled", False):
        problems.append(f"distillation.enabled: true, its loss takes the place of the one that {rows} need")
    if problems and not block.experience_replay.enable:
        problems.append(f"or set {SECTION}.train_sample_expmode=allkeep, so that no rows are without it")
    return clipping + problems


@contextmanager
def naming(option: str, value: str | None) -> Iterator[None]:
    """Add the option with the store's path to errors of opening the store.

    Raises:
        ConfigurationError: the path cannot be opened or written.
        TrajstoreError: raised inside the block, with a note.
    """
    try:
        yield
    except StoreWriteError as error:
        raise ConfigurationError(f"{option}: {value}: {error}") from error
    except TrajstoreError as error:
        error.add_note(f"{option}: {value}")
        raise
    except Exception as error:  # object store clients raise their own errors, for example without credentials
        raise ConfigurationError(f"{option}: {value}: cannot be opened: {type(error).__name__}: {error}") from error


KEYS = frozenset(field.name for field in dataclasses.fields(GuidanceConfig)) | {REME}
"""Keys of guidance allowed in ``exp_manager``; :class:`GuidanceConfig` rejects those that belong elsewhere."""

SWITCHES = ("enable_context_generator", "enable_summarizer")
"""Keys of ``experience_maker`` that enable guidance."""


def guidance_of(config: Any, folder: Path) -> GuidanceConfig:
    """Return the guidance options of a whole configuration; experiences are stored below ``folder`` by default.

    Raises:
        ConfigurationError: unknown keys, an option given twice, values out of range; the message lists all.
    """
    result = GuidanceConfig.from_config(config)
    if not result.is_on or "store" in _maker(config):
        return result
    # The usual default is in memory, which would not survive a crash.
    return dataclasses.replace(result, store={"path": str(folder / "experiences")})


def is_asked_for(config: Any) -> bool:
    """Return whether a configuration has any guidance options, valid or not, and does not disable guidance."""
    maker = _maker(config)
    switches = [maker[name] for name in SWITCHES if name in maker]
    if switches and not any(switches):
        return False
    return bool(maker) or not KEYS.isdisjoint(keys_of(config.get(MANAGER), MANAGER))


def guides_training(guidance: GuidanceConfig, n_rollout: int | None = None) -> bool:
    """Return whether training rollouts are guided, given ``n_rollout`` per task (None = any number)."""
    return guidance.enable_context_generator and _guides(
        guidance.train_rollout_expmode, guidance.rollout_expratio, n_rollout
    )


def guidance_problems(config: Any, guidance: GuidanceConfig, n_rollout: int, *, text: bool) -> Iterator[str]:
    """Yield guidance options that conflict with others, one sentence each; warn of those without effect.

    AgentEvolver's configurations enable guidance and leave its ratio at 0.

    Args:
        config: verl's whole configuration.
        guidance: its guidance options.
        n_rollout: rollouts of a task in training.
        text: True if rollouts are recorded with their turns as text.
    """
    if not guidance.is_on:
        if is_asked_for(config):
            yield (
                f"{MAKER}: neither enable_context_generator nor enable_summarizer is true, so the options of guidance"
                " have no effect; set one of them, or leave the options out"
            )
        return
    trainer = config.trainer
    if guidance.enable_context_generator:
        yield from _problems_of_showing(config, guidance, n_rollout)
    validates = bool(trainer.get("val_before_train", True)) or float(trainer.get("test_freq", -1)) > 0
    if guidance.enable_summarizer and not text:
        yield f"{MAKER}.enable_summarizer: true, needs {MANAGER}.recording.text=true, of which it is made"
    if guidance.val_summarizer_save and not (guidance.enable_summarizer and validates):
        yield (
            f"{MAKER}.val_summarizer_save: true, needs {MAKER}.enable_summarizer=true and a validation"
            " (trainer.val_before_train or trainer.test_freq)"
        )
    can_fill = guidance.enable_summarizer and trainer.get("val_before_train", True)
    if guidance.init_experience_before_training and not can_fill:
        yield (
            f"{MANAGER}.init_experience_before_training: true, needs {MAKER}.enable_summarizer=true and"
            " trainer.val_before_train=True, whose rollouts become experience"
        )
    fills = guidance.updated_freq or guidance.val_summarizer_save or guidance.init_experience_before_training
    if guidance.enable_summarizer and not fills:
        logger.warning(
            "%s.enable_summarizer: true, but nothing becomes experience: set %s.updated_freq, %s.val_summarizer_save or"
            " %s.init_experience_before_training",
            *(MAKER, MAKER, MAKER, MANAGER),
        )
    model = config.reward.reward_model
    if model.enable and not model.enable_resource_pool and (guidance.val_summarizer_save or not guidance.updated_freq):
        yield (
            "reward.reward_model.enable_resource_pool: false, so rollouts of a validation have no reward yet when they"
            " would become experience"
        )


def _problems_of_showing(config: Any, guidance: GuidanceConfig, n_rollout: int) -> Iterator[str]:
    n_validation = int(config.actor_rollout_ref.rollout.val_kwargs.n)
    validates = _guides(guidance.val_rollout_expmode, guidance.rollout_expratio, n_validation)
    if not guides_training(guidance, n_rollout) and not validates:
        logger.warning(
            "%s.enable_context_generator: true, but no rollout is guided: train_rollout_expmode is %s,"
            " val_rollout_expmode %s, and %s.rollout_expratio %g of the rollouts of a task are none; raise it, or set a"
            " mode to all",
            *(MAKER, guidance.train_rollout_expmode, guidance.val_rollout_expmode, MANAGER, guidance.rollout_expratio),
        )
    if str(config.algorithm.adv_estimator) == "remax":
        yield "algorithm.adv_estimator: remax, but its baseline is a rollout that is shown nothing"


def _maker(config: Any) -> dict[str, Any]:
    """Return the options of the experience maker, from either of its places."""
    manager = keys_of(config.get(MANAGER), MANAGER)
    return keys_of(config.get(MAKER), MAKER) | keys_of(manager.get(REME), f"{MANAGER}.{REME}")


def _guides(mode: str, ratio: float, count: int | None) -> bool:
    return mode == "all" or (mode == "mixed" and (ratio > 0 if count is None else round(count * ratio) > 0))
