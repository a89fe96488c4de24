"""Retrieval equals plain BM25 over all texts, in any order of insertion."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer_hooks.guidance import RetrievalIndex
from trainer_hooks.retrieval import words_of
from trajstore.errors import ConfigurationError

WORDS = st.sampled_from(["go", "kitchen", "cup", "7", "größe", "任务", "the", "a_b", "𐍈", "or"])
TEXTS = st.lists(st.lists(WORDS, max_size=6).map(" ".join), max_size=90)


def plain_scores(texts: list[str], query: str) -> list[float]:
    """Return BM25 scores with k1 = 1.2 and b = 0.75; words in most texts have almost no weight."""
    held = [words_of(text) for text in texts]
    average = sum(map(len, held)) / max(len(held), 1)
    scores = []
    for words in held:
        total = 0.0
        for word in dict.fromkeys(words_of(query)):
            frequency = sum(word in other for other in held)
            weight = max(math.log((len(held) - frequency + 0.5) / (frequency + 0.5)), 1e-6)
            length = 0.25 + 0.75 * len(words) / average if average else 1.0
            total += weight * words.count(word) * 2.2 / (words.count(word) + 1.2 * length)
        scores.append(total)
    return scores


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(texts=TEXTS, query=st.lists(WORDS, max_size=5).map(" ".join), k=st.integers(1, 12), cuts=st.data())
def test_scores_are_those_of_all_texts(texts: list[str], query: str, k: int, cuts: st.DataObject) -> None:
    index = RetrievalIndex()
    start = 0
    while start < len(texts):
        stop = cuts.draw(st.integers(start + 1, len(texts)))
        index.add(range(start, stop), texts[start:stop])
        start = stop
    assert len(index) == len(texts)
    banned = cuts.draw(st.sets(st.integers(0, max(len(texts), 1)), max_size=3))
    scores = plain_scores(texts, query)
    hits = index.search(query, k, banned)
    wanted = sorted((score for key, score in enumerate(scores) if score > 0 and key not in banned), reverse=True)
    assert [hit.score for hit in hits] == pytest.approx(wanted[:k])
    assert all(hit.score == pytest.approx(scores[hit.key]) and hit.key not in banned for hit in hits)
    assert len({hit.key for hit in hits}) == len(hits)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(texts=TEXTS, query=st.lists(WORDS, max_size=5).map(" ".join), choice=st.data())
def test_what_was_removed_was_never_there(texts: list[str], query: str, choice: st.DataObject) -> None:
    index, plain = RetrievalIndex(), RetrievalIndex()
    kept: list[int] = []
    for start in range(0, len(texts), 9):
        keys = list(range(start, min(start + 9, len(texts))))
        index.add(keys, [texts[key] for key in keys])
        kept += keys
        gone = choice.draw(st.lists(st.sampled_from(kept), unique=True))
        index.remove(gone)
        kept = [key for key in kept if key not in gone]
    plain.add(kept, [texts[key] for key in kept])
    assert len(index) == len(kept)
    assert index.search(query, 200) == plain.search(query, 200)


@pytest.mark.parametrize(
    "query",
    ['go" OR "', "words:go", "go*", "^go", "NEAR(go kitchen)", "NOT go", "go\0", "\ud800 go", "go 🙂", '"', "-go"],
)
def test_a_query_is_never_syntax(query: str) -> None:
    index = RetrievalIndex()
    index.add(range(3), ["go", "cup", "kitchen sink"])
    keys = {hit.key for hit in index.search(query, 9)}
    assert keys == {key for key, word in ((0, "go"), (2, "kitchen")) if word in query}


def test_words_of_any_script_are_found_as_they_are_split() -> None:
    index = RetrievalIndex()
    index.add(range(4), ["把杯子 放进 厨房", "把杯子放进厨房", "𰻝𰻝 麵", "größe " + "長" * 9_000])
    assert [hit.key for hit in index.search("厨房", 4)] == [0]  # text without spaces is one word
    assert [hit.key for hit in index.search("𰻝𰻝", 4)] == [2]  # newer than FTS5's Unicode tables
    assert index.search("grosse große", 4) == []
    assert [hit.key for hit in index.search("長" * 9_000, 4)] == [3]


def test_of_a_long_query_the_rarest_words_count() -> None:
    index = RetrievalIndex()
    index.add(range(100), [" ".join(f"w{word}" for word in range(key + 1)) for key in range(100)])  # w99 is the rarest
    hits = index.search(" ".join(f"w{word}" for word in range(100)), 100)
    assert sorted(hit.key for hit in hits) == list(range(68, 100))


def test_among_equals_the_newest_comes_first() -> None:
    first, many = RetrievalIndex(), RetrievalIndex()
    texts = ["go kitchen", "take cup", "go kitchen", "drop cup", "go kitchen"] * 30
    first.add(range(len(texts)), texts)
    for key, text in enumerate(texts):
        many.add([key], [text])
    assert first.search("kitchen", 4) == many.search("kitchen", 4)
    assert [hit.key for hit in first.search("kitchen", 3)] == [149, 147, 145]


def test_nothing_is_found_for_nothing() -> None:
    index = RetrievalIndex()
    assert index.search("go", 3) == []
    index.add([4, 7], ["", "..."])
    assert index.search("go", 3) == []
    assert index.search("", 3) == []
    index.add([9], ["go"])
    assert [hit.key for hit in index.search("GO!", 3)] == [9]
    assert index.search("go", 0) == []


def test_keys_are_of_one_text_each() -> None:
    index = RetrievalIndex()
    index.add([4], ["go"])
    for keys in ([4], [5, 5]):
        with pytest.raises(ConfigurationError, match=r"keys: .*twice"):
            index.add(keys, ["cup"] * len(keys))
    with pytest.raises(ConfigurationError, match="keys: there is no text 5"):
        index.remove([4, 5])
    assert [hit.key for hit in index.search("go cup", 3)] == [4]
