"""The C library's heap."""

from __future__ import annotations

import ctypes

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone


def return_freed() -> None:
    """Return freed memory to the system, which the C library keeps where something behind it is in use."""
    if _trim is not None:
        _trim(0)
