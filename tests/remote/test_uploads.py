"""Multipart uploads to S3, here for objects from one KB on."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from tests.support.witness import check_trajectory, witness
from trajstore._core.buffer.replay_buffer import TrajectoryReplayBuffer
from trajstore.remote import uploads
from trajstore.remote.answers import ConflictError
from trajstore.remote.object_store import ObjectStore

CONTENT = bytes(range(256)) * 44
"""11 KB, uploaded in three parts of at most 5 KB."""


@pytest.fixture
def objects(s3_url: str, s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 5 << 10)
    monkeypatch.setattr(uploads, "ONE_PUT", 1 << 10)
    monkeypatch.setattr(uploads, "PART", 5 << 10)
    return ObjectStore(s3_url, s3_options)


def begun(objects: ObjectStore) -> list[Any]:
    """Return the uploads neither completed nor aborted."""
    fs, root = objects._filesystem()
    return list(fs.call_s3("list_multipart_uploads", Bucket=fs.split_path(root)[0]).get("Uploads", []))


def test_in_parts_and_whole(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    fs, _ = objects._filesystem()
    calls: list[str] = []
    real = type(fs).call_s3

    def call(self: Any, name: str, **given: Any) -> Any:
        if given.get("Key", "").endswith("/a"):  # not the lock of another test, which may still be in flight
            calls.append(name)
        return real(self, name, **given)

    monkeypatch.setattr(type(fs), "call_s3", call)
    objects.put("a", CONTENT)
    assert calls.count("upload_part") == 3
    assert "put_object" not in calls
    assert objects.read("a") == CONTENT
    objects.put("a", b"small")
    assert objects.read("a") == b"small"
    assert begun(objects) == []


def test_conditions_hold_for_parts_too(objects: ObjectStore) -> None:
    assert objects.create("a", CONTENT)
    assert not objects.create("a", CONTENT[::-1])
    assert objects.read("a") == CONTENT
    with pytest.raises(ConflictError):
        objects.put_if("a", CONTENT[::-1], None)
    with pytest.raises(ConflictError):
        objects.put_if("a", CONTENT[::-1], '"another version"')
    assert objects.read("a") == CONTENT
    version = objects.version("a")
    again = objects.put_if("a", CONTENT[::-1], version)
    assert objects.read("a") == CONTENT[::-1]
    assert objects.version("a") == again != version
    with pytest.raises(ConflictError):
        objects.put_if("b", CONTENT, version)
    assert objects.put_if("b", CONTENT, None) == objects.version("b")
    assert begun(objects) == []


def test_what_fails_is_taken_back(
    objects: ObjectStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    objects.put("a", b"before")
    fs, _ = objects._filesystem()
    real, failing = type(fs).call_s3, ["upload_part"]

    def call(self: Any, name: str, **given: Any) -> Any:
        if name in failing and given.get("PartNumber", 2) == 2:
            raise OSError(errno.EIO, "the network is gone")
        return real(self, name, **given)

    monkeypatch.setattr(type(fs), "call_s3", call)
    with pytest.raises(OSError, match="network is gone"):
        objects.put("a", CONTENT)
    assert begun(objects) == []
    failing += ["abort_multipart_upload"]
    with pytest.raises(OSError, match="network is gone"):
        objects.put("a", CONTENT)
    assert "lifecycle rule" in caplog.text
    failing.clear()
    assert objects.read("a") == b"before"


def test_what_is_too_large_for_s3_is_refused(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "MOST_PARTS", 2)
    monkeypatch.setattr(uploads, "LARGEST_PART", 5 << 10)
    with pytest.raises(OSError, match="at most 10,240") as error:
        objects.put("a", CONTENT)
    assert error.value.errno == errno.EFBIG
    assert objects.url in str(error.value)


def test_a_store_of_objects_in_parts(objects: ObjectStore, s3_options: dict[str, Any]) -> None:
    url = objects.url
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=url, storage_options=s3_options) as buffer:
        buffer.add_trajectories([witness(key) for key in range(20)])
        buffer.flush()
        buffer.points.pin("all")
        buffer.evict([3])
    with TrajectoryReplayBuffer.open(url, storage_options=s3_options) as reader:
        keys = [check_trajectory(reader.get(number)) for number in reader.trajectory_ids.tolist()]
    assert keys == [key for key in range(20) if key != 3]
