"""Settings of the demo's tasks, files that are replaced atomically, and checkpoints."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from trajstore.errors import CorruptStoreError, StoreNotFoundError


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """Settings of all tasks.

    Attributes:
        path: directory of the run, for the store and the learner's checkpoint.
        updates: gradient steps after which training ends; None = the task's own number.
        seconds: time after which training ends; None = no limit.
        seed: of all random choices.
        sampler: a name of ``cartpole.run.SAMPLERS``; None = uniform. For tasks that sample transitions.
    """

    path: Path
    updates: int | None = None
    seconds: float | None = None
    seed: int = 0
    sampler: str | None = None


class Progress(Protocol):
    """Receives the progress of training, and may show it."""

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Show that ``done`` of ``total`` gradient steps are finished."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread: more are slower for such small networks, and results depend on the number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def write_file(path: Path, data: bytes) -> None:
    """Write a file durably, whole or not at all; make its folder if absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write a dict of tensors and plain values as :func:`write_file` does."""
    file = io.BytesIO()
    torch.save(dict(state), file)
    write_file(path, file.getvalue())


def read_checkpoint(path: Path, remedy: str) -> dict[str, Any]:
    """Read what :func:`write_checkpoint` wrote, onto the CPU, without running code from the file.

    Raises:
        StoreNotFoundError: there is no such file.
        CorruptStoreError: it is damaged, or not a checkpoint.
    """
    damaged = f"{path}: damaged, or not a checkpoint; {remedy}"
    try:
        state = torch.load(io.BytesIO(path.read_bytes()), map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise StoreNotFoundError(f"{path}: no checkpoint here") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        raise CorruptStoreError(damaged) from error
    if not isinstance(state, dict):
        raise CorruptStoreError(damaged)
    return state
