"""Which texts are most related to a query: BM25 over texts that keep being added, and may be removed.

An inverted index: for each word the texts that have it, and how often. Scores are those of all texts that are there
now, and length is not normalized (``b = 0``), so nothing depends on the order in which texts came and went.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import ConfigurationError

_WORD = re.compile(r"\w+")
_SATURATION = 1.5
"""k1 of BM25: how soon a word that is repeated counts no more."""
_MOST = 0xFFFF
_DIGITS = 4
"""Decimal digits of a score that count: what is below depends on the order in which floats were added."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A text that is related to a query.

    Attributes:
        key: of the text.
        score: above 0; higher is more related.
    """

    key: int
    score: float


@dataclass(slots=True)
class _Postings:
    """The texts that have one word: their places, ascending, and how often each has it."""

    places: array[int] = field(default_factory=lambda: array("i"))
    counts: array[int] = field(default_factory=lambda: array("H"))

    def below(self, end: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint16]]:
        """Return the part before a place. It is copied: an array that is looked at cannot grow."""
        places = np.array(self.places, np.int32)
        places = places[: np.searchsorted(places, end)]
        return places, np.array(self.counts[: len(places)], np.uint16)


@dataclass(slots=True)
class _Texts:
    """All texts: keys by place, ascending; postings by word; places of those that were removed."""

    keys: array[int] = field(default_factory=lambda: array("q"))
    postings: dict[str, _Postings] = field(default_factory=dict)
    removed: set[int] = field(default_factory=set)


def words_of(text: str) -> list[str]:
    """Return the words of a text, in lower case: runs of letters, digits and underscores of any script."""
    return _WORD.findall(text.lower())


class RetrievalIndex:
    """An index of texts under ascending keys. One thread changes it at a time; any thread may search meanwhile."""

    def __init__(self) -> None:
        self._texts = _Texts()

    def __len__(self) -> int:
        return len(self._texts.keys) - len(self._texts.removed)

    def add(self, keys: Sequence[int], texts: Sequence[str]) -> None:
        """Add texts. A text without a word is kept and never found.

        Args:
            keys: ascending, above all earlier ones, removed ones too.
            texts: one for each key.
        """
        _check("keys", keys, (int, np.integer))
        _check("texts", texts, (str,))
        if len(keys) != len(texts):
            raise ConfigurationError(f"keys, texts: {len(keys)} keys for {len(texts)} texts")
        held = self._texts
        for key, text in zip(keys, texts, strict=True):
            for word, count in Counter(words_of(text)).items():
                postings = held.postings.setdefault(word, _Postings())
                postings.counts.append(min(count, _MOST))
                postings.places.append(len(held.keys))
            held.keys.append(int(key))  # last: a search looks no further than the keys that it found

    def remove(self, keys: Sequence[int]) -> None:
        """Remove texts; afterwards everything is found as if they had never been there.

        Raises:
            ConfigurationError: a key is of no text that is there.
        """
        _check("keys", keys, (int, np.integer))
        held = self._texts
        there = np.array(held.keys, np.int64)
        wanted = np.array(keys, np.int64)
        places = np.searchsorted(there, wanted)
        for key, place in zip(wanted.tolist(), places.tolist(), strict=True):
            if place == len(there) or there[place] != key or place in held.removed:
                raise ConfigurationError(f"keys: there is no text {key}")
        held.removed |= set(places.tolist())
        if 2 * len(held.removed) > len(held.keys):
            self._texts = _without_removed(held)

    def search(self, query: str, k: int, without: Collection[int] = ()) -> list[Hit]:
        """Return the up to ``k`` texts most related to a query, best first; among equals the newest first.

        Args:
            query: any text; each of its words counts once.
            k: how many at the most.
            without: keys that are not returned.
        """
        if not isinstance(query, str):
            raise ConfigurationError(f"query: a {type(query).__name__}, must be a text")
        if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 0:
            raise ConfigurationError(f"k: {str(k)[:40]}, a {type(k).__name__}, must be a whole number of at least 0")
        if not isinstance(without, Collection) or not all(isinstance(key, int | np.integer) for key in without):
            raise ConfigurationError(f"without: a {type(without).__name__}, must be keys, whole numbers")
        held = self._texts
        keys = np.array(held.keys, np.int64)
        alive = np.ones(len(keys), np.bool_)
        alive[[place for place in held.removed.copy() if place < len(keys)]] = False
        scores = np.zeros(len(keys))
        total = int(np.count_nonzero(alive))
        for word in dict.fromkeys(words_of(query)):
            postings = held.postings.get(word)
            if postings is not None:
                places, counts = postings.below(len(keys))
                weight = _weight(int(np.count_nonzero(alive[places])), total)
                scores[places] += weight * (counts / (counts + _SATURATION))  # a word has each place once
        scores = scores.round(_DIGITS)
        found = np.flatnonzero((scores > 0) & alive)
        found = found[~np.isin(keys[found], np.fromiter(without, np.int64, len(without)))]
        if 0 < k < len(found):
            found = found[scores[found] >= np.partition(scores[found], -k)[-k]]
        best = found[np.lexsort((-keys[found], -scores[found]))][:k]
        return [Hit(int(keys[place]), float(scores[place])) for place in best]


def _check(name: str, items: Any, kinds: tuple[type, ...]) -> None:
    """Refuse what is no list of these kinds."""
    if not isinstance(items, Sequence) or isinstance(items, str | bytes):
        raise ConfigurationError(f"{name}: a {type(items).__name__}, must be a list")
    for item in items:
        if not isinstance(item, kinds) or isinstance(item, bool):
            raise ConfigurationError(f"{name}: a {type(item).__name__} among them, must be of {kinds[0].__name__}")


def _without_removed(held: _Texts) -> _Texts:
    alive = np.ones(len(held.keys), np.bool_)
    alive[list(held.removed)] = False
    moved = np.cumsum(alive) - 1
    made = _Texts(array("q", np.array(held.keys, np.int64)[alive].tolist()))
    for word, postings in held.postings.items():
        places, counts = postings.below(len(held.keys))
        kept = alive[places]
        if kept.any():
            made.postings[word] = _Postings(array("i", moved[places[kept]].tolist()), array("H", counts[kept].tolist()))
    return made


def _weight(frequency: int, count: int) -> float:
    """Return the weight of a word that ``frequency`` of ``count`` texts have, as Lucene's BM25 has it."""
    return math.log(1 + (count - frequency + 0.5) / (frequency + 0.5))
