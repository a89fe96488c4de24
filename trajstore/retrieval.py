"""Which texts are most related to a query: BM25 over texts that keep being added, and may be removed.

The package ``bm25s`` makes an index of a fixed collection. A collection that grows is kept in segments, each of which
it indexed once. A full level of :data:`FAN_OUT` segments is merged to one of the next level: its postings are put
together word by word, without looking at a text again. So a text is moved a few times (the logarithm of their number),
and a query looks into a few dozen segments at the most. Scores are those of the whole collection: postings say how much
a word counts in a text, the weight of the word is worked out for all texts when a query comes, and length is not
normalized (``b = 0``), so no segment has an average of its own. How texts came to lie in segments changes nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import ConfigurationError, MissingDependencyError

FAN_OUT = 8
"""Segments of a level that become one of the next."""

_WORD = re.compile(r"\w+")
_DIGITS = 4
"""Decimal digits of a score that count: what is below depends on the order in which floats were added."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Hit:
    """A text that is related to a query.

    Attributes:
        key: of the text.
        score: above 0; higher is more related.
    """

    key: int
    score: float


def words_of(text: str) -> list[str]:
    """Return the words of a text, in lower case: runs of letters, digits and underscores of any script."""
    return _WORD.findall(text.lower())


class RetrievalIndex:
    """An index of texts under ascending keys. One thread changes it at a time; any thread may search meanwhile.

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
        self._vocabulary: dict[str, int] = {}
        self._frequencies: dict[int, int] = {}
        """Number of a word -> texts that have it."""
        self._removed: frozenset[int] = frozenset()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, keys: Sequence[int], texts: Sequence[str]) -> None:
        """Add texts. A text without a word is kept and never found.

        Args:
            keys: ascending, above all earlier ones, removed ones too.
            texts: one for each key.
        """
        _check_texts(keys, texts)
        if not keys:
            return
        made = self._segment(np.asarray(keys, dtype=np.int64), [words_of(text) for text in texts])
        levels = self._with(made)
        for word, count in zip(made.words.tolist(), np.diff(made.starts).tolist(), strict=True):
            self._frequencies[word] = self._frequencies.get(word, 0) + count
        # A search that runs meanwhile sees the segments of before, or those of now.
        self._count += len(keys)
        self._levels = levels

    def remove(self, keys: Sequence[int], texts: Sequence[str]) -> None:
        """Remove texts; afterwards everything is found as if they had never been there.

        Args:
            keys: of texts that are there.
            texts: as they were added.
        """
        _check_texts(keys, texts)
        unknown = [word for text in texts for word in words_of(text) if word not in self._vocabulary]
        if unknown:
            raise ConfigurationError(f"texts: {unknown[0]!r} is in no text of the index; give them as they were added")
        for text in texts:
            for word in {self._vocabulary[word] for word in words_of(text)}:
                self._frequencies[word] -= 1
        self._count -= len(keys)
        self._removed = self._removed.union(keys)
        if len(self._removed) > self._count:  # most of what lies there was removed: one merge of all clears it
            held = [segment for level in self._levels for segment in level]
            self._levels = self._placed(_merged(held, self._removed)) if held else ()
            self._removed = frozenset()

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
        levels, removed = self._levels, self._removed
        known = [self._vocabulary[word] for word in dict.fromkeys(words_of(query)) if word in self._vocabulary]
        weights = {word: _idf(count, self._count) for word in known if (count := self._frequencies.get(word, 0)) > 0}
        if not weights or k < 1:
            return []
        banned = np.fromiter({*without, *removed}, dtype=np.int64)
        found = [hit for level in levels for segment in level for hit in segment.best(weights, k, banned)]
        return sorted(found, key=lambda hit: (-hit.score, -hit.key))[:k]

    def _segment(self, keys: IntArray, words: list[list[str]]) -> _Segment:
        """Return texts as a segment, indexed by bm25s."""
        if not any(words):
            return _Segment(keys, *_no_postings())
        index = self._bm25s.BM25(method="lucene", b=0.0)
        index.index(words, show_progress=False)
        matrix = index.scores
        data, rows, ends = matrix["data"], matrix["indices"], np.asarray(matrix["indptr"], dtype=np.int64)
        vocabulary = self._vocabulary
        columns = [(vocabulary.setdefault(word, len(vocabulary)), column) for word, column in index.vocab_dict.items()]
        last = len(ends) - 1  # bm25s knows a word more than it has columns for: its filler
        columns = [
            (word, column) for word, column in sorted(columns) if column < last and ends[column] < ends[column + 1]
        ]
        numbers = np.array([word for word, _ in columns], dtype=np.int64)
        places = np.array([column for _, column in columns], dtype=np.int64)
        counts = ends[places + 1] - ends[places]
        order = _runs(ends[places], counts)
        # The segment's own weight of each word is in its scores: out with it.
        rarity = np.array([_idf(count, len(keys)) for count in counts.tolist()])
        weights = (data[order] / np.repeat(rarity, counts)).astype(np.float32)
        starts = np.concatenate([[0], counts.cumsum()])
        return _Segment(keys, numbers, starts, rows[order].astype(np.int32), weights)

    def _with(self, made: _Segment) -> tuple[tuple[_Segment, ...], ...]:
        """Return the levels with a segment among them: a full level goes, with it, one level up."""
        levels = list(self._levels)
        level = _level(len(made.keys))
        levels += [()] * (level + 1 - len(levels))
        while len(levels[level]) >= FAN_OUT - 1:
            made = _merged([*levels[level], made], self._removed)
            levels[level] = ()
            level += 1
            levels += [()] * (level + 1 - len(levels))
        levels[level] = (*levels[level], made)
        return tuple(levels)

    def _placed(self, made: _Segment) -> tuple[tuple[_Segment, ...], ...]:
        return (*[()] * _level(len(made.keys)), (made,))


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    """A part of the collection: for each of its words the texts that have it, and how much it counts there."""

    keys: IntArray
    """[n] of the texts, ascending."""
    words: IntArray
    """[w] numbers of words, ascending."""
    starts: IntArray
    """[w + 1] where the postings of each word begin."""
    rows: npt.NDArray[np.int32]
    """[p] places of texts, ascending within a word."""
    weights: npt.NDArray[np.float32]
    """[p] tf / (tf + k1)."""

    def best(self, weights: Mapping[int, float], k: int, banned: IntArray) -> list[Hit]:
        """Return the up to ``k`` best texts for words with these weights."""
        scores = np.zeros(len(self.keys))
        places = np.searchsorted(self.words, list(weights))
        for place, (word, weight) in zip(places.tolist(), weights.items(), strict=True):
            if place < len(self.words) and self.words[place] == word:
                start, stop = self.starts[place], self.starts[place + 1]
                scores[self.rows[start:stop]] += self.weights[start:stop] * weight  # a word has each row once
        scores = scores.round(_DIGITS)
        if len(banned):
            scores[np.isin(self.keys, banned)] = 0.0
        if k < len(scores):
            found = np.flatnonzero((scores > 0) & (scores >= np.partition(scores, -k)[-k]))
        else:
            found = np.flatnonzero(scores > 0)
        if len(found) > k:  # equal scores at the end: the newest ones
            found = found[np.lexsort((-self.keys[found], -scores[found]))][:k]
        return [Hit(int(self.keys[place]), float(scores[place])) for place in found]


def _check_texts(keys: Any, texts: Any) -> None:
    """Refuse what are no keys with a text each."""
    for name, items, kinds in (("keys", keys, (int, np.integer)), ("texts", texts, (str,))):
        if not isinstance(items, Sequence) or isinstance(items, str | bytes):
            raise ConfigurationError(f"{name}: a {type(items).__name__}, must be a list")
        bad = next((item for item in items if not isinstance(item, kinds) or isinstance(item, bool)), None)
        if bad is not None or None in items:
            raise ConfigurationError(f"{name}: a {type(bad).__name__} among them, must be of {kinds[0].__name__}")
    if len(keys) != len(texts):
        raise ConfigurationError(f"keys, texts: {len(keys)} keys for {len(texts)} texts")


def _merged(segments: Sequence[_Segment], removed: Collection[int]) -> _Segment:
    """Return segments, whose keys ascend from one to the next, as one; without what was removed."""
    ordered = sorted(segments, key=lambda segment: int(segment.keys[0]) if len(segment.keys) else -1)
    keys = np.concatenate([segment.keys for segment in ordered])
    words = np.unique(np.concatenate([segment.words for segment in ordered]))
    counts = np.zeros(len(words), dtype=np.int64)
    places = [np.searchsorted(words, segment.words) for segment in ordered]
    for segment, place in zip(ordered, places, strict=True):
        counts[place] += np.diff(segment.starts)
    starts = np.concatenate([[0], counts.cumsum()])
    rows = np.empty(starts[-1], dtype=np.int32)
    weights = np.empty(starts[-1], dtype=np.float32)
    free, before = starts[:-1].copy(), 0
    for segment, place in zip(ordered, places, strict=True):
        sizes = np.diff(segment.starts)
        target = _runs(free[place], sizes)
        rows[target] = segment.rows + before
        weights[target] = segment.weights
        free[place] += sizes
        before += len(segment.keys)
    made = _Segment(keys, words, starts, rows, weights)
    return _without(made, removed) if removed else made


def _without(segment: _Segment, removed: Collection[int]) -> _Segment:
    alive = ~np.isin(segment.keys, np.fromiter(removed, dtype=np.int64))
    kept = alive[segment.rows]
    places = alive.cumsum() - 1
    total = np.concatenate([[0], kept.cumsum()])[segment.starts]
    counts = np.diff(total)
    starts = np.concatenate([[0], counts[counts > 0].cumsum()])
    rows = places[segment.rows[kept]].astype(np.int32)
    return _Segment(segment.keys[alive], segment.words[counts > 0], starts, rows, segment.weights[kept])


def _runs(starts: IntArray, sizes: IntArray) -> IntArray:
    """Return ``starts[i], starts[i] + 1, ...`` up to ``sizes[i]`` of them, for one i after the other."""
    ends = sizes.cumsum()
    places: IntArray = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts - ends + sizes, sizes)
    return places


def _level(count: int) -> int:
    level = 0
    while FAN_OUT ** (level + 1) <= count:
        level += 1
    return level


def _no_postings() -> tuple[IntArray, IntArray, npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    return np.zeros(0, np.int64), np.zeros(1, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32)


def _idf(frequency: int, count: int) -> float:
    """Return the weight of a word that ``frequency`` of ``count`` texts have, as Lucene's BM25 has it."""
    return math.log(1 + (count - frequency + 0.5) / (frequency + 0.5))
