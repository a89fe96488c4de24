"""Base of classes that stand in for an object of a trainer."""

from __future__ import annotations

from typing import Any, ClassVar


class Wrapper:
    """Has the attributes of the object that it wraps, besides its own.

    Subclasses name their attribute with that object: ``class Recording(Wrapper, wraps="generator")``.
    """

    _wraps: ClassVar[str]

    def __init_subclass__(cls, wraps: str) -> None:
        cls._wraps = wraps

    def __getattr__(self, name: str) -> Any:
        if name == self._wraps:  # before __init__, or in a copy
            raise AttributeError(name)
        return getattr(getattr(self, self._wraps), name)
