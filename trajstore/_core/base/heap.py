"""The C library's heap."""

from __future__ import annotations

import ctypes


def return_freed() -> None:
    """Return freed memory to the system, as far as the C library can: glibc keeps it until it is asked."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
