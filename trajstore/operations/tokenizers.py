"""Loading tokenizers of Hugging Face from disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trajstore.errors import ConfigurationError, MissingDependencyError


def tokenizer_at(path: str | Path) -> Any:
    """Return the tokenizer in a folder, or of a name in the cache of a model hub. Nothing is fetched.

    Raises:
        ConfigurationError: it cannot be loaded.
        MissingDependencyError: transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingDependencyError("transformers", "demo") from error
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # transformers raises nearly anything for what holds none
        if not Path(path).is_dir():
            raise ConfigurationError(
                f"tokenizer: {path}: no such folder, and no name in the cache of the model hub on this machine; give"
                " the folder of the run's model, or fetch it first (`hf download`)"
            ) from error
        said = " ".join(str(error).split()) or type(error).__name__
        raise ConfigurationError(f"tokenizer: {path}: cannot be loaded from this folder: {said[:300]}") from error
