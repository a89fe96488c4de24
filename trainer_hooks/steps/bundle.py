"""A step as a folder that another machine can recompute without the run; see ``docs/design/ledger.md``."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer_hooks.steps.inputs import StepInputs
from trajstore._core.files.base import EncodedFile
from trajstore._core.files.local import LocalDirectory
from trajstore.errors import ConfigurationError, CorruptStoreError, StoreNotFoundError, UnsupportedVersionError
from trajstore.ledger import TrainedStep

FORMAT_VERSION = 1

_MANIFEST, _SUM, _TENSORS = "manifest.json", "manifest.json.sha256", "tensors.npz"


def write_bundle(inputs: StepInputs, folder: str | Path) -> None:
    """Write a step durably into a new or empty folder.

    Raises:
        ConfigurationError: the folder is not empty.
        OSError: a file could not be written; names it.
    """
    directory = LocalDirectory(Path(folder))
    directory.create()
    if names := directory.names():
        raise ConfigurationError(f"{folder}: is not empty (has {names[0]}); a bundle needs a folder of its own")
    arrays = io.BytesIO()
    np.savez(arrays, allow_pickle=False, **{name: tensor.numpy() for name, tensor in inputs.tensors.items()})
    tensors = arrays.getvalue()
    manifest = _encoded(
        {
            "format": "trajstore-step",
            "version": FORMAT_VERSION,
            "files": {_TENSORS: {"bytes": len(tensors), "sha256": hashlib.sha256(tensors).hexdigest()}},
            "tolerances": dict(inputs.tolerances),
            "rows": [dict(row) for row in inputs.rows],
            "record": inputs.step.to_json(None),
        }
    )
    for name, data in ((_TENSORS, tensors), (_MANIFEST, manifest), (_SUM, _sum_of(manifest))):
        directory.publish([EncodedFile(name, [data])])


def read_bundle(folder: str | Path) -> StepInputs:
    """Read a bundle; every byte of its files is checked. Executes no code of them.

    Raises:
        StoreNotFoundError: the folder has no complete bundle.
        CorruptStoreError: a byte differs from the one written; names the file.
        UnsupportedVersionError: it was written by a later version.
    """
    manifest = _file(folder, _MANIFEST)
    if _file(folder, _SUM) != _sum_of(manifest):
        raise CorruptStoreError(f"{folder}: {_MANIFEST} does not have the checksum in {_SUM}: one of them is damaged")
    try:
        content: dict[str, Any] = json.loads(manifest)
        if content["format"] != "trajstore-step":
            raise ValueError(f"format {content['format']!r}")
        if content["version"] != FORMAT_VERSION:
            raise UnsupportedVersionError(
                f"{folder}: version {content['version']}, this program reads {FORMAT_VERSION}"
            )
        stated = content["files"][_TENSORS]
        data = _file(folder, _TENSORS)
        if len(data) != stated["bytes"] or hashlib.sha256(data).hexdigest() != stated["sha256"]:
            raise CorruptStoreError(f"{folder}: {_TENSORS} does not have the checksum in {_MANIFEST}: it is damaged")
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        step = TrainedStep.from_json(content["record"], f"{folder}/{_MANIFEST}")
        return StepInputs(step, tensors, content["rows"], content["tolerances"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptStoreError(f"{folder}/{_MANIFEST}: not the manifest of a step: {error}") from error


def _file(folder: str | Path, name: str) -> bytes:
    try:
        return (Path(folder) / name).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise StoreNotFoundError(f"{folder}: has no {name}, so it is no complete bundle of replay-step") from None


def _encoded(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()


def _sum_of(manifest: bytes) -> bytes:
    """Return the line of ``sha256sum`` for the manifest."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {_MANIFEST}\n".encode()
