"""Serve the page over a handle of stores from the program that holds the handle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trajstore._core.base.arguments import check_instance
from trajstore.errors import MissingDependencyError

if TYPE_CHECKING:
    from trajstore.distributed import DistributedReplayBuffer


@contextmanager
def serving(
    handle: DistributedReplayBuffer, *, host: str = "127.0.0.1", port: int = 8421, tokenizer: str | Path | None = None
) -> Iterator[str]:
    """Serve the page over a handle of stores from a thread until the context ends; yield its address.

    For directories, use ``trajstore view PATH``.

    Args:
        handle: handle of the stores; stays usable, and must stay open until the context ends.
        host: address to listen on. If other machines can reach it, a token is required, which the address includes.
        port: port; 0 = any free one.
        tokenizer: folder or name of the tokenizer that decodes tokens. None: the folder that a rollout names.

    Raises:
        MissingDependencyError: Starlette and uvicorn are not installed (extra ``view``).
        ConfigurationError: the object is not a handle, the address does not exist here, or the port is taken.
        StoreUnreachableError: a store does not answer.
    """
    try:
        from trajstore.view.server import served
        from trajstore.view.shown import OfHandle
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise MissingDependencyError(error.name, "view") from None
    from trajstore.distributed import DistributedReplayBuffer

    check_instance("handle", handle, DistributedReplayBuffer, "a handle of stores; `trajstore view` shows directories")
    with served(OfHandle(handle), host, port, tokenizer=tokenizer) as address:
        yield address
