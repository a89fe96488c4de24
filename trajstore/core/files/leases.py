"""What the lease of a reader says. Pure; no I/O.

Its text: 20 digits, the generation that is shown; a space, or ``+`` while a newer one is looked for; JSON that says
who it is.
"""

from __future__ import annotations

from trajstore.core.files.base import Reader
from trajstore.core.files.holder import describe_holder, process_of

READERS_FOLDER = "readers"

LEASE_DIGITS = 20
"""Of the generation in a lease."""


def lease_head(generation: int, *, looking: bool) -> bytes:
    """Return how a lease begins.

    Args:
        generation: that is shown.
        looking: a newer one is looked for.
    """
    return b"%020d%b" % (generation, b"+" if looking else b" ")


def reader_of(name: str, text: bytes) -> Reader:
    """Return the reader that a lease is of; one whose text is short may read any generation."""
    known = len(text) >= LEASE_DIGITS and text[:LEASE_DIGITS].isdigit()
    return Reader(
        name=name.rpartition("/")[2],
        generation=int(text[:LEASE_DIGITS]) if known else 0,
        settled=known and text[LEASE_DIGITS : LEASE_DIGITS + 1] != b"+",
        holder=describe_holder(text[LEASE_DIGITS + 1 :]),
        process=process_of(text[LEASE_DIGITS + 1 :]),
    )
