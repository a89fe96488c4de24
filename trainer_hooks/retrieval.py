"""Which texts are most related to a query: BM25 of SQLite's FTS5, over texts that are added and removed in memory."""

from __future__ import annotations

import json
import re
import sqlite3
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from trajstore.core.base import locks
from trajstore.core.base.arguments import whole, whole_numbers
from trajstore.errors import ConfigurationError

_WORD = re.compile(r"\w+")
_LONGEST_WORD = 8_000
"""Characters of a word that count. FTS5 knows words up to 32,768 bytes."""
_MOST_WORDS = 32
"""Words of a query that count: what FTS5 does for each text that is found grows with the square of their number."""

# Text is given as the words that `words_of` finds, which this tokenizer takes as they are: it splits only at ASCII.
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
    """A text that is related to a query.

    Attributes:
        key: of the text.
        score: above 0; higher is more related.
    """

    key: int
    score: float


def words_of(text: str) -> list[str]:
    """Return the words of a text, in lower case: runs of letters, digits and underscores of any script.

    Scripts without spaces have long words: a run of Chinese characters is one, and equals only the same run.
    """
    return [word[:_LONGEST_WORD] for word in _WORD.findall(text.lower())]


class RetrievalIndex:
    """An index of texts under keys, in memory. Thread-safe; one call at a time.

    Scores are FTS5's BM25 (k1 = 1.2, b = 0.75) among all texts that are there now, however they came and went.
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
        """Add texts. A text without a word is kept and never found.

        Args:
            keys: one for each text; of no text that is there.
            texts: as many.

        Raises:
            ConfigurationError: a key is given twice or is there already, or there are more of one than of the other.
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
        """Remove texts; afterwards everything is found as if they had never been there.

        Raises:
            ConfigurationError: a key is of no text that is there.
        """
        gone = set(whole_numbers("keys", keys).tolist())
        with self._using:
            if not gone <= self._keys:
                raise ConfigurationError(f"keys: there is no text {min(gone - self._keys)}")
            with self._database:
                self._database.executemany("DELETE FROM texts WHERE rowid = ?", [(key,) for key in gone])
            self._keys -= gone

    def search(self, query: str, k: int, without: Collection[int] = ()) -> list[Hit]:
        """Return the up to ``k`` texts most related to a query, best first; among equals the highest key first.

        Args:
            query: any text. Of its words that any text has, the 32 rarest count, each once.
            k: how many at the most.
            without: keys that are not returned.
        """
        most = whole("k", k, 0)
        banned = json.dumps(whole_numbers("without", without).tolist())
        words = json.dumps(words_of(query), ensure_ascii=False)
        with self._using:
            rarest = self._database.execute(_RAREST, (words, _MOST_WORDS)).fetchall()
            if not rarest:
                return []
            wanted = " OR ".join(f'"{word}"' for (word,) in rarest)  # in quotes, no word is FTS5's syntax
            found = self._database.execute(_BEST, (wanted, banned, most)).fetchall()
        return [Hit(key, score) for key, score in found]
