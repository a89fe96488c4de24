"""Checkpoints of a reference run: one file per step, written atomically, with the state of the pool."""

from __future__ import annotations

import re
from pathlib import Path

from examples.common import read_checkpoint, write_checkpoint
from examples.grpo.trainer import ReferenceTrainer

_NAME = re.compile(r"step_(\d{8})\.pt")


def save_checkpoint(trainer: ReferenceTrainer, folder: str | Path) -> Path:
    """Write the trainer's state durably and return the file. The pool in the store is flushed first.

    Raises:
        StoreWriteError: the pool's store could not write.
        OSError: the file could not be written; names it.
    """
    path = Path(folder) / f"step_{trainer.step:08d}.pt"
    write_checkpoint(path, trainer.state_dict())
    return path


def newest_checkpoint(folder: str | Path) -> Path | None:
    """Return the checkpoint of the latest step, ``None`` if there is none."""
    folder = Path(folder)
    names = [path.name for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return folder / max(names) if names else None


def load_checkpoint(trainer: ReferenceTrainer, path: str | Path) -> None:
    """Load a checkpoint into a trainer of the same configuration. Executes no code of the file.

    Raises:
        StoreNotFoundError: no such file.
        CorruptStoreError: the file is damaged, or not a checkpoint.
        ConfigurationError: the checkpoint is of another environment or model size.
    """
    trainer.load_state_dict(read_checkpoint(Path(path), "resume from an earlier step"))
