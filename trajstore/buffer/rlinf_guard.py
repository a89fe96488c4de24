"""Refusing to write where RLinf has written, before anything is written there."""

from __future__ import annotations

from trajstore.errors import ConfigurationError, CorruptStoreError
from trajstore.files.base import Directory
from trajstore.reading.places import kind_of
from trajstore.store.sealed import METADATA_NAME, is_of_rlinf, parse_metadata


def check_not_rlinf(directory: Directory) -> None:
    """Refuse to write into a directory of RLinf.

    Raises:
        ConfigurationError: it is one.
        CorruptStoreError: it is a store into which RLinf has written.
    """
    try:
        data = directory.read(METADATA_NAME)
    except OSError:  # absent, or not to be read: said by whoever opens the directory next
        return
    if not is_of_rlinf(data):
        return
    if kind_of(directory) == "rlinf":
        raise ConfigurationError(
            f"auto_save_path {directory.url}: holds a replay buffer of RLinf, which trajstore reads and never "
            "writes to. Give another directory, then load_checkpoint this one: the next save_checkpoint holds both"
        )
    parse_metadata(data, f"{directory.url}/{METADATA_NAME}")
    raise CorruptStoreError(f"{directory.url}: RLinf has written into it")
