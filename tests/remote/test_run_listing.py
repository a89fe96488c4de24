"""A reader of a run in object storage asks for all ranks with one listing, and misses nothing by that."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from threading import Barrier
from typing import Any
from unittest.mock import patch

import pytest

from tests.stores import add_each, filled, keys_of, writer_to
from trajstore import TrajectoryReplayBuffer
from trajstore._core.buffer.reader import Reader
from trajstore._core.files.base import Directory, version_in
from trajstore._core.files.opening import open_directory
from trajstore._core.store.catalog import Catalog, ReadersCatalog
from trajstore._core.store.log_records import segment_name
from trajstore._core.store.sealed import METADATA_NAME
from trajstore.remote.object_store import ObjectStore

RANKS = 2


@pytest.fixture
def requests(s3_options: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the kinds of the requests of readers from now on, without leases."""
    from aiobotocore.client import AioBaseClient

    send, sent = AioBaseClient._make_api_call, []

    def counted(client: object, kind: str, given: dict[str, Any]) -> object:
        if client.meta.config.user_agent_extra == "reader" and kind != "PutObject":  # type: ignore[attr-defined]
            sent.append(kind)
        return send(client, kind, given)

    with patch.object(AioBaseClient, "_make_api_call", counted):
        yield sent


@pytest.fixture
def writers(
    s3_url: str, s3_options: dict[str, Any], request: pytest.FixtureRequest
) -> Iterator[list[TrajectoryReplayBuffer]]:
    """Yield the writers of a run, each with one commit."""
    ranks = range(getattr(request, "param", RANKS))
    begun = [writer_to(f"{s3_url}/rank_{rank}", storage_options=s3_options) for rank in ranks]
    for rank, writer in enumerate(begun):
        add_each(writer, [rank])
    yield begun
    for writer in begun:
        writer.close()


def settled(url: str, options: dict[str, Any]) -> Reader:
    """Return a reader of a run that has seen it idle once."""
    reader = opened(url, options)
    assert not reader.refresh()
    return reader


def opened(url: str, options: dict[str, Any]) -> Reader:
    """Return a reader of a run, whose client differs from those of the writers."""
    return Reader.open(url, storage_options=options | {"config_kwargs": {"user_agent_extra": "reader"}})


def shown(reader: Reader) -> list[int]:
    return sorted(keys_of(reader).values())


def idle_costs(reader: Reader, requests: list[str]) -> list[str]:
    """Return the requests of a refresh."""
    requests.clear()
    assert not reader.refresh()
    return requests.copy()


def test_one_listing_shows_every_change_of_a_run(
    s3_url: str, s3_options: dict[str, Any], writers: list[TrajectoryReplayBuffer], requests: list[str]
) -> None:
    with settled(s3_url, s3_options) as reader:
        assert idle_costs(reader, requests) == ["ListObjectsV2"]
        for key, writer in enumerate((writers[0], writers[-1]), RANKS):
            add_each(writer, [key])
            assert reader.refresh()
            assert shown(reader) == list(range(key + 1))
            assert not reader.refresh()  # after loading anew
            assert idle_costs(reader, requests) == ["ListObjectsV2"]
        writers[1].evict([0])
        assert reader.refresh()
        assert 1 not in shown(reader)
        writers[1].close()  # writes the index whole and removes the log
        reader.refresh()
        add_each(writers[0], [16])
        writers[0].close()
        assert reader.refresh()
        assert 16 in shown(reader)
        with writer_to(f"{s3_url}/rank_{RANKS}", storage_options=s3_options) as joined:
            add_each(joined, [17])
            assert reader.refresh()
            assert 17 in shown(reader)
            assert not reader.refresh()
            assert idle_costs(reader, requests) == ["ListObjectsV2"]


def test_the_ranks_of_a_run_are_opened_at_once(memory_url: str) -> None:
    for rank in range(RANKS):
        filled(f"{memory_url}/rank_{rank}", [rank])
    together, open_one = Barrier(RANKS, timeout=60.0), ReadersCatalog.open

    def open_together(directory: Directory) -> Catalog:
        together.wait()
        return open_one(directory)

    with patch.object(ReadersCatalog, "open", open_together), Reader.open(memory_url) as reader:
        assert shown(reader) == list(range(RANKS))


def test_a_rank_that_vanishes_is_named(
    s3_url: str, s3_options: dict[str, Any], writers: list[TrajectoryReplayBuffer]
) -> None:
    import s3fs

    with settled(s3_url, s3_options) as reader:
        writers[1].close()
        s3fs.S3FileSystem(**s3_options).rm(f"{s3_url}/rank_1", recursive=True)
        with pytest.raises(FileNotFoundError, match="rank_1"):
            reader.refresh()
        assert len(reader.trajectory_ids) == RANKS


@pytest.mark.parametrize("writers", [8], indirect=True)  # so many that a listing may have two pages
def test_a_run_of_many_files_is_asked_rank_by_rank(
    s3_url: str,
    s3_options: dict[str, Any],
    writers: list[TrajectoryReplayBuffer],
    requests: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened(s3_url, s3_options) as reader:
        reader.refresh()
        for page, costs in ((40, 2), (8, 2 + 8 + 1)):
            monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", str(page))
            reader._live._ask_each = False
            assert len(idle_costs(reader, requests)) == costs
            assert len(idle_costs(reader, requests)) == min(costs, 8 + 1)
        for rank in (0, 7):
            add_each(writers[rank], [8 + rank])
            assert reader.refresh()
            assert 8 + rank in shown(reader)


def test_a_server_that_refuses_the_listing_is_asked_rank_by_rank(
    s3_url: str, s3_options: dict[str, Any], writers: list[TrajectoryReplayBuffer], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        patch.object(ObjectStore, "versions", side_effect=OSError("NotImplemented: delimiter")),
        caplog.at_level(logging.WARNING),
        settled(s3_url, s3_options) as reader,
    ):
        add_each(writers[1], [RANKS])
        assert reader.refresh()
        assert not reader.refresh()
    warnings = [record.getMessage() for record in caplog.records if "asked one by one" in record.getMessage()]
    assert len(warnings) == 1
    assert "NotImplemented: delimiter" in warnings[0]


def test_the_listing_has_the_versions_that_each_rank_has(
    s3_url: str, s3_options: dict[str, Any], writers: list[TrajectoryReplayBuffer]
) -> None:
    writers[1].points.save(1, {"a": 1})
    run = open_directory(s3_url, **s3_options)
    listed = run.listed("rank_", 1)
    assert listed is not None
    assert sorted(listed) == [f"rank_{rank}" for rank in range(RANKS)]
    assert not [name for files in listed.values() for name in files if name.startswith("shards/")]
    for name, files in listed.items():
        for generation in range(4):
            asked = (["", segment_name(generation + 1), METADATA_NAME], segment_name(generation))
            assert version_in(files, *asked) == run.inner(name).version(*asked)
    newest = segment_name(max(generation for generation in range(9) if segment_name(generation) in listed["rank_0"]))
    assert version_in(listed["rank_0"], [METADATA_NAME], newest) == listed["rank_0"][METADATA_NAME]
