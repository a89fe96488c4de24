"""The campaigns' range reader reports wrong rows, reads that bypass obstore, and hangs."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

import pytest

from tests.stores import filled
from tools.campaigns import Result
from tools.crash.range_reader import RangeReader, RangeRows, detours_told

pytest.importorskip("s3fs", reason="needs s3fs, of the extra 's3'")
bucket_ranges = pytest.importorskip("trajstore.remote.bucket_ranges", reason="needs obstore, of the extra 's3'")


@pytest.fixture(scope="module")
def store(s3_options: dict[str, Any]) -> str:
    import s3fs

    bucket = f"bucket-{uuid.uuid4()}"
    s3fs.S3FileSystem(**s3_options).mkdir(bucket)
    url = f"s3://{bucket}/run"
    filled(url, range(7, 10), storage_options=s3_options)
    return url


def test_it_reads_by_obstore(store: str, s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = bucket_ranges.BucketRanges.fetch

    def fetch(self: Any, pieces: Sequence[Any]) -> Any:
        asked.append(len(pieces))
        return real(self, pieces)

    monkeypatch.setattr(bucket_ranges.BucketRanges, "fetch", fetch)
    rows = RangeRows(s3_options)
    with detours_told(rows):
        rows.some_of(store)
        seen = rows.all_of(store)
    assert {number: expected.key for number, expected in seen.items()} == {0: 7, 1: 8, 2: 9}
    assert rows.troubles == []
    assert rows.batches == 2
    assert sum(asked) > 0


@pytest.mark.parametrize("fault", ["others", "swapped", "absent"])
def test_what_comes_wrong_is_told(
    store: str, s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    real = bucket_ranges.BucketRanges.fetch

    def fetch(self: Any, pieces: Sequence[tuple[str, int, int]]) -> Generator[tuple[int, Any], None, None]:
        if fault == "swapped":  # whole files of the next trajectory, with plausible rows
            names = sorted({name for name, _, _ in pieces})
            pieces = [(names[names.index(name) - 1], start, stop) for name, start, stop in pieces]
        for place, piece in real(self, pieces):
            if fault == "absent" or isinstance(piece, OSError):
                yield place, OSError(5, "gone")
            else:
                yield place, bytes(piece)[:-700] + bytes(700) if fault == "others" else piece

    monkeypatch.setattr(bucket_ranges.BucketRanges, "fetch", fetch)
    rows = RangeRows(s3_options)
    with detours_told(rows):
        rows.all_of(store)
    assert rows.troubles


def test_a_reader_that_hangs_is_told_and_replaced(store: str, s3_options: dict[str, Any]) -> None:
    result = Result()
    with closing(RangeReader(s3_options, result, patience=1.0)) as ranges:
        os.kill(ranges.process.pid or 0, signal.SIGSTOP)
        assert ranges.look(store) == ({}, ["the reader by ranges has not come to an end in 1 s"])
        ranges.patience = 120.0
        seen, troubles = ranges.look(store)
        assert (len(seen), troubles) == (3, [])
        assert result.counts["trajectories by ranges"] == 3
