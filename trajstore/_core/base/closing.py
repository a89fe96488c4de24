"""Context managers that refuse calls after ``close``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from types import FunctionType
from typing import Any, Self, TypeVar

from trajstore.errors import StoreClosedError


class Closing:
    """Calls :meth:`close` at the end of a ``with`` statement."""

    def close(self) -> None:
        """Release all resources. Closing again does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


Closed = TypeVar("Closed", bound=type[Closing])


def of_no_use_when_closed(*, but: Collection[str] = ()) -> Callable[[Closed], Closed]:
    """Decorate a class: after ``close()`` its public methods raise ``StoreClosedError``, which names the method.

    Args:
        but: methods that stay usable, such as one that reports past results. Properties always do.
    """

    def decorate(target: Closed) -> Closed:
        for name, member in list(vars(target).items()):
            if name == "close":
                setattr(target, name, _closing(member))
            elif isinstance(member, FunctionType) and not name.startswith("_") and name not in but:
                setattr(target, name, _refusing(member, name))
        return target

    return decorate


def _closing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def close(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._was_closed = True
        return function(self, *args, **kwargs)

    return close


def _refusing(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "_was_closed", False):
            raise StoreClosedError(f"{type(self).__name__}.{name}: called after close(); make a new one")
        return function(self, *args, **kwargs)

    return call
