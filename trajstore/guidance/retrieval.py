"""Which texts are most related to a query: BM25 over texts that keep being added.

The package ``bm25s`` scores a fixed collection. A collection that grows is kept in segments: a full level of
:data:`FAN_OUT` segments is indexed again as one of the next level, so that each text is indexed a few times (the
logarithm of their number), and a query looks into a few dozen segments at the most. Scores are those of the whole
collection: each segment's term weights are corrected to the document frequencies of all texts, and length is not
normalized (``b = 0``), so no segment has an average of its own. How texts came to lie in segments changes nothing.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import MissingDependencyError

FAN_OUT = 8
"""Segments of a level that become one of the next."""

_WORD = re.compile(r"\w+")
_DIGITS = 4
"""Decimal digits of a score that count: what is below depends on the order in which floats were added."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A text that is related to a query."""

    key: int
    score: float
    """Above 0; higher is more related."""


def words_of(text: str) -> list[str]:
    """Return the words of a text, in lower case: runs of letters, digits and underscores of any script."""
    return list(map(sys.intern, _WORD.findall(text.lower())))  # a word that many texts have is kept once


class RetrievalIndex:
    """An index of texts under ascending keys. One thread adds at a time; any thread may search meanwhile.

    Raises:
        MissingDependencyError: bm25s is not installed.
    """

    def __init__(self) -> None:
        try:
            import bm25s
        except ImportError as error:
            raise MissingDependencyError("bm25s", "guided") from error
        self._bm25s: Any = bm25s
        self._levels: tuple[tuple[_Segment, ...], ...] = ()
        self._frequencies: Counter[str] = Counter()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, keys: Sequence[int], texts: Sequence[str]) -> None:
        """Add texts. A text without a word is kept and never found.

        Args:
            keys: ascending, above all earlier ones.
            texts: one for each key.
        """
        if not keys:
            return
        words = [words_of(text) for text in texts]
        levels = self._with(np.asarray(keys, dtype=np.int64), words)
        for held in words:
            self._frequencies.update(set(held))
        # A search that runs meanwhile sees the segments of before, or those of now.
        self._count += len(keys)
        self._levels = levels

    def search(self, query: str, k: int, without: Collection[int] = ()) -> list[Hit]:
        """Return the up to ``k`` texts most related to a query, best first; among equals the newest first.

        Args:
            query: any text; each of its words counts once.
            k: how many at the most.
            without: keys that are not returned.
        """
        words = [word for word in dict.fromkeys(words_of(query)) if word in self._frequencies]
        if not words or k < 1:
            return []
        weights = {word: _idf(self._frequencies[word], self._count) for word in words}
        banned = np.fromiter(without, dtype=np.int64, count=len(without))
        found = [hit for level in self._levels for segment in level for hit in segment.best(weights, k, banned)]
        return sorted(found, key=lambda hit: (-hit.score, -hit.key))[:k]

    def _with(self, keys: npt.NDArray[np.int64], words: list[list[str]]) -> tuple[tuple[_Segment, ...], ...]:
        """Return the levels with these texts among them: a full level goes, with them, one level up."""
        levels = list(self._levels)
        level = 0
        while FAN_OUT ** (level + 1) <= len(keys):
            level += 1
        levels += [()] * (level + 1 - len(levels))
        while len(levels[level]) >= FAN_OUT - 1:
            full = levels[level]
            keys = np.concatenate([*(one.keys for one in full), keys])
            words = [held for one in full for held in one.words] + words
            levels[level] = ()
            level += 1
            levels += [()] * (level + 1 - len(levels))
        levels[level] = (*levels[level], _Segment(self._bm25s, keys, words))
        return tuple(levels)


class _Segment:
    """A part of the collection, indexed once."""

    def __init__(self, bm25s: Any, keys: npt.NDArray[np.int64], words: list[list[str]]) -> None:
        self.keys = keys
        self.words = words
        self._frequencies: Counter[str] = Counter()
        for held in words:
            self._frequencies.update(set(held))
        self._index: Any = None
        if self._frequencies:
            self._index = bm25s.BM25(method="lucene", b=0.0)
            self._index.index(words, show_progress=False)

    def best(self, weights: dict[str, float], k: int, banned: npt.NDArray[np.int64]) -> list[Hit]:
        """Return the up to ``k`` best texts for words with these weights."""
        known = [word for word in weights if word in self._frequencies]
        if not known:
            return []
        scores = np.zeros(len(self.keys))
        matrix = self._index.scores
        data, rows, ends = matrix["data"], matrix["indices"], matrix["indptr"]
        for word in known:
            # The segment's own weight of the word is in its scores: out with it, in with that of all texts.
            own = _idf(self._frequencies[word], len(self.keys))
            column = self._index.vocab_dict[word]
            start, stop = ends[column], ends[column + 1]
            scores[rows[start:stop]] += data[start:stop] * (weights[word] / own)  # a column has each row once
        scores = scores.round(_DIGITS)
        if len(banned):
            scores[np.isin(self.keys, banned)] = 0.0
        if k < len(scores):
            places = np.flatnonzero((scores > 0) & (scores >= np.partition(scores, -k)[-k]))
        else:
            places = np.flatnonzero(scores > 0)
        if len(places) > k:  # equal scores at the end: the newest ones
            places = places[np.lexsort((-self.keys[places], -scores[places]))][:k]
        return [Hit(int(self.keys[place]), float(scores[place])) for place in places]


def _idf(frequency: int, count: int) -> float:
    """Return the weight of a word that ``frequency`` of ``count`` texts have, as Lucene's BM25 has it."""
    return math.log(1 + (count - frequency + 0.5) / (frequency + 0.5))
