"""Tokenizers of Hugging Face, from a folder, the cache of a model hub, or the hub: in this order, and soon."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from trajstore.errors import ConfigurationError, MissingDependencyError

HUB_TIMEOUT = 5.0
"""Seconds in which the hub must answer whether it has a name, before anything is fetched."""

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""What can be a name in a hub; anything else is a path."""


def tokenizer_at(path: str | Path) -> Any:
    """Return the tokenizer in a folder, or of a name in a model hub.

    Args:
        path: a folder that is there is loaded from this machine alone. Of a name, the cache on this machine is looked
            at first; the hub is asked only if it answers in ``HUB_TIMEOUT`` seconds that it has the name.

    Raises:
        ConfigurationError: it cannot be loaded; says what was tried.
        MissingDependencyError: transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingDependencyError("transformers", "demo") from error

    def load(*, here: bool) -> Any:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=here)

    try:
        return load(here=True)  # of a folder, or of the cache
    except Exception as error:  # transformers raises nearly anything for what holds none
        if Path(path).is_dir():
            raise ConfigurationError(
                f"tokenizer: {path}: cannot be loaded from this folder: {_short(error)}"
            ) from error
    if _NAME.fullmatch(str(path)) is None or str(path) in (".", ".."):
        raise ConfigurationError(f"tokenizer: {path}: no such folder, and no name of a model hub")
    tried = f"tokenizer: {path}: no such folder, not in the cache of the model hub on this machine"
    if reason := _absence(str(path)):
        raise ConfigurationError(f"{tried}, {reason}; give the folder of the run's model")
    try:
        return load(here=False)
    except Exception as error:
        raise ConfigurationError(f"{tried}, and what the hub has cannot be loaded: {_short(error)}") from error


def _absence(name: str) -> str:
    """Return why nothing can be fetched from the hub; empty if it has the name."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return "and the hub is not asked: HF_HUB_OFFLINE is set"
    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT)
    except Exception as error:  # of the network, or of the hub: whatever it is, there is no tokenizer
        return f"and {constants.ENDPOINT} gives none (asked for {HUB_TIMEOUT:g} s at the most): {_short(error)}"
    return ""


def _short(error: Exception) -> str:
    """Return an error's text on one line, cut; its kind if there is none."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]} ..."
