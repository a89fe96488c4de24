"""Text retrieval by BM25 (SQLite's FTS5), over an index in memory that supports removal."""

from __future__ import annotations

import json
import re
import sqlite3
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from trajstore._core.base import locks
from trajstore._core.base.arguments import whole, whole_numbers
from trajstore.errors import ConfigurationError

_WORD = re.compile(r"\w+")
_LONGEST_WORD = 8_000
"""Maximum number of characters of a word. FTS5's limit is 32,768 bytes."""
_MOST_WORDS = 32
"""Maximum number of words of a query: FTS5's time for each matching text grows with their number squared."""

# Texts are passed as the words from `words_of`, which this tokenizer keeps: it splits only at ASCII.
_TABLES = """
    CREATE VIRTUAL TABLE texts USING fts5(words, tokenize="ascii tokenchars '_'");
    CREATE VIRTUAL TABLE vocabulary USING fts5vocab(texts, row);
"""
_RAREST = "SELECT term FROM vocabulary WHERE term IN (SELECT value FROM json_each(?)) ORDER BY doc, term LIMIT ?"
_BEST = """
    SELECT rowid, -rank FROM texts WHERE texts MATCH ? AND rowid NOT IN (SELECT value FROM json_each(?))
    ORDER BY rank, rowid DESC LIMIT ?
"""


@dataclass(frozen=True, slots=True)
class Hit:
    """A text that matches a query.

    Attributes:
        key: of the text.
        score: above 0; higher is more related.
    """

    key: int
    score: float


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case: runs of letters, digits and underscores of any script.

    Scripts without spaces have long words: a run of Chinese characters is one word, and matches only the same run.
    """
    return [word[:_LONGEST_WORD] for word in _WORD.findall(text.lower())]


class RetrievalIndex:
    """An index of texts under keys, in memory. Thread-safe; calls are serialized.

    Scores are FTS5's BM25 (k1 = 1.2, b = 0.75) over the present texts, independent of past additions and removals.
    """

    def __init__(self) -> None:
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        weakref.finalize(self, self._database.close)
        self._database.executescript(_TABLES)
        self._keys: set[int] = set()
        self._using = locks.lock("RetrievalIndex._using")

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Sequence[int], texts: Sequence[str]) -> None:
        """Add texts. A text without words is kept but never found.

        Args:
            keys: one for each text; unused so far.
            texts: the texts.

        Raises:
            ConfigurationError: a key is repeated or already used, or the numbers of keys and texts differ.
        """
        new = whole_numbers("keys", keys).tolist()
        if len(new) != len(texts):
            raise ConfigurationError(f"keys, texts: {len(new)} keys for {len(texts)} texts")
        rows = [(key, " ".join(words_of(text))) for key, text in zip(new, texts, strict=True)]
        with self._using:
            if len(self._keys.union(new)) < len(self._keys) + len(new):
                raise ConfigurationError("keys: one is given twice, or is that of a text that is there")
            with self._database:
                self._database.executemany("INSERT INTO texts(rowid, words) VALUES (?, ?)", rows)
            self._keys.update(new)

    def remove(self, keys: Sequence[int]) -> None:
        """Remove texts; results are then as if they had never been added.

        Raises:
            ConfigurationError: a key is unknown.
        """
        gone = set(whole_numbers("keys", keys).tolist())
        with self._using:
            if not gone <= self._keys:
                raise ConfigurationError(f"keys: there is no text {min(gone - self._keys)}")
            with self._database:
                self._database.executemany("DELETE FROM texts WHERE rowid = ?", [(key,) for key in gone])
            self._keys -= gone

    def search(self, query: str, k: int, without: Collection[int] = ()) -> list[Hit]:
        """Return up to ``k`` texts most related to a query, best first; among equals the highest key first.

        Args:
            query: any text. Of its words that occur in the index, the 32 rarest count, each once.
            k: the maximum.
            without: keys to exclude.
        """
        limit = whole("k", k, 0)
        banned = json.dumps(whole_numbers("without", without).tolist())
        words = json.dumps(words_of(query), ensure_ascii=False)
        with self._using:
            rarest = self._database.execute(_RAREST, (words, _MOST_WORDS)).fetchall()
            if not rarest:
                return []
            wanted = " OR ".join(f'"{word}"' for (word,) in rarest)  # quoted words are not FTS5 syntax
            matches = self._database.execute(_BEST, (wanted, banned, limit)).fetchall()
        return [Hit(key, score) for key, score in matches]
