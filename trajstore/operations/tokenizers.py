"""Load Hugging Face tokenizers from disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trajstore.errors import ConfigurationError, MissingDependencyError


def tokenizer_at(path: str | Path) -> Any:
    """Return the tokenizer in a folder, or with a name in the local cache of a model hub. Nothing is fetched.

    Raises:
        ConfigurationError: the tokenizer cannot be loaded.
        MissingDependencyError: transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingDependencyError("transformers", "demo") from error
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # transformers raises various types if there is no tokenizer
        if not Path(path).is_dir():
            raise ConfigurationError(
                f"tokenizer: {path}: no such folder, and no name in the cache of the model hub on this machine; give"
                " the folder of the run's model, or fetch it first (`hf download`)"
            ) from error
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigurationError(f"tokenizer: {path}: cannot be loaded from this folder: {reason[:300]}") from error
