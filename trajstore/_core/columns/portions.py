"""Splits long lists into portions of consecutive items, bounded by their bytes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def portions(
    items: Iterable[T], limit: int, nbytes: Callable[[T], int], *, most: int | None = None
) -> Iterator[tuple[list[T], int]]:
    """Yield consecutive items and their bytes; items are consumed lazily.

    Args:
        items: of any number.
        limit: largest size in bytes of a portion of several items.
        nbytes: returns the bytes of an item.
        most: largest number of items in a portion; None = no bound.
    """
    portion: list[T] = []
    total = 0
    for item in items:
        size = nbytes(item)
        if portion and (total + size > limit or len(portion) == most):
            yield portion, total
            portion, total = [], 0
        portion.append(item)
        total += size
    if portion:
        yield portion, total
