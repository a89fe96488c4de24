"""The state of recording and pool at each checkpoint: ``global_step_N/trajstore.json`` next to verl's files.

The file is written before the checkpoint's other files, so every checkpoint that verl calls complete has one.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import orjson

from trajstore._core.files.base import EncodedFile
from trajstore._core.files.local import LocalDirectory
from trajstore.errors import ConfigurationError, CorruptStoreError, StoreWriteError

logger = logging.getLogger(__name__)

CUT_FILE = "trajstore.json"
MODEL_FOLDER = "actor"
"""Folder in a checkpoint in which verl saves the policy."""

TRACKER_FILE = "latest_checkpointed_iteration.txt"
"""verl's file that names the newest checkpoint."""

DATA_FILE = "data.pt"
"""The data loader's state, which verl writes after the models."""

_VERSION = 1
_FOLDER = re.compile(r"global_step_(\d+)")


@dataclass(frozen=True, slots=True)
class Cut:
    """State of recording and replay after a training step."""

    step: int
    run: str
    """Id of the process that wrote it."""
    pool: Mapping[str, Any] | None
    """State of the experience pool; ``None`` if nothing was replayed."""
    expected: Mapping[str, Sequence[dict[str, Any]]]
    """Pending histories by ``uid`` of prompts with unfinished rollouts, as in asynchronous modes."""
    guidance: dict[str, Any] | None = None
    """State of guidance's random choices; ``None`` without guidance."""
    wanted: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Sessions, including histories, of pending prompts with their own number in the data set, by ``uid``."""
    prompts: int = 0
    """Prompts taken from the training data."""
    resumed: tuple[str, ...] = ()
    """Ids of the processes that resumed from the checkpoint: the first step of each samples with its weights."""


def checkpoint_folder(root: str | Path, step: int) -> Path:
    """Return verl's checkpoint folder below ``trainer.default_local_dir``."""
    return Path(root).absolute() / f"global_step_{step}"


def write_cut(folder: Path, cut: Cut) -> None:
    """Write a cut into a checkpoint's folder, durably and atomically; creates the folder if absent.

    Raises:
        StoreWriteError: the write failed.
    """
    document = {"version": _VERSION} | {field.name: getattr(cut, field.name) for field in dataclasses.fields(cut)}
    try:
        directory = LocalDirectory(folder)
        directory.create()
        directory.publish([EncodedFile(CUT_FILE, [orjson.dumps(document, option=orjson.OPT_NON_STR_KEYS)])])
    except OSError as error:
        raise StoreWriteError(f"{folder / CUT_FILE}: {error}") from error


def read_cut(folder: Path) -> Cut | None:
    """Return the cut in a checkpoint's folder; ``None`` if it has none.

    Raises:
        CorruptStoreError: the file is not a cut, or of a newer version.
    """
    path = folder / CUT_FILE
    try:
        document = orjson.loads(path.read_bytes())
        if document["version"] != _VERSION:
            raise ValueError(f"version {document['version']!r}, this program reads {_VERSION}")
        return msgspec.convert(document, Cut)
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise CorruptStoreError(f"{path}: not the cut of a checkpoint: {error!r}") from error


def cuts_below(root: str | Path) -> Iterator[tuple[Path, Cut]]:
    """Yield the checkpoints below ``trainer.default_local_dir`` that have a cut, oldest step first."""
    base = Path(root)
    folders = [(int(match[1]), path) for path in base.glob("global_step_*") if (match := _FOLDER.fullmatch(path.name))]
    for _, path in sorted(folders):
        cut = read_cut(path)
        if cut is not None:
            yield path, cut


def restorable_cuts(root: str | Path) -> list[Cut]:
    """Return the cuts of the checkpoints that verl can load, which have a model.

    A checkpoint removed by ``max_actor_ckpt_to_keep``, or interrupted by a crash, has only other files.
    """
    return [cut for folder, cut in cuts_below(root) if (folder / MODEL_FOLDER).is_dir()]


def mend_tracker(config: Any) -> None:
    """Write the newest complete checkpoint into verl's tracker file, if a crash left this empty.

    verl writes the file after the checkpoint, without rename and fsync, and ``trainer.resume_mode=auto`` reads it.

    Args:
        config: verl's whole configuration.

    Raises:
        ConfigurationError: the file has something else than a number, or no checkpoint is complete.
    """
    root = Path(str(config.trainer.default_local_dir)).absolute()
    tracker = root / TRACKER_FILE
    if config.trainer.resume_mode != "auto" or not tracker.is_file():
        return
    text = tracker.read_text(encoding="utf-8", errors="replace").replace("\0", "").strip()
    if text.isdecimal():
        return
    with_model = [folder for folder, _ in cuts_below(root) if (folder / MODEL_FOLDER).is_dir()]
    complete = [folder for folder in with_model if (folder / DATA_FILE).is_file()]
    step = complete[-1].name.removeprefix("global_step_") if complete else ""
    if text or not complete:
        remedy = f"write {step} into it, for {complete[-1].name}" if complete else "none is complete: remove it"
        raise ConfigurationError(
            f"trainer.resume_mode=auto: {tracker} must name verl's newest complete checkpoint, and is"
            f" {f'not a number: {text[:20]!r}' if text else 'empty'}; {remedy}"
        )
    LocalDirectory(root).publish([EncodedFile(TRACKER_FILE, [step.encode()])])
    logger.warning("%s was empty, after a crash while verl wrote it; it names %s again", tracker, complete[-1].name)


def find_cut(folder: Path, step: int) -> Cut | None:
    """Return the cut of a checkpoint, else the newest one of its siblings up to ``step``, else ``None``."""
    cut = read_cut(folder)
    if cut is not None:
        return cut
    older = [other for _, other in cuts_below(folder.parent) if other.step <= step]
    return max(older, key=lambda other: other.step, default=None)
