"""The page over a handle of stores, served by the program that has the handle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trajstore.core.base.arguments import check_instance
from trajstore.errors import MissingDependencyError

if TYPE_CHECKING:
    from trajstore.distributed import DistributedReplayBuffer


@contextmanager
def serving(
    handle: DistributedReplayBuffer, *, host: str = "127.0.0.1", port: int = 8421, tokenizer: str | Path | None = None
) -> Iterator[str]:
    """Serve the page over a handle of stores from a thread until the context is left; yields its address.

    Directories are shown by ``trajstore view PATH``.

    Args:
        handle: of the stores; use it meanwhile, and close it after.
        host: address to listen on; one that other machines reach takes a token, which the yielded address has.
        port: 0 = any that is free.
        tokenizer: folder or name of the tokenizer that makes text of tokens. None: the folder that a rollout names.

    Raises:
        MissingDependencyError: Starlette and uvicorn are not installed (extra ``view``).
        ConfigurationError: it is no handle, there is no such address here, or the port is taken.
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

    check_instance("handle", handle, DistributedReplayBuffer, "a handle of stores; `trajstore view PATH` shows others")
    with served(OfHandle(handle), host, port, tokenizer=tokenizer) as address:
        yield address
