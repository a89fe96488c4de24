"""Objects that are closed where a ``with`` statement ends."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Closing:
    """Calls :meth:`close` where a ``with`` statement ends, whatever ended it."""

    def close(self) -> None:
        """Give back what this holds. Closing again does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
