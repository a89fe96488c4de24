"""Validates our options together with verl's, in its command before Ray starts, and sets TransferQueue's backend."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

from omegaconf import open_dict

from trainer_hooks.config import SECTION as REPLAY_SECTION
from trainer_hooks.guidance.config import MAKER
from trainer_hooks.transfer_queue import BACKEND
from trainer_hooks.verl.config import ASYNCHRONOUS, SECTION, ReplayBlock, is_asked_for, naming
from trajstore._core.files.opening import open_directory
from trajstore.errors import ConfigurationError

logger = logging.getLogger(__name__)

REPLAY_MODES = ("sync_replay", ASYNCHRONOUS)
"""Values of ``trainer.v1.trainer_mode`` that read the block ``exp_manager``."""

_CHECKS = "checks_exp_manager"
"""Attribute that marks our ``validate_config``; ``__wrapped__`` would also match other wrappers."""


def install() -> None:
    """Wrap verl's ``validate_config``, which its command calls first, to check our block too."""
    module: Any = importlib.import_module("verl.utils.config")
    verls = module.validate_config
    if getattr(verls, _CHECKS, False):  # ours, or a wrapper of ours: functools.wraps copies the attribute
        return

    @functools.wraps(verls)
    def validate_config(config: Any, *args: Any, **named: Any) -> Any:
        check_options(config)  # first: verl ends with a message that all checks passed
        record_on_arrival(config)
        return verls(config, *args, **named)

    setattr(validate_config, _CHECKS, True)
    module.validate_config = validate_config


def record_on_arrival(config: Any) -> None:
    """Let TransferQueue record rollouts in our modes: set its backend to ours, over the configured one.

    Args:
        config: verl's whole configuration, an OmegaConf node; changed.
    """
    backend = config.transfer_queue.backend
    if not _is_ours(config) or backend.storage_backend == BACKEND:
        return
    with open_dict(backend):
        backend[BACKEND] = {"transport": backend.storage_backend}
        backend.storage_backend = BACKEND


def _is_ours(config: Any) -> bool:
    return config.trainer.v1.trainer_mode in REPLAY_MODES and bool(config.trainer.get("use_v1", True))


def check_options(config: Any) -> None:
    """Check that the options of recording and replay take effect.

    Args:
        config: verl's whole configuration, an OmegaConf node; not changed.

    Raises:
        ConfigurationError: options conflict, or ``enable`` is set for a trainer that ignores it.
    """
    if _is_ours(config):
        for option, path in ReplayBlock.from_config(config).paths.items():
            with naming(option, path):
                open_directory(path)
        return
    block = config.get(SECTION)
    if not block and not is_asked_for(config):
        return
    is_v1 = config.trainer.get("use_v1", True)
    ignored = f"trainer.v1.trainer_mode={config.trainer.v1.trainer_mode}" if is_v1 else "trainer.use_v1=False"
    if is_asked_for(config):
        raise ConfigurationError(
            f"{MAKER}, {SECTION}: options of guidance, but {ignored} guides nothing; set trainer.v1.trainer_mode to one"
            f" of {', '.join(REPLAY_MODES)}, or leave the options out"
        )
    replay = block.get("experience_replay") if hasattr(block, "get") else None
    if replay and replay.get("enable", False):
        raise ConfigurationError(
            f"{REPLAY_SECTION}.enable: true, but {ignored} replays and records nothing; set"
            f" trainer.v1.trainer_mode to one of {', '.join(REPLAY_MODES)}, or enable to false"
        )
    logger.warning(
        "%s has no effect with %s: nothing is recorded. Recording needs trainer.v1.trainer_mode=%s",
        SECTION,
        ignored,
        REPLAY_MODES[0],
    )
