"""Opens the directory at a path or URL."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from trajstore._core.base.extensions import extension
from trajstore._core.files.base import Directory
from trajstore._core.files.held import check_path
from trajstore._core.files.local import LocalDirectory
from trajstore.errors import ConfigurationError


def open_directory(url: str | Path, **options: Any) -> Directory:
    """Return the directory at a local path or an fsspec URL (``memory://``, ``s3://``, ...).

    Args:
        url: path or URL. A scheme of two or more characters followed by ``://`` makes it a URL.
        options: passed on to the fsspec file system (credentials, endpoint, ...).

    Raises:
        ConfigurationError: the path is empty, as an unset variable of a shell is, begins with ``~``, or is no path of
            the system; a URL has ``.``, ``..`` or control characters.
        MissingDependencyError: the file system's package is not installed.
    """
    text = str(url)
    if not text:
        raise ConfigurationError("the path is empty; the current directory is '.'")
    if text.startswith("~"):
        raise ConfigurationError(f"{text}: only a shell expands '~'; pass Path(...).expanduser(), or './{text}'")
    if is_url(text):
        parts = text.partition("://")[2].split("/")
        if wrong := [part for part in parts if part in (".", "..") or not part.isprintable()]:
            raise ConfigurationError(
                f"{text!r}: object stores take {wrong[0]!r} as part of a name, and many refuse it; give the path "
                "without '.', '..' and control characters"
            )
        return cast(Directory, extension("remote directory").RemoteDirectory(text, **options))
    return LocalDirectory(Path(text.removeprefix("file://")))


def check_options(url: str | Path, options: Mapping[str, Any]) -> None:
    """Warn of options for a local path, where they have no effect.

    Args:
        url: path or URL.
        options: for its file system.
    """
    if options and not is_url(url):
        warnings.warn(
            f"storage_options: {', '.join(sorted(map(str, options)))}: no effect on {url}, which is a local path; "
            "options are for URLs, as s3://bucket/run",
            stacklevel=3,
        )


def is_url(url: str | Path) -> bool:
    """Return whether a text is a URL and not a local path."""
    text = str(url)
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", text) is not None and not text.startswith("file://")


def local_target(what: str, target: str | Path) -> Path:
    """Return the local path of files that a command makes.

    Args:
        what: the command, for messages.
        target: path.

    Raises:
        ConfigurationError: it is a URL, or no path of the system; says what to do.
    """
    if is_url(target):
        raise ConfigurationError(
            f"{what}: {target} is a URL; these files are made on a local disk: name a path, then copy them there with "
            "the object store's own tool"
        )
    return check_path(Path(str(target).removeprefix("file://")))


def directories_above(directory: Directory, **options: Any) -> Iterator[Directory]:
    """Yield the directories above one, the nearest first; for a URL, those below its bucket or host.

    Args:
        directory: where to start.
        options: passed on to the fsspec file system.
    """
    if isinstance(directory, LocalDirectory):
        yield from map(LocalDirectory, Path(os.path.realpath(directory.path)).parents)
        return
    scheme, _, path = directory.url.rstrip("/").partition("://")
    parts = path.strip("/").split("/")
    for count in range(len(parts) - 1, 0, -1):
        yield open_directory(f"{scheme}://{'/'.join(parts[:count])}", **options)


def nested(one: Directory, other: Directory) -> bool:
    """Return whether two directories are the same or one is inside the other."""
    mine, its = (url.rstrip("/") if "://" in url else os.path.realpath(url).rstrip("/") for url in (one.url, other.url))
    return f"{mine}/".startswith(f"{its}/") or f"{its}/".startswith(f"{mine}/")
