"""The text of a reader lease. Pure; no I/O.

Format: 20 digits, the generation shown; a space, or ``+`` while looking for a newer one; JSON that names the process.
"""

from __future__ import annotations

from trajstore._core.files.base import Reader
from trajstore._core.files.holder import describe_holder, process_of

READERS_FOLDER = "readers"

LEASE_DIGITS = 20
"""Number of digits of the generation in a lease."""


def lease_head(generation: int, *, looking: bool) -> bytes:
    """Return the beginning of a lease's text.

    Args:
        generation: that is shown.
        looking: the reader looks for a newer one.
    """
    return b"%020d%b" % (generation, b"+" if looking else b" ")


def reader_of(name: str, text: bytes) -> Reader:
    """Parse a lease; a truncated text counts as a reader of any generation."""
    known = len(text) >= LEASE_DIGITS and text[:LEASE_DIGITS].isdigit()
    return Reader(
        name=name.rpartition("/")[2],
        generation=int(text[:LEASE_DIGITS]) if known else 0,
        settled=known and text[LEASE_DIGITS : LEASE_DIGITS + 1] != b"+",
        holder=describe_holder(text[LEASE_DIGITS + 1 :]),
        process=process_of(text[LEASE_DIGITS + 1 :]),
    )
