"""Retrieval finds what plain BM25 over all texts finds, however they came in."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trajstore.guidance import RetrievalIndex
from trajstore.retrieval import words_of

WORDS = st.sampled_from(["go", "kitchen", "cup", "7", "größe", "任务", "the", "a_b"])
TEXTS = st.lists(st.lists(WORDS, max_size=6).map(" ".join), max_size=90)


def plain_scores(texts: list[str], query: str) -> list[float]:
    """BM25 with b = 0 and Lucene's weights, written down once more."""
    held = [words_of(text) for text in texts]
    scores = []
    for words in held:
        total = 0.0
        for word in dict.fromkeys(words_of(query)):
            frequency = sum(word in other for other in held)
            weight = math.log(1 + (len(held) - frequency + 0.5) / (frequency + 0.5))
            total += weight * words.count(word) / (1.5 + words.count(word))
        scores.append(total)
    return scores


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
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
    wanted = sorted((score for key, score in enumerate(scores) if score > 1e-3 and key not in banned), reverse=True)
    assert [hit.score for hit in hits] == pytest.approx(wanted[:k], abs=2e-4)
    assert all(hit.score == pytest.approx(scores[hit.key], abs=2e-4) and hit.key not in banned for hit in hits)
    assert len({hit.key for hit in hits}) == len(hits)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
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
    found, wanted = index.search(query, 200), plain.search(query, 200)
    assert [hit.score for hit in found] == pytest.approx([hit.score for hit in wanted], abs=2e-4)
    assert {hit.key for hit in found} == {hit.key for hit in wanted}


def test_among_equals_the_newest_comes_first() -> None:
    one, many = RetrievalIndex(), RetrievalIndex()
    texts = ["go kitchen", "take cup", "go kitchen", "drop cup", "go kitchen"] * 30
    one.add(range(len(texts)), texts)
    for key, text in enumerate(texts):
        many.add([key], [text])
    assert one.search("kitchen", 4) == many.search("kitchen", 4)
    assert [hit.key for hit in one.search("kitchen", 3)] == [149, 147, 145]


def test_nothing_is_found_for_nothing() -> None:
    index = RetrievalIndex()
    assert index.search("go", 3) == []
    index.add([4, 7], ["", "..."])
    assert index.search("go", 3) == []
    assert index.search("", 3) == []
    index.add([9], ["go"])
    assert [hit.key for hit in index.search("GO!", 3)] == [9]
    assert index.search("go", 0) == []
